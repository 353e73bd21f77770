"""Crop, mean subtraction, scale and mirroring of a batch of images."""

from functools import lru_cache, partial
from typing import Any

import numpy as np

from caffepy.device.blob import Array
from caffepy.device.threads import parallel
from caffepy.ops.cpu.compiler import kernel
from caffepy.ops.protocol.transform import Crops

GRAIN = 1 << 16  # values for which one more thread pays


@kernel
def _transform(x: Array, y: Array, crops: Crops, mean: Array, scale: Any, lo: int, hi: int) -> None:
    h_off, w_off, mirror = crops
    channels, height, width = y.shape[1:]
    last = np.uint64(width - 1)  # unsigned indices cannot be negative: vector code
    for n in range(lo, hi):
        left = w_off[n]
        for c in range(channels):
            for h in range(height):
                row = h_off[n] + h
                v = x[n, c, row, left : left + width]
                m = mean[c, row if mean.shape[1] > 1 else 0, left : left + width]
                u = y[n, c, h]
                if mirror[n]:
                    for w in range(width):
                        u[last - np.uint64(w)] = (y.dtype.type(v[w]) - m[w]) * scale
                else:
                    for w in range(width):
                        u[w] = (y.dtype.type(v[w]) - m[w]) * scale


@lru_cache(maxsize=16)
def _no_mean(channels: int, width: int, dtype: np.dtype[Any]) -> Array:
    return np.zeros((channels, 1, width), dtype)


def transform_batch(
    records: Array, out: Array, crops: Crops, mean: Array | None, scale: float
) -> None:
    channels, width = records.shape[1], records.shape[3]
    if mean is None:
        mean = _no_mean(channels, width, out.dtype)
    else:
        # A mean of one row serves every row of the image.
        mean = np.broadcast_to(mean, (channels, mean.shape[1], width))
        mean = np.ascontiguousarray(mean, out.dtype)
    run = partial(_transform, records, out, tuple(crops), mean, out.dtype.type(scale))
    parallel(run, len(out), max(1, GRAIN // max(1, out[0].size)) if len(out) else 1)
