"""Fused groups: layers computed together, in fewer passes over memory, with the same numbers.

FusedGroup is the contract, PATTERNS the table of groups; `caffepy.net.fusion` finds those of a net.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import inf, prod
from typing import NamedTuple, Protocol

import numpy as np

from caffepy.device.blob import Array, Blob
from caffepy.layer.base import Layer
from caffepy.layer.convolution import Convolution
from caffepy.layer.eltwise import Eltwise
from caffepy.layer.inner_product import InnerProduct
from caffepy.layer.neuron import Dropout, ReLU, ReLU6, is_in_place
from caffepy.layer.normalization import LRN, BatchNorm
from caffepy.layer.pooling import Pooling
from caffepy.layer.scale import Scale
from caffepy.layer.shape import Concat, Permute, Split
from caffepy.ops.objects import Maxima, NormForward, NormGradient, NormSums
from caffepy.ops.protocol import Window
from caffepy.proto.caffe_pb2 import PoolingParameter


class Member(NamedTuple):
    """A layer of a fused group, its blobs in its layout, and which bottoms get a gradient."""

    layer: Layer
    bottoms: Sequence[Blob]
    tops: Sequence[Blob]
    propagate_down: Sequence[bool]


class FusedGroup(Protocol):
    """Several layers computed at once, with the numbers of running them one after the other.

    Only the tops of the last member are written; blobs between members are left as they are.
    """

    sums_for: "NormGroup | None"
    """The group half of whose backward is computed by that of this one, if there is any."""

    own_diffs: Sequence[Blob]
    """Blobs of its own whose diffs backward writes and nobody else reads."""

    @property
    def buffers(self) -> Sequence[Blob]:
        """Blobs of its own whose data forward writes and only backward of that pass reads."""

    def forward(self) -> None:
        """Write the data of the last member's tops."""

    def backward(self) -> None:
        """Write the diffs of bottoms from outside the group, add to those of the parameters."""


class ConvolutionReLU:
    """top = relu(w * bottom + b), in place or not, with a slope of 0.

    Backward changes the top's diff: it becomes that of the convolution. It is so already, and
    the bias has its gradient, where it `begins` no backward, since a ConcatReLUs does.
    """

    sums_for: "NormGroup | None" = None
    own_diffs: Sequence[Blob] = ()

    def __init__(self, members: Sequence[Member]) -> None:
        convolution, relu = members
        assert isinstance(convolution.layer, Convolution)
        assert relu.layer.can_fuse
        self.layer = convolution.layer
        (self.bottom,), (self.top,) = convolution.bottoms, relu.tops
        (self.propagate_down,) = convolution.propagate_down
        self.buffers: Sequence[Blob] = ()
        self.begins = True

    def forward(self) -> None:
        layer, w = self.layer, self.layer.blobs[0].data
        (x,) = layer.whole([self.bottom])
        layer.conv.forward(x.data, w, layer.bias, self.top.data, relu=True)

    def backward(self) -> None:
        layer, dy = self.layer, self.top.diff
        (x,) = layer.copies or [self.bottom]
        if self.begins and not self.propagate_down:
            gradients = layer.weight_diff, layer.bias_diff
            layer.conv.backward_weight_relu(x.data, self.top.data, dy, *gradients)
            return
        if self.begins:
            rows = self.top.data, dy
            if layer.axis != 1:  # (N, O, ...), also where several axes stand for N
                rows = rows[0].reshape(layer.conv.y_shape), dy.reshape(layer.conv.y_shape)
            layer.ops.relu_bias_backward(*rows, layer.bias_diff)
        layer.gradients(dy, None, self.bottom, x, self.propagate_down)


class ConcatReLUs:
    """Concat over channels of the tops of ConvolutionReLUs, which nobody else reads [, Split].

    Backward begins theirs: in one pass the gradients of the Split's tops are added up, cut, masked
    by each ReLU and added up for each bias. It reads the data of the bottoms.
    """

    sums_for: "NormGroup | None" = None
    own_diffs: Sequence[Blob] = ()
    buffers: Sequence[Blob] = ()

    def __init__(self, members: Sequence[Member], groups: Sequence[ConvolutionReLU]) -> None:
        self.members, self.groups = members, groups
        self.tops = members[-1].tops
        for group in groups:
            group.begins = False

    def forward(self) -> None:
        for member in self.members:
            member.layer.forward(member.bottoms, member.tops)

    def backward(self) -> None:
        # Tops whose diff was never touched get no gradient.
        dys = [top.diff for top in self.tops if top.diff_memory.touched] or [self.tops[0].diff]
        layers, tops = [g.layer for g in self.groups], [g.top for g in self.groups]
        given = dys, [top.data for top in tops], [top.diff for top in tops]
        layers[0].ops.cut_relu_backward(*given, [layer.bias_diff for layer in layers])


