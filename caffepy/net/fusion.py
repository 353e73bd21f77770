"""Fused groups of a net: a layer, the only layer that reads its top, and so on.

The blobs between its members are not written. So groups are for commands that train and test, where
nobody reads these blobs.
"""

from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

from caffepy.device.blob import Blob
from caffepy.layer import Layer
from caffepy.layer.batch_norm import BatchNorm
from caffepy.layer.convolution import Convolution
from caffepy.layer.convolution_groups import ConcatReLUs, ConvolutionReLU
from caffepy.layer.dropout import Dropout
from caffepy.layer.eltwise import Eltwise
from caffepy.layer.fused import PATTERNS, FusedGroup, ShuffledConcat, make_group
from caffepy.layer.group import Member, kind_of
from caffepy.layer.neuron import ReLU, ReLU6
from caffepy.layer.norm_groups import NormGroup, NormPooling
from caffepy.layer.normalization import LRN
from caffepy.layer.pooling import Pooling
from caffepy.layer.shape import Concat, Flatten, Permute, ShuffleChannel, Slice, Split
from caffepy.net.node import Node


class Step(NamedTuple):
    """A unit of a pass: layer `last` alone, or a fused group of `layers` that ends with it.

    Steps of one `region` but of different branches may run beside each other (branches.py).
    """

    last: int
    layers: tuple[int, ...] = ()
    group: FusedGroup | None = None
    region: int = 0
    branch: int = 0

    @property
    def indices(self) -> tuple[int, ...]:
        """Places in the net of all its layers."""
        return self.layers or (self.last,)


def fused_steps(nodes: Sequence[Node]) -> list[Step]:
    """Return the steps of a net: fused groups, and every other layer alone."""
    steps = []
    alone = set(range(len(nodes)))
    with_gradient = {
        id(bottom)
        for node in nodes
        for bottom, down in zip(node.bottoms, node.propagate_down, strict=True)
        if down
    }
    groups = find_groups(nodes)
    for group in [*groups, *joined_maps(nodes), *shuffled_concats(nodes)]:
        if any(nodes[i].casts for i in group[1:]):
            continue
        members = [_member(nodes[i]) for i in group]
        last = nodes[group[-1]]
        has_gradient = [id(top) in with_gradient for top in last.tops]
        made = make_group(members, last.need_backward, has_gradient)
        steps.append(Step(group[-1], tuple(group), made))
        alone -= set(group)
    steps = sorted([*steps, *map(Step, alone)], key=lambda step: step.last)
    _share_sums(nodes, steps)
    _share_normalizations(nodes, steps)
    return _with_concats(nodes, steps)


def _member(node: Node) -> Member:
    return Member(node.layer, node.layer_bottoms, node.layer_tops, node.propagate_down)


def _with_concats(nodes: Sequence[Node], steps: Sequence[Step]) -> list[Step]:
    """Return the steps with groups in place of each Concat that can begin the backward of all that
    made its bottoms, and of a Split behind it.
    """
    made = {
        id(step.group.top): (step.last, step.group)
        for step in steps
        if isinstance(step.group, ConvolutionReLU) and step.group.layer.axis == 1
    }
    found: list[Step] = []
    for step in steps:
        node = nodes[step.last]
        if found and step.last in found[-1].layers:
            continue  # the Split
        of = [made[id(b)] for b in node.layer_bottoms if id(b) in made]
        joins = type(node.layer) is Concat and node.layer.axis == 1 and len(of) > 1
        if (
            joins
            and _runs_as_one(node)
            and len({id(group) for _, group in of}) == len(node.bottoms)
            and all(_reader(nodes, last) == step.last for last, _ in of)
        ):
            layers = [step.last]
            after = _reader(nodes, step.last)
            if after == step.last + 1 and type(nodes[after].layer) is Split:
                layers += [after] if _runs_as_one(nodes[after]) else []
            members = [_member(nodes[i]) for i in layers]
            group = ConcatReLUs(members, [group for _, group in of])
            step = Step(layers[-1], tuple(layers), group)
        found.append(step)
    return found


