"""Update rules over flat parameter arrays, one fused pass each: normalize, regularize, update.

Each writes `w` and its history in place and leaves in `g` what it subtracted from `w`. Numbers,
those of the segments among them, may be arrays without axes: a captured step reads them when it
runs.
"""

from collections.abc import Sequence
from typing import Any

import cupy
import numpy as np

from caffepy.ops.cuda.launch import Array, launch, number, packs
from caffepy.ops.update_state import Number, Segments


def _on_device(a: Any, dtype: Any) -> Array:
    if isinstance(a, cupy.ndarray):
        return a.astype(dtype, copy=False)
    return cupy.asarray(np.ascontiguousarray(a, dtype))


def multipliers(segments: Segments, dtype: Any) -> tuple[Array, Array]:
    """Return the factors of rate and decay of each segment as arrays of the device."""
    rates, decays = (_on_device(a, dtype) for a in (segments.rates, segments.decays))
    return rates, decays


def constants(segments: Segments, numbers: Sequence[Number]) -> list[Any]:
    """Return the arguments of a kernel for the numbers of the segments, and the rule's four."""
    common = (segments.scale, segments.rate, segments.decay, segments.go)
    rest = [0.0] * (4 - len(numbers))
    return [n for value in (*common, *numbers, *rest) for n in number(value)]


def update_params(
    rule: str, arrays: Sequence[Array], segments: Segments, numbers: Sequence[Number]
) -> None:
    w = arrays[0]
    count = len(segments.ends)
    if not w.size or not count:
        return
    ends = _on_device(segments.ends, np.int64)
    how = w.size, ends, *multipliers(segments, w.dtype), count, int(segments.l1)
    launch("update", rule, w, packs(w), *arrays, *how, *constants(segments, numbers))
