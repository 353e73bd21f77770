"""Thread pool of the host, which divides index ranges, and the scope in which BLAS uses one thread.

Work runs without the GIL (numba kernels, BLAS calls); several Python threads may use the pool at
the same time.
"""

import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from math import ceil
from queue import SimpleQueue
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

from caffepy.device.control_groups import control_groups, read
from caffepy.device.recording import recorder

Piece = Callable[[int, int], Any]

ALIGNED = 64  # elements of a vector loop: four registers of 64 bytes hold as many float32


class _Call:
    """One `parallel` call: free threads take pieces in order, and the last one signals the end."""

    __slots__ = ("bounds", "done", "errors", "finished", "function", "taken")

    def __init__(self, function: Piece, bounds: list[int]) -> None:
        self.function = function
        self.bounds = bounds
        self.taken = count()
        self.done = count(1)
        self.finished = threading.Lock()
        self.finished.acquire()
        self.errors: dict[int, BaseException] = {}

    def work(self) -> None:
        bounds = self.bounds
        pieces = len(bounds) - 1
        while (i := next(self.taken)) < pieces:
            try:
                self.function(bounds[i], bounds[i + 1])
            except BaseException as error:  # raised again in the caller
                self.errors[i] = error
            if next(self.done) == pieces:
                self.finished.release()


_inside = threading.local()
"""`.yes` is set in a thread that runs a piece, `.share` in one that has a share."""
_lock = threading.Lock()
_queue: "SimpleQueue[_Call | None] | None" = None  # for the daemon threads of the pool
_threads = 0


def _available() -> int:
    """Return CAFFEPY_NUM_THREADS, else the number of cores that the process may use."""
    wanted = os.environ.get("CAFFEPY_NUM_THREADS", "")
    return int(wanted) if wanted.isdecimal() and int(wanted) > 0 else cores()


def cores() -> int:
    """Return the number of cores that the process may use: its affinity, and a container's limit of
    CPU time, rounded up.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity else os.cpu_count() or 1
    return min([count, *(max(1, ceil(limit)) for limit in _cpu_limits())])


def _cpu_limits() -> Iterator[float]:
    """Yield the limits of CPU time, in cores, of the process's control groups and those above."""
    for folder, is_first_version in control_groups("cpu"):
        files = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if is_first_version else ("cpu.max",)
        found = " ".join(read(folder / file) for file in files)
        if limit := re.fullmatch(r"(\d+)\s+([1-9]\d*)\s*", found):
            yield int(limit[1]) / int(limit[2])


def num_threads() -> int:
    """Return the number of threads, the calling one included, that work on one `parallel` call."""
    global _threads
    if not _threads:
        _threads = _available()
    return _threads


@contextmanager
def share(part: int, parts: int) -> Iterator[None]:
    """Limit the calling thread's `parallel` calls in the block to share `part` of `parts` of all
    threads; at least one.
    """
    _inside.share = part, parts
    try:
        yield
    finally:
        del _inside.share


@contextmanager
def alone() -> Iterator[None]:
    """Make the calling thread run its `parallel` calls in this block alone, without the pool."""
    before, _inside.yes = getattr(_inside, "yes", False), True
    try:
        yield
    finally:
        _inside.yes = before


def set_num_threads(n: int) -> None:
    """Use n threads from the next call on."""
    global _threads, _queue
    assert n > 0
    with _lock:
        if _queue is not None:
            for _ in range(_threads - 1):
                _queue.put(None)  # ends a thread
        _threads, _queue = n, None


def _forget_pool() -> None:
    """Drop the pool in a forked child, which has none of its parent's threads."""
    global _queue, _lock
    _queue, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)


def _serve(queue: "SimpleQueue[_Call | None]") -> None:
    _inside.yes = True
    with np.errstate(all="ignore"):  # as in the calling threads; overflows show in the loss
        while _work_on(queue):
            pass


def _work_on(queue: "SimpleQueue[_Call | None]") -> bool:
    """Wait for a call and work on it, which then lives no longer: it may hold large arrays."""
    if (call := queue.get()) is None:
        return False
    call.work()
    return True