class _BehindReLU:
    """Base of groups of a Convolution over channels, its ReLU of slope 0, in place or not, and a
    layer whose gradient tells ReLU's mask.

    The convolution's output is a buffer of the group's own.
    """

    sums_for: "NormGroup | None" = None
    own_diffs: Sequence[Blob] = ()

    def __init__(self, members: Sequence[Member]) -> None:
        convolution, relu, last = members
        assert isinstance(convolution.layer, Convolution)
        assert relu.layer.can_fuse
        self.layer = convolution.layer
        (self.bottom,), (self.convolved,) = convolution.bottoms, convolution.tops
        (self.top,), (self.propagate_down,) = last.tops, convolution.propagate_down
        self.output = self.layer.buffer_like(self.convolved)

    def convolve(self) -> Array:
        """Write relu(w * bottom + b) into the buffer; return it."""
        layer, y = self.layer, self.output
        y.reshape_like(self.convolved)
        (x,) = layer.whole([self.bottom])
        layer.conv.forward(x.data, layer.blobs[0].data, layer.bias, y.data, relu=True)
        return y.data

    def gradients(self, dy: Array, db: Array | None = None) -> None:
        """The gradients of the convolution, that of its bias if it is given."""
        (x,) = self.layer.copies or [self.bottom]
        self.layer.gradients(dy, db, self.bottom, x, self.propagate_down)


class ConvolutionPooling(_BehindReLU):
    """top = maxima of relu(w * bottom + b).

    A maximum has the sign of the element it was taken of, and each of its gradients goes to one
    element: ReLU's mask and the bias's gradient are those of the maxima, of which there are fewer.
    Backward writes the gradient of the convolution's output over that output, and changes the top's
    diff: it becomes that of the maxima before ReLU.

    Where the convolution `pools`, and the bottom gets no gradient, its output is not written.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        super().__init__(members)
        pooling = members[-1].layer
        assert isinstance(pooling, Pooling)
        self.pooling = pooling

    @property
    def buffers(self) -> Sequence[Blob]:
        """The convolution's output and the places of the maxima."""
        return [self.output, *self.pooling.buffers]

    def _maxima(self, values: Array) -> Maxima:
        pooling = self.pooling
        window = pooling.kernel, pooling.stride, pooling.pad
        return Maxima(values, pooling.index.data, window, True)

    def _pools(self, maxima: Maxima) -> bool:
        """True if the convolution computes the maxima, and its gradients from theirs."""
        return not self.propagate_down and self.layer.pools(self.output.layout, maxima.window)

    def forward(self) -> None:
        layer, maxima, output = self.layer, self._maxima(self.top.data), self.output
        if self._pools(maxima):
            output.reshape_like(self.convolved)
            given = self.bottom.data, layer.blobs[0].data, layer.bias, output.data
            layer.conv.forward_maxima(*given, maxima)
        else:
            self.convolve()
            self.pooling.forward([output], [self.top])

    def backward(self) -> None:
        layer, maxima, gradient = self.layer, self._maxima(self.top.diff), self.output.data
        if self._pools(maxima):
            given = layer.weight_diff, layer.bias_diff
            layer.conv.backward_weight_maxima(self.bottom.data, gradient, maxima, *given)
            return
        layer.ops.relu_bias_backward(self.top.data, maxima.y, layer.bias_diff)
        layer.ops.max_pool_backward(maxima.y, maxima.where, gradient, maxima.window)
        self.gradients(gradient)


