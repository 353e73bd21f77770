"""The executor of all-reduce schedules: a kernel on each GPU, over peer memory
(kernels/schedule.cu).
"""

from collections.abc import Sequence

import cupy
import numpy as np

from caffepy.ops.cuda.compiler import kernel
from caffepy.ops.cuda.launch import Array

THREADS = 512
BLOCKS, MOST_BLOCKS = 48, 256
"""Blocks of an action, and most blocks of all actions of a rank: no more than a GPU runs at a time.
"""

CHUNK = 16 << 10
"""Elements that a block moves at a time: 64 KiB."""

LEAST_CHUNK, ALIGNMENT = 1 << 10, 32

NONE, ADD, COPY = range(3)

Waits = Sequence[tuple[int, int]]
Step = tuple[int, int, int, Waits, bool]
"""(level, operation, source, waits, True if it completes the sum); a wait is (rank, level)."""


def chunk_of(count: int, blocks: int) -> int:
    """Return the elements of a chunk of a buffer, such that all blocks get equally many."""
    rounds = max(1, -(-count // (blocks * CHUNK)))
    return max(LEAST_CHUNK, -(-count // (rounds * blocks * ALIGNMENT)) * ALIGNMENT)


class ScheduleRun:
    """One rank's launches of one schedule; made on the rank's device.

    `steps` are the rank's, `last` the waits after which its buffer may be written again, `most` the
    largest number of steps of any rank. A wait ends when the int at host address `abort_flag` is
    not 0. All ranks must launch it equally often, with the same counts.
    """

    def __init__(
        self, rank: int, levels: int, steps: Sequence[Step], last: Waits, most: int, abort_flag: int
    ) -> None:
        self._rank, self._levels = rank, levels
        self._blocks = max(1, min(BLOCKS, MOST_BLOCKS // max(1, most)))
        self._grid = len(steps) * self._blocks + 2
        self.progress = cupy.zeros((levels + 2, self._blocks), np.uint64)
        rows, waits = [], list[tuple[int, int]]()
        for level, operation, source, before, total in (*steps, (0, NONE, rank, last, False)):
            rows.append((operation, source, level, len(waits), len(before), int(total)))
            waits += before
        self._actions = cupy.asarray(np.array(rows, np.int32))
        self._waits = cupy.asarray(np.array(waits or [(0, 0)], np.int32))
        self._abort_flag = np.uint64(abort_flag)
        self._kernel = kernel("schedule", "run_schedule")
        self._progress_of: Array = None

    def connect(self, progress: Sequence[Array]) -> None:
        """Set the progress counters of all ranks."""
        self._progress_of = pointers(progress)

    def run(self, buffers: Array, count: int, scale: float = 1.0) -> None:
        """Run on the first `count` floats of the buffers (`pointers`); complete sums are multiplied
        by `scale`.
        """
        arrays = (buffers, self._progress_of, self._actions, self._waits)
        sizes = (np.int32(self._blocks), np.int32(self._levels), np.int64(count))
        chunk, factor = np.int32(chunk_of(count, self._blocks)), np.float32(scale)
        arguments = (np.int32(self._rank), *arrays, *sizes, chunk, factor, self._abort_flag)
        self._kernel((self._grid,), (THREADS,), arguments)


def pointers(arrays: Sequence[Array]) -> Array:
    """Return the addresses of the arrays of all ranks, as an array of the current device."""
    return cupy.asarray(np.array([array.data.ptr for array in arrays], np.uint64))
