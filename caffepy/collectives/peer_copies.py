"""All-reduce of large gradients, and all-gather of factors, by copy engines: GPUs copy into each
other's memory without their multiprocessors, which only add up.

Each rank adds up a share of a bucket, which comes from all others and goes back to them:

    GPU 0   backward .......................................... | update
            "sync"      copy share 1 -> 1, signal
            "factors"                        wait, add share 0, copy it -> 1, signal
    GPU 1   backward .......................................... | update
            "sync"        copy share 0 -> 0, signal
            "factors"                        wait, add share 1, copy it -> 0, signal

Others no longer read what is copied over once they have begun the iteration: before its first copy
a rank signals that, and waits for the signals of all. `ops/cuda/kernels/peer_copies.cu` has the
signals and the sums.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from caffepy.collectives import peers
from caffepy.collectives.buckets import Bucket
from caffepy.device.blob import Array
from caffepy.device.gpus import import_cupy

MOST = 512 << 20
"""Most bytes of a GPU's memory for gradients of others."""

BEGUN, GATHERED, FIRST_BUCKET = range(3)
"""Signals: an iteration has begun, factors have come; then two of each bucket: it has come, its
share has come back.
"""


class Piece(NamedTuple):
    """A range of the flat gradients, and its place in the inbox of the rank that adds it up: place
    and start are alike modulo 4.
    """

    start: int
    stop: int
    place: int


def _share(start: int, stop: int, ranks: int) -> int:
    """Return the elements of a range that a rank adds up at most, a multiple of 4."""
    return -(-(stop - start) // (4 * ranks)) * 4


def shares(bucket: Bucket, ranks: int, room: int) -> list[list[Piece]]:
    """Return the pieces of a bucket that each rank adds up, from `room` on, a multiple of 4."""
    found: list[list[Piece]] = []
    for rank in range(ranks):
        found.append([])
        at = room
        for start, stop in bucket.ranges:
            size = _share(start, stop, ranks)
            first, end = (min(stop, start + k * size) for k in (rank, rank + 1))
            if first < end:
                found[-1].append(Piece(first, end, at + first % 4))
                at += -(-(first % 4 + end - first) // 4) * 4
    return found


def room_of(parts: Sequence[Bucket], ranks: int) -> list[int]:
    """Return where each bucket begins in the part of an inbox that is for one rank, and the number
    of elements of that part.
    """
    rooms = [0]
    for bucket in parts:
        rooms.append(rooms[-1] + sum(_share(*each, ranks) + 4 for each in bucket.ranges))
    return rooms


def copied(parts: Sequence[Bucket], without: Sequence[Bucket], ranks: int) -> list[Bucket]:
    """Return the buckets that copy engines exchange: all but those in `without`, or none if their
    inboxes take more than MOST.
    """
    found = [bucket for bucket in parts if bucket.ranges and bucket not in without]
    *_, room = room_of(found, ranks)
    return found if 4 * room * (ranks - 1) <= MOST else []


class PeerCopies:
    """One rank's side of the all-reduce of these buckets of its flat gradients, and of all-gathers.

    A wait ends when the int at host address `abort_flag` is not 0. All ranks must make the same
    calls.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        all_gather: peers.Gather,
        device: Any,
        diff: Array,
        parts: Sequence[Bucket],
        abort_flag: int,
    ) -> None:
        from caffepy.ops.cuda.peer_copies import PeerCopiesRun

        self._rank, self._others = rank, [(rank + k) % size for k in range(1, size)]
        self._diff, self._all_gather = diff, all_gather
        self._cuda = import_cupy().cuda
        self._begun, self._back = False, 0  # the last signal of a share that comes back
        *rooms, room = room_of(parts, size)
        self._pieces = {
            bucket: shares(bucket, size, first) for bucket, first in zip(parts, rooms, strict=True)
        }
        self._signals = {bucket: FIRST_BUCKET + 2 * i for i, bucket in enumerate(parts)}
        devices = all_gather(device.index)
        peers.enable(device.index, [devices[other] for other in self._others])
        self._kernels = PeerCopiesRun(rank, size, room, FIRST_BUCKET + 2 * len(parts), abort_flag)
        device.synchronize()
        # Kept, so that no memory that others use is freed before they end.
        self._inboxes, arrived, self._diffs = (
            all_gather(array) for array in (self._kernels.inbox, self._kernels.arrived, diff)
        )
        self._kernels.connect(arrived)
        self._arrived = arrived
        self._gathered: list[list[Array]] = []  # arrays of all ranks

    def restart(self) -> None:
        """Begin an iteration."""
        self._begun, self._back = False, 0

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            self._kernels.signal(BEGUN)
            self._kernels.wait(BEGUN)

    def _copy(self, to: Array, mine: Array) -> None:
        stream, runtime = self._cuda.get_current_stream().ptr, self._cuda.runtime
        size, how = mine.nbytes, runtime.memcpyDefault
        runtime.memcpyAsync(_address(to), _address(mine), size, how, stream)

    def send(self, bucket: Bucket) -> None:
        """Copy what others add up of a bucket into their memory."""
        self._begin()
        for other in self._others:
            inbox = self._inboxes[other][self._rank - (self._rank > other)]
            for start, stop, place in self._pieces[bucket][other]:
                self._copy(inbox[place:], self._diff[start:stop])
        self._kernels.signal(self._signals[bucket])

    def add(self, bucket: Bucket) -> None:
        """Wait for the share of a bucket, add it up, and copy it to the others; `finish` must
        follow.
        """
        self._kernels.wait(self._signals[bucket])
        mine = self._pieces[bucket][self._rank]
        for start, stop, place in mine:
            self._kernels.add(self._diff, start, stop - start, place)
        for other in self._others:
            for start, stop, _ in mine:
                self._copy(self._diffs[other][start:], self._diff[start:stop])
        self._back = self._signals[bucket] + 1
        self._kernels.signal(self._back)

    def finish(self) -> None:
        """Wait until all buckets are the mean of all ranks'. The iteration has ended: the next one
        may begin with a graph, which calls no `restart`.
        """
        if self._back:
            self._kernels.wait(self._back)
        self.restart()

    def gather(self, wholes: Sequence[Array]) -> None:
        """Copy this rank's part of each array into those of the others; `wait_gathered` waits for
        theirs.
        """
        own = [*map(_address, wholes)]
        if not self._gathered or [*map(_address, self._gathered[self._rank])] != own:
            self._gathered = self._all_gather(list(wholes))
        self._begin()
        for other in self._others:
            for mine, theirs in zip(wholes, self._gathered[other], strict=True):
                self._copy(theirs[self._rank], mine[self._rank])
        self._kernels.signal(GATHERED)

    def wait_gathered(self) -> None:
        """Wait until the parts of all others are there."""
        self._kernels.wait(GATHERED)


def _address(array: Any) -> int:
    return int(array.data.ptr)
