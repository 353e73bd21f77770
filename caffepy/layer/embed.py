"""Embed: a table of vectors, looked up by whole numbers."""

from collections.abc import Sequence

from caffepy.core.errors import ConfigError, DataError
from caffepy.layer.base import Blobs, Layer, layer
from caffepy.layer.data_error import error_flag


@layer("Embed")
class Embed(Layer):
    """(...) of whole numbers below K -> (..., O), y = w[x] + b; weight (K, O), bias (O)."""

    on_gpu = True
    in_place = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.embed_param
        self.inputs, self.outputs = param.input_dim, param.num_output
        if self.inputs < 1 or self.outputs < 1:
            raise ConfigError("embed_param: input_dim and num_output must be 1 or more")
        shapes = {"weight": (self.inputs, self.outputs)}
        self.make_params(
            shapes | ({"bias": (self.outputs,)} if param.bias_term else {}),
            (param.weight_filler, param.bias_filler),
        )
        self.wrong = error_flag(self, self.no_row)

    def no_row(self, x: float) -> DataError:
        return DataError(f"input {x:g} is not one of the {self.inputs} rows 0 to {self.inputs - 1}")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        top[0].reshape([*bottom[0].shape, self.outputs])

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        y = top[0].data.reshape(-1, self.outputs)
        self.ops.take_rows(
            self.blobs[0].data, bottom[0].data.reshape(-1), True, y, self.wrong.found
        )
        self.wrong.check()
        if len(self.blobs) > 1:
            self.ops.add_bias(y, self.blobs[1].data)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dw[x] += dy, db += column sums of dy."""
        if propagate_down[0]:
            raise ConfigError("Embed cannot differentiate its input; give it propagate_down: false")
        dy = top[0].diff.reshape(-1, self.outputs)
        if self.param_propagate_down[0]:
            self.ops.add_rows(dy, bottom[0].data.reshape(-1), self.blobs[0].diff)
        if len(self.blobs) > 1 and self.param_propagate_down[1]:
            self.ops.bias_gradient(dy, self.blobs[1].diff)

    def allow_force_backward(self, index: int) -> bool:
        return False
