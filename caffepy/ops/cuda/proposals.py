"""Boxes that a region proposal network proposes."""

import cupy
import numpy as np

from caffepy.ops.cuda.launch import Array, launch, launch_blocks


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
    words = cupy.empty((images, count, columns), np.uint64)
    removed = cupy.zeros((images, columns), np.uint64)
    arguments = boxes, words, images, count, columns, float(threshold), float(unit)
    launch("proposals", "find_overlaps", boxes, words.size, *arguments)
    given = boxes, words, removed, kept, counts, count, columns, kept.shape[1]
    launch_blocks("proposals", "keep_boxes", boxes, images, *given)
