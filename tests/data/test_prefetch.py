"""mapped: in order, by several threads, never far ahead, and errors where they belong."""

import threading
from collections.abc import Iterator

import pytest

from caffepy.data.prefetch import AHEAD, mapped


def test_results_come_in_order_from_several_threads() -> None:
    both = threading.Barrier(2)

    def square(i: int) -> int:
        if i < 2:
            both.wait(60)
        return i * i

    assert list(mapped(square, range(100), threads=2)) == [i * i for i in range(100)]


def test_only_some_are_taken_ahead() -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for i in range(1000):
            taken.append(i)
            yield i

    results = mapped(lambda i: i, items(), threads=3)
    for i in range(20):
        assert next(results) == i
        assert len(taken) <= i + 2 + 3 * AHEAD
    results.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("caffepy-ahead")]


def test_an_error_comes_after_the_results_before_it() -> None:
    results = mapped(lambda i: 1 // (5 - i), range(100), threads=2)
    assert [next(results) for _ in range(5)] == [0, 0, 0, 0, 1]
    with pytest.raises(ZeroDivisionError):
        next(results)
