"""Boxes that a region proposal network proposes: x1, y1, x2, y2 in pixels, both ends inside, so
that a box is x2 - x1 + 1 wide.
"""

from functools import partial
from math import exp

import numpy as np

from caffepy.device.blob import Array
from caffepy.device.threads import parallel
from caffepy.ops.cpu.compiler import inlined, kernel

_exact, _inside = partial(kernel, fastmath=set()), partial(inlined, fastmath=set())
"""Each operation is rounded separately: which box wins must not depend on the processor."""


@_inside
def _moved(low: float, high: float, shift: float, grow: float, size: float) -> tuple[float, float]:
    """The ends of a box along an axis after its deltas, cut to the image."""
    length = high - low + type(low)(1)
    half = type(low)(0.5)
    centre = low + half * length + shift * length
    reach = half * (type(low)(exp(grow)) * length)
    most = size - type(low)(1)
    return max(min(centre - reach, most), type(low)(0)), max(
        min(centre + reach, most), type(low)(0)
    )


@_exact
def _decode(
    scores: Array,
    deltas: Array,
    anchors: Array,
    info: Array,
    stride: int,
    least: float,
    boxes: Array,
    objects: Array,
    lo: int,
    hi: int,
) -> None:
    h, w = scores.shape[2:]
    count = len(anchors)
    number, one = boxes.dtype.type, boxes.dtype.type(1)
    across = info[3] if len(info) > 3 else info[2]
    for row in range(lo, hi):
        n, i = row // h, row % h
        for j in range(w):
            for a in range(count):
                p = (i * w + j) * count + a
                dx, dy, dw, dh = deltas[n, 4 * a : 4 * a + 4, i, j]
                left, right = number(j * stride), number(j * stride)
                left += number(anchors[a, 0])
                right += number(anchors[a, 2])
                x1, x2 = _moved(left, right, dx, dw, number(info[1]))
                top, bottom = number(i * stride), number(i * stride)
                top += number(anchors[a, 1])
                bottom += number(anchors[a, 3])
                y1, y2 = _moved(top, bottom, dy, dh, number(info[0]))
                boxes[n, p, 0], boxes[n, p, 1], boxes[n, p, 2], boxes[n, p, 3] = x1, y1, x2, y2
                wide, high = x2 - x1 + one, y2 - y1 + one
                fits = wide >= number(least * across) and high >= number(least * info[2])
                objects[n, p] = scores[n, count + a, i, j] if fits else number(0)


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
    given = scores, deltas, anchors, info, stride, np.float32(least), boxes, objects
    parallel(partial(_decode, *given), scores.shape[0] * scores.shape[2])


@_exact
def _suppress(
    boxes: Array, threshold: float, one: float, kept: Array, counts: Array, lo: int, hi: int
) -> None:
    zero = boxes.dtype.type(0)
    most = kept.shape[1]
    areas = np.empty(boxes.shape[1], boxes.dtype)
    for n in range(lo, hi):
        found = 0
        for p in range(boxes.shape[1]):
            if found == most:
                break
            x1, y1, x2, y2 = boxes[n, p]
            area = (x2 - x1 + one) * (y2 - y1 + one)
            free = True
            for k in range(found):
                q = kept[n, k]
                wide = min(x2, boxes[n, q, 2]) - max(x1, boxes[n, q, 0]) + one
                high = min(y2, boxes[n, q, 3]) - max(y1, boxes[n, q, 1]) + one
                both = max(wide, zero) * max(high, zero)
                if both / (area + areas[k] - both) > threshold:
                    free = False
                    break
            if free:
                kept[n, found] = p
                areas[found] = area
                found += 1
        counts[n] = found


def suppress_overlaps(
    boxes: Array, threshold: float, unit: float, kept: Array, counts: Array
) -> None:
    given = boxes, np.float32(threshold), boxes.dtype.type(unit), kept, counts
    parallel(partial(_suppress, *given), len(boxes))
