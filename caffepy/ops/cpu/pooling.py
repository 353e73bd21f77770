"""Max, average and stochastic pooling.

As in depthwise.py, a plane is split by row and column modulo stride, so that a pass over all
windows reads memory in order.
"""

from functools import lru_cache, partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from caffepy.device.blob import Array
from caffepy.device.threads import parallel
from caffepy.ops.cpu.blas import bias_gradient
from caffepy.ops.cpu.compiler import EXACT, kernel
from caffepy.ops.cpu.normalization import norm_backward
from caffepy.ops.cpu.random import mix, seed_array
from caffepy.ops.objects import Windows
from caffepy.ops.protocol.types import Maybe, Pair, Seed


class _Layout(NamedTuple):
    """A padded plane, split by row and column modulo stride, and its windows.

    In this buffer element (a, b) of every window has a constant offset from the window's number i *
    columns + j.
    """

    size: int  # of the buffer
    windows: int  # Ho * columns: some numbers belong to no window
    place: Array  # (H * W): of each element of a plane in the buffer
    taps: Array  # (kh * kw, 2): offset of an element of a window in the buffer and in the plane
    number: Array  # (Ho * Wo): of each window
    start: Array  # (Ho * Wo): of its first element in the plane, possibly negative
    corner: Array  # (Ho * Wo): the same, clipped to the plane
    area: Array  # (Ho * Wo): its elements in the padded plane, at least 1


