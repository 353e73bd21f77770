"""Normalization by statistics of each channel; sums in float64."""

from collections.abc import Sequence
from functools import partial
from math import inf, nan, prod

import numpy as np

from caffepy.device.blob import Array, Layout
from caffepy.device.recording import call
from caffepy.device.threads import parallel
from caffepy.ops.cpu.compiler import kernel
from caffepy.ops.cpu.elementwise import GRAIN
from caffepy.ops.objects import Normalized, NormSums
from caffepy.ops.protocol.normalization import Affine
from caffepy.ops.protocol.types import Maybe, Sizes


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


# Rounded as numpy rounds, product by product.
_plainly = partial(kernel, fastmath=set())


@_plainly
def _add_batch(
    mean: Array, variance: Array, running: Sequence[Array], fraction: float, unbiased: float
) -> None:
    means, variances, weight = running
    number = mean.dtype.type
    keep, ratio = number(fraction), number(unbiased)
    for c in range(mean.size):
        means[c] = means[c] * keep + mean[c]
        variances[c] = variances[c] * keep + variance[c] * ratio
    weight[0] = weight[0] * keep + number(1)


@_plainly
def _read_running(running: Sequence[Array], mean: Array, variance: Array) -> None:
    means, variances, weight = running
    zero, one = weight.dtype.type(0), weight.dtype.type(1)
    factor = zero if weight[0] == zero else one / weight[0]
    for c in range(mean.size):
        mean[c], variance[c] = means[c] * factor, variances[c] * factor


@_plainly
def _complete(variance: Array, eps: float, scale: Maybe, bias: Maybe, numbers: Array) -> None:
    number = variance.dtype.type
    for c in range(variance.size):
        inverse = number(1) / np.sqrt(variance[c] + number(eps))
        factor = inverse if scale is None else inverse * scale[c]
        numbers[1, c], numbers[2, c] = inverse, factor
        numbers[3, c] = (number(0) if bias is None else bias[c]) - numbers[0, c] * factor


def batch_norm_prepare(
    x: Array, running: Sequence[Array], fraction: float, eps: float, affine: Affine, numbers: Array
) -> None:
    count = x.shape[0] * x.shape[2]
    if not count:
        return
    mean, variance = numbers[0], np.empty_like(numbers[0])
    batch_norm_statistics(x, mean, variance)
    unbiased = count / (count - 1) if count > 1 else 1.0
    call(_add_batch, mean, variance, tuple(running), fraction, unbiased)
    call(_complete, variance, eps, *affine, numbers)


def batch_norm_stored(running: Sequence[Array], eps: float, affine: Affine, numbers: Array) -> None:
    variance = np.empty_like(numbers[0])
    call(_read_running, tuple(running), numbers[0], variance)
    call(_complete, variance, eps, *affine, numbers)


@kernel
def _norm(
    x: Maybe,
    factor: Array,
    shift: Array,
    other: Maybe,
    ceiling: float,
    rectifies: bool,
    y: Array,
    lo: int,
    hi: int,
) -> None:
    """Compute rows of x, other and y (N * C, P); x None: y in place."""
    zero, top = y.dtype.type(0), y.dtype.type(ceiling)
    for r in range(lo, hi):
        c = r % factor.size
        s, b, v = factor[c], shift[c], y[r]
        u = v if x is None else x[r]
        if other is None:
            for p in range(v.size):
                v[p] = u[p] * s + b
        else:
            w = other[r]
            for p in range(v.size):
                v[p] = u[p] * s + b + w[p]
        if rectifies:
            for p in range(v.size):
                v[p] = zero if v[p] <= zero else top if v[p] > top else v[p]


def mask_size(shape: Sizes, layout: Layout) -> int:
    return 0


