"""Compilation of the loops of this back end: by numba, without the GIL, at the first call, cached
on disk.

Kernels work on a range [lo, hi) of their outer index, so that `threads.parallel` can divide it.
They call no other kernels, but functions that are `inlined`.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import numba
from numba.core import environment, event
from numba.core.caching import FunctionCache
from numba.core.compiler_lock import global_compiler_lock
from numba.core.runtime.nrt import rtsys

log = logging.getLogger(__name__)

NO_CACHE = (
    "Compiled CPU kernels cannot be kept (%s), so every start compiles anew; "
    "set NUMBA_CACHE_DIR to a folder"
)
DAMAGED = "Files of the compiled CPU kernels in %s are damaged (%s) and are made anew"

# All of fastmath but "nnan" and "ninf": NaNs and infinities must not be lost.
FASTMATH = {"contract", "reassoc", "nsz", "arcp"}

# For code whose rounding matters: terms stay in the order written.
EXACT = {"contract"}


def compile_ahead() -> AbstractContextManager[None]:
    return nullcontext()


def inlined(function: Callable[..., Any], fastmath: set[str] = FASTMATH) -> Any:
    """Compile a function as a part of each kernel that calls it.

    Otherwise a kernel that was just compiled calls another compilation of the function than one
    that is loaded from the cache, and the two may round differently.
    """
    return numba.njit(nogil=True, error_model="numpy", fastmath=fastmath, forceinline=True)(
        function
    )


class Kernel:
    """A loop, of which numba hears at its first use: that takes a millisecond, and there are more
    than a hundred. Its attributes are those of numba's dispatcher.
    """

    def __init__(self, function: Callable[..., Any], fastmath: set[str]) -> None:
        self._function, self._fastmath = function, fastmath
        self.__name__ = function.__name__

    @cached_property
    def dispatcher(self) -> Any:
        """numba's function, which compiles for each set of types."""
        compiled = numba.njit(nogil=True, error_model="numpy", fastmath=self._fastmath)(
            self._function
        )
        try:
            compiled._cache = _Cache(self._function)  # type: ignore[attr-defined, no-untyped-call]
        except RuntimeError as error:
            _warn(NO_CACHE, str(error))
        return compiled

    def __call__(self, *args: Any) -> Any:
        return self.dispatcher(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dispatcher, name)


def kernel(function: Callable[..., Any], fastmath: set[str] = FASTMATH) -> Any:
    """Compile a loop at its first call with a set of types; later processes load it from the cache.

    The cache lies beside the module or among the user's files (NUMBA_CACHE_DIR chooses another
    place); where none can be written, each process compiles.
    """
    return Kernel(function, fastmath)


class _Cache(FunctionCache):
    """numba's cache of one function; a file that cannot be read or written is ignored."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        found: Any = None
        try:
            # Not the whole of `target_context.refresh()`, which imports all that numba can compile,
            # 0.2 s: a compilation does that by itself.
            rtsys.initialize(target_context)
            with _without_numbas_modules():
                found = self._load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        except Exception as error:  # damaged pickles fail in many ways
            _warn(DAMAGED, self.cache_path, repr(error))
            with suppress(OSError):
                self.flush()  # type: ignore[no-untyped-call]
        if found is None:
            _do_without_scipy()
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]
        except Exception as error:
            _warn(NO_CACHE, str(error))


_said: set[str] = set()


def _warn(message: str, *values: str) -> None:
    """Log a message once, whatever its values."""
    if message not in _said:
        _said.add(message)
        log.warning(message, *values)


@contextmanager
def _without_numbas_modules() -> Iterator[None]:
    """Block in which what is loaded imports no module of numba's whose functions are part of it.

    numba makes an Environment with the globals of each such module, for code that calls Python,
    which kernels do not. The modules import others, 0.15 s.
    """

    def rebuild(module: str, constants: list[Any], name: str) -> Any:
        if module in sys.modules or not module.startswith("numba."):
            return real(module, constants, name)  # type: ignore[no-untyped-call]
        made = environment.lookup_environment(name)  # type: ignore[no-untyped-call]
        if made is None:
            made = environment.Environment({"__name__": module})
            made.consts[:], made.env_name = constants, name
            environment.Environment._memo[name] = made
        return made

    with global_compiler_lock:
        real, environment._rebuild_env = environment._rebuild_env, rebuild
        try:
            yield
        finally:
            environment._rebuild_env = real


def _do_without_scipy() -> None:
    """Import the module of numba's that would import scipy.linalg, 0.1 s, to see whether np.cov can
    be compiled: by the first kernel that a process compiles, and none of ours uses it.
    """
    if "scipy.linalg" in sys.modules or "numba.np.arraymath" in sys.modules:
        return
    sys.modules["scipy.linalg"] = None  # type: ignore[assignment] # cannot be imported
    try:
        from numba.np import arraymath
    finally:
        del sys.modules["scipy.linalg"]
    arraymath._HAVE_BLAS = find_spec("scipy") is not None  # np.dot imports it where it is used


class _FirstCompilation(event.Listener):
    """Listener that logs once why the first iteration takes its time."""

    said = False

    def on_start(self, event_: Any) -> None:
        if not self.said:
            self.said = True
            log.info(
                "Compiling CPU kernels: "
                "the first run of an installation takes 10 to 30 seconds longer"
            )

    def on_end(self, event_: Any) -> None:
        pass


event.register("numba:compile", _FirstCompilation())  # type: ignore[no-untyped-call]
