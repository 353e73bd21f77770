"""Fully connected layers."""

from collections.abc import Sequence
from math import prod
from typing import Protocol

from caffepy.core.errors import ConfigError
from caffepy.device.blob import Array, Blob, Layout
from caffepy.layer.base import Blobs, Weighted, layer


class Factors(Protocol):
    """Computes the mean over several solvers of the gradient of a layer's weight."""

    def __call__(self, dy: Array, x: Array) -> None:
        """Take this solver's factors of dy.T @ x: dy (M, O), x (M, K); may overwrite them."""


@layer("InnerProduct")
class InnerProduct(Weighted):
    """(*outer, *inner) -> (*outer, O), the axes from `axis` on as one of size K; weight (O, K) or,
    transposed, (K, O).

    y = x @ w.T + b. If the bottom has a narrower type than the weight, products are in that type.
    """

    on_gpu = True
    seeks_preferred_layout = True
    is_matrix_product = True
    can_fuse = True
    backward_reads_top = False
    factors: "Factors | None" = None
    """Set where several solvers compute the weight's gradient together."""
    overwrites = False
    """True to overwrite the weight's gradient (beta = 0) since nothing else adds to it."""

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.inner_product_param
        self.axis = bottom[0].axis(param.axis)
        self.inputs, self.outputs = prod(bottom[0].shape[self.axis :]), param.num_output
        self.transposed = param.transpose
        if self.outputs < 1:
            raise ConfigError("num_output must be 1 or more")
        weight = (self.inputs, self.outputs) if self.transposed else (self.outputs, self.inputs)
        self.make_weight(weight, param.num_output, param)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shape = bottom[0].shape
        inputs = prod(shape[self.axis :])
        if len(shape) < self.axis or inputs != self.inputs:
            raise ConfigError(
                "Input size incompatible with inner product parameters. The weights are for "
                f"{self.inputs} inputs, not {inputs} (shape {list(shape)}, axis {self.axis})"
            )
        self.rows = prod(shape[: self.axis])
        top[0].reshape((*shape[: self.axis], self.outputs))
        narrow = bottom[0].layout.dtype
        self.narrow_weight = self.buffer(self.blobs[0].shape, narrow)
        self.narrow_dy = self.buffer((self.rows, self.outputs), narrow)

    def layout_for(self, preferred: Layout) -> Layout:
        """The preferred type; the order is that of the weight's columns."""
        return Layout(preferred.dtype, False)

    def macs(self, bottoms: Sequence[int], tops: Sequence[int]) -> int:
        return self.inputs * tops[0]

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        y = self.product(bottom[0], top[0])
        if (b := self.bias) is not None:
            self.ops.add_bias(y, b)

    def product(self, bottom: Blob, top: Blob) -> Array:
        """Write x @ w.T into the top; returns it as (M, O)."""
        x, w = bottom.data.reshape(self.rows, self.inputs), self.blobs[0].data
        y: Array = top.data.reshape(self.rows, self.outputs)
        if x.dtype != w.dtype:
            self.ops.convert(w, self.narrow_weight.data)
            w = self.narrow_weight.data
        self.ops.matmul(x, w if self.transposed else w.T, y)  # (M, K) @ (K, O)
        return y

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dw += dy.T @ x, db += column sums of dy, dx = dy @ w."""
        dy = top[0].diff.reshape(self.rows, self.outputs)
        self.gradients(dy, self.bias_diff, bottom[0], propagate_down[0])

    def gradients(self, dy: Array, db: Array | None, bottom: Blob, down: bool) -> None:
        """dw += dy.T @ x, db += column sums of dy (M, O) unless None, dx = dy @ w with `down`."""
        x = bottom.data.reshape(self.rows, self.inputs)
        w = self.blobs[0].data
        if dy.dtype != x.dtype:
            narrow = self.narrow_dy.data
            if db is None:
                self.ops.convert(dy, narrow)
            else:
                self.ops.bias_gradient(dy, db, narrow)
            dy, db = narrow, None
        if x.dtype != w.dtype:
            w = self.narrow_weight.data
        with self.side_stream(down):
            if db is not None:
                self.ops.bias_gradient(dy, db)
            if self.param_propagate_down[0] and self.factors is None:
                self.weight_gradient(dy, x, not self.overwrites)
        if self.param_propagate_down[0] and self.factors is not None:
            self.factors(dy, x)
        if down:
            dx = bottom.diff.reshape(self.rows, self.inputs)
            self.ops.matmul(dy, w.T if self.transposed else w, dx)  # (M, O) @ (O, K)

    def weight_gradient(self, dy: Array, x: Array, accumulate: bool, scale: float = 1.0) -> None:
        """dw = scale * dy.T @ x, or dw += that, of dy (M, O) and x (M, K), both of one type."""
        dw = self.blobs[0].diff
        if self.transposed:
            self.ops.matmul(x.T, dy, dw, accumulate, scale)  # (K, M) @ (M, O)
        else:
            self.ops.matmul(dy.T, x, dw, accumulate, scale)  # (O, M) @ (M, K)
