"""Layers of FlowNet (Dosovitskiy et al. 2015, Ilg et al. 2017): Correlation, FlowWarp, ChannelNorm,
Accum, Mean, Resample, Downsample, and the loss LpqLoss.
"""

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.core.errors import ConfigError
from caffepy.core.files import locate
from caffepy.data.transformer import load_mean
from caffepy.device.blob import Array, shape_string
from caffepy.layer.base import Blobs, Layer, LossLayer, layer
from caffepy.ops.protocol.flow import Displacements
from caffepy.proto.caffe_pb2 import (
    CorrelationParameter,
    FlowWarpParameter,
    MeanParameter,
    ResampleParameter,
)

Weights = NDArray[Any]


def image_shape(layer: Layer, bottom: Blobs, index: int = 0) -> tuple[int, int, int, int]:
    """Return the four sizes of a bottom; ConfigError if it has another number of axes."""
    shape = bottom[index].shape
    if len(shape) != 4:
        raise ConfigError(f"{layer.type} needs (N, C, H, W), not {list(shape)}")
    n, c, h, w = shape
    return n, c, h, w


@layer("Correlation", "Correlation1D")
class Correlation(Layer):
    """Two maps (N, C, H, W) -> (N, G G, Ho, Wo), G = 2 floor(max_displacement / stride_2) + 1:
    the mean over the channels and a window of kernel_size of the products of the first map at a
    place with the second one at each displacement, a multiple of stride_2; channel (p, o) is that
    of p down and o to the right, from the most negative one on. SUBTRACT takes |a - b| instead.

    Ho = ceil((H + 2 pad - 2 border) / stride_1), border = max_displacement + (kernel_size - 1) / 2.
    Correlation1D has displacements along rows alone, (N, G, Ho, Wo), and no pad above and below;
    single_direction 1 those from 0 on, -1 as many to the left without 0, as in the fork. The fork's
    gradient of SUBTRACT for the first map compares the maps at one place; ours is exact.
    """

    on_gpu = True
    bottoms = 2
    backward_reads_top = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.settings = param = self.param.correlation_param
        if not param.HasField("kernel_size") or not param.HasField("max_displacement"):
            raise ConfigError("correlation_param needs a kernel_size and a max_displacement")
        if param.kernel_size % 2 == 0:
            raise ConfigError(f"correlation_param: kernel_size {param.kernel_size} is not odd")
        if not param.stride_1 or not param.stride_2:
            raise ConfigError("correlation_param: stride_1 and stride_2 must be 1 or more")
        self.flat = self.type == "Correlation1D"
        if param.do_abs or (param.single_direction and not self.flat):
            raise ConfigError("correlation_param: do_abs and single_direction have no effect here")
        if not -1 <= param.single_direction <= 1:
            raise ConfigError("correlation_param: single_direction must be -1, 0 or 1")
        self.differs = param.correlation_type == CorrelationParameter.SUBTRACT

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        n, c, h, w = image_shape(self, bottom)
        if bottom[1].shape != bottom[0].shape:
            raise ConfigError(
                f"bottom 1 has shape {list(bottom[1].shape)}, bottom 0 has {list(bottom[0].shape)}"
            )
        param = self.settings
        reach, pad, step = param.max_displacement, param.pad, param.stride_2
        down, above = (0, 0) if self.flat else (reach, pad)  # along columns
        window = 2 * (param.kernel_size // 2)
        room = h + 2 * above - 2 * down - window, w + 2 * pad - 2 * reach - window
        out = [ceil(s / param.stride_1) for s in room]
        if min(out) < 1:
            raise ConfigError(
                f"{h}x{w} with a pad of {pad} are too small for a max_displacement of {reach} and "
                f"a kernel_size of {param.kernel_size}"
            )
        grid, direction = reach // step, param.single_direction
        left = {-1: -grid - 1, 0: -grid, 1: 0}[direction]
        columns = grid + 1 if direction else 2 * grid + 1
        rows = 2 * (down // step) + 1
        further = max(0, -left * step - reach)  # what lies before the pad counts as 0
        self.how = Displacements(
            size=param.kernel_size,
            stride=param.stride_1,
            step=step,
            rows=rows,
            columns=columns,
            top=-(down // step),
            left=left,
            row=down,
            column=reach + further,
        )
        top[0].reshape((n, rows * columns, *out))
        before = pad + further
        self.inside = (..., slice(above, above + h), slice(before, before + w))
        padded = n, c, h + 2 * above, before + w + pad
        self.maps = [self.buffer(padded) for _ in bottom] if padded != bottom[0].shape else []

    def padded(self, bottom: Blobs) -> list[Array]:
        if not self.maps:
            return [b.data for b in bottom]
        for blob, b in zip(self.maps, bottom, strict=True):
            self.ops.copy(b.data, blob.data[self.inside])
        return [blob.data for blob in self.maps]

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        a, b = self.padded(bottom)
        self.ops.correlation_forward(a, b, top[0].data, self.how, self.differs)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """da is the mean of dy * b over the displacements, db that of dy * a."""
        if not any(propagate_down):
            return
        maps = self.maps or bottom
        a, b, da, db = (*(m.data for m in maps), *(m.diff for m in maps))
        self.ops.correlation_backward(a, b, top[0].diff, da, db, self.how, self.differs)
        for blob, m in zip(bottom, self.maps, strict=False):
            self.ops.copy(m.diff[self.inside], blob.diff)


@layer("FlowWarp")
class FlowWarp(Layer):
    """An image (N, C, H, W) at the places where a flow (N, 2, H, W) = (right, down) leads from each
    element, bilinear; 0 outside, or NaN with fill_value: NOT_A_NUMBER.
    """

    on_gpu = True
    bottoms = 2
    backward_reads_top = False

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        n, _, h, w = image_shape(self, bottom)
        if bottom[1].shape != (n, 2, h, w):
            raise ConfigError(f"the flow needs shape {[n, 2, h, w]}, not {list(bottom[1].shape)}")
        top[0].reshape_like(bottom[0])

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        zero = self.param.flow_warp_param.fill_value == FlowWarpParameter.ZERO
        given = bottom[0].data, bottom[1].data, top[0].data
        self.ops.flow_warp_forward(*given, 0.0 if zero else float("nan"))

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx is the transpose; dflow the slope of the image, 0 where the flow leads outside."""
        if any(propagate_down):
            (x, flow), dy = (b.data for b in bottom), top[0].diff
            self.ops.flow_warp_backward(x, flow, dy, *(b.diff for b in bottom))


@layer("ChannelNorm")
class ChannelNorm(Layer):
    """(N, C, H, W) -> (N, 1, H, W): the square root of the sum of squares over the channels."""

    on_gpu = True

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        n, _, h, w = image_shape(self, bottom)
        top[0].reshape((n, 1, h, w))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        np.sum(np.square(bottom[0].data), axis=1, keepdims=True, out=top[0].data)
        np.sqrt(top[0].data, out=top[0].data)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx = dy * x / (y + 1e-9)."""
        if propagate_down[0]:
            factor = top[0].diff / (top[0].data + 1e-9)
            np.multiply(bottom[0].data, factor, out=bottom[0].diff)


@layer("Accum")
class Accum(Layer):
    """Maps (N, Ci, Hi, Wi) -> (N, sum of Ci, H, W): each made as large as the top, bilinear with
    aligned corners, side by side.

    The size is that of the last bottom with have_reference, which is only looked at; else
    top_height x top_width, or the largest sizes rounded up to size_divisible_by, where both are
    larger than the largest sizes of the bottoms; else those.
    """

    on_gpu = True
    bottoms = (1, None)
    backward_reads_bottom = backward_reads_top = False

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.accum_param
        shapes = [image_shape(self, bottom, i) for i in range(len(bottom))]
        if any(shape[0] != shapes[0][0] for shape in shapes):
            raise ConfigError(f"the bottoms have batches of {[shape[0] for shape in shapes]} items")
        if param.have_reference:
            if len(bottom) < 2:
                raise ConfigError("accum_param: have_reference needs two bottoms or more")
            *shapes, (_, _, h, w) = shapes
        else:
            h, w = (max(shape[axis] for shape in shapes) for axis in (2, 3))
            by = param.size_divisible_by
            if param.HasField("size_divisible_by") and by < 1:
                raise ConfigError("accum_param: size_divisible_by must be 1 or more")
            wanted = (
                [-(-s // by) * by for s in (h, w)] if by else [param.top_height, param.top_width]
            )
            if wanted[0] > h and wanted[1] > w:
                h, w = wanted
        self.taken = len(shapes)
        n = shapes[0][0]
        top[0].reshape((n, sum(shape[1] for shape in shapes), h, w))
        self.resized = [self.buffer((n * c, h, w)) for _, c, _, _ in shapes]

    def parts(self, y: Array, bottom: Blobs) -> list[Array]:
        """Return the channels of y (N, C, H, W) that belong to each bottom."""
        ends = np.cumsum([b.shape[1] for b in bottom[: self.taken]])
        starts = [0, *ends[:-1]]
        return [y[:, start:end] for start, end in zip(starts, ends, strict=True)]

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        parts = self.parts(top[0].data, bottom)
        for blob, part, resized in zip(bottom, parts, self.resized, strict=False):
            if blob.shape == part.shape:
                self.ops.copy(blob.data, part)
            else:
                self.ops.interp_forward(blob.data.reshape(-1, *blob.shape[2:]), resized.data)
                self.ops.copy(resized.data.reshape(part.shape), part)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx is the transpose; 0 for the reference."""
        parts = self.parts(top[0].diff, bottom)
        for blob, part, resized, wanted in zip(
            bottom, parts, self.resized, propagate_down, strict=False
        ):
            if wanted and blob.shape == part.shape:
                self.ops.copy(part, blob.diff)
            elif wanted:
                self.ops.copy(part, resized.data.reshape(part.shape))
                self.ops.interp_backward(resized.data, blob.diff.reshape(-1, *blob.shape[2:]))
        for blob, wanted in zip(bottom[self.taken :], propagate_down[self.taken :], strict=True):
            if wanted:
                blob.diff.fill(0)


@layer("Mean")
class Mean(Layer):
    """y = output_scale * (input_scale * x + mean_scale * mean), - with operation: SUBTRACT; of any
    number of bottoms (N, C, ...).

    The mean is an image of `file`, or a `value` for each channel; both are repeated over the
    channels. It has the gradient that the fork lacks.
    """

    on_gpu = True
    bottoms = tops = (1, None)
    same_count = True
    backward_reads_bottom = backward_reads_top = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.mean_param
        if bool(param.file) == bool(param.value):
            raise ConfigError("mean_param needs a file, or values")
        if param.file:
            mean = load_mean(locate(param.file, self.path))
        else:
            mean = np.array(param.value, np.float32)[:, None, None]
        sign = -1 if param.operation == MeanParameter.SUBTRACT else 1
        self.image = mean * np.float32(sign * param.mean_scale * param.output_scale)
        self.factor = param.input_scale * param.output_scale

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        self.means = []
        for b, t in zip(bottom, top, strict=True):
            c, *size = b.shape[1:] or (0,)
            by_channel = self.image.shape[1:] == (1, 1)
            if not c or c % len(self.image) or not (by_channel or self.image.shape[1:] == (*size,)):
                raise ConfigError(
                    f"a mean of shape {shape_string(self.image.shape)} does not fit a bottom of "
                    f"shape {shape_string(b.shape)}"
                )
            image = np.tile(self.image, (c // len(self.image), 1, 1))
            mean = self.buffer((1, c, *([1] * len(size) if by_channel else size)))
            mean.host_data[...] = image.reshape(mean.shape)
            self.means.append(mean)
            t.reshape_like(b)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        for b, t, mean in zip(bottom, top, self.means, strict=True):
            np.multiply(b.data, self.factor, out=t.data)
            np.add(t.data, mean.data, out=t.data)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx = dy * input_scale * output_scale."""
        for b, t, wanted in zip(bottom, top, propagate_down, strict=True):
            if wanted:
                self.ops.scaled(self.factor, t.diff, b.diff)


class Resampling(Layer):
    """Base: each element of the top is a mean, with weights of `axis_weights` by row and column,
    of elements of the first bottom. It cannot be differentiated, as in the fork.
    """

    on_gpu = True
    bottoms = (1, 2)
    backward_reads_bottom = backward_reads_top = False
    skips_nan = False

    def given_size(self) -> tuple[int, int]:
        """Return the height and width that the prototxt gives."""
        raise NotImplementedError

    def axis_weights(self, size: int, out: int, axis: int) -> Weights:
        """Return the weights (out, size) of the elements along axis 0 (rows) or 1 (columns)."""
        raise NotImplementedError

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        n, c, *size = image_shape(self, bottom)
        out = bottom[1].shape[2:] if len(bottom) > 1 else self.given_size()
        if len(out) != 2 or min(out) < 1:
            raise ConfigError(
                f"{self.type} needs a height and a width, or a second bottom (N, C, H, W) of that "
                f"size, not {list(out)}"
            )
        top[0].reshape((n, c, *out))
        self.sizes, self.taps = (*size, *out), []
        self.ratios = [s / o for s, o in zip(size, out, strict=True)]
        for axis in (0, 1):
            starts, weights = self.compact(self.axis_weights(size[axis], out[axis], axis))
            for values in (starts, weights):
                blob = self.buffer(values.shape, np.int32 if values is starts else None)
                blob.host_data[...] = values
                self.taps.append(blob)

    @staticmethod
    def compact(weights: Weights) -> tuple[Array, Weights]:
        """Return where the weights (rows, size) of each row that are not 0 begin, (rows,), and as
        many of them as the row with the most has, (rows, most).
        """
        used = weights != 0
        size = weights.shape[1]
        first = used.argmax(axis=1)
        last = size - 1 - used[:, ::-1].argmax(axis=1)
        most = int((np.where(used.any(axis=1), last - first, 0) + 1).max())
        starts = np.minimum(first, size - most)
        return starts, np.take_along_axis(weights, starts[:, None] + np.arange(most), axis=1)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        x, y = (b.data.reshape(-1, *b.shape[2:]) for b in (bottom[0], top[0]))
        if x.shape == y.shape and self.skips_nan:
            self.ops.copy(x, y)
        else:
            rows, down, columns, across = (blob.data for blob in self.taps)
            self.ops.resample(x, y, rows, down, columns, across, self.skips_nan)


def cubic(x: Weights) -> Weights:
    """Return the weights of cubic convolution at these distances (Keys 1981, a = -0.5)."""
    x = np.abs(x)
    near = x * x * (1.5 * x - 2.5) + 1
    weights: Weights = np.where(x <= 1, near, (x < 2) * (x * (x * (2.5 - 0.5 * x) - 4) + 2))
    return weights


@layer("Resample")
class Resample(Resampling):
    """(N, C, H, W) -> (N, C, height, width), or the size of the second bottom, by the nearest
    element, or with weights of a triangle (LINEAR) or a cubic, that are wider where the top is
    smaller, unless antialias is false.

    The place of an element is x * fx + fy / 2 - 0.5, fx and fy the ratios of the widths and of the
    heights: the halves are exchanged, as in the fork.
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.kind = self.param.resample_param.type
        if self.kind == ResampleParameter.AREA:
            raise ConfigError("resample_param: NEAREST, LINEAR and CUBIC are known, not AREA")

    def given_size(self) -> tuple[int, int]:
        param = self.param.resample_param
        return param.height, param.width

    def axis_weights(self, size: int, out: int, axis: int) -> Weights:
        ratio, other = (np.float32(self.ratios[i]) for i in (axis, 1 - axis))
        half = np.float32(0.5)
        places = np.arange(out, dtype=np.float32) * ratio + other / np.float32(2) - half
        nearest = np.where(places < 0, np.ceil(places - half), np.floor(places + half))
        index = np.arange(size)
        if self.kind == ResampleParameter.NEAREST:
            chosen: Weights = np.equal.outer(np.clip(nearest, 0, size - 1), index)
            return chosen.astype(np.float32)
        smooth = max(self.ratios) > 1 and self.param.resample_param.antialias
        narrow = np.float32(1) / (ratio if smooth else np.float32(1))
        support = 4 if self.kind == ResampleParameter.CUBIC else 2
        radius = 2 if ratio < 1 else ceil(support / narrow)
        distance = narrow * np.subtract.outer(places, index).astype(np.float32)
        if self.kind == ResampleParameter.CUBIC:
            weights = cubic(distance)
        else:
            weights = np.maximum(1 - np.abs(distance), 0)
        near = np.abs(np.subtract.outer(nearest, index)) <= radius
        return np.where(near, weights, 0).astype(np.float32)


@layer("Downsample")
class Downsample(Resampling):
    """(N, C, H, W) -> (N, C, top_height, top_width), or the size of the second bottom: means with
    weights of a triangle as wide as the step, corners on corners.

    NaNs do not count; where they weigh more than half of the others the top is NaN. A bottom of the
    size of the top is copied.
    """

    skips_nan = True

    def given_size(self) -> tuple[int, int]:
        param = self.param.downsample_param
        return param.top_height, param.top_width

    def axis_weights(self, size: int, out: int, axis: int) -> Weights:
        if size < out or (out == 1 < size):
            raise ConfigError(f"Downsample makes no {out} rows or columns of {size}")
        if size == out:
            return np.eye(size, dtype=np.float32)
        step = np.float32(size - 1) / np.float32(out - 1)
        places = np.arange(out, dtype=np.float32) / np.float32(out - 1) * np.float32(size - 1)
        distance = np.abs(np.subtract.outer(places, np.arange(size))) / step
        weights: Weights = np.maximum(1 - distance, 0)
        return weights


class MaskedLoss(LossLayer):
    """Base of FlowNet's losses of one bottom d (N, C, ...), or of two, d = a - b: entries that are
    NaN count nothing. The sum is divided by N, or with normalize_by_num_entries by the number of
    entries over C.
    """

    bottoms = (1, 2)
    constant_bottoms: Mapping[int, str] = {}
    per_entry = False

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shape = bottom[0].shape
        if len(shape) < 2 or any(b.shape != shape for b in bottom):
            shapes = ", ".join(str(list(b.shape)) for b in bottom)
            raise ConfigError(f"{self.type} needs bottoms (N, C, ...) of one shape, not {shapes}")
        top[0].reshape(())
        self.difference, self.slope = self.buffer(shape), self.buffer(shape)
        self.channels, self.items = shape[1], max(1, shape[0])

    def losses(self, d: Array, mask: Array, slope: Array) -> Array:
        """Return the losses of d, 0 where it is masked, and write their slope; all of one shape."""
        raise NotImplementedError

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        d, slope = self.difference.data, self.slope.data
        if len(bottom) > 1:
            np.subtract(bottom[0].data, bottom[1].data, out=d)
        else:
            self.ops.copy(bottom[0].data, d)
        mask = d == d  # NaN is not equal to itself
        d[...] = np.where(mask, d, 0)
        loss = np.sum(self.losses(d, mask, slope))
        count = np.maximum(np.sum(mask) / self.channels, 1) if self.per_entry else self.items
        np.divide(np.where(mask, slope, 0), count, out=slope)
        np.divide(loss, count, out=top[0].data)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """da = weight * slope / count, db = -da."""
        for b, wanted, sign in zip(bottom, propagate_down, (1, -1), strict=False):
            if wanted:
                np.multiply(self.slope.data, top[0].diff * sign, out=b.diff)


class FlowL1Loss(MaskedLoss):
    """FlowNet's L1Loss: the sum of |d|, or with l2_per_location of sqrt(s + epsilon), s the sum of
    d^2 over the channels, or with l2_prescale_by_channels their mean. What is less than `plateau`
    counts as 0.

    The slope at 0 is -1 without l2_per_location, as in the fork.
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.settings = self.param.l1_loss_param
        self.per_entry = self.settings.normalize_by_num_entries

    def losses(self, d: Array, mask: Array, slope: Array) -> Array:
        param = self.settings
        if not param.l2_per_location:
            kept = mask & (np.abs(d) >= param.plateau)
            d[...] = np.where(kept, d, 0)
            slope[...] = np.where(kept, np.where(d > 0, 1, -1), 0)
            mask &= kept
            return np.abs(d)
        share = 1 / self.channels if param.l2_prescale_by_channels else 1
        squares = np.sum(d * d, axis=1, keepdims=True) * share
        kept = squares >= param.plateau**2
        root = np.sqrt(np.where(kept, squares, 0) + param.epsilon)
        slope[...] = np.where(kept, d * share / root, 0)
        return root


@layer("LpqLoss")
class LpqLoss(MaskedLoss):
    """FlowNet's: the sum of (s + q_epsilon)^q, s the sum over the channels of (|d| + p_epsilon)^p,
    or with l2_prescale_by_channels its mean. One p and one q; no schedule of them.
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.settings = param = self.param.lpq_loss_param
        self.per_entry = param.normalize_by_num_entries
        if len(param.p) != 1 or len(param.q) != 1:
            raise ConfigError(
                f"lpq_loss_param needs one p and one q, not {len(param.p)} and {len(param.q)}; "
                "train in several runs, one for each"
            )

    def losses(self, d: Array, mask: Array, slope: Array) -> Array:
        param, (p,), (q,) = self.settings, self.settings.p, self.settings.q
        share = 1 / self.channels if param.l2_prescale_by_channels else 1
        base = np.abs(d) + param.p_epsilon
        sums = np.sum(base**p, axis=1, keepdims=True) * share + param.q_epsilon
        inner = np.where(base > 0, base, 1) ** (p - 1) * (base > 0)  # 0 has no slope
        outer = np.where(sums > 0, sums, 1) ** (q - 1) * (sums > 0)
        slope[...] = np.where(d > 0, 1, -1) * (p * q * share) * inner * outer
        losses: Array = sums**q
        return losses