class ConvolutionMeans(_BehindReLU):
    """top = means of relu(w * bottom + b) over windows."""

    def __init__(self, members: Sequence[Member]) -> None:
        super().__init__(members)
        pooling = members[-1].layer
        assert isinstance(pooling, Pooling)
        self.pooling = pooling
        self.own_diffs = [self.output]

    @property
    def buffers(self) -> Sequence[Blob]:
        """The convolution's output."""
        return [self.output]

    def forward(self) -> None:
        self.convolve()
        self.pooling.forward([self.output], [self.top])

    def backward(self) -> None:
        pooling, output = self.pooling, self.output
        window = pooling.kernel, pooling.stride, pooling.pad
        pooling.ops.ave_pool_backward(self.top.diff, output.diff, window, x=output.data)
        self.gradients(output.diff, self.layer.bias_diff)


class PooledConvolution:
    """top = maxima of w * bottom + b [, then ReLU, in place or not, with a slope of 0].

    The convolution's output is a buffer of the group's own, which a kernel may leave out. Backward
    writes its gradient over it where the bottom's needs it.
    """

    sums_for: "NormGroup | None" = None
    own_diffs: Sequence[Blob] = ()

    def __init__(self, members: Sequence[Member]) -> None:
        convolution, pooling, *relu = members
        assert isinstance(convolution.layer, Convolution)
        assert isinstance(pooling.layer, Pooling)
        assert all(member.layer.can_fuse for member in relu)
        self.layer, self.pooling, self.relu = convolution.layer, pooling.layer, bool(relu)
        (self.bottom,), (self.convolved,) = convolution.bottoms, convolution.tops
        (self.top,), (self.propagate_down,) = members[-1].tops, convolution.propagate_down
        self.output = self.layer.buffer_like(self.convolved)

    @property
    def buffers(self) -> Sequence[Blob]:
        """The convolution's output and the places of the maxima."""
        return [self.output, *self.pooling.buffers]

    def _maxima(self, values: Array) -> Maxima:
        pooling = self.pooling
        window = pooling.kernel, pooling.stride, pooling.pad
        return Maxima(values, pooling.index.data, window, self.relu)

    def forward(self) -> None:
        layer, output = self.layer, self.output
        output.reshape_like(self.convolved)
        (x,) = layer.whole([self.bottom])
        given = x.data, layer.blobs[0].data, layer.bias, output.data
        layer.conv.forward_maxima(*given, self._maxima(self.top.data))

    def backward(self) -> None:
        """The gradients; a maximum that is not above 0 has no index."""
        layer, maxima, gradient = self.layer, self._maxima(self.top.diff), self.output.data
        (x,) = layer.copies or [self.bottom]
        dw, db = layer.weight_diff, layer.bias_diff
        if self.propagate_down:
            layer.ops.max_pool_backward(maxima.y, maxima.where, gradient, maxima.window)
            layer.gradients(gradient, db, self.bottom, x, True)
        elif dw is not None or db is not None:
            layer.conv.backward_weight_maxima(x.data, gradient, maxima, dw, db)


class ConvolutionLRN(_BehindReLU):
    """top = LRN across channels of relu(w * bottom + b).

    LRN's gradient reads what ReLU wrote, hence knows its mask; it is written over the top's diff.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        super().__init__(members)
        lrn = members[-1].layer
        assert isinstance(lrn, LRN)
        self.lrn = lrn

    @property
    def buffers(self) -> Sequence[Blob]:
        """The convolution's output and what LRN keeps."""
        return [self.output, *self.lrn.buffers]

    def forward(self) -> None:
        self.lrn.normalize(self.convolve(), self.top.data)

    def backward(self) -> None:
        dy = self.top.diff
        given = self.output.data, self.top.data, dy, dy
        self.lrn.gradient(*given, relu=True, db=self.layer.bias_diff)
        self.gradients(dy)


class JoinedMaps:
    """top (N, M) = several maps (N, C, H, W), whose channels lie last, as they lie, side by side:
    SSD's heads, each through a Permute to (N, H, W, C) and a Flatten, and the Concat of all.
    """

    sums_for: "NormGroup | None" = None
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


def _as_it_lies(array: Array) -> Array:
    """Return a view (N, H * W * C) of a map (N, C, H, W) whose channels lie last."""
    n, _, *spatial = array.shape
    lying: Array = array.transpose(0, *range(2, 2 + len(spatial)), 1).reshape(n, -1)
    return lying


