"""Columns of a deformable convolution, whose kernel reads an image at learned offsets."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from caffepy.device.blob import Array
from caffepy.device.threads import parallel
from caffepy.ops.cpu.compiler import inlined, kernel
from caffepy.ops.protocol.types import Maybe, Sizes

_exact, _inside = partial(kernel, fastmath=set()), partial(inlined, fastmath=set())


@_inside
def _reading(place: Any, size: int) -> tuple[int, int, Any]:
    """The two elements of an axis around a place in it, and the share of the second one."""
    low = int(place)
    high = min(low + 1, size - 1)
    return low, high, place - type(place)(low) if high > low else type(place)(0)


@_exact
def _columns(
    x: Array,
    offsets: Array,
    columns: Array,
    width: int,
    stride: tuple[int, int],
    pad: tuple[int, int],
    dilation: tuple[int, int],
    lo: int,
    hi: int,
) -> None:
    channels, h, w = x.shape
    kind = x.dtype.type
    one = kind(1)
    for k in range(lo, hi):
        c, tap = k // columns.shape[1], k % columns.shape[1]
        group = c // (channels // offsets.shape[0])
        move, out = offsets[group, tap], columns[c, tap]
        for p in range(out.shape[0]):
            for q in range(out.shape[1]):
                u = move[0, p, q] + kind(p * stride[0] - pad[0] + tap // width * dilation[0])
                v = move[1, p, q] + kind(q * stride[1] - pad[1] + tap % width * dilation[1])
                if not (u >= 0 and v >= 0 and u < h and v < w):
                    out[p, q] = 0
                    continue
                top, bottom, t = _reading(u, h)
                left, right, s = _reading(v, w)
                upper = (one - s) * x[c, top, left] + s * x[c, top, right]
                lower = (one - s) * x[c, bottom, left] + s * x[c, bottom, right]
                out[p, q] = (one - t) * upper + t * lower


@_exact
def _columns_transposed(
    dcolumns: Array,
    offsets: Array,
    dx: Array,
    width: int,
    stride: tuple[int, int],
    pad: tuple[int, int],
    dilation: tuple[int, int],
    lo: int,
    hi: int,
) -> None:
    channels, h, w = dx.shape
    kind = dx.dtype.type
    one = kind(1)
    for c in range(lo, hi):
        group, out = c // (channels // offsets.shape[0]), dx[c]
        out[:] = 0
        for tap in range(dcolumns.shape[1]):
            move, given = offsets[group, tap], dcolumns[c, tap]
            for p in range(given.shape[0]):
                for q in range(given.shape[1]):
                    u = move[0, p, q] + kind(p * stride[0] - pad[0] + tap // width * dilation[0])
                    v = move[1, p, q] + kind(q * stride[1] - pad[1] + tap % width * dilation[1])
                    if not (u >= 0 and v >= 0 and u < h and v < w):
                        continue
                    top, bottom, t = _reading(u, h)
                    left, right, s = _reading(v, w)
                    d = given[p, q]
                    out[top, left] += d * (one - s) * (one - t)
                    out[top, right] += d * s * (one - t)
                    out[bottom, left] += d * (one - s) * t
                    out[bottom, right] += d * s * t


@_exact
def _offset_gradients(
    dcolumns: Array,
    x: Array,
    offsets: Array,
    doffsets: Array,
    width: int,
    stride: tuple[int, int],
    pad: tuple[int, int],
    dilation: tuple[int, int],
    lo: int,
    hi: int,
) -> None:
    channels, h, w = x.shape
    kind = x.dtype.type
    one = kind(1)
    size = channels // offsets.shape[0]
    for k in range(lo, hi):
        group, tap = k // offsets.shape[1], k % offsets.shape[1]
        move, out = offsets[group, tap], doffsets[group, tap]
        for p in range(move.shape[1]):
            for q in range(move.shape[2]):
                u = move[0, p, q] + kind(p * stride[0] - pad[0] + tap // width * dilation[0])
                v = move[1, p, q] + kind(q * stride[1] - pad[1] + tap % width * dilation[1])
                down, across = kind(0), kind(0)
                if u >= 0 and v >= 0 and u < h and v < w:
                    top, bottom, t = _reading(u, h)
                    left, right, s = _reading(v, w)
                    for c in range(group * size, (group + 1) * size):
                        d = dcolumns[c, tap, p, q]
                        a, b = x[c, top, left], x[c, top, right]
                        e, f = x[c, bottom, left], x[c, bottom, right]
                        down += d * ((one - s) * (e - a) + s * (f - b))
                        across += d * ((one - t) * (b - a) + t * (f - e))
                out[0, p, q] = down
                out[1, p, q] = across


def _numbers(window: Sequence[Sizes]) -> tuple[Any, ...]:
    """The kernel's width, and stride, pad and dilation as pairs."""
    kernel_size, *others = window
    return kernel_size[1], *((sizes[0], sizes[1]) for sizes in others)


def deformable_columns(x: Array, offsets: Array, columns: Array, window: Sequence[Sizes]) -> None:
    run = partial(_columns, x, offsets, columns, *_numbers(window))
    parallel(run, columns.shape[0] * columns.shape[1])


def deformable_backward(
    dcolumns: Array,
    x: Array,
    offsets: Array,
    dx: Maybe,
    doffsets: Maybe,
    window: Sequence[Sizes],
) -> None:
    numbers = _numbers(window)
    if dx is not None:
        parallel(partial(_columns_transposed, dcolumns, offsets, dx, *numbers), len(dx))
    if doffsets is not None:
        run = partial(_offset_gradients, dcolumns, x, offsets, doffsets, *numbers)
        parallel(run, offsets.shape[0] * offsets.shape[1])
