"""Neurons: layers that map each element of the bottom to the same element of the top, x to y."""

import logging
import math
from collections.abc import Sequence
from math import isfinite, prod
from typing import Any

import numpy as np

from caffepy.core.errors import ConfigError
from caffepy.device.blob import Array, Blob
from caffepy.layer.base import Blobs, Kept, Layer, layer
from caffepy.proto.caffe_pb2 import TRAIN, FillerParameter

log = logging.getLogger(__name__)


def is_in_place(bottom: Blob, top: Blob) -> bool:
    """True if the top's data overwrite the bottom's."""
    return top.data_memory is bottom.data_memory


def _signs(kept: bool) -> Kept:
    return Kept.SIGNS if kept else Kept.NOTHING


class SameShape(Layer):
    """A top of the bottom's shape.

    Where backward needs x (`reads_input`) and the top overwrites it, forward keeps a copy.
    """

    on_gpu = True
    in_place = True
    can_recompute = True
    reads_input = False

    @property
    def buffers(self) -> Blobs:
        return [self.kept] if self.copies else []

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        top[0].reshape_like(bottom[0])
        self.copies = self.reads_input and is_in_place(bottom[0], top[0])
        self.kept = self.buffer_like(bottom[0]) if self.copies else bottom[0]

    def keep_input(self, bottom: Blobs) -> Array:
        """Return x for forward; backward finds it in `kept`."""
        if self.kept is not bottom[0]:
            self.ops.copy(bottom[0].data, self.kept.data)
        return self.kept.data


class Neuron(SameShape):
    """A layer given by its function of x and its gradient.

    `gradient` gets x as forward had it with `reads_input`, else what the bottom holds by now.
    """

    backward_needs = Kept.ACTIVE

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self.function(self.keep_input(bottom), top[0].data)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        if propagate_down[0]:
            self.gradient(self.kept.data, top[0].data, top[0].diff, bottom[0].diff)

    def function(self, x: Array, y: Array) -> None:
        """Write y; both of one shape, and one array in place."""
        raise NotImplementedError

    def gradient(self, x: Array, y: Array, dy: Array, dx: Array) -> None:
        """Write dx; arrays of x and y, and of dy and dx, are the same in place."""
        raise NotImplementedError


class Elementwise(Neuron):
    """A layer whose operations take blobs in any layout."""

    takes_preferred_layout = True
    only_launches = True


@layer("ReLU")
class ReLU(Elementwise):
    """y = x > 0 ? x : negative_slope * x."""

    can_replay = True
    backward_reads_top = False
    backward_needs = Kept.SIGNS
    fused_backward_reads_top = True

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.slope = self.param.relu_param.negative_slope
        self.can_fuse = self.slope == 0
        self.reads_input = self.slope < 0  # the sign of y is not that of x
        self.in_place_keeps = Kept.ACTIVE if self.can_fuse else _signs(not self.reads_input)

    def function(self, x: Array, y: Array) -> None:
        self.ops.relu_forward(x, y, self.slope)

    def gradient(self, x: Array, y: Array, dy: Array, dx: Array) -> None:
        """dx = dy * (x > 0 ? 1 : negative_slope)."""
        self.ops.relu_backward(x, dy, dx, self.slope)


@layer("NegReLU")
class NegReLU(Neuron):
    """y = min(x, 0) + negative_slope * max(x, 0), of relu_param (FlowNet)."""

    reads_input = True
    backward_reads_top = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.slope = self.param.relu_param.negative_slope

    def function(self, x: Array, y: Array) -> None:
        np.multiply(x, np.where(x < 0, 1, self.slope), out=y)

    def gradient(self, x: Array, y: Array, dy: Array, dx: Array) -> None:
        """dx = dy * (x < 0 ? 1 : negative_slope)."""
        np.multiply(dy, np.where(x < 0, 1, self.slope), out=dx)


