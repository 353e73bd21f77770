"""Sampling of images at affine places, between the pixels. Each place is reckoned in the element
type and rounded at each step, as the fork does: at whole pixels it decides which neighbours count.
"""

from functools import partial
from typing import Any

import numpy as np

from caffepy.device.blob import Array
from caffepy.device.threads import parallel
from caffepy.ops.cpu.compiler import inlined, kernel

_exact, _inside = partial(kernel, fastmath=set()), partial(inlined, fastmath=set())


@_inside
def _grid(i: int, size: int) -> float:
    """The coordinate of output i of an axis: from -1 up to, without, 1."""
    return float(i) / size * 2 - 1


@_inside
def _place(theta: Array, row: float, column: float, size: int) -> Any:
    """Place, in pixels of an axis, that an output reads: theta is the axis' row of the matrix."""
    kind = theta.dtype.type
    at = theta[0] * kind(row) + theta[1] * kind(column) + theta[2]
    return (at + kind(1)) / kind(2) * kind(size)


@_exact
def _sample(x: Array, theta: Array, y: Array, lo: int, hi: int) -> None:
    (h, w), (rows, columns) = x.shape[2:], y.shape[2:]
    one = y.dtype.type(1)
    for k in range(lo, hi):
        n, s = k // rows, k % rows
        for t in range(columns):
            row, column = _grid(s, rows), _grid(t, columns)
            u = _place(theta[n, :3], row, column, h)
            v = _place(theta[n, 3:], row, column, w)
            if not (u > -1 and u < h and v > -1 and v < w):
                y[n, :, s, t] = 0
                continue
            a, b = int(np.floor(u)), int(np.floor(v))
            below, behind = u - y.dtype.type(a), v - y.dtype.type(b)
            for c in range(x.shape[1]):
                total = y.dtype.type(0)
                if a >= 0 and b >= 0:
                    total += (one - below) * (one - behind) * x[n, c, a, b]
                if a + 1 < h and b >= 0:
                    total += below * (one - behind) * x[n, c, a + 1, b]
                if a >= 0 and b + 1 < w:
                    total += (one - below) * behind * x[n, c, a, b + 1]
                if a + 1 < h and b + 1 < w:
                    total += below * behind * x[n, c, a + 1, b + 1]
                y[n, c, s, t] = total


@_exact
def _sample_transposed(dy: Array, theta: Array, dx: Array, lo: int, hi: int) -> None:
    (h, w), (rows, columns), channels = dx.shape[2:], dy.shape[2:], dx.shape[1]
    one = dx.dtype.type(1)
    for k in range(lo, hi):
        n, c = k // channels, k % channels
        dx[n, c] = 0
        for s in range(rows):
            for t in range(columns):
                row, column = _grid(s, rows), _grid(t, columns)
                u = _place(theta[n, :3], row, column, h)
                v = _place(theta[n, 3:], row, column, w)
                if not (u > -1 and u < h and v > -1 and v < w):
                    continue
                a, b = int(np.floor(u)), int(np.floor(v))
                below, behind = u - dx.dtype.type(a), v - dx.dtype.type(b)
                given = dy[n, c, s, t]
                if a >= 0 and b >= 0:
                    dx[n, c, a, b] += (one - below) * (one - behind) * given
                if a + 1 < h and b >= 0:
                    dx[n, c, a + 1, b] += below * (one - behind) * given
                if a >= 0 and b + 1 < w:
                    dx[n, c, a, b + 1] += (one - below) * behind * given
                if a + 1 < h and b + 1 < w:
                    dx[n, c, a + 1, b + 1] += below * behind * given


@_inside
def _slope(distance: float) -> int:
    """The derivative of 1 - |distance| by the place, of a pixel so far behind it; 0 from 1 on."""
    return 0 if abs(distance) >= 1 else 1 if distance >= 0 else -1


@_exact
def _gradient_of_places(dy: Array, x: Array, theta: Array, dtheta: Array, lo: int, hi: int) -> None:
    (h, w), (rows, columns) = x.shape[2:], dy.shape[2:]
    for n in range(lo, hi):
        sums = np.zeros(6)
        for s in range(rows):
            for t in range(columns):
                row, column = _grid(s, rows), _grid(t, columns)
                u = _place(theta[n, :3], row, column, h)
                v = _place(theta[n, 3:], row, column, w)
                if not (u > -1 and u < h and v > -1 and v < w):
                    continue
                a, b = int(np.floor(u)), int(np.floor(v))
                du = dv = 0.0
                for i in range(max(a, 0), min(a + 2, h)):
                    for j in range(max(b, 0), min(b + 2, w)):
                        p, q = float(i - u), float(j - v)
                        value = 0.0
                        for c in range(x.shape[1]):
                            value += x[n, c, i, j] * dy[n, c, s, t]
                        du += _slope(p) * max(1 - abs(q), 0.0) * value
                        dv += _slope(q) * max(1 - abs(p), 0.0) * value
                sums[0] += du * row
                sums[1] += du * column
                sums[2] += du
                sums[3] += dv * row
                sums[4] += dv * column
                sums[5] += dv
        for k in range(6):
            dtheta[n, k] = sums[k] * (h if k < 3 else w) / 2


def affine_sample_forward(x: Array, theta: Array, y: Array) -> None:
    parallel(partial(_sample, x, theta, y), y.shape[0] * y.shape[2])


def affine_sample_backward(dy: Array, theta: Array, dx: Array) -> None:
    parallel(partial(_sample_transposed, dy, theta, dx), dx.shape[0] * dx.shape[1])


def affine_theta_gradient(dy: Array, x: Array, theta: Array, dtheta: Array) -> None:
    parallel(partial(_gradient_of_places, dy, x, theta, dtheta), len(x))
