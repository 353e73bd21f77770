"""The stopwatch of operations, by CUDA events."""

from itertools import pairwise
from typing import Any

import cupy
import numpy as np

from caffepy.ops.cuda.compiler import kernel

TICKS = 2_000_000
"""About this many ticks of a device's clock make a millisecond."""


class Stopwatch:
    def __init__(self) -> None:
        self._events: list[Any] = []
        self._count = 0

    def hold(self, milliseconds: float) -> None:
        kernel("spin", "spin")((1,), (1,), (np.int64(milliseconds * TICKS),))

    def mark(self) -> None:
        if self._count == len(self._events):
            self._events.append(cupy.cuda.Event())
        self._events[self._count].record(cupy.cuda.get_current_stream())
        self._count += 1

    def read(self) -> list[float]:
        marks, self._count = self._events[: self._count], 0
        if marks:
            marks[-1].synchronize()
        return [float(cupy.cuda.get_elapsed_time(*pair)) for pair in pairwise(marks)]
