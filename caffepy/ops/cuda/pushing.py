"""All-reduce by the GPUs' copy engines, which leaves the multiprocessors to what runs beside it; see kernels/copies.cu.

Of each range every rank owns a share. It gets the others' values of its share, adds them up, and gives the mean to all.
All copies write into the memory of another GPU, for which peer access must be enabled.
"""

from collections.abc import Callable, Sequence
from typing import Any

import cupy
import numpy as np

from caffepy.ops.cuda.compiler import kernel
from caffepy.ops.cuda.schedule import pointers

Array = Any  # cupy.ndarray

THREADS, BLOCKS = 512, 32
"""Of the kernel that adds up: few, since it runs beside others and waits for memory anyway."""

ALIGNMENT = 32
"""Elements to a multiple of which shares begin within a range: 128 bytes, a line of the cache."""

PACK = 4


class PushedMean:
    """One rank's side; made on the rank's device, and given to its current stream by `run` and `finish`.

    `flat` is the rank's array of float32, `ranges` the parts (start, stop) of it that will be reduced, the same for all
    ranks; each starts and ends at a multiple of 16 elements. `exchange` gives every rank what all ranks have. Waits end
    when the int at the host's address `given_up` is not 0. All ranks must call `run` and `finish` in the same order.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        flat: Array,
        ranges: Sequence[tuple[int, int]],
        exchange: Callable[[Any], list[Any]],
        given_up: int,
    ) -> None:
        self._rank, self._size = rank, size
        self._places: dict[tuple[int, int], int] = {}
        room = 0
        for start, stop in ranges:
            self._places[start, stop] = room
            room += (size - 1) * self._share(start, stop)
        arrivals, self._count = cupy.zeros(size, np.uint64), cupy.zeros(1, np.uint64)
        rows = cupy.empty(max(room, 1), np.float32)
        cupy.cuda.Device().synchronize()  # nobody uses that memory any more
        self._flats: Sequence[Array] = exchange(flat)
        self._rooms: Sequence[Array] = exchange(rows)
        self._arrivals: Sequence[Array] = exchange(arrivals)
        self._arrivals_of = pointers(self._arrivals)
        self._given_up = np.uint64(given_up)
        self._meet, self._mean = kernel("copies", "meet"), kernel("copies", "mean")
        self._others = [(rank + i) % size for i in range(1, size)]  # so that each gets from one at a time

    def _share(self, start: int, stop: int) -> int:
        return -(-(stop - start) // (self._size * ALIGNMENT)) * ALIGNMENT

    def _owned(self, rank: int, start: int, stop: int) -> tuple[int, int]:
        share = self._share(start, stop)
        return min(start + rank * share, stop), min(start + (rank + 1) * share, stop)

    def run(self, start: int, stop: int) -> None:
        """Make this range the mean of all ranks'; it is in all ranks' arrays after `finish`."""
        place, mine = self._places[start, stop], self._flats[self._rank]
        for other in self._others:
            first, last = self._owned(other, start, stop)
            row = self._rank - (self._rank > other)
            self._push(mine[first:last], self._rooms[other], place + row * (last - first))
        self._wait()
        first, last = self._owned(self._rank, start, stop)
        packs = (last - first) // PACK
        if packs:
            arguments = (
                mine[first:last],
                self._rooms[self._rank][place:],
                np.int64(packs),
                np.int32(self._size - 1),
                np.int32(self._rank),
                np.float32(1 / self._size),
            )
            self._mean((min(BLOCKS, -(-packs // THREADS)),), (THREADS,), arguments)
            for other in self._others:
                self._push(mine[first:last], self._flats[other], first)

    def finish(self) -> None:
        """Let what follows wait for what the other ranks give to this one."""
        self._wait()

    def _wait(self) -> None:
        arguments = (np.int32(self._rank), np.int32(self._size), self._arrivals_of, self._count, self._given_up)
        self._meet((1,), (-(-self._size // 32) * 32,), arguments)

    def _push(self, source: Array, to: Array, at: int) -> None:
        if source.size:
            cupy.cuda.runtime.memcpyAsync(
                to.data.ptr + at * to.itemsize,
                source.data.ptr,
                source.nbytes,
                cupy.cuda.runtime.memcpyDefault,
                cupy.cuda.get_current_stream().ptr,
            )
