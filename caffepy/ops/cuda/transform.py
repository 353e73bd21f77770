"""Crop, mean subtraction, scale and mirroring of a batch of images."""

from typing import Any

import cupy
import numpy as np

from caffepy.core.errors import DeviceError
from caffepy.ops.cuda.compiler import kernel
from caffepy.ops.cuda.launch import MOST, THREADS, Array, c_type, channels_last, packs

RECORDS = {"uint8": "unsigned char", "float32": "float", "float64": "double"}


def _on_device(a: Any, dtype: Any) -> Array:
    """Return the array C-contiguous on the device, uploaded if it lies on the host."""
    if isinstance(a, cupy.ndarray):
        return cupy.ascontiguousarray(a, dtype)
    return cupy.asarray(np.ascontiguousarray(a, dtype))


def transform_batch(
    records: Array,
    out: Array,
    h_off: Array,
    w_off: Array,
    mirror: Array,
    mean: Array | None,
    scale: float,
) -> None:
    if not out.size:
        return
    kind = RECORDS.get(records.dtype.name)
    if kind is None:
        raise DeviceError(
            f"no GPU transformation of records of type {records.dtype.name}; "
            "uint8 and float32 have one"
        )
    last = channels_last(out)
    h, w, flip = (
        _on_device(h_off, np.int64),
        _on_device(w_off, np.int64),
        _on_device(mirror, np.bool_),
    )
    shift: Any = 0
    strides: tuple[int, ...] = (0, 0, 0)
    if mean is not None:
        shift = _on_device(mean, np.float64 if out.dtype == np.float64 else np.float32)
        steps = (mean.shape[1] * mean.shape[2], mean.shape[2], 1)
        strides = tuple(
            step if size > 1 else 0 for size, step in zip(mean.shape, steps, strict=True)
        )
    sizes = (*out.shape[:2], *records.shape[2:], *out.shape[2:], *strides, int(last))
    blocks = min(-(-packs(out) // THREADS), MOST)
    arguments = (_on_device(records, records.dtype), out, h, w, flip, shift, *sizes, float(scale))
    kernel("transform", f"transform<{kind}, {c_type(out)}>")((blocks,), (THREADS,), arguments)
