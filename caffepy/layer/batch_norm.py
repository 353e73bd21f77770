"""Layers that normalize channels by statistics of a batch: BatchNorm, and forks' BN."""

from collections.abc import Callable, Sequence
from math import prod

import numpy as np

from caffepy.core.errors import ConfigError
from caffepy.device.blob import Array
from caffepy.layer.base import Blobs, layer
from caffepy.layer.filler import fill_beside, filler_of
from caffepy.layer.neuron import SameShape
from caffepy.ops.objects import Preparation
from caffepy.proto.caffe_pb2 import TEST, TRAIN, BNParameter, FillerParameter

Together = Callable[[Array], Array]
"""All-gather: each solver passes its array and gets those of all, stacked along a new axis 0."""


@layer("BatchNorm", "CuDNNBatchNorm")
class BatchNorm(SameShape):
    """y = (x - mean) / sqrt(variance + eps) per channel of (N, C, ...) (Ioffe and Szegedy 2015).

    Blobs: running sums of mean (C) and variance (C) and the weight of both (1): each batch
    multiplies them by moving_average_fraction and adds its mean, its variance * m/(m-1) and 1. With
    use_global_stats (TEST by default) mean and variance are those sums divided by that weight,
    else the batch's own. With NVCaffe's scale_bias y becomes y * scale + bias, two more learnable
    blobs (C). With happynear's disable_mean nothing is subtracted, the variance is the mean of x^2;
    with its disable_variance nothing is divided. The sums of what is disabled stay.

    With `together` set the layers of several solvers normalize their batches, of one size, as one
    batch.
    """

    reads_input = True
    backward_reads_top = False
    together: Together | None = None

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.batch_norm_param
        self.fraction, self.eps = param.moving_average_fraction, param.eps
        given = param.HasField("use_global_stats")
        self.is_global = param.use_global_stats if given else self.phase == TEST
        self.require_channels(bottom)
        c = bottom[0].shape[1]
        self.scales = param.scale_bias
        self.lacks = param.disable_mean, param.disable_variance
        if any(self.lacks) and self.scales:
            raise ConfigError("scale_bias and disable_mean or disable_variance exclude each other")
        self.can_fuse = self.takes_preferred_layout = not (self.scales or any(self.lacks))
        if not self.blobs:
            for size in (c, c, 1):
                self.add_blob([size])
            if self.scales:
                for filler in (filler_of(param, "scale_filler", 1), param.bias_filler):
                    fill_beside(self.add_blob([c]), filler, self.device.random)
        if len(self.blobs) != 3 + 2 * self.scales:
            raise ConfigError(
                f"incorrect number of parameters: {len(self.blobs)}, not {3 + 2 * self.scales}"
            )
        self.statistics = self.blobs[:3]  # the running sums and their weight
        while len(self.param.param) < len(self.blobs):
            self.param.param.add()
        for i, spec in enumerate(self.param.param):
            if not self.scales and spec.lr_mult != 0 and spec.HasField("lr_mult"):
                raise ConfigError(
                    "Cannot configure batch normalization statistics as layer parameters."
                )
            spec.lr_mult = float(i >= 3)  # as NVCaffe does, whatever the prototxt says

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        n, c, *rest = bottom[0].shape
        if c != self.blobs[0].count:
            raise ConfigError(f"{c} channels do not fit the statistics of {self.blobs[0].count}")
        self.view = (n, c, prod(rest))
        self.numbers = self.buffer([4, c])
        if self.scales or self.together:
            self.normalized = self.buffer_like(bottom[0])

    @property
    def only_launches(self) -> bool:
        return not self.together and not any(self.lacks)

    @property
    def can_replay(self) -> bool:  # type: ignore[override]
        return self.only_launches

    def meet(self, together: Together | None) -> None:
        """Normalize by the statistics of the batches of all solvers that call `together`, from the
        next pass on; None: by those of the own batch. ConfigError for a half of the statistics.
        """
        if together and any(self.lacks):
            raise ConfigError("disable_mean and disable_variance are for the own batch")
        self.together = together
        if together and not hasattr(self, "normalized"):
            self.normalized = self.buffer_like(self.kept)

    def prepare(self, x: Array, scale: Array | None = None, bias: Array | None = None) -> Array:
        """Return mean, inverse deviation, factor and shift of each channel, (4, C); with statistics
        of the batch, update the running sums. Those of the first time if forward is recomputed.

        y * scale + bias = x * factor + shift; x (N, C, P).
        """
        if self.recomputes:
            return self.numbers.data
        running, numbers = [b.data for b in self.blobs[:3]], self.numbers.data
        if any(self.lacks):
            self._prepare_half(x, running, numbers[0], numbers[1])
            return numbers
        if self.is_global:
            self.ops.batch_norm_stored(running, self.eps, (scale, bias), numbers)
        elif self.together:
            self._prepare_together(x, self.together)
        else:
            self.ops.batch_norm_prepare(x, *self.preparation(scale, bias))
        return numbers

    @property
    def takes_statistics(self) -> bool:
        """True if `prepare` is `Ops.batch_norm_prepare` with the `preparation`."""
        return not (self.recomputes or any(self.lacks) or self.is_global or self.together)

    def preparation(self, scale: Array | None = None, bias: Array | None = None) -> Preparation:
        """Return what `Ops.batch_norm_prepare` takes beside x."""
        running = [b.data for b in self.blobs[:3]]
        return running, self.fraction, self.eps, (scale, bias), self.numbers.data

    def _prepare_half(
        self, x: Array, running: Sequence[Array], mean: Array, inverse: Array
    ) -> None:
        """Write mean and inverse deviation with one of them disabled: 0, or 1."""
        means, variances, weight = running
        if self.is_global:
            by = np.where(weight == 0, 0, 1 / np.where(weight == 0, 1, weight))
            mean[...], inverse[...] = means * by, variances * by
        else:
            weight[...] = weight * self.fraction + 1
            mean.fill(0)
            if not self.lacks[0]:
                mean[...] = x.mean(axis=(0, 2))
                means[...] = means * self.fraction + mean
            if not self.lacks[1]:
                inverse[...] = ((x - mean[:, None]) ** 2).mean(axis=(0, 2))
                count = x.shape[0] * x.shape[2]
                unbiased = inverse * (count / (count - 1) if count > 1 else 1)
                variances[...] = variances * self.fraction + unbiased
        if self.lacks[0]:
            mean.fill(0)
        inverse[...] = 1 if self.lacks[1] else 1 / np.sqrt(inverse + self.eps)

    def _backward_half(self, x: Array, dy: Array, dx: Array) -> None:
        """dx = (dy - mean(dy) - y * mean(dy * y)) * inverse, less what is disabled."""
        mean, inverse = self.numbers.data[:2, :, None]
        rest = dy if self.lacks[0] else dy - dy.mean(axis=(0, 2))[:, None]
        if not self.lacks[1]:
            y = (x - mean) * inverse
            rest = rest - y * (dy * y).mean(axis=(0, 2))[:, None]
        np.multiply(rest, inverse, out=dx)

    def _prepare_together(self, x: Array, together: Together) -> None:
        """Compute mean and inverse deviation of all batches; update the running sums."""
        numbers, device = self.numbers.data, self.device
        self.ops.batch_norm_statistics(x, numbers[0], numbers[1])
        every = together(np.array(device.on_host(numbers[:2]), np.float64))
        mean = every[:, 0].mean(axis=0)
        variance = every[:, 1].mean(axis=0) + every[:, 0].var(axis=0)
        count = len(every) * x.shape[0] * x.shape[2]
        unbiased = variance * (count / (count - 1) if count > 1 else 1)
        for blob, value in zip(self.statistics, (mean, unbiased, 1), strict=True):
            blob.host_data[...] = blob.host_data * self.fraction + value
        device.flush()
        computed = np.stack([mean, 1 / np.sqrt(variance + self.eps)])
        device.upload(computed.astype(self.dtype), numbers[:2])

    def _backward_together(self, x: Array, dy: Array, dx: Array, together: Together) -> None:
        """The gradient of `_prepare_together`: the means over all batches of dy and of dy * y."""
        numbers, device, ops = self.numbers.data, self.device, self.ops
        mean, inverse, by_y, by_1 = numbers
        y = self.normalized.data.reshape(self.view)
        ops.batch_norm_forward(x, mean, inverse, y)
        numbers[2:].fill(0)
        ops.scale_backward(y, inverse, dy, None, by_y, by_1)
        sums = np.array(device.on_host(numbers[2:]), np.float64)
        means = together(sums).mean(axis=0) / (x.shape[0] * x.shape[2])
        shares = -device.on_host(inverse) * means
        device.upload(shares.astype(self.dtype), numbers[2:])
        ops.scale_forward(y, by_y, by_1, y)
        ops.scale_forward(dy, inverse, None, dx)
        ops.add(y, dx)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        x = self.keep_input(bottom).reshape(self.view)
        mean, inverse = self.prepare(x)[:2]
        y = top[0].data.reshape(self.view)
        if self.scales:
            normalized = self.normalized.data.reshape(self.view)
            self.ops.batch_norm_forward(x, mean, inverse, normalized)
            self.ops.scale_forward(normalized, self.blobs[3].data, self.blobs[4].data, y)
        else:
            self.ops.batch_norm_forward(x, mean, inverse, y)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx = (dy - mean(dy) - y * mean(dy * y)) / sqrt(variance + eps); with global statistics
        without the means.

        With scale_bias y is the value before scaling, dscale += sum of dy * y, dbias += sum of dy,
        then dy *= scale.
        """
        dy = top[0].diff.reshape(self.view)
        dx = dy if top[0].diff is bottom[0].diff else bottom[0].diff.reshape(self.view)
        if self.scales:
            wanted = zip(self.blobs, self.param_propagate_down, strict=True)
            *_, dscale, dbias = (blob.diff if want else None for blob, want in wanted)
            scale, y = self.blobs[3].data, self.normalized.data.reshape(self.view)
            wanted_dx = dx if propagate_down[0] else None
            self.ops.scale_backward(y, scale, dy, wanted_dx, dscale, dbias)
            dy = dx
        if not propagate_down[0]:
            return
        mean, inverse = self.numbers.data[:2]
        if self.is_global:
            self.ops.scale_forward(dy, inverse, None, dx)
        elif any(self.lacks):
            self._backward_half(self.kept.data.reshape(self.view), dy, dx)
        elif self.together:
            self._backward_together(self.kept.data.reshape(self.view), dy, dx, self.together)
        else:
            self.ops.batch_norm_backward(self.kept.data.reshape(self.view), mean, inverse, dy, dx)


SEGNET = ("scale_filler", "shift_filler", "bn_mode")
PSPNET = ("slope_filler", "bias_filler", "momentum", "eps", "frozen")
HAPPYNEAR = ("var_eps", "moving_average", "decay")


@layer("BN")
class BN(SameShape):
    """y = (x - mean) / sqrt(variance + eps) * scale + shift per channel of (N, C, ...).

    All blobs have the shape (1, C, 1, 1); the variance is the biased one. SegNet's, chosen by
    scale_filler, shift_filler, bn_mode or further tops, has scale and shift; LEARN takes the
    statistics of the batch in every phase, which tops 1 and 2 give, and INFERENCE 0 and 1.
    PSPNet's, chosen by any other field of bn_param or by none, has a running mean and variance
    besides, which each batch of TRAIN moves by 1 - momentum, and which TEST and `frozen` take.
    happynear's older one, chosen by var_eps, moving_average or decay, is the same with these names;
    without moving_average TEST takes the statistics of its batch. SegStereo has it, too, where
    decay is the share of a batch: that is what one below 0.5 means.
    """

    tops = (1, 3)
    reads_input = True
    backward_reads_top = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.bn_param
        self.require_channels(bottom)
        of_segnet, of_pspnet, of_happynear = (
            list(filter(param.HasField, names)) for names in (SEGNET, PSPNET, HAPPYNEAR)
        )
        if of_happynear:
            of_segnet = [name for name in of_segnet if name == "bn_mode"]
            of_pspnet = [name for name in of_pspnet if name != "frozen"]
        found = {"SegNet": of_segnet, "PSPNet": of_pspnet, "happynear's": of_happynear}
        forks = [f"{names[0]} of {fork}" for fork, names in found.items() if names]
        if len(forks) > 1:
            raise ConfigError(f"bn_param has {' and '.join(forks)}, whose layers differ")
        self.runs = bool(of_pspnet or of_happynear) or not (
            of_segnet or len(top) > 1 or len(self.blobs) == 2
        )
        if self.runs and len(top) > 1:
            raise ConfigError("only SegNet's BN, with scale_filler, has tops for mean and variance")
        c = bottom[0].shape[1]
        names = ["slope", "bias"] if self.runs and not of_happynear else ["scale", "shift"]
        names += ["mean", "variance"] if self.runs else []
        zero, one = FillerParameter(), FillerParameter(value=1)
        if of_happynear:
            fillers = [param.scale_filler, param.shift_filler, zero, one]
        elif self.runs:
            stored = [zero, one if param.frozen else zero]
            fillers = [filler_of(param, "slope_filler", 1), param.bias_filler, *stored]
        else:
            fillers = [param.scale_filler, param.shift_filler]
        self.make_params(dict.fromkeys(names, (1, c, 1, 1)), fillers)
        self.frozen = self.runs and param.frozen
        if self.runs:
            self.learns = self.phase == TRAIN and not self.frozen
            self.eps, self.momentum = param.eps, param.momentum
            if of_happynear:
                self.learns |= not (param.moving_average or self.frozen)
                self.eps, decay = param.var_eps, param.decay
                self.momentum = decay if decay >= 0.5 else 1 - decay
            self.statistics = self.blobs[2:]
            while len(self.param.param) < 4:
                self.param.param.add()
            for i, spec in enumerate(self.param.param):
                if i >= 2 or self.frozen:  # as PSPNet does, whatever the prototxt says
                    spec.lr_mult = spec.decay_mult = 0
        else:
            self.learns = param.bn_mode == BNParameter.LEARN
            self.eps = 1e-9

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        n, c, *rest = bottom[0].shape
        if c != self.blobs[0].count:
            raise ConfigError(f"{c} channels do not fit the {self.blobs[0].count} scales")
        self.view = (n, c, prod(rest))
        self.numbers = self.buffer([3, c])
        self.normalized = self.buffer_like(bottom[0])
        for blob in top[1:]:
            blob.reshape((1, c, 1, 1))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        x, y = (a.reshape(self.view) for a in (self.keep_input(bottom), top[0].data))
        mean, variance, inverse = self.numbers.data
        if self.learns:
            self.ops.batch_norm_statistics(x, mean, variance)
            if self.runs and self.phase == TRAIN and not self.recomputes:
                for blob, new in zip(self.statistics, (mean, variance), strict=True):
                    stored = blob.data.reshape(-1)
                    self.ops.scaled(self.momentum, stored, stored)
                    self.ops.axpy(1 - self.momentum, new, stored)
        elif self.runs:
            for blob, stored in zip(self.statistics, (mean, variance), strict=True):
                self.ops.copy(blob.data.reshape(-1), stored)
        else:
            mean.fill(0)
            variance.fill(1 - self.eps)
        for blob, value in zip(top[1:], (mean, variance), strict=False):
            self.ops.copy(value, blob.data.reshape(-1))
        np.add(variance, self.eps, out=inverse)
        np.divide(1, np.sqrt(inverse), out=inverse)
        normalized = self.normalized.data.reshape(self.view)
        self.ops.batch_norm_forward(x, mean, inverse, normalized)
        scale, shift = (blob.data.reshape(-1) for blob in self.blobs[:2])
        self.ops.scale_forward(normalized, scale, shift, y)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dscale += sum of dy * (x - mean) / deviation, dshift += sum of dy; dx as BatchNorm's of
        dy * scale, without the means of dy where the statistics are stored.
        """
        dy = top[0].diff.reshape(self.view)
        dx = dy if top[0].diff is bottom[0].diff else bottom[0].diff.reshape(self.view)
        wanted = zip(self.blobs[:2], self.param_propagate_down, strict=False)
        dscale, dshift = (
            b.diff.reshape(-1) if want and not self.frozen else None for b, want in wanted
        )
        scale, normalized = self.blobs[0].data.reshape(-1), self.normalized.data.reshape(self.view)
        wanted_dx = dx if propagate_down[0] else None
        if wanted_dx is not None or dscale is not None or dshift is not None:
            self.ops.scale_backward(normalized, scale, dy, wanted_dx, dscale, dshift)
        if propagate_down[0]:
            mean, _, inverse = self.numbers.data
            if self.learns:
                x = self.kept.data.reshape(self.view)
                self.ops.batch_norm_backward(x, mean, inverse, dx, dx)
            else:
                self.ops.scale_forward(dx, inverse, None, dx)