def _runs_as_one(node: Node) -> bool:
    """True if a layer may be computed with others, and all its bottoms get a gradient."""
    in_layout = not node.casts and not node.layer.on_host and not any(node.layer.loss_weights)
    return in_layout and node.need_backward and all(node.propagate_down)


def _share_sums(nodes: Sequence[Node], steps: Sequence[Step]) -> None:
    """Make a convolution compute the sums for the backward of the group whose top it reads: of all
    readers the first, whose backward runs last.
    """
    for step in steps:
        group = step.group
        if not isinstance(group, NormGroup) or isinstance(group, NormPooling) or not group.learns:
            continue
        of_group = {id(top) for top in group.tops}
        readers = [
            (reader, nodes[i])
            for reader in steps
            if reader is not step
            for i in reader.indices
            if of_group & _with_gradient(nodes[i])
        ]
        if not readers:
            continue
        (reader, node), *others = readers
        alone = not any(_with_gradient(node) & _with_gradient(other) for _, other in others)
        first = reader.group
        if isinstance(first, NormGroup) and first is not group and alone:
            convolution = first.convolution
            if convolution is not None and convolution.layer is node.layer:
                assert isinstance(node.layer, Convolution)
                first.sums_for = group
                first.sums_alike = all(
                    type(other.layer) is Convolution and other.layer.window == node.layer.window
                    for _, other in others
                )


def _share_normalizations(nodes: Sequence[Node], steps: Sequence[Step]) -> None:
    """Let the only group that reads the top of a group with a BatchNorm normalize what it reads,
    where it can; the first need not write its top then.
    """
    first = {step.layers[0]: step.group for step in steps if step.layers}
    for step in steps:
        group = step.group
        if not isinstance(group, NormGroup) or isinstance(group, NormPooling):
            continue
        reads = _reader(nodes, step.last) if len(group.tops) == 1 else None
        reader = None if reads is None else first.get(reads)
        if isinstance(reader, ShuffledConcat):
            reader.sources.append(group)
            group.reader = reader
        elif isinstance(reader, NormGroup) and reader.sums_for is group:
            group.reader, reader.source = reader, group


def _with_gradient(node: Node) -> set[int]:
    """Return the ids of the bottoms whose gradient the layer writes (blobs after casts)."""
    pairs = zip(node.layer_bottoms, node.propagate_down, strict=True)
    return {id(bottom) for bottom, down in pairs if down}


def _reader(nodes: Sequence[Node], index: int) -> int | None:
    """Return the layer that reads the only top of a layer; None if several see its values."""
    top = nodes[index].tops[0]
    readers = [j for j in range(index + 1, len(nodes)) if any(b is top for b in nodes[j].bottoms)]
    if not readers or any(nodes[index].layer.loss_weights):
        return None
    first = readers[0]
    in_place = any(t is top for t in nodes[first].tops)
    return first if in_place or len(readers) == 1 else None


def find_groups(nodes: Sequence[Node]) -> list[list[int]]:
    """Return the layers of each fused group, in the order of the net."""
    groups: list[list[int]] = []
    taken: set[int] = set()
    for i, node in enumerate(nodes):
        if i in taken or node.layer.on_host or len(node.bottoms) != 1 or len(node.tops) != 1:
            continue
        for group in _groups_from(nodes, i, taken):
            if _is_safe(nodes, group):
                groups.append(group)
                taken |= set(group)
                break
    return groups


def joined_maps(nodes: Sequence[Node]) -> Iterator[list[int]]:
    """Yield the layers of each Concat of what Permute and Flatten make of maps whose channels lie
    last already, after theirs.
    """
    writer = {id(top): i for i, node in enumerate(nodes) for top in node.tops}
    for last, node in enumerate(nodes):
        if not isinstance(node.layer, Concat) or node.layer.axis != 1 or len(node.bottoms) < 2:
            continue
        group: list[int] = []
        for bottom in node.bottoms:
            flatten = writer[id(bottom)]
            permute = writer[id(nodes[flatten].bottoms[0])] if nodes[flatten].bottoms else flatten
            group += [permute, flatten]
            if not _turns_to_rows(nodes, permute, flatten, last):
                break
        else:
            if len(set(group)) == len(group) and _is_safe(nodes, [*group, last]):
                yield [*group, last]