class PoolingReLU:
    """top = relu(maxima or means of the bottom), in place or not, with a slope of 0."""

    sums_for: "NormGroup | None" = None
    own_diffs: Sequence[Blob] = ()

    def __init__(self, members: Sequence[Member]) -> None:
        pooling, relu = members
        assert isinstance(pooling.layer, Pooling)
        assert pooling.layer.can_fuse
        assert relu.layer.can_fuse
        self.layer = pooling.layer
        (self.bottom,), (self.top,) = pooling.bottoms, relu.tops
        (self.propagate_down,) = pooling.propagate_down

    @property
    def buffers(self) -> Sequence[Blob]:
        """The places of the maxima."""
        return self.layer.buffers

    def forward(self) -> None:
        layer, x, y = self.layer, self.bottom.data, self.top.data
        window = layer.kernel, layer.stride, layer.pad
        if layer.method == PoolingParameter.MAX:
            layer.ops.max_pool_forward(x, y, layer.index.data, window, relu=True)
        else:
            layer.ops.ave_pool_forward(x, y, window, relu=True)

    def backward(self) -> None:
        """Write the bottom's diff; a maximum that is not above 0 has no index."""
        if not self.propagate_down:
            return
        layer, dy, dx = self.layer, self.top.diff, self.bottom.diff
        window = layer.kernel, layer.stride, layer.pad
        if layer.method == PoolingParameter.MAX:
            layer.ops.max_pool_backward(dy, layer.index.data, dx, window)
        else:
            layer.ops.ave_pool_backward(dy, dx, window, y=self.top.data)


class InnerProductGroup:
    """InnerProduct, then ReLU of slope 0, Dropout or both, in one pass over the product."""

    sums_for: "NormGroup | None" = None
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


