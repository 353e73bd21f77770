"""Margins at the labels of scores that others computed."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from caffepy.core.errors import ConfigError, DataError
from caffepy.device.blob import Array
from caffepy.layer.base import Blobs, Layer, layer
from caffepy.layer.neuron import is_in_place
from caffepy.proto.caffe_pb2 import TRAIN


@layer("LabelSpecificAdd")
class LabelSpecificAdd(Layer):
    """Scores x (N, C), labels (N) -> x with `bias`, a number below 0, added to that of the label
    where it is above -bias, in the TRAIN phase only; the second top is the bias (AM-Softmax: Wang
    et al. 2018, happynear's).

    With a bias_base it is bias_base + (1 + gamma * t)^power - 1, within bias_min and bias_max; t
    counts forward passes from `iteration` on.
    """

    on_gpu = True
    in_place = True
    bottoms = 2
    tops = (1, 2)
    backward_reads_bottom = backward_reads_top = False
    constant_bottoms: Mapping[int, str] = {
        1: "{type} cannot differentiate its labels; the layer that makes them needs no gradient"
    }

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.passes = self.buffer([1], np.float64)
        self.passes.host_data[...] = self.param.label_specific_add_param.iteration
        self.wrong = self.error_flag(
            lambda label: DataError(
                f"label {label:g} is not one of the {self.classes} classes 0 to {self.classes - 1}"
            )
        )

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        if len(bottom[0].shape) < 2:
            raise ConfigError(f"LabelSpecificAdd needs (N, C), not {list(bottom[0].shape)}")
        n, *classes = bottom[0].shape
        self.classes = prod(classes)
        if bottom[1].count != n:
            raise ConfigError(f"{bottom[1].count} labels do not fit {n} rows of scores")
        self.number = self.buffer([self.classes])
        self.number.host_data[...] = np.arange(self.classes)
        top[0].reshape_like(bottom[0])
        if len(top) > 1:
            top[1].reshape((1,))

    def state(self) -> dict[str, Any]:
        return {"passes": float(self.passes.host_data[0])}

    def set_state(self, state: dict[str, Any]) -> None:
        self.passes.host_data[...] = state["passes"]

    def bias(self) -> float | Array:
        """Count the pass; return the bias."""
        param, passes = self.param.label_specific_add_param, self.passes.data
        if not param.HasField("bias_base"):
            return param.bias
        bias = param.bias_base - 1 + (1 + param.bias_gamma * passes) ** param.bias_power
        passes += 1
        return np.minimum(np.maximum(bias, param.bias_min), param.bias_max).astype(self.dtype)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        bias = self.bias() if self.phase == TRAIN else 0.0
        if len(top) > 1:
            top[1].data[...] = bias
        if self.phase != TRAIN or not bottom[0].count:
            self.ops.copy(bottom[0].data, top[0].data)
            return
        x = bottom[0].data.reshape(-1, self.classes)
        labels = bottom[1].data.reshape(-1, 1)
        self.wrong.set_where(~((labels > -1) & (labels < self.classes)), labels)
        self.wrong.check()
        chosen = (np.trunc(labels) == self.number.data) & (x > -bias)
        top[0].data.reshape(x.shape)[...] = np.where(chosen, x + bias, x)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx = dy."""
        self.refuse_constants(propagate_down)
        if propagate_down[0] and not is_in_place(bottom[0], top[0]):
            self.ops.copy(top[0].diff, bottom[0].diff)
