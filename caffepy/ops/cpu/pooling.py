"""Max and average pooling over planes of (N, C, H, W). Kernel, stride and pad are (height, width) pairs."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.ops.cpu.compiler import kernel
from caffepy.ops.cpu.threads import parallel

Array = NDArray[Any]
Pair = tuple[int, int]


@kernel
def _max_forward(
    x: Array, y: Array, index: Array, kh: int, kw: int, sh: int, sw: int, ph: int, pw: int, lo: int, hi: int
) -> None:
    h, w = x.shape[1:]
    ho, wo = y.shape[1:]
    for n in range(lo, hi):
        for i in range(ho):
            top, bottom = max(i * sh - ph, 0), min(i * sh - ph + kh, h)
            for j in range(wo):
                left, right = max(j * sw - pw, 0), min(j * sw - pw + kw, w)
                best, at = x.dtype.type(-np.inf), -1
                for a in range(top, bottom):
                    for b in range(left, right):
                        v = x[n, a, b]
                        if v > best:
                            best, at = v, a * w + b
                if at < 0:  # nothing but NaN or -inf, or strides beyond the kernel led out of the plane
                    at = min(top, h - 1) * w + min(left, w - 1)
                    best = x[n, at // w, at % w]
                y[n, i, j] = best
                index[n, i, j] = at


@kernel
def _max_backward(dy: Array, index: Array, dx: Array, lo: int, hi: int) -> None:
    for n in range(lo, hi):
        plane = dx[n].reshape(-1)
        plane[:] = 0
        for i in range(dy.shape[1]):
            for j in range(dy.shape[2]):
                plane[index[n, i, j]] += dy[n, i, j]


@kernel
def _ave_forward(x: Array, y: Array, kh: int, kw: int, sh: int, sw: int, ph: int, pw: int, lo: int, hi: int) -> None:
    h, w = x.shape[1:]
    ho, wo = y.shape[1:]
    for n in range(lo, hi):
        for i in range(ho):
            top, bottom = i * sh - ph, min(i * sh - ph + kh, h + ph)
            for j in range(wo):
                left, right = j * sw - pw, min(j * sw - pw + kw, w + pw)
                total = x.dtype.type(0)
                for a in range(max(top, 0), min(bottom, h)):
                    for b in range(max(left, 0), min(right, w)):
                        total += x[n, a, b]
                y[n, i, j] = total / x.dtype.type(max(bottom - top, 1) * max(right - left, 1))


@kernel
def _ave_backward(dy: Array, dx: Array, kh: int, kw: int, sh: int, sw: int, ph: int, pw: int, lo: int, hi: int) -> None:
    h, w = dx.shape[1:]
    ho, wo = dy.shape[1:]
    for n in range(lo, hi):
        dx[n] = 0
        for i in range(ho):
            top, bottom = i * sh - ph, min(i * sh - ph + kh, h + ph)
            for j in range(wo):
                left, right = j * sw - pw, min(j * sw - pw + kw, w + pw)
                share = dy[n, i, j] / dx.dtype.type(max(bottom - top, 1) * max(right - left, 1))
                for a in range(max(top, 0), min(bottom, h)):
                    for b in range(max(left, 0), min(right, w)):
                        dx[n, a, b] += share


def _planes(a: Array) -> Array:
    n, c, h, w = a.shape
    return a.reshape(n * c, h, w)


def _grain(a: Array) -> int:
    """Planes that make a piece worth a thread."""
    plane: int = a.shape[1] * a.shape[2]
    return max(1, 20_000 // max(1, plane))


def max_pool_forward(x: Array, y: Array, index: Array, kernel: Pair, stride: Pair, pad: Pair) -> None:
    """Write the maximum of each window, clipped to the plane, and its index h*W + w; the first one wins.

    A window that holds nothing but NaN keeps its first element.
    """
    x, y, index = _planes(x), _planes(y), _planes(index)
    parallel(lambda lo, hi: _max_forward(x, y, index, *kernel, *stride, *pad, lo, hi), x.shape[0], _grain(x))


def max_pool_backward(dy: Array, index: Array, dx: Array) -> None:
    """Write dx: each dy goes to the element that its index names."""
    dy, index, dx = _planes(dy), _planes(index), _planes(dx)
    parallel(lambda lo, hi: _max_backward(dy, index, dx, lo, hi), dx.shape[0], _grain(dx))


def ave_pool_forward(x: Array, y: Array, kernel: Pair, stride: Pair, pad: Pair) -> None:
    """Write the mean of each window; padding counts in the divisor, what hangs over it does not."""
    x, y = _planes(x), _planes(y)
    parallel(lambda lo, hi: _ave_forward(x, y, *kernel, *stride, *pad, lo, hi), x.shape[0], _grain(x))


def ave_pool_backward(dy: Array, dx: Array, kernel: Pair, stride: Pair, pad: Pair) -> None:
    """Write dx: each dy shared evenly over its window."""
    dy, dx = _planes(dy), _planes(dx)
    parallel(lambda lo, hi: _ave_backward(dy, dx, *kernel, *stride, *pad, lo, hi), dx.shape[0], _grain(dx))
