"""Sums and products of arrays of one shape, and scales and biases along an axis.

Flat kernels get slices and count from 0: numba emits vector code only for indices that cannot be
negative. Sums run over blocks of a fixed size, so they do not depend on the
number of threads.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from caffepy.device.blob import Array
from caffepy.device.recording import call
from caffepy.device.threads import parallel, parallel_calls
from caffepy.ops.cpu.compiler import kernel

Maybe = Array | None
Pair = tuple[Array, Array]

GRAIN = 1 << 15  # elements for which one more thread pays, if little is computed with each
BLOCK = 1 << 14  # elements: this much of a few arrays fits into a core's cache


def blockwise(function: Callable[..., Any], *arrays: Array) -> None:
    """Call a function of numpy ufuncs on matching flat blocks of the arrays that fit the cache."""
    flat = [a.reshape(-1) for a in arrays]

    def piece(lo: int, hi: int) -> None:
        with np.errstate(all="ignore"):
            for i in range(lo, hi, BLOCK):
                function(*(a[i : min(i + BLOCK, hi)] for a in flat))

    parallel(piece, flat[0].size, GRAIN // 2)


def flatwise(
    loop: Any, inputs: Sequence[Maybe], out: Array, *numbers: float, grain: int = GRAIN
) -> None:
    """Call loop(*inputs, out, *numbers) on matching flat slices of the arrays.

    An input that is None is `out` itself: numba compiles that apart, since LLVM's code for two
    arrays that turn out to be one uses no vectors.
    """
    flat = [None if a is None else a.reshape(-1) for a in (*inputs, out)]

    def piece(lo: int, hi: int) -> None:
        call(loop, *[None if a is None else a[lo:hi] for a in flat], *numbers)

    parallel_calls(piece, out.size, grain)


@kernel
def _scaled(x: Array, out: Array, alpha: float) -> None:
    a = x.dtype.type(alpha)
    for i in range(x.size):
        out[i] = a * x[i]


def scaled(alpha: float, x: Array, out: Array) -> None:
    flatwise(_scaled, (x,), out, alpha)


@kernel
def _axpy(x: Array, out: Array, alpha: float) -> None:
    a = x.dtype.type(alpha)
    for i in range(x.size):
        out[i] += a * x[i]


def axpy(alpha: float, x: Array, out: Array) -> None:
    flatwise(_axpy, (x,), out, alpha)


def add(x: Array, out: Array) -> None:
    axpy(1.0, x, out)


@kernel
def _multiply(x: Array, y: Array, out: Array) -> None:
    for i in range(x.size):
        out[i] = x[i] * y[i]


def multiply(x: Array, y: Array, out: Array) -> None:
    flatwise(_multiply, (x, y), out)


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
def _weighted_pair(x: Array, y: Array, out: Array, a: float, b: float) -> None:
    a_, b_ = x.dtype.type(a), x.dtype.type(b)
    for i in range(x.size):
        out[i] = a_ * x[i] + b_ * y[i]


def eltwise_sum(xs: Sequence[Array], coefficients: Sequence[float], out: Array) -> None:
    flat = [a.reshape(-1) for a in (*xs, out)]
    # By blocks, so that the sums are still in the cache for a third summand.
    size = 2 * BLOCK if len(xs) > 2 else max(1, out.size)

    def piece(lo: int, hi: int) -> None:
        for i in range(lo, hi, size):
            x, y, *rest, to = [a[i : min(i + size, hi)] for a in flat]
            call(_weighted_pair, x, y, to, *coefficients[:2])
            for z, coefficient in zip(rest, coefficients[2:], strict=True):
                call(_axpy, z, to, coefficient)

    parallel_calls(piece, out.size, GRAIN)


@kernel
def _first_max(x: Array, y: Array, out: Array, index: Array) -> None:
    for i in range(x.size):
        first = x[i] > y[i]
        out[i] = x[i] if first else y[i]
        index[i] = 0 if first else 1


@kernel
def _next_max(x: Array, out: Array, index: Array, rank: int) -> None:
    for i in range(x.size):
        if x[i] > out[i]:
            out[i] = x[i]
            index[i] = rank


def eltwise_max(xs: Sequence[Array], out: Array, index: Array) -> None:
    x, y, *rest = xs
    flatwise(_first_max, (x, y, out), index)
    for rank, z in enumerate(rest, 2):
        flatwise(_next_max, (z, out), index, rank)


@kernel
def _select(index: Array, dy: Array, dx: Array, rank: int) -> None:
    for i in range(dy.size):
        dx[i] = dy[i] if index[i] == rank else 0


def eltwise_select(index: Array, rank: int, dy: Array, dx: Array) -> None:
    flatwise(_select, (index, dy), dx, rank)


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


def scale_forward(x: Array, scale: Array, bias: Maybe, y: Array) -> None:
    shift = np.zeros_like(scale) if bias is None else bias
    outer, c, inner = x.shape
    loop, rows = (_scale_rows, outer) if inner == 1 else (_scale_planes, outer * c)
    shape = (outer, c) if inner == 1 else (rows, inner)
    run = partial(loop, x.reshape(shape), scale, shift, y.reshape(shape))
    parallel(run, rows, GRAIN * rows // (x.size + 1) + 1)


@kernel
def _scale_gradient_planes(
    x: Array, scale: Array, dy: Array, dx: Maybe, sums: Pair, same: bool, lo: int, hi: int
) -> None:
    dscale, dbias = sums
    for c in range(lo, hi):
        s, product, total = scale[c], 0.0, 0.0
        for n in range(x.shape[0]):
            t, u = x[n, c], dy[n, c]
            part, sum_ = s - s, s - s
            for p in range(t.size):
                part += u[p] * t[p]
                sum_ += u[p]
            product += part
            total += sum_
            if dx is not None:
                v = dx[n, c]
                if same:
                    for p in range(t.size):
                        v[p] *= s
                else:
                    for p in range(t.size):
                        v[p] = u[p] * s
        dscale[c] += product
        dbias[c] += total


@kernel
def _scale_gradient_rows(
    x: Array, scale: Array, dy: Array, dx: Maybe, sums: Pair, same: bool, lo: int, hi: int
) -> None:
    scale, dscale, dbias = scale[lo:hi], sums[0][lo:hi], sums[1][lo:hi]
    for n in range(x.shape[0]):
        t, u = x[n, lo:hi], dy[n, lo:hi]
        for c in range(scale.size):
            dscale[c] += u[c] * t[c]
            dbias[c] += u[c]
        if dx is not None:
            v = dx[n, lo:hi]
            if same:
                for c in range(scale.size):
                    v[c] *= scale[c]
            else:
                for c in range(scale.size):
                    v[c] = u[c] * scale[c]


def scale_backward(
    x: Array, scale: Array, dy: Array, dx: Maybe, dscale: Maybe, dbias: Maybe
) -> None:
    same, loop = dx is dy, _scale_gradient_planes
    products = np.zeros_like(scale) if dscale is None else dscale
    sums = np.zeros_like(scale) if dbias is None else dbias
    if x.shape[2] == 1:
        loop, x, dy = _scale_gradient_rows, x[:, :, 0], dy[:, :, 0]
        dx = None if dx is None else dx[:, :, 0]
    run = partial(loop, x, scale, dy, dx, (products, sums), same)
    parallel(run, scale.size, GRAIN * scale.size // (x.size + 1) + 1)
