"""Neurons that draw random numbers: dropout, and rectifiers whose slopes are random."""

import math
from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from caffepy.core.errors import ConfigError
from caffepy.device.blob import Array
from caffepy.layer.base import Blobs, Drawing, Kept, layer
from caffepy.layer.neuron import Elementwise, Neuron, SameShape


def _checked(ratio: float) -> float:
    if not 0 <= ratio < 1:
        raise ConfigError(f"dropout_ratio must be at least 0 and below 1, not {ratio:g}")
    return ratio


@layer("Dropout")
class Dropout(Drawing, Elementwise):
    """TRAIN: y = x * m / (1 - r), m is 1 with probability 1 - r, r = dropout_ratio. TEST: y = x.

    Without scale_train (Fast R-CNN) both are multiplied by 1 - r. With SegNet's sample_weights_test
    TEST draws, too; with happynear's sqrt_scale TRAIN divides by the root of 1 - r.
    """

    backward_reads_bottom = backward_reads_top = False
    can_fuse = can_replay = True

    @property
    def draws(self) -> bool:
        return super().draws or self.param.dropout_param.sample_weights_test

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.dropout_param
        self.ratio = _checked(param.dropout_ratio)
        self.factor = 1.0 if param.scale_train else 1 - self.ratio
        if param.sqrt_scale and self.draws:
            self.factor *= math.sqrt(1 - self.ratio)
        self.can_fuse = self.factor == 1
        self.in_place_keeps = Kept.ALL if self.is_identity else Kept.SIGNS

    @property
    def is_identity(self) -> bool:
        """True if y = x, in this phase and with these settings."""
        return self.factor == 1 and (self.ratio == 0 or not self.draws)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        self.mask = self.buffer(bottom[0].shape, np.uint8)

    @property
    def buffers(self) -> Blobs:
        return [self.mask] if self.draws else []

    def function(self, x: Array, y: Array) -> None:
        if self.draws:
            self.ops.dropout_forward(x, y, self.mask.data, self.ratio, *self.draw())
        elif x is not y:
            self.ops.copy(x, y)
        if self.factor != 1:
            self.ops.scaled(self.factor, y, y)

    def gradient(self, x: Array, y: Array, dy: Array, dx: Array) -> None:
        """dx = dy * m / (1 - r), or as forward without scale_train."""
        if self.draws:
            self.ops.dropout_backward(dy, self.mask.data, dx, self.ratio)
        elif dy is not dx:
            self.ops.copy(dy, dx)
        if self.factor != 1:
            self.ops.scaled(self.factor, dx, dx)


@layer("SeLuDropout", "SeLUDropout")
class SeLuDropout(Dropout):
    """TRAIN: y = a * (x where m is 1, else alpha) + b, m is 1 with probability q, 1 less
    dropout_ratio. TEST: y = x (soeaver's, Synopsys'; Klambauer et al. 2017).

    a = (q * (1 + alpha^2 * (1 - q)))^-1/2, b = -a * (1 - q) * alpha.
    """

    takes_preferred_layout = False  # the mask is of places in memory
    can_fuse = can_replay = False
    in_place_keeps = Kept.NOTHING

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.selu_dropout_param
        self.ratio, self.factor = _checked(param.dropout_ratio), 1.0
        kept = 1 - self.ratio
        self.slope = (kept * (1 + param.alpha**2 * self.ratio)) ** -0.5
        self.shift = -self.slope * self.ratio * param.alpha
        if not self.draws:
            self.in_place_keeps = Kept.ALL

    def function(self, x: Array, y: Array) -> None:
        super().function(x, y)
        if self.draws:
            self.ops.scaled(self.slope * (1 - self.ratio), y, y)
            dropped = self.slope * self.param.selu_dropout_param.alpha
            y += (1 - self.mask.data) * y.dtype.type(dropped) + y.dtype.type(self.shift)

    def gradient(self, x: Array, y: Array, dy: Array, dx: Array) -> None:
        """dx = a * m * dy."""
        super().gradient(x, y, dy, dx)
        if self.draws:
            self.ops.scaled(self.slope * (1 - self.ratio), dx, dx)