class NormGroup:
    """[Convolution,] BatchNorm [, Scale] [, Eltwise] [, ReLU or ReLU6] [, Split]; each reads the
    only top of the one before.

    The Scale has a factor for each channel, the Eltwise adds one blob from outside, the slope of
    ReLU or ReLU6 is 0, the Split has two tops: y = relu(x * factor + shift + other), and the
    gradient of y is the sum of those of the Split's tops.

    x, the output of the convolution, is a blob of the group's own; its diff shares the memory of
    that of y. A group that never runs backward (`learns` False) has x where y will be; one whose
    convolution `skips_output` has no x. `has_gradient` says which tops get a gradient.

    Backward comes in two halves: sums over the gradient of y, and what is computed with them. The
    convolution of the group that writes the last part of that gradient, whose `sums_for` this is,
    computes the first half with it where it can: the part need not be written and read again.
    """

    def __init__(
        self,
        members: Sequence[Member],
        learns: bool = True,
        has_gradient: Sequence[bool] = (True, True),
    ) -> None:
        of = {kind_of(member.layer): member for member in members}
        self.norm, self.convolution = of[BatchNorm], of.get(Convolution)
        assert isinstance(self.norm.layer, BatchNorm)
        self.layer = self.norm.layer
        self.scale = of[Scale].layer if Scale in of else None
        self.ceiling = 6.0 if ReLU6 in of else inf if ReLU in of else None
        self.tops = members[-1].tops
        with_gradient = [top for top, has in zip(self.tops, has_gradient, strict=False) if has]
        # The blob from outside that an Eltwise adds, and whether it gets a gradient.
        self.other: Blob | None = None
        self.wants_other = False
        for before, member in pairwise(members):
            if isinstance(member.layer, Eltwise):
                index = 1 if member.bottoms[0] is before.tops[0] else 0
                self.other, self.wants_other = member.bottoms[index], member.propagate_down[index]
        self.bits = self.layer.buffer(dtype=np.uint8)  # where y is in the ReLU's range, or nothing
        self._fit()
        source = self.norm.bottoms[0]
        keeps = is_in_place(source, self.tops[0]) if self.convolution is None else True
        if learns and keeps:
            self.x = self.layer.buffer_like(source)
            if self.convolution is not None and with_gradient:
                self.x.share_diff(with_gradient[0])
        else:
            self.x = source if self.convolution is None else self.tops[0]
        self.learns = learns
        self.line = self.layer.buffer([2, self.layer.blobs[0].count])
        self.summed: Blob | None = None  # whose diff has the first half of backward
        self.sums_for: NormGroup | None = None
        self.sums_alike = True  # others that write part of that gradient have the same window
        self.own_diffs: Sequence[Blob] = ()
        self._kept = [self.x] if learns and keeps else []
        self.skipped = False  # the output of the convolution, by the last forward

    @property
    def buffers(self) -> Sequence[Blob]:
        """The output of a convolution, or a bottom that is overwritten; bits of the top."""
        kept = [] if self.skips_output else self._kept
        return [*kept, self.bits] if self.learns else kept

    @property
    def half(self) -> tuple[Sequence[Blob], Sequence[Blob]]:
        """Blobs whose data the first half of backward reads, and whose diffs it writes."""
        writes = [self.other] if self.other is not None and self.wants_other else []
        reads = [] if self.skips_output else [self.x]
        return [*reads, self.bits, self.tops[0]], writes

    @property
    def skips_output(self) -> bool:
        """True if a forward pass computes y without x, unless it recomputes after one that did not:
        where the convolution saves passes so.
        """
        if self.convolution is None or not (self.learns and self._is_of_batch):
            return False
        return self._convolving.skips_output(self.x.layout)

    @property
    def skips_gradient(self) -> bool:
        """True if backward does not write the gradient of x, because the convolution's kernel
        computes it as it reads what it is made of.
        """
        convolution = self.convolution
        if convolution is None or self.other is not None or self.skipped:
            return False
        if not (self._is_of_batch and convolution.propagate_down[0]):
            return False
        return self._convolving.skips_gradient(self.x.layout)

    @property
    def _is_of_batch(self) -> bool:
        """True if x is normalized by statistics of its own, and gets a gradient."""
        layer = self.layer
        others = layer.is_global or any(layer.lacks) or layer.together
        return not others and self.norm.propagate_down[0]

    @property
    def masks_by_y(self) -> bool:
        """True if backward finds the mask of a ReLU in y, or in bits of it, and not in x."""
        return self.ceiling is not None and (self.other is not None or self.skips_output)

    @property
    def _convolving(self) -> Convolution:
        """The layer of the convolution, of a group that has one."""
        assert self.convolution is not None
        assert isinstance(self.convolution.layer, Convolution)
        return self.convolution.layer

    def sums_of(self, top: Blob) -> NormSums | None:
        """Return the first half of backward, to be computed with the gradient of a top; from then
        on backward is the second half. None if it is not of this kind.
        """
        layer = self.layer
        if layer.is_global or layer.together or not self.norm.propagate_down[0]:
            return None
        more = [t for t in self.tops if t is not top and t.diff_memory.touched]
        self.summed = self.other if self.other is not None and self.wants_other else top
        return NormSums(
            None if self.skipped else self.x.data,
            layer.numbers.data,
            more[0].diff if more else None,
            self.tops[0].data if self.masks_by_y else None,
            self.kept_bits,
            self.ceiling,
            self.summed.diff,
            *self._scale_diffs(),
            self.line.data,
        )

    def _scale_diffs(self) -> tuple[Array | None, Array | None]:
        """Return the diffs of the Scale's parameters that are wanted."""
        if self.scale is None:
            return None, None
        wanted = zip(self.scale.blobs, self.scale.param_propagate_down, strict=True)
        diffs = [blob.diff if want else None for blob, want in wanted]
        return diffs[0], diffs[1] if len(diffs) > 1 else None

    def _fit(self) -> None:
        """Make room for the bits of the top, which only a sum's gradient wants: a convolution that
        reads y has it at hand.
        """
        y, ops = self.tops[0], self.layer.ops
        wanted = self.ceiling is not None and self.other is not None
        self.bits.reshape([ops.mask_size(y.shape, y.layout) if wanted else 0])

    @property
    def kept_bits(self) -> Array | None:
        """What backward is told of y; None: it looks itself, or needs nothing."""
        return self.bits.data if self.learns and self.bits.count else None

    def forward(self) -> None:
        layer, y = self.layer, self.tops[0]
        self.x.reshape_like(y)
        self._fit()
        if not layer.recomputes:
            self.summed, self.skipped = None, self.skips_output
        if self.skipped:
            self._forward_at_once()
            return
        x, numbers = self._prepare()
        other = None if self.other is None else _flat(self.other.data)
        layer.ops.norm_forward(x, numbers, other, self.ceiling, _flat(y.data), self.kept_bits)

    def _forward_at_once(self) -> None:
        """Compute y without x."""
        assert self.convolution is not None
        (bottom,), convolution = self.convolution.bottoms, self._convolving
        layer, other = self.layer, None if self.other is None else self.other.data
        preparation = None if layer.recomputes else layer.preparation(*self._scale_data())
        to = other, self.ceiling, self.tops[0].data, self.kept_bits
        norm = NormForward(preparation, layer.numbers.data, *to)
        convolution.conv.forward_normalized(bottom.data, convolution.blobs[0].data, norm)

    def _scale_data(self) -> list[Array]:
        """Return factors, and with them shifts, of the Scale, if there is one."""
        return [] if self.scale is None else [blob.data for blob in self.scale.blobs]

    def _prepare(self) -> tuple[Array, Array]:
        """Compute x (N, C, P), and the numbers of its channels."""
        layer, scale = self.layer, self._scale_data()
        if self.convolution is not None and layer.takes_statistics:
            (bottom,) = self.convolution.bottoms
            self._convolving.forward_prepare(bottom, self.x, layer.preparation(*scale))
            x, numbers = _flat(self.x.data), layer.numbers.data
        else:
            if self.convolution is not None:
                self.convolution.layer.forward(self.convolution.bottoms, [self.x])
            elif self.x is not self.norm.bottoms[0]:
                layer.ops.copy(self.norm.bottoms[0].data, self.x.data)
            x = _flat(self.x.data)
            numbers = layer.prepare(x, *scale)
        return x, numbers

    def backward(self) -> None:
        """Write the gradients of x and of the other blob, add to those of the parameters."""
        if self.skipped:
            self._backward_at_once()
            return
        if self.skips_gradient:
            self._backward_past_gradient()
            return
        source = self.norm.bottoms[0] if self.convolution is None else self.x
        if self.summed is not None:
            given = _flat(self.x.data), self.layer.numbers.data, self.line.data
            self.layer.ops.norm_gradient(*given, _flat(self.summed.diff), _flat(source.diff))
            self.summed = None
        else:
            self._backward_norm(_flat(source.diff) if self.norm.propagate_down[0] else None)
        self._backward_convolution()

    def _backward_past_gradient(self) -> None:
        """Backward without the gradient of x."""
        assert self.convolution is not None
        (bottom,), convolution, layer = self.convolution.bottoms, self._convolving, self.layer
        if self.summed is None:
            first = self.sums_of(self._touched[0])
            assert first is not None
            layer.ops.norm_sums(first)
        assert self.summed is not None
        dy = NormGradient(self.x.data, layer.numbers.data, self.line.data, self.summed.diff)
        self.summed = None
        norm = None if self.sums_for is None else self.sums_for.sums_of(bottom)
        given = bottom.data, convolution.blobs[0].data, dy, convolution.weight_diff
        convolution.conv.backward_norm_gradient(*given, bottom.diff if norm is None else norm)

    def _backward_at_once(self) -> None:
        """Backward without x, and without its gradient."""
        assert self.convolution is not None
        (bottom,), (propagate_down,) = self.convolution.bottoms, self.convolution.propagate_down
        convolution = self._convolving
        if self.summed is None:
            dys, masked = self._top_diffs()
            g = masked if masked is not None else dys[0]
            if masked is not None:
                y = _flat(self.tops[0].data) if self.masks_by_y else None
                how = y, self.ceiling, _flat(masked), self.kept_bits
                self.layer.ops.norm_mask(list(map(_flat, dys)), *how)
        else:
            g = self.summed.diff
            self.summed = None
        to = None
        if propagate_down:
            to = self._sums_of(bottom, g) or bottom.diff
        gradients = convolution.weight_diff, *self._scale_diffs()
        given = bottom.data, convolution.blobs[0].data, g, self.layer.numbers.data, gradients
        convolution.conv.backward_normalized(*given, to)

    def _top_diffs(self) -> tuple[list[Array], Array | None]:
        """Return the gradients of the tops, and where their masked sum goes, if it is wanted."""
        dys = [top.diff for top in self._touched]
        if self.other is not None and self.wants_other:
            return dys, self.other.diff
        return dys, dys[0] if self.masks_by_y or len(dys) > 1 else None

    @property
    def _touched(self) -> Sequence[Blob]:
        """The tops that get a gradient: the diffs of the others were never touched."""
        return [top for top in self.tops if top.diff_memory.touched] or self.tops[:1]

    def _sums_of(self, bottom: Blob, dy: Array) -> NormSums | None:
        """Return what the convolution computes with the gradient of its bottom, if it does."""
        group = self.sums_for
        if group is None or not self._convolving.sums_gradients(dy, bottom, self.sums_alike):
            return None
        return group.sums_of(bottom)

    def _backward_convolution(self) -> None:
        if self.convolution is None or not self.norm.propagate_down[0]:
            return
        member, layer = self.convolution, self._convolving
        (bottom,) = member.bottoms
        norm = self._sums_of(bottom, self.x.diff)
        if norm is None:
            layer.backward([self.x], member.propagate_down, member.bottoms)
        else:
            layer.backward_norm(self.x, bottom, norm)

    def _backward_norm(self, dx: Array | None) -> None:
        layer = self.layer
        dys, masked = self._top_diffs()
        dys = [_flat(dy) for dy in dys]
        masked = None if masked is None else _flat(masked)
        y = _flat(self.tops[0].data) if self.masks_by_y else None
        x, numbers = _flat(self.x.data), layer.numbers.data
        given = x, numbers, dys, y, self.ceiling, masked, dx, *self._scale_diffs(), layer.is_global
        layer.ops.norm_backward(*given, self.kept_bits)


