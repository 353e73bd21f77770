"""Convolutions of images of few channels with MAX pooling behind them, in one kernel each way
(pooled_convolution.cu): their outputs, many times as large as the image or the maxima, are never
written. Nor is the gradient of these outputs, where only weights and bias need it.

The kernels are compiled for the shapes. A block takes some lines of an image; how many is timed.
"""

from functools import partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from caffepy.ops.cuda.autotune import Make, Run
from caffepy.ops.cuda.compiler import kernel
from caffepy.ops.cuda.context import context
from caffepy.ops.cuda.graphs import Geometry
from caffepy.ops.cuda.launch import TYPES, Array
from caffepy.ops.cuda.small_convolution import here
from caffepy.ops.objects import Maxima

THREADS = 256
RESIDENT = 2
"""Blocks that a multiprocessor holds at a time."""

TILES = 20
"""Most tiles of an operand or of sums that a thread keeps a share of, in registers."""

WIDEST = 9
"""The most elements of a window."""


def suits_windows(geometry: Geometry, maxima: Maxima, dtype: DTypeLike) -> bool:
    """Return True if kernels can take maxima of numbers of 16 bits in shared memory: of small
    windows that lie side by side or overlap and begin within the plane.
    """
    kernel, stride, pad = maxima.window
    planes = geometry.y[2:], maxima.y.shape[2:]
    begins = zip(*planes, kernel, stride, pad, strict=True)
    return (
        np.dtype(dtype).itemsize == 2
        and here().capability >= 90
        and prod(kernel) <= WIDEST
        and all((m - 1) * s - p < n and s <= k and p < k for n, m, k, s, p in begins)
    )


def suits(geometry: Geometry, maxima: Maxima, dtype: DTypeLike) -> bool:
    """Return True if these kernels can do it: without groups and dilation, if what a thread keeps
    fits into registers.
    """
    return (
        len(geometry.stride) == 2
        and suits_windows(geometry, maxima, dtype)
        and geometry.group == prod(geometry.dilation) == 1
        and geometry.w[0] % 4 == 0
        and _steps(geometry) * _across(geometry) <= TILES
        and _down(geometry) * _across(geometry) <= TILES
    )


def _row(geometry: Geometry) -> int:
    return geometry.w[1] * geometry.w[3]


def _across(geometry: Geometry) -> int:
    """Return the tiles of 8 outputs."""
    return -(-geometry.w[0] // 8)


def _steps(geometry: Geometry) -> int:
    """Return the steps of 8 words of the depth."""
    return -(-geometry.w[2] * -(-_row(geometry) // 2) // 8)


def _down(geometry: Geometry) -> int:
    """Return the tiles of 16 rows of the gradient of the weights, with one for the bias."""
    return -(-(prod(geometry.w[1:]) + 1) // 16)


def _names(geometry: Geometry, maxima: Maxima, dtype: DTypeLike) -> tuple[str, str, str]:
    """Return element type, convolution and windows as the templates take them."""
    sizes = *geometry.x[1:], geometry.w[0], *geometry.w[2:], *geometry.stride, *geometry.padding
    filters = ", ".join(map(str, sizes))
    return TYPES[np.dtype(dtype).name], f"Filter<{filters}>", pool_name(maxima)


def pool_name(maxima: Maxima) -> str:
    """Return the template of the windows with its arguments."""
    sizes = *(side for pair in maxima.window for side in pair), *maxima.y.shape[2:]
    return f"Pool<{', '.join(map(str, sizes))}>"


def _lines(images: int, lines: int, bytes_of: Any) -> list[int]:
    """Return numbers of lines for a block, each with enough blocks for all multiprocessors or for
    all that they hold.
    """
    most = here().shared // RESIDENT - 1024
    found = []
    for blocks in (here().processors, RESIDENT * here().processors):
        pieces = min(lines, -(-blocks // images))
        while bytes_of(-(-lines // pieces)) > most and pieces < lines:
            pieces += 1
        of_block = -(-lines // pieces)
        if bytes_of(of_block) <= most and of_block not in found:
            found.append(of_block)
    return found


def _pitch(geometry: Geometry) -> int:
    """Return the words from a position to the next one in shared memory."""
    return 4 * (_across(geometry) | 1)


def _padded_line(geometry: Geometry) -> int:
    return (geometry.x[3] + 2 * geometry.padding[1]) * geometry.x[1]


def _load(name: str, shared: int) -> Run:
    found: Any = kernel("pooled_convolution", name)
    found.max_dynamic_shared_size_bytes = here().shared
    return partial(found, block=(THREADS,), shared_mem=shared)


def forward(geometry: Geometry, maxima: Maxima, dtype: DTypeLike) -> list[Make]:
    """Return candidates that run with x, w, b or None, an output, maxima."""
    if not suits(geometry, maxima, dtype):
        return []
    (kernel_h, _), (stride_h, _), _ = maxima.window
    weights = 8 * _across(geometry) * (8 * _steps(geometry) + 4)

    def bytes_of(rows: int) -> int:
        outputs = min((rows - 1) * stride_h + kernel_h, geometry.y[2])
        lines = (outputs - 1) * geometry.stride[0] + geometry.w[2]
        place = max(outputs * geometry.y[3] * _pitch(geometry), weights)
        return 4 * (place + lines * _padded_line(geometry))

    images, rows = len(maxima.y), maxima.y.shape[2]
    names = ", ".join(_names(geometry, maxima, dtype))
    relu = str(maxima.relu).lower()

    def plan(of_block: int) -> Run:
        name = f"pooled_convolution<{names}, {of_block}, {relu}>"
        run = _load(name, bytes_of(of_block))
        grid = (images * -(-rows // of_block),)
        return lambda x, w, b, _, to: run(grid, args=(x, w, b, to.y, to.where))

    return [partial(plan, number) for number in _lines(images, rows, bytes_of)]


def backward_weight(geometry: Geometry, maxima: Maxima, dtype: DTypeLike) -> list[Make]:
    """Return candidates that run with x, an output, maxima, dw, db or None."""
    if not suits(geometry, maxima, dtype):
        return []
    sums = 128 * _down(geometry) * _across(geometry)
    step = geometry.stride[1] * geometry.x[1]
    width = -(-geometry.y[3] // 2) * 2

    def bytes_of(lines: int) -> int:
        positions = -(-lines * width // 16) * 16
        place = max(positions * _pitch(geometry) + 4, THREADS // 32 * sums)
        of_image = (lines - 1) * geometry.stride[0] + geometry.w[2]
        return 4 * (place + of_image * (_padded_line(geometry) + step))

    images, rows = geometry.y[0], geometry.y[2]
    kind, filters, pool = _names(geometry, maxima, dtype)

    def plan(lines: int) -> Run:
        run = _load(f"pooled_gradient<{kind}, {filters}, {pool}, {lines}>", bytes_of(lines))
        finish = kernel("pooled_convolution", f"add_pooled_gradient<{filters}>")
        shares = min(images * -(-rows // lines), RESIDENT * here().processors)

        def both(x: Array, _: Array, of: Maxima, dw: Array, db: Array | None) -> None:
            part = context().array("pooled gradient", (shares, sums), np.float32)
            run((shares,), args=(x, of.y, of.where, part, np.int32(images)))
            finish((sums // 32,), (THREADS,), (part, dw, db, np.int32(shares)))

        return both

    return [partial(plan, number) for number in _lines(images, rows, bytes_of)]
