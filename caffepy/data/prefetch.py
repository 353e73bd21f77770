"""Map a function over items on several threads, a few items ahead of the consumer."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from caffepy.device.threads import cores

T = TypeVar("T")
R = TypeVar("R")

AHEAD = 4  # the most results a thread that wait for the consumer


def mapped(
    function: Callable[[T], R], items: Iterable[T], threads: int | None = None
) -> Generator[R, None, None]:
    """Yield the function of each item, in order. The items are drawn on the caller's thread.

    `threads` defaults to the number of cores that the process may use.
    """
    threads = threads or cores()
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
