"""Max and average pooling over planes of (N, C, H, W). Kernel, stride and pad are (height, width) pairs."""

from math import prod
from typing import Any

import numpy as np

from caffepy.ops.cuda.blas import c_type
from caffepy.ops.cuda.launch import Array, channels_last, launch_expression

Pair = tuple[int, int]

WIDE = 32
"""Elements of a window from which on a warp adds it up, in planes."""
BUSY = 1 << 16
"""Threads that a large device needs; packs of channels get narrower for them."""

_INDEX = {"uint8": "unsigned char", "int32": "int"}


def pool_index_type(kernel: Pair) -> "np.dtype[Any]":
    """The smallest element type of an index into windows of this size."""
    return np.dtype(np.uint8 if prod(kernel) < 256 else np.int32)


def _pool(
    name: str, over: Array, large: Array, small: Array, arrays: tuple[Array, ...], *pairs: Pair, index: str = ""
) -> None:
    """Call a kernel that writes `over`, one of the large (N, C, H, W) and the small (N, C, Ho, Wo) array."""
    if not over.size:
        return
    n, c = large.shape[:2]
    images, channels = (n, c) if channels_last(large, small) else (n * c, 1)
    wide = not index and over is small and channels == 1 and prod(pairs[0]) >= WIDE
    v = 16 // large.itemsize
    while v > 1 and (channels % v or over.size < v * BUSY or any(a.data.ptr % (v * a.itemsize) for a in arrays)):
        v //= 2
    types = c_type(large), *([index] if index else []), *([] if wide else [str(v)])
    threads = over.size * 32 if wide else over.size // v
    sizes = (images, channels // v, *large.shape[2:], *small.shape[2:], *(int(side) for pair in pairs for side in pair))
    launch_expression("pooling", f"{name}{'_wide' * wide}<{', '.join(types)}>", threads, *arrays, *sizes)


def max_pool_forward(x: Array, y: Array, index: Array, kernel: Pair, stride: Pair, pad: Pair) -> None:
    """Write the maximum of each window, clipped to the plane, and which element it is; the first one wins.

    An index of int32 counts h*W + w within the plane; one of uint8 within the window, in the order of y's memory.
    A window that holds nothing but NaN keeps its first element.
    """
    _pool("max_pool_forward", y, x, y, (x, y, index), kernel, stride, pad, index=_INDEX[index.dtype.name])


def max_pool_backward(dy: Array, index: Array, dx: Array, kernel: Pair, stride: Pair, pad: Pair) -> None:
    """Write dx: each dy goes to the element that its index names."""
    _pool("max_pool_backward", dx, dx, dy, (dy, index, dx), kernel, stride, pad, index=_INDEX[index.dtype.name])


def ave_pool_forward(x: Array, y: Array, kernel: Pair, stride: Pair, pad: Pair) -> None:
    """Write the mean of each window; padding counts in the divisor, what hangs over it does not."""
    _pool("ave_pool_forward", y, x, y, (x, y), kernel, stride, pad)


def ave_pool_backward(dy: Array, dx: Array, kernel: Pair, stride: Pair, pad: Pair) -> None:
    """Write dx: each dy shared evenly over its window."""
    _pool("ave_pool_backward", dx, dx, dy, (dy, dx), kernel, stride, pad)
