"""A Pooling and the ReLU that follows it, computed together."""

from collections.abc import Sequence

from caffepy.layer.fused.base import Member
from caffepy.layer.pooling import Pooling
from caffepy.proto.caffe_pb2 import PoolingParameter


class PoolingReLU:
    """top = relu(maxima or means of the bottom), in place or not, with a slope of 0."""

    def __init__(self, members: Sequence[Member]) -> None:
        pooling, relu = members
        assert isinstance(pooling.layer, Pooling)
        assert pooling.layer.can_fuse
        assert relu.layer.can_fuse
        self.layer = pooling.layer
        (self.bottom,), (self.top,) = pooling.bottoms, relu.tops
        (self.propagate_down,) = pooling.propagate_down

    def forward(self) -> None:
        layer, x, y = self.layer, self.bottom.data, self.top.data
        window = layer.kernel, layer.stride, layer.pad
        if layer.method == PoolingParameter.MAX:
            layer.ops.max_pool_forward(x, y, layer.index.data, *window, relu=True)
        else:
            layer.ops.ave_pool_forward(x, y, *window, relu=True)

    def backward(self) -> None:
        """Write the bottom's diff; a maximum that is not above 0 has no index."""
        if not self.propagate_down:
            return
        layer, dy, dx = self.layer, self.top.diff, self.bottom.diff
        window = layer.kernel, layer.stride, layer.pad
        if layer.method == PoolingParameter.MAX:
            layer.ops.max_pool_backward(dy, layer.index.data, dx, *window)
        else:
            layer.ops.ave_pool_backward(dy, dx, *window, y=self.top.data)
