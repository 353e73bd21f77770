"""Fused groups of convolutions and pooling without a BatchNorm."""

from collections.abc import Sequence

from caffepy.device.blob import Array, Blob
from caffepy.layer.convolution import Convolution
from caffepy.layer.group import Member
from caffepy.layer.norm_groups import NormGroup
from caffepy.layer.normalization import LRN
from caffepy.layer.pooling import Pooling
from caffepy.ops.objects import Maxima
from caffepy.proto.caffe_pb2 import PoolingParameter


class ConvolutionReLU:
    """top = relu(w * bottom + b), in place or not, with a slope of 0.

    Backward changes the top's diff: it becomes that of the convolution. It is so already, and
    the bias has its gradient, where it `begins` no backward, since a ConcatReLUs does.
    """

    sums_for: NormGroup | None = None
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
    """Concat over channels of the tops of ConvolutionReLUs, which no other layer reads [, Split].

    Backward begins theirs: in one pass the gradients of the Split's tops are added up, cut, masked
    by each ReLU and added up for each bias. It reads the data of the bottoms.
    """

    sums_for: NormGroup | None = None
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
    """Base of groups of a Convolution over channels, its ReLU of slope 0, in place or not, and one
    or two layers from whose gradient ReLU's mask can be read.

    The convolution's output is a buffer of the group's own.
    """

    sums_for: NormGroup | None = None
    own_diffs: Sequence[Blob] = ()

    def __init__(self, members: Sequence[Member]) -> None:
        convolution, relu, *_, last = members
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

    A maximum has the sign of the element it was taken of: those that ReLU makes 0 have no place.
    Backward writes the gradient of the convolution's output over that output, and may change the
    top's diff.

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

    def _pools(self, maxima: Maxima) -> bool:
        """True if the convolution computes the maxima, and its gradients from theirs."""
        return not self.propagate_down and self.layer.pools(self.output.layout, maxima.window)

    def forward(self) -> None:
        layer, maxima, output = self.layer, self.pooling.maxima(self.top.data, True), self.output
        if self._pools(maxima):
            output.reshape_like(self.convolved)
            given = self.bottom.data, layer.blobs[0].data, layer.bias, output.data
            layer.conv.forward_maxima(*given, maxima)
        else:
            self.convolve()
            layer.ops.max_pool_forward(output.data, *maxima)

    def backward(self) -> None:
        layer, gradient = self.layer, self.output.data
        maxima = self.pooling.maxima(self.top.diff, True)
        if self._pools(maxima):
            given = layer.weight_diff, layer.bias_diff
            layer.conv.backward_weight_maxima(self.bottom.data, gradient, maxima, *given)
            return
        y, where, window, _ = maxima
        layer.ops.max_pool_backward(y, where, gradient, window, layer.bias_diff)
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
        diffs = self.top.diff, output.diff
        pooling.ops.ave_pool_backward(*diffs, pooling.window, x=output.data)
        self.gradients(output.diff, self.layer.bias_diff)


class PooledConvolution:
    """top = maxima of w * bottom + b [, then ReLU, in place or not, with a slope of 0].

    The convolution's output is a buffer of the group's own, which a kernel may leave out. Backward
    writes its gradient over it where the bottom's needs it.
    """

    sums_for: NormGroup | None = None
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

    def forward(self) -> None:
        layer, output = self.layer, self.output
        output.reshape_like(self.convolved)
        (x,) = layer.whole([self.bottom])
        given = x.data, layer.blobs[0].data, layer.bias, output.data
        layer.conv.forward_maxima(*given, self.pooling.maxima(self.top.data, self.relu))

    def backward(self) -> None:
        """The gradients; a maximum that is not above 0 has no index."""
        layer, gradient = self.layer, self.output.data
        maxima = self.pooling.maxima(self.top.diff, self.relu)
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


class ConvolutionLRNPooling(_BehindReLU):
    """top = maxima of LRN across channels of relu(w * bottom + b).

    What LRN would give is not written. Backward writes the gradient of the convolution's output
    over that output.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        super().__init__(members)
        *_, lrn, pooling = (member.layer for member in members)
        assert isinstance(lrn, LRN)
        assert isinstance(pooling, Pooling)
        self.lrn, self.pooling = lrn, pooling

    @property
    def buffers(self) -> Sequence[Blob]:
        """The convolution's output and the places of the maxima."""
        return [self.output, *self.pooling.buffers]

    def forward(self) -> None:
        pooling, y = self.pooling, self.top.data
        given = self.lrn.terms, pooling.window
        self.layer.ops.lrn_max_pool_forward(self.convolve(), y, pooling.index.data, *given)

    def backward(self) -> None:
        pooling, gradient = self.pooling, self.output.data
        given = self.top.diff, pooling.index.data, gradient, self.lrn.terms, pooling.window
        self.layer.ops.lrn_max_pool_backward(gradient, *given, self.layer.bias_diff)
        self.gradients(gradient)


class PoolingReLU:
    """top = relu(maxima or means of the bottom), in place or not, with a slope of 0."""

    sums_for: NormGroup | None = None
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
        window = layer.window
        if layer.method == PoolingParameter.MAX:
            layer.ops.max_pool_forward(x, y, layer.index.data, window, relu=True)
        else:
            layer.ops.ave_pool_forward(x, y, window, relu=True)

    def backward(self) -> None:
        """Write the bottom's diff; a maximum that is not above 0 has no index."""
        if not self.propagate_down:
            return
        layer, dy, dx = self.layer, self.top.diff, self.bottom.diff
        window = layer.window
        if layer.method == PoolingParameter.MAX:
            layer.ops.max_pool_backward(dy, layer.index.data, dx, window)
        else:
            layer.ops.ave_pool_backward(dy, dx, window, y=self.top.data)
