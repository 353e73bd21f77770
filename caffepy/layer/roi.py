"""Layers that pool boxes of feature maps: those of Fast, Faster and Mask R-CNN and R-FCN.

Boxes are rois (R, 5) = image, x1, y1, x2, y2 in pixels of the net's input.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from caffepy.core.errors import ConfigError, DataError
from caffepy.device.blob import Array
from caffepy.layer.base import Blobs, Layer, layer
from caffepy.ops.boxes import Rois

log = logging.getLogger(__name__)


class RoiLayer(Layer):
    """Base: bottoms x (N, C, H, W) and rois (R, 5), whose gradient is 0."""

    on_gpu = True
    bottoms = 2
    backward_reads_bottom = backward_reads_top = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.no_image = self.error_flag(
            lambda image: DataError(
                f"a box is of image {image:g}, but there are {bottom[0].shape[0]}"
            )
        )

    def check(self, bottom: Blobs) -> None:
        """ConfigError unless the bottoms have 4 axes, and 5 numbers a box."""
        x, rois = (b.shape for b in bottom)
        if len(x) != 4:
            raise ConfigError(f"{self.type} needs features (N, C, H, W), not {list(x)}")
        if not rois or bottom[1].count != 5 * rois[0]:
            raise ConfigError(f"{self.type} needs boxes (R, 5), not {list(rois)}")
        self.rois = self.buffer((rois[0], 5))

    def boxes(self, bottom: Blobs) -> Rois:
        """Return the boxes, of which `rois` (R, 5) are to be taken."""
        rois, pad = self.rois.data, self.param.roi_pooling_param.pad_ratio  # MS-CNN's
        return Rois(bottom[1].data.reshape(rois.shape), rois, pad, self.no_image.found)


def check_channels(message: str, channels: int, outputs: int, group: int) -> None:
    """ConfigError unless there is a channel for each output and part."""
    needed = outputs * group**2
    if channels != needed:
        raise ConfigError(
            f"{message} needs {needed} channels (output_dim {outputs} times "
            f"{group} x {group}), not {channels}"
        )


@layer("ROIPooling")
class ROIPooling(RoiLayer):
    """(R, C, pooled_h, pooled_w): the maximum of each of pooled_h x pooled_w parts of each box, 0
    for a part outside the map (Girshick 2015). With a pad_ratio boxes are first made larger by that
    part of them on all sides (MS-CNN).
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        param = self.param.roi_pooling_param
        self.size, self.scale = (param.pooled_h, param.pooled_w), param.spatial_scale
        if min(self.size) < 1:
            raise ConfigError("roi_pooling_param: pooled_h and pooled_w must be 1 or more")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        self.check(bottom)
        top[0].reshape((bottom[1].shape[0], bottom[0].shape[1], *self.size))
        self.index = self.buffer(top[0].shape, np.int32)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        given = bottom[0].data, self.boxes(bottom), top[0].data, self.index.data
        self.ops.roi_pool_forward(*given, self.scale)
        self.no_image.check()

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx is the sum of dy over the parts whose maximum the element is."""
        if propagate_down[1]:
            bottom[1].diff.fill(0)
        if propagate_down[0]:
            given = top[0].diff, self.rois.data, self.index.data
            self.ops.roi_pool_backward(*given, bottom[0].diff, self.scale)


@layer("PSROIPooling")
class PSROIPooling(RoiLayer):
    """(R, output_dim, g, g): the mean of part (i, j) of each box in channel (k g + i) g + j of the
    map, 0 for a part outside; g is group_size (R-FCN: Dai et al. 2016).
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        param = self.param.psroi_pooling_param
        self.outputs, self.group, self.scale = (
            param.output_dim,
            param.group_size,
            param.spatial_scale,
        )
        if self.outputs < 1 or self.group < 1 or self.scale <= 0:
            raise ConfigError(
                "psroi_pooling_param needs spatial_scale, output_dim and group_size above 0"
            )

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        self.check(bottom)
        check_channels("psroi_pooling_param", bottom[0].shape[1], self.outputs, self.group)
        top[0].reshape((bottom[1].shape[0], self.outputs, self.group, self.group))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        given = bottom[0].data, self.boxes(bottom), top[0].data
        self.ops.psroi_pool_forward(*given, self.scale)
        self.no_image.check()

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx is the sum of dy / elements over the parts that the element lies in."""
        if propagate_down[1]:
            bottom[1].diff.fill(0)
        if propagate_down[0]:
            self.ops.psroi_pool_backward(top[0].diff, self.rois.data, bottom[0].diff, self.scale)


class _Aligned(RoiLayer):
    """Base of the layers that pool samples between the pixels."""

    samples: int
    scale: float
    beyond: int  # how much is added to the ends of boxes
    sensitive: bool  # each part has a channel of its own

    @property
    def settings(self) -> tuple[float, int, int, bool]:
        return self.scale, self.samples, self.beyond, self.sensitive

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        x, boxes, y = bottom[0].data, self.boxes(bottom), top[0].data
        self.ops.roi_align_forward(x, boxes, y, *self.settings)
        self.no_image.check()

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx is dy / samples at the four pixels of each sample, by their shares."""
        if propagate_down[1]:
            bottom[1].diff.fill(0)
        if propagate_down[0]:
            rois = self.rois.data
            self.ops.roi_align_backward(top[0].diff, rois, bottom[0].diff, *self.settings)


