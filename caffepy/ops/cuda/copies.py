"""Copies of arrays and views, between layouts and types, concatenation and splitting."""

from collections.abc import Sequence
from math import gcd, prod

import cupy
import numpy as np

from caffepy.core.errors import DeviceError
from caffepy.ops.cuda.launch import (
    THREADS,
    TYPES,
    Array,
    alike,
    c_type,
    channels_last,
    divisor,
    launch,
    launch_expression,
    lies_channels_last,
    packs,
    planes,
)

_INTEGERS = {1: "char", 2: "short", 4: "int", 8: "long long"}
UNITS = {size: f"unsigned {name}" for size, name in _INTEGERS.items()} | {16: "uint4"}
PARTS = 8
"""Most arrays of a launch of copy.cu."""


def _lie_alike(x: Array, y: Array) -> bool:
    """Return True if both fill their memory in the same order."""
    return (x.flags.c_contiguous and y.flags.c_contiguous) or (
        lies_channels_last(x) and lies_channels_last(y)
    )


def copy(src: Array, dst: Array) -> None:
    if not dst.size:
        return
    if isinstance(src, np.ndarray):
        if dst.flags.c_contiguous and src.shape == dst.shape and src.dtype == dst.dtype:
            dst.set(np.ascontiguousarray(src), stream=cupy.cuda.get_current_stream())
        else:
            copy(cupy.asarray(src), dst)
    elif src.shape != dst.shape:
        cupy.copyto(dst, src)
    elif src.dtype != dst.dtype and src.dtype.name in TYPES and dst.dtype.name in TYPES:
        convert(src, dst)
    elif src.dtype == dst.dtype and _lie_alike(src, dst):
        _copy_whole(src, dst)
    elif src.dtype != dst.dtype or not _copy_strided(src, dst):
        cupy.copyto(dst, src)


def _copy_whole(src: Array, dst: Array) -> None:
    dst.data.copy_from_device_async(src.data, dst.nbytes, cupy.cuda.get_current_stream())


def _copy_strided(src: Array, dst: Array) -> bool:
    """Copy and return True, if at most four axes are left after merging."""
    # Strides of dst and src in bytes, size; the shortest strides first.
    axes: list[tuple[int, int, int]] = []
    for t, s, n in sorted(zip(dst.strides, src.strides, dst.shape, strict=True)):
        if n == 1:
            continue
        if axes and (t, s) == (axes[-1][2] * axes[-1][0], axes[-1][2] * axes[-1][1]):
            axes[-1] = (*axes[-1][:2], axes[-1][2] * n)
        else:
            axes.append((t, s, n))
    axes = axes or [(src.itemsize, src.itemsize, 1)]
    if len(axes) > 4:
        return False
    unit = src.itemsize
    (t, s, n), *others = axes
    if s == t == unit:
        strides = (stride for axis in others for stride in axis[:2])
        unit = gcd(16, n * unit, src.data.ptr, dst.data.ptr, *strides)
        axes[0] = (unit, unit, n * src.itemsize // unit)
    name = f"copy<{UNITS[unit]}, {len(axes)}>"
    axes += [(0, 0, 1)] * (4 - len(axes))
    targets, sources, sizes = zip(*((t // unit, s // unit, n) for t, s, n in axes), strict=True)
    launch_expression("copy", name, src.nbytes // unit, src, dst, *sizes, *sources, *targets)
    return True


def convert(x: Array, out: Array) -> None:
    assert x.shape == out.shape
    if not out.size:
        return
    if not _lie_alike(x, out):
        _transpose(x, out)
    elif x.dtype == out.dtype:
        _copy_whole(x, out)
    else:
        name = f"cast<{c_type(x)}, {c_type(out)}>"
        launch_expression("convert", name, -(-out.size // 8), x, out, out.size)


def _transpose(x: Array, out: Array) -> None:
    n, rows, columns = x.shape[0], x.shape[1], prod(x.shape[2:])
    if out.flags.c_contiguous and lies_channels_last(x):
        rows, columns = columns, rows
    elif not (x.flags.c_contiguous and lies_channels_last(out)):
        where = f"{x.shape} by {x.strides}"
        raise DeviceError(f"{where} cannot be converted to strides of {out.strides}")
    # Logarithms of a tile's rows and columns: of the smaller number as many as there are, 4 to 64.
    down, across = (min(max(2, (size - 1).bit_length()), 6) for size in (rows, columns))
    if rows <= columns:
        across = min(12 - down, 8)
    else:
        down = min(12 - across, 8)
    tiles = n * -(-rows >> down) * -(-columns >> across)
    name = f"transpose<{c_type(x)}, {c_type(out)}>"
    launch_expression("convert", name, tiles * THREADS, x, out, n, rows, columns, down, across)


def join(parts: Sequence[Array], whole: Array, axis: int) -> None:
    found = _lines(whole, [a.shape[axis] for a in parts], parts, axis)
    if found is None:
        return
    unit, lines, line, widths = found
    start = 0
    for first in range(0, len(parts), PARTS):
        given = parts[first : first + PARTS]
        ends = np.cumsum(widths[first : first + PARTS]).tolist()
        missing, last = PARTS - len(ends), ends[-1]
        arrays = (*given, *[None] * missing, *ends, *[last] * missing)
        shape = (whole.data.ptr + start, lines, line, divisor(max(1, last)))
        many = int(len(given) > 2)
        name = f"join<{UNITS[unit]}, {many}>"
        launch_expression("copy", name, -(-lines * last * unit // 16), *shape, *arrays)
        start += last * unit


def cut(whole: Array, sizes: Sequence[int], parts: Sequence[Array | None], axis: int) -> None:
    found = _lines(whole, sizes, parts, axis)
    if found is None:
        return
    unit, lines, line, widths = found
    start = 0
    for part, width in zip(parts, widths, strict=True):
        if part is not None and width:
            name, shape = f"cut<{UNITS[unit]}>", (lines, line, start, width, divisor(width))
            launch_expression("copy", name, -(-lines * width * unit // 16), whole, part, *shape)
        start += width


def _lines(
    whole: Array, sizes: Sequence[int], parts: Sequence[Array | None], axis: int
) -> tuple[int, int, int, list[int]] | None:
    """Return the largest unit in bytes that all lie in, the lines of the whole, the units of one,
    and those of each part in it; None if there is nothing to copy.
    """
    there = [a for a in parts if a is not None and a.size]
    assert sum(sizes) == whole.shape[axis]
    assert all(a.dtype == whole.dtype for a in there)
    if not whole.size:
        return None
    if channels_last(whole, *there):
        assert axis == 1
        inner = whole.itemsize
    else:
        inner = prod(whole.shape[axis + 1 :]) * whole.itemsize
    line = whole.shape[axis] * inner
    unit = gcd(16, *(size * inner for size in sizes), *(a.data.ptr for a in (whole, *there)))
    return unit, whole.nbytes // line, line // unit, [size * inner // unit for size in sizes]


def deal_channels(x: Array, y: Array, parts: int) -> None:
    _, channels, inner = planes(alike(x, y))
    words = x.itemsize == 2 and inner == 1 and channels % 4 == 0
    if words and x.size and 2 in (parts, channels // parts) and not (x.data.ptr | y.data.ptr) % 4:
        sizes = x.size // 2, channels, divisor(channels // 2)
        name = f"deal_pairs<{int(parts > 2)}>"
        launch_expression("copy", name, packs(x), x, y, *sizes)
        return
    launch("copy", "deal_channels", x, packs(x), x, y, x.size, channels, inner, parts)
