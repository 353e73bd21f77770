"""The one-shot all-reduce: a kernel on each GPU, over peer memory (kernels/one_shot.cu)."""

from collections.abc import Sequence
from itertools import accumulate

import cupy
import numpy as np

from caffepy.ops.cuda.compiler import kernel
from caffepy.ops.cuda.launch import Array
from caffepy.ops.cuda.schedule import pointers

THREADS, MOST_BLOCKS = 512, 256


class OneShotRun:
    """One rank's launches over `chunks` (start, size) of its flat `floats`, the same chunks in all
    ranks; made on the rank's device.

    A wait ends when the int at host address `abort_flag` is not 0. All ranks must make the same
    launches.
    """

    def __init__(
        self, rank: int, ranks: int, floats: Array, chunks: Sequence[tuple[int, int]], flag: int
    ) -> None:
        *places, room = accumulate((-(-size // 4) * 4 for _, size in chunks), initial=0)
        rows = [(start, place, n) for (start, n), place in zip(chunks, places, strict=True)]
        self.inbox = cupy.zeros((2, ranks - 1, room), np.float32)
        self.arrived = cupy.zeros((ranks, len(chunks)), np.uint64)
        self._turns = [cupy.zeros(len(chunks), np.uint64) for _ in range(2)]  # sent, added up
        self._chunks = cupy.asarray(np.array(rows, np.int64))
        self._own = np.int32(rank), np.int32(ranks), floats
        self._room, self._scale = np.int64(room), np.float32(1 / ranks)
        self._flag = np.uint64(flag)
        self._kernel = kernel("one_shot", "one_shot")

    def connect(self, inboxes: Sequence[Array], arrived: Sequence[Array]) -> None:
        """Set `inbox` and `arrived` of all ranks."""
        self._theirs = pointers(inboxes), pointers(arrived)

    def run(self, first: int, stop: int, adds: bool) -> None:
        """Write chunks `first` to `stop` - 1; with `adds` make all chunks the mean of all ranks."""
        count = len(self._chunks)
        numbers = [np.int32(number) for number in (count, first, stop, adds)]
        arrays = (*self._own, *self._theirs, *self._turns, self._chunks)
        grid = min(count if adds else stop - first, MOST_BLOCKS)
        arguments = (*arrays, *numbers, self._room, self._scale, self._flag)
        self._kernel((grid,), (THREADS,), arguments)