@layer("ReLU6")
class ReLU6(Elementwise):
    """y = min(x > 0 ? x : negative_slope * x, 6) (MobileNet-YOLO's relu6_param)."""

    backward_reads_top = False
    backward_needs = Kept.ACTIVE
    fused_backward_reads_top = True

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.slope = self.param.relu6_param.negative_slope
        self.can_fuse = self.slope == 0
        self.reads_input = self.slope < 0  # the sign of y is not that of x

    def function(self, x: Array, y: Array) -> None:
        self.ops.relu6_forward(x, y, self.slope)

    def gradient(self, x: Array, y: Array, dy: Array, dx: Array) -> None:
        """dx = dy * (x <= 0 ? negative_slope : x < 6 ? 1 : 0)."""
        self.ops.relu6_backward(x, dy, dx, self.slope)


@layer("PReLU")
class PReLU(Elementwise):
    """y = x > 0 ? x : slope_c * x; slope (C), or () with channel_shared (He et al. 2015)."""

    reads_input = True
    backward_reads_top = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.require_channels(bottom)
        param = self.param.prelu_param
        self.shared = param.channel_shared
        shape = () if self.shared else bottom[0].shape[1:2]
        default = FillerParameter(value=0.25)
        self.make_params({"slope": shape}, [param.filler if param.HasField("filler") else default])

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        n, c, *rest = bottom[0].shape
        self.view = n, c, prod(rest)
        if not self.shared and c != self.blobs[0].count:
            raise ConfigError(f"{c} channels do not fit the {self.blobs[0].count} slopes")

    def function(self, x: Array, y: Array) -> None:
        slope = self.blobs[0].data.reshape(-1)
        self.ops.prelu_forward(x.reshape(self.view), y.reshape(self.view), slope)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx = dy * (x > 0 ? 1 : slope_c); dslope_c += sum of dy * x over x <= 0."""
        dx = bottom[0].diff.reshape(self.view) if propagate_down[0] else None
        dslope = self.blobs[0].diff.reshape(-1) if self.param_propagate_down[0] else None
        x, dy = self.kept.data.reshape(self.view), top[0].diff.reshape(self.view)
        self.ops.prelu_backward(x, dy, self.blobs[0].data.reshape(-1), dx, dslope)


@layer("APL")
class APL(SameShape):
    """y = max(x, 0) + sum over s of a_s * max(b_s - x, 0), with slopes a and offsets b of each
    element of an item (Agostinelli et al. 2014).

    Both are blobs (1, 1, sums, K) for items of K elements; as in the fork, the `sums` numbers of an
    element lie side by side in them.
    """

    reads_input = True
    backward_reads_top = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.apl_param
        self.require_channels(bottom)
        if param.sums < 1:
            raise ConfigError("apl_param: sums must be 1 or more")
        least = FillerParameter(type="uniform", min=-0.5 / param.sums, max=0.5 / param.sums)
        slope = param.slope_filler if param.HasField("slope_filler") else least
        wide = FillerParameter(type="gaussian", std=0.5)
        offset = param.offset_filler if param.HasField("offset_filler") else wide
        shape = (1, 1, param.sums, prod(bottom[0].shape[1:]))
        self.make_params({"slope": shape, "offset": shape}, [slope, offset])

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        n, *rest = bottom[0].shape or (0,)
        self.view = n, prod(rest)
        if (known := self.blobs[0].count // self.param.apl_param.sums) != prod(rest):
            raise ConfigError(
                f"items of {prod(rest)} elements do not fit slopes for each of {known} elements"
            )

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        x, y = self.keep_input(bottom).reshape(self.view), top[0].data.reshape(self.view)
        slopes, offsets = (blob.data.reshape(self.view[1], -1).T for blob in self.blobs)
        hinges = [a * np.maximum(b - x, 0) for a, b in zip(slopes, offsets, strict=True)]
        np.maximum(x, 0, out=y)
        for hinge in hinges:
            np.add(y, hinge, out=y)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx = dy * ((x > 0) - sum of a_s where b_s > x); da_s += sum of dy * max(b_s - x, 0) over
        the items, db_s += sum of dy * a_s where b_s > x.
        """
        x, dy = self.kept.data.reshape(self.view), top[0].diff.reshape(self.view)
        slopes, offsets = (blob.data.reshape(self.view[1], -1).T for blob in self.blobs)
        dslopes, doffsets = (blob.diff.reshape(self.view[1], -1).T for blob in self.blobs)
        slope_of_x = (x > 0).astype(x.dtype)
        for s, (a, b) in enumerate(zip(slopes, offsets, strict=True)):
            open_ = b > x
            slope_of_x -= a * open_
            if self.param_propagate_down[0]:
                dslopes[s] += np.sum(dy * np.maximum(b - x, 0), axis=0)
            if self.param_propagate_down[1]:
                doffsets[s] += np.sum(dy * a * open_, axis=0)
        if propagate_down[0]:
            np.multiply(dy, slope_of_x, out=bottom[0].diff.reshape(self.view))


