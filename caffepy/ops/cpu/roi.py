"""Pooling of regions of interest: rois (R, 5) = image, x1, y1, x2, y2. Places are reckoned in
float32, as the forks do.
"""

from functools import partial
from math import ceil, floor
from typing import Any

import numpy as np

from caffepy.device.blob import Array
from caffepy.device.threads import parallel
from caffepy.ops.boxes import Rois
from caffepy.ops.cpu.compiler import inlined, kernel

_exact, _inside = partial(kernel, fastmath=set()), partial(inlined, fastmath=set())
"""Each operation is rounded separately: the cells of a box must not depend on the processor."""


@_inside
def _rounded(x: float) -> float:
    """The nearest whole number, of two the one farther from 0."""
    return floor(x + np.float32(0.5)) if x >= 0 else -floor(-x + np.float32(0.5))


@_inside
def _cut(place: float, size: int) -> int:
    return min(max(int(place), 0), size)


@_inside
def _span(begin: float, end: float, scale: float, bins: int) -> tuple[int, np.float32]:
    """The first cell of a box along an axis, and the length of a bin."""
    first = int(_rounded(np.float32(begin) * scale))
    last = int(_rounded(np.float32(end) * scale))
    return first, np.float32(max(last - first + 1, 1)) / np.float32(bins)


@_exact
def _roi_pool(
    x: Array, rois: Array, y: Array, index: Array, scale: float, lo: int, hi: int
) -> None:
    h, w = x.shape[2:]
    rows, columns = y.shape[2:]
    for r in range(y.shape[0]):
        n = int(rois[r, 0])
        left, across = _span(rois[r, 1], rois[r, 3], scale, columns)
        top, down = _span(rois[r, 2], rois[r, 4], scale, rows)
        for i in range(rows):
            y0 = _cut(floor(np.float32(i) * down) + top, h)
            y1 = _cut(ceil(np.float32(i + 1) * down) + top, h)
            for j in range(columns):
                x0 = _cut(floor(np.float32(j) * across) + left, w)
                x1 = _cut(ceil(np.float32(j + 1) * across) + left, w)
                for c in range(lo, hi):
                    best, place = y.dtype.type(0), -1
                    for a in range(y0, y1):
                        for b in range(x0, x1):
                            if place < 0 or x[n, c, a, b] > best:
                                best, place = x[n, c, a, b], a * w + b
                    y[r, c, i, j] = best
                    index[r, c, i, j] = place


