"""Boxes of maps: x, dx (N, C, H, W), boxes (R, 5) = image, x1, y1, x2, y2, times scale; rois are
those that forward has taken.
"""

from typing import Protocol

from caffepy.device.blob import Array
from caffepy.ops.boxes import Rois
from caffepy.ops.protocol.types import Maybe


class RoIOps(Protocol):
    def take_rois(self, boxes: Rois, images: int) -> None:
        """Write the boxes that are taken; set bad_image (2) = 1 and the largest image that is not
        below `images`, float64, whose place image 0 takes.
        """

    def roi_pool_forward(self, x: Array, boxes: Rois, y: Array, index: Array, scale: float) -> None:
        """Take the boxes; write the maximum of each part of each, y (R, C, h, w), and its place
        a * W + b in the plane, int32; 0 and -1 for a part without elements.
        """

    def roi_pool_backward(
        self, dy: Array, rois: Array, index: Array, dx: Array, scale: float
    ) -> None:
        """Write dx, the sums of dy at the places of the maxima."""

    def psroi_pool_forward(self, x: Array, boxes: Rois, y: Array, scale: float) -> None:
        """Take the boxes; write the mean of part (i, j) of each in channel (k g + i) g + j,
        y (R, K, g, g).
        """

    def psroi_pool_backward(self, dy: Array, rois: Array, dx: Array, scale: float) -> None:
        """Write dx, the sums of dy / elements of the part."""

    def roi_align_forward(
        self,
        x: Array,
        boxes: Rois,
        y: Array,
        scale: float,
        samples: int,
        beyond: int,
        sensitive: bool,
    ) -> None:
        """Take the boxes; write the mean of samples x samples values, bilinear, in each part of
        each, whose end is `beyond` farther; with samples below 1 of as many as the part has pixels.

        `sensitive`: as `psroi_pool_forward`, of PSROIAlign's places.
        """

    def roi_align_backward(
        self,
        dy: Array,
        rois: Array,
        dx: Array,
        scale: float,
        samples: int,
        beyond: int,
        sensitive: bool,
    ) -> None:
        """Write dx, the transpose of `roi_align_forward`; if `sensitive` without what lies behind a
        part.
        """

    def roi_warp_forward(self, x: Array, boxes: Rois, y: Array, scale: float) -> None:
        """Take the boxes; write the value, bilinear, at the first corner of each part of each, from
        the rounded start of the box on, y (R, C, h, w); 0 more than half a pixel outside the map.
        """

    def roi_warp_backward(
        self, dy: Array, x: Array, rois: Array, dx: Maybe, drois: Maybe, scale: float
    ) -> None:
        """Write dx and drois (R, 5), as MNC does it.

        A pixel k pixels behind the start of a box of length l = end - start + 1 takes from corners
        floor((k - 1) / (l / parts) - 1) to (k + 1) / (l / parts) alone, along each axis; a corner p
        pixels behind the start moves by 1 - p / l with the start and by p / l with the end, times
        scale, unless it lies in the last row or column.
        """

    def decode_proposals(
        self,
        scores: Array,
        deltas: Array,
        anchors: Array,
        info: Array,
        stride: int,
        least: float,
        boxes: Array,
        objects: Array,
    ) -> None:
        """Write boxes (N, H W A, 4) = x1, y1, x2, y2, the anchors (A, 4) at each place moved by
        deltas (N, 4A, H, W) and cut to the image, and objects (N, H W A), the second half of scores
        (N, 2A, H, W), but 0 for a box with a side under `least` times the scale of the image.

        info = height, width, scale, or a scale for each of the two; places lie stride pixels apart.
        """

    def suppress_overlaps(
        self, boxes: Array, threshold: float, unit: float, kept: Array, counts: Array
    ) -> None:
        """Write the places, kept (N, most) int32, and the numbers, counts (N) int32, of the boxes
        (N, P, 4) whose overlap with each kept one before it is threshold or less, at most `most` of
        each N: intersection over union, where a side is x2 - x1 + unit, 1 for pixels, else 0.
        """