@layer("Sigmoid")
class Sigmoid(Elementwise):
    """y = 1 / (1 + exp(-x))."""

    backward_reads_bottom = False

    def function(self, x: Array, y: Array) -> None:
        self.ops.sigmoid_forward(x, y)

    def gradient(self, x: Array, y: Array, dy: Array, dx: Array) -> None:
        """dx = dy * y * (1 - y)."""
        self.ops.sigmoid_backward(y, dy, dx)


@layer("TanH")
class TanH(Elementwise):
    """y = tanh(x)."""

    backward_reads_bottom = False
    in_place_keeps = Kept.SIGNS

    def function(self, x: Array, y: Array) -> None:
        self.ops.tanh_forward(x, y)

    def gradient(self, x: Array, y: Array, dy: Array, dx: Array) -> None:
        """dx = dy * (1 - y^2)."""
        self.ops.tanh_backward(y, dy, dx)


@layer("Power")
class Power(Elementwise):
    """y = (shift + scale * x)^power."""

    backward_reads_top = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.power_param
        self.numbers = param.power, param.scale, param.shift
        self.reads_input = param.power not in (0, 1) and param.scale != 0
        self.backward_reads_bottom = self.reads_input
        self.in_place_keeps = _signs(param.power == 1 and param.scale > 0 and param.shift == 0)
        if self.in_place_keeps and param.scale == 1:
            self.in_place_keeps = Kept.ALL
        # A constant is written by no operation.
        self.takes_preferred_layout = param.power * param.scale != 0

    def function(self, x: Array, y: Array) -> None:
        power, scale, shift = self.numbers
        if power * scale == 0:
            with np.errstate(all="ignore"):
                y.fill(np.float64(shift) ** power)
        else:
            self.ops.power_forward(x, y, power, scale, shift)

    def gradient(self, x: Array, y: Array, dy: Array, dx: Array) -> None:
        """dx = dy * power * scale * (shift + scale * x)^(power - 1)."""
        power, scale, _ = self.numbers
        if power * scale == 0:
            dx.fill(0)
        elif power == 1:
            self.ops.scaled(scale, dy, dx)
        else:
            self.ops.power_backward(x, dy, dx, *self.numbers)


