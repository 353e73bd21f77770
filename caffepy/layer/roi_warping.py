"""Layers of multi-task network cascades: boxes of feature maps at one size, and masks of them
(MNC: Dai et al. 2016).
"""

import logging
from collections.abc import Sequence

import numpy as np

from caffepy.core.errors import ConfigError
from caffepy.layer.base import Blobs, Layer, layer
from caffepy.layer.resize import ResizeBilinear
from caffepy.layer.roi import RoiLayer
from caffepy.proto.caffe_pb2 import ResizingParameter

log = logging.getLogger(__name__)


@layer("ROIWarping")
class ROIWarping(RoiLayer):
    """(R, C, pooled_h, pooled_w): the value, bilinear, at the upper left corner of each of
    pooled_h x pooled_w parts of each box, 0 more than half a pixel outside the map (MNC).

    Gradients are MNC's, of the map and of the boxes: it takes these for one pixel longer, so that
    of the pixels around a corner the first ones may get nothing, and as if they were not rounded.
    """

    backward_reads_bottom = True

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        param = self.param.roi_warping_param
        self.size, self.scale = (param.pooled_h, param.pooled_w), param.spatial_scale
        if min(self.size) < 1 or self.scale <= 0:
            raise ConfigError(
                "roi_warping_param: pooled_h and pooled_w must be 1 or more, spatial_scale above 0"
            )
        log.info("ROIWarping: gradients take boxes for a pixel longer and leave pixels out, as MNC")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        self.check(bottom)
        top[0].reshape((bottom[1].shape[0], bottom[0].shape[1], *self.size))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self.ops.roi_warp_forward(bottom[0].data, self.boxes(bottom), top[0].data, self.scale)
        self.no_image.check()

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx is dy at the four pixels around each corner, by their shares; drois the slope of x
        there, by how far the corner moves with the ends of the box.
        """
        x, rois = bottom[0].data, self.rois.data
        dx = bottom[0].diff if propagate_down[0] else None
        drois = bottom[1].diff.reshape(rois.shape) if propagate_down[1] else None
        self.ops.roi_warp_backward(top[0].diff, x, rois, dx, drois, self.scale)


@layer("MaskPooling")
class MaskPooling(Layer):
    """x (N, C, H, W), masks (N, 1, H, W) -> (N, C, H, W): x times the mask (MNC)."""

    on_gpu = True
    can_recompute = True
    bottoms = 2
    backward_reads_top = False

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        x, mask = (b.shape for b in bottom)
        if len(x) != 4 or mask != (x[0], 1, *x[2:]):
            wanted = [x[0], 1, *x[2:]] if len(x) == 4 else "(N, 1, H, W)"
            raise ConfigError(
                f"MaskPooling needs features (N, C, H, W), not {list(x)}, and masks {wanted}, not "
                f"{list(mask)}"
            )
        top[0].reshape(x)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        np.multiply(bottom[0].data, bottom[1].data, out=top[0].data)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx = dy * mask, dmask the sums of dy * x over channels."""
        (x, mask), dy = (b.data for b in bottom), top[0].diff
        if propagate_down[1]:
            np.sum(dy * x, axis=1, keepdims=True, out=bottom[1].diff)
        if propagate_down[0]:
            np.multiply(dy, mask, out=bottom[0].diff)


@layer("MaskResize")
class MaskResize(ResizeBilinear):
    """(N, C, H, W) -> (N, C, Ho, Wo): bilinear, output i at i * H / Ho (MNC).

    Ho is output_height, or factor_height * H where that is above 0 (SSTD). The gradient is exact;
    that of the forks is so where masks do not become larger.
    """

    def settings(self) -> ResizingParameter:
        given, wanted = self.param.mask_resize_param, ResizingParameter(data_format="NCHW")
        for side in ("height", "width"):
            if (factor := getattr(given, f"factor_{side}")) > 0:
                setattr(wanted, f"scale_{side}", factor)
            else:
                setattr(wanted, f"output_{side}", getattr(given, f"output_{side}"))
        return wanted
