"""One-shot all-reduce of small gradients: a GPU writes its own into the memory of all others, and
adds up what they have written into its own.

Each number goes n - 1 times over the links of a GPU, where NCCL sends it 2 (n - 1)/n times; but it
goes at once, in one direction, and no kernel waits for another GPU in the backward pass:

    GPU 0   backward .......... | backward ........ |                  | update
                    write A     |           write B, wait, add A and B |
    GPU 1     backward .......... | backward ........ |                | update
                      write A     |           write B, wait, add A and B

`ops/cuda/kernels/one_shot.cu` has the protocol.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from caffepy.collectives import peers
from caffepy.collectives.buckets import Bucket
from caffepy.device.blob import Array

MOST = 16 << 20
"""Most bytes that a GPU writes in an iteration: NCCL takes less time for more."""

BLOCKS = 128
"""Chunks of a bucket, each of which a block writes: a GPU runs as many at a time."""

LEAST_CHUNK, ALIGNMENT = 1 << 10, 16
"""Elements of a chunk: the fewest, and that of which it is a multiple."""


class Chunk(NamedTuple):
    """A part of the flat gradients."""

    start: int
    size: int


def chunks_of(bucket: Bucket) -> list[Chunk]:
    """Cut a bucket into about BLOCKS chunks of one size."""
    total = sum(stop - start for start, stop in bucket.ranges)
    size = max(LEAST_CHUNK, -(-total // (BLOCKS * ALIGNMENT)) * ALIGNMENT)
    return [
        Chunk(start, min(size, stop - start))
        for first, stop in bucket.ranges
        for start in range(first, stop, size)
    ]


def small(parts: Sequence[Bucket], ranks: int) -> list[Bucket]:
    """Return the buckets that a one-shot all-reduce of `ranks` ranks takes: the last ones, for
    which the update waits, as long as they are together no larger than MOST.
    """
    found, room = list[Bucket](), MOST // 4 // (ranks - 1) if 1 < ranks <= peers.MOST_RANKS else 0
    for bucket in reversed(parts):
        room -= sum(stop - start for start, stop in bucket.ranges)
        if room < 0 or not bucket.ranges:
            break
        found.insert(0, bucket)
    return found


class OneShot:
    """One rank's side of the all-reduce of these buckets of its flat gradients, which follow each
    other in every iteration.

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
        from caffepy.ops.cuda.one_shot import OneShotRun

        table = list[Chunk]()
        self._ends = dict[Bucket, int]()  # the number of chunks up to a bucket's last one
        for bucket in parts:
            table += chunks_of(bucket)
            self._ends[bucket] = len(table)
        self._sent = 0  # chunks of this iteration
        devices = all_gather(device.index)
        peers.enable(device.index, [other for other in devices if other != device.index])
        self._kernel = OneShotRun(rank, size, diff, table, abort_flag)
        device.synchronize()
        # Kept, so that no memory that others use is freed before they end.
        self._shared = all_gather(self._kernel.inbox), all_gather(self._kernel.arrived)
        self._kernel.connect(*self._shared)

    def restart(self) -> None:
        """Begin an iteration."""
        self._sent = 0

    def send(self, bucket: Bucket) -> None:
        """Write a bucket, the next one, into the memory of the others."""
        first, self._sent = self._sent, self._ends[bucket]
        self._kernel.run(first, self._sent, adds=False)

    def finish(self) -> None:
        """Write what is left, and make all buckets the mean of the ranks'."""
        first, self._sent = self._sent, 0
        self._kernel.run(first, max(self._ends.values()), adds=True)