def _turns_to_rows(nodes: Sequence[Node], permute: int, flatten: int, last: int) -> bool:
    """True if these two layers, whose tops no others read, make a row of each image of a map, in
    which it lies already.
    """
    first, second = nodes[permute], nodes[flatten]
    return (
        isinstance(first.layer, Permute)
        and isinstance(second.layer, Flatten)
        and first.layer.takes_preferred_layout
        and first.layer_bottoms[0].layout.channels_last
        and len(second.tops[0].shape) == 2
        and first.need_backward == second.need_backward == nodes[last].need_backward
        and not any(nodes[i].casts for i in (permute, flatten, last))
        and _reader(nodes, permute) == flatten
        and _reader(nodes, flatten) == last
    )


def shuffled_concats(nodes: Sequence[Node]) -> Iterator[list[int]]:
    """Yield the layers of each Concat of two equal bottoms over channels, the ShuffleChannel of two
    groups that alone reads it, and a Slice into two halves that alone reads that, if there is one;
    in numbers of 16 bits whose channels lie last.
    """
    for i, node in enumerate(nodes):
        if not isinstance(node.layer, Concat) or not _are_halves(node.bottoms, node.layer.axis):
            continue
        shuffle = _reader(nodes, i)
        layer = None if shuffle is None else nodes[shuffle].layer
        if shuffle is None or not isinstance(layer, ShuffleChannel) or layer.group != 2:
            continue
        group = [i, shuffle]
        cut = _reader(nodes, shuffle)
        layer = None if cut is None else nodes[cut].layer
        if cut is not None and isinstance(layer, Slice) and layer.axis == 1:
            group += (
                [cut] if _are_halves(nodes[cut].tops, 1) and _runs_with(nodes[cut], node) else []
            )
        if all(_runs_with(nodes[k], node) for k in group) and _is_safe(nodes, group):
            yield group


def _are_halves(blobs: Sequence[Blob], axis: int) -> bool:
    """True if two blobs are halves of one along their channels, in pairs of numbers of 16 bits."""
    shapes = [blob.shape for blob in blobs]
    return (
        len(blobs) == 2
        and axis == 1
        and shapes[0] == shapes[1]
        and len(shapes[0]) > 2
        and shapes[0][1] % 2 == 0
    )


def _runs_with(node: Node, first: Node) -> bool:
    """True if a layer computes in numbers of 16 bits whose channels lie last, and learns like the
    first of a group.
    """
    layouts = [blob.layout for blob in (*node.layer_bottoms, *node.layer_tops)]
    return (
        all(layout.channels_last and layout.dtype.itemsize == 2 for layout in layouts)
        and not node.casts
        and not node.layer.on_host
        and node.need_backward == first.need_backward
    )


def _is_safe(nodes: Sequence[Node], group: Sequence[int]) -> bool:
    """True if layers may be computed together. The diff of a top with a loss weight must stay; a
    group overwrites it.
    """
    if any(nodes[group[-1]].layer.loss_weights):
        return False
    return not any(harm(nodes, group) for harm in (_overtaken, _loses_mask, _hides))


def _overtaken(nodes: Sequence[Node], group: Sequence[int]) -> bool:
    """True if a layer between the members overwrites a blob that an earlier member reads: the group
    runs at the place of its last member.
    """
    inner = {id(t.data_memory) for i in group for t in nodes[i].tops}
    for i in group:
        reads = {id(b.data_memory) for b in nodes[i].bottoms} - inner
        if any(reads & _overwritten(nodes[j]) for j in set(range(i + 1, group[-1])) - set(group)):
            return True
    return False


