"""Recomputation: data that backward reads are not kept but computed again, segment by segment.

The steps of a net are cut into segments. Of each but the last the data that only the segment itself
reads are dropped once it has run forward; before its backward they are computed again from the
data that are kept: those that cross a cut, and whatever cannot be computed twice (Chen et al.
2016). So memory holds what crosses the cuts and one segment at a time, for one more forward pass of
the segments.

    segment      1     2     3            data that are kept:  | those that cross a cut
    forward     ----> ----> ---->
    backward                 <----
    recompute         ---->               the last is never computed again
    backward          <----
    recompute   ---->
    backward    <----
"""

import logging
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from caffepy.device.blob import Memory
from caffepy.net import Net
from caffepy.net.memory import (
    Touched,
    Usage,
    always_live,
    beside,
    lifetimes,
    peak,
    plan,
    touched_data,
)

log = logging.getLogger(__name__)

AUTO: Literal["auto"] = "auto"
Recompute = int | Literal["auto"]

OVERHEAD, OVERHEAD_OF_HOST = 2 << 30, 512 << 20
"""Bytes that a process takes on a GPU beside blobs and parameters (CUDA's context and kernels,
workspaces of cuDNN and cuBLAS, batches on their way; 1.7 to 2.1 GiB were measured on an H100), and
on the host (scratch memory of convolutions, batches that are read ahead).
"""

MOST_SEGMENTS = 16
"""Number of segments up to which `fitting` looks for those that fit."""


class _Parts(NamedTuple):
    """By step of a usage: the data that it touches, and if it can run forward again."""

    touched: list[Touched]
    repeatable: list[bool]
    always: set[Memory]


def in_segments(usage: Usage, segments: int) -> Usage:
    """Return the usage with recomputation in `segments` segments, of about the same size and cut
    where little crosses; fewer if the net cannot be cut so often. 1: nothing is recomputed.
    """
    return _recomputing(usage, _parts(usage), _cuts(usage, segments))


def fitting(usage: Usage, size: int) -> Usage:
    """Return the usage with as few recomputed layers as make its arena fit into `size` bytes: none,
    if it does so; if it never does, that of the smallest arena.
    """
    plain = usage._replace(recompute={})
    if arena(plain) <= size:
        return plain
    parts = _parts(usage)
    tried: dict[tuple[int, ...], Usage] = {}
    for segments in range(2, MOST_SEGMENTS + 1):
        cuts = _cuts(usage, segments)
        for count in range(1, len(cuts) + 1):
            if (chosen := tuple(cuts[:count])) not in tried:
                tried[chosen] = _recomputing(usage, parts, chosen)
    least = sorted([plain, *tried.values()], key=recomputed_layers)
    peaks = [peak(list(lifetimes(one).values())) for one in least]
    for one, most in zip(least, peaks, strict=True):
        if most <= size and arena(one) <= size:
            return one
    smallest = min(range(len(least)), key=lambda i: peaks[i])
    return least[smallest]


def choose(train: Usage, tests: Sequence[Usage], recompute: Recompute, room: int) -> Usage:
    """Return the usage of a train net that shares its arena with test nets: with `recompute`
    segments, or such that all blobs of the nets fit into `room` bytes (`fitting`). The choice is
    logged.
    """
    if recompute == 1:
        return train
    if recompute == AUTO:
        others = sum(beside(usage, lifetimes(usage)) for usage in (train, *tests))
        usage = fitting(train, room - others)
        need = others + max(map(arena, (usage, *tests)))
        if need > room:
            message = "Blobs take %.1f MiB, of which %.1f are free: a smaller batch_size helps"
            log.warning(message, need / 2**20, room / 2**20)
    else:
        usage = in_segments(train, recompute)
    again, before, now = recomputed_layers(usage), arena(train), arena(usage)
    if again:
        message = "Recomputing %d of %d layers before backward: blobs take %.1f MiB instead of %.1f"
        log.info(message, again, len(train.net.layers), now / 2**20, before / 2**20)
    else:
        log.info("Recomputing no layer: blobs take %.1f MiB", now / 2**20)
    return usage


def overhead(net: Net) -> int:
    """Return about how many bytes a net takes on its device beside blobs and parameters."""
    if not net.device.is_cuda:
        return OVERHEAD_OF_HOST
    narrow = net.device.math_mode.precision in ("bf16", "fp16")  # then weights are copied
    return OVERHEAD + narrow * sum(2 * blob.count for blob in net.learnable_params)


def recomputed_layers(usage: Usage) -> int:
    """Number of layers that run forward again in a pass."""
    again = [k for steps in usage.recompute.values() for k in steps]
    return sum(len(usage.steps[k].layers) or 1 for k in again)


