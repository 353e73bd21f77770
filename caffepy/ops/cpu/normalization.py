"""Normalization by statistics of each channel of (outer, C, inner) arrays; sums in double precision."""

from typing import Any

from numpy.typing import NDArray

from caffepy.ops.cpu.compiler import kernel
from caffepy.ops.cpu.elementwise import GRAIN
from caffepy.ops.cpu.threads import parallel

Array = NDArray[Any]


def _grain(x: Array) -> int:
    return GRAIN * int(x.shape[1]) // (x.size + 1) + 1


@kernel
def _statistics(x: Array, mean: Array, variance: Array, lo: int, hi: int) -> None:
    zero = x.dtype.type(0)
    count = x.shape[0] * x.shape[2]
    for c in range(lo, hi):
        total = 0.0
        for n in range(x.shape[0]):
            u, part = x[n, c], zero
            for p in range(u.size):
                part += u[p]
            total += part
        mu = x.dtype.type(total / count)
        total = 0.0
        for n in range(x.shape[0]):
            u, part = x[n, c], zero
            for p in range(u.size):
                part += (u[p] - mu) * (u[p] - mu)
            total += part
        mean[c] = mu
        variance[c] = total / count


def batch_norm_statistics(x: Array, mean: Array, variance: Array) -> None:
    """Mean and biased variance of each channel; x (outer, C, inner), mean and variance (C)."""
    parallel(lambda lo, hi: _statistics(x, mean, variance, lo, hi), x.shape[1], _grain(x))


@kernel
def _normalize(x: Array, mean: Array, inverse: Array, y: Array, lo: int, hi: int) -> None:
    for c in range(lo, hi):
        mu, s = mean[c], inverse[c]
        for n in range(x.shape[0]):
            u, v = x[n, c], y[n, c]
            for p in range(u.size):
                v[p] = (u[p] - mu) * s


def batch_norm_forward(x: Array, mean: Array, inverse: Array, y: Array) -> None:
    """y = (x - mean) * inverse, inverse being that of the standard deviation."""
    parallel(lambda lo, hi: _normalize(x, mean, inverse, y, lo, hi), x.shape[1], _grain(x))


@kernel
def _gradient(x: Array, mean: Array, inverse: Array, dy: Array, dx: Array, same: bool, lo: int, hi: int) -> None:
    zero = x.dtype.type(0)
    count = x.shape[0] * x.shape[2]
    for c in range(lo, hi):
        mu, s, total, product = mean[c], inverse[c], 0.0, 0.0
        for n in range(x.shape[0]):
            t, u, part, part_product = x[n, c], dy[n, c], zero, zero
            for p in range(t.size):
                part += u[p]
                part_product += u[p] * (t[p] - mu)
            total += part
            product += part_product
        # dx = s * (dy - a - (x - mu) * b) with a = mean(dy), b = s * mean(dy * (x - mu) * s)
        a, b = x.dtype.type(total / count), x.dtype.type(product / count * s * s)
        for n in range(x.shape[0]):
            t, u, v = x[n, c], dy[n, c], dx[n, c]
            if same:
                for p in range(t.size):
                    v[p] = (v[p] - a - (t[p] - mu) * b) * s
            else:
                for p in range(t.size):
                    v[p] = (u[p] - a - (t[p] - mu) * b) * s


def batch_norm_backward(x: Array, mean: Array, inverse: Array, dy: Array, dx: Array) -> None:
    """dx = (dy - mean(dy) - y * mean(dy * y)) * inverse, y = (x - mean) * inverse, means per channel; dx may be dy."""
    same = dx is dy
    parallel(lambda lo, hi: _gradient(x, mean, inverse, dy, dx, same, lo, hi), x.shape[1], _grain(x))