@layer("CReLU")
class CReLU(Layer):
    """(N, C, ...) -> (N, 2C, ...): max(x, 0), then max(-x, 0) (Shang et al. 2016)."""

    on_gpu = True
    can_recompute = True
    backward_reads_top = False

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shape = bottom[0].shape
        if len(shape) < 2:
            raise ConfigError(f"CReLU needs (N, C, ...), not {list(shape)}")
        top[0].reshape((shape[0], 2 * shape[1], *shape[2:]))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        x, y, c = bottom[0].data, top[0].data, bottom[0].shape[1]
        np.maximum(x, 0, out=y[:, :c])
        np.maximum(-x, 0, out=y[:, c:])

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx is that of the half in which x is not 0, of the first half for 0."""
        if propagate_down[0]:
            x, dy, c = bottom[0].data, top[0].diff, bottom[0].shape[1]
            bottom[0].diff[...] = np.where(x < 0, -dy[:, c:], dy[:, :c])


@layer("ELU")
class ELU(Elementwise):
    """y = x > 0 ? x : alpha * (exp(x) - 1) (Clevert et al. 2015)."""

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.alpha = self.param.elu_param.alpha
        self.reads_input = self.alpha < 0  # the sign of y is not that of x
        self.in_place_keeps = _signs(not self.reads_input)

    def function(self, x: Array, y: Array) -> None:
        self.ops.elu_forward(x, y, self.alpha)

    def gradient(self, x: Array, y: Array, dy: Array, dx: Array) -> None:
        """dx = dy * (x > 0 ? 1 : alpha + y)."""
        self.ops.elu_backward(x, y, dy, dx, self.alpha)


@layer("Swish")
class Swish(Elementwise):
    """y = x * s, s = sigmoid(beta * x) (Ramachandran et al. 2017)."""

    backward_reads_bottom = False
    in_place_keeps = Kept.SIGNS

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        self.beta = self.param.swish_param.beta
        self.sigmoid = self.buffer(bottom[0].shape)

    def function(self, x: Array, y: Array) -> None:
        self.ops.swish_forward(x, y, self.sigmoid.data, self.beta)

    def gradient(self, x: Array, y: Array, dy: Array, dx: Array) -> None:
        """dx = dy * (beta * y + s * (1 - beta * y))."""
        self.ops.swish_backward(y, self.sigmoid.data, dy, dx, self.beta)


@layer("AbsVal")
class AbsVal(Neuron):
    """y = |x|."""

    reads_input = True
    backward_reads_top = False

    def function(self, x: Array, y: Array) -> None:
        np.abs(x, out=y)

    def gradient(self, x: Array, y: Array, dy: Array, dx: Array) -> None:
        """dx = dy * sign(x)."""
        np.multiply(dy, np.sign(x), out=dx)


@layer("BNLL")
class BNLL(Neuron):
    """y = log(1 + exp(x))."""

    reads_input = True
    backward_reads_top = False

    def function(self, x: Array, y: Array) -> None:
        """y = max(x, 0) + log(1 + exp(-|x|))."""
        np.add(np.log1p(np.exp(-np.abs(x))), np.maximum(x, 0), out=y)

    def gradient(self, x: Array, y: Array, dy: Array, dx: Array) -> None:
        """dx = dy * sigmoid(x)."""
        np.multiply(dy, 0.5 * np.tanh(0.5 * x) + 0.5, out=dx)


@layer("Clip")
class Clip(Neuron):
    """y = max(min_, min(x, max_))."""

    reads_input = True
    backward_reads_top = False
    in_place_keeps = Kept.ACTIVE

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.low, self.high = self.param.clip_param.min, self.param.clip_param.max
        if self.low > self.high:
            raise ConfigError(
                f"clip_param needs min <= max, not min {self.low:g} and max {self.high:g}"
            )

    def function(self, x: Array, y: Array) -> None:
        np.clip(x, self.low, self.high, out=y)

    def gradient(self, x: Array, y: Array, dy: Array, dx: Array) -> None:
        """dx = dy where min <= x <= max, else 0."""
        np.multiply(dy, (x >= self.low) & (x <= self.high), out=dx)


@layer("HardSigmoid")
class HardSigmoid(Neuron):
    """y = max(0, min(0.2 x + 0.5, 1)) (MobileNet-YOLO).

    Its gradient is the fork's, with which its nets were trained: it does not end where y does.
    """

    backward_reads_bottom = backward_reads_top = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        log.info("HardSigmoid: its gradient is 0.2 everywhere, as in MobileNet-YOLO")

    def function(self, x: Array, y: Array) -> None:
        np.multiply(x, 0.2, out=y)
        np.add(y, 0.5, out=y)
        np.clip(y, 0, 1, out=y)

    def gradient(self, x: Array, y: Array, dy: Array, dx: Array) -> None:
        """dx = dy * 0.2."""
        self.ops.scaled(0.2, dy, dx)


@layer("HSwish", "HardSwish")
class HSwish(Neuron):
    """y = x * max(0, min(x + 3, 6)) / 6 (Howard et al. 2019); HardSwish is Synopsys' name."""

    reads_input = True
    backward_reads_top = False

    def function(self, x: Array, y: Array) -> None:
        gate = np.clip(x + 3, 0, 6)
        np.multiply(x, gate, out=y)
        np.multiply(y, 1 / 6, out=y)

    def gradient(self, x: Array, y: Array, dy: Array, dx: Array) -> None:
        """dx = dy * (x <= -3 ? 0 : x < 3 ? (2 x + 3) / 6 : 1)."""
        slope = np.where(x < 3, (2 * x + 3) / 6, 1) * (x > -3)
        np.multiply(dy, slope, out=dx)


