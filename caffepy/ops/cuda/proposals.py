"""Boxes that a region proposal network proposes."""

from typing import Any

import numpy as np

from caffepy.ops.cuda.compiler import kernel
from caffepy.ops.cuda.context import context
from caffepy.ops.cuda.launch import Array, arrivals, c_type, launch
from caffepy.ops.cuda.small_convolution import here

MOST = 5120
"""Most boxes that are looked at in one launch, as in proposals.cu."""

LEAST, EACH = 1280, 2
"""Boxes that are looked at before the others: LEAST, or if more EACH for each that is wanted."""

BLOCKS, WARPS, LINE = 128, 32, 32
"""Most blocks of an image, warps of a block and boxes of one, as in proposals.cu."""

AHEAD = 64
"""Least entries of the list of a block, as in proposals.cu."""

ENTRIES, STATIC = 512, 36 << 10
"""Most entries of a warp in shared memory, and bytes of it that a block has besides."""

NOTES = 1 + MOST // 64
"""Words of 8 bytes that blocks tell each other of an image, as in proposals.cu."""


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
    if not count:
        counts.fill(0)
    if not images or not count:
        return
    begin = min(count, MOST, max(LEAST, EACH * most))
    rest = -(-(count - begin) // MOST)
    ends = [begin, *(begin + (count - begin) * k // rest for k in range(1, rest + 1))]
    lines = -(-max(b - a for a, b in zip([0, *ends], ends, strict=False)) // LINE)
    units = lines * (lines + 1) // 2
    blocks = min(BLOCKS, units)
    # A box beside a word has at most one entry; AHEAD are read before their number is known.
    room = max(AHEAD, LINE * -(-units // blocks))
    lists = context().array("overlaps", (images, blocks, room), np.uint64)
    lengths = context().array("numbers of overlaps", (images, blocks), np.int32)
    arrays = boxes, kept, counts, arrivals(images * NOTES), lists, lengths
    run: Any = kernel("proposals", f"suppress_overlaps<{c_type(boxes)}>")
    entries = min(ENTRIES, (here().shared - STATIC) // (8 * WARPS))
    shared = run.max_dynamic_shared_size_bytes = 8 * WARPS * entries
    first = 0
    for end in ends:
        sizes = count, first, end - first, most, room, entries, float(threshold), float(unit)
        run((blocks, images), (32 * WARPS,), (*arrays, *sizes), shared_mem=shared)
        first = end
