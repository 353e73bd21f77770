"""Fused groups: layers computed together, in fewer passes over memory, with the same numbers.

FusedGroup is the contract, PATTERNS the table of groups; `caffepy.net.fusion` finds those of a net.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple, Protocol

from caffepy.device.blob import Array, Blob
from caffepy.layer.base import Layer
from caffepy.layer.batch_norm import BatchNorm
from caffepy.layer.convolution import Convolution
from caffepy.layer.convolution_groups import (
    ConvolutionLRN,
    ConvolutionLRNPooling,
    ConvolutionMeans,
    ConvolutionPooling,
    ConvolutionReLU,
    PooledConvolution,
    PoolingReLU,
)
from caffepy.layer.dropout import Dropout
from caffepy.layer.eltwise import Eltwise
from caffepy.layer.group import Member, kind_of
from caffepy.layer.inner_product import InnerProduct
from caffepy.layer.neuron import ReLU, ReLU6
from caffepy.layer.norm_groups import NormGroup, NormPooling
from caffepy.layer.normalization import LRN
from caffepy.layer.pooling import Pooling
from caffepy.layer.scale import Scale
from caffepy.layer.shape import Concat, Permute, ShuffleChannel, Slice, Split


class FusedGroup(Protocol):
    """Several layers computed at once, with the numbers of running them one after the other.

    Only the tops of the last member are written; blobs between members are left as they are.
    """

    sums_for: NormGroup | None
    """The group of which this one's backward computes the first half, if there is any."""

    own_diffs: Sequence[Blob]
    """Blobs of its own whose diffs backward writes and no other layer reads."""

    @property
    def buffers(self) -> Sequence[Blob]:
        """Blobs of its own whose data forward writes and only backward of that pass reads."""

    def forward(self) -> None:
        """Write the data of the last member's tops."""

    def backward(self) -> None:
        """Write the diffs of bottoms from outside the group, add to those of the parameters."""


class JoinedMaps:
    """top (N, M) = several maps (N, C, H, W), whose channels lie last, as they lie, side by side:
    SSD's heads, each through a Permute to (N, H, W, C) and a Flatten, and the Concat of all.
    """

    sums_for: NormGroup | None = None
    own_diffs: Sequence[Blob] = ()
    buffers: Sequence[Blob] = ()

    def __init__(self, members: Sequence[Member]) -> None:
        *heads, concat = members
        permutes = [head for head in heads if isinstance(head.layer, Permute)]
        self.ops, (self.top,) = concat.layer.ops, concat.tops
        self.maps = [blob for head in permutes for blob in head.bottoms]
        self.wanted = [down for head in permutes for down in head.propagate_down]

    def forward(self) -> None:
        self.ops.join([_as_it_lies(x.data) for x in self.maps], self.top.data, 1)

    def backward(self) -> None:
        wanted = zip(self.maps, self.wanted, strict=True)
        diffs = [_as_it_lies(x.diff) if down else None for x, down in wanted]
        sizes = [prod(x.shape[1:]) for x in self.maps]
        self.ops.cut(self.top.diff, sizes, diffs, 1)


class ShuffledConcat:
    """Two bottoms with their channels interleaved: a Concat over channels, a ShuffleChannel of two
    groups [, a Slice into two halves].

    `sources` are the groups whose top is a bottom that nothing else reads: this group computes the
    first half of their backward, and may normalize their x itself.
    """

    sums_for: NormGroup | None = None
    own_diffs: Sequence[Blob] = ()
    buffers: Sequence[Blob] = ()
    takes_normalized = True

    def __init__(self, members: Sequence[Member]) -> None:
        concat = members[0]
        self.ops, self.wanted = concat.layer.ops, concat.propagate_down
        self.bottoms, self.tops = concat.bottoms, members[-1].tops
        self.sources: list[NormGroup] = []

    def _sources(self) -> list[NormGroup | None]:
        """Return for each bottom the one of `sources` that makes it, or None."""
        made = {id(source.tops[0]): source for source in self.sources}
        return [made.get(id(bottom)) for bottom in self.bottoms]

    def forward(self) -> None:
        parts, given = [], []
        for bottom, source in zip(self.bottoms, self._sources(), strict=True):
            hidden = source if source is not None and source.hidden else None
            parts.append((hidden.x if hidden else bottom).data)
            given.append(hidden.normalized if hidden else None)
        self.ops.interleave(parts, [y.data for y in self.tops], given)

    def backward(self) -> None:
        """Write the bottoms' diffs, and compute half the backward of what made them."""
        diffs, norms = [], []
        for bottom, source, wanted in zip(self.bottoms, self._sources(), self.wanted, strict=True):
            diffs.append(bottom.diff if wanted else None)
            norms.append(source.sums_of(bottom) if wanted and source is not None else None)
        self.ops.separate([y.diff for y in self.tops], diffs, norms)


