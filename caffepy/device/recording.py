"""Recording of the calls that a thread makes on the CPU, for a graph that replays them.

While a thread records, `call` and `threads.parallel` make their calls through its recorder, which
keeps them. What is computed otherwise is not seen: only code that computes by these alone, with
the same arguments each time, may run within `recording`.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

Array = NDArray[Any]


class Recorder(Protocol):
    """A recorder of a thread's calls; it makes them, too."""

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        """Call a compiled loop, or a ufunc of numpy with its output last."""

    def parallel(
        self, function: Callable[[int, int], Any], n: int, grain: int, most: int | None
    ) -> None:
        """Call a function by `threads.parallel`."""

    def check(self, found: Any, check: Callable[[], object]) -> None:
        """Call `check`; a replay does so if the first element of `found`, float64, is not 0."""

    def seed(self, source: "Seeds", into: Any) -> None:
        """Write a new seed into an int64 array ()."""

    @property
    def temporaries(self) -> "Temporaries":
        """Memory of temporary arrays."""


class Seeds(Protocol):
    """The source of seeds."""

    random: Any  # has a `state` that can be read and set

    def draw_seed(self) -> int:
        """Return the next seed."""


_thread = threading.local()
"""`.recorder` is that of a thread, None while it makes a call."""
_recorders = 0  # threads that record
_lock = threading.Lock()


def recorder() -> Recorder | None:
    """Return what keeps the calls of this thread, if anything does."""
    return getattr(_thread, "recorder", None) if _recorders else None


def call(function: Callable[..., Any], *args: Any) -> None:
    """Call a compiled loop, or a ufunc of numpy with its output last, which returns nothing else.

    A thread that records keeps the call with these very arrays and numbers.
    """
    if _recorders and (keeps := recorder()):
        keeps.call(function, *args)
    else:
        function(*args)


def draw_seed(source: Seeds, into: Any) -> None:
    """Write a new seed into an int64 array (), again in each replay of a thread that records."""
    if keeps := recorder():
        keeps.seed(source, into)
    else:
        into[()] = source.draw_seed()


class Temporaries:
    """Memory of temporary arrays, for recordings that are never replayed at the same time: those
    of a net. What one call has released another gets, also one of another recording.
    """

    def __init__(self) -> None:
        self._free: list[Array] = []
        self._taken: dict[int, Array] = {}  # by address

    @property
    def size(self) -> int:
        """Bytes of memory, of which those that were never written are not resident."""
        return sum(memory.nbytes for memory in (*self._free, *self._taken.values()))

    def take(self, shape: Sequence[int], dtype: DTypeLike) -> Array:
        """Return an array whose values are any."""
        dtype = np.dtype(dtype)
        size = prod(shape) * dtype.itemsize
        fitting = [i for i, memory in enumerate(self._free) if memory.nbytes >= size]
        if fitting:
            memory = self._free.pop(min(fitting, key=lambda i: self._free[i].nbytes))
        else:
            memory = np.empty(1 << max(size - 1, 1).bit_length(), np.uint8)
        array: Array = memory[:size].view(dtype).reshape(shape)
        self._taken[array.ctypes.data] = memory
        return array

    def release(self, array: Array) -> None:
        """Take back what `take` returned."""
        self._free.append(self._taken.pop(array.ctypes.data))


def temporary(shape: Sequence[int], dtype: DTypeLike) -> Array:
    """Return an array whose values are any, for calls that are made before it is released."""
    keeps = recorder()
    return keeps.temporaries.take(shape, dtype) if keeps else np.empty(shape, dtype)


def release(array: Array) -> None:
    """Release a `temporary` array: what this thread records later may use its memory."""
    if keeps := recorder():
        keeps.temporaries.release(array)


@contextmanager
def recording(keeps: Recorder | None) -> Iterator[None]:
    """Record what this thread calls in the block in `keeps`; None: nothing is recorded."""
    global _recorders
    before = getattr(_thread, "recorder", None)
    with _lock:
        _recorders += 1
    _thread.recorder = keeps
    try:
        yield
    finally:
        _thread.recorder = before
        with _lock:
            _recorders -= 1
