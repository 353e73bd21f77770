"""How the loops of this back end are compiled: numba, without the GIL, cached on disk, at the first call.

Kernels work on a range [lo, hi) of their outer index, so that `threads.parallel` can share them out.
"""

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import numba
from numba.core import event

log = logging.getLogger(__name__)

# Everything of fastmath except the licence to assume that there are no NaNs and infinities: they must be seen.
FASTMATH = {"contract", "reassoc", "nsz", "arcp"}


# For what is rounded on purpose: terms stay in the order written.
EXACT = {"contract"}


def kernel(function: Callable[..., Any], fastmath: set[str] = FASTMATH) -> Any:
    """Compile a loop at its first call with a set of types; later processes load it from the cache.

    The cache lies beside the module or among the user's files (NUMBA_CACHE_DIR chooses another place); where none can
    be written, each process compiles.
    """
    compiled = numba.njit(nogil=True, error_model="numpy", fastmath=fastmath)(function)
    try:
        compiled.enable_caching()
    except RuntimeError:
        _warn_of_no_cache()
    return compiled


@cache
def _warn_of_no_cache() -> None:
    log.warning("Compiled CPU kernels cannot be kept, so every start compiles anew; set NUMBA_CACHE_DIR to a folder")


class _FirstCompilation(event.Listener):
    """Says once why the first iteration takes its time."""

    said = False

    def on_start(self, event_: Any) -> None:
        if not self.said:
            self.said = True
            log.info("Compiling CPU kernels: the first run of an installation takes 10 to 30 seconds longer")

    def on_end(self, event_: Any) -> None:
        pass


event.register("numba:compile", _FirstCompilation())  # type: ignore[no-untyped-call]
