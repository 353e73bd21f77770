"""Memory plan: blobs that are live at different times share an arena.

A pass of a net is a sequence of moments, one a step, or one for all steps of a region of concurrent
branches (branches.py): forward, and in a net that learns, backward in reverse. The data of a blob
are live from the moment that writes them to the last one that reads them; so is its diff. Data that
are recomputed (`recompute`) are live twice: up to the last step forward that reads them, and from
the moment that writes them again. Memories that are never live at the same moment may overlap in
the arena; nets that run one after the other share one arena.

Between passes the content of the arena is undefined. Work on a side stream must be waited for
before the next moment begins, except that of layers that may update a large weight concurrently
with all that follows: what their backward reads and writes is live up to the end.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain, groupby
from typing import NamedTuple

import numpy as np

from caffepy.device.blob import Blob, Memory
from caffepy.layer.convolution_groups import ConcatReLUs
from caffepy.layer.norm_groups import NormGroup
from caffepy.layer.shape import Split
from caffepy.net.fusion import Step
from caffepy.net.gradients import large_products
from caffepy.net.net import Net

log = logging.getLogger(__name__)

ALIGNMENT = 256

WORTH = 256 << 20
"""Bytes of blobs below which sharing costs more than it saves, since weight gradients can no longer
overlap.
"""


class Interval(NamedTuple):
    """`size` bytes that are live from the moment `first` to the moment `last`, both included,
    except between the two moments of `gap`, at which they are live.
    """

    size: int
    first: int
    last: int
    gap: tuple[int, int] | None = None

    @property
    def spans(self) -> list[tuple[int, int]]:
        """First and last moment of each time in which they are live."""
        if self.gap is None:
            return [(self.first, self.last)]
        return [(self.first, self.gap[0]), (self.gap[1], self.last)]

    def meets(self, other: "Interval") -> bool:
        """True if both are live at one moment."""
        if self.last < other.first or other.last < self.first:
            return False
        if self.gap is None and other.gap is None:
            return True
        return any(a <= d and c <= b for a, b in self.spans for c, d in other.spans)


class Usage(NamedTuple):
    """A net and the steps that it runs forward and, if it learns, backward.

    `recompute` has the steps that run forward again before the backward of a step, by its number in
    `steps`, all as such numbers.
    """

    net: Net
    steps: Sequence[Step]
    learns: bool
    recompute: Mapping[int, Sequence[int]] = {}


def plan(intervals: Sequence[Interval]) -> tuple[list[int], int]:
    """Return the offset of each interval, a multiple of ALIGNMENT, and the size of the arena.

    Intervals that share a moment do not overlap. The largest are placed first, each into the
    smallest gap that holds it.
    """
    offsets = [0] * len(intervals)
    placed: list[int] = []
    total = 0
    for i in sorted(range(len(intervals)), key=lambda i: (-intervals[i].size, intervals[i].first)):
        size = intervals[i].size
        beside = [j for j in placed if intervals[i].meets(intervals[j])]
        taken = sorted((offsets[j], offsets[j] + intervals[j].size) for j in beside)
        offsets[i] = _gap(size, taken)
        placed.append(i)
        total = max(total, offsets[i] + size)
    return offsets, total


def peak(intervals: Sequence[Interval]) -> int:
    """Return the most bytes that are live at one moment, less than which no arena can have."""
    changes: dict[int, int] = {}
    for interval in intervals:
        for first, last in interval.spans:
            changes[first] = changes.get(first, 0) + interval.size
            changes[last + 1] = changes.get(last + 1, 0) - interval.size
    return max(accumulate(changes[moment] for moment in sorted(changes)), default=0)


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
    kept = set(always_live(usage.net))
    spans: dict[Memory, list[int]] = {}  # first and last moment, of each time in turn
    moments = list(_moments(usage))
    for moment, (again, touched, *_) in enumerate(moments):
        for memory, writes in touched:
            if memory not in spans:
                if writes:
                    spans[memory] = [moment, moment]
                else:
                    kept.add(memory)
            elif again and writes and spans[memory][-1] < moment:
                spans[memory] += [moment, moment]
            else:
                spans[memory][-1] = moment
    for memory in {m for moment in moments if moment.goes_on for m, _ in moment.touched}:
        if memory in spans:
            spans[memory][-1] = len(moments) - 1
    found = {}
    for memory, (first, *between, last) in spans.items():
        if memory not in kept:
            size = memory.capacity * memory.layout.dtype.itemsize
            gap = (between[0], between[1]) if between else None
            found[memory] = Interval(size, first, last, gap)
    return found


def beside(usage: Usage, shared: Mapping[Memory, Interval]) -> int:
    """Return the bytes that a pass takes beside those that are `shared` and the parameters."""
    params = {memory for b in usage.net.params for memory in (b.data_memory, b.diff_memory)}
    touched = {memory for moment in _moments(usage) for memory, _ in moment.touched}
    return sum(m.capacity * m.layout.dtype.itemsize for m in touched - params - set(shared))


def taken(usage: Usage) -> int:
    """Return the bytes that the data and gradients of a net take where a command runs it: each for
    itself, or in an arena (`save_memory`) where that is worth it, or data are recomputed.
    """
    needs = lifetimes(usage)
    each = sum(interval.size for interval in needs.values())
    shares = each >= WORTH or usage.recompute
    return (plan(list(needs.values()))[1] if shares else each) + beside(usage, needs)


def always_live(net: Net) -> Iterator[Memory]:
    """Yield the memories that must not be shared, whatever touches them."""
    for blob in [*net.params, *(net.blobs[name] for name in net.outputs)]:
        yield from (blob.data_memory, blob.diff_memory)
    for node in net.nodes:
        layer, tops = node.layer, node.tops
        if not node.bottoms:
            yield from (top.data_memory for top in tops)
        for blob in [*node.bottoms, *tops] if layer.always_reshape else node.losses:
            yield from (blob.data_memory, blob.diff_memory)


class Touched(NamedTuple):
    """The memory of the data that a step's forward reads, that it writes, and that the step's
    backward reads, if it has one.
    """

    reads: list[Memory]
    writes: list[Memory]
    read_back: list[Memory]


def touched_data(net: Net, step: Step) -> Touched:
    """Return the memories of data that a step touches. What it only shows in another shape, it does
    not write.
    """
    bottoms, tops_are_read = _ends(net, step)
    node, own = net.nodes[step.last], [copy.data_memory for copy in _casts(net, step)]
    own += [buffer.data_memory for buffer in _buffers(net, step)]
    reads, tops = ([b.blob.data_memory for b in bottoms], [t.data_memory for t in node.tops])
    shows = step.group is None and (node.layer.is_view or isinstance(node.layer, Split))
    writes = [*own, *(top for top in tops if not (shows and top in reads))]
    read_back: list[Memory] = []
    if node.need_backward:
        read_back += [b.blob.data_memory for b in bottoms if b.read_back]
        read_back += [*own, *(tops if tops_are_read else [])]
    return Touched(reads, writes, read_back)


class _Moment(NamedTuple):
    """A step of a pass. `again`: it recomputes; `touched`: (memory, is written) in order; then the
    pass and region of the step, and whether its work may go on beside later moments.
    """

    again: bool
    touched: list[tuple[Memory, bool]]
    backward: bool = False
    region: int = 0
    goes_on: bool = False  # up to the end of the pass


def _moments(usage: Usage) -> Iterator[_Moment]:
    """Yield each moment; branches that run beside each other share one."""
    for (backward, region), group in groupby(_steps(usage), lambda moment: moment[2:4]):
        found = list(group)
        if region and not usage.recompute:
            merged = [touch for moment in found for touch in moment.touched]
            goes_on = any(moment.goes_on for moment in found)
            yield _Moment(False, merged, backward, region, goes_on)
        else:
            yield from found


def _steps(usage: Usage) -> Iterator[_Moment]:
    """Yield each step of a pass as a moment."""
    net = usage.net
    large = list(large_products(net).values()) if usage.learns else []
    data = [touched_data(net, step) for step in usage.steps]
    forward = [
        [*((memory, False) for memory in of.reads), *((memory, True) for memory in of.writes)]
        for of in data
    ]
    for step, touched in zip(usage.steps, forward, strict=True):
        yield _Moment(False, touched, False, step.region)
    for i in reversed(range(len(usage.steps))) if usage.learns else ():
        yield from (_Moment(True, forward[again], True) for again in usage.recompute.get(i, ()))
        step = usage.steps[i]
        node = net.nodes[step.last]
        if not node.need_backward:
            yield _Moment(False, [], True, step.region)
            continue
        bottoms, _ = _ends(net, step)
        touched = [
            *((memory, False) for memory in data[i].read_back),
            *((top.diff_memory, False) for top in node.tops),
            *((copy.diff_memory, True) for copy in _casts(net, step)),
            *((bottom.blob.diff_memory, True) for bottom in bottoms if bottom.wanted),
            *((blob.diff_memory, True) for blob in (step.group.own_diffs if step.group else ())),
            *_half(step),
        ]
        goes_on = any(net.layers[index] in large for index in step.indices)
        yield _Moment(False, touched, True, step.region, goes_on)


def _half(step: Step) -> Iterator[tuple[Memory, bool]]:
    """Yield what a step touches of another group, half of whose backward it computes."""
    group = step.group.sums_for if step.group else None
    if group is not None:
        reads, writes = group.half
        yield from ((blob.data_memory, False) for blob in reads)
        yield from ((blob.diff_memory, True) for blob in writes)


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
    for i in step.indices:
        node = net.nodes[i]
        layer = node.layer
        for blob, wanted in zip(node.bottoms, node.propagate_down, strict=True):
            if any(blob is top for top in within):
                tops_are_read |= layer.fused_backward_reads_top
            else:
                read = layer.backward_reads_bottom or isinstance(step.group, ConcatReLUs)
                bottoms.append(_Bottom(blob, wanted, read))
        tops_are_read |= layer.backward_reads_top
        within += node.tops
    return bottoms, tops_are_read


def _casts(net: Net, step: Step) -> list[Blob]:
    found = (net.nodes[i].casts for i in step.indices)
    return [copy for casts in found if casts for copy in casts]


def _buffers(net: Net, step: Step) -> list[Blob]:
    """The buffers of a step that lie on the net's device."""
    node = net.nodes[step.last]
    found = step.group.buffers if step.group else node.layer.buffers
    on_device = net.device if net.device.is_cuda else None
    return [b for b in found if b.gpu is on_device and not node.layer.always_reshape]


def save_memory(usages: Sequence[Usage], least: int = 0) -> int:
    """Bind the blobs of nets on one device, of which one runs at a time, to one arena; return its
    size in bytes.

    From then on the nets must run as these usages say; they recompute what these say. A blob that
    grows leaves the arena. Nothing is shared if the blobs take less than `least` bytes.
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
        usage.net.recompute = {
            usage.steps[i].last: [usage.steps[k] for k in again]
            for i, again in usage.recompute.items()
        }
        for step in chain.from_iterable(usage.net.recompute.values()):
            for index in step.indices:
                usage.net.layers[index].is_recomputed = True
        for step in usage.steps if usage.recompute else ():
            if isinstance(step.group, NormGroup):
                step.group.reader = None  # what it gives may be all that is left of it
    log.info("Blobs of %.1f MiB share %.1f MiB", before / 2**20, size / 2**20)
    return size
