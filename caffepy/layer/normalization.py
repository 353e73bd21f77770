"""Layers that normalize by neighbours or statistics."""

import logging
from collections.abc import Callable, Sequence
from math import prod

import numpy as np

from caffepy.core.errors import ConfigError
from caffepy.device.blob import Array
from caffepy.layer.base import Blobs, Kept, Layer, layer
from caffepy.layer.filler import fill_beside, filler_of
from caffepy.layer.neuron import SameShape, is_in_place
from caffepy.layer.pooling import check_padded
from caffepy.ops.objects import Preparation
from caffepy.proto.caffe_pb2 import (
    TEST,
    TRAIN,
    BNParameter,
    FillerParameter,
    LRNParameter,
)

log = logging.getLogger(__name__)

Together = Callable[[Array], Array]
"""All-gather: each solver passes its array and gets those of all, stacked along a new axis 0."""


@layer("LRN")
class LRN(SameShape):
    """Local response normalization of (N, C, H, W), n = local_size (Krizhevsky et al. 2012).

    ACROSS_CHANNELS: y = x * s^-beta, s = k + alpha/n * sum of x^2 over the n channels around.
    WITHIN_CHANNEL: s = 1 + alpha * mean of x^2 over the n x n pixels around, those outside being 0.
    """

    only_launches = True
    reads_input = True
    backward_needs = Kept.ACTIVE
    in_place_keeps = Kept.SIGNS

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.lrn_param
        if param.local_size % 2 == 0:
            raise ConfigError(f"lrn_param: local_size must be odd, not {param.local_size}")
        self.alpha, self.beta = param.alpha, param.beta
        self.terms = param.local_size, param.alpha, param.beta, param.k
        self.across = param.norm_region == LRNParameter.ACROSS_CHANNELS
        self.takes_preferred_layout = self.backward_reads_top = self.can_fuse = self.across
        # Kernel, stride and padding of the window.
        self.pooling = (param.local_size,) * 2, (1, 1), (param.local_size // 2,) * 2

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        if len(bottom[0].shape) != 4:
            raise ConfigError(f"LRN needs a bottom of 4 axes, not {list(bottom[0].shape)}")
        if not self.across:
            check_padded(bottom[0].shape[2:], self.pooling[2])
        super().reshape(bottom, top)
        self.scale = self.buffer(bottom[0].shape)
        self.window = self.buffer(bottom[0].shape)
        self.product = self.buffer_like(bottom[0])

    @property
    def can_replay(self) -> bool:  # type: ignore[override]
        return self.across

    @property
    def buffers(self) -> Blobs:
        scale = [] if self.across and self._kept_scale is None else [self.scale]
        return [*super().buffers, *scale]

    @property
    def _kept_scale(self) -> Array | None:
        return None if self.kept.layout.channels_last else self.scale.data

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        """Write y, and s unless recomputing it is cheaper."""
        x, y = self.keep_input(bottom), top[0].data
        if self.across:
            self.normalize(x, y)
            return
        s = self.scale.data
        self.ops.multiply(x, x, self.product.data)
        self.ops.ave_pool_forward(self.product.data, self.window.data, self.pooling)
        self.ops.power_forward(self.window.data, s, 1.0, self.alpha, 1.0)
        self.ops.power_forward(s, y, -self.beta, 1.0, 0.0)
        self.ops.multiply(x, y, y)

    def normalize(self, x: Array, y: Array) -> None:
        """Write y across channels."""
        self.ops.lrn_forward(x, y, self._kept_scale, self.terms)

    def gradient(
        self,
        x: Array,
        y: Array,
        dy: Array,
        dx: Array,
        relu: bool = False,
        db: Array | None = None,
    ) -> None:
        """Write dx across channels; dx may be dy. `relu`: dx = 0 where x <= 0, and its sums are
        added to db, if there is one.
        """
        self.ops.lrn_backward(x, y, self._kept_scale, dy, dx, self.terms, relu, db)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx = dy * s^-beta - 2 * beta * (alpha / number in the window) * x * sum over the window
        of dy * y / s.
        """
        if not propagate_down[0]:
            return
        x, dy, dx = self.kept.data, top[0].diff, bottom[0].diff
        if self.across:
            self.gradient(x, top[0].data, dy, dx)
            return
        s, window, product = self.scale.data, self.window.data, self.product.data
        self.ops.power_forward(s, product, -self.beta, 1.0, 0.0)
        self.ops.multiply(dy, product, dx)
        # dy * y, without y: a layer in place may have overwritten it
        self.ops.multiply(dx, x, product)
        np.divide(product, s, out=product)
        self.ops.ave_pool_backward(product, window, self.pooling)
        self.ops.multiply(x, window, window)
        self.ops.axpy(-2 * self.alpha * self.beta, window, dx)


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
        if len(bottom[0].shape) < 2:
            raise ConfigError(
                f"BatchNorm needs a bottom of at least 2 axes, not {list(bottom[0].shape)}"
            )
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


@layer("BN")
class BN(SameShape):
    """y = (x - mean) / sqrt(variance + eps) * scale + shift per channel of (N, C, ...).

    All blobs have the shape (1, C, 1, 1); the variance is the biased one. SegNet's, told by
    scale_filler, shift_filler, bn_mode or further tops, has scale and shift; LEARN takes the
    statistics of the batch in every phase, which tops 1 and 2 give, and INFERENCE 0 and 1.
    PSPNet's, told by any other field of bn_param or by none, has a running mean and variance
    besides, which each batch of TRAIN moves by 1 - momentum, and which TEST and `frozen` take.
    """

    tops = (1, 3)
    reads_input = True
    backward_reads_top = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.bn_param
        if len(bottom[0].shape) < 2:
            raise ConfigError(f"BN needs a bottom of at least 2 axes, not {list(bottom[0].shape)}")
        of_segnet, of_pspnet = (list(filter(param.HasField, names)) for names in (SEGNET, PSPNET))
        if of_segnet and of_pspnet:
            raise ConfigError(
                f"bn_param has {of_segnet[0]} of SegNet and {of_pspnet[0]} of PSPNet, whose layers "
                "differ"
            )
        self.runs = bool(of_pspnet) or not (of_segnet or len(top) > 1 or len(self.blobs) == 2)
        if self.runs and len(top) > 1:
            raise ConfigError("only SegNet's BN, with scale_filler, has tops for mean and variance")
        c = bottom[0].shape[1]
        names = ["slope", "bias", "mean", "variance"] if self.runs else ["scale", "shift"]
        zero, one = FillerParameter(), FillerParameter(value=1)
        if self.runs:
            stored = [zero, one if param.frozen else zero]
            fillers = [filler_of(param, "slope_filler", 1), param.bias_filler, *stored]
        else:
            fillers = [param.scale_filler, param.shift_filler]
        self.make_params(dict.fromkeys(names, (1, c, 1, 1)), fillers)
        self.frozen = self.runs and param.frozen
        if self.runs:
            self.learns = self.phase == TRAIN and not self.frozen
            self.eps, self.momentum = param.eps, param.momentum
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
            if self.runs and not self.recomputes:
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


@layer("Normalize")
class Normalize(Layer):
    """y = x / n * scale, n the norm of (N, C, ...) at each place, or of each item.

    SSD's: n = sqrt(sum of x^2 + eps), of an item with across_spatial (the default), and one blob, a
    scale, () with channel_shared (the default), else (C). With scales that differ the gradient of x
    is SSD's, not the derivative: scale * (dy - x * sum of x * dy / n^2) / n. happynear's, told by
    normalize_param or a second top, which gets n (N, 1, H, W): n is the norm at each place, of L2
    or L1, without a scale; its tops always have four axes.
    """

    on_gpu = in_place = True
    can_recompute = True
    tops = (1, 2)
    backward_reads_bottom = backward_reads_top = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        if len(bottom[0].shape) < 2:
            raise ConfigError(
                f"Normalize needs a bottom of at least 2 axes, not {list(bottom[0].shape)}"
            )
        ours, other = self.param.norm_param, self.param.normalize_param
        self.scaled = not self.param.HasField("normalize_param") and len(top) == 1
        if not self.scaled:
            if self.param.HasField("norm_param"):
                raise ConfigError(
                    "norm_param is SSD's and normalize_param, like a second top, happynear's; give "
                    "one"
                )
            if other.normalize_type not in ("L1", "L2"):
                raise ConfigError(
                    f"normalize_param: normalize_type is L1 or L2, not {other.normalize_type}"
                )
        self.across = self.scaled and ours.across_spatial
        self.absolute = not self.scaled and other.normalize_type == "L1"
        self.eps = ours.eps if self.scaled else 1e-6
        shared = ours.channel_shared
        # Scales of all channels, of a norm at each place: one pass each way, from the bottom.
        self.by_channel = self.scaled and not self.across and not shared
        self.takes_preferred_layout = self.backward_reads_bottom = self.by_channel
        if self.scaled:
            shape = () if shared else (bottom[0].shape[1],)
            self.make_params({"scale": shape}, [filler_of(ours, "scale_filler", 1)])
            if not shared:
                log.info(
                    "Layer %s: with scales that differ the gradient of SSD's Normalize is not the "
                    "derivative; it is used as SSD's nets were trained with it",
                    self.param.name,
                )

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        n, c, *rest = bottom[0].shape
        if self.scaled and self.blobs[0].shape not in ((), (c,)):
            raise ConfigError(f"{c} channels do not fit the {self.blobs[0].count} scales")
        if self.scaled:
            top[0].reshape_like(bottom[0])
        else:
            _, _, h, w = bottom[0].legacy_shape()
            top[0].reshape((n, c, h, w))
            for norms in top[1:]:
                norms.reshape((n, 1, h, w))
        self.view = (n, c * prod(rest), 1) if self.across else (n, c, prod(rest))
        if self.scaled:  # (outer, C, inner) with C the number of scales
            count = prod(bottom[0].shape)
            self.scale_view = (n, c, prod(rest)) if self.blobs[0].shape else (1, 1, count)
        self.norm = self.buffer((n, self.view[2]))
        self.divisor = self.norm
        if not self.scaled and self.param.normalize_param.fix_gradient:
            self.divisor = self.buffer(self.norm.shape)
            self.divisor.host_data.fill(1)
        # The bottom where its values stay, else x, or x / n.
        keeps = self.by_channel and not is_in_place(bottom[0], top[0])
        self.normalized = bottom[0] if keeps else self.buffer_like(bottom[0])

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        if self.by_channel:
            if self.normalized is not bottom[0]:
                self.ops.copy(bottom[0].data, self.normalized.data)
            x, y = (a.reshape(self.view) for a in (self.normalized.data, top[0].data))
            self.ops.scaled_norm_forward(x, self.blobs[0].data, y, self.norm.data, self.eps)
            return
        x, y, norm = bottom[0].data.reshape(self.view), self.normalized.data, self.norm.data
        self.ops.normalize_forward(x, y.reshape(self.view), norm, self.eps, self.absolute)
        for norms in top[1:]:
            self.ops.copy(norm.reshape(norms.shape), norms.data)
        if self.scaled:
            view, scale = self.scale_view, self.blobs[0].data.reshape(-1)
            self.ops.scale_forward(y.reshape(view), scale, None, top[0].data.reshape(view))
        else:
            self.ops.copy(y.reshape(top[0].shape), top[0].data)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dscale += sum of dy * x / n; dx, see the class. With bp_norm dx has the gradient of the
        second top, too; with fix_gradient it is not divided by the norm.
        """
        y, dy = self.normalized.data, top[0].diff
        if self.by_channel:
            scale, norm = self.blobs[0], self.norm.data
            dscale = scale.diff if self.param_propagate_down[0] else None
            x, dy = y.reshape(self.view), dy.reshape(self.view)
            dx = bottom[0].diff.reshape(self.view) if propagate_down[0] else None
            self.ops.scaled_norm_backward(x, scale.data, norm, self.eps, dy, dx, dscale)
            return
        if self.scaled and self.param_propagate_down[0]:
            view, scale = self.scale_view, self.blobs[0]
            gradients = None, scale.diff.reshape(-1), None
            given = y.reshape(view), scale.data.reshape(-1), dy.reshape(view)
            self.ops.scale_backward(*given, *gradients)
        if not propagate_down[0]:
            return
        norms = top[1:] if self.param.normalize_param.bp_norm else []
        dnorm = norms[0].diff.reshape(self.norm.shape) if norms else None
        given, dx = (y.reshape(self.view), self.divisor.data, dy.reshape(self.view)), bottom[0].diff
        self.ops.normalize_backward(*given, dnorm, dx.reshape(self.view), self.absolute)
        if self.scaled:
            dx = dx.reshape(self.scale_view)
            self.ops.scale_forward(dx, self.blobs[0].data.reshape(-1), None, dx)


@layer("MVN")
class MVN(SameShape):
    """y = (x - mean) / (sqrt(variance) + eps), over each plane of (N, C, H, W) or, across_channels,
    over each item.

    The top always has four axes; those that the bottom lacks are 1.
    """

    reads_input = True
    backward_reads_top = False

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        """View the bottom as rows, each of which is normalized by itself."""
        super().reshape(bottom, top)
        param = self.param.mvn_param
        self.eps, self.normalizes = param.eps, param.normalize_variance
        n, c, h, w = bottom[0].legacy_shape()
        top[0].reshape((n, c, h, w))
        if self.kept is not bottom[0]:
            self.kept.reshape((n, c, h, w))
        self.view = (1, n, c * h * w) if param.across_channels else (1, n * c, h * w)
        self.mean, self.variance, self.inverse = (self.buffer([self.view[1]]) for _ in range(3))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        x = self.keep_input(bottom).reshape(self.view)
        inverse = self.inverse.data
        self.ops.batch_norm_statistics(x, self.mean.data, self.variance.data)
        if self.normalizes:
            np.sqrt(self.variance.data, out=inverse)
            np.add(inverse, self.eps, out=inverse)
            np.divide(1, inverse, out=inverse)
        else:
            inverse.fill(1)
        self.ops.batch_norm_forward(x, self.mean.data, inverse, top[0].data.reshape(self.view))

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx = (dy - mean(dy) - y * mean(dy * y)) / (sqrt(variance) + eps), or dy - mean(dy)."""
        if not propagate_down[0]:
            return
        dy, dx = top[0].diff.reshape(self.view), bottom[0].diff.reshape(self.view)
        if self.normalizes:
            x = self.kept.data.reshape(self.view)
            self.ops.batch_norm_backward(x, self.mean.data, self.inverse.data, dy, dx)
        else:
            np.subtract(dy, dy.mean(axis=2, keepdims=True), out=dx)
