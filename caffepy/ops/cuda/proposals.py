"""Boxes that a region proposal network proposes."""

import numpy as np

from caffepy.ops.cuda.compiler import kernel
from caffepy.ops.cuda.context import context
from caffepy.ops.cuda.launch import Array, c_type, launch, launch_blocks


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
    images, count, _ = boxes.shape
    columns = -(-count // 64)
    words = context().array("overlaps", (images, count, columns), np.uint64)
    removed = context().array("removed", (images, columns), np.uint64)
    if images and count:
        find = kernel("proposals", f"find_overlaps<{c_type(boxes)}>")
        arguments = boxes, words, count, columns, float(threshold), float(unit)
        find((columns, columns, images), (64,), arguments)
    given = boxes, words, removed, kept, counts, count, columns, kept.shape[1]
    launch_blocks("proposals", "keep_boxes", boxes, images, *given, threads=1024)