def norm_forward(
    x: Array,
    numbers: Array,
    other: Maybe,
    ceiling: float | None,
    y: Array,
    bits: Maybe = None,
) -> None:
    _, _, factor, shift = numbers
    n, c, plane = y.shape
    rows = n * c, plane
    source = None if x.ctypes.data == y.ctypes.data else x.reshape(rows)
    addend = None if other is None else other.reshape(rows)
    rectify = 0.0 if ceiling is None else ceiling, ceiling is not None
    run = partial(_norm, source, factor, shift, addend, *rectify, y.reshape(rows))
    parallel(run, n * c, GRAIN * n * c // (y.size + 1) + 1)


@kernel
def _norm_gradient(
    x: Array,
    numbers: Array,
    dy: Array,
    more: Maybe,
    y: Maybe,
    ceiling: float,
    rectifies: bool,
    masked: Maybe,
    dx: Maybe,
    sums: Array,
    frozen: bool,
    lo: int,
    hi: int,
) -> None:
    """Compute channels; sums (2, C) = sums of g * (x - mean) and of g.

    g of a channel is kept in an array of its own: it stays in the cache, and since it is no other
    array, loops that write over what they read still use vectors.
    """
    zero, top = x.dtype.type(0), x.dtype.type(ceiling)
    images, plane = x.shape[0], x.shape[2]
    kept = np.empty(images * plane, x.dtype)
    count = images * plane
    for c in range(lo, hi):
        mu, inverse, factor, shift = numbers[0, c], numbers[1, c], numbers[2, c], numbers[3, c]
        total, product = 0.0, 0.0
        for n in range(images):
            t, u, g = x[n, c], dy[n, c], kept[n * plane : (n + 1) * plane]
            if more is None:
                for p in range(g.size):
                    g[p] = u[p]
            else:
                w = more[n, c]
                for p in range(g.size):
                    g[p] = u[p] + w[p]
            if rectifies:
                if y is None:
                    for p in range(g.size):
                        z = t[p] * factor + shift
                        g[p] = zero if z <= zero or z >= top else g[p]
                else:
                    z_ = y[n, c]
                    for p in range(g.size):
                        g[p] = zero if z_[p] <= zero or z_[p] >= top else g[p]
            part, part_product = zero, zero
            for p in range(g.size):
                part += g[p]
                part_product += g[p] * (t[p] - mu)
            total += part
            product += part_product
            if masked is not None:
                masked[n, c] = g
        sums[0, c], sums[1, c] = product, total
        if dx is None:
            continue
        # dx = factor * (g - a - (x - mu) * b), a = mean(g), b = mean(g * n) / standard deviation
        a = x.dtype.type(0 if frozen else total / count)
        b = x.dtype.type(0 if frozen else product / count * inverse * inverse)
        for n in range(images):
            t, g, v = x[n, c], kept[n * plane : (n + 1) * plane], dx[n, c]
            for p in range(g.size):
                v[p] = (g[p] - a - (t[p] - mu) * b) * factor


def normalized(x: Array, given: Normalized) -> Array:
    """Return what a normalization makes of x (N, C, ...)."""
    y = np.empty(x.shape, x.dtype)
    of_x, of_y = (a.reshape(*x.shape[:2], prod(x.shape[2:])) for a in (x, y))
    norm_forward(of_x, given.numbers, None, given.ceiling, of_y)
    return y


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
    bits: Maybe = None,
) -> None:
    assert masked is not None or (y is None and len(dys) == 1)
    dy, more = dys[0], dys[1] if len(dys) > 1 else None
    # No value reaches NaN, the ceiling of a ReLU.
    rectify = ceiling if ceiling not in (None, inf) else nan, ceiling is not None
    sums = np.empty((2, x.shape[1]))
    arrays = x, numbers, dy, more, y, *rectify, masked, dx, sums, frozen
    parallel(partial(_norm_gradient, *arrays), x.shape[1], _grain(x))
    call(_add_sums, sums, numbers[1], dscale, dbias)


@_plainly
def _add_sums(sums: Array, inverse: Array, dscale: Maybe, dbias: Maybe) -> None:
    for c in range(inverse.size):
        if dscale is not None:
            dscale[c] += sums[0, c] * np.float64(inverse[c])
        if dbias is not None:
            dbias[c] += sums[1, c]


def norm_mask(
    dys: Sequence[Array], y: Maybe, ceiling: float | None, masked: Array, bits: Maybe = None
) -> None:
    if len(dys) > 1:
        np.add(dys[0], dys[1], out=masked)
    elif masked is not dys[0]:
        masked[...] = dys[0]
    if y is not None and ceiling is not None:
        masked[(y <= 0) | ((y >= ceiling) & (ceiling < inf))] = 0


def norm_sums(norm: NormSums) -> None:
    """Mask norm.masked, to which `more` is added first, and compute its sums (objects.NormSums)."""
    g = _planes(norm.masked)
    dys = [g] if norm.more is None else [g, _planes(norm.more)]
    y = None if norm.y is None else _planes(norm.y)
    if norm.x is None:
        norm_mask(dys, y, norm.ceiling, g)
        return
    x = _planes(norm.x)
    sums = np.zeros((2, x.shape[1]), x.dtype)
    given = x, norm.numbers, dys, y, norm.ceiling, g, None, sums[0], sums[1], False
    norm_backward(*given)
    mean, inverse, factor, _ = norm.numbers
    for diff, of in ((norm.dscale, sums[0]), (norm.dbias, sums[1])):
        if diff is not None:
            diff += of
    count = x.shape[0] * x.shape[2]
    slope, rest = norm.line
    np.multiply(-factor / count * inverse, sums[0], out=slope)
    np.subtract(-factor / count * sums[1], slope * mean, out=rest)


def _planes(x: Array) -> Array:
    planes: Array = x.reshape(*x.shape[:2], prod(x.shape[2:]))
    return planes


def norm_gradient(x: Array, numbers: Array, line: Array, g: Array, dx: Array) -> None:
    factor, (slope, rest) = numbers[2], line
    np.multiply(g, factor[:, None], out=dx)
    dx += x * slope[:, None] + rest[:, None]
