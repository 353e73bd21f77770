"""Recurrences over time, each one loop without Python in it: a thread takes some streams through all steps.

Arrays are (T, N, .) of steps and streams. What comes from the inputs of all steps is one matrix product beforehand,
the gradients of the weights are one afterwards; inside is only the product with the state, on packed weights. A stream
never meets another one, so results do not depend on the number of threads.
"""

from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic
from numpy.typing import DTypeLike, NDArray

from caffepy.ops.cpu.compiler import kernel
from caffepy.ops.cpu.threads import parallel
from caffepy.ops.cpu.tile import Schedule, Shape, accumulate, shapes

Array = NDArray[Any]

PACKED = 16  # elements of a cache line, so that packing reads and writes whole ones


class _Plan(NamedTuple):
    """How to add x @ b for some rows of x: b (K, O) lies as panels (blocks, K, columns)."""

    panels: Array
    sums: Array  # (blocks, N, columns)
    schedule: Schedule  # one block of tiles for each tile of rows
    shape: Shape


def _make_plan(n: int, k: int, outputs: int, dtype: np.dtype[Any]) -> _Plan:
    """For (N, K) @ (K, O), in tiles that compute the fewest sums in vain."""
    shape = min(
        shapes(dtype.itemsize), key=lambda s: -(-n // len(s.rows)) * len(s.rows) * -(-outputs // s.columns) * s.columns
    )
    tiles, columns = -(-n // len(shape.rows)), shape.columns
    blocks = -(-outputs // columns)
    rows = np.minimum(np.arange(tiles * len(shape.rows)), n - 1).astype(np.int32)
    r = np.arange(k, dtype=np.int32)
    return _Plan(
        np.zeros((blocks, k, columns), dtype),
        np.empty((blocks, n, columns), dtype),
        Schedule(
            np.arange(tiles + 1),
            rows * np.int32(k),
            rows,
            np.tile(np.array([0, k]), (tiles, 1)),
            np.stack([r, r * np.int32(columns)], 1),
        ),
        shape,
    )


@kernel
def _pack(b: Array, panels: Array, lo: int, hi: int) -> None:
    columns = panels.shape[2]
    for block in range(lo, hi):
        first = block * columns
        for r in range(0, b.shape[0], PACKED):
            for o in range(min(columns, b.shape[1] - first)):
                for j in range(r, min(r + PACKED, b.shape[0])):
                    panels[block, j, o] = b[j, first + o]


def _pack_into(b: Array, plan: _Plan) -> None:
    parallel(lambda lo, hi: _pack(b, plan.panels, lo, hi), len(plan.panels))


@kernel
def _add_product(x: Array, x_at: int, plan: _Plan, y: Array, lo: int, hi: int) -> None:
    """y[n] += x[n] @ b for the rows of tiles [lo, hi); x flat, its row 0 at x_at."""
    panels, sums, schedule, shape = plan
    blocks, k, columns = panels.shape
    a, b = lo * len(shape.rows), min(hi * len(shape.rows), y.shape[0])
    weights, steps = panels.reshape(-1), schedule.steps.reshape(-1)
    for block in range(blocks):
        first, part = block * columns, sums[block]
        count = min(columns, y.shape[1] - first)
        for n in range(a, b):
            u, v = part[n], y[n, first : first + count]
            for o in range(v.size):
                u[o] = v[o]
        for tile in range(lo, hi):
            accumulate(
                x,
                x_at,
                schedule.first,
                schedule.place,
                schedule.to,
                schedule.span,
                steps,
                tile,
                weights,
                block * k * columns,
                part.reshape(-1),
                shape.rows,
                shape.vectors,
                shape.lanes,
            )
        for n in range(a, b):
            u, v = part[n], y[n, first : first + count]
            for o in range(v.size):
                v[o] = u[o]


def _define_power_of_two(typing: Any, x: Any) -> Any:
    """2^x for a whole x from -126 to 127, by way of the exponent's bits: vector code, unlike ldexp."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = x.bitwidth
        mantissa = {32: 23, 64: 52}[bits]
        integer = ir.IntType(bits)
        bias = integer((1 << bits - mantissa - 2) - 1)
        exponent = builder.shl(builder.add(builder.fptosi(args[0], integer), bias), integer(mantissa))
        return builder.bitcast(exponent, args[0].type)

    return x(x), generate


_power_of_two: Any = intrinsic(_define_power_of_two)


def _exact(function: Any) -> Any:
    """Compile what is rounded on purpose: terms stay in the order written."""
    return numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})(function)


@_exact
def _expm1(x: Any, like: Array) -> Any:
    """e^x - 1 of a number of like's type, within two units in the last place; beyond 87 as if 87.

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


# The loops below touch few arrays each: with more, LLVM does not vectorize for fear that they overlap.


@kernel
def _unit(a: Array, c_before: Array, cont: float, c: Array, h: Array) -> None:
    """One stream's LSTM unit; a (4H) holds the sums of gates i, f, o, g, then their activations, f times cont."""
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


@kernel
def _unit_gradient(a: Array, c_before: Array, c: Array, dh: Array, dc: Array, da: Array) -> None:
    """Gradient of `_unit` in the sums of the gates; dc, the gradient in c, becomes that in c_before."""
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
def _units_gradient(a: Array, c_before: Array, c: Array, dh: Array, dc: Array, da: Array, lo: int, hi: int) -> None:
    for n in range(lo, hi):
        _unit_gradient(a[n], c_before[n], c[n], dh[n], dc[n], da[n])


def lstm_unit_forward(a: Array, c_before: Array, cont: Array, c: Array, h: Array) -> None:
    """c = f c_before + i g, h = o tanh(c) for (N, H) each; a (N, 4H): sums of gates in, activations i, f, o, g out.

    i, o are sigmoids, g is tanh, f is cont times a sigmoid; cont (N).
    """
    parallel(lambda lo, hi: _units(a, c_before, cont, c, h, lo, hi), len(h), 1 + 4096 // (h.shape[1] + 1))


def lstm_unit_backward(a: Array, c_before: Array, c: Array, dh: Array, dc: Array, da: Array) -> None:
    """da = gradient in the sums of the gates, dc = that in c_before (before: in c); the activations a as forward."""
    parallel(lambda lo, hi: _units_gradient(a, c_before, c, dh, dc, da, lo, hi), len(dh), 1 + 4096 // (dh.shape[1] + 1))


@kernel
def _scale(x: Array, factor: float, y: Array) -> None:
    for k in range(y.size):
        y[k] = x[k] * factor


@kernel
def _lstm(
    a: Array,
    cont: Array,
    h_first: Array,
    c_first: Array,
    kept: Array,
    h: Array,
    c: Array,
    plan: _Plan,
    lo: int,
    hi: int,
) -> None:
    steps, streams, size = h.shape
    rows = len(plan.shape.rows)
    first, end = lo * rows, min(hi * rows, streams)
    for t in range(steps):
        h_before, c_before = (h[t - 1], c[t - 1]) if t else (h_first, c_first)
        for n in range(first, end):
            _scale(h_before[n], cont[t, n], kept[t, n])
        _add_product(kept.reshape(-1), t * streams * size, plan, a[t], lo, hi)
        _units(a[t], c_before, cont[t], c[t], h[t], first, end)


@kernel
def _lstm_gradient(
    a: Array,
    cont: Array,
    c_first: Array,
    c: Array,
    dy: Array,
    dh: Array,
    dc: Array,
    da: Array,
    plan: _Plan,
    lo: int,
    hi: int,
) -> None:
    steps, streams, size = dy.shape
    rows = len(plan.shape.rows)
    first, end = lo * rows, min(hi * rows, streams)
    dh[first:end], dc[first:end] = 0, 0
    for t in range(steps - 1, -1, -1):
        for n in range(first, end):
            u, v = dh[n], dy[t, n]
            for k in range(u.size):
                u[k] += v[k]
        _units_gradient(a[t], c[t - 1] if t else c_first, c[t], dh, dc, da[t], first, end)
        dh[first:end] = 0
        if t:
            _add_product(da.reshape(-1), t * streams * 4 * size, plan, dh, lo, hi)
            for n in range(first, end):
                _scale(dh[n], cont[t, n], dh[n])


class LSTM:
    """A layer of LSTM units of T steps, N streams and H units: a_t = input_t + (cont_t h_{t-1}) @ w.T, then the unit.

    Gates stand in the order i, f, o, g; w is (4H, H), cont (T, N), first states (N, H).
    """

    def __init__(self, steps: int, streams: int, size: int, dtype: DTypeLike) -> None:
        dtype = np.dtype(dtype)
        self._forward_plan = _make_plan(streams, size, 4 * size, dtype)
        self._backward_plan = _make_plan(streams, 4 * size, size, dtype)
        self._gradients = np.empty((2, streams, size), dtype)

    def forward(
        self, a: Array, w: Array, cont: Array, h_first: Array, c_first: Array, kept: Array, h: Array, c: Array
    ) -> None:
        """h and c (T, N, H) of all steps; a (T, N, 4H) holds the inputs' sums, afterwards the activations.

        kept (T, N, H) becomes cont_t h_{t-1}, which the gradient of w needs.
        """
        plan = self._forward_plan
        _pack_into(w.T, plan)
        parallel(lambda lo, hi: _lstm(a, cont, h_first, c_first, kept, h, c, plan, lo, hi), len(plan.schedule.span))

    def backward(self, a: Array, w: Array, cont: Array, c_first: Array, c: Array, dy: Array, da: Array) -> None:
        """da (T, N, 4H) = gradient in the sums of the gates, from dy (T, N, H), the gradient in h."""
        plan, (dh, dc) = self._backward_plan, self._gradients
        _pack_into(w, plan)
        parallel(
            lambda lo, hi: _lstm_gradient(a, cont, c_first, c, dy, dh, dc, da, plan, lo, hi), len(plan.schedule.span)
        )


@kernel
def _rnn(h: Array, cont: Array, h_first: Array, kept: Array, plan: _Plan, lo: int, hi: int) -> None:
    steps, streams, size = h.shape
    rows = len(plan.shape.rows)
    first, end = lo * rows, min(hi * rows, streams)
    for t in range(steps):
        h_before = h[t - 1] if t else h_first
        for n in range(first, end):
            _scale(h_before[n], cont[t, n], kept[t, n])
        _add_product(kept.reshape(-1), t * streams * size, plan, h[t], lo, hi)
        for n in range(first, end):
            u = h[t, n]
            for k in range(u.size):
                u[k] = _tanh(u[k], u)


@kernel
def _rnn_gradient(h: Array, cont: Array, rest: Array, dh: Array, plan: _Plan, lo: int, hi: int) -> None:
    steps, streams, size = h.shape
    rows = len(plan.shape.rows)
    first, end = lo * rows, min(hi * rows, streams)
    one = h.dtype.type(1)
    rest[first:end] = 0
    for t in range(steps - 1, -1, -1):
        for n in range(first, end):
            u, v, w = h[t, n], dh[t, n], rest[n]
            for k in range(v.size):
                v[k] = (v[k] + w[k]) * (one - u[k] * u[k])
        if t:
            rest[first:end] = 0
            _add_product(dh.reshape(-1), t * streams * size, plan, rest, lo, hi)
            for n in range(first, end):
                _scale(rest[n], cont[t, n], rest[n])


class RNN:
    """h_t = tanh(input_t + (cont_t h_{t-1}) @ w.T) for T steps, N streams, H units; w (H, H), cont (T, N)."""

    def __init__(self, steps: int, streams: int, size: int, dtype: DTypeLike) -> None:
        dtype = np.dtype(dtype)
        self._forward_plan = _make_plan(streams, size, size, dtype)
        self._backward_plan = _make_plan(streams, size, size, dtype)
        self._gradient = np.empty((streams, size), dtype)

    def forward(self, h: Array, w: Array, cont: Array, h_first: Array, kept: Array) -> None:
        """h (T, N, H) holds the inputs' sums, afterwards the states; kept becomes cont_t h_{t-1}; h_first (N, H)."""
        plan = self._forward_plan
        _pack_into(w.T, plan)
        parallel(lambda lo, hi: _rnn(h, cont, h_first, kept, plan, lo, hi), len(plan.schedule.span))

    def backward(self, h: Array, w: Array, cont: Array, dh: Array) -> None:
        """dh (T, N, H), the gradient in h from outside, becomes that in the sums inside tanh."""
        plan, rest = self._backward_plan, self._gradient
        _pack_into(w, plan)
        parallel(lambda lo, hi: _rnn_gradient(h, cont, rest, dh, plan, lo, hi), len(plan.schedule.span))
