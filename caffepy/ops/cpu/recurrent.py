"""Recurrences over time, without Python inside the loop: a thread takes some streams through all
steps.

Arrays are (T, N, .) of steps and streams. The contribution of the inputs of all steps is one matrix
product before the loop, the gradients of the weights are one after it; inside is only the product
with the state, on packed weights. Streams are independent, so results do not depend on the number
of threads.
"""

from functools import partial
from typing import Any, NamedTuple

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numpy.typing import DTypeLike

from caffepy.device.blob import Array
from caffepy.device.threads import parallel
from caffepy.ops.cpu.compiler import EXACT, Deferred, inlined, kernel
from caffepy.ops.cpu.vectors import Vectors, emitted
from caffepy.ops.objects import States

STREAMS = 4  # at least, for each thread
PACKED = 16  # elements of a cache line, so that packing reads and writes whole ones


class _Weights(NamedTuple):
    """A matrix b (K, O) as panels of the columns that two vectors hold, zeros beyond O."""

    panels: Array  # (blocks, K, columns)
    spare: Array  # (N, columns), holds results of the last panel
    # As long as a vector has elements: numba sees the length of a tuple as a type.
    width: tuple[int, ...]


def _vector() -> tuple[int, int]:
    """Return the bytes of a vector, and the rows of a tile of two that leaves registers free."""
    features = llvmlite.binding.get_host_cpu_features()
    if features.get("avx512f"):
        return 64, 8
    return (32, 4) if features.get("avx") else (16, 4)


VECTOR_BYTES, ROWS = _vector()


