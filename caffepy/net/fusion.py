"""Which layers of a net are computed together, in runs that go from a layer to the only one that
reads its top.

What lies between the members of a run is not written, so runs are for training and testing as
commands do it, where nobody looks at it.
"""

from collections.abc import Sequence
from typing import NamedTuple

from caffepy.device.blob import Blob
from caffepy.layer import Layer
from caffepy.layer.fused.base import FusedRun, Member
from caffepy.layer.fused.convolution import ConvolutionReLU
from caffepy.layer.fused.inner_product import InnerProductRun
from caffepy.layer.fused.normalization import NormRun
from caffepy.layer.fused.pooling import METHODS, PoolingReLU
from caffepy.proto.caffe_pb2 import EltwiseParameter

NORM = ("Scale", "Eltwise", "ReLU", "Split")
AFTER = {"Convolution": ("ReLU",), "InnerProduct": ("ReLU", "Dropout"), "Pooling": ("ReLU",)}
"""What may follow in a run, in this order, each at most once; after a BatchNorm, with or without a
Convolution before it, what NORM names."""


class Step(NamedTuple):
    """What is computed at the place of layer `last`: it alone, or a run of `layers` that ends with
    it.
    """

    last: int
    layers: tuple[int, ...] = ()
    run: FusedRun | None = None


class Wiring(NamedTuple):
    """What fusion needs to know of a net: its layers, their blobs, and which of them run backward."""

    layers: Sequence[Layer]
    bottoms: Sequence[Sequence[Blob]]
    tops: Sequence[Sequence[Blob]]
    need_backward: Sequence[bool]

    def reader(self, index: int) -> int | None:
        """The layer that takes the only top of a layer, if nobody else sees it as it is."""
        top = self.tops[index][0]
        readers = [
            j for j in range(index + 1, len(self.layers)) if any(b is top for b in self.bottoms[j])
        ]
        if not readers or any(self.layers[index].loss_weights):
            return None
        first = readers[0]
        in_place = any(t is top for t in self.tops[first])
        return first if in_place or len(readers) == 1 else None


def find_runs(net: Wiring) -> list[list[int]]:
    """The layers of each run, in the order of the net; layers that run alone are left out."""
    runs: list[list[int]] = []
    taken: set[int] = set()
    for i, layer in enumerate(net.layers):
        if i in taken or layer.on_host or len(net.bottoms[i]) != 1 or len(net.tops[i]) != 1:
            continue
        run = _run_from(net, i)
        run = run[: next((k for k, j in enumerate(run) if j in taken), len(run))]
        weighs = any(
            net.layers[run[-1]].loss_weights
        )  # its top's diff must stay, and runs overwrite it
        if len(run) > 1 and not (
            weighs or _overtaken(net, run) or _loses_mask(net, run) or _hides(net, run)
        ):
            runs.append(run)
            taken |= set(run)
    return runs


def _overtaken(net: Wiring, run: Sequence[int]) -> bool:
    """Whether a layer after one of the run overwrites what that one reads: it will run at the place
    of the last.
    """
    inner = {id(t.data_memory) for i in run for t in net.tops[i]}
    for i in run:
        reads = {id(b.data_memory) for b in net.bottoms[i]} - inner
        for j in set(range(i + 1, run[-1])) - set(run):
            if any(
                id(t.data_memory) in reads and any(t is b for b in net.bottoms[j])
                for t in net.tops[j]
            ):
                return True
    return False


def _loses_mask(net: Wiring, run: Sequence[int]) -> bool:
    """Whether a layer behind overwrites the run's top, by which ReLU's gradient would be another
    than that of it alone.

    Alone, ReLU looks at its own bottom. A Dropout zeroes only where no gradient comes from.
    """
    kinds = {net.layers[i].type: i for i in run}
    if "ReLU" not in kinds or not net.need_backward[run[-1]]:
        return False
    memory = net.tops[run[-1]][0].data_memory
    looks_at_top = "Pooling" not in kinds and ("BatchNorm" not in kinds or "Eltwise" in kinds)
    if looks_at_top and net.bottoms[kinds["ReLU"]][0].data_memory is memory:
        return False
    return any(
        net.layers[j].type != "Dropout"
        and any(
            t.data_memory is memory and any(t is b for b in net.bottoms[j]) for t in net.tops[j]
        )
        for j in range(run[-1] + 1, len(net.layers))
    )