@layer("SpatialDropout", "ChannelDropout")
class SpatialDropout(Drawing, SameShape):
    """TRAIN: y = x * m / (1 - r) for whole planes of (N, C, ...), m is 1 with probability 1 - r.
    TEST: y = x. r is dropout_ratio of dropout_param (Intel Caffe, ENet; Tompson et al. 2015).
    ChannelDropout is caffe-pose's name.
    """

    backward_reads_bottom = backward_reads_top = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param
        given = param.HasField("spatial_dropout_param")
        chosen = param.spatial_dropout_param if given else param.dropout_param
        self.ratio = _checked(chosen.dropout_ratio)
        self.in_place_keeps = Kept.SIGNS if self.draws else Kept.ALL

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        shape = bottom[0].shape
        if len(shape) < 2:
            raise ConfigError(f"SpatialDropout needs (N, C, ...), not {list(shape)}")
        planes = prod(shape[:2])
        self.view = 1, planes, prod(shape[2:])
        self.mask, self.factor = self.buffer([planes], np.uint8), self.buffer([planes])
        self.ones = self.buffer([planes])
        self.ones.host_data[...] = 1

    def scaled(self, x: Array, y: Array) -> None:
        """Write y, the planes of x times their factors."""
        if self.draws:
            planes = x.reshape(self.view), self.factor.data, None, y.reshape(self.view)
            self.ops.scale_forward(*planes)
        elif x is not y:
            self.ops.copy(x, y)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        if self.draws:
            given = self.ones.data, self.factor.data, self.mask.data
            self.ops.dropout_forward(*given, self.ratio, *self.draw())
        self.scaled(bottom[0].data, top[0].data)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx = dy * m / (1 - r)."""
        if propagate_down[0]:
            self.scaled(top[0].diff, bottom[0].diff)


@layer("GuidedDropout")
class GuidedDropout(Drawing, SameShape):
    """y = x * m * C / (number of channels kept) for the channels of (N, C, ...), m of a guidance g
    (N, C) (Domain guided dropout: Xiao et al. 2016).

    "deterministic": m is 1 where g > guidance_threshold. "stochastic": in TRAIN m is 1 with
    probability p = s(sigmoid_scaler * g), the number of channels is the sum of p; in TEST y = x.
    """

    bottoms = 2
    backward_reads_bottom = backward_reads_top = False
    constant_bottoms: Mapping[int, str] = {
        1: "{type} cannot differentiate its guidance; the layer that makes it needs no gradient"
    }

    @property
    def is_stochastic(self) -> bool:
        """True if m is drawn."""
        return self.param.guided_dropout_param.type == "stochastic"

    @property
    def draws(self) -> bool:
        return super().draws and self.is_stochastic

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        kind = self.param.guided_dropout_param.type
        if kind not in ("deterministic", "stochastic"):
            raise ConfigError(f'type is deterministic or stochastic, not "{kind}"')

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        shape, guidance = bottom[0].shape, bottom[1]
        if len(shape) < 2 or guidance.shape[:2] != shape[:2] or guidance.count != prod(shape[:2]):
            raise ConfigError(
                "GuidedDropout needs (N, C, ...) and a guidance (N, C), not "
                f"{list(shape)} and {list(guidance.shape)}"
            )
        self.planes = shape[:2]
        self.view = 1, prod(shape[:2]), prod(shape[2:])
        self.factor, self.drawn_slopes = self.buffer(self.planes), self.buffer(self.planes)
        self.negative = self.buffer(self.planes)
        self.negative.host_data[...] = -1

    def scaled(self, x: Array, y: Array) -> None:
        """Write y, the planes of x times their factors."""
        if self.draws or not self.is_stochastic:
            planes = x.reshape(self.view), self.factor.data.reshape(-1), None, y.reshape(self.view)
            self.ops.scale_forward(*planes)
        elif x is not y:
            self.ops.copy(x, y)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        param, guidance = self.param.guided_dropout_param, bottom[1].data.reshape(self.planes)
        channels = self.planes[1]
        if self.draws:
            # 1 / slope is uniform from 1 to 2.
            slopes = self.drawn_slopes.data
            given = self.negative.data, self.factor.data, slopes
            self.ops.rrelu_forward(*given, (1.0, 2.0), *self.draw())
            chance = 0.5 + 0.5 * np.tanh(0.5 * param.sigmoid_scaler * guidance)
            share = np.maximum(chance.sum(axis=1, keepdims=True) / channels, 1e-30)
            kept = 1 / slopes - 1 <= chance
        elif not self.is_stochastic:
            kept = guidance > param.guidance_threshold
            share = np.maximum(kept.sum(axis=1, keepdims=True), 1) / channels
        if self.draws or not self.is_stochastic:
            np.divide(kept, share, out=self.factor.data, casting="unsafe")
        self.scaled(bottom[0].data, top[0].data)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx = dy * m * C / (number of channels kept)."""
        self.refuse_constants(propagate_down)
        if propagate_down[0]:
            self.scaled(top[0].diff, bottom[0].diff)


