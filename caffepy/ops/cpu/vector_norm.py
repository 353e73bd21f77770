"""Vectors across channels, divided by their norms; formulas in `Ops.normalize_forward`."""

from functools import partial

import numpy as np

from caffepy.device.blob import Array
from caffepy.device.threads import parallel
from caffepy.ops.cpu.compiler import kernel
from caffepy.ops.protocol.types import Maybe

PIXELS = 256  # computed at a time, for all channels, so that they stay in cache


@kernel
def _forward(
    x: Array, scale: Array, y: Array, norm: Array, eps: float, absolute: bool, lo: int, hi: int
) -> None:
    channels, pixels = x.shape[1:]
    for n in range(lo, hi):
        for a in range(0, pixels, PIXELS):
            b = min(a + PIXELS, pixels)
            total = norm[n, a:b]
            total[:] = x.dtype.type(eps)
            for c in range(channels):
                v = x[n, c, a:b]
                for p in range(v.size):
                    total[p] += abs(v[p]) if absolute else v[p] * v[p]
            if not absolute:
                for p in range(total.size):
                    total[p] = np.sqrt(total[p])
            for c in range(channels):
                u, v = y[n, c, a:b], x[n, c, a:b]
                factor = scale[c] if scale.size else x.dtype.type(1)
                for p in range(v.size):
                    u[p] = v[p] / total[p] * factor


@kernel
def _backward(
    y: Array, norm: Array, dy: Array, dnorm: Array, dx: Array, absolute: bool, lo: int, hi: int
) -> None:
    channels, pixels = y.shape[1:]
    products = np.empty(PIXELS, y.dtype)
    for n in range(lo, hi):
        for a in range(0, pixels, PIXELS):
            b = min(a + PIXELS, pixels)
            total, length = products[: b - a], norm[n, a:b]
            total[:] = 0
            for c in range(channels):
                u, v = y[n, c, a:b], dy[n, c, a:b]
                for p in range(u.size):
                    total[p] += u[p] * v[p]
            for p in range(total.size):
                total[p] /= length[p]
                total[p] -= dnorm[n, a + p] if dnorm.size else 0
            for c in range(channels):
                u, v, w = y[n, c, a:b], dy[n, c, a:b], dx[n, c, a:b]
                for p in range(u.size):
                    slope = np.sign(u[p]) if absolute else u[p]
                    w[p] = v[p] / length[p] - slope * total[p]


def normalize_forward(x: Array, y: Array, norm: Array, eps: float, absolute: bool) -> None:
    parallel(partial(_forward, x, np.empty(0, x.dtype), y, norm, eps, absolute), len(x))


def normalize_backward(
    y: Array, norm: Array, dy: Array, dnorm: Maybe, dx: Array, absolute: bool
) -> None:
    given = np.empty((0, 0), y.dtype) if dnorm is None else dnorm
    parallel(partial(_backward, y, norm, dy, given, dx, absolute), len(y))


@kernel
def _scaled_backward(
    x: Array, scale: Array, norm: Array, dy: Array, dx: Array, sums: Array, lo: int, hi: int
) -> None:
    channels, pixels = x.shape[1:]
    slopes = np.empty(PIXELS, x.dtype)
    for n in range(lo, hi):
        sums[n] = 0
        for a in range(0, pixels, PIXELS):
            b = min(a + PIXELS, pixels)
            slope, length = slopes[: b - a], norm[n, a:b]
            slope[:] = 0
            for c in range(channels):
                u, v = x[n, c, a:b], dy[n, c, a:b]
                total = 0.0
                for p in range(u.size):
                    product = u[p] / length[p] * v[p]
                    slope[p] += product
                    total += product
                sums[n, c] += total
            if not dx.size:
                continue
            for c in range(channels):
                u, v, w = x[n, c, a:b], dy[n, c, a:b], dx[n, c, a:b]
                for p in range(u.size):
                    w[p] = scale[c] * (v[p] - u[p] / length[p] * slope[p]) / length[p]


def scaled_norm_forward(x: Array, scale: Array, y: Array, norm: Array, eps: float) -> None:
    parallel(partial(_forward, x, scale, y, norm, eps, False), len(x))


def scaled_norm_backward(
    x: Array, scale: Array, norm: Array, eps: float, dy: Array, dx: Maybe, dscale: Maybe
) -> None:
    sums = np.empty(x.shape[:2], np.float64)
    given = np.empty((0, 0, 0), x.dtype) if dx is None else dx
    parallel(partial(_scaled_backward, x, scale, norm, dy, given, sums), len(x))
    if dscale is not None:
        dscale += sums.sum(axis=0)
