"""InnerProduct with what follows it in place."""

from caffepy.device.blob import Array, Blob
from caffepy.layer.base import Layer
from caffepy.layer.inner_product import InnerProduct
from caffepy.layer.neuron import Dropout


class InnerProductRun:
    """InnerProduct, then ReLU of slope 0, Dropout or both: what follows the product is one pass
    each way.
    """

    def __init__(
        self,
        inner_product: Layer,
        relu: Layer | None,
        dropout: Layer | None,
        bottom: Blob,
        top: Blob,
        propagate_down: bool,
    ) -> None:
        assert isinstance(inner_product, InnerProduct)
        assert dropout is None or isinstance(dropout, Dropout)
        self.inner_product = inner_product
        self.rectifies = relu is not None
        self.dropout = dropout if dropout and dropout.draws else None
        self.bottom, self.top, self.propagate_down = bottom, top, propagate_down

    @property
    def _mask(self) -> tuple[Array | None, float]:
        if self.dropout is None:
            return None, 0.0
        return self.dropout.mask.data, self.dropout.ratio

    def forward(self) -> None:
        """y = dropout(relu(x @ w.T + b))."""
        layer, (mask, ratio) = self.inner_product, self._mask
        seed, tick = self.dropout.draw() if self.dropout else (0, None)
        y = layer.product(self.bottom, self.top)
        layer.ops.bias_act_forward(y, layer.bias, self.rectifies, ratio, seed, mask, tick)

    def backward(self) -> None:
        """The gradient of x @ w.T + b in place of dy, then those of InnerProduct."""
        layer, (mask, ratio) = self.inner_product, self._mask
        y, dy = (a.reshape(layer.rows, layer.outputs) for a in (self.top.data, self.top.diff))
        layer.ops.bias_act_backward(y, dy, layer.bias_diff, self.rectifies, mask, ratio)
        layer.gradients(dy, None, self.bottom, self.propagate_down)
