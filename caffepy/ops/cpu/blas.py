"""Matrix products and biases. A product is cut into pieces, a BLAS call each, on all threads."""

from functools import lru_cache, partial
from math import prod

import numpy as np

from caffepy.device.blob import Array
from caffepy.device.recording import call, release, temporary
from caffepy.device.threads import parallel, parallel_calls
from caffepy.ops.cpu.compiler import kernel

WORK = 200_000  # multiplications for which one more thread pays
ADDED = 1 << 20  # elements of a product that is accumulated: the size of a piece
MOST = 8  # pieces, unless ADDED asks for more
ALIGNED = 16  # pieces begin at multiples of this, the size of BLAS's own blocks


def matmul(a: Array, b: Array, out: Array, accumulate: bool = False, scale: float = 1.0) -> None:
    by_rows, bounds = _cut(*out.shape, a.shape[1], accumulate)
    if len(bounds) == 2 and scale == 1:
        _product(a, b, out, accumulate, scale)
        return

    def pieces(first: int, end: int) -> None:
        for lo, hi in zip(bounds[first:end], bounds[first + 1 : end + 1], strict=True):
            left, right = (a[lo:hi], b) if by_rows else (a, b[:, lo:hi])
            part = out[lo:hi] if by_rows else out[:, lo:hi]
            _product(left, right, part, accumulate, scale)

    parallel_calls(pieces, len(bounds) - 1)


def _product(a: Array, b: Array, out: Array, accumulate: bool, scale: float) -> None:
    to = temporary(out.shape, out.dtype) if accumulate else out
    call(np.matmul, a, b, to)
    if scale != 1:
        call(np.multiply, to, to.dtype.type(scale), to)
    if accumulate:
        call(np.add, out, to, out)
        release(to)


@lru_cache(maxsize=1024)
def _cut(m: int, n: int, k: int, accumulate: bool) -> tuple[bool, list[int]]:
    """Return True to cut (M, K) @ (K, N) by rows, False by columns, and the bounds of the pieces.

    BLAS rounds by the shapes that it sees, so the pieces follow from the shape of the product
    alone, never from the number of threads. The longer side is cut in 1, 2, 4 or 8, as long as BLAS
    need not copy the other factor too often. With `accumulate` rows are cut, in pieces that stay in
    the cache until they are added.
    """
    by_rows = m > n or (accumulate and m >= 256)
    length, other = (m, n) if by_rows else (n, m)
    shortest = max(ALIGNED, WORK // max(1, k * min(m, n)))
    pieces = 1
    while pieces < MOST and length // (2 * pieces) >= shortest:
        pieces *= 2
        shortest = max(shortest, 64 if accumulate else min(other, 256))
    if accumulate:
        pieces = max(pieces, -(-m * n // ADDED))
    blocks = -(-length // ALIGNED)
    pieces = max(1, min(pieces, blocks))
    return by_rows, [min(length, ALIGNED * (blocks * i // pieces)) for i in range(pieces + 1)]


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
    grain = max(1, 50_000 * y.shape[0] // max(1, y.size))
    parallel(partial(_add_bias_rows if y.ndim == 2 else _add_bias, y, b), y.shape[0], grain)


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
    dy = dy if dy.ndim == 2 else dy.reshape(*dy.shape[:2], prod(dy.shape[2:]))
    grain = max(1, 50_000 * db.size // max(1, dy.size))
    loop = _bias_gradient_rows if dy.ndim == 2 else _bias_gradient
    parallel(partial(loop, dy, db), db.size, grain)
    if copy is not None:
        call(np.copyto, copy, dy)
