"""Max and average pooling over planes of (N, C, H, W). Kernel, stride and pad are (height, width) pairs."""

from math import prod

from caffepy.ops.cuda.blas import c_type
from caffepy.ops.cuda.compiler import kernel as kernel_of
from caffepy.ops.cuda.launch import MOST, Array, launch

Pair = tuple[int, int]

WIDE = 32
"""Elements of a window from which on a warp adds it up."""


def _sizes(x: Array, y: Array, *pairs: Pair) -> tuple[int, ...]:
    return (x.shape[0] * x.shape[1], *x.shape[2:], *y.shape[2:], *(int(v) for pair in pairs for v in pair))


def max_pool_forward(x: Array, y: Array, index: Array, kernel: Pair, stride: Pair, pad: Pair) -> None:
    """Write the maximum of each window, clipped to the plane, and its index h*W + w; the first one wins.

    A window that holds nothing but NaN keeps its first element.
    """
    launch("pooling", "max_pool_forward", x, y.size, x, y, index, *_sizes(x, y, kernel, stride, pad))


def max_pool_backward(dy: Array, index: Array, dx: Array) -> None:
    """Write dx: each dy goes to the element that its index names."""
    planes, size, windows = dx.shape[0] * dx.shape[1], prod(dx.shape[2:]), prod(dy.shape[2:])
    if not dx.size:
        return
    room = 8192 // max(4, dx.itemsize)  # elements of a plane whose sums a warp of pooling.cu holds
    bands = -(-size // room)
    band = -(-size // bands)
    blocks = min(-(-planes * bands // 4), 8 * MOST)
    arguments = (dy, index, dx, planes, size, windows, band, bands)
    kernel_of("pooling", f"max_pool_backward<{c_type(dx)}>")((blocks,), (128,), arguments)


def ave_pool_forward(x: Array, y: Array, kernel: Pair, stride: Pair, pad: Pair) -> None:
    """Write the mean of each window; padding counts in the divisor, what hangs over it does not."""
    wide = prod(kernel) >= WIDE
    name, threads = ("ave_pool_forward_wide", 32 * y.size) if wide else ("ave_pool_forward", y.size)
    launch("pooling", name, x, threads, x, y, *_sizes(x, y, kernel, stride, pad))


def ave_pool_backward(dy: Array, dx: Array, kernel: Pair, stride: Pair, pad: Pair) -> None:
    """Write dx: each dy shared evenly over its window."""
    launch("pooling", "ave_pool_backward", dx, dx.size, dy, dx, *_sizes(dx, dy, kernel, stride, pad))
