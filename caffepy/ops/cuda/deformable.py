"""Columns of a deformable convolution, whose kernel reads an image at learned offsets."""

from collections.abc import Sequence

import cupy
import numpy as np

from caffepy.ops.cuda.launch import Array, launch, scratch
from caffepy.ops.protocol.types import Maybe, Sizes


def _numbers(like: Array, offsets: Array, window: Sequence[Sizes]) -> tuple[int, ...]:
    """Sizes of the image, groups, taps and sizes of the columns, and the window's numbers."""
    kernel_size, *others = window
    flat = (n for sizes in others for n in sizes)
    return *like.shape, *offsets.shape[:2], *offsets.shape[3:], kernel_size[1], *flat


def deformable_columns(x: Array, offsets: Array, columns: Array, window: Sequence[Sizes]) -> None:
    numbers = _numbers(x, offsets, window)
    launch("deformable", "columns", x, columns.size, x, offsets, columns, *numbers)


def deformable_backward(
    dcolumns: Array,
    x: Array,
    offsets: Array,
    dx: Maybe,
    doffsets: Maybe,
    window: Sequence[Sizes],
) -> None:
    numbers = _numbers(x, offsets, window)
    if doffsets is not None:
        threads = doffsets.size // 2
        launch("deformable", "offsets_back", x, threads, dcolumns, x, offsets, doffsets, *numbers)
    if dx is None or not dx.size:
        return
    largest = cupy.max(cupy.abs(dcolumns)).astype(np.float64)
    sums = scratch("deformable", dx.size)
    sums.fill(0)
    launch(
        "deformable", "columns_back", x, dcolumns.size, dcolumns, offsets, sums, largest, *numbers
    )
    launch("deformable", "take_sums", dx, dx.size, sums, largest, dx, dx.size)
