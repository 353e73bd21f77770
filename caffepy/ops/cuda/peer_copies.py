"""Launches around copies between GPUs that copy engines make (kernels/peer_copies.cu)."""

from collections.abc import Sequence

import cupy
import numpy as np

from caffepy.ops.cuda.compiler import kernel
from caffepy.ops.cuda.launch import Array
from caffepy.ops.cuda.schedule import pointers

THREADS, WARP, BLOCKS = 512, 32, 128

PATIENCE = 10**9
"""Nanoseconds that `wait` goes on after an abort."""


class PeerCopiesRun:
    """One rank's launches; made on the rank's device, with an inbox of `room` floats of each other
    rank.

    A wait ends when the int at host address `flag` is not 0. All ranks must make the same launches.
    """

    def __init__(self, rank: int, ranks: int, room: int, signals: int, flag: int) -> None:
        self.inbox = cupy.empty((ranks - 1, room), np.float32)
        self.arrived = cupy.zeros((ranks, signals), np.uint64)
        self._given = cupy.zeros(signals + 1, np.uint64)
        self._rank, self._signals = (np.int32(rank), np.int32(ranks)), np.int32(signals)
        self._scale, self._flag = np.float32(1 / ranks), np.uint64(flag)
        names = "give_signal", "wait_for_signal", "add_copies"
        self._signal, self._wait, self._add = (kernel("peer_copies", name) for name in names)

    def connect(self, arrived: Sequence[Array]) -> None:
        """Set `arrived` of all ranks."""
        self._arrived = pointers(arrived)

    def _counters(self, which: int) -> tuple[object, ...]:
        return self._arrived, self._given, self._signals, np.int32(which)

    def signal(self, which: int) -> None:
        """Give the others a signal, after what the current stream was given before."""
        arguments = (*self._rank, *self._counters(which))
        self._signal((1,), (WARP,), arguments)

    def wait(self, which: int) -> None:
        """Wait until all others have given this signal as often as this rank has."""
        arguments = (*self._rank, *self._counters(which), self._flag, np.uint64(PATIENCE))
        self._wait((1,), (WARP,), arguments)

    def add(self, own: Array, first: int, count: int, place: int) -> None:
        """Make `count` floats of `own` the mean of all ranks', which lie from `place` on."""
        floats = own, np.int64(first), np.int64(count)
        box = self.inbox, np.int64(self.inbox.shape[1]), np.int64(place)
        arguments = (*self._rank, *floats, *box, self._scale)
        self._add((BLOCKS,), (THREADS,), arguments)