@layer("SeLu", "SeLU")
class SeLu(Neuron):
    """y = lambda * (x > 0 ? x : alpha * (exp(x) - 1)) (soeaver's, Synopsys'; Klambauer et al.
    2017).
    """

    reads_input = True
    backward_reads_top = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.selu_param
        self.rate, self.alpha = float(getattr(param, "lambda")), param.alpha

    def function(self, x: Array, y: Array) -> None:
        below = self.alpha * np.expm1(np.minimum(x, 0))
        np.multiply(np.maximum(x, 0) + below, self.rate, out=y)

    def gradient(self, x: Array, y: Array, dy: Array, dx: Array) -> None:
        """dx = lambda * dy * (x > 0 ? 1 : alpha * exp(x))."""
        slope = np.where(x > 0, 1, self.alpha * np.exp(np.minimum(x, 0)))
        np.multiply(dy * slope, self.rate, out=dx)


@layer("Mish")
class Mish(Neuron):
    """y = x * tanh(log(1 + exp(x))) (Misra 2019)."""

    reads_input = True
    backward_reads_top = False

    def function(self, x: Array, y: Array) -> None:
        np.multiply(x, self.gate(x), out=y)

    @staticmethod
    def gate(x: Array) -> Array:
        """Return tanh(max(x, 0) + log(1 + exp(-|x|)))."""
        gate: Array = np.tanh(np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))))
        return gate

    def gradient(self, x: Array, y: Array, dy: Array, dx: Array) -> None:
        """dx = dy * (t + x * sigmoid(x) * (1 - t^2)), t = tanh(log(1 + exp(x)))."""
        t = self.gate(x)
        sigmoid = 0.5 * np.tanh(0.5 * x) + 0.5
        np.multiply(dy, t + x * sigmoid * (1 - t * t), out=dx)


@layer("Exp")
class Exp(Neuron):
    """y = base^(shift + scale * x) = factor * exp(rate * x), base e by default."""

    backward_reads_bottom = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.exp_param
        natural = _log_of_base(param.base)
        self.rate = natural * param.scale
        with np.errstate(over="ignore"):
            self.factor = float(np.exp(natural * param.shift))

    def function(self, x: Array, y: Array) -> None:
        np.multiply(x, self.rate, out=y)
        np.exp(y, out=y)
        np.multiply(y, self.factor, out=y)

    def gradient(self, x: Array, y: Array, dy: Array, dx: Array) -> None:
        """dx = dy * y * rate."""
        np.multiply(dy, y * self.rate, out=dx)


