"""A Convolution and the ReLU that follows it, computed together."""

from collections.abc import Sequence

from caffepy.device.blob import Array
from caffepy.layer.convolution import Convolution
from caffepy.layer.fused.base import Member


class ConvolutionReLU:
    """top = relu(w * bottom + b), in place or not, with a slope of 0.

    Backward changes the top's diff: it becomes that of the convolution.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        convolution, relu = members
        assert isinstance(convolution.layer, Convolution)
        assert relu.layer.can_fuse
        self.layer = convolution.layer
        (self.bottom,), (self.top,) = convolution.bottoms, relu.tops
        (self.propagate_down,) = convolution.propagate_down

    def forward(self) -> None:
        layer = self.layer
        b = layer.blobs[1].data if len(layer.blobs) > 1 else None
        layer.conv.forward(self.bottom.data, layer.blobs[0].data, b, self.top.data, relu=True)

    def backward(self) -> None:
        layer, dy = self.layer, self.top.diff
        dw, db = layer.gradients()
        layer.ops.relu_bias_backward(self._rows(self.top.data), self._rows(dy), db)
        if dw is not None:
            with layer.side_stream(self.propagate_down):
                layer.conv.backward_weight(self.bottom.data, dy, dw, None)
        if self.propagate_down:
            layer.conv.backward_data(dy, layer.blobs[0].data, self.bottom.diff)

    def _rows(self, array: Array) -> Array:
        """The top's array as (N, O, ...), also where several axes stand for N."""
        return array.reshape(self.layer.conv.y_shape) if self.layer.axis != 1 else array
