"""Update rules over flat parameter arrays, one fused pass each: normalize, regularize, update.

Each writes `w` and its history in place and leaves in `g` what it subtracted from `w`. Numbers,
those of the segments among them, may be arrays without axes: a captured step reads them when it
runs.
"""

from typing import Any

import cupy
import numpy as np

from caffepy.ops.cuda.launch import Array, launch, number, packs
from caffepy.ops.update_state import Number, Segments


def _on_device(a: Any, dtype: Any) -> Array:
    if isinstance(a, cupy.ndarray):
        return a.astype(dtype, copy=False)
    return cupy.asarray(np.ascontiguousarray(a, dtype))


def _run(name: str, arrays: tuple[Array, ...], segments: Segments, *numbers: Number) -> None:
    w = arrays[0]
    count = len(segments.ends)
    if not w.size or not count:
        return
    ends = _on_device(segments.ends, np.int64)
    rates, decays = (_on_device(a, w.dtype) for a in (segments.rates, segments.decays))
    common = (segments.scale, segments.rate, segments.decay, segments.go)
    constants = (
        n for value in (*common, *numbers, *[0.0] * (4 - len(numbers))) for n in number(value)
    )
    arguments = (*arrays, w.size, ends, rates, decays, count, int(segments.l1), *constants)
    launch("update", name, w, packs(w), *arguments)


def sgd_update(w: Array, g: Array, h: Array, segments: Segments, momentum: float) -> None:
    _run("sgd", (w, g, h), segments, momentum)


def nesterov_update(w: Array, g: Array, h: Array, segments: Segments, momentum: float) -> None:
    _run("nesterov", (w, g, h), segments, momentum)


def adagrad_update(w: Array, g: Array, h: Array, segments: Segments, delta: float) -> None:
    _run("rms", (w, g, h), segments, 1.0, 1.0, delta)


def rmsprop_update(
    w: Array, g: Array, h: Array, segments: Segments, rms_decay: float, delta: float
) -> None:
    _run("rms", (w, g, h), segments, rms_decay, 1 - rms_decay, delta)


def adadelta_update(
    w: Array, g: Array, h: Array, u: Array, segments: Segments, momentum: float, delta: float
) -> None:
    _run("adadelta", (w, g, h, u), segments, momentum, delta)


def adam_update(
    w: Array,
    g: Array,
    m: Array,
    v: Array,
    segments: Segments,
    beta1: float,
    beta2: float,
    delta: float,
    correction: Number,
) -> None:
    _run("adam", (w, g, m, v), segments, beta1, beta2, delta, correction)