@lru_cache(maxsize=256)
def _layout(plane: Pair, out: Pair, window: Windows) -> _Layout:
    (h, w), (ho, wo), ((kh, kw), (sh, sw), (ph, pw)) = plane, out, window
    rows = max(ho + (kh - 1) // sh + 1, (h + ph - 1) // sh + 1)
    columns = max(wo + (kw - 1) // sw, (w + pw - 1) // sw + 1)

    def place(r: Array, c: Array) -> Array:
        """Return the place of row r and column c, counted from the corner of the padding."""
        at: Array = ((r % sh * sw + c % sw) * rows + r // sh) * columns + c // sw
        return at

    r, c = np.indices((h, w)).reshape(2, -1)
    a, b = np.indices((kh, kw)).reshape(2, -1)
    i, j = np.indices((ho, wo)).reshape(2, -1)
    top, left = i * sh - ph, j * sw - pw
    area = np.maximum(np.minimum(top + kh, h + ph) - top, 1) * np.maximum(
        np.minimum(left + kw, w + pw) - left, 1
    )
    return _Layout(
        rows * columns * sh * sw,
        ho * columns,
        place(r + ph, c + pw).astype(np.int32),
        np.stack([place(a, b), a * w + b], 1).astype(np.int32),
        (i * columns + j).astype(np.int32),
        (top * w + left).astype(np.int32),
        (np.clip(top, 0, h - 1) * w + np.clip(left, 0, w - 1)).astype(np.int32),
        area.astype(np.int32),
    )


@kernel
def _max_forward(
    x: Array, y: Array, index: Array, layout: _Layout, relu: bool, lo: int, hi: int
) -> None:
    buffer = np.full(layout.size, -np.inf, x.dtype)
    best, where = np.empty(layout.windows, x.dtype), np.empty(layout.windows, np.int32)
    for n in range(lo, hi):
        for e in range(layout.place.size):
            buffer[np.uint32(layout.place[e])] = x[n, e]
        best[:] = -np.inf
        where[:] = -1
        for t in range(layout.taps.shape[0]):
            source, tap = buffer[layout.taps[t, 0] :], layout.taps[t, 1]
            for q in range(layout.windows):
                v, old, at = source[q], best[q], where[q]
                best[q] = v if v > old else old
                where[q] = tap if v > old else at
        for o in range(layout.number.size):
            w = np.uint32(layout.number[o])
            if where[w] >= 0:
                y[n, o], index[n, o] = best[w], layout.start[o] + where[w]
            else:  # only NaN or -inf, or no element of the plane (stride larger than the kernel)
                y[n, o], index[n, o] = x[n, layout.corner[o]], layout.corner[o]
            if relu and y[n, o] <= 0:
                y[n, o], index[n, o] = 0, -1


@kernel
def _norm_max_forward(
    x: Array,
    factor: Array,
    shift: Array,
    y: Array,
    index: Array,
    layout: _Layout,
    lo: int,
    hi: int,
) -> None:
    plane = np.empty((1, x.shape[1]), x.dtype)
    for n in range(lo, hi):
        s, b = factor[n % factor.size], shift[n % factor.size]
        for e in range(x.shape[1]):
            plane[0, e] = x[n, e] * s + b
        _max_forward(plane, y[n : n + 1], index[n : n + 1], layout, True, 0, 1)


@kernel
def _max_backward(dy: Array, index: Array, dx: Array, masks: bool, lo: int, hi: int) -> None:
    for n in range(lo, hi):
        plane = dx[n]
        plane[:] = 0
        for o in range(dy.shape[1]):
            if index[n, o] >= 0:
                plane[np.uint32(index[n, o])] += dy[n, o]
            elif masks:
                dy[n, o] = 0


@kernel
def _ave_forward(x: Array, y: Array, layout: _Layout, relu: bool, lo: int, hi: int) -> None:
    buffer, total = np.zeros(layout.size, x.dtype), np.empty(layout.windows, x.dtype)
    for n in range(lo, hi):
        for e in range(layout.place.size):
            buffer[np.uint32(layout.place[e])] = x[n, e]
        total[:] = 0
        for t in range(layout.taps.shape[0]):
            source = buffer[layout.taps[t, 0] :]
            for q in range(layout.windows):
                total[q] += source[q]
        for o in range(layout.number.size):
            mean = total[np.uint32(layout.number[o])] / layout.area[o]
            y[n, o] = 0 if relu and mean <= 0 else mean


@kernel
def _ave_backward(
    dy: Array,
    dx: Array,
    y: Array,
    x: Array,
    layout: _Layout,
    masked: tuple[bool, bool],
    lo: int,
    hi: int,
) -> None:
    """Average backward, of windows whose y, or for elements whose x, is above 0, if masked so."""
    by_y, by_x = masked
    buffer, share = np.empty(layout.size, dy.dtype), np.zeros(layout.windows, dy.dtype)
    for n in range(lo, hi):
        for o in range(layout.number.size):
            share[np.uint32(layout.number[o])] = (
                0 if by_y and y[n, o] <= 0 else dy[n, o] / layout.area[o]
            )
        buffer[:] = 0
        for t in range(layout.taps.shape[0]):
            to = buffer[layout.taps[t, 0] :]
            for q in range(layout.windows):
                to[q] += share[q]
        for e in range(layout.place.size):
            dx[n, e] = 0 if by_x and x[n, e] <= 0 else buffer[np.uint32(layout.place[e])]


@partial(kernel, fastmath=EXACT)
def _stochastic_forward(
    x: Array, y: Array, index: Array, seed: int, window: Windows, lo: int, hi: int
) -> None:
    kernel, stride, pad = window
    h, w, second, number = x.shape[1], x.shape[2], mix(np.uint32(seed)), x.dtype.type
    for n in range(lo, hi):
        for i in range(y.shape[1]):
            for j in range(y.shape[2]):
                top, left = i * stride[0] - pad[0], j * stride[1] - pad[1]
                rows = range(max(top, 0), min(top + kernel[0], h))
                columns = range(max(left, 0), min(left + kernel[1], w))
                total = number(0)
                for r in rows:
                    for c in columns:
                        total += x[n, r, c]
                hash_ = mix(np.uint32(seed + (n * y.shape[1] + i) * y.shape[2] + j))
                part = number(mix(np.uint32(hash_ + second))) + number(0.5)
                bound, so_far = part * number(1 / 4294967296) * total, number(0)
                at, found = (min(rows.start, h - 1), min(columns.start, w - 1)), False
                for r in rows:
                    for c in columns:
                        so_far += x[n, r, c]
                        if not found and so_far >= bound:
                            at, found = (r, c), True
                y[n, i, j], index[n, i, j] = x[n, at[0], at[1]], at[0] * w + at[1]


@kernel
def _stochastic_mean(x: Array, y: Array, window: Windows, lo: int, hi: int) -> None:
    kernel, stride, pad = window
    for n in range(lo, hi):
        for i in range(y.shape[1]):
            for j in range(y.shape[2]):
                top, left = i * stride[0] - pad[0], j * stride[1] - pad[1]
                total, squares = x.dtype.type(0), x.dtype.type(0)
                for r in range(max(top, 0), min(top + kernel[0], x.shape[1])):
                    for c in range(max(left, 0), min(left + kernel[1], x.shape[2])):
                        total += x[n, r, c]
                        squares += x[n, r, c] * x[n, r, c]
                y[n, i, j] = squares / total if total > 0 else 0


def _planes(*arrays: Array) -> list[Array]:
    """Return (N, C, H, W) arrays as (N * C, H * W)."""
    return [a.reshape(a.shape[0] * a.shape[1], prod(a.shape[2:])) for a in arrays]


def _share(loop: Any, layout: _Layout, relu: Any, *arrays: Array) -> None:
    planes = _planes(*arrays)
    run = partial(loop, *planes, layout, relu)
    parallel(run, len(planes[0]), 1 + 20_000 // layout.size)


def pool_index_type(kernel: Pair) -> "np.dtype[Any]":
    return np.dtype(np.int32)


def max_pool_forward(x: Array, y: Array, index: Array, window: Windows, relu: bool = False) -> None:
    _share(_max_forward, _layout(x.shape[2:], y.shape[2:], window), relu, x, y, index)


def norm_max_pool_forward(
    x: Array, numbers: Array, y: Array, index: Array, window: Windows
) -> None:
    _, _, factor, shift = numbers
    run = partial(_norm_max_forward, *(_planes(x)[0], factor, shift), *_planes(y, index))
    layout = _layout(x.shape[2:], y.shape[2:], window)
    parallel(partial(run, layout), x.shape[0] * x.shape[1], 1 + 20_000 // prod(x.shape[2:]))


def norm_max_pool_backward(
    x: Array,
    numbers: Array,
    dy: Array,
    index: Array,
    window: Windows,
    dx: Maybe,
    dscale: Maybe,
    dbias: Maybe,
    frozen: bool,
) -> None:
    g = np.empty_like(x) if dx is None else dx
    max_pool_backward(dy, index, g, window)
    flat, g = (a.reshape(*a.shape[:2], prod(a.shape[2:])) for a in (x, g))
    to = None if dx is None else g
    norm_backward(flat, numbers, [g], None, None, None, to, dscale, dbias, frozen)


def max_pool_backward(
    dy: Array, index: Array, dx: Array, window: Windows, db: Maybe = None
) -> None:
    planes = _planes(dy, index, dx)
    run = partial(_max_backward, *planes, db is not None)
    parallel(run, len(planes[0]), 1 + 20_000 // prod(dx.shape[2:]))
    if db is not None:
        bias_gradient(dy, db)


def ave_pool_forward(x: Array, y: Array, window: Windows, relu: bool = False) -> None:
    _share(_ave_forward, _layout(x.shape[2:], y.shape[2:], window), relu, x, y)


def ave_pool_backward(
    dy: Array, dx: Array, window: Windows, y: Array | None = None, x: Array | None = None
) -> None:
    layout = _layout(dx.shape[2:], dy.shape[2:], window)
    masks = dy if y is None else y, dx if x is None else x
    _share(_ave_backward, layout, (y is not None, x is not None), dy, dx, *masks)


def stochastic_pool_forward(
    x: Array, y: Array, index: Array, window: Windows, seed: Seed, step_counter: Array | None = None
) -> None:
    seed = int(seed_array(seed, step_counter))
    planes = [a.reshape(a.shape[0] * a.shape[1], *a.shape[2:]) for a in (x, y, index)]
    parallel(partial(_stochastic_forward, *planes, seed, window), len(planes[0]))


def stochastic_pool_mean(x: Array, y: Array, window: Windows) -> None:
    planes = [a.reshape(a.shape[0] * a.shape[1], *a.shape[2:]) for a in (x, y)]
    parallel(partial(_stochastic_mean, *planes, window), len(planes[0]))
