"""Boxes that a region proposal network proposes."""

import numpy as np

from caffepy.ops.cuda.compiler import kernel
from caffepy.ops.cuda.context import context
from caffepy.ops.cuda.launch import Array, c_type, launch

LINE = 128
"""Boxes of a block that looks for overlaps, as in proposals.cu."""

LEAST, FEW = 1024, 4
"""Boxes, and boxes for each that is wanted, that are looked at before the others."""


def decode_proposals(
    scores: Array,
    deltas: Array,
    anchors: Array,
    info: Array,
    stride: int,
    least: float,
    boxes: Array,
    objects: Array,
) -> None:
    images, _, h, w = scores.shape
    arrays = scores, deltas, anchors, info, boxes, objects
    sizes = images, h, w, len(anchors), info.size, stride
    launch("proposals", "decode_proposals", boxes, objects.size, *arrays, *sizes, float(least))


def suppress_overlaps(
    boxes: Array, threshold: float, unit: float, kept: Array, counts: Array
) -> None:
    (images, count, _), most = boxes.shape, kept.shape[1]
    columns = -(-count // 64)
    if not columns:
        counts.fill(0)
    if not images or not columns:
        return
    words = context().array("overlaps", (images, columns, count), np.uint64)
    find = kernel("proposals", f"find_overlaps<{c_type(boxes)}>")
    keep = kernel("proposals", "keep_boxes")
    enough = min(columns, -(-max(LEAST, FEW * most) // 64))
    for first, last in ((0, enough), (enough, columns)):
        if first < last:
            sizes = count, columns, first, most, float(threshold), float(unit)
            grid = -(-min(64 * last, count) // LINE), last - first, images
            find(grid, (LINE,), (boxes, counts, words, *sizes))
            keep((images,), (1024,), (words, kept, counts, count, columns, first, last, most))
