"""Copies, sums and products of arrays of one shape, and scales and biases along an axis.

A factor may be a number or an array without axes, read when the kernel runs.
"""

from collections.abc import Sequence
from math import gcd
from typing import Any

import cupy
import numpy as np

from caffepy.ops.cuda.blas import BLOCKS, THREADS
from caffepy.ops.cuda.channels import finish, sums
from caffepy.ops.cuda.compiler import kernel
from caffepy.ops.cuda.launch import MOST, Array, launch, launch_blocks, number, packs, scratch

UNITS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int", 8: "unsigned long long", 16: "uint4"}


def copy(src: Array, dst: Array) -> None:
    """dst = src; views whose rows are contiguous are as fast as whole arrays, src may lie on the host."""
    if not dst.size:
        return
    stream = cupy.cuda.get_current_stream()
    whole = dst.flags.c_contiguous and src.shape == dst.shape and src.dtype == dst.dtype
    if isinstance(src, np.ndarray):
        if whole:
            dst.set(np.ascontiguousarray(src), stream=stream)
        else:
            cupy.copyto(dst, cupy.asarray(src))
    elif whole and src.flags.c_contiguous:
        dst.data.copy_from_device_async(src.data, dst.nbytes, stream)
    elif src.dtype != dst.dtype or src.shape != dst.shape or not _copy_strided(src, dst):
        cupy.copyto(dst, src)


def _copy_strided(src: Array, dst: Array) -> bool:
    """Copy if no more than four axes are left after those are joined that can be."""
    axes: list[tuple[int, int, int]] = []  # size, strides of src and dst in bytes; the last axis first
    for n, s, t in zip(reversed(src.shape), reversed(src.strides), reversed(dst.strides), strict=True):
        if n == 1:
            continue
        if axes and s == axes[-1][0] * axes[-1][1] and t == axes[-1][0] * axes[-1][2]:
            axes[-1] = (axes[-1][0] * n, *axes[-1][1:])
        else:
            axes.append((n, s, t))
    axes = axes or [(1, src.itemsize, src.itemsize)]
    if len(axes) > 4:
        return False
    unit = src.itemsize
    (n, s, t), *others = axes
    if s == t == unit:
        unit = gcd(16, n * unit, src.data.ptr, dst.data.ptr, *(stride for axis in others for stride in axis[1:]))
        axes[0] = (n * src.itemsize // unit, unit, unit)
    axes += [(1, 0, 0)] * (4 - len(axes))
    sizes, sources, targets = zip(*((n, s // unit, t // unit) for n, s, t in axes), strict=True)
    total = src.nbytes // unit
    blocks = min(-(-total // THREADS), MOST)
    kernel("copy", f"copy<{UNITS[unit]}>")((blocks,), (THREADS,), (src, dst, *sizes, *sources, *targets))
    return True


def scaled(alpha: float, x: Array, out: Array) -> None:
    """out = alpha * x."""
    launch("elementwise", "scaled", x, packs(x), x, out, x.size, *number(alpha))


def axpy(alpha: float, x: Array, out: Array) -> None:
    """out += alpha * x."""
    launch("elementwise", "axpy", x, packs(x), x, out, x.size, *number(alpha))


def add(x: Array, out: Array) -> None:
    """out += x."""
    axpy(1.0, x, out)


def multiply(x: Array, y: Array, out: Array) -> None:
    """out = x * y."""
    launch("elementwise", "multiply", x, packs(x), x, y, out, x.size)


def dot(x: Array, y: Array) -> Any:
    """Sum of x * y, in double precision: an array without axes."""
    blocks = max(1, min(-(-packs(x) // (4 * THREADS)), BLOCKS))
    partial, total = scratch("dot", blocks), cupy.empty((), np.float64)
    launch_blocks("elementwise", "dot", x, blocks, x, y, partial, x.size)
    launch_blocks("elementwise", "dot_finish", x, 1, partial, total, blocks)
    return total


def eltwise_sum(xs: Sequence[Array], coefficients: Sequence[float], out: Array) -> None:
    """out = sum of coefficient * x over at least two arrays."""
    terms = list(zip(xs, coefficients, strict=True))
    group, terms = terms[:4], terms[4:]
    while group:
        arrays, factors = zip(*group, strict=True)
        numbers = (n for factor in factors for n in number(factor))
        launch("elementwise", f"sum_{len(group)}", out, packs(out), *arrays, out, out.size, *numbers)
        group, terms = [(out, 1.0), *terms[:3]] if terms else [], terms[3:]


def eltwise_max(xs: Sequence[Array], out: Array, index: Array) -> None:
    """out = the largest x, index = which one; a tie of the first two goes to the second, later ones must be larger."""
    x, y, *rest = xs
    launch("elementwise", "first_max", out, packs(out), x, y, out, index, out.size)
    for rank, z in enumerate(rest, 2):
        launch("elementwise", "next_max", out, packs(out), z, out, index, out.size, rank)


def eltwise_select(index: Array, rank: int, dy: Array, dx: Array) -> None:
    """dx = dy where index is rank, else 0."""
    launch("elementwise", "select", dy, packs(dy), index, dy, dx, dy.size, rank)


def scale_forward(x: Array, scale: Array, bias: Array | None, y: Array) -> None:
    """y = x * scale + bias; x (outer, C, inner), scale and bias (C)."""
    shift = 0 if bias is None else bias
    launch("normalization", "scale_forward", x, packs(x), x, scale, shift, y, *x.shape)


def scale_backward(
    x: Array, scale: Array, dy: Array, dx: Array | None, dscale: Array | None, dbias: Array | None
) -> None:
    """dx = dy * scale; dscale += sums of dy * x, dbias += sums of dy; shapes as in `scale_forward`, dx may be dy."""
    if dscale is None and dbias is None:
        if dx is not None:
            scale_forward(dy, scale, None, dx)
        return
    partial, splits = sums("normalization", "scale_backward", x, x, scale, dy, 0 if dx is None else dx)
    targets = (0 if a is None else a for a in (dscale, dbias))
    finish("normalization", "scale_finish", x, partial, *targets, x.shape[1], splits)