@layer("ROIAlign")
class ROIAlign(_Aligned):
    """(R, C, pooled_h, pooled_w): the mean of n x n values between the pixels of each of pooled_h x
    pooled_w parts of each box (Mask R-CNN: He et al. 2017, as Detectron computes it).

    n is sampling_ratio, or the size of a part, rounded up. Box k lies from x1 to x2 + roi_end_mode,
    times spatial_scale, and is 1 wide and high at least. Sample i of part p is at p + (i + 0.5) / n
    parts from its start; more than 1 outside the map it counts as 0.

    With a roi_pooling_param instead it is MS-CNN's and Cascade R-CNN's: the value at each corner of
    a part, (R, C, pooled_h + 1, pooled_w + 1), of boxes that pad_ratio makes larger, computed on
    the host. Pixels have their values in their middles; corners outside the map count as 0.
    """

    sensitive = False
    of_corners = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        if self.param.HasField("roi_pooling_param"):
            pooling = self.param.roi_pooling_param
            self.of_corners = self.always_reshape = True  # a step is not captured
            self.size, self.scale = (pooling.pooled_h, pooling.pooled_w), pooling.spatial_scale
            if self.param.HasField("roi_align_param") or min(self.size) < 1 or self.scale <= 0:
                raise ConfigError(
                    "ROIAlign needs a roi_align_param, or a roi_pooling_param with pooled_h and "
                    "pooled_w of 1 or more and spatial_scale above 0"
                )
            return
        param = self.param.roi_align_param
        self.size, self.scale = (param.pooled_h, param.pooled_w), param.spatial_scale
        self.samples, self.beyond = param.sampling_ratio, param.roi_end_mode
        if min(self.size) < 1 or self.scale <= 0:
            raise ConfigError(
                "roi_align_param: pooled_h and pooled_w must be 1 or more, spatial_scale above 0"
            )
        if self.beyond not in (0, 1):
            raise ConfigError(f"roi_align_param: roi_end_mode is 0 or 1, not {self.beyond}")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        self.check(bottom)
        h, w = (count + self.of_corners for count in self.size)
        top[0].reshape((bottom[1].shape[0], bottom[0].shape[1], h, w))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        if not self.of_corners:
            super().forward(bottom, top)
            return
        self.ops.take_rois(self.boxes(bottom), bottom[0].shape[0])
        self.no_image.check()
        x, y = bottom[0].host_data, top[0].host_data
        y.fill(0)
        for image, places, share in self.neighbours(x.shape):
            # (R, h, w, C) -> (R, C, h, w)
            y += np.moveaxis(x[image, :, places[0], places[1]], -1, 1) * share[:, None]

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        if not self.of_corners:
            super().backward(top, propagate_down, bottom)
            return
        if propagate_down[1]:
            bottom[1].diff.fill(0)
        if propagate_down[0]:
            dx, dy = bottom[0].host_diff, top[0].host_diff
            dx.fill(0)
            for image, places, share in self.neighbours(dx.shape):
                parts = np.moveaxis(dy * share[:, None], 1, -1)
                where: Any = image, slice(None), *places
                np.add.at(dx, where, parts)

    def neighbours(
        self, shape: Sequence[int]
    ) -> Iterator[tuple[Array, tuple[Array, Array], Array]]:
        """Yield for the four pixels around each corner (R, h, w) of the parts image, row and
        column, and their shares.
        """
        rois, (height, width) = self.rois.host_data, shape[2:]
        scale = np.asarray(self.scale, self.dtype)
        start, end = (rois[:, k : k + 2] * scale - 0.5 for k in (1, 3))
        sides = []
        for axis, (count, most) in enumerate(zip(self.size[::-1], (width, height), strict=True)):
            step = (end[:, axis] - start[:, axis]) / count
            at = start[:, axis, None] + np.arange(count + 1, dtype=self.dtype) * step[:, None]
            inside = (at >= -0.5) & (at <= most - 0.5) & (step > 0)[:, None]
            low = np.clip(np.floor(at).astype(np.intp), 0, most - 1)
            high = np.clip(np.floor(at).astype(np.intp) + 1, 0, most - 1)
            part = np.clip(at, 0, most - 1) - low
            sides.append(((low, (1 - part) * inside), (high, part * inside)))
        image = rois[:, 0].astype(np.intp)[:, None, None]
        for column, across in sides[0]:
            for row, down in sides[1]:
                places = row[:, :, None], column[:, None, :]
                yield image, places, down[:, :, None] * across[:, None, :]


@layer("PSROIAlign")
class PSROIAlign(_Aligned):
    """(R, output_dim, g, g): the mean of n x n values between the pixels of part (i, j) of each box
    in channel (k g + i) g + j of the map; g is group_size, n sample_num (R-FCN-PSROIAlign).

    A box lies from x1 to x2 + 1, times spatial_scale. Sample i of n is i / (n + 1) of the part from
    its start, which is cut to the map; one at or behind the part's end counts as 0. The gradient is
    the fork's: pixels behind the part get none.
    """

    sensitive = True
    beyond = 1

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        param = self.param.psroi_align_param
        self.outputs, self.group = param.output_dim, param.group_size
        self.scale, self.samples = param.spatial_scale, param.sample_num
        if min(self.outputs, self.group, self.samples) < 1 or self.scale <= 0:
            raise ConfigError(
                "psroi_align_param needs spatial_scale, output_dim, group_size and sample_num "
                "above 0"
            )
        log.info("PSROIAlign: pixels behind a part get no gradient, as in R-FCN-PSROIAlign")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        self.check(bottom)
        check_channels("psroi_align_param", bottom[0].shape[1], self.outputs, self.group)
        top[0].reshape((bottom[1].shape[0], self.outputs, self.group, self.group))
