"""InnerProduct and the ReLU and Dropout that follow it, computed together."""

from collections.abc import Sequence

from caffepy.device.blob import Array
from caffepy.layer.fused.base import Member
from caffepy.layer.inner_product import InnerProduct
from caffepy.layer.neuron import Dropout, ReLU


class InnerProductGroup:
    """InnerProduct, then ReLU of slope 0, Dropout or both: one pass over memory after the product,
    forward and backward.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        first, *after = members
        assert isinstance(first.layer, InnerProduct)
        self.inner_product = first.layer
        self.rectifies = any(isinstance(member.layer, ReLU) for member in after)
        dropout = after[-1].layer if after else None
        self.dropout = dropout if isinstance(dropout, Dropout) and dropout.draws else None
        (self.bottom,), (self.top,) = first.bottoms, members[-1].tops
        (self.propagate_down,) = first.propagate_down

    @property
    def _mask(self) -> tuple[Array | None, float]:
        if self.dropout is None:
            return None, 0.0
        return self.dropout.mask.data, self.dropout.ratio

    def forward(self) -> None:
        """y = dropout(relu(x @ w.T + b))."""
        layer, (mask, ratio) = self.inner_product, self._mask
        seed, step_counter = self.dropout.draw() if self.dropout else (0, None)
        y = layer.product(self.bottom, self.top)
        layer.ops.bias_act_forward(y, layer.bias, self.rectifies, ratio, seed, mask, step_counter)

    def backward(self) -> None:
        """The gradient of x @ w.T + b in place of dy, then those of InnerProduct."""
        layer, (mask, ratio) = self.inner_product, self._mask
        y, dy = (a.reshape(layer.rows, layer.outputs) for a in (self.top.data, self.top.diff))
        layer.ops.bias_act_backward(y, dy, layer.bias_diff, self.rectifies, mask, ratio)
        layer.gradients(dy, None, self.bottom, self.propagate_down)
