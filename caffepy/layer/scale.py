"""Scale and Bias, whose parameter is broadcast over the other axes."""

import logging
from collections.abc import Sequence
from math import prod

import numpy as np

from caffepy.core.errors import ConfigError
from caffepy.device.blob import Array, Blob
from caffepy.layer.base import Blobs, layer
from caffepy.layer.filler import fill_beside, filler_of
from caffepy.layer.neuron import SameShape, is_in_place
from caffepy.proto.caffe_pb2 import FillerParameter

log = logging.getLogger(__name__)


class Broadcast(SameShape):
    """A layer whose parameter, or bottom 1, has the shape of `num_axes` axes of bottom 0, from
    `axis` on, and is broadcast over the others.
    """

    bottoms = (1, 2)

    def make_blobs(
        self, bottom: Blobs, axis: int, num_axes: int, fillers: Sequence[FillerParameter]
    ) -> None:
        """Create and fill blobs of the shape of these axes, one for each filler.

        ConfigError for axes that the bottom does not have, or given blobs of another number.
        """
        shape = bottom[-1].shape
        if len(bottom) == 1:
            start = bottom[0].axis(axis)
            end = len(shape) if num_axes == -1 else start + num_axes
            if num_axes < -1 or end > len(shape):
                raise ConfigError(
                    f"axis {axis} and num_axes {num_axes} do not lie within {list(shape)}"
                )
            shape = shape[start:end]
        if not self.blobs:
            for filler in fillers:
                fill_beside(self.add_blob(shape), filler, self.device.random)
        if len(self.blobs) != len(fillers):
            raise ConfigError(
                f"incorrect number of parameters: {len(self.blobs)}, not {len(fillers)}"
            )

    def find_view(self, bottom: Blobs, axis: int, operand: Blob) -> None:
        """Set `view`, (outer, C, inner) with C the count of the operand; ConfigError if that does
        not fit the bottom from `axis` on.
        """
        shape = bottom[0].shape
        start = 0 if not operand.shape else bottom[0].axis(axis)
        end = start + len(operand.shape)
        if shape[start:end] != operand.shape:
            raise ConfigError(
                f"shape {list(operand.shape)} does not fit {list(shape)} from axis {start} on"
            )
        self.view = (prod(shape[:start]), operand.count, prod(shape[end:]))

    def gradients(
        self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs
    ) -> tuple[Array, Array | None, Array | None]:
        """Return dy and dx as (outer, C, inner), and the operand's diff (C), from zero if that is a
        bottom's. dx is dy itself in place; None for what is not wanted.
        """
        dy, dx, doperand = top[0].diff.reshape(self.view), None, None
        if propagate_down[0]:
            in_place = top[0].diff is bottom[0].diff
            dx = dy if in_place else bottom[0].diff.reshape(self.view)
        if len(bottom) > 1 and propagate_down[1]:
            bottom[1].diff.fill(0)
            doperand = bottom[1].diff.reshape(-1)
        elif len(bottom) == 1 and self.param_propagate_down[0]:
            doperand = self.blobs[0].diff.reshape(-1)
        return dy, dx, doperand


@layer("Scale")
class Scale(Broadcast):
    """y = x * scale + bias, both broadcast over the other axes.

    The scale is bottom 1 or a parameter (filled with 1), the bias (bias_term) the last parameter
    (filled with 0). With happynear's min_value and max_value each forward pass cuts a scale that is
    a parameter to them.
    """

    reads_input = True
    backward_reads_top = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.scale_param
        bounds = [
            getattr(param, name) if param.HasField(name) else None
            for name in ("min_value", "max_value")
        ]
        self.bounds = bounds if bounds != [None, None] else None
        if self.bounds and len(bottom) > 1:
            raise ConfigError("min_value and max_value are for a scale that is a parameter")
        fillers = [filler_of(param, "filler", 1)] if len(bottom) == 1 else []
        if param.bias_term:
            log.info("Creating layer %s", self.param.name)  # Caffe's Bias within
            fillers.append(param.bias_filler)
        self.make_blobs(bottom, param.axis, param.num_axes, fillers)
        self.bias = self.blobs[-1] if param.bias_term else None
        self.can_fuse = param.axis == 1 and param.num_axes == 1 and self.bounds is None
        self.by_channels = (
            len(bottom) == 1 and bottom[0].axis(param.axis) == 1 and len(self.blobs[0].shape) == 1
        )
        self.takes_preferred_layout = self.by_channels

    @property
    def only_launches(self) -> bool:
        return self.bounds is None

    @property
    def can_replay(self) -> bool:  # type: ignore[override]
        return self.bounds is None and self.scale in self.blobs

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        self.scale = bottom[1] if len(bottom) > 1 else self.blobs[0]
        self.find_view(bottom, self.param.scale_param.axis, self.scale)
        if self.bias is not None and self.bias.count != self.scale.count:
            raise ConfigError(f"{self.bias.count} biases do not fit a scale of {self.scale.count}")

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        x = self.keep_input(bottom).reshape(self.view)
        bias = None if self.bias is None else self.bias.data.reshape(-1)
        if self.bounds:
            np.clip(self.scale.data, *self.bounds, out=self.scale.data)
        self.ops.scale_forward(x, self.scale.data.reshape(-1), bias, top[0].data.reshape(self.view))

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx = dy * scale; dscale is the sum of dy * x, dbias += the sum of dy."""
        dy, dx, dscale = self.gradients(top, propagate_down, bottom)
        dbias = None
        if self.bias is not None and self.param_propagate_down[-1]:
            dbias = self.bias.diff.reshape(-1)
        x = self.kept.data.reshape(self.view)
        self.ops.scale_backward(x, self.scale.data.reshape(-1), dy, dx, dscale, dbias)


@layer("EltwiseAffine")
class EltwiseAffine(Scale):
    """y = x * slope + bias, both (C), or one number each with channel_shared; filled with 1.0001
    and 0.0001 (happynear).
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        given, param = self.param.eltwise_affine_param, self.param.scale_param
        param.bias_term, param.num_axes = True, int(not given.channel_shared)
        param.filler.CopyFrom(filler_of(given, "slope_filler", 1.0001))
        param.bias_filler.CopyFrom(filler_of(given, "bias_filler", 0.0001))
        super().setup(bottom, top)
        self.can_fuse = False


@layer("Bias")
class Bias(Broadcast):
    """y = x + bias, broadcast over the other axes; bias is bottom 1 or a parameter (0 at first)."""

    backward_reads_bottom = backward_reads_top = False

    @property
    def can_replay(self) -> bool:  # type: ignore[override]
        return bool(self.blobs)

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.bias_param
        self.make_blobs(bottom, param.axis, param.num_axes, [param.filler] * (len(bottom) == 1))

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        self.bias = bottom[1] if len(bottom) > 1 else self.blobs[0]
        self.find_view(bottom, self.param.bias_param.axis, self.bias)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        if not is_in_place(bottom[0], top[0]):
            self.ops.copy(bottom[0].data, top[0].data)
        self.ops.add_bias(top[0].data.reshape(self.view), self.bias.data.reshape(-1))

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx = dy; dbias is the sum of dy over the other axes."""
        dy, dx, dbias = self.gradients(top, propagate_down, bottom)
        if dbias is not None:
            self.ops.bias_gradient(dy, dbias)
        if dx is not None and dx is not dy:
            self.ops.copy(dy, dx)
