"""Buckets: ranges of the flat gradients that are reduced one by one during the backward pass."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

COUNT = 6
"""Most buckets of a net (NVCaffe's reduce_buckets)."""

LEAST = 1 << 20
"""Bytes below which a bucket is not worth a reduction of its own."""


NEVER = frozenset([-1])
"""The layers of a bucket that is complete only when the backward pass has ended."""


class Bucket(NamedTuple):
    """Ranges of the flat diff (start, stop) and the layers that add to them.

    A bucket without ranges stands for the factors of its layers, which are exchanged.
    """

    ranges: tuple[tuple[int, int], ...]
    layers: frozenset[int]


class _Segment(NamedTuple):
    start: int
    stop: int
    layers: frozenset[int]


def buckets(
    ends: Sequence[int],
    layers: Sequence[frozenset[int]],
    count: int = COUNT,
    without: Collection[int] = (),
) -> list[Bucket]:
    """Cut a flat diff of float32, last part first, into buckets of about a `count`-th of it.

    `ends` are where its segments end, `layers` which layers add to each. The segments numbered in
    `without` are left out, and the rest makes fewer buckets then: in each one a GPU waits for other
    ranks and does nothing else.
    """
    least = max(ends[-1] / max(count, 1), LEAST / 4)
    segments = [*map(_Segment, [0, *ends[:-1]], ends, layers)]
    found: list[list[_Segment]] = [[]]
    for i, segment in reversed([*enumerate(segments)]):
        if i not in without:
            if _size(found[-1]) >= least:
                found.append([])
            found[-1].insert(0, segment)
    # Cut the last one in two if the first layers have few gradients, so that less is left to reduce
    # after the backward pass.
    last = found.pop()
    few = max([1, *(i for i, segment in enumerate(last, start=1) if segment.stop * 4 <= LEAST)])
    found += [last[few:], last[:few]] if _size(last[few:]) >= LEAST / 4 else [last]
    return [_bucket(part) for part in found if part]


def _size(segments: Sequence[_Segment]) -> int:
    return sum(segment.stop - segment.start for segment in segments)


def _bucket(segments: Sequence[_Segment]) -> Bucket:
    ranges: list[tuple[int, int]] = []
    for start, stop, _ in segments:
        begin = ranges.pop()[0] if ranges and ranges[-1][1] == start else start
        ranges.append((begin, stop))
    return Bucket(tuple(ranges), frozenset().union(*(segment.layers for segment in segments)))


class Progress:
    """The buckets that become complete as a backward pass goes on, in the order of the buckets."""

    def __init__(self, parts: Sequence[Bucket]) -> None:
        self._parts = parts
        self.restart()

    def restart(self) -> None:
        """Begin a backward pass."""
        self._next = 0
        self._done: set[int] = set()

    def after(self, layer: int) -> list[Bucket]:
        """Return the buckets that are complete now that this layer is done."""
        self._done.add(layer)
        first = self._next
        while self._next < len(self._parts) and self._parts[self._next].layers <= self._done:
            self._next += 1
        return list(self._parts[first : self._next])

    def rest(self) -> list[Bucket]:
        """Return all other buckets; the pass has ended."""
        rest = list(self._parts[self._next :])
        self.restart()
        return rest
