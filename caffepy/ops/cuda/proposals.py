"""Boxes that a region proposal network proposes."""

import numpy as np

from caffepy.ops.cuda.compiler import kernel
from caffepy.ops.cuda.context import context
from caffepy.ops.cuda.launch import Array, c_type, launch

COLUMN = 128
"""Boxes that are decided about at a time, as in proposals.cu."""

LEAST, EACH, MANY = 1280, 2, 2048
"""Boxes that are looked at before the others: so many, or for each that is wanted. From MANY on
twice as many are looked at next, else all.
"""


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
    columns = -(-count // COLUMN)
    if not columns:
        counts.fill(0)
    if not images or not columns:
        return
    bits = context().array("overlaps", (images, columns, count, COLUMN // 64), np.uint64)
    find = kernel("proposals", f"find_overlaps<{c_type(boxes)}>")
    keep = kernel("proposals", "keep_boxes")
    first, behind = 0, max(LEAST, EACH * most)
    while first < columns:
        last = min(columns, -(-behind // COLUMN))
        sizes = count, columns, first, most, float(threshold), float(unit)
        find((last, last - first, images), (COLUMN,), (boxes, counts, bits, *sizes))
        keep((images,), (1024,), (bits, kept, counts, count, columns, first, last, most))
        first, behind = last, 2 * behind if behind >= MANY else count