def _as_it_lies(array: Array) -> Array:
    """Return a view (N, H * W * C) of a map (N, C, H, W) whose channels lie last."""
    n, _, *spatial = array.shape
    lying: Array = array.transpose(0, *range(2, 2 + len(spatial)), 1).reshape(n, -1)
    return lying


class InnerProductGroup:
    """InnerProduct, then ReLU of slope 0, Dropout or both, in one pass over the product."""

    sums_for: NormGroup | None = None
    own_diffs: Sequence[Blob] = ()

    def __init__(self, members: Sequence[Member]) -> None:
        first, *after = members
        assert isinstance(first.layer, InnerProduct)
        self.inner_product = first.layer
        self.rectifies = any(isinstance(member.layer, ReLU) for member in after)
        dropout = after[-1].layer if after else None
        self.dropout = dropout if isinstance(dropout, Dropout) and dropout.draws else None
        self.ratio = self.dropout.ratio if self.dropout else 0.0
        (self.bottom,), (self.top,) = first.bottoms, members[-1].tops
        (self.propagate_down,) = first.propagate_down

    @property
    def buffers(self) -> Sequence[Blob]:
        """The mask of Dropout."""
        return self.dropout.buffers if self.dropout else ()

    def forward(self) -> None:
        """y = dropout(relu(x @ w.T + b))."""
        layer, dropout = self.inner_product, self.dropout
        if dropout is None:
            layer.product(self.bottom, self.top, layer.bias, self.rectifies)
            return
        seed, step_counter = dropout.draw()
        y = layer.product(self.bottom, self.top)
        given = layer.bias, self.rectifies, self.ratio, seed, dropout.mask.data, step_counter
        layer.ops.bias_act_forward(y, *given)

    def backward(self) -> None:
        """The gradient of x @ w.T + b in place of dy, then those of InnerProduct."""
        layer = self.inner_product
        mask = self.dropout.mask.data if self.dropout else None
        y, dy = (a.reshape(layer.rows, layer.outputs) for a in (self.top.data, self.top.diff))
        layer.ops.bias_act_backward(y, dy, layer.bias_diff, self.rectifies, mask, self.ratio)
        layer.gradients(dy, None, self.bottom, self.propagate_down)


Types = tuple[type[Layer], ...]


class Pattern(NamedTuple):
    """A group begins with all of `head`; each of `tail` may follow once, in this order."""

    head: Types
    tail: Types


NORM = (Scale, Eltwise, ReLU, ReLU6, Split)
PATTERNS = (
    Pattern((Convolution, BatchNorm, Scale, ReLU, Pooling), ()),
    Pattern((BatchNorm, Scale, ReLU, Pooling), ()),
    Pattern((Convolution, BatchNorm), NORM),
    Pattern((Convolution, ReLU, LRN, Pooling), ()),
    Pattern((Convolution, ReLU, LRN), ()),
    Pattern((Convolution, ReLU, Pooling), ()),
    Pattern((Convolution, Pooling), (ReLU,)),
    Pattern((Convolution,), (ReLU,)),
    Pattern((BatchNorm,), NORM),
    Pattern((InnerProduct,), (ReLU, Dropout)),
    Pattern((Pooling,), (ReLU,)),
)
"""The first whose head fits counts."""

GROUPS: dict[tuple[type[Layer], type[Layer]], Callable[[Sequence[Member]], FusedGroup]] = {
    (Convolution, ReLU): ConvolutionReLU,
    (Convolution, LRN): ConvolutionLRN,
    (Convolution, Pooling): ConvolutionPooling,
    (InnerProduct, ReLU): InnerProductGroup,
    (InnerProduct, Dropout): InnerProductGroup,
    (Pooling, ReLU): PoolingReLU,
    (Permute, Concat): JoinedMaps,
    (Concat, ShuffleChannel): ShuffledConcat,
    (Concat, Slice): ShuffledConcat,
}
"""The class for a group without a BatchNorm, by the types of its first and last layers."""


def make_group(members: Sequence[Member], learns: bool, has_gradient: Sequence[bool]) -> FusedGroup:
    """Return the group; `learns` if it runs backward, then `has_gradient` of each top counts."""
    if any(isinstance(member.layer, BatchNorm) for member in members):
        if isinstance(members[-1].layer, Pooling):
            return NormPooling(members, learns)
        return NormGroup(members, learns, has_gradient)
    kinds = [kind_of(member.layer) for member in members]
    if kinds[:2] == [Convolution, Pooling]:
        return PooledConvolution(members)
    if kinds[2:] == [LRN, Pooling]:
        return ConvolutionLRNPooling(members)
    last = members[-1].layer
    if kinds[0] is Convolution and isinstance(last, Pooling) and not last.takes_maxima:
        return ConvolutionMeans(members)
    return GROUPS[kinds[0], kinds[-1]](members)
