"""Pooling of regions of interest."""

from typing import Any

import numpy as np

from caffepy.ops.cuda.compiler import kernel
from caffepy.ops.cuda.context import context
from caffepy.ops.cuda.launch import Array, c_type, divisor

CHUNK = 64
"""Channels of a block of ROIPooling."""

WARPS = 4
"""Warps of a block in backward, as in roi.cu, each with a plane, or a band of one, in shared
memory.
"""

SHARED = 44 << 10
"""Bytes of shared memory of such a block."""


def _launch(name: str, like: Array, grid: tuple[int, int], *arguments: Any, **sizes: int) -> None:
    if min(grid) > 0:
        threads = sizes.pop("threads", 256)
        kernel("roi", f"{name}<{c_type(like)}>")(grid, (threads,), arguments, **sizes)


def _launch_bands(name: str, dx: Array, arguments: tuple[Any, ...], *last: int) -> None:
    """Launch a block for each plane of dx, or for each of several bands of one."""
    images, channels, h, w = dx.shape
    width = 4 if dx.itemsize < 8 else 8
    bands = max(1, -(-h * w * width * WARPS // SHARED))
    band = -(-h * w // bands)
    grid, shared = (channels * bands, images), band * width * WARPS
    given = (*arguments, band, bands, *last)
    if dx.size:
        _launch(name, dx, grid, *given, threads=32 * WARPS, shared_mem=shared)


def roi_pool_forward(x: Array, rois: Array, y: Array, index: Array, scale: float) -> None:
    boxes, channels, rows, columns = y.shape
    sizes = channels, rows, columns, *x.shape[2:], float(scale), CHUNK
    arguments = x, rois, y, index, *sizes, divisor(rows * columns), divisor(columns)
    grid = boxes, -(-channels // CHUNK)
    _launch("roi_pool_forward", y, grid, *arguments, shared_mem=8 * (rows + columns))


def roi_pool_backward(dy: Array, rois: Array, index: Array, dx: Array, scale: float) -> None:
    boxes, channels, rows, columns = dy.shape
    bins, plane = rows * columns, dx.shape[2] * dx.shape[3]
    arguments = dy, rois, index, dx, channels, plane, bins, boxes
    _launch_bands("roi_pool_backward", dx, arguments, divisor(bins))


def psroi_pool_forward(x: Array, rois: Array, y: Array, scale: float) -> None:
    boxes, outputs, bins, _ = y.shape
    arguments = x, rois, y, outputs, bins, *x.shape[2:], float(scale), divisor(bins)
    _launch("psroi_pool_forward", y, (boxes, 1), *arguments, shared_mem=16 * bins)


def psroi_pool_backward(dy: Array, rois: Array, dx: Array, scale: float) -> None:
    channels, h, w = dx.shape[1:]
    arguments = dy, rois, dx, channels, h, w, dy.shape[2], len(dy), float(scale)
    _launch_bands("psroi_pool_backward", dx, arguments)


def _bytes_of_weights(bins: int, size: int, like: Array) -> int:
    """Return the bytes of the weights of an axis, as bytes_of in roi.cu."""
    width = max(4, int(like.itemsize))
    return -(-((size + 3 * bins) * width + 12 * bins) // 16) * 16


def roi_align_forward(
    x: Array, rois: Array, y: Array, scale: float, samples: int, beyond: int, sensitive: bool
) -> None:
    (boxes, outputs, rows, columns), (channels, h, w) = y.shape, x.shape[1:]
    shared = _bytes_of_weights(rows, h, y) + _bytes_of_weights(columns, w, y)
    rule = float(scale), samples, beyond, int(sensitive)
    sizes = outputs, rows, columns, channels, h, w, *rule, CHUNK
    arguments = x, rois, y, *sizes, divisor(rows * columns), divisor(columns)
    grid = boxes, -(-outputs // CHUNK)
    _launch("roi_align_forward", y, grid, *arguments, shared_mem=shared)


def roi_align_backward(
    dy: Array, rois: Array, dx: Array, scale: float, samples: int, beyond: int, sensitive: bool
) -> None:
    (boxes, outputs, rows, columns), (channels, h, w) = dy.shape, dx.shape[1:]
    each = _bytes_of_weights(rows, h, dx) + _bytes_of_weights(columns, w, dx)
    tables = context().array("weights of regions", (boxes, each), np.uint8)
    rule = float(scale), samples, beyond, int(sensitive)
    given = rois, tables, rows, columns, h, w, *rule
    _launch("roi_align_weights", dx, (boxes, 1), *given, threads=64)
    sizes = channels, h, w, outputs, rows, columns, int(sensitive), boxes
    _launch_bands("roi_align_backward", dx, (dy, rois, tables, dx, *sizes))
