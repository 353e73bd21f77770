"""Crop, mean subtraction, scale and mirroring of a batch of images."""

from typing import Any

import cupy
import numpy as np

from caffepy.core.errors import DeviceError
from caffepy.ops.cuda.launch import Array, c_type, channels_last, launch_expression, packs
from caffepy.ops.protocol.transform import Crops

RECORDS = {"uint8": "unsigned char", "float32": "float", "float64": "double"}


def _on_device(a: Any, dtype: Any) -> Array:
    """Return the array C-contiguous on the device, uploaded if it lies on the host."""
    if isinstance(a, cupy.ndarray):
        return cupy.ascontiguousarray(a, dtype)
    return cupy.asarray(np.ascontiguousarray(a, dtype))


def transform_batch(
    records: Array, out: Array, crops: Crops, mean: Array | None, scale: float
) -> None:
    if not out.size:
        return
    kind = RECORDS.get(records.dtype.name)
    if kind is None:
        what = f"records of type {records.dtype.name}"
        raise DeviceError(f"no GPU transformation of {what}; uint8 and float32 have one")
    last = channels_last(out)
    places = (_on_device(offsets, np.int64) for offsets in crops[:2])
    flip, strides = _on_device(crops[2], np.bool_), [0, 0, 0]
    if mean is not None:
        steps = (mean.shape[1] * mean.shape[2], mean.shape[2], 1)
        strides = [step if n > 1 else 0 for n, step in zip(mean.shape, steps, strict=True)]
        mean = _on_device(mean, np.float64 if out.dtype == np.float64 else np.float32)
    sizes = (*out.shape[:2], *records.shape[2:], *out.shape[2:], *strides, int(last))
    arrays = (_on_device(records, records.dtype), out, *places, flip, mean)
    name = f"transform<{kind}, {c_type(out)}>"
    launch_expression("transform", name, packs(out), *arrays, *sizes, float(scale))
