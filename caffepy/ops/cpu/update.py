"""Update rules over flat parameter arrays, one fused pass each: normalize, regularize, update.

Each writes `w` and its history in place and leaves in `g` what it subtracted from `w`. Loops run
over slices: the compiler vectorizes only indices that cannot be negative.
"""

from collections.abc import Sequence
from functools import partial
from math import sqrt
from typing import Any

from caffepy.device.blob import Array
from caffepy.device.threads import parallel
from caffepy.ops.cpu.compiler import inlined, kernel
from caffepy.ops.update_state import Number, Segments

GRAIN = 1 << 16  # elements for which one more thread pays


@inlined
def _regularized(w: Any, g: Any, decay: Any, segments: Segments) -> Any:
    one, zero = type(w)(1), type(w)(0)
    sign = (one if w > 0 else zero) - (one if w < 0 else zero)
    return segments.scale * g + decay * (sign if segments.l1 else w)


@kernel
def _sgd(w: Array, g: Array, h: Array, segments: Segments, numbers: Any, lo: int, hi: int) -> None:
    momentum = numbers[0]
    for s in range(segments.ends.size):
        end, rate, decay = min(segments.ends[s], hi), segments.rates[s], segments.decays[s]
        w_, g_, h_ = w[lo:end], g[lo:end], h[lo:end]
        for i in range(w_.size):
            h_[i] = momentum * h_[i] + rate * _regularized(w_[i], g_[i], decay, segments)
            g_[i] = h_[i]
            w_[i] -= h_[i]
        lo = max(lo, end)


@kernel
def _nesterov(
    w: Array, g: Array, h: Array, segments: Segments, numbers: Any, lo: int, hi: int
) -> None:
    momentum, one = numbers[0], w.dtype.type(1)
    for s in range(segments.ends.size):
        end, rate, decay = min(segments.ends[s], hi), segments.rates[s], segments.decays[s]
        w_, g_, h_ = w[lo:end], g[lo:end], h[lo:end]
        for i in range(w_.size):
            before = h_[i]
            h_[i] = momentum * before + rate * _regularized(w_[i], g_[i], decay, segments)
            g_[i] = (one + momentum) * h_[i] - momentum * before
            w_[i] -= g_[i]
        lo = max(lo, end)


@kernel
def _rms(w: Array, g: Array, h: Array, segments: Segments, numbers: Any, lo: int, hi: int) -> None:
    keep, take, delta = numbers
    for s in range(segments.ends.size):
        end, rate, decay = min(segments.ends[s], hi), segments.rates[s], segments.decays[s]
        w_, g_, h_ = w[lo:end], g[lo:end], h[lo:end]
        for i in range(w_.size):
            d = _regularized(w_[i], g_[i], decay, segments)
            h_[i] = keep * h_[i] + take * d * d
            g_[i] = rate * d / (sqrt(h_[i]) + delta)
            w_[i] -= g_[i]
        lo = max(lo, end)


@kernel
def _adadelta(
    w: Array, g: Array, h: Array, u: Array, segments: Segments, numbers: Any, lo: int, hi: int
) -> None:
    momentum, delta = numbers
    take = w.dtype.type(1) - momentum
    for s in range(segments.ends.size):
        end, rate, decay = min(segments.ends[s], hi), segments.rates[s], segments.decays[s]
        w_, g_, h_, u_ = w[lo:end], g[lo:end], h[lo:end], u[lo:end]
        for i in range(w_.size):
            d = _regularized(w_[i], g_[i], decay, segments)
            h_[i] = momentum * h_[i] + take * d * d
            v = d * sqrt((u_[i] + delta) / (h_[i] + delta))
            u_[i] = momentum * u_[i] + take * v * v
            g_[i] = rate * v
            w_[i] -= g_[i]
        lo = max(lo, end)


@kernel
def _adam(
    w: Array, g: Array, m: Array, v: Array, segments: Segments, numbers: Any, lo: int, hi: int
) -> None:
    beta1, beta2, delta, correction = numbers
    one = w.dtype.type(1)
    for s in range(segments.ends.size):
        end, decay = min(segments.ends[s], hi), segments.decays[s]
        rate = segments.rates[s] * correction
        w_, g_, m_, v_ = w[lo:end], g[lo:end], m[lo:end], v[lo:end]
        for i in range(w_.size):
            d = _regularized(w_[i], g_[i], decay, segments)
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
    real = arrays[0].dtype.type
    typed = segments._replace(
        rates=real(segments.rate) * segments.rates,
        decays=real(segments.decay) * segments.decays,
        scale=real(segments.scale),
        rate=1.0,  # in `rates` by now, as the decay
        decay=1.0,
        go=1.0,
    )
    run = partial(RULES[rule], *arrays, typed, tuple(map(real, numbers)))
    parallel(run, arrays[0].size, GRAIN)
