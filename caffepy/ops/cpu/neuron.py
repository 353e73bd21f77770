"""Activations, dropout, and both after a product."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.device.threads import parallel
from caffepy.ops.cpu.blas import add_bias, bias_gradient
from caffepy.ops.cpu.compiler import kernel
from caffepy.ops.cpu.elementwise import GRAIN, blockwise
from caffepy.ops.cpu.random import mix, seed_of_pass

Array = NDArray[Any]


@kernel
def _relu(x: Array, y: Array, slope: float, lo: int, hi: int) -> None:
    s, zero, x, y = x.dtype.type(slope), x.dtype.type(0), x[lo:hi], y[lo:hi]
    if s == 0:
        for i in range(x.size):
            y[i] = zero if x[i] <= zero else x[i]
    else:
        for i in range(x.size):
            y[i] = x[i] * s if x[i] <= zero else x[i]


@kernel
def _relu_in_place(y: Array, slope: float, lo: int, hi: int) -> None:
    s, zero, y = y.dtype.type(slope), y.dtype.type(0), y[lo:hi]
    if s == 0:
        for i in range(y.size):
            y[i] = zero if y[i] <= zero else y[i]
    else:
        for i in range(y.size):
            y[i] = y[i] * s if y[i] <= zero else y[i]


@kernel
def _relu_gradient(x: Array, dy: Array, dx: Array, slope: float, lo: int, hi: int) -> None:
    s, zero, x, dy, dx = x.dtype.type(slope), x.dtype.type(0), x[lo:hi], dy[lo:hi], dx[lo:hi]
    for i in range(x.size):
        dx[i] = dy[i] * (s if x[i] <= zero else x.dtype.type(1))


@kernel
def _relu_gradient_in_place(x: Array, dx: Array, slope: float, lo: int, hi: int) -> None:
    s, zero, x, dx = x.dtype.type(slope), x.dtype.type(0), x[lo:hi], dx[lo:hi]
    for i in range(x.size):
        dx[i] *= s if x[i] <= zero else x.dtype.type(1)


def relu_forward(x: Array, y: Array, slope: float) -> None:
    u, v = x.reshape(-1), y.reshape(-1)
    if x is y:
        parallel(lambda lo, hi: _relu_in_place(v, slope, lo, hi), v.size, GRAIN)
    else:
        parallel(lambda lo, hi: _relu(u, v, slope, lo, hi), v.size, GRAIN)


def relu_backward(x: Array, dy: Array, dx: Array, slope: float) -> None:
    t, u, v = x.reshape(-1), dy.reshape(-1), dx.reshape(-1)
    if dy is dx:
        parallel(lambda lo, hi: _relu_gradient_in_place(t, v, slope, lo, hi), t.size, GRAIN)
    else:
        parallel(lambda lo, hi: _relu_gradient(t, u, v, slope, lo, hi), t.size, GRAIN)


@kernel
def _prelu(x: Array, y: Array, slope: Array, lo: int, hi: int) -> None:
    for r in range(lo, hi):
        s, u, v = slope[r % slope.size], x[r], y[r]
        for p in range(u.size):
            v[p] = u[p] * s if u[p] <= 0 else u[p]


def prelu_forward(x: Array, y: Array, slope: Array) -> None:
    rows, pixels = x.shape[0] * x.shape[1], x.shape[2]
    x, y = x.reshape(rows, pixels), y.reshape(rows, pixels)
    parallel(lambda lo, hi: _prelu(x, y, slope, lo, hi), rows, GRAIN * rows // (x.size + 1) + 1)


@kernel
def _prelu_gradient(
    x: Array,
    dy: Array,
    slope: Array,
    dx: Array,
    dslope: Array,
    write: bool,
    collect: bool,
    lo: int,
    hi: int,
) -> None:
    zero, one = x.dtype.type(0), x.dtype.type(1)
    for c in range(lo, hi):
        s, total = slope[c], 0.0
        for n in range(x.shape[0]):
            t, u, v = x[n, c], dy[n, c], dx[n, c]
            part = zero
            for p in range(t.size):
                part += u[p] * (t[p] if t[p] <= zero else zero)
            total += part
            if write:
                for p in range(t.size):
                    v[p] = u[p] * (s if t[p] <= zero else one)
        if collect:
            dslope[c] += total


def prelu_backward(
    x: Array, dy: Array, slope: Array, dx: Array | None, dslope: Array | None
) -> None:
    out, sums = dy if dx is None else dx, slope if dslope is None else dslope
    write, collect = dx is not None, dslope is not None
    if slope.size == 1:
        x, dy, out = (a.reshape(1, 1, -1) for a in (x, dy, out))
    grain = GRAIN * slope.size // (x.size + 1) + 1
    parallel(
        lambda lo, hi: _prelu_gradient(x, dy, slope, out, sums, write, collect, lo, hi),
        slope.size,
        grain,
    )


def sigmoid_forward(x: Array, y: Array) -> None:
    def block(x: Array, y: Array) -> None:
        np.multiply(x, 0.5, out=y)
        np.tanh(y, out=y)
        np.multiply(y, 0.5, out=y)
        np.add(y, 0.5, out=y)

    blockwise(block, x, y)


@kernel
def _sigmoid_gradient(y: Array, dy: Array, dx: Array, lo: int, hi: int) -> None:
    one, y, dy, dx = y.dtype.type(1), y[lo:hi], dy[lo:hi], dx[lo:hi]
    for i in range(y.size):
        dx[i] = dy[i] * (y[i] * (one - y[i]))


def sigmoid_backward(y: Array, dy: Array, dx: Array) -> None:
    y, dy, dx = y.reshape(-1), dy.reshape(-1), dx.reshape(-1)
    parallel(lambda lo, hi: _sigmoid_gradient(y, dy, dx, lo, hi), y.size, GRAIN)


def tanh_forward(x: Array, y: Array) -> None:
    blockwise(lambda x, y: np.tanh(x, out=y), x, y)


@kernel
def _tanh_gradient(y: Array, dy: Array, dx: Array, lo: int, hi: int) -> None:
    one, y, dy, dx = y.dtype.type(1), y[lo:hi], dy[lo:hi], dx[lo:hi]
    for i in range(y.size):
        dx[i] = dy[i] * (one - y[i] * y[i])


def tanh_backward(y: Array, dy: Array, dx: Array) -> None:
    y, dy, dx = y.reshape(-1), dy.reshape(-1), dx.reshape(-1)
    parallel(lambda lo, hi: _tanh_gradient(y, dy, dx, lo, hi), y.size, GRAIN)


def power_forward(x: Array, y: Array, power: float, scale: float, shift: float) -> None:
    def block(x: Array, y: Array) -> None:
        np.multiply(x, scale, out=y)
        np.add(y, shift, out=y)
        _raise_to(y, power, y)

    blockwise(block, x, y)


def power_backward(
    x: Array, dy: Array, dx: Array, power: float, scale: float, shift: float
) -> None:
    def block(x: Array, dy: Array, dx: Array) -> None:
        slope = np.multiply(x, scale)
        slope += shift
        _raise_to(slope, power - 1, slope)
        slope *= power * scale
        np.multiply(dy, slope, out=dx)

    blockwise(block, x, dy, dx)


def _raise_to(x: Array, power: float, y: Array) -> None:
    if power == 1:
        return
    if power == 2:
        np.multiply(x, x, out=y)
    elif power == 0.5:
        np.sqrt(x, out=y)
    else:
        np.power(x, power, out=y)


def elu_forward(x: Array, y: Array, alpha: float) -> None:
    def block(x: Array, y: Array) -> None:
        negative = np.minimum(x, 0)
        np.expm1(negative, out=negative)
        negative *= alpha
        np.maximum(x, 0, out=y)
        y += negative

    blockwise(block, x, y)


@kernel
def _elu_gradient(x: Array, y: Array, dy: Array, dx: Array, alpha: float, lo: int, hi: int) -> None:
    a, zero, one = x.dtype.type(alpha), x.dtype.type(0), x.dtype.type(1)
    x, y, dy, dx = x[lo:hi], y[lo:hi], dy[lo:hi], dx[lo:hi]
    for i in range(x.size):
        dx[i] = dy[i] * (one if x[i] > zero else a + y[i])


def elu_backward(x: Array, y: Array, dy: Array, dx: Array, alpha: float) -> None:
    x, y, dy, dx = x.reshape(-1), y.reshape(-1), dy.reshape(-1), dx.reshape(-1)
    parallel(lambda lo, hi: _elu_gradient(x, y, dy, dx, alpha, lo, hi), x.size, GRAIN)


def swish_forward(x: Array, y: Array, sigmoid: Array, beta: float) -> None:
    def block(x: Array, y: Array, s: Array) -> None:
        np.multiply(x, beta / 2, out=s)
        np.tanh(s, out=s)
        np.multiply(s, 0.5, out=s)
        np.add(s, 0.5, out=s)
        np.multiply(x, s, out=y)

    blockwise(block, x, y, sigmoid)


@kernel
def _swish_gradient(
    y: Array, sigmoid: Array, dy: Array, dx: Array, beta: float, lo: int, hi: int
) -> None:
    b, one = y.dtype.type(beta), y.dtype.type(1)
    y, s, dy, dx = y[lo:hi], sigmoid[lo:hi], dy[lo:hi], dx[lo:hi]
    for i in range(y.size):
        dx[i] = dy[i] * (b * y[i] + s[i] * (one - b * y[i]))


def swish_backward(y: Array, sigmoid: Array, dy: Array, dx: Array, beta: float) -> None:
    y, sigmoid, dy, dx = y.reshape(-1), sigmoid.reshape(-1), dy.reshape(-1), dx.reshape(-1)
    parallel(lambda lo, hi: _swish_gradient(y, sigmoid, dy, dx, beta, lo, hi), y.size, GRAIN)


@kernel
def _keep(seed: int, threshold: int, mask: Array, lo: int, hi: int) -> None:
    mask, first, bound = mask[lo:hi], np.uint32(seed + lo), np.uint32(threshold)
    second = mix(np.uint32(seed))
    for i in range(mask.size):
        h = mix(np.uint32(first + np.uint32(i)))
        mask[i] = mix(np.uint32(h + second)) >= bound


@kernel
def _masked(x: Array, y: Array, mask: Array, scale: float, lo: int, hi: int) -> None:
    s, zero, x, y, mask = x.dtype.type(scale), x.dtype.type(0), x[lo:hi], y[lo:hi], mask[lo:hi]
    for i in range(x.size):
        y[i] = x[i] * (s if mask[i] else zero)


@kernel
def _mask_in_place(y: Array, mask: Array, scale: float, lo: int, hi: int) -> None:
    s, zero, y, mask = y.dtype.type(scale), y.dtype.type(0), y[lo:hi], mask[lo:hi]
    for i in range(y.size):
        y[i] *= s if mask[i] else zero


def dropout_forward(
    x: Array, y: Array, mask: Array, ratio: float, seed: int, step_counter: Array | None = None
) -> None:
    if step_counter is not None:
        seed = int(seed_of_pass(seed, int(step_counter)))
    flags, threshold = mask.reshape(-1), int(ratio * (1 << 32))
    parallel(lambda lo, hi: _keep(seed, threshold, flags, lo, hi), flags.size, GRAIN)
    dropout_backward(x, mask, y, ratio)


def dropout_backward(dy: Array, mask: Array, dx: Array, ratio: float) -> None:
    u, v, flags, scale = dy.reshape(-1), dx.reshape(-1), mask.reshape(-1), 1 / (1 - ratio)
    if dy is dx:
        parallel(lambda lo, hi: _mask_in_place(v, flags, scale, lo, hi), v.size, GRAIN)
    else:
        parallel(lambda lo, hi: _masked(u, v, flags, scale, lo, hi), v.size, GRAIN)


def bias_act_forward(
    y: Array,
    b: Array | None,
    relu: bool,
    ratio: float,
    seed: int,
    mask: Array | None,
    step_counter: Array | None = None,
) -> None:
    if b is not None:
        add_bias(y, b)
    if relu:
        relu_forward(y, y, 0.0)
    if mask is not None:
        dropout_forward(y, y, mask, ratio, seed, step_counter)


def bias_act_backward(
    y: Array, dy: Array, db: Array | None, relu: bool, mask: Array | None, ratio: float
) -> None:
    if mask is not None:
        dropout_backward(dy, mask, dy, ratio)
    if relu:
        relu_backward(y, dy, dy, 0.0)
    if db is not None:
        bias_gradient(dy, db)