class _Randomized(Drawing, Neuron):
    """Base: y = x > 0 ? x : x / a, a uniform between two bounds in TRAIN, a mean in TEST (Xu et al.
    2015).
    """

    bounds: tuple[float, float]
    mean: float
    backward_reads_bottom = backward_reads_top = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        low, high = self.bounds
        if not 0 < low <= high:
            raise ConfigError(
                f"{self.type} needs bounds above 0, the lower first, not {low:g} and {high:g}"
            )

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        self.slope = self.buffer(bottom[0].shape)

    def function(self, x: Array, y: Array) -> None:
        if self.draws:
            self.ops.rrelu_forward(x, y, self.slope.data, self.bounds, *self.draw())
        else:
            self.slope.data[...] = np.where(x > 0, 1, 1 / self.mean)
            self.ops.multiply(x, self.slope.data, y)

    def gradient(self, x: Array, y: Array, dy: Array, dx: Array) -> None:
        """dx = dy * (x > 0 ? 1 : 1 / a)."""
        self.ops.multiply(dy, self.slope.data, dx)


def harmonic(low: float, high: float) -> float:
    """Return 1 over the mean of 1 / a, a uniform from low to high."""
    return (high - low) / math.log(high / low) if high > low else low


@layer("RReLU")
class RReLU(_Randomized):
    """y = x > 0 ? x : x / a, a uniform from negative_slope_lower to negative_slope_upper in TRAIN,
    their mean in TEST (Xu et al. 2015; a pull request of BVLC's). With lb and ub as Insanity
    (ducha-aiki's).
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.rrelu_param
        if param.HasField("lb") != param.HasField("ub"):
            raise ConfigError("rrelu_param: lb and ub must both be given or neither")
        if param.HasField("lb"):
            self.bounds = param.lb, param.ub
            super().setup(bottom, top)
            self.mean = harmonic(*self.bounds)
            return
        self.bounds = param.negative_slope_lower, param.negative_slope_upper
        super().setup(bottom, top)
        self.mean = sum(self.bounds) / 2


@layer("Insanity")
class Insanity(_Randomized):
    """y = x > 0 ? x : x / a, a uniform from lb to ub in TRAIN; in TEST (ub - lb) / ln(ub / lb), so
    that 1 / a is its mean (happynear).
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.insanity_param
        self.bounds = param.lb, param.ub
        super().setup(bottom, top)
        self.mean = harmonic(*self.bounds)
