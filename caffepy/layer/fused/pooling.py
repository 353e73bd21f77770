"""A Pooling and the ReLU that follows it, computed together."""

from caffepy.device.blob import Blob
from caffepy.layer.base import Layer
from caffepy.layer.pooling import Pooling
from caffepy.proto.caffe_pb2 import PoolingParameter

METHODS = (PoolingParameter.MAX, PoolingParameter.AVE)
"""What may be followed by a ReLU."""


class PoolingReLU:
    """top = relu(maxima or means of the bottom), in place or not, with a slope of 0."""

    def __init__(
        self, pooling: Layer, relu: Layer, bottom: Blob, top: Blob, propagate_down: bool
    ) -> None:
        assert isinstance(pooling, Pooling)
        assert pooling.method in METHODS
        assert relu.param.relu_param.negative_slope == 0
        self.layer, self.bottom, self.top, self.propagate_down = (
            pooling,
            bottom,
            top,
            propagate_down,
        )

    def forward(self) -> None:
        """Write the top's data."""
        layer, x, y = self.layer, self.bottom.data, self.top.data
        window = layer.kernel, layer.stride, layer.pad
        if layer.method == PoolingParameter.MAX:
            layer.ops.max_pool_forward(x, y, layer.index.data, *window, relu=True)
        else:
            layer.ops.ave_pool_forward(x, y, *window, relu=True)

    def backward(self) -> None:
        """Write the bottom's diff; the index of a maximum tells already whether it is above 0."""
        if not self.propagate_down:
            return
        layer, dy, dx = self.layer, self.top.diff, self.bottom.diff
        window = layer.kernel, layer.stride, layer.pad
        if layer.method == PoolingParameter.MAX:
            layer.ops.max_pool_backward(dy, layer.index.data, dx, *window)
        else:
            layer.ops.ave_pool_backward(dy, dx, *window, y=self.top.data)
