"""Which layers of a net form fused groups. A group goes from a layer to the only one that reads its
top, and so on.

The blobs between its members are not written. Groups are therefore for training and testing as
commands do it, where nobody looks at these blobs.
"""

from collections.abc import Sequence
from typing import NamedTuple

from caffepy.device.blob import Blob
from caffepy.layer import Layer
from caffepy.layer.eltwise import Eltwise
from caffepy.layer.fused.base import FusedGroup
from caffepy.layer.fused.patterns import PATTERNS
from caffepy.layer.neuron import Dropout, ReLU
from caffepy.layer.normalization import BatchNorm
from caffepy.layer.pooling import Pooling
from caffepy.layer.shape import Split


class Step(NamedTuple):
    """The computation at the place of layer `last`: it alone, or a fused group of `layers` that
    ends with it.
    """

    last: int
    layers: tuple[int, ...] = ()
    group: FusedGroup | None = None


class Wiring(NamedTuple):
    """The net as fusion sees it: its layers, their blobs, and which of them run backward."""

    layers: Sequence[Layer]
    bottoms: Sequence[Sequence[Blob]]
    tops: Sequence[Sequence[Blob]]
    need_backward: Sequence[bool]

    def reader(self, index: int) -> int | None:
        """The layer that reads the only top of a layer, None if several see its present values."""
        top = self.tops[index][0]
        readers = [
            j for j in range(index + 1, len(self.layers)) if any(b is top for b in self.bottoms[j])
        ]
        if not readers or any(self.layers[index].loss_weights):
            return None
        first = readers[0]
        in_place = any(t is top for t in self.tops[first])
        return first if in_place or len(readers) == 1 else None


def find_groups(net: Wiring) -> list[list[int]]:
    """Return the layers of each fused group, in the order of the net."""
    groups: list[list[int]] = []
    taken: set[int] = set()
    for i, layer in enumerate(net.layers):
        if i in taken or layer.on_host or len(net.bottoms[i]) != 1 or len(net.tops[i]) != 1:
            continue
        group = _group_from(net, i)
        group = group[: next((k for k, j in enumerate(group) if j in taken), len(group))]
        # The diff of a top with a loss weight must stay; a group overwrites it.
        weighs = any(net.layers[group[-1]].loss_weights)
        if len(group) > 1 and not (
            weighs or _overtaken(net, group) or _loses_mask(net, group) or _hides(net, group)
        ):
            groups.append(group)
            taken |= set(group)
    return groups


def _overtaken(net: Wiring, group: Sequence[int]) -> bool:
    """True if a layer between the members overwrites a blob that an earlier member reads: the group
    runs at the place of its last member.
    """
    inner = {id(t.data_memory) for i in group for t in net.tops[i]}
    for i in group:
        reads = {id(b.data_memory) for b in net.bottoms[i]} - inner
        for j in set(range(i + 1, group[-1])) - set(group):
            if any(
                id(t.data_memory) in reads and any(t is b for b in net.bottoms[j])
                for t in net.tops[j]
            ):
                return True
    return False


def _loses_mask(net: Wiring, group: Sequence[int]) -> bool:
    """True if a later in-place layer destroys the ReLU mask that the fused backward needs.

    Outside a group ReLU reads its own bottom. A Dropout does no harm: it zeroes values only where
    the gradient is 0 too.
    """
    kinds = {type(net.layers[i]): i for i in group}
    if ReLU not in kinds or not net.need_backward[group[-1]]:
        return False
    memory = net.tops[group[-1]][0].data_memory
    reads_top = Pooling not in kinds and (BatchNorm not in kinds or Eltwise in kinds)
    if reads_top and net.bottoms[kinds[ReLU]][0].data_memory is memory:
        return False
    return any(
        not isinstance(net.layers[j], Dropout)
        and any(
            t.data_memory is memory and any(t is b for b in net.bottoms[j]) for t in net.tops[j]
        )
        for j in range(group[-1] + 1, len(net.layers))
    )


def _hides(net: Wiring, group: Sequence[int]) -> bool:
    """True if members work in place on the group's bottom: the group leaves it as it is, and an
    earlier layer may read it.
    """
    memory = net.bottoms[group[0]][0].data_memory
    if not net.need_backward[group[0]] or net.tops[group[-1]][0].data_memory is memory:
        return False
    return any(t.data_memory is memory for i in group[:-1] for t in net.tops[i])


def _group_from(net: Wiring, start: int) -> list[int]:
    """The layers of the longest group that begins with this one; it alone if there is none."""
    for head, tail in PATTERNS:
        group: list[int] = []
        if _extend(net, group, start, head[0]) and all(
            _extend(net, group, net.reader(group[-1]), kind) for kind in head[1:]
        ):
            for kind in tail:
                _extend(net, group, net.reader(group[-1]), kind)
            return group
    return [start]


def _extend(net: Wiring, group: list[int], index: int | None, kind: type[Layer]) -> bool:
    """Append a layer to the group if it is of this type and fits; return whether it does."""
    if index is None or type(net.layers[index]) is not kind:
        return False
    layer, bottoms, tops = net.layers[index], net.bottoms[index], net.tops[index]
    first = group[0] if group else index
    fits = (
        layer.can_fuse
        and not layer.on_host
        and net.need_backward[index] == net.need_backward[first]
        and len(bottoms) == (2 if kind is Eltwise else 1)
        and len(tops) == (2 if kind is Split else 1)
        and (kind is not Eltwise or _adds_one(net, group, index))
    )
    if fits:
        group.append(index)
    return fits


def _adds_one(net: Wiring, group: Sequence[int], index: int) -> bool:
    """True if an Eltwise adds one other blob, which is not its top, to that of the group."""
    (mine,), (top,) = net.tops[group[-1]], net.tops[index]
    others = [b for b in net.bottoms[index] if b is not mine]
    return len(others) == 1 and others[0] is not top