def _get_queue() -> "SimpleQueue[_Call | None]":
    global _queue
    with _lock:
        if _queue is None:
            _queue = SimpleQueue()
            for i in range(1, num_threads()):
                name = f"caffepy-{i}"
                threading.Thread(target=_serve, args=(_queue,), name=name, daemon=True).start()
        return _queue


def _step(grain: int) -> int:
    return min(ALIGNED, 1 << grain.bit_length() - 1)


def ranges(n: int, grain: int = 1, most: int | None = None) -> int:
    """Return the number of ranges that `parallel` makes of range(n) in this thread."""
    if n <= grain:
        return min(n, 1)
    threads, (part, parts) = _threads or num_threads(), getattr(_inside, "share", (0, 1))
    share = max(1, threads // parts + int(part < threads % parts))
    step = _step(grain)
    pieces = min(share, n // (-(-grain // step) * step), n if most is None else most)
    return 1 if pieces <= 1 or getattr(_inside, "yes", False) else pieces


def num_ranges() -> int:
    """Return the number of ranges that `parallel` makes at most in this thread."""
    return ranges(1 << 30) if hasattr(_inside, "share") else _threads or num_threads()


def parallel_calls(function: Piece, n: int, grain: int = 1, most: int | None = None) -> None:
    """Call `parallel` with a function that computes by `recording.call` only."""
    if ranges(n, grain, most) == 1:
        function(0, n)
    else:
        parallel(function, n, grain, most)


def parallel(function: Piece, n: int, grain: int = 1, most: int | None = None) -> None:
    """Call function(lo, hi) on consecutive ranges that make up range(n), at least `grain` long, on
    all threads.

    There are as many ranges as `most` at most. Ranges begin at multiples of the largest power of
    two that is no longer than `grain` and 64, so that in loops over single elements each has the
    same place in a vector, however many threads there are. What depends on the range in another way
    (BLAS rounds by shapes) must be cut by the caller. Returns when all are done; the exception of
    the first range that has one is raised here. A call from inside a piece runs at once.
    """
    if keeps := recorder():
        keeps.parallel(function, n, grain, most)
        return
    pieces = ranges(n, grain, most)
    if pieces <= 1:
        if n > 0:
            function(0, n)
        return
    step = _step(grain)
    steps = n // step
    call = _Call(function, [*(steps * i // pieces * step for i in range(pieces)), n])
    queue = _queue or _get_queue()
    for _ in range(pieces - 1):
        queue.put(call)
    _inside.yes = True
    try:
        call.work()
    finally:
        _inside.yes = False
    call.finished.acquire()
    if call.errors:
        raise call.errors[min(call.errors)]


_blas: list[tuple[Any, Any]] | None = None  # how each library gets and sets its number of threads
_blas_depth = 0
_blas_before: list[int] = []  # the number of threads of each


class _BlasScope:
    def __enter__(self) -> None:
        global _blas, _blas_depth, _blas_before
        with _lock:
            _blas_depth += 1
            if _blas_depth == 1:
                if _blas is None:
                    found = ThreadpoolController().select(user_api="blas")
                    _blas = [_get_and_set(library) for library in found.lib_controllers]
                _blas_before = [get() for get, _ in _blas]
                for _, set_threads in _blas:
                    set_threads(1)

    def __exit__(self, *_: object) -> None:
        global _blas_depth
        with _lock:
            _blas_depth -= 1
            if _blas_depth == 0:
                for (_, set_threads), threads in zip(_blas or (), _blas_before, strict=True):
                    set_threads(threads)


def _get_and_set(library: Any) -> tuple[Callable[[], int], Callable[[int], Any]]:
    """Return what gets and sets a library's number of threads: OpenBLAS's own functions where
    possible, since threadpoolctl looks for them in each call, 2 us of each pass.
    """
    find = getattr(library, "_get_symbol", None)
    if find and library.internal_api == "openblas" and library.threading_layer == "pthreads":
        own = find("openblas_get_num_threads"), find("openblas_set_num_threads")
        if all(own):
            return own
    return library.get_num_threads, library.set_num_threads


_BLAS_SCOPE = _BlasScope()


def blas_scope() -> AbstractContextManager[None]:
    """Make BLAS use one thread until the last of the scopes, which nest and overlap, ends."""
    return _BLAS_SCOPE
