"""Boxes of maps at one size: the first corner of each part, and MNC's gradients of it."""

from caffepy.ops.boxes import Rois
from caffepy.ops.cuda.launch import Array, launch, launch_blocks
from caffepy.ops.cuda.roi import take_rois
from caffepy.ops.protocol.types import Maybe


def roi_warp_forward(x: Array, boxes: Rois, y: Array, scale: float) -> None:
    take_rois(boxes, len(x))
    sizes = *x.shape[1:], *y.shape[2:]
    launch("roi_warping", "warp", x, y.size, x, boxes.taken, y, y.size, *sizes, float(scale))


def roi_warp_backward(
    dy: Array, x: Array, rois: Array, dx: Maybe, drois: Maybe, scale: float
) -> None:
    sizes = *x.shape[1:], *dy.shape[2:]
    if dx is not None:
        given = dy, rois, dx, dx.size, len(rois), *sizes, float(scale)
        launch("roi_warping", "to_map", x, dx.size, *given)
    if drois is not None:
        given = dy, x, rois, drois, *sizes, float(scale)
        launch_blocks("roi_warping", "to_boxes", x, len(rois), *given)
