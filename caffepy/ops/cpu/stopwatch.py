"""How long operations take on the device."""

from itertools import pairwise
from time import perf_counter


class Stopwatch:
    """Times between marks that are set among the operations."""

    def __init__(self) -> None:
        self._marks: list[float] = []

    def hold(self, milliseconds: float) -> None:
        """Let a device begin with what follows later by this, so that it need not wait for the host
        in between.
        """

    def mark(self) -> None:
        self._marks.append(perf_counter() * 1000)

    def read(self) -> list[float]:
        marks, self._marks = self._marks, []
        return [after - before for before, after in pairwise(marks)]
