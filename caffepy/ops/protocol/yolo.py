"""Losses of YOLO: x, p, delta (N, A, 5 + K, H, W) = x, y, w, h, object, classes of A boxes in each
cell; truths (N, T, 5) = class, x, y, w, h of centre and size in units of the image, as are the
sizes of anchors, float32.
"""

from typing import Protocol

from caffepy.device.blob import Array
from caffepy.ops.overlap import YoloWeights


class YoloOps(Protocol):
    def yolo_scores(
        self,
        x: Array,
        truths: Array,
        sizes: Array,
        softmax: bool,
        kind: int,
        scale: float,
        threshold: float,
        p: Array,
        delta: Array,
    ) -> None:
        """Write p, sigmoids of x, but w and h as they are, and delta, 0 but for o = object of each
        box whose overlap of this kind (`ops.overlap`) with every truth, up to the first at x = 0,
        is threshold or less.

        With `softmax` x and y are as they are, too, the classes a softmax, and delta is
        scale * o * o (1 - o). The box of anchor a, sizes (A, 2), in cell i, j is
        (j + sigmoid(x)) / W, (i + sigmoid(y)) / H, exp(w, h) * sizes[a].
        """

    def region_truths(
        self,
        p: Array,
        truths: Array,
        sizes: Array,
        by_bias: bool,
        rule: int,
        object_scale: float,
        class_scale: float,
        coord_scale: float,
        delta: Array,
    ) -> None:
        """Write delta for the box in the cell of each truth, up to the first without a width, whose
        size is most like it, with by_bias the size of its anchor; p as `yolo_scores` writes it with
        `softmax` (Redmon and Farhadi 2017). Rules are those of `ops.overlap`.
        """

    def sort_truths(self, rows: Array, truths: Array) -> None:
        """Write truths (N, G, 5) = class, x, y, w, h, of SSD's rows (G, 8) = image, class + 1, _,
        corners: those of each image first, in their order, then zeros; rows of image -1 are none.
        """

    def yolo_truths(
        self,
        p: Array,
        truths: Array,
        anchors: Array,
        slots: Array,
        kind: int,
        weights: YoloWeights,
        delta: Array,
        stats: Array,
    ) -> None:
        """Write delta for the box in the cell of each truth, up to the first without a width, whose
        anchor is most like it, and for others like it; anchors (B, 2), slots (B) int32 their places
        among the boxes, -1 for none (Redmon and Farhadi 2018).

        stats (N, 2) = sum of 1 - overlap of these boxes and their number.
        """
