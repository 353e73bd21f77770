"""Boxes of maps at one size: the first corner of each part, and MNC's gradients of it."""

from functools import partial
from math import ceil, floor
from typing import Any

from caffepy.device.blob import Array
from caffepy.device.threads import parallel
from caffepy.ops.boxes import Rois
from caffepy.ops.cpu.compiler import inlined, kernel
from caffepy.ops.cpu.roi import take_rois
from caffepy.ops.protocol.types import Maybe

_exact, _inside = partial(kernel, fastmath=set()), partial(inlined, fastmath=set())


@_inside
def _side(begin: Any, end: Any, scale: Any) -> tuple[Any, Any]:
    """Return start and end of a box along an axis, rounded half away from 0."""
    kind = type(begin)
    half = kind(0.5)
    first, last = begin * kind(scale), end * kind(scale)
    start = floor(first + half) if first >= 0 else -floor(half - first)
    stop = floor(last + half) if last >= 0 else -floor(half - last)
    return kind(start), kind(stop)


@_inside
def _box(roi: Array, scale: float) -> tuple[int, Any, Any, Any, Any]:
    """Return the image of a box, and its rounded left, right, top and bottom on the map."""
    left, right = _side(roi[1], roi[3], scale)
    top, bottom = _side(roi[2], roi[4], scale)
    return int(roi[0]), left, right, top, bottom


@_inside
def _corner(k: int, start: Any, stop: Any, parts: int, size: int) -> tuple[bool, int, int, Any]:
    """Return whether corner k lies in the map, the two pixels around it, and the share of the
    second.
    """
    kind = type(start)
    place = start + kind(k) * (max(stop - start, kind(0)) / kind(parts))
    inside = not (place < kind(-0.5) or place > kind(size) - kind(0.5))
    if not inside:
        return False, 0, 0, kind(0)
    place = max(place, kind(0))
    low = int(place)
    if low >= size - 1:
        return True, size - 1, size - 1, kind(0)
    return True, low, low + 1, place - kind(low)


@_inside
def _takes(pixel: int, k: int, start: Any, stop: Any, parts: int) -> bool:
    """True if MNC's gradient of a pixel looks at corner k."""
    kind = type(start)
    bin_size = max(stop - start + kind(1), kind(1)) / kind(parts)
    behind = kind(pixel) - start
    first = floor((behind - kind(1)) / bin_size - kind(1))
    return bool(first <= k < ceil((behind + kind(1)) / bin_size))


@_exact
def _warp(x: Array, rois: Array, y: Array, scale: float, lo: int, hi: int) -> None:
    h, w = x.shape[2:]
    rows, columns = y.shape[2:]
    one = x.dtype.type(1)
    for r in range(y.shape[0]):
        n, left, right, top, bottom = _box(rois[r], scale)
        for i in range(rows):
            in_h, a, b, t = _corner(i, top, bottom, rows, h)
            for j in range(columns):
                in_w, e, f, s = _corner(j, left, right, columns, w)
                for c in range(lo, hi):
                    value = x.dtype.type(0)
                    if in_h and in_w:
                        plane = x[n, c]
                        upper = (one - s) * plane[a, e] + s * plane[a, f]
                        lower = (one - s) * plane[b, e] + s * plane[b, f]
                        value = (one - t) * upper + t * lower
                    y[r, c, i, j] = value


@_exact
def _to_map(dy: Array, rois: Array, dx: Array, scale: float, lo: int, hi: int) -> None:
    h, w = dx.shape[2:]
    rows, columns = dy.shape[2:]
    one = dx.dtype.type(1)
    dx[:, lo:hi] = 0
    for r in range(dy.shape[0]):
        n, left, right, top, bottom = _box(rois[r], scale)
        for i in range(rows):
            in_h, a, b, t = _corner(i, top, bottom, rows, h)
            for j in range(columns):
                in_w, e, f, s = _corner(j, left, right, columns, w)
                if not (in_h and in_w):
                    continue
                for u in range(a, b + 1):
                    if not (top <= u <= bottom and _takes(u, i, top, bottom, rows)):
                        continue
                    down = t if u > a else one - t
                    for v in range(e, f + 1):
                        if not (left <= v <= right and _takes(v, j, left, right, columns)):
                            continue
                        share = down * (s if v > e else one - s)
                        for c in range(lo, hi):
                            dx[n, c, u, v] += share * dy[r, c, i, j]


@_exact
def _to_boxes(
    dy: Array, x: Array, rois: Array, drois: Array, scale: float, lo: int, hi: int
) -> None:
    h, w = x.shape[2:]
    rows, columns = dy.shape[2:]
    kind = x.dtype.type
    one = kind(1)
    for r in range(lo, hi):
        drois[r] = 0
        n, left, right, top, bottom = _box(rois[r], scale)
        wide, high = max(right - left + one, one), max(bottom - top + one, one)
        for i in range(rows):
            in_h, a, b, t = _corner(i, top, bottom, rows, h)
            for j in range(columns):
                in_w, e, f, s = _corner(j, left, right, columns, w)
                if not (in_h and in_w) or a == b or e == f:
                    continue
                across, down = kind(0), kind(0)
                for c in range(x.shape[1]):
                    p, q = x[n, c, a, e], x[n, c, a, f]
                    u, v = x[n, c, b, e], x[n, c, b, f]
                    d = dy[r, c, i, j]
                    across += d * ((one - t) * (q - p) + t * (v - u))
                    down += d * ((one - s) * (u - p) + s * (v - q))
                part = (kind(e) + s - left) / wide
                drois[r, 1] += kind(scale) * (one - part) * across
                drois[r, 3] += kind(scale) * part * across
                part = (kind(a) + t - top) / high
                drois[r, 2] += kind(scale) * (one - part) * down
                drois[r, 4] += kind(scale) * part * down


def roi_warp_forward(x: Array, boxes: Rois, y: Array, scale: float) -> None:
    take_rois(boxes, len(x))
    parallel(partial(_warp, x, boxes.taken, y, scale), x.shape[1])


def roi_warp_backward(
    dy: Array, x: Array, rois: Array, dx: Maybe, drois: Maybe, scale: float
) -> None:
    if dx is not None:
        parallel(partial(_to_map, dy, rois, dx, scale), dx.shape[1])
    if drois is not None:
        parallel(partial(_to_boxes, dy, x, rois, drois, scale), len(rois))