class NormPooling(NormGroup):
    """[Convolution,] BatchNorm [, Scale], ReLU, Pooling: maxima of relu(x * factor + shift), which
    is not kept.

    x is the group's own after a convolution, with a diff of its own.
    """

    def __init__(self, members: Sequence[Member], learns: bool = True) -> None:
        *rest, pooling = members
        super().__init__(rest, learns, (False,))
        assert isinstance(pooling.layer, Pooling)
        self.pooling = pooling.layer
        self.tops = pooling.tops
        source = self.norm.bottoms[0]
        self.x, self._kept = source, []
        if self.convolution is not None:
            self.x = self.layer.buffer_like(source)
            self._kept = self.own_diffs = [self.x]

    @property
    def buffers(self) -> Sequence[Blob]:
        """The output of the convolution, and the places of the maxima."""
        return [*self._kept, *self.pooling.buffers]

    @property
    def _window(self) -> Window:
        return self.pooling.kernel, self.pooling.stride, self.pooling.pad

    def forward(self) -> None:
        self.x.reshape_like(self.norm.bottoms[0])
        _, numbers = self._prepare()
        given = self.x.data, numbers, self.tops[0].data, self.pooling.index.data, self._window
        self.layer.ops.norm_max_pool_forward(*given)

    def backward(self) -> None:
        layer, source = self.layer, self.norm.bottoms[0] if self.convolution is None else self.x
        dx = source.diff if self.norm.propagate_down[0] else None
        maxima = self.tops[0].diff, self.pooling.index.data, self._window
        given = self.x.data, layer.numbers.data, *maxima, dx, *self._scale_diffs(), layer.is_global
        layer.ops.norm_max_pool_backward(*given)
        self._backward_convolution()


def _flat(array: Array) -> Array:
    n, c, *spatial = array.shape
    flat: Array = array.reshape(n, c, prod(spatial))
    return flat


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
}
"""The class for a group without a BatchNorm, by the types of its first and last layers."""


def kind_of(layer: Layer) -> type[Layer]:
    """Return the type by which patterns know a layer."""
    return Convolution if isinstance(layer, Convolution) else type(layer)


def make_group(members: Sequence[Member], learns: bool, has_gradient: Sequence[bool]) -> FusedGroup:
    """Return the group; `learns` if it runs backward, then `has_gradient` of each top counts."""
    if any(isinstance(member.layer, BatchNorm) for member in members):
        if isinstance(members[-1].layer, Pooling):
            return NormPooling(members, learns)
        return NormGroup(members, learns, has_gradient)
    kinds = [kind_of(member.layer) for member in members]
    if kinds[:2] == [Convolution, Pooling]:
        return PooledConvolution(members)
    last = members[-1].layer
    if kinds[0] is Convolution and isinstance(last, Pooling) and not last.takes_maxima:
        return ConvolutionMeans(members)
    return GROUPS[kinds[0], kinds[-1]](members)
