"""A function of many items, computed by several threads a little ahead of who takes the results."""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

AHEAD = 4  # results a thread that may wait to be taken


def mapped(
    function: Callable[[T], R], items: Iterable[T], threads: int | None = None
) -> Generator[R, None, None]:
    """The function of each item, in the order of the items, which are taken one after the other by
    the caller.

    `threads` is how many compute, by default as many as the process may use cores. Only some
    results wait at a time.
    """
    threads = threads or _cores()
    waiting: deque[Future[R]] = deque()
    with ThreadPoolExecutor(threads, "caffepy-ahead") as pool:
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) > AHEAD * threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
