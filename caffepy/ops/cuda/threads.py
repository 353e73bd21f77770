"""The names of ops.cpu that share work out over host threads. A GPU has threads of its own, so
these do nothing more.

They exist so that nets and solvers enter the same scopes on every device.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Piece = Callable[[int, int], Any]


def num_threads() -> int:
    """One: a single host thread gives a GPU its work."""
    return 1


def set_num_threads(n: int) -> None:
    """Nothing: how many threads a kernel has follows from its shapes."""
    assert n > 0


def parallel(function: Piece, n: int, grain: int = 1, most: int | None = None) -> None:
    """Call function(0, n) if n is not 0: what it launches is parallel already."""
    if n > 0:
        function(0, n)


@contextmanager
def blas_scope() -> Iterator[None]:
    """Nothing: no host BLAS works for a GPU net."""
    yield
