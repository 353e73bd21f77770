"""Neurons: layers that map each element of the bottom to the same element of the top, x to y."""

from collections.abc import Sequence
from math import isfinite, log, prod

import numpy as np

from caffepy.core.errors import ConfigError
from caffepy.device.blob import PLAIN, Array, Blob, Layout
from caffepy.layer.base import Blobs, Drawing, Layer, layer
from caffepy.proto.caffe_pb2 import FillerParameter


def is_in_place(bottom: Blob, top: Blob) -> bool:
    """True if the top's data overwrite the bottom's."""
    return top.data_memory is bottom.data_memory


class SameShape(Layer):
    """A top of the bottom's shape.

    Where backward needs x (`reads_input`) and the top overwrites it, forward keeps a copy.
    """

    on_gpu = True
    reads_input = False

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        top[0].reshape_like(bottom[0])
        copies = self.reads_input and is_in_place(bottom[0], top[0])
        self.kept = self._buffer_like(bottom[0]) if copies else bottom[0]

    def _buffer_like(self, blob: Blob) -> Blob:
        buffer = self.buffer(blob.shape)
        if buffer.layout != blob.layout:
            buffer.set_layout(blob.layout)
        return buffer

    def keep_input(self, bottom: Blobs) -> Array:
        """Return x for forward; backward finds it in `kept`."""
        if self.kept is not bottom[0]:
            self.ops.copy(bottom[0].data, self.kept.data)
        return self.kept.data


class Elementwise(SameShape):
    """A layer whose operations take blobs in any layout."""

    def layout_for(self, preferred: Layout) -> Layout:
        return preferred


@layer("ReLU")
class ReLU(Elementwise):
    """y = x > 0 ? x : negative_slope * x."""

    backward_reads_top = False
    fused_backward_reads_top = True

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        """Read the slope; a negative one hides the sign of x in that of y."""
        self.slope = self.param.relu_param.negative_slope
        self.can_fuse = self.slope == 0
        self.reads_input = self.slope < 0

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self.ops.relu_forward(self.keep_input(bottom), top[0].data, self.slope)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx = dy * (x > 0 ? 1 : negative_slope)."""
        if propagate_down[0]:
            self.ops.relu_backward(self.kept.data, top[0].diff, bottom[0].diff, self.slope)


@layer("PReLU")
class PReLU(Elementwise):
    """y = x > 0 ? x : slope_c * x; the parameter is slope (C), or () with channel_shared (He et al.
    2015).
    """

    reads_input = True

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        if len(bottom[0].shape) < 2:
            raise ConfigError(
                f"PReLU needs a bottom of at least 2 axes, not {list(bottom[0].shape)}"
            )
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

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        x = self.keep_input(bottom)
        slope = self.blobs[0].data.reshape(-1)
        self.ops.prelu_forward(x.reshape(self.view), top[0].data.reshape(self.view), slope)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx = dy * (x > 0 ? 1 : slope_c); dslope_c += sum of dy * x over x <= 0."""
        dx = bottom[0].diff.reshape(self.view) if propagate_down[0] else None
        dslope = self.blobs[0].diff.reshape(-1) if self.param_propagate_down[0] else None
        x, dy = self.kept.data.reshape(self.view), top[0].diff.reshape(self.view)
        self.ops.prelu_backward(x, dy, self.blobs[0].data.reshape(-1), dx, dslope)


@layer("Sigmoid")
class Sigmoid(Elementwise):
    """y = 1 / (1 + exp(-x))."""

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self.ops.sigmoid_forward(bottom[0].data, top[0].data)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx = dy * y * (1 - y)."""
        if propagate_down[0]:
            self.ops.sigmoid_backward(top[0].data, top[0].diff, bottom[0].diff)


@layer("TanH")
class TanH(Elementwise):
    """y = tanh(x)."""

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self.ops.tanh_forward(bottom[0].data, top[0].data)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx = dy * (1 - y^2)."""
        if propagate_down[0]:
            self.ops.tanh_backward(top[0].data, top[0].diff, bottom[0].diff)


@layer("Power")
class Power(Elementwise):
    """y = (shift + scale * x)^power."""

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.power_param
        self.numbers = param.power, param.scale, param.shift
        self.reads_input = param.power not in (0, 1) and param.scale != 0

    def layout_for(self, preferred: Layout) -> Layout:
        """The preferred one, but for a constant, which no operation writes."""
        power, scale, _ = self.numbers
        return preferred if power * scale else PLAIN

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        power, scale, shift = self.numbers
        if power * scale == 0:
            with np.errstate(all="ignore"):
                top[0].data.fill(np.float64(shift) ** power)
        else:
            self.ops.power_forward(self.keep_input(bottom), top[0].data, power, scale, shift)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx = dy * power * scale * (shift + scale * x)^(power - 1)."""
        power, scale, _ = self.numbers
        if not propagate_down[0]:
            return
        if power * scale == 0:
            bottom[0].diff.fill(0)
        elif power == 1:
            self.ops.scaled(scale, top[0].diff, bottom[0].diff)
        else:
            self.ops.power_backward(self.kept.data, top[0].diff, bottom[0].diff, *self.numbers)


@layer("Dropout")
class Dropout(Drawing, Elementwise):
    """TRAIN: y = x * m / (1 - r), m is 1 with probability 1 - r, r = dropout_ratio. TEST: y = x."""

    backward_reads_bottom = backward_reads_top = False
    can_fuse = True

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.ratio = self.param.dropout_param.dropout_ratio
        if not 0 <= self.ratio < 1:
            raise ConfigError(f"dropout_ratio must be at least 0 and below 1, not {self.ratio:g}")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        self.mask = self.buffer(bottom[0].shape, np.uint8)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        x, y = bottom[0].data, top[0].data
        if self.draws:
            self.ops.dropout_forward(x, y, self.mask.data, self.ratio, *self.draw())
        elif x is not y:
            self.ops.copy(x, y)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx = dy * m / (1 - r)."""
        if not propagate_down[0]:
            return
        dy, dx = top[0].diff, bottom[0].diff
        if self.draws:
            self.ops.dropout_backward(dy, self.mask.data, dx, self.ratio)
        elif dy is not dx:
            self.ops.copy(dy, dx)


