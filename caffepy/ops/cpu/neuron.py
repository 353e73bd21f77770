"""Activations and dropout, alone and with the bias before them."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from caffepy.device.blob import Array
from caffepy.device.threads import parallel
from caffepy.ops.cpu.blas import add_bias, bias_gradient, matmul
from caffepy.ops.cpu.compiler import kernel
from caffepy.ops.cpu.copies import cut
from caffepy.ops.cpu.elementwise import GRAIN, blockwise, eltwise_sum, flatwise
from caffepy.ops.cpu.random import mix, seed_array
from caffepy.ops.protocol.types import Seed

Maybe = Array | None


# Where an input is None, a loop works in place: see `flatwise`.


@kernel
def _relu(x: Maybe, y: Array, slope: float) -> None:
    u = y if x is None else x
    s, zero = u.dtype.type(slope), u.dtype.type(0)
    if s == 0:
        for i in range(u.size):
            y[i] = zero if u[i] <= zero else u[i]
    else:
        for i in range(u.size):
            y[i] = u[i] * s if u[i] <= zero else u[i]


def relu_forward(x: Array, y: Array, slope: float) -> None:
    flatwise(_relu, (None if x is y else x,), y, slope)


@kernel
def _relu_gradient(x: Array, dy: Maybe, dx: Array, slope: float) -> None:
    u = dx if dy is None else dy
    s, zero, one = x.dtype.type(slope), x.dtype.type(0), x.dtype.type(1)
    for i in range(x.size):
        dx[i] = u[i] * (s if x[i] <= zero else one)


def relu_backward(x: Array, dy: Array, dx: Array, slope: float) -> None:
    flatwise(_relu_gradient, (x, None if dy is dx else dy), dx, slope)


@kernel
def _relu6(x: Maybe, y: Array, slope: float) -> None:
    u = y if x is None else x
    s, zero, six = u.dtype.type(slope), u.dtype.type(0), u.dtype.type(6)
    for i in range(u.size):
        y[i] = u[i] * s if u[i] <= zero else six if u[i] > six else u[i]


def relu6_forward(x: Array, y: Array, slope: float) -> None:
    flatwise(_relu6, (None if x is y else x,), y, slope)


@kernel
def _relu6_gradient(x: Array, dy: Maybe, dx: Array, slope: float) -> None:
    u = dx if dy is None else dy
    s, zero, one, six = x.dtype.type(slope), x.dtype.type(0), x.dtype.type(1), x.dtype.type(6)
    for i in range(x.size):
        dx[i] = u[i] * (s if x[i] <= zero else zero if x[i] >= six else one)


def relu6_backward(x: Array, dy: Array, dx: Array, slope: float) -> None:
    flatwise(_relu6_gradient, (x, None if dy is dx else dy), dx, slope)


@kernel
def _prelu(x: Array, y: Array, slope: Array, lo: int, hi: int) -> None:
    for r in range(lo, hi):
        s, u, v = slope[r % slope.size], x[r], y[r]
        for p in range(u.size):
            v[p] = u[p] * s if u[p] <= 0 else u[p]


def prelu_forward(x: Array, y: Array, slope: Array) -> None:
    rows, pixels = x.shape[0] * x.shape[1], x.shape[2]
    run = partial(_prelu, x.reshape(rows, pixels), y.reshape(rows, pixels), slope)
    parallel(run, rows, GRAIN * rows // (x.size + 1) + 1)


@kernel
def _prelu_gradient(
    x: Array, dy: Array, slope: Array, dx: Maybe, dslope: Maybe, lo: int, hi: int
) -> None:
    zero, one = x.dtype.type(0), x.dtype.type(1)
    for c in range(lo, hi):
        s, total = slope[c], 0.0
        for n in range(x.shape[0]):
            t, u = x[n, c], dy[n, c]
            part = zero
            for p in range(t.size):
                part += u[p] * (t[p] if t[p] <= zero else zero)
            total += part
            if dx is not None:
                v = dx[n, c]
                for p in range(t.size):
                    v[p] = u[p] * (s if t[p] <= zero else one)
        if dslope is not None:
            dslope[c] += total


def prelu_backward(x: Array, dy: Array, slope: Array, dx: Maybe, dslope: Maybe) -> None:
    if slope.size == 1:
        x, dy = x.reshape(1, 1, -1), dy.reshape(1, 1, -1)
        dx = None if dx is None else dx.reshape(1, 1, -1)
    run = partial(_prelu_gradient, x, dy, slope, dx, dslope)
    parallel(run, slope.size, GRAIN * slope.size // (x.size + 1) + 1)


def sigmoid_forward(x: Array, y: Array) -> None:
    blockwise(partial(_sigmoid, 1.0), x, y)


def _sigmoid(beta: float, x: Array, y: Array) -> None:
    np.multiply(x, beta / 2, out=y)
    np.tanh(y, out=y)
    np.multiply(y, 0.5, out=y)
    np.add(y, 0.5, out=y)


@kernel
def _sigmoid_gradient(y: Array, dy: Array, dx: Array) -> None:
    one = y.dtype.type(1)
    for i in range(y.size):
        dx[i] = dy[i] * (y[i] * (one - y[i]))


def sigmoid_backward(y: Array, dy: Array, dx: Array) -> None:
    flatwise(_sigmoid_gradient, (y, dy), dx)


def tanh_forward(x: Array, y: Array) -> None:
    blockwise(np.tanh, x, y)


@kernel
def _tanh_gradient(y: Array, dy: Array, dx: Array) -> None:
    one = y.dtype.type(1)
    for i in range(y.size):
        dx[i] = dy[i] * (one - y[i] * y[i])


def tanh_backward(y: Array, dy: Array, dx: Array) -> None:
    flatwise(_tanh_gradient, (y, dy), dx)


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
def _elu_gradient(x: Array, y: Array, dy: Array, dx: Array, alpha: float) -> None:
    a, zero, one = x.dtype.type(alpha), x.dtype.type(0), x.dtype.type(1)
    for i in range(x.size):
        dx[i] = dy[i] * (one if x[i] > zero else a + y[i])


def elu_backward(x: Array, y: Array, dy: Array, dx: Array, alpha: float) -> None:
    flatwise(_elu_gradient, (x, y, dy), dx, alpha)


def swish_forward(x: Array, y: Array, sigmoid: Array, beta: float) -> None:
    def block(x: Array, y: Array, s: Array) -> None:
        _sigmoid(beta, x, s)
        np.multiply(x, s, out=y)

    blockwise(block, x, y, sigmoid)


@kernel
def _swish_gradient(y: Array, s: Array, dy: Array, dx: Array, beta: float) -> None:
    b, one = y.dtype.type(beta), y.dtype.type(1)
    for i in range(y.size):
        dx[i] = dy[i] * (b * y[i] + s[i] * (one - b * y[i]))


def swish_backward(y: Array, sigmoid: Array, dy: Array, dx: Array, beta: float) -> None:
    flatwise(_swish_gradient, (y, sigmoid, dy), dx, beta)


@kernel
def _keep(seed: Array, threshold: int, mask: Array, lo: int, hi: int) -> None:
    mask, first, bound = mask[lo:hi], np.uint32(seed[()] + lo), np.uint32(threshold)
    second = mix(np.uint32(seed[()]))
    for i in range(mask.size):
        h = mix(np.uint32(first + np.uint32(i)))
        mask[i] = mix(np.uint32(h + second)) >= bound


@kernel
def _masked(x: Maybe, mask: Array, y: Array, scale: float) -> None:
    u = y if x is None else x
    s, zero = u.dtype.type(scale), u.dtype.type(0)
    for i in range(u.size):
        y[i] = u[i] * (s if mask[i] else zero)


def dropout_forward(
    x: Array, y: Array, mask: Array, ratio: float, seed: Seed, step_counter: Maybe = None
) -> None:
    given = seed_array(seed, step_counter), int(ratio * (1 << 32))
    parallel(partial(_keep, *given, mask.reshape(-1)), mask.size, GRAIN)
    dropout_backward(x, mask, y, ratio)


@kernel
def _slopes(
    seed: int, low: float, width: float, x: Array, y: Array, slope: Array, lo: int, hi: int
) -> None:
    second, kind, one = mix(np.uint32(seed)), y.dtype.type, y.dtype.type(1)
    for i in range(lo, hi):
        h = mix(np.uint32(mix(np.uint32(np.uint32(seed) + np.uint32(i))) + second))
        share = kind(h) * kind(2.0**-32)
        slope[i] = one if x[i] > 0 else one / (kind(low) + kind(width) * share)
        y[i] = x[i] * slope[i]


def rrelu_forward(
    x: Array,
    y: Array,
    slope: Array,
    bounds: tuple[float, float],
    seed: Seed,
    step_counter: Maybe = None,
) -> None:
    seed = int(seed_array(seed, step_counter))
    flat = x.reshape(-1), y.reshape(-1), slope.reshape(-1)
    numbers = bounds[0], bounds[1] - bounds[0]
    parallel(partial(_slopes, seed, *numbers, *flat), y.size, GRAIN)


def dropout_backward(dy: Array, mask: Array, dx: Array, ratio: float) -> None:
    flatwise(_masked, (None if dy is dx else dy, mask), dx, 1 / (1 - ratio))


def inner_product(x: Array, w: Array, narrow: Maybe, b: Maybe, relu: bool, y: Array) -> None:
    matmul(x, w, y)
    bias_act_forward(y, b, relu, 0.0, 0, None)


def bias_act_forward(
    y: Array,
    b: Maybe,
    relu: bool,
    ratio: float,
    seed: Seed,
    mask: Maybe,
    step_counter: Maybe = None,
) -> None:
    if b is not None:
        add_bias(y, b)
    if relu:
        relu_forward(y, y, 0.0)
    if mask is not None:
        dropout_forward(y, y, mask, ratio, seed, step_counter)


def bias_act_backward(
    y: Array, dy: Array, db: Maybe, relu: bool, mask: Maybe, ratio: float
) -> None:
    if mask is not None:
        dropout_backward(dy, mask, dy, ratio)
    relu_bias_backward(y if relu else None, dy, db)


def relu_bias_backward(y: Maybe, dy: Array, db: Maybe) -> None:
    if y is not None:
        relu_backward(y, dy, dy, 0.0)
    if db is not None:
        bias_gradient(dy, db)


def cut_relu_backward(
    dys: Sequence[Array], ys: Sequence[Array], dxs: Sequence[Array], dbs: Sequence[Maybe]
) -> None:
    dy = dys[0]
    if len(dys) > 1:
        eltwise_sum(dys, [1.0] * len(dys), dy)
    cut(dy, [y.shape[1] for y in ys], dxs, 1)
    for y, dx, db in zip(ys, dxs, dbs, strict=True):
        relu_bias_backward(y, dx, db)
