"""Normalization by statistics of each channel; sums in float64."""

from collections.abc import Sequence
from functools import partial
from math import inf

import numpy as np

from caffepy.device.blob import Array
from caffepy.device.threads import parallel
from caffepy.ops.cpu.compiler import kernel
from caffepy.ops.cpu.elementwise import GRAIN, add, scale_backward, scale_forward
from caffepy.ops.cpu.neuron import relu_backward, relu_forward
from caffepy.ops.protocol import Affine, Maybe


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
    parallel(partial(_statistics, x, mean, variance), x.shape[1], _grain(x))


@kernel
def _normalize(x: Array, mean: Array, inverse: Array, y: Array, lo: int, hi: int) -> None:
    for c in range(lo, hi):
        mu, s = mean[c], inverse[c]
        for n in range(x.shape[0]):
            u, v = x[n, c], y[n, c]
            for p in range(u.size):
                v[p] = (u[p] - mu) * s


def batch_norm_forward(x: Array, mean: Array, inverse: Array, y: Array) -> None:
    parallel(partial(_normalize, x, mean, inverse, y), x.shape[1], _grain(x))


@kernel
def _gradient(
    x: Array, mean: Array, inverse: Array, dy: Array, dx: Array, same: bool, lo: int, hi: int
) -> None:
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
    parallel(partial(_gradient, x, mean, inverse, dy, dx, dx is dy), x.shape[1], _grain(x))


def batch_norm_prepare(
    x: Array, running: Sequence[Array], fraction: float, eps: float, affine: Affine, numbers: Array
) -> None:
    count = x.shape[0] * x.shape[2]
    if not count:
        return
    mean, variance = numbers[0], np.empty_like(numbers[0])
    batch_norm_statistics(x, mean, variance)
    unbiased = variance * (count / (count - 1) if count > 1 else 1)
    for total, value in zip(running, (mean, unbiased, 1), strict=True):
        np.multiply(total, fraction, out=total)
        np.add(total, value, out=total)
    _complete(variance, eps, affine, numbers)


def batch_norm_stored(running: Sequence[Array], eps: float, affine: Affine, numbers: Array) -> None:
    means, variances, weight = running
    factor = 0 if weight[0] == 0 else 1 / weight[0]
    np.multiply(means, factor, out=numbers[0])
    _complete(variances * factor, eps, affine, numbers)


def _complete(variance: Array, eps: float, affine: Affine, numbers: Array) -> None:
    (scale, bias), (mean, inverse, factor, shift) = affine, numbers
    np.divide(1, np.sqrt(variance + eps), out=inverse)
    np.multiply(inverse, 1 if scale is None else scale, out=factor)
    np.subtract(0 if bias is None else bias, mean * factor, out=shift)


def norm_forward(x: Array, numbers: Array, other: Maybe, ceiling: float | None, y: Array) -> None:
    _, _, factor, shift = numbers
    scaled = y if other is None else np.empty_like(x)
    scale_forward(x, factor, shift, scaled)
    if other is not None:
        np.add(scaled, other, out=y)
    if ceiling == inf:
        relu_forward(y, y, 0.0)
    elif ceiling is not None:
        np.clip(y, 0, ceiling, out=y)


def norm_backward(
    x: Array,
    numbers: Array,
    dys: Sequence[Array],
    y: Maybe,
    ceiling: float | None,
    masked: Maybe,
    dx: Maybe,
    dscale: Maybe,
    dbias: Maybe,
    frozen: bool,
) -> None:
    assert masked is not None or (y is None and len(dys) == 1)
    mean, inverse, factor, _ = numbers
    g = dys[0].copy()
    for dy in dys[1:]:
        add(dy, g)
    if ceiling is not None:
        if y is None:
            y = np.empty_like(x)
            norm_forward(x, numbers, None, None, y)
        relu_backward(y, g, g, 0.0)
        if ceiling < inf:
            g[y >= ceiling] = 0
    if masked is not None:
        masked[...] = g
    normalized = np.empty_like(x)
    batch_norm_forward(x, mean, inverse, normalized)
    scale_backward(normalized, factor, g, dx if frozen else None, dscale, dbias)
    if dx is not None and not frozen:
        batch_norm_backward(x, mean, inverse, g, dx)
        scale_forward(dx, factor / inverse, None, dx)
