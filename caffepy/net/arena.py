"""Memory that the blobs of nets share because they need it at different times.

A pass of a net is a line of moments, one for each of its steps, forwards and, in a net that learns, backwards again. A
blob's data are needed from the moment that writes them to the last one that reads them, and so is its diff. Memories
that are never needed at the same moment may lie in one place, and nets that run one after the other in one arena.

Between passes, blobs whose memory lies in an arena hold nothing of use. Work that runs beside a step (`device.aside`)
must be done before the next moment begins.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from caffepy.blob import Array, Blob, Memory
from caffepy.device import Device
from caffepy.net.fusion import Step
from caffepy.net.net import Net

log = logging.getLogger(__name__)

ALIGNMENT = 256


class Interval(NamedTuple):
    """`size` bytes that are needed from the moment `first` to the moment `last`, both included."""

    size: int
    first: int
    last: int


class Pass(NamedTuple):
    """How a net runs: forward through these steps and, if it learns, backward through them."""

    net: Net
    steps: Sequence[Step]
    learns: bool


def plan(intervals: Sequence[Interval]) -> tuple[list[int], int]:
    """The offset of each interval, a multiple of ALIGNMENT, and the bytes in all; those that share a moment lie apart.

    The largest come first, each into the smallest gap that holds it.
    """
    offsets = [0] * len(intervals)
    placed: list[int] = []
    total = 0
    for i in sorted(range(len(intervals)), key=lambda i: (-intervals[i].size, intervals[i].first)):
        size, first, last = intervals[i]
        beside = [j for j in placed if intervals[j].first <= last and first <= intervals[j].last]
        offsets[i] = _gap(size, sorted((offsets[j], offsets[j] + intervals[j].size) for j in beside))
        placed.append(i)
        total = max(total, offsets[i] + size)
    return offsets, total


def _gap(size: int, taken: Sequence[tuple[int, int]]) -> int:
    """Where the smallest gap between these ranges, in rising order, begins that holds the size; behind all if none."""
    gaps, end = [], 0
    for start, stop in taken:
        if start - end >= size:
            gaps.append((start - end, end))
        end = max(end, -(-stop // ALIGNMENT) * ALIGNMENT)
    return min(gaps)[1] if gaps else end


def lifetimes(run: Pass) -> dict[Memory, Interval]:
    """When each memory is needed that may share its place with others.

    The rest is what lives longer than a pass: parameters, what is fed and what comes out, loss weights, whatever is
    read before it is written, and all that layers touch whose shapes change from pass to pass.
    """
    kept = set(_kept(run.net))
    spans: dict[Memory, tuple[int, int]] = {}
    for moment, uses in enumerate(_moments(run)):
        for memory, writes in uses:
            if memory in spans:
                spans[memory] = (spans[memory][0], moment)
            elif writes:
                spans[memory] = (moment, moment)
            else:
                kept.add(memory)
    return {
        memory: Interval(memory.capacity * memory.format.dtype.itemsize, *span)
        for memory, span in spans.items()
        if memory not in kept
    }


def _kept(net: Net) -> Iterator[Memory]:
    for blob in [*net.params, *(net.blobs[name] for name in net.outputs)]:
        yield from (blob.data_memory, blob.diff_memory)
    for layer, bottoms, tops in zip(net.layers, net.bottoms, net.tops, strict=True):
        if not bottoms:
            yield from (top.data_memory for top in tops)
        weighted = (top for top, weight in zip(tops, layer.loss_weights, strict=True) if weight)
        for blob in [*bottoms, *tops] if layer.always_reshape else weighted:
            yield from (blob.data_memory, blob.diff_memory)


Uses = Iterator[tuple[Memory, bool]]
"""Memories in the order in which a moment uses them, and whether it writes them."""


def _moments(run: Pass) -> Iterator[Uses]:
    for step in run.steps:
        yield _forward_uses(run.net, step)
    for step in reversed(run.steps) if run.learns else ():
        yield _backward_uses(run.net, step)


def _forward_uses(net: Net, step: Step) -> Uses:
    yield from ((bottom.data_memory, False) for bottom, _ in _bottoms(net, step))
    yield from ((twin.data_memory, True) for twin in _twins(net, step))
    yield from ((top.data_memory, True) for top in net.tops[step.last])


def _backward_uses(net: Net, step: Step) -> Uses:
    """All data that forward had may be read again."""
    if not net.layer_need_backward[step.last]:
        return
    bottoms, tops, twins = _bottoms(net, step), net.tops[step.last], _twins(net, step)
    yield from ((blob.data_memory, False) for blob in [*(bottom for bottom, _ in bottoms), *twins, *tops])
    yield from ((top.diff_memory, False) for top in tops)
    yield from ((twin.diff_memory, True) for twin in twins)
    yield from ((bottom.diff_memory, True) for bottom, wanted in bottoms if wanted)


def _bottoms(net: Net, step: Step) -> list[tuple[Blob, bool]]:
    """What comes into a step, and whether its gradient is wanted; blobs between the layers of a run do not count."""
    found: list[tuple[Blob, bool]] = []
    within: list[Blob] = []
    for i in step.layers or [step.last]:
        wanted = net.bottom_need_backward[i]
        found += [(b, w) for b, w in zip(net.bottoms[i], wanted, strict=True) if not any(b is t for t in within)]
        within += net.tops[i]
    return found


def _twins(net: Net, step: Step) -> list[Blob]:
    """The copies in another format that a step works on."""
    found = (net.twins[i] for i in step.layers or [step.last] if i in net.twins)
    return [twin for twins in found for twin in twins]


def save_memory(passes: Sequence[Pass]) -> int:
    """Let the blobs of nets on one device, of which one runs at a time, share an arena; returns its size in bytes.

    From then on the nets must run as these passes say. A blob that grows leaves the arena.
    """
    needs = [lifetimes(run) for run in passes]
    plans = [plan(list(need.values())) for need in needs]
    size = max((total for _, total in plans), default=0)
    if not size:
        return 0
    arena = _bytes(passes[0].net.device, size)
    for need, (offsets, _) in zip(needs, plans, strict=True):
        for (memory, interval), offset in zip(need.items(), offsets, strict=True):
            memory.bind(arena[offset : offset + interval.size].view(memory.format.dtype))
    before = sum(interval.size for need in needs for interval in need.values())
    log.info("Blobs that take %.1f MiB each by itself share %.1f MiB", before / 2**20, size / 2**20)
    return size


def _bytes(device: Device, count: int) -> Array:
    dtype = np.dtype(np.uint8)
    if device.store is None:
        return np.zeros(count, dtype)
    with device.scope():
        return device.store.zeros(count, dtype)