def arena(usage: Usage) -> int:
    """Bytes that the blobs of a net share."""
    return plan(list(lifetimes(usage).values()))[1]


def _parts(usage: Usage) -> _Parts:
    net = usage.net
    repeatable = []
    for step in usage.steps:
        layers = [net.nodes[i].layer for i in step.indices]
        repeatable.append(
            all(
                layer.can_recompute and not (layer.always_reshape or layer.share_in_parallel)
                for layer in layers
            )
        )
    touched = [touched_data(net, step) for step in usage.steps]
    return _Parts(touched, repeatable, set(always_live(net)))


def _cuts(usage: Usage, segments: int) -> list[int]:
    """Return the numbers of the steps with which a segment begins, but the first.

    A cut lies within half a segment of where all would hold the same number of bytes, where the
    fewest bytes cross it, but never between two steps that write the same data.
    """
    count = len(usage.steps)
    segments = min(segments, count)
    shared = lifetimes(usage._replace(recompute={}))
    begun, crossing, forbidden = [0] * (count + 1), [0] * (count + 1), [False] * (count + 1)
    touched = [touched_data(usage.net, step) for step in usage.steps]
    written: dict[Memory, list[int]] = {}
    read: dict[Memory, list[int]] = {}
    for i, of in enumerate(touched):
        for memory in of.writes:
            written.setdefault(memory, []).append(i)
        for memory in [*of.reads, *of.read_back]:
            read.setdefault(memory, []).append(i)
    for memory, (first, *_, last) in ((m, [*w, w[-1]]) for m, w in written.items()):
        for cut in range(first + 1, last + 1):
            forbidden[cut] = True
        if memory in shared:
            begun[first] += shared[memory].size
            for cut in range(first + 1, max(read.get(memory, [first])) + 1):
                crossing[cut] += shared[memory].size
    total, before, sums = sum(begun), 0, []
    for size in begun:
        sums.append(before)
        before += size
    cuts: list[int] = []
    for k in range(1, segments):
        least, most = ((k + d) * total / segments for d in (-0.5, 0.5))
        within = [
            cut
            for cut in range(1, count)
            if least <= sums[cut] <= most and not forbidden[cut] and cut > max(cuts, default=0)
        ]
        if within:
            middle = k * total / segments
            cuts.append(min(within, key=lambda cut: (crossing[cut], abs(sums[cut] - middle))))
    return cuts


def _recomputing(usage: Usage, parts: _Parts, cuts: Sequence[int]) -> Usage:
    recompute = {}
    for begin, end in pairwise([0, *cuts]):
        if again := _again(parts, begin, end):
            recompute[end - 1] = again
    return usage._replace(recompute=recompute)


def _again(parts: _Parts, begin: int, end: int) -> list[int]:
    """Return the steps of the segment [begin, end) that run forward again before its backward.

    These are the steps that write what its backward reads and what is not kept, and the steps that
    write what these read. What others read is kept, and so is what a step writes that cannot run
    again. Of data that several steps write, one after the other in place, all run again or none.
    """
    touched = parts.touched
    kept = set(parts.always)
    for i, of in enumerate(touched):
        if not begin <= i < end:
            kept.update(of.reads, of.writes, of.read_back)
    writers: dict[Memory, list[int]] = {}
    for i in range(begin, end):
        for memory in dict.fromkeys(touched[i].writes):
            writers.setdefault(memory, []).append(i)
    blocked = {i for i in range(begin, end) if not parts.repeatable[i]}
    while True:
        again: set[int] = set()
        # What must be written again, and the step because of which that is so.
        wanted: list[tuple[Memory, int | None]] = [
            (memory, None)
            for i in range(begin, end)
            for memory in touched[i].read_back
            if memory not in kept
        ]
        seen: set[Memory] = set()
        stuck = False
        while wanted and not stuck:
            memory, reason = wanted.pop()
            if memory in seen:
                continue
            seen.add(memory)
            for i in writers.get(memory, ()):
                if i in blocked:
                    # Keep the data; if that does not help, since the reason needs them as they
                    # were before they were overwritten, do not run the reason again.
                    if memory in kept and reason is not None:
                        blocked.add(reason)
                    kept.add(memory)
                    stuck = True
                    break
                if i not in again:
                    again.add(i)
                    wanted += [(other, i) for other in touched[i].writes]
                    wanted += [(read, i) for read in _lost(touched[i], i, kept, writers)]
        if not stuck:
            return sorted(again)


def _lost(
    touched: Touched, index: int, kept: set[Memory], writers: dict[Memory, list[int]]
) -> Iterator[Memory]:
    """Yield what a step reads that is not kept, or that a later step of the segment overwrites."""
    for memory in touched.reads:
        if memory not in kept or any(j > index for j in writers.get(memory, ())):
            yield memory
