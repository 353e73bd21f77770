"""Copies of arrays and views, between layouts and types, concatenation and splitting."""

from collections.abc import Iterator, Sequence
from math import gcd, prod
from typing import Any

import cupy
import numpy as np

from caffepy.core.errors import DeviceError
from caffepy.ops.cuda.compiler import kernel
from caffepy.ops.cuda.launch import (
    MOST,
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

LONG, FEW = 8, 512
"""Units of a thread that has those of one line, as in copy.cu; and units of a line, on the average
of its parts, for which blocks of their own pay.
"""


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
    if any(a.dtype != whole.dtype for a in parts):
        _between_types("join_parts", whole, [a.shape[axis] for a in parts], parts, axis)
        return
    found = _lines(whole, [a.shape[axis] for a in parts], parts, axis)
    if found is None:
        return
    unit, lines, line, widths = found
    for start, *given in _by_eight(parts, widths):
        shape = whole.data.ptr + start * unit, lines, line
        many = int(len(parts) > 2)
        name, size = f"join<{UNITS[unit]}, {many}>", given[-1]
        launch_expression(
            "copy", name, -(-lines * size * unit // 16), *shape, divisor(max(1, size)), *given
        )


def cut(whole: Array, sizes: Sequence[int], parts: Sequence[Array | None], axis: int) -> None:
    if any(a is not None and a.dtype != whole.dtype for a in parts):
        _between_types("cut_parts", whole, sizes, parts, axis)
        return
    found = _lines(whole, sizes, parts, axis)
    if found is None:
        return
    unit, lines, line, widths = found
    if unit == 16:
        name = f"cut_parts<{UNITS[unit]}, {UNITS[unit]}, 1"
        _launch_parts(name, whole.data.ptr, unit, lines, line, parts, widths)
        return
    start = 0
    for part, width in zip(parts, widths, strict=True):
        if part is not None and width:
            name, shape = f"cut<{UNITS[unit]}>", (lines, line, start, width, divisor(width))
            launch_expression("copy", name, -(-lines * width * unit // 16), whole, part, *shape)
        start += width


def _by_eight(parts: Sequence[Array | None], widths: Sequence[int]) -> Iterator[list[Any]]:
    """Yield where some parts begin in a line, and the arguments of a kernel for them: eight arrays,
    and where each ends behind that.
    """
    start = 0
    for first in range(0, len(parts), PARTS):
        given = parts[first : first + PARTS]
        ends = np.cumsum(widths[first : first + PARTS]).tolist()
        missing, last = PARTS - len(ends), ends[-1]
        yield [start, *given, *[None] * missing, *ends, *[last] * missing]
        start += last


def _launch_parts(
    name: str,
    whole: int,
    unit: int,
    lines: int,
    line: int,
    parts: Sequence[Array | None],
    widths: Sequence[int],
) -> None:
    """Launch a kernel, to whose name the parts of a block are added, for the parts of a whole at
    this address, in units of `unit` of its bytes.
    """
    for start, *given in _by_eight(parts, widths):
        size, count = given[-1], min(PARTS, len(parts))
        arguments = whole + start * unit, lines, line, divisor(max(1, size)), *given
        if size < FEW * count or lines * count > MOST:
            launch_expression("copy", f"{name}, 0>", lines * size, *arguments)
        else:
            longest = max(np.diff(given[PARTS:], prepend=0).tolist())
            grid = -(-longest // (LONG * THREADS)), lines * count
            kernel("copy", f"{name}, {count}>")(grid, (THREADS,), arguments)


def _between_types(
    name: str, whole: Array, sizes: Sequence[int], parts: Sequence[Array | None], axis: int
) -> None:
    """Join or cut contiguous parts of another type than the whole's."""
    there = [a for a in parts if a is not None and a.size]
    assert sum(sizes) == whole.shape[axis]
    assert all(a.flags.c_contiguous for a in (whole, *there))
    assert all(a.dtype == there[0].dtype for a in there)
    if not there:
        return
    inner = prod(whole.shape[axis + 1 :])
    places = *(size * inner for size in sizes), *(a.data.ptr // a.itemsize for a in (whole, *there))
    pack = gcd(4, *places)
    line, types = whole.shape[axis] * inner, (c_type(there[0]), c_type(whole))
    given = whole.data.ptr, pack * whole.itemsize, whole.size // line, line // pack, parts
    widths = [size * inner // pack for size in sizes]
    _launch_parts(f"{name}<{', '.join(types)}, {pack}", *given, widths)


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
