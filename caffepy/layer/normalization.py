"""Layers that normalize by neighbours, or by statistics of an item; `batch_norm` by a batch's."""

import logging
from collections.abc import Sequence
from math import prod

import numpy as np

from caffepy.core.errors import ConfigError
from caffepy.device.blob import Array
from caffepy.layer.base import Blobs, Kept, Layer, layer
from caffepy.layer.filler import filler_of
from caffepy.layer.neuron import SameShape, is_in_place
from caffepy.layer.pooling import check_padded
from caffepy.proto.caffe_pb2 import LRNParameter

log = logging.getLogger(__name__)


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


@layer("GRN")
class GRN(SameShape):
    """y = x / sqrt(sum of x^2 over the channels of (N, C, ...) + bias), at each place (OpenVINO).

    With dummy_backward dx = dy, as there.
    """

    backward_reads_bottom = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.eps = self.param.grn_param.bias
        if self.eps < 0:
            raise ConfigError(f"grn_param: bias must be 0 or more, not {self.eps:g}")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        if len(bottom[0].shape) < 2:
            raise ConfigError(f"{self.type} needs (N, C, ...), not {list(bottom[0].shape)}")
        n, c, *rest = bottom[0].shape
        self.view = self.viewed(n, c, prod(rest))
        self.norm = self.buffer((n, self.view[2]))

    def viewed(self, n: int, c: int, places: int) -> tuple[int, int, int]:
        """The bottom as (outer, what the norm is of, inner)."""
        return n, c, places

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        x, y = (a.reshape(self.view) for a in (bottom[0].data, top[0].data))
        self.ops.normalize_forward(x, y, self.norm.data, self.eps, False)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx = (dy - y * sum of y * dy) / norm."""
        y, dy, dx = (a.reshape(self.view) for a in (top[0].data, top[0].diff, bottom[0].diff))
        if propagate_down[0] and self.param.grn_param.dummy_backward:
            if dx is not dy:
                self.ops.copy(dy, dx)
        elif propagate_down[0]:
            self.ops.normalize_backward(y, self.norm.data, dy, None, dx, False)


@layer("NormalizationL2")
class NormalizationL2(GRN):
    """y = x / sqrt(sum of x^2 over each item of (N, ...)) (RAM, GGL: Liu et al. 2018).

    0 for an item of zeros, where the fork divides by 0.
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        self.eps = 1e-30

    def viewed(self, n: int, c: int, places: int) -> tuple[int, int, int]:
        return n, c * places, 1


@layer("L2Normalize")
class L2Normalize(NormalizationL2):
    """y = x / sqrt(sum of x^2 over each item + 1e-7), the top of four axes (compact bilinear
    pooling).
    """

    in_place = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        self.eps = 1e-7

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        top[0].reshape(bottom[0].legacy_shape())


@layer("Normalize")
class Normalize(Layer):
    """y = x / n * scale, n the norm of (N, C, ...) at each place, or of each item.

    SSD's: n = sqrt(sum of x^2 + eps), of an item with across_spatial (the default), and one blob, a
    scale, () with channel_shared (the default), else (C). With scales that differ the gradient of x
    is SSD's, not the derivative: scale * (dy - x * sum of x * dy / n^2) / n. happynear's, chosen by
    normalize_param or a second top, which gets n (N, 1, H, W): n is the norm at each place, of L2
    or L1, without a scale; its tops always have four axes.
    """

    on_gpu = in_place = True
    can_recompute = True
    tops = (1, 2)
    backward_reads_bottom = backward_reads_top = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.require_channels(bottom)
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
        """View the bottom as rows, each of which is normalized separately."""
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
