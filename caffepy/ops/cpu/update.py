"""Update rules over flat parameter arrays, one fused pass each: normalize, regularize, update.

Each writes `w` and its history in place and leaves in `g` what it subtracted from `w`. Loops run
over slices: the compiler vectorizes only indices that cannot be negative. Numbers are arrays
without axes, which a kernel reads, so that a call with other ones is the same call.
"""

from collections.abc import Sequence
from functools import partial
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from caffepy.device.blob import Array
from caffepy.device.threads import parallel
from caffepy.ops.cpu.blas import matmul
from caffepy.ops.cpu.compiler import EXACT, inlined, kernel
from caffepy.ops.update_state import Number, Segments

GRAIN = 1 << 16  # elements for which one more thread pays


@partial(inlined, fastmath=EXACT)
def _times(number: Any, factor: Any) -> Any:
    return number * factor


@inlined
def _rate(w: Array, segments: Any, s: int) -> Any:
    return _times(w.dtype.type(segments.rate[()]), segments.rates[s])


@inlined
def _decay(w: Array, segments: Any, s: int) -> Any:
    return _times(w.dtype.type(segments.decay[()]), segments.decays[s])


@inlined
def _regularized(w: Any, g: Any, scale: Any, decay: Any, l1: bool) -> Any:
    one, zero = type(w)(1), type(w)(0)
    sign = (one if w > 0 else zero) - (one if w < 0 else zero)
    return scale * g + decay * (sign if l1 else w)


@kernel
def _sgd(w: Array, g: Array, h: Array, segments: Any, numbers: Any, lo: int, hi: int) -> None:
    number = w.dtype.type
    scale = number(segments.scale[()])
    momentum = number(numbers[0][()])
    for s in range(segments.ends.size):
        end, rate, decay = min(segments.ends[s], hi), _rate(w, segments, s), _decay(w, segments, s)
        w_, g_, h_ = w[lo:end], g[lo:end], h[lo:end]
        for i in range(w_.size):
            h_[i] = momentum * h_[i] + rate * _regularized(w_[i], g_[i], scale, decay, segments.l1)
            g_[i] = h_[i]
            w_[i] -= h_[i]
        lo = max(lo, end)


@kernel
def _nesterov(w: Array, g: Array, h: Array, segments: Any, numbers: Any, lo: int, hi: int) -> None:
    number = w.dtype.type
    scale = number(segments.scale[()])
    momentum, one = number(numbers[0][()]), number(1)
    for s in range(segments.ends.size):
        end, rate, decay = min(segments.ends[s], hi), _rate(w, segments, s), _decay(w, segments, s)
        w_, g_, h_ = w[lo:end], g[lo:end], h[lo:end]
        for i in range(w_.size):
            before = h_[i]
            h_[i] = momentum * before + rate * _regularized(w_[i], g_[i], scale, decay, segments.l1)
            g_[i] = (one + momentum) * h_[i] - momentum * before
            w_[i] -= g_[i]
        lo = max(lo, end)


@kernel
def _rms(w: Array, g: Array, h: Array, segments: Any, numbers: Any, lo: int, hi: int) -> None:
    number = w.dtype.type
    scale = number(segments.scale[()])
    keep, take, delta = number(numbers[0][()]), number(numbers[1][()]), number(numbers[2][()])
    for s in range(segments.ends.size):
        end, rate, decay = min(segments.ends[s], hi), _rate(w, segments, s), _decay(w, segments, s)
        w_, g_, h_ = w[lo:end], g[lo:end], h[lo:end]
        for i in range(w_.size):
            d = _regularized(w_[i], g_[i], scale, decay, segments.l1)
            h_[i] = keep * h_[i] + take * d * d
            g_[i] = rate * d / (sqrt(h_[i]) + delta)
            w_[i] -= g_[i]
        lo = max(lo, end)


@kernel
def _adadelta(
    w: Array, g: Array, h: Array, u: Array, segments: Any, numbers: Any, lo: int, hi: int
) -> None:
    number = w.dtype.type
    scale = number(segments.scale[()])
    momentum, delta = number(numbers[0][()]), number(numbers[1][()])
    take = number(1) - momentum
    for s in range(segments.ends.size):
        end, rate, decay = min(segments.ends[s], hi), _rate(w, segments, s), _decay(w, segments, s)
        w_, g_, h_, u_ = w[lo:end], g[lo:end], h[lo:end], u[lo:end]
        for i in range(w_.size):
            d = _regularized(w_[i], g_[i], scale, decay, segments.l1)
            h_[i] = momentum * h_[i] + take * d * d
            v = d * sqrt((u_[i] + delta) / (h_[i] + delta))
            u_[i] = momentum * u_[i] + take * v * v
            g_[i] = rate * v
            w_[i] -= g_[i]
        lo = max(lo, end)


@kernel
def _adam(
    w: Array, g: Array, m: Array, v: Array, segments: Any, numbers: Any, lo: int, hi: int
) -> None:
    number = w.dtype.type
    scale = number(segments.scale[()])
    beta1, beta2, delta = number(numbers[0][()]), number(numbers[1][()]), number(numbers[2][()])
    correction, one = number(numbers[3][()]), number(1)
    for s in range(segments.ends.size):
        end, decay = min(segments.ends[s], hi), _decay(w, segments, s)
        rate = _times(_rate(w, segments, s), correction)
        w_, g_, m_, v_ = w[lo:end], g[lo:end], m[lo:end], v[lo:end]
        for i in range(w_.size):
            d = _regularized(w_[i], g_[i], scale, decay, segments.l1)
            m_[i] = beta1 * m_[i] + (one - beta1) * d
            v_[i] = beta2 * v_[i] + (one - beta2) * d * d
            g_[i] = rate * m_[i] / (sqrt(v_[i]) + delta)
            w_[i] -= g_[i]
        lo = max(lo, end)


RULES = {"sgd": _sgd, "nesterov": _nesterov, "rms": _rms, "adadelta": _adadelta, "adam": _adam}


def update_params(
    rule: str, arrays: Sequence[Array], segments: Segments, numbers: Sequence[Number]
) -> None:
    if not segments.go:
        return
    read = segments._replace(
        scale=_readable(segments.scale),
        rate=_readable(segments.rate),
        decay=_readable(segments.decay),
        go=1.0,
    )
    run = partial(RULES[rule], *arrays, read, tuple(map(_readable, numbers)))
    parallel(run, arrays[0].size, GRAIN)


def fuses_update(depth: int, shape: Sequence[int], dtype: DTypeLike) -> bool:
    return False


def product_update(
    rule: str,
    a: Array,
    b: Array,
    arrays: Sequence[Array],
    segments: Segments,
    numbers: Sequence[Number],
) -> None:
    w, *histories = (array.reshape(-1) for array in arrays)
    gradient = np.empty(arrays[0].shape, w.dtype)
    matmul(a.T, b, gradient)  # (R, M) @ (M, C)
    update_params(rule, (w, gradient.reshape(-1), *histories), segments, numbers)


def _readable(number: Number) -> Array:
    return np.asarray(number, np.float64)
