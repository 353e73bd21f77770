"""Matrix products and biases. Each thread calls BLAS on its share, so a product is a plain 2-d call."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.ops.cpu.compiler import kernel
from caffepy.ops.cpu.threads import parallel

Array = NDArray[Any]

ADDED = 1 << 20  # elements of a product that are computed before they are added to what is there


def matmul(a: Array, b: Array, out: Array, accumulate: bool = False, scale: float = 1.0) -> None:
    """out = scale * a @ b, or out += scale * a @ b; (M, K) @ (K, N) -> (M, N), transposed views allowed."""
    m, n = out.shape
    k = a.shape[1]
    grain = max(1, 200_000 // max(1, k * min(m, n)))

    def rows(lo: int, hi: int) -> None:
        _multiply(a[lo:hi], b, out[lo:hi], accumulate, scale)

    def columns(lo: int, hi: int) -> None:
        _multiply(a, b[:, lo:hi], out[:, lo:hi], accumulate, scale)

    if m > n:
        parallel(rows, m, max(grain, 16))
    else:
        parallel(columns, n, max(grain, 16))


def _multiply(a: Array, b: Array, out: Array, accumulate: bool, scale: float) -> None:
    if not accumulate:
        np.matmul(a, b, out=out)
        if scale != 1:
            out *= scale
        return
    rows = 1 + ADDED // max(1, out.shape[1])
    for i in range(0, len(out), rows):
        product = a[i : i + rows] @ b
        if scale != 1:
            product *= scale
        out[i : i + rows] += product


@kernel
def _add_bias(y: Array, b: Array, lo: int, hi: int) -> None:
    for n in range(lo, hi):
        for o in range(y.shape[1]):
            for p in range(y.shape[2]):
                y[n, o, p] += b[o]


@kernel
def _add_bias_rows(y: Array, b: Array, lo: int, hi: int) -> None:
    for n in range(lo, hi):
        for o in range(y.shape[1]):
            y[n, o] += b[o]


def add_bias(y: Array, b: Array) -> None:
    """y[n, o, ...] += b[o]; y (M, O) or (N, O, P)."""
    grain = max(1, 50_000 * y.shape[0] // max(1, y.size))
    loop = _add_bias_rows if y.ndim == 2 else _add_bias
    parallel(lambda lo, hi: loop(y, b, lo, hi), y.shape[0], grain)


@kernel
def _bias_gradient(dy: Array, db: Array, lo: int, hi: int) -> None:
    for o in range(lo, hi):
        total = db[o]
        for n in range(dy.shape[0]):
            part = total - total
            for p in range(dy.shape[2]):
                part += dy[n, o, p]
            total += part
        db[o] = total


@kernel
def _bias_gradient_rows(dy: Array, db: Array, lo: int, hi: int) -> None:
    for n in range(dy.shape[0]):
        for o in range(lo, hi):
            db[o] += dy[n, o]


def bias_gradient(dy: Array, db: Array, copy: Array | None = None) -> None:
    """db[o] += sum of dy[n, o, ...]; dy (M, O) or (N, O, P). A copy of rows becomes dy in its own type."""
    grain = max(1, 50_000 * db.size // max(1, dy.size))
    loop = _bias_gradient_rows if dy.ndim == 2 else _bias_gradient
    parallel(lambda lo, hi: loop(dy, db, lo, hi), db.size, grain)
    if copy is not None:
        np.copyto(copy, dy)