@_exact
def _roi_pool_gradient(dy: Array, rois: Array, index: Array, dx: Array, lo: int, hi: int) -> None:
    w = dx.shape[3]
    dx[:, lo:hi] = 0
    for r in range(dy.shape[0]):
        n = int(rois[r, 0])
        for c in range(lo, hi):
            for i in range(dy.shape[2]):
                for j in range(dy.shape[3]):
                    place = index[r, c, i, j]
                    if place >= 0:
                        dx[n, c, place // w, place % w] += dy[r, c, i, j]


def take_rois(boxes: Rois, images: int) -> None:
    given, rois, pad, bad_image = boxes
    rois[...] = given
    image = rois[:, 0]
    bad = ~((image > -1) & (image < images))
    if np.any(bad):
        bad_image[:] = 1, np.max(image[bad])
        image[bad] = 0
    if pad:
        sides = (rois[:, 3:] - rois[:, 1:3] + 1) * np.float32(pad)
        rois[:, 1:3] -= sides
        rois[:, 3:] += sides


def roi_pool_forward(x: Array, boxes: Rois, y: Array, index: Array, scale: float) -> None:
    take_rois(boxes, len(x))
    parallel(partial(_roi_pool, x, boxes.taken, y, index, np.float32(scale)), x.shape[1])


def roi_pool_backward(dy: Array, rois: Array, index: Array, dx: Array, scale: float) -> None:
    parallel(partial(_roi_pool_gradient, dy, rois, index, dx), dx.shape[1])


@_inside
def _part(begin: float, end: float, scale: float, bins: int) -> tuple[np.float32, np.float32]:
    """Start of a box along an axis, and the length of a bin."""
    start = np.float32(_rounded(np.float32(begin))) * scale
    stop = np.float32(_rounded(np.float32(end)) + np.float32(1)) * scale
    return start, max(stop - start, np.float32(0.1)) / np.float32(bins)


@_inside
def _cells(i: int, start: float, length: float, size: int) -> tuple[int, int]:
    """The first cell of bin i along an axis, and the one behind its last."""
    end = np.float32(i + 1) * length + start
    return _cut(floor(np.float32(i) * length + start), size), _cut(ceil(end), size)


@_exact
def _psroi_pool(x: Array, rois: Array, y: Array, scale: float, lo: int, hi: int) -> None:
    h, w = x.shape[2:]
    bins = y.shape[2]
    for r in range(y.shape[0]):
        n = int(rois[r, 0])
        left, across = _part(rois[r, 1], rois[r, 3], scale, bins)
        top, down = _part(rois[r, 2], rois[r, 4], scale, bins)
        for i in range(bins):
            y0, y1 = _cells(i, top, down, h)
            for j in range(bins):
                x0, x1 = _cells(j, left, across, w)
                area = max((y1 - y0) * (x1 - x0), 1)
                for k in range(lo, hi):
                    total = y.dtype.type(0)
                    for a in range(y0, y1):
                        for b in range(x0, x1):
                            total += x[n, (k * bins + i) * bins + j, a, b]
                    y[r, k, i, j] = total / y.dtype.type(area)


@_exact
def _psroi_pool_gradient(dy: Array, rois: Array, dx: Array, scale: float, lo: int, hi: int) -> None:
    h, w = dx.shape[2:]
    bins = dy.shape[2]
    dx[:, lo * bins * bins : hi * bins * bins] = 0
    for r in range(dy.shape[0]):
        n = int(rois[r, 0])
        left, across = _part(rois[r, 1], rois[r, 3], scale, bins)
        top, down = _part(rois[r, 2], rois[r, 4], scale, bins)
        for i in range(bins):
            y0, y1 = _cells(i, top, down, h)
            for j in range(bins):
                x0, x1 = _cells(j, left, across, w)
                area = max((y1 - y0) * (x1 - x0), 1)
                for k in range(lo, hi):
                    share = dy[r, k, i, j] / dy.dtype.type(area)
                    for a in range(y0, y1):
                        for b in range(x0, x1):
                            dx[n, (k * bins + i) * bins + j, a, b] += share


def psroi_pool_forward(x: Array, boxes: Rois, y: Array, scale: float) -> None:
    take_rois(boxes, len(x))
    parallel(partial(_psroi_pool, x, boxes.taken, y, np.float32(scale)), y.shape[1])


def psroi_pool_backward(dy: Array, rois: Array, dx: Array, scale: float) -> None:
    parallel(partial(_psroi_pool_gradient, dy, rois, dx, np.float32(scale)), dy.shape[1])


@_inside
def _start(begin: float, end: float, scale: float, sensitive: bool, beyond: int) -> Any:
    """Start of a box along an axis, and its length: at least 1, or 0.1 of PSROIAlign's."""
    start = np.float32(begin) * scale
    length = (np.float32(end) + np.float32(beyond)) * scale - start
    return start, max(length, np.float32(0.1) if sensitive else np.float32(1))


@_inside
def _taken(start: float, length: float, p: int, i: int, n: int, size: int, sensitive: bool) -> Any:
    """Place of sample i of n of bin p along an axis, in pixels; -1 if it does not count."""
    at = np.float32(p) * length + start
    if sensitive:
        most = np.float32(size - 1)
        last = min(max(np.float32(p + 1) * length + start, np.float32(0)), most)
        at = min(max(at, np.float32(0)), most) + np.float32(i + 1) * (length / np.float32(n + 1))
        return at if at < last else np.float32(-1)
    at += (np.float32(i) + np.float32(0.5)) * length / np.float32(n)
    return max(at, np.float32(0)) if -1 <= at <= size else np.float32(-1)


@_inside
def _neighbours(at: float, size: int) -> tuple[int, int, Any]:
    """The pixels on both sides of a place, and the share of the second."""
    low = int(at)
    if low >= size - 1:
        return size - 1, size - 1, np.float32(0)
    return low, low + 1, at - np.float32(low)


@_inside
def _learns(pixel: int, p: int, start: float, length: float, sensitive: bool) -> bool:
    """False for a pixel behind bin p, to which PSROIAlign gives no gradient."""
    return not sensitive or pixel < ceil(np.float32(p + 1) * length + start)


MOST = 1024
"""Samples of a part in a direction, whatever the size of its box."""


@_inside
def _count(samples: int, length: float) -> int:
    return samples if samples > 0 else min(ceil(length), MOST)


@_exact
def _align(
    x: Array,
    rois: Array,
    y: Array,
    scale: float,
    samples: int,
    beyond: int,
    sensitive: bool,
    lo: int,
    hi: int,
) -> None:
    h, w = x.shape[2:]
    rows, columns = y.shape[2:]
    one = y.dtype.type(1)
    for r in range(y.shape[0]):
        n = int(rois[r, 0])
        left, width = _start(rois[r, 1], rois[r, 3], scale, sensitive, beyond)
        top, height = _start(rois[r, 2], rois[r, 4], scale, sensitive, beyond)
        down, across = height / np.float32(rows), width / np.float32(columns)
        many, wide = _count(samples, down), _count(samples, across)
        for i in range(rows):
            for j in range(columns):
                y[r, lo:hi, i, j] = 0
                for s in range(many):
                    v = _taken(top, down, i, s, many, h, sensitive)
                    for t in range(wide if v >= 0 else 0):
                        u = _taken(left, across, j, t, wide, w, sensitive)
                        if u < 0:
                            continue
                        a, below, q = _neighbours(v, h)
                        b, behind, p = _neighbours(u, w)
                        for k in range(lo, hi):
                            c = (k * rows + i) * columns + j if sensitive else k
                            upper = (one - p) * x[n, c, a, b] + p * x[n, c, a, behind]
                            lower = (one - p) * x[n, c, below, b] + p * x[n, c, below, behind]
                            y[r, k, i, j] += (one - q) * upper + q * lower
                y[r, lo:hi, i, j] /= y.dtype.type(many * wide)


@_exact
def _align_gradient(
    dy: Array,
    rois: Array,
    dx: Array,
    scale: float,
    samples: int,
    beyond: int,
    sensitive: bool,
    lo: int,
    hi: int,
) -> None:
    h, w = dx.shape[2:]
    rows, columns = dy.shape[2:]
    one = dx.dtype.type(1)
    parts = rows * columns if sensitive else 1
    dx[:, lo * parts : hi * parts] = 0
    for r in range(dy.shape[0]):
        n = int(rois[r, 0])
        left, width = _start(rois[r, 1], rois[r, 3], scale, sensitive, beyond)
        top, height = _start(rois[r, 2], rois[r, 4], scale, sensitive, beyond)
        down, across = height / np.float32(rows), width / np.float32(columns)
        many, wide = _count(samples, down), _count(samples, across)
        for i in range(rows):
            for j in range(columns):
                for s in range(many):
                    v = _taken(top, down, i, s, many, h, sensitive)
                    for t in range(wide if v >= 0 else 0):
                        u = _taken(left, across, j, t, wide, w, sensitive)
                        if u < 0:
                            continue
                        a, below, q = _neighbours(v, h)
                        b, behind, p = _neighbours(u, w)
                        down_too = _learns(below, i, top, down, sensitive)
                        right_too = _learns(behind, j, left, across, sensitive)
                        for k in range(lo, hi):
                            c = (k * rows + i) * columns + j if sensitive else k
                            share = dy[r, k, i, j] / dy.dtype.type(many * wide)
                            dx[n, c, a, b] += (one - q) * (one - p) * share
                            if right_too:
                                dx[n, c, a, behind] += (one - q) * p * share
                            if down_too:
                                dx[n, c, below, b] += q * (one - p) * share
                            if down_too and right_too:
                                dx[n, c, below, behind] += q * p * share


def roi_align_forward(
    x: Array, boxes: Rois, y: Array, scale: float, samples: int, beyond: int, sensitive: bool
) -> None:
    take_rois(boxes, len(x))
    settings = np.float32(scale), samples, beyond, sensitive
    parallel(partial(_align, x, boxes.taken, y, *settings), y.shape[1])


def roi_align_backward(
    dy: Array, rois: Array, dx: Array, scale: float, samples: int, beyond: int, sensitive: bool
) -> None:
    settings = np.float32(scale), samples, beyond, sensitive
    parallel(partial(_align_gradient, dy, rois, dx, *settings), dy.shape[1])
