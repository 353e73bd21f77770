"""Sums and products of arrays of one shape, and scales and biases along an axis.

Flat kernels take their slice [lo, hi) first and count from 0: numba emits vector code only for
indices that cannot be negative. Sums run over blocks of a fixed size, so they do not depend on the
number of threads.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.device.threads import parallel
from caffepy.ops.cpu.compiler import kernel

Array = NDArray[Any]

GRAIN = 1 << 15  # elements for which one more thread pays, if little is computed with each
BLOCK = 1 << 14  # elements: this much of a few arrays fits into a core's cache


def blockwise(function: Callable[..., Any], *arrays: Array) -> None:
    """Call a function made of numpy ufuncs on matching flat blocks of the arrays, small enough for
    the cache.
    """
    flat = [a.reshape(-1) for a in arrays]

    def piece(lo: int, hi: int) -> None:
        with np.errstate(all="ignore"):
            for i in range(lo, hi, BLOCK):
                function(*(a[i : min(i + BLOCK, hi)] for a in flat))

    parallel(piece, flat[0].size, GRAIN // 2)


@kernel
def _scaled(alpha: float, x: Array, out: Array, lo: int, hi: int) -> None:
    a, x, out = x.dtype.type(alpha), x[lo:hi], out[lo:hi]
    for i in range(x.size):
        out[i] = a * x[i]


def scaled(alpha: float, x: Array, out: Array) -> None:
    x, out = x.reshape(-1), out.reshape(-1)
    parallel(lambda lo, hi: _scaled(alpha, x, out, lo, hi), x.size, GRAIN)


@kernel
def _axpy(alpha: float, x: Array, out: Array, lo: int, hi: int) -> None:
    a, x, out = x.dtype.type(alpha), x[lo:hi], out[lo:hi]
    for i in range(x.size):
        out[i] += a * x[i]


def axpy(alpha: float, x: Array, out: Array) -> None:
    x, out = x.reshape(-1), out.reshape(-1)
    parallel(lambda lo, hi: _axpy(alpha, x, out, lo, hi), x.size, GRAIN)


def add(x: Array, out: Array) -> None:
    axpy(1.0, x, out)


@kernel
def _multiply(x: Array, y: Array, out: Array, lo: int, hi: int) -> None:
    x, y, out = x[lo:hi], y[lo:hi], out[lo:hi]
    for i in range(x.size):
        out[i] = x[i] * y[i]


def multiply(x: Array, y: Array, out: Array) -> None:
    x, y, out = x.reshape(-1), y.reshape(-1), out.reshape(-1)
    parallel(lambda lo, hi: _multiply(x, y, out, lo, hi), x.size, GRAIN)


DOT_BLOCK = 1 << 16


@kernel
def _dot(x: Array, y: Array, partial: Array, lo: int, hi: int) -> None:
    for b in range(lo, hi):
        u, v = x[b * DOT_BLOCK : (b + 1) * DOT_BLOCK], y[b * DOT_BLOCK : (b + 1) * DOT_BLOCK]
        total = 0.0
        for i in range(u.size):
            total += np.float64(u[i]) * np.float64(v[i])
        partial[b] = total


def dot(x: Array, y: Array) -> float:
    x, y = x.reshape(-1), y.reshape(-1)
    partial = np.empty(-(-x.size // DOT_BLOCK))
    parallel(lambda lo, hi: _dot(x, y, partial, lo, hi), partial.size)
    return float(partial.sum())


@kernel
def _weighted_pair(a: float, x: Array, b: float, y: Array, out: Array, lo: int, hi: int) -> None:
    a_, b_ = x.dtype.type(a), x.dtype.type(b)
    x, y, out = x[lo:hi], y[lo:hi], out[lo:hi]
    for i in range(x.size):
        out[i] = a_ * x[i] + b_ * y[i]


def eltwise_sum(xs: Sequence[Array], coefficients: Sequence[float], out: Array) -> None:
    (x, y, *rest), flat = (a.reshape(-1) for a in xs), out.reshape(-1)
    a, b, *others = coefficients

    def piece(lo: int, hi: int) -> None:
        # By blocks, so that the sums are still in the cache for the next summand.
        for i in range(lo, hi, 2 * BLOCK):
            j = min(i + 2 * BLOCK, hi)
            _weighted_pair(a, x, b, y, flat, i, j)
            for alpha, z in zip(others, rest, strict=True):
                _axpy(alpha, z, flat, i, j)

    parallel(piece, flat.size, GRAIN)


@kernel
def _first_max(x: Array, y: Array, out: Array, index: Array, lo: int, hi: int) -> None:
    x, y, out, index = x[lo:hi], y[lo:hi], out[lo:hi], index[lo:hi]
    for i in range(x.size):
        first = x[i] > y[i]
        out[i] = x[i] if first else y[i]
        index[i] = 0 if first else 1


@kernel
def _next_max(x: Array, rank: int, out: Array, index: Array, lo: int, hi: int) -> None:
    x, out, index = x[lo:hi], out[lo:hi], index[lo:hi]
    for i in range(x.size):
        if x[i] > out[i]:
            out[i] = x[i]
            index[i] = rank


def eltwise_max(xs: Sequence[Array], out: Array, index: Array) -> None:
    x, y, *rest = (a.reshape(-1) for a in xs)
    flat, winner = out.reshape(-1), index.reshape(-1)
    parallel(lambda lo, hi: _first_max(x, y, flat, winner, lo, hi), flat.size, GRAIN)
    for rank, z in enumerate(rest, 2):
        parallel(partial(_next_max, z, rank, flat, winner), flat.size, GRAIN)


@kernel
def _select(index: Array, rank: int, dy: Array, dx: Array, lo: int, hi: int) -> None:
    index, dy, dx = index[lo:hi], dy[lo:hi], dx[lo:hi]
    for i in range(dy.size):
        dx[i] = dy[i] if index[i] == rank else 0


def eltwise_select(index: Array, rank: int, dy: Array, dx: Array) -> None:
    index, dy, dx = index.reshape(-1), dy.reshape(-1), dx.reshape(-1)
    parallel(lambda lo, hi: _select(index, rank, dy, dx, lo, hi), dy.size, GRAIN)


@kernel
def _scale_planes(x: Array, scale: Array, bias: Array, y: Array, lo: int, hi: int) -> None:
    for r in range(lo, hi):
        c = r % scale.size
        s, b, u, v = scale[c], bias[c], x[r], y[r]
        for p in range(u.size):
            v[p] = u[p] * s + b


@kernel
def _scale_rows(x: Array, scale: Array, bias: Array, y: Array, lo: int, hi: int) -> None:
    for n in range(lo, hi):
        u, v = x[n], y[n]
        for c in range(scale.size):
            v[c] = u[c] * scale[c] + bias[c]


def scale_forward(x: Array, scale: Array, bias: Array | None, y: Array) -> None:
    shift = np.zeros_like(scale) if bias is None else bias
    outer, c, inner = x.shape
    loop, rows = (_scale_rows, outer) if inner == 1 else (_scale_planes, outer * c)
    shape = (outer, c) if inner == 1 else (rows, inner)
    x, y = x.reshape(shape), y.reshape(shape)
    parallel(
        lambda lo, hi: loop(x, scale, shift, y, lo, hi), rows, GRAIN * rows // (x.size + 1) + 1
    )


@kernel
def _scale_gradient_planes(
    x: Array,
    scale: Array,
    dy: Array,
    dx: Array,
    dscale: Array,
    dbias: Array,
    write: bool,
    same: bool,
    lo: int,
    hi: int,
) -> None:
    for c in range(lo, hi):
        s, product, total = scale[c], 0.0, 0.0
        for n in range(x.shape[0]):
            t, u, v = x[n, c], dy[n, c], dx[n, c]
            part, sum_ = s - s, s - s
            for p in range(t.size):
                part += u[p] * t[p]
                sum_ += u[p]
            product += part
            total += sum_
            if write and same:
                for p in range(t.size):
                    v[p] *= s
            elif write:
                for p in range(t.size):
                    v[p] = u[p] * s
        dscale[c] += product
        dbias[c] += total


@kernel
def _scale_gradient_rows(
    x: Array,
    scale: Array,
    dy: Array,
    dx: Array,
    dscale: Array,
    dbias: Array,
    write: bool,
    same: bool,
    lo: int,
    hi: int,
) -> None:
    scale, dscale, dbias = scale[lo:hi], dscale[lo:hi], dbias[lo:hi]
    for n in range(x.shape[0]):
        t, u, v = x[n, lo:hi], dy[n, lo:hi], dx[n, lo:hi]
        for c in range(scale.size):
            dscale[c] += u[c] * t[c]
            dbias[c] += u[c]
        if write and same:
            for c in range(scale.size):
                v[c] *= scale[c]
        elif write:
            for c in range(scale.size):
                v[c] = u[c] * scale[c]


def scale_backward(
    x: Array, scale: Array, dy: Array, dx: Array | None, dscale: Array | None, dbias: Array | None
) -> None:
    write, same = dx is not None, dx is dy
    out = dy if dx is None else dx
    products = np.zeros_like(scale) if dscale is None else dscale
    sums = np.zeros_like(scale) if dbias is None else dbias
    loop = _scale_gradient_planes
    if x.shape[2] == 1:
        loop, x, dy, out = _scale_gradient_rows, x[:, :, 0], dy[:, :, 0], out[:, :, 0]
    grain = GRAIN * scale.size // (x.size + 1) + 1
    parallel(
        lambda lo, hi: loop(x, scale, dy, out, products, sums, write, same, lo, hi),
        scale.size,
        grain,
    )