def _hides(net: Wiring, run: Sequence[int]) -> bool:
    """Whether members overwrite the run's bottom in place, which it leaves as it is: a layer before
    may look at it.
    """
    memory = net.bottoms[run[0]][0].data_memory
    if not net.need_backward[run[0]] or net.tops[run[-1]][0].data_memory is memory:
        return False
    return any(t.data_memory is memory for i in run[:-1] for t in net.tops[i])


def _run_from(net: Wiring, start: int) -> list[int]:
    run = [start]
    kind = net.layers[start].type
    if kind == "Convolution":
        after = net.reader(start)
        if after is not None and _may_follow(net, run, after, "BatchNorm"):
            run.append(after)
            return _extend(net, run, NORM)
    if kind == "BatchNorm":
        return _extend(net, run, NORM) if _is_plain_norm(net.layers[start]) else run
    if kind == "Pooling" and net.layers[start].param.pooling_param.pool not in METHODS:
        return run
    return _extend(net, run, AFTER.get(kind, ()))


def _extend(net: Wiring, run: list[int], kinds: Sequence[str]) -> list[int]:
    for kind in kinds:
        after = net.reader(run[-1])
        if after is not None and _may_follow(net, run, after, kind):
            run.append(after)
    return run


def _may_follow(net: Wiring, run: Sequence[int], index: int, kind: str) -> bool:
    layer, bottoms = net.layers[index], net.bottoms[index]
    if layer.type != kind or layer.on_host or net.need_backward[index] != net.need_backward[run[0]]:
        return False
    if kind == "Eltwise":
        return _adds_one(net, run, index)
    if kind == "Split":
        return len(net.tops[index]) == 2
    if len(bottoms) != 1 or len(net.tops[index]) != 1:
        return False
    if kind == "BatchNorm":
        return _is_plain_norm(layer)
    if kind == "Scale":
        param = layer.param.scale_param
        return param.axis == 1 and param.num_axes == 1
    return kind != "ReLU" or layer.param.relu_param.negative_slope == 0


def _is_plain_norm(layer: Layer) -> bool:
    return not layer.param.batch_norm_param.scale_bias


def _adds_one(net: Wiring, run: Sequence[int], index: int) -> bool:
    """Whether an Eltwise adds one other blob, which is not its top, to the run's."""
    layer, bottoms, (top,) = net.layers[index], net.bottoms[index], net.tops[index]
    param = layer.param.eltwise_param
    if (
        param.operation != EltwiseParameter.SUM
        or len(bottoms) != 2
        or any(c != 1 for c in param.coeff)
    ):
        return False
    (mine,) = net.tops[run[-1]]
    others = [b for b in bottoms if b is not mine]
    return len(others) == 1 and others[0] is not top


def make_run(members: Sequence[Member], learns: bool, given: Sequence[bool]) -> FusedRun:
    """What computes these layers together; `learns`: it will go backward, `given`: which tops have
    a gradient then.
    """
    first, last = members[0], members[-1]
    layers = {member.layer.type: member.layer for member in members}
    if "BatchNorm" in layers:
        return NormRun(members, learns, given)
    if first.layer.type in ("Convolution", "Pooling"):
        kind = ConvolutionReLU if first.layer.type == "Convolution" else PoolingReLU
        return kind(
            first.layer, layers["ReLU"], first.bottoms[0], last.tops[0], first.propagate_down[0]
        )
    return InnerProductRun(
        layers["InnerProduct"],
        layers.get("ReLU"),
        layers.get("Dropout"),
        first.bottoms[0],
        last.tops[0],
        first.propagate_down[0],
    )