@layer("ELU")
class ELU(Elementwise):
    """y = x > 0 ? x : alpha * (exp(x) - 1) (Clevert et al. 2015)."""

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        """Read alpha; a negative one hides the sign of x in that of y."""
        self.alpha = self.param.elu_param.alpha
        self.reads_input = self.alpha < 0

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self.ops.elu_forward(self.keep_input(bottom), top[0].data, self.alpha)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx = dy * (x > 0 ? 1 : alpha + y)."""
        if propagate_down[0]:
            self.ops.elu_backward(
                self.kept.data, top[0].data, top[0].diff, bottom[0].diff, self.alpha
            )


@layer("Swish")
class Swish(Elementwise):
    """y = x * s, s = sigmoid(beta * x) (Ramachandran et al. 2017)."""

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        self.beta = self.param.swish_param.beta
        self.sigmoid = self.buffer(bottom[0].shape)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self.ops.swish_forward(bottom[0].data, top[0].data, self.sigmoid.data, self.beta)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx = dy * (beta * y + s * (1 - beta * y))."""
        if propagate_down[0]:
            self.ops.swish_backward(
                top[0].data, self.sigmoid.data, top[0].diff, bottom[0].diff, self.beta
            )


@layer("AbsVal")
class AbsVal(SameShape):
    """y = |x|."""

    reads_input = True

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        np.abs(self.keep_input(bottom), out=top[0].data)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx = dy * sign(x)."""
        if propagate_down[0]:
            np.multiply(top[0].diff, np.sign(self.kept.data), out=bottom[0].diff)


@layer("BNLL")
class BNLL(SameShape):
    """y = log(1 + exp(x))."""

    reads_input = True

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        """Write y, as max(x, 0) + log(1 + exp(-|x|))."""
        x = self.keep_input(bottom)
        y = np.exp(-np.abs(x))
        np.log1p(y, out=y)
        np.add(y, np.maximum(x, 0), out=top[0].data)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx = dy * sigmoid(x)."""
        if propagate_down[0]:
            np.multiply(top[0].diff, 0.5 * np.tanh(0.5 * self.kept.data) + 0.5, out=bottom[0].diff)


@layer("Clip")
class Clip(SameShape):
    """y = max(min_, min(x, max_))."""

    reads_input = True

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.low, self.high = self.param.clip_param.min, self.param.clip_param.max
        if self.low > self.high:
            raise ConfigError(
                f"clip_param needs min <= max, not min {self.low:g} and max {self.high:g}"
            )

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        np.clip(self.keep_input(bottom), self.low, self.high, out=top[0].data)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx = dy where min <= x <= max, else 0."""
        if propagate_down[0]:
            x = self.kept.data
            np.multiply(top[0].diff, (x >= self.low) & (x <= self.high), out=bottom[0].diff)


@layer("Exp")
class Exp(SameShape):
    """y = base^(shift + scale * x), base e by default."""

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        """y = factor * exp(rate * x)."""
        param = self.param.exp_param
        natural = _log_of_base(param.base)
        self.rate = natural * param.scale
        self.factor = float(np.exp(natural * param.shift))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        y = top[0].data
        np.multiply(bottom[0].data, self.rate, out=y)
        np.exp(y, out=y)
        np.multiply(y, self.factor, out=y)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx = dy * y * rate."""
        if propagate_down[0]:
            np.multiply(top[0].diff, top[0].data * self.rate, out=bottom[0].diff)


@layer("Log")
class Log(SameShape):
    """y = log of (shift + scale * x) to the base, e by default."""

    reads_input = True

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.log_param
        natural = _log_of_base(param.base)
        if natural == 0:
            raise ConfigError("log_param: there is no logarithm to the base 1")
        self.factor, self.scale, self.shift = 1 / natural, param.scale, param.shift

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        y = top[0].data
        np.multiply(self.keep_input(bottom), self.scale, out=y)
        np.add(y, self.shift, out=y)
        with np.errstate(all="ignore"):
            np.log(y, out=y)
        np.multiply(y, self.factor, out=y)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx = dy * scale / (ln(base) * (shift + scale * x))."""
        if propagate_down[0]:
            with np.errstate(all="ignore"):
                slope = self.factor * self.scale / (self.kept.data * self.scale + self.shift)
            np.multiply(top[0].diff, slope, out=bottom[0].diff)


def _log_of_base(base: float) -> float:
    if base == -1:
        return 1.0
    if not (base > 0 and isfinite(base)):
        raise ConfigError(f"base must be greater than 0, or -1 for e, not {base:g}")
    return log(base)


@layer("Threshold")
class Threshold(SameShape):
    """y = x > threshold ? 1 : 0; no gradient."""

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        np.greater(
            bottom[0].data, self.param.threshold_param.threshold, out=top[0].data, casting="unsafe"
        )

    def allow_force_backward(self, index: int) -> bool:
        return False