def _overwritten(node: Node) -> set[int]:
    """Return the ids of the memories in which a layer works in place."""
    return {id(t.data_memory) for t in node.tops if any(t is b for b in node.bottoms)}


def _loses_mask(nodes: Sequence[Node], group: Sequence[int]) -> bool:
    """True if a later in-place layer destroys the mask of ReLU or ReLU6 that the fused backward
    needs.

    Outside a group ReLU reads its own bottom. A Dropout does no harm: it zeroes values only where
    the gradient is 0 too.
    """
    kinds = {type(nodes[i].layer): i for i in group}
    if BatchNorm in kinds and Pooling in kinds:
        return False
    relu = kinds.get(ReLU, kinds.get(ReLU6))
    if relu is None or not nodes[group[-1]].need_backward:
        return False
    memory = nodes[group[-1]].tops[0].data_memory
    reads_top = Pooling not in kinds and (BatchNorm not in kinds or Eltwise in kinds)
    if reads_top and nodes[relu].bottoms[0].data_memory is memory:
        return False
    later = [node for node in nodes[group[-1] + 1 :] if not isinstance(node.layer, Dropout)]
    return any(id(memory) in _overwritten(node) for node in later)


def _hides(nodes: Sequence[Node], group: Sequence[int]) -> bool:
    """True if members work in place on the group's bottom: the group leaves it as it is, and an
    earlier layer may read it.
    """
    memory = nodes[group[0]].bottoms[0].data_memory
    if not nodes[group[0]].need_backward or nodes[group[-1]].tops[0].data_memory is memory:
        return False
    return any(t.data_memory is memory for i in group[:-1] for t in nodes[i].tops)


def _groups_from(nodes: Sequence[Node], start: int, taken: Container[int]) -> Iterator[list[int]]:
    """Yield the longest group of each pattern that begins with this layer, in the patterns' order:
    of several layers that are in no other group.
    """
    for head, tail in PATTERNS:
        group: list[int] = []
        if _extend(nodes, group, start, head[0]) and all(
            _extend(nodes, group, _reader(nodes, group[-1]), kind) for kind in head[1:]
        ):
            for kind in tail:
                _extend(nodes, group, _reader(nodes, group[-1]), kind)
            group = group[: next((k for k, j in enumerate(group) if j in taken), len(group))]
            if len(group) > 1:
                yield group


def _takes_mask(before: Sequence[Layer], node: Node) -> bool:
    """True if the gradient of this LRN or Pooling behind these layers of a group tells that of a
    ReLU before it, or of means takes it in. Maxima of what LRN gives are taken in the same pass
    where channels lie last.
    """
    means = isinstance(node.layer, Pooling) and not node.layer.takes_maxima
    if isinstance(before[-1], LRN):
        return not means and node.layer_bottoms[0].layout.channels_last
    over_channels = not isinstance(before[0], Convolution) or before[0].axis == 1
    takes = not means or [type(layer) for layer in before] == [Convolution, ReLU]
    return over_channels and takes and node.tops[0] is not node.bottoms[0]


def _extend(nodes: Sequence[Node], group: list[int], index: int | None, kind: type[Layer]) -> bool:
    """Append a layer to the group if it is of this type and fits; return whether it does."""
    if index is None or kind_of(nodes[index].layer) is not kind:
        return False
    node = nodes[index]
    first = nodes[group[0]] if group else node
    fits = (
        node.layer.can_fuse
        and not node.layer.on_host
        and node.need_backward == first.need_backward
        and len(node.bottoms) == (2 if kind is Eltwise else 1)
        and len(node.tops) == (2 if kind is Split else 1)
    )
    if fits and kind is Eltwise:  # it adds one other blob, not its top, to that of the group
        mine = nodes[group[-1]].tops[0]
        others = [b for b in node.bottoms if b is not mine]
        fits = len(others) == 1 and others[0] is not node.tops[0]
    if fits and group and isinstance(node.layer, LRN | Pooling):
        fits = _takes_mask([nodes[i].layer for i in group], node)
    if fits:
        group.append(index)
    return fits
