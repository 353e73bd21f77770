"""Maps of parts of people: outputs of OpenPose's nets (Cao et al. 2017), maps of several scales as
one large map and the peaks of each part; and caffe-heatmap's loss of such maps.
"""

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from caffepy.core.errors import ConfigError
from caffepy.device.blob import Array, Blob
from caffepy.layer.base import Blobs, Layer, LossLayer, layer

NEAR = 3  # rows and columns to each side of a peak whose mean place it is
TAPS = 4  # of a cubic
MOST = 1000  # times as large


@layer("ImResize")
class ImResize(Layer):
    """(N, C, H, W) -> (1, C, Ho, Wo): the mean of the maps of N scales, each made as large as the
    top by cubics (OpenPose).

    The maps of scale n fill the middle of theirs: without floor(W // 2 * (1 - start_scale + n *
    scale_gap)) columns at each side, and rows alike. Ho and Wo are target_spatial_height and
    target_spatial_width, or with a factor H and W times it.
    """

    on_gpu = True

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        param, shape = self.param.imresize_param, bottom[0].shape
        if len(shape) != 4 or 0 in shape:
            raise ConfigError(f"ImResize needs (N, C, H, W), not {list(shape)}")
        if not all(abs(n) <= MOST for n in (param.factor, param.start_scale, param.scale_gap)):
            raise ConfigError(f"factor, start_scale and scale_gap must be at most {MOST}")
        size = [param.target_spatial_height, param.target_spatial_width]
        if param.factor:
            size = [int(np.float32(param.factor) * n) for n in shape[2:]]
        if min(size) < 1:
            raise ConfigError(f"a top of {size[0]}x{size[1]} has no pixels")
        top[0].reshape((1, shape[1], *size))
        self.sum_of_scales = self.buffer(top[0].shape)
        self.axes = [
            [self.axis_of(scale, *sizes) for sizes in zip(shape[2:], size, strict=True)]
            for scale in range(shape[0])
        ]

    def axis_of(self, scale: int, size: int, wanted: int) -> tuple[Blob, Blob]:
        """Return where the cubics of an axis of `wanted` places begin (wanted), and their weights
        (wanted, 4).
        """
        param = self.param.imresize_param
        share = 1 - np.float32(param.start_scale) + scale * np.float32(param.scale_gap)
        pad = int(np.floor(np.float32(size // 2) * share))
        inner = size - 2 * pad
        if pad < 0 or inner < 1:
            raise ConfigError(
                f"scale {scale} leaves {inner} of {size} rows or columns: see start_scale and "
                "scale_gap"
            )
        ratio = np.float32(inner) / np.float32(wanted)
        offset = np.float32(wanted) / np.float32(inner) / 2 - np.float32(0.5)
        place = (np.arange(wanted, dtype=np.float32) - offset) * ratio
        near = np.maximum((place + np.float32(1e-5)).astype(np.int64), 0)
        d = (place - near).astype(np.float64)
        cubic = np.stack(
            [
                -0.5 * d + d * d - 0.5 * d**3,
                1 - 2.5 * d * d + 1.5 * d**3,
                0.5 * d + 2 * d * d - 1.5 * d**3,
                -0.5 * d * d + 0.5 * d**3,
            ]
        )
        taps = min(TAPS, inner)
        first = np.clip(near - 1, 0, inner - taps)
        weights = np.zeros((wanted, taps))
        for step, share_of in zip((-1, 0, 1, 2), cubic, strict=True):
            at = np.clip(near + step, 0, inner - 1) - first  # beyond the ends the last one counts
            weights[np.arange(wanted), at] += share_of
        begin, factors = self.buffer([wanted], np.int32), self.buffer([wanted, taps])
        begin.host_data[...] = first + pad
        factors.host_data[...] = weights
        return begin, factors

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        y, part = top[0].data[0], self.sum_of_scales.data[0]
        for scale, x in enumerate(bottom[0].data):
            (rows, down), (columns, across) = self.axes[scale]
            out = part if scale else y
            self.ops.resample(x, out, rows.data, down.data, columns.data, across.data, False)
            if scale:
                self.ops.add(part, y)
        if len(self.axes) > 1:
            self.ops.scaled(1 / len(self.axes), y, y)


@layer("Nms")
class Nms(Layer):
    """(N, C, H, W) -> (N, num_parts, max_peaks + 1, 3): of each of the first maps the number of
    peaks, 0, 0, and then x, y and value of the first max_peaks, row by row; rows of 0 behind them
    (OpenPose).

    A peak is above the threshold and above its eight neighbours. x and y are the mean place of the
    positive values up to 3 rows and columns away, without those in row 0 and column 0, as in the
    fork, weighted by them.
    """

    on_gpu = True

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        param, shape = self.param.nms_param, bottom[0].shape
        parts = param.num_parts
        if len(shape) != 4 or not 0 < parts <= shape[1] or not prod(shape[2:]):
            raise ConfigError(
                f"Nms needs (N, C, H, W) with the maps of num_parts {param.num_parts} or more, not "
                f"{list(shape)}"
            )
        if not param.max_peaks:
            raise ConfigError("nms_param: max_peaks must be 1 or more")
        self.count, most = shape[0] * param.num_parts, param.max_peaks
        top[0].reshape((shape[0], param.num_parts, most + 1, 3))
        self.row = self.buffer([self.count, 1], np.int64)
        self.row.host_data[:, 0] = np.arange(self.count)
        self.place = self.buffer([prod(shape[2:])], np.int64)
        self.place.host_data[...] = np.arange(prod(shape[2:]))
        self.number = self.buffer([most], np.int64)
        self.number.host_data[...] = np.arange(most)
        self.chosen = self.buffer([self.count, most + 1], np.int64)
        self.near = self.buffer([2, (2 * NEAR + 1) ** 2], np.int64)
        self.near.host_data[...] = np.indices((2 * NEAR + 1,) * 2).reshape(2, -1) - NEAR

    def peaks(self, maps: Array) -> Array:
        """Return True at the peaks of maps (P, H, W)."""
        found = np.zeros_like(maps, dtype=bool)
        h, w = maps.shape[1:]
        if min(h, w) < 3:
            return found
        centre = maps[:, 1:-1, 1:-1]
        inner = centre > np.float32(self.param.nms_param.threshold)
        for i in range(3):
            for j in range(3):
                if (i, j) != (1, 1):
                    inner &= centre > maps[:, i : h - 2 + i, j : w - 2 + j]
        found[:, 1:-1, 1:-1] = inner
        return found

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        parts, most = self.param.nms_param.num_parts, self.param.nms_param.max_peaks
        h, w = bottom[0].shape[2:]
        maps = bottom[0].data[:, :parts].reshape(self.count, h, w)
        found = self.peaks(maps).reshape(self.count, h * w)
        rank = np.cumsum(found, axis=1)  # from 1 on
        chosen, count = self.chosen.data, rank[:, -1:]
        # all that are no peak, or one too many, go to a last place that is not read
        chosen[self.row.data, np.where(found & (rank <= most), rank - 1, most)] = self.place.data
        kept = count > self.number.data  # (P, max_peaks)
        place = np.where(kept, chosen[:, :most], 0)
        down, right = self.near.data[:, None, None]
        # (P, max_peaks, 49)
        y, x = (place // w)[:, :, None] + down, (place % w)[:, :, None] + right
        inside = (y > 0) & (y < h) & (x > 0) & (x < w)
        at = np.where(inside, y * w + x, 0)
        flat = maps.reshape(self.count, h * w)
        values = flat[self.row.data[:, :, None], at]
        values = np.where(inside & (values > 0), values, 0)
        total = values.sum(axis=2)
        safe = np.where(total > 0, total, 1)
        out = top[0].data.reshape(self.count, most + 1, 3)
        out.fill(0)
        out[:, 0, 0] = count[:, 0]
        for column, coordinate in enumerate((x, y)):
            mean = (values * coordinate).sum(axis=2) / safe
            out[:, 1:, column] = np.where(kept, mean, 0)
        out[:, 1:, 2] = np.where(kept, flat[self.row.data, place], 0)


@layer("EuclideanLossHeatmap")
class EuclideanLossHeatmap(LossLayer):
    """Mean of the squares of x - t over maps x and t (N, C, H, W) (caffe-heatmap: Pfister et al.
    2015). A third bottom, and its settings, are for pictures in windows, which are not drawn.

    The gradient is its fork's: not divided by the number of elements, nor times 2.
    """

    bottoms = (2, 3)
    backward_reads_bottom = backward_reads_top = False
    constant_bottoms: Mapping[int, str] = {
        **LossLayer.constant_bottoms,
        2: "{type} draws its third bottom, which has no gradient",
    }

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        if bottom[0].shape != bottom[1].shape:
            raise ConfigError(
                f"maps of shape {list(bottom[0].shape)} need labels like them, not "
                f"{list(bottom[1].shape)}"
            )
        self.difference = self.buffer(bottom[0].shape)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        difference = self.difference.data
        np.subtract(bottom[0].data, bottom[1].data, out=difference)
        np.sum(difference * difference, out=top[0].data)
        np.multiply(top[0].data, 1 / max(difference.size, 1), out=top[0].data)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx = weight * (x - t)."""
        self.refuse_constants(propagate_down)
        if propagate_down[0]:
            np.multiply(self.difference.data, top[0].diff, out=bottom[0].diff)