@layer("Log")
class Log(Neuron):
    """y = log of (shift + scale * x) to the base, e by default."""

    reads_input = True
    backward_reads_top = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.log_param
        natural = _log_of_base(param.base)
        if natural == 0:
            raise ConfigError("log_param: there is no logarithm to the base 1")
        self.factor, self.scale, self.shift = 1 / natural, param.scale, param.shift

    def function(self, x: Array, y: Array) -> None:
        np.multiply(x, self.scale, out=y)
        np.add(y, self.shift, out=y)
        with np.errstate(all="ignore"):
            np.log(y, out=y)
        np.multiply(y, self.factor, out=y)

    def gradient(self, x: Array, y: Array, dy: Array, dx: Array) -> None:
        """dx = dy * scale / (ln(base) * (shift + scale * x))."""
        with np.errstate(all="ignore"):
            slope = self.factor * self.scale / (x * self.scale + self.shift)
        np.multiply(dy, slope, out=dx)


def _log_of_base(base: float) -> float:
    if base == -1:
        return 1.0
    if not (base > 0 and isfinite(base)):
        raise ConfigError(f"base must be greater than 0, or -1 for e, not {base:g}")
    return math.log(base)


@layer("SignedSqrt")
class SignedSqrt(Neuron):
    """y = sign(x) * sqrt(|x|) (compact bilinear pooling); the gradient is bounded, as there."""

    backward_reads_bottom = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        log.info("SignedSqrt: its gradient is 1 / (2 |y| + 0.06), as in compact bilinear pooling")

    def function(self, x: Array, y: Array) -> None:
        np.multiply(np.sign(x), np.sqrt(np.abs(x)), out=y)

    def gradient(self, x: Array, y: Array, dy: Array, dx: Array) -> None:
        """dx = dy / (2 * (|y| + 0.03)), which is not the derivative."""
        np.divide(dy, 2 * np.abs(y) + 0.06, out=dx)


@layer("Threshold")
class Threshold(SameShape):
    """y = x > threshold ? 1 : 0; no gradient."""

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        threshold = self.param.threshold_param.threshold
        np.greater(bottom[0].data, threshold, out=top[0].data, casting="unsafe")


@layer("GradientScaler")
class GradientScaler(SameShape):
    """y = x; dx = -c * dy (Ganin and Lempitsky 2015, domain-adversarial forks).

    c = lower_bound + (upper_bound - lower_bound) * (2 / (1 + exp(-alpha * p)) - 1), with
    p = min(t / max_iter, 1). With a threshold_iter T, p = min((t - T) / (T + max_iter), 1), and c
    is 0 up to t = T. t counts forward passes of the TRAIN phase before this one.
    """

    can_recompute = False
    backward_reads_bottom = backward_reads_top = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.settings = self.param.gradient_scaler_param
        if not (param.max_iter >= 1 and param.alpha >= 0):
            raise ConfigError(
                "gradient_scaler_param: max_iter must be 1 or more and alpha 0 or more, not "
                f"{param.max_iter:g} and {param.alpha:g}"
            )
        self.passes = self.buffer([1], np.float64)

    def state(self) -> dict[str, Any]:
        return {"passes": float(self.passes.host_data[0])}

    def set_state(self, state: dict[str, Any]) -> None:
        self.passes.host_data[...] = state["passes"]

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        if not is_in_place(bottom[0], top[0]):
            self.ops.copy(bottom[0].data, top[0].data)
        if self.phase == TRAIN:
            self.passes.data[...] += 1

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx = -c * dy."""
        if not propagate_down[0]:
            return
        param, t = self.settings, self.passes.data - 1
        late = t - param.threshold_iter
        share = np.minimum(np.maximum(late, 0) / (param.threshold_iter + param.max_iter), 1)
        height = param.upper_bound - param.lower_bound
        c = param.lower_bound + height * (2 / (1 + np.exp(-param.alpha * share)) - 1)
        if param.threshold_iter:
            c = np.where(late > 0, c, 0)
        np.multiply(top[0].diff, -c.astype(self.dtype), out=bottom[0].diff)
