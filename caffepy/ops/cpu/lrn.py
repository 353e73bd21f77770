"""Local response normalization across channels; formulas in `Ops.lrn_forward`.

With the usual beta of 0.75, s^-beta is 1/sqrt(s) times its own square root: vector code, and as
exact as a power.
"""

from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.device.threads import parallel
from caffepy.ops.cpu.compiler import kernel

Array = NDArray[Any]


PIXELS = 256  # computed at a time, for all channels, so that they stay in cache


@kernel
def _forward(
    x: Array,
    y: Array,
    scale: Array,
    half: int,
    alpha: Any,
    beta: Any,
    k: Any,
    fast: bool,
    lo: int,
    hi: int,
) -> None:
    channels, pixels = x.shape[1:]
    total = np.empty(PIXELS, x.dtype)
    for n in range(lo, hi):
        for a in range(0, pixels, PIXELS):
            b = min(a + PIXELS, pixels)
            for c in range(channels):
                total[:] = 0
                for d in range(max(0, c - half), min(channels, c + half + 1)):
                    v = x[n, d, a:b]
                    for p in range(v.size):
                        total[p] += v[p] * v[p]
                s = scale[n, c, a:b]
                for p in range(s.size):
                    s[p] = k + alpha * total[p]
            for c in range(channels):
                s, v, u = scale[n, c, a:b], x[n, c, a:b], y[n, c, a:b]
                if fast:
                    for p in range(s.size):
                        root = 1 / np.sqrt(s[p])
                        u[p] = v[p] * root * np.sqrt(root)
                else:
                    for p in range(s.size):
                        u[p] = v[p] * s[p] ** -beta


@kernel
def _backward(
    x: Array,
    y: Array,
    scale: Array,
    dy: Array,
    dx: Array,
    half: int,
    factor: Any,
    beta: Any,
    fast: bool,
    lo: int,
    hi: int,
) -> None:
    channels, pixels = x.shape[1:]
    total = np.empty(PIXELS, x.dtype)
    ratio = np.empty((channels, PIXELS), x.dtype)
    for n in range(lo, hi):
        for a in range(0, pixels, PIXELS):
            b = min(a + PIXELS, pixels)
            for c in range(channels):
                r, v, u, s = ratio[c], dy[n, c, a:b], y[n, c, a:b], scale[n, c, a:b]
                for p in range(s.size):
                    r[p] = v[p] * u[p] / s[p]
            for c in range(channels):
                total[:] = 0
                for d in range(max(0, c - half), min(channels, c + half + 1)):
                    r = ratio[d]
                    for p in range(b - a):
                        total[p] += r[p]
                s, v, u, w = scale[n, c, a:b], dy[n, c, a:b], x[n, c, a:b], dx[n, c, a:b]
                if fast:
                    for p in range(s.size):
                        root = 1 / np.sqrt(s[p])
                        w[p] = v[p] * root * np.sqrt(root) - factor * u[p] * total[p]
                else:
                    for p in range(s.size):
                        w[p] = v[p] * s[p] ** -beta - factor * u[p] * total[p]


def _planes(a: Array) -> Array:
    return a.reshape(*a.shape[:2], prod(a.shape[2:]))


def lrn_forward(
    x: Array, y: Array, scale: Array | None, size: int, alpha: float, beta: float, k: float
) -> None:
    assert scale is not None
    t = x.dtype.type
    x, y, scale = _planes(x), _planes(y), _planes(scale)
    parallel(
        lambda lo, hi: _forward(
            x, y, scale, size // 2, t(alpha / size), t(beta), t(k), beta == 0.75, lo, hi
        ),
        x.shape[0],
    )


def lrn_backward(
    x: Array,
    y: Array,
    scale: Array | None,
    dy: Array,
    dx: Array,
    size: int,
    alpha: float,
    beta: float,
    k: float,
) -> None:
    assert scale is not None
    t = x.dtype.type
    x, y, scale, dy, dx = _planes(x), _planes(y), _planes(scale), _planes(dy), _planes(dx)
    factor = t(2 * alpha * beta / size)
    parallel(
        lambda lo, hi: _backward(
            x, y, scale, dy, dx, size // 2, factor, t(beta), beta == 0.75, lo, hi
        ),
        x.shape[0],
    )
