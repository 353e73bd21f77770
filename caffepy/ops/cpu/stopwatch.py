"""The stopwatch of operations, by the host's clock."""

from itertools import pairwise
from time import perf_counter


class Stopwatch:
    def __init__(self) -> None:
        self._marks: list[float] = []

    def hold(self, milliseconds: float) -> None:
        """Nothing: the CPU never waits for the host."""

    def mark(self) -> None:
        self._marks.append(perf_counter() * 1000)

    def read(self) -> list[float]:
        marks, self._marks = self._marks, []
        return [after - before for before, after in pairwise(marks)]
