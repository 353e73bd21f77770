"""Buckets: ranges of the flat gradients that are reduced one by one while the backward pass goes on."""

from collections.abc import Sequence
from typing import NamedTuple

from caffepy.blob import behind
from caffepy.net import Net

COUNT = 6
"""How many there are at most (NVCaffe's reduce_buckets)."""

LEAST = 1 << 20
"""Bytes below which a bucket is not worth a reduction of its own."""


NEVER = frozenset([-1])
"""The layers of a bucket that waits for the end of the backward pass."""


class Bucket(NamedTuple):
    """Elements `start` to `stop` of the flat diff, and the layers that add to them."""

    start: int
    stop: int
    layers: frozenset[int]


def adders(net: Net) -> list[frozenset[int]]:
    """The layers that add to the gradient of each learnable parameter, those that share it among them."""
    return [
        frozenset(
            index
            for index, layer in enumerate(net.layers)
            if any(behind(blob).diff_memory is param.diff_memory for blob in layer.blobs)
        )
        for param in net.learnable_params
    ]


def buckets(ends: Sequence[int], layers: Sequence[frozenset[int]], count: int = COUNT) -> list[Bucket]:
    """Cut a flat diff of float32, last part first, into ranges of about a `count`-th of it.

    `ends` are where its segments end, `layers` which layers add to each.
    """
    if not layers:
        return []
    least = max(ends[-1] / max(count, 1), LEAST / 4)
    found: list[Bucket] = []
    stop, adding = ends[-1], frozenset[int]()
    for start, mine in zip(reversed([0, *ends[:-1]]), reversed(layers), strict=True):
        adding |= mine
        if stop - start >= least or start == 0:
            found.append(Bucket(start, stop, adding))
            stop, adding = start, frozenset()
    return [*found[:-1], *_tail(found[-1], ends, layers)]


def _tail(last: Bucket, ends: Sequence[int], layers: Sequence[frozenset[int]]) -> list[Bucket]:
    """The last bucket, in two if the first layers have few gradients: less is to do when the backward pass is over."""
    few = max([1, *(i for i, end in enumerate(ends, start=1) if end * 4 <= LEAST)])
    if few >= len(ends) or last.stop - ends[few - 1] < LEAST / 4:
        return [last]
    inner = frozenset().union(
        *(mine for end, mine in zip(ends, layers, strict=True) if ends[few - 1] < end <= last.stop)
    )
    return [Bucket(ends[few - 1], last.stop, inner), Bucket(0, ends[few - 1], frozenset().union(*layers[:few]))]


class Progress:
    """Which buckets are complete as the layers of a backward pass are done, in the order of the buckets."""

    def __init__(self, parts: Sequence[Bucket]) -> None:
        self._parts = parts
        self.restart()

    def restart(self) -> None:
        """A backward pass begins."""
        self._next = 0
        self._done: set[int] = set()

    def after(self, layer: int) -> list[Bucket]:
        """Those that are complete now that this layer is done."""
        self._done.add(layer)
        first = self._next
        while self._next < len(self._parts) and self._parts[self._next].layers <= self._done:
            self._next += 1
        return list(self._parts[first : self._next])

    def rest(self) -> list[Bucket]:
        """All others; the pass is over."""
        parts = list(self._parts[self._next :])
        self.restart()
        return parts
