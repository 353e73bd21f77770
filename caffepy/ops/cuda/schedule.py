"""The executor of all-reduce schedules on GPUs: a kernel on each, over peer memory; see kernels/schedule.cu."""

from collections.abc import Sequence
from typing import Any

import cupy
import numpy as np

from caffepy.ops.cuda.compiler import kernel

Array = Any  # cupy.ndarray

BLOCKS, THREADS = 64, 512
CHUNK = 32 << 10
"""Elements that a block moves at a time; smaller ones for small buffers, so that all blocks have some."""

NONE, ADD, COPY = range(3)


class ScheduleRun:
    """One rank's launches of one schedule; made on the rank's device.

    `actions[level]` is (operation, source, waits), the waits (rank, level) that come before it; one more entry at the
    end has the waits after which the rank's buffer may be written again. All ranks must launch it the same number of
    times.
    """

    def __init__(
        self, rank: int, size: int, actions: Sequence[tuple[int, int, Sequence[tuple[int, int]]]], given_up: int
    ) -> None:
        self.rank, self.size = rank, size
        self.levels = len(actions) - 1
        self.progress = cupy.zeros(BLOCKS, np.uint64)
        self._base = cupy.zeros(BLOCKS, np.uint64)
        rows, waits = [], []
        for operation, source, before in actions:
            rows.append((operation, source, len(waits), len(before)))
            waits += before
        self._actions = cupy.asarray(np.array(rows, np.int32))
        self._waits = cupy.asarray(np.array(waits or [(0, 0)], np.int32))
        self._given_up = np.uint64(given_up)  # the address of a word in the host's memory
        self._kernel = kernel("schedule", "run_schedule")
        self._progress_of: Array = None

    def connect(self, progress: Sequence[Array]) -> None:
        """Know the progress of all ranks."""
        self._progress_of = cupy.asarray(np.array([p.data.ptr for p in progress], np.uint64))

    def pointers(self, buffers: Sequence[Array]) -> Array:
        """What `run` takes for the buffers of all ranks."""
        return cupy.asarray(np.array([b.data.ptr for b in buffers], np.uint64))

    def run(self, buffers: Array, count: int) -> None:
        """Run on the first `count` floats of the buffers, on the current stream."""
        chunk = max(256, min(CHUNK, -(-count // BLOCKS // 4) * 4))
        arguments = (
            np.int32(self.rank),
            buffers,
            self._progress_of,
            self._base,
            self._actions,
            self._waits,
            np.int32(self.levels),
            np.int64(count),
            np.int64(chunk),
            self._given_up,
        )
        self._kernel((BLOCKS,), (THREADS,), arguments)
