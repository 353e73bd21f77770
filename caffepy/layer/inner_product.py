"""Fully connected layers."""

from collections.abc import Sequence
from math import prod

from caffepy.errors import ConfigError
from caffepy.filler import fill
from caffepy.layer.base import Blobs, Layer, layer
from caffepy.layer.convolution import check_shape


@layer("InnerProduct")
class InnerProduct(Layer):
    """(*outer, *inner) -> (*outer, O), the axes from `axis` on as one of size K; weight (O, K) or, transposed, (K, O).

    y = x @ w.T + b.
    """

    on_gpu = True
    seeks_native = True
    in_place = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        """Fill weight and bias."""
        param = self.param.inner_product_param
        self.axis = bottom[0].axis(param.axis)
        self.inputs, self.outputs = prod(bottom[0].shape[self.axis :]), param.num_output
        if self.outputs < 1:
            raise ConfigError("num_output must be 1 or more")
        weight = (self.inputs, self.outputs) if param.transpose else (self.outputs, self.inputs)
        shapes = [weight] + [(self.outputs,)] * param.bias_term
        if not self.blobs:
            for shape, filler in zip(shapes, (param.weight_filler, param.bias_filler), strict=False):
                fill(self.add_blob(shape), filler, self.device.rng)
        if len(self.blobs) != len(shapes):
            raise ConfigError(f"incorrect number of weight blobs: {len(self.blobs)}, not {len(shapes)}")
        for what, blob, shape in zip(("weight", "bias"), self.blobs, shapes, strict=False):
            check_shape(what, blob, shape)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        """The inner size must stay what it was at set-up."""
        shape = bottom[0].shape
        inputs = prod(shape[self.axis :])
        if len(shape) < self.axis or inputs != self.inputs:
            raise ConfigError(
                f"Input size incompatible with inner product parameters. The weights are for {self.inputs} inputs, "
                f"not {inputs} (shape {list(shape)}, axis {self.axis})"
            )
        self.rows = prod(shape[: self.axis])
        top[0].reshape((*shape[: self.axis], self.outputs))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        """Product, then bias."""
        x = bottom[0].data.reshape(self.rows, self.inputs)
        y = top[0].data.reshape(self.rows, self.outputs)
        w = self.blobs[0].data
        self.ops.matmul(x, w if self.param.inner_product_param.transpose else w.T, y)  # (M, K) @ (K, O)
        if len(self.blobs) > 1:
            self.ops.add_bias(y, self.blobs[1].data)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dw += dy.T @ x, db += column sums of dy, dx = dy @ w."""
        transposed = self.param.inner_product_param.transpose
        dy = top[0].diff.reshape(self.rows, self.outputs)
        if self.param_propagate_down[0]:
            x, dw = bottom[0].data.reshape(self.rows, self.inputs), self.blobs[0].diff
            if transposed:
                self.ops.matmul(x.T, dy, dw, accumulate=True)  # (K, M) @ (M, O)
            else:
                self.ops.matmul(dy.T, x, dw, accumulate=True)  # (O, M) @ (M, K)
        if len(self.blobs) > 1 and self.param_propagate_down[1]:
            self.ops.bias_gradient(dy, self.blobs[1].diff)
        if propagate_down[0]:
            w = self.blobs[0].data
            dx = bottom[0].diff.reshape(self.rows, self.inputs)
            self.ops.matmul(dy, w.T if transposed else w, dx)  # (M, O) @ (O, K)