def _make_weights(streams: int, k: int, outputs: int, dtype: np.dtype[Any]) -> _Weights:
    width = VECTOR_BYTES // dtype.itemsize
    columns = 2 * width
    panels = np.zeros((-(-outputs // columns), k, columns), dtype)
    return _Weights(panels, np.zeros((streams, columns), dtype), (0,) * width)


@kernel
def _pack(b: Array, panels: Array, lo: int, hi: int) -> None:
    columns = panels.shape[2]
    for block in range(lo, hi):
        first = block * columns
        for r in range(0, b.shape[0], PACKED):
            for o in range(min(columns, b.shape[1] - first)):
                for j in range(r, min(r + PACKED, b.shape[0])):
                    panels[block, j, o] = b[j, first + o]


@emitted("x x_at b k y y_at y_step rows width")
def _tile(v: Vectors) -> None:
    """y[i, o] += sum over r < k of x[i, r] * b[r, o], the sums in registers; k at least 1.

    As many rows as `rows` is long by two vectors; rows of x and y are k and y_step apart, b is a
    panel.
    """
    builder, args = v.builder, v.args
    index, b, numbers = args["k"].type, v.pointer("b"), range(v.types["rows"].count)
    sources, targets = (
        [v.pointer(array, args[f"{array}_at"], builder.mul(args[step], index(n))) for n in numbers]
        for array, step in (("x", "k"), ("y", "y_step"))
    )

    def add(r: Any, sums: list[Any]) -> list[Any]:
        start = builder.gep(b, [builder.mul(r, index(2 * v.width))])
        right = [v.load(start, k) for k in range(2)]
        lefts = [v.splat(builder.load(builder.gep(source, [r]))) for source in sources]
        pairs = [(left, value) for left in lefts for value in right]
        return [builder.call(v.fma, [*p, s]) for p, s in zip(pairs, sums, strict=True)]

    sums = [v.load(target, k) for target in targets for k in range(2)]
    for n, value in enumerate(v.loop(index(0), args["k"], 1, sums, add)):
        v.store(value, targets[n // 2], n % 2)


_EIGHT, _FOUR, _TWO, _ONE = (0,) * 8, (0,) * 4, (0,) * 2, (0,)


@inlined
def _add_block(x: Array, k: int, b: Array, y: Array, y_at: int, y_step: int, width: Any) -> None:
    """Add all rows of x (flat) @ b, in tiles of at most ROWS."""
    n, rows = 0, x.size // k
    while rows - n >= 8 and ROWS == 8:
        _tile(x, n * k, b, k, y, y_at + n * y_step, y_step, _EIGHT, width)
        n += 8
    while rows - n >= 4:
        _tile(x, n * k, b, k, y, y_at + n * y_step, y_step, _FOUR, width)
        n += 4
    if rows - n >= 2:
        _tile(x, n * k, b, k, y, y_at + n * y_step, y_step, _TWO, width)
        n += 2
    if rows - n:
        _tile(x, n * k, b, k, y, y_at + n * y_step, y_step, _ONE, width)


@inlined
def _add_product(x: Array, weights: _Weights, y: Array, lo: int, hi: int) -> None:
    """y[n] += x[n] @ b for rows [lo, hi).

    The rests are copied in loops: for slices numba compiles a message that they differ in size too,
    which takes six seconds in each kernel.
    """
    panels, spare, width = weights
    blocks, k, columns = panels.shape
    rows, b, flat, outputs = (
        x[lo:hi].reshape(-1),
        panels.reshape(blocks, -1),
        y.reshape(-1),
        y.shape[1],
    )
    whole = outputs // columns
    for block in range(whole):
        _add_block(rows, k, b[block], flat, lo * outputs + block * columns, outputs, width)
    if whole < blocks:
        first, rest = whole * columns, spare.reshape(-1)
        for n in range(lo, hi):
            for o in range(first, outputs):
                spare[n, o - first] = y[n, o]
        _add_block(rows, k, b[whole], rest, lo * columns, columns, width)
        for n in range(lo, hi):
            for o in range(first, outputs):
                y[n, o] = spare[n, o - first]


def _define_power_of_two(typing: Any, x: Any) -> Any:
    """Return 2^x for a whole x of -126 to 127 by the exponent's bits; unlike ldexp, vector code."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = x.bitwidth
        mantissa, integer = {32: 23, 64: 52}[bits], ir.IntType(bits)
        bias = integer((1 << bits - mantissa - 2) - 1)
        exponent = builder.add(builder.fptosi(args[0], integer), bias)
        return builder.bitcast(builder.shl(exponent, integer(mantissa)), args[0].type)

    return x(x), generate


def _make_power_of_two() -> Any:
    from numba.extending import intrinsic

    return intrinsic(_define_power_of_two)


_power_of_two: Any = Deferred(_make_power_of_two, _define_power_of_two)
_exact = partial(inlined, fastmath=EXACT)


@_exact
def _expm1(x: Any, like: Array) -> Any:
    """Return e^x - 1 for x up to 87 (beyond, as if it were), within two units in the last place.

    x = k ln 2 + r; 2^k (e^r - 1) + (2^k - 1), the series of e^r - 1 to r^13.
    """
    number = like.dtype.type
    z = min(max(x, number(-87)), number(87))
    k = np.floor(z * number(1.4426950408889634) + number(0.5))
    r = (z - k * number(0.693359375)) - k * number(-2.1219444005469057e-4)
    p = number(1 / 6227020800)
    p = p * r + number(1 / 479001600)
    p = p * r + number(1 / 39916800)
    p = p * r + number(1 / 3628800)
    p = p * r + number(1 / 362880)
    p = p * r + number(1 / 40320)
    p = p * r + number(1 / 5040)
    p = p * r + number(1 / 720)
    p = p * r + number(1 / 120)
    p = p * r + number(1 / 24)
    p = p * r + number(1 / 6)
    p = p * r + number(0.5)
    p = p * r * r + r
    power = _power_of_two(k)
    return x if x != x else power * p + (power - number(1))


@_exact
def _sigmoid(x: Any, like: Array) -> Any:
    return like.dtype.type(1) / (like.dtype.type(2) + _expm1(-x, like))


@_exact
def _tanh(x: Any, like: Array) -> Any:
    e = _expm1(like.dtype.type(-2) * x, like)
    return -e / (like.dtype.type(2) + e)


# Each loop below uses few arrays: with more, LLVM does not vectorize, because they may overlap.


@inlined
def _unit(a: Array, c_before: Array, cont: float, c: Array, h: Array) -> None:
    """Compute a stream's unit; a (4H): sums of the gates i, f, o, g, then activations, f * cont."""
    size = h.size
    i, f, o, g = a[:size], a[size : 2 * size], a[2 * size : 3 * size], a[3 * size :]
    sigmoids = a[: 3 * size]
    for k in range(sigmoids.size):
        sigmoids[k] = _sigmoid(sigmoids[k], a)
    for k in range(g.size):
        g[k] = _tanh(g[k], a)
    if cont == 0:
        f[:] = 0
    else:
        for k in range(f.size):
            f[k] *= cont
    for k in range(c.size):
        c[k] = f[k] * c_before[k] + i[k] * g[k]
    for k in range(h.size):
        h[k] = o[k] * _tanh(c[k], a)


@inlined
def _unit_gradient(a: Array, c_before: Array, c: Array, dh: Array, dc: Array, da: Array) -> None:
    """Write da, `_unit`'s gradient in the sums; dc, that in c, becomes that in c_before."""
    size, one = dh.size, a.dtype.type(1)
    i, f, o, g = a[:size], a[size : 2 * size], a[2 * size : 3 * size], a[3 * size :]
    di, df, do, dg = da[:size], da[size : 2 * size], da[2 * size : 3 * size], da[3 * size :]
    for k in range(do.size):
        t = _tanh(c[k], a)
        do[k] = dh[k] * t * o[k] * (one - o[k])
        dc[k] += dh[k] * o[k] * (one - t * t)
    for k in range(di.size):
        di[k] = dc[k] * g[k] * i[k] * (one - i[k])
        dg[k] = dc[k] * i[k] * (one - g[k] * g[k])
    for k in range(df.size):
        df[k] = dc[k] * c_before[k] * f[k] * (one - f[k])
        dc[k] *= f[k]


@kernel
def _units(a: Array, c_before: Array, cont: Array, c: Array, h: Array, lo: int, hi: int) -> None:
    for n in range(lo, hi):
        _unit(a[n], c_before[n], cont[n], c[n], h[n])


@kernel
def _units_gradient(
    a: Array, c_before: Array, c: Array, dh: Array, dc: Array, da: Array, lo: int, hi: int
) -> None:
    for n in range(lo, hi):
        _unit_gradient(a[n], c_before[n], c[n], dh[n], dc[n], da[n])


def lstm_unit_forward(a: Array, c_before: Array, cont: Array, c: Array, h: Array) -> None:
    parallel(partial(_units, a, c_before, cont, c, h), len(h), 1 + 4096 // (h.shape[1] + 1))


def lstm_unit_backward(
    a: Array, c_before: Array, c: Array, dh: Array, dc: Array, da: Array
) -> None:
    grain = 1 + 4096 // (dh.shape[1] + 1)
    parallel(partial(_units_gradient, a, c_before, c, dh, dc, da), len(dh), grain)


@inlined
def _scale(x: Array, factor: float, y: Array) -> None:
    for k in range(y.size):
        y[k] = x[k] * factor


Arrays = tuple[Array, ...]


@kernel
def _lstm(arrays: Arrays, weights: _Weights, lo: int, hi: int) -> None:
    a, cont, h_first, c_first, kept, h, c = arrays
    steps = len(h)
    for t in range(steps):
        h_before, c_before = (h[t - 1], c[t - 1]) if t else (h_first, c_first)
        for n in range(lo, hi):
            _scale(h_before[n], cont[t, n], kept[t, n])
        _add_product(kept[t], weights, a[t], lo, hi)
        for n in range(lo, hi):
            _unit(a[t, n], c_before[n], cont[t, n], c[t, n], h[t, n])


@kernel
def _lstm_gradient(arrays: Arrays, weights: _Weights, lo: int, hi: int) -> None:
    a, cont, c_first, c, dy, dh, dc, da = arrays
    steps = len(dy)
    dh[lo:hi], dc[lo:hi] = 0, 0
    for t in range(steps - 1, -1, -1):
        for n in range(lo, hi):
            u, v = dh[n], dy[t, n]
            for k in range(u.size):
                u[k] += v[k]
        c_before = c[t - 1] if t else c_first
        for n in range(lo, hi):
            _unit_gradient(a[t, n], c_before[n], c[t, n], dh[n], dc[n], da[t, n])
        dh[lo:hi] = 0
        if t:
            _add_product(da[t], weights, dh, lo, hi)
            for n in range(lo, hi):
                _scale(dh[n], cont[t, n], dh[n])


def _run(loop: Any, arrays: Arrays, b: Array, weights: _Weights, streams: int) -> None:
    """Pack b (K, O) and run the recurrence with it."""
    parallel(partial(_pack, b, weights.panels), len(weights.panels))
    parallel(partial(loop, arrays, weights), streams, STREAMS)


class LSTM:
    """LSTM with packed weights."""

    def __init__(self, steps: int, streams: int, size: int, dtype: DTypeLike) -> None:
        dtype = np.dtype(dtype)
        self._packed = _make_weights(streams, size, 4 * size, dtype)
        self._packed_back = _make_weights(streams, 4 * size, size, dtype)
        self._gradients = np.empty((2, streams, size), dtype)

    def forward(
        self, a: Array, w: Array, cont: Array, first: States, kept: Array, h: Array, c: Array
    ) -> None:
        _run(_lstm, (a, cont, *first, kept, h, c), w.T, self._packed, cont.shape[1])

    def backward(
        self, a: Array, w: Array, cont: Array, c_first: Array, c: Array, dy: Array, da: Array
    ) -> None:
        arrays = a, cont, c_first, c, dy, *self._gradients, da
        _run(_lstm_gradient, arrays, w, self._packed_back, cont.shape[1])


@kernel
def _rnn(arrays: Arrays, weights: _Weights, lo: int, hi: int) -> None:
    h, cont, h_first, kept = arrays
    steps = len(h)
    for t in range(steps):
        h_before = h[t - 1] if t else h_first
        for n in range(lo, hi):
            _scale(h_before[n], cont[t, n], kept[t, n])
        _add_product(kept[t], weights, h[t], lo, hi)
        for n in range(lo, hi):
            u = h[t, n]
            for k in range(u.size):
                u[k] = _tanh(u[k], u)


@kernel
def _rnn_gradient(arrays: Arrays, weights: _Weights, lo: int, hi: int) -> None:
    h, cont, rest, dh = arrays
    steps = len(h)
    one = h.dtype.type(1)
    rest[lo:hi] = 0
    for t in range(steps - 1, -1, -1):
        for n in range(lo, hi):
            u, v, w = h[t, n], dh[t, n], rest[n]
            for k in range(v.size):
                v[k] = (v[k] + w[k]) * (one - u[k] * u[k])
        if t:
            rest[lo:hi] = 0
            _add_product(dh[t], weights, rest, lo, hi)
            for n in range(lo, hi):
                _scale(rest[n], cont[t, n], rest[n])


class RNN:
    """RNN with packed weights."""

    def __init__(self, steps: int, streams: int, size: int, dtype: DTypeLike) -> None:
        dtype = np.dtype(dtype)
        self._packed = _make_weights(streams, size, size, dtype)
        self._gradient = np.empty((streams, size), dtype)

    def forward(self, h: Array, w: Array, cont: Array, h_first: Array, kept: Array) -> None:
        _run(_rnn, (h, cont, h_first, kept), w.T, self._packed, cont.shape[1])

    def backward(self, h: Array, w: Array, cont: Array, dh: Array) -> None:
        _run(_rnn_gradient, (h, cont, self._gradient, dh), w, self._packed, cont.shape[1])
