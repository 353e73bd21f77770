"""Local response normalization across channels.

s_c = k + alpha/size * sum of x^2 over the `size` channels around c;  y = x * s^-beta;
dx = dy * s^-beta - 2*alpha*beta/size * x * sum over the window of dy * y / s.
"""

from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.ops.cpu.compiler import kernel
from caffepy.ops.cpu.threads import parallel

Array = NDArray[Any]


@kernel
def _forward(x: Array, y: Array, scale: Array, half: int, alpha: Any, beta: Any, k: Any, lo: int, hi: int) -> None:
    channels, pixels = x.shape[1], x.shape[2]
    for n in range(lo, hi):
        for c in range(channels):
            s, v, u = scale[n, c], x[n, c], y[n, c]
            for p in range(pixels):
                s[p] = x.dtype.type(0)
            for d in range(max(0, c - half), min(channels, c + half + 1)):
                w = x[n, d]
                for p in range(pixels):
                    s[p] += w[p] * w[p]
            for p in range(pixels):
                s[p] = k + alpha * s[p]
                u[p] = v[p] * s[p] ** -beta


@kernel
def _backward(
    x: Array, y: Array, scale: Array, dy: Array, dx: Array, half: int, factor: Any, beta: Any, lo: int, hi: int
) -> None:
    channels, pixels = x.shape[1], x.shape[2]
    total = np.empty(pixels, x.dtype)
    for n in range(lo, hi):
        for c in range(channels):
            total[:] = 0
            for d in range(max(0, c - half), min(channels, c + half + 1)):
                v, u, s = dy[n, d], y[n, d], scale[n, d]
                for p in range(pixels):
                    total[p] += v[p] * u[p] / s[p]
            for p in range(pixels):
                dx[n, c, p] = dy[n, c, p] * scale[n, c, p] ** -beta - factor * x[n, c, p] * total[p]


def _planes(a: Array) -> Array:
    return a.reshape(*a.shape[:2], prod(a.shape[2:]))


def lrn_forward(x: Array, y: Array, scale: Array, size: int, alpha: float, beta: float, k: float) -> None:
    """Write scale (s above) and y; all (N, C, ...)."""
    t = x.dtype.type
    x, y, scale = _planes(x), _planes(y), _planes(scale)
    parallel(lambda lo, hi: _forward(x, y, scale, size // 2, t(alpha / size), t(beta), t(k), lo, hi), x.shape[0])


def lrn_backward(x: Array, y: Array, scale: Array, dy: Array, dx: Array, size: int, alpha: float, beta: float) -> None:
    """Write dx from what `lrn_forward` left in y and scale."""
    t = x.dtype.type
    x, y, scale, dy, dx = _planes(x), _planes(y), _planes(scale), _planes(dy), _planes(dx)
    factor = t(2 * alpha * beta / size)
    parallel(lambda lo, hi: _backward(x, y, scale, dy, dx, size // 2, factor, t(beta), lo, hi), x.shape[0])
