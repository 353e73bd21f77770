"""Memory plan: blobs that are live at different times share an arena.

A pass of a net is a line of moments, one a step: forward, and in a net that learns backward again.
The data of a blob are live from the moment that writes them to the last one that reads them, and so
is the diff. Memories that are never live at the same moment may overlap in the arena; nets that run
one after the other share one arena.

Between passes the content of the arena is undefined. Work on a side stream must be waited for
before the next moment begins.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from caffepy.device.blob import Blob, Memory
from caffepy.net.fusion import Step
from caffepy.net.net import Net

log = logging.getLogger(__name__)

ALIGNMENT = 256

WORTH = 256 << 20
"""Bytes of blobs below which sharing costs more than it saves, since weight gradients can no longer
overlap.
"""


class Interval(NamedTuple):
    """`size` bytes that are live from the moment `first` to the moment `last`, both included."""

    size: int
    first: int
    last: int


class Usage(NamedTuple):
    """A net and the steps that it runs forward and, if it learns, backward."""

    net: Net
    steps: Sequence[Step]
    learns: bool


def plan(intervals: Sequence[Interval]) -> tuple[list[int], int]:
    """Return the offset of each interval, a multiple of ALIGNMENT, and the size of the arena.

    Intervals that share a moment do not overlap. The largest are placed first, each into the
    smallest gap that holds it.
    """
    offsets = [0] * len(intervals)
    placed: list[int] = []
    total = 0
    for i in sorted(range(len(intervals)), key=lambda i: (-intervals[i].size, intervals[i].first)):
        size, first, last = intervals[i]
        beside = [j for j in placed if intervals[j].first <= last and first <= intervals[j].last]
        taken = sorted((offsets[j], offsets[j] + intervals[j].size) for j in beside)
        offsets[i] = _gap(size, taken)
        placed.append(i)
        total = max(total, offsets[i] + size)
    return offsets, total


def _gap(size: int, taken: Sequence[tuple[int, int]]) -> int:
    """Return the offset of the smallest gap that holds `size` between sorted ranges, or the end."""
    gaps, end = [], 0
    for start, stop in taken:
        if start - end >= size:
            gaps.append((start - end, end))
        end = max(end, -(-stop // ALIGNMENT) * ALIGNMENT)
    return min(gaps)[1] if gaps else end


def lifetimes(usage: Usage) -> dict[Memory, Interval]:
    """Return the interval in which each memory is live that may share its place with others.

    The rest is live longer than a pass: parameters, inputs and outputs, loss weights, whatever is
    read before it is written, and all that layers touch whose shapes change from pass to pass.
    """
    kept = set(_kept(usage.net))
    spans: dict[Memory, tuple[int, int]] = {}
    for moment, touches in enumerate(_moments(usage)):
        for memory, writes in touches:
            if memory in spans:
                spans[memory] = (spans[memory][0], moment)
            elif writes:
                spans[memory] = (moment, moment)
            else:
                kept.add(memory)
    return {
        memory: Interval(memory.capacity * memory.layout.dtype.itemsize, *span)
        for memory, span in spans.items()
        if memory not in kept
    }


def _kept(net: Net) -> Iterator[Memory]:
    for blob in [*net.params, *(net.blobs[name] for name in net.outputs)]:
        yield from (blob.data_memory, blob.diff_memory)
    for node in net.nodes:
        layer, tops = node.layer, node.tops
        if not node.bottoms:
            yield from (top.data_memory for top in tops)
        for blob in [*node.bottoms, *tops] if layer.always_reshape else node.losses:
            yield from (blob.data_memory, blob.diff_memory)


def _moments(usage: Usage) -> Iterator[list[tuple[Memory, bool]]]:
    """Yield for each moment (memory, is written), in the order in which it touches them."""
    net = usage.net
    for step in usage.steps:
        bottoms, _ = _ends(net, step)
        yield [
            *((bottom.blob.data_memory, False) for bottom in bottoms),
            *((copy.data_memory, True) for copy in _casts(net, step)),
            *((top.data_memory, True) for top in net.nodes[step.last].tops),
        ]
    for step in reversed(usage.steps) if usage.learns else ():
        node, casts = net.nodes[step.last], _casts(net, step)
        if not node.need_backward:
            yield []
            continue
        bottoms, tops_are_read = _ends(net, step)
        yield [
            *((bottom.blob.data_memory, False) for bottom in bottoms if bottom.read_back),
            *((copy.data_memory, False) for copy in casts),
            *((top.data_memory, False) for top in node.tops if tops_are_read),
            *((top.diff_memory, False) for top in node.tops),
            *((copy.diff_memory, True) for copy in casts),
            *((bottom.blob.diff_memory, True) for bottom in bottoms if bottom.wanted),
        ]


class _Bottom(NamedTuple):
    """A bottom of a step: does backward write its gradient (`wanted`) or read its data?"""

    blob: Blob
    wanted: bool
    read_back: bool


def _ends(net: Net, step: Step) -> tuple[list[_Bottom], bool]:
    """Return the bottoms of a step, and True if backward reads the data of its tops.

    Blobs between the layers of a fused group do not count: the group keeps what it needs of
    them, or finds it in its tops.
    """
    bottoms: list[_Bottom] = []
    within: list[Blob] = []
    tops_are_read = False
    for i in step.layers or [step.last]:
        node = net.nodes[i]
        layer = node.layer
        for blob, wanted in zip(node.bottoms, node.propagate_down, strict=True):
            if any(blob is top for top in within):
                tops_are_read |= layer.fused_backward_reads_top
            else:
                bottoms.append(_Bottom(blob, wanted, layer.backward_reads_bottom))
        tops_are_read |= layer.backward_reads_top
        within += node.tops
    return bottoms, tops_are_read


def _casts(net: Net, step: Step) -> list[Blob]:
    found = (net.nodes[i].casts for i in step.layers or [step.last])
    return [copy for casts in found if casts for copy in casts]


def save_memory(usages: Sequence[Usage], least: int = 0) -> int:
    """Bind the blobs of nets on one device, of which one runs at a time, to one arena; return its
    size in bytes.

    From then on the nets must run as these usages say. A blob that grows leaves the arena. Nothing
    is shared if the blobs take less than `least` bytes.
    """
    needs = [lifetimes(usage) for usage in usages]
    before = sum(interval.size for need in needs for interval in need.values())
    if before < least:
        return 0
    plans = [plan(list(need.values())) for need in needs]
    size = max((total for _, total in plans), default=0)
    if not size:
        return 0
    arena = usages[0].net.device.zeros(size, np.dtype(np.uint8))
    for need, (offsets, _) in zip(needs, plans, strict=True):
        for (memory, interval), offset in zip(need.items(), offsets, strict=True):
            memory.bind(arena[offset : offset + interval.size].view(memory.layout.dtype))
    for usage in usages:
        usage.net.waits_each_layer = True
    log.info("Blobs that take %.1f MiB each by itself share %.1f MiB", before / 2**20, size / 2**20)
    return size
