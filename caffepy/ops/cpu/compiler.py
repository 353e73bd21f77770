"""How the loops of this back end are compiled: numba, without the GIL, cached on disk, at the first call.

Kernels work on a range [lo, hi) of their outer index, so that `threads.parallel` can share them out.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numba
from numba.core import event

log = logging.getLogger(__name__)

# Everything of fastmath except the licence to assume that there are no NaNs and infinities: they must be seen.
FASTMATH = {"contract", "reassoc", "nsz", "arcp"}


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a loop at its first call with a set of types; later processes load it from the cache.

    The cache lies beside the module or among the user's files; where neither can be written, each process compiles.
    """
    compiled = numba.njit(nogil=True, error_model="numpy", fastmath=FASTMATH)(function)
    with suppress(RuntimeError):
        compiled.enable_caching()
    return compiled


class _FirstCompilation(event.Listener):
    """Says once why the first iteration takes its time."""

    said = False

    def on_start(self, event_: Any) -> None:
        if not self.said:
            self.said = True
            log.info("Compiling CPU kernels (once per machine)")

    def on_end(self, event_: Any) -> None:
        pass


event.register("numba:compile", _FirstCompilation())  # type: ignore[no-untyped-call]
