"""Convolutions of each channel by itself, 3 x 3, with the channels last, by kernels of our own
(depthwise.cu): cuDNN's are made for groups of many channels, and take several times as long.

The interface is that of small_convolution: lists of candidates for the autotuner.
"""

from collections.abc import Sequence
from math import gcd, prod

import numpy as np
from numpy.typing import DTypeLike

from caffepy.ops.cuda.autotune import Make, Run
from caffepy.ops.cuda.compiler import kernel
from caffepy.ops.cuda.context import context
from caffepy.ops.cuda.graphs import Geometry
from caffepy.ops.cuda.launch import TYPES, Array

THREADS = 256
COLUMNS = 4
"""Pixels of a thread in a line, as in depthwise.cu."""

BLOCKS = 132 * 8
"""About as many blocks as a large device holds at a time."""

RUN = 8
"""Most lines of a thread."""


def suits(geometry: Geometry, dtype: DTypeLike) -> bool:
    """Return True if these kernels can do it, and cuDNN is likely to be slow."""
    channels = geometry.x[1]
    return (
        geometry.group == channels == geometry.w[0] > 1
        and tuple(geometry.w[2:]) == (3, 3)
        and tuple(geometry.dilation) == (1, 1)
        and tuple(geometry.stride) in ((1, 1), (2, 2))
        and channels % 2 == 0
        and max(prod(geometry.x), prod(geometry.y)) < 1 << 30
    )


def _width(channels: int, dtype: DTypeLike) -> int:
    """Return the channels of a thread: 16 bytes, or fewer where that does not divide them."""
    return gcd(channels, 16 // np.dtype(dtype).itemsize)


def _name(name: str, dtype: DTypeLike, *numbers: int) -> str:
    return f"{name}<{TYPES[np.dtype(dtype).name]}, {', '.join(map(str, numbers))}>"


def _sizes(
    target: Sequence[int], source: Sequence[int], pads: Sequence[int], run: int
) -> tuple[int, ...]:
    """Return the members of Sizes of depthwise.cu."""
    n, c, height, width = target
    return (n, height, width, c, *source[2:], *pads, run)


def _over(target: Sequence[int], dtype: DTypeLike) -> tuple[int, int]:
    """Return the lines of a thread, and the blocks, for a target of this shape."""
    n, c, height, width = target
    packs = n * (c // _width(c, dtype)) * -(-width // COLUMNS)
    run = max(1, min(RUN, packs * height // (BLOCKS * THREADS)))
    return run, -(-packs * -(-height // run) // THREADS)


def forward(geometry: Geometry, dtype: DTypeLike, relu: bool) -> list[Make]:
    """Return candidates that run with x, w, b or None, y."""

    def make() -> Run:
        run, blocks = _over(geometry.y, dtype)
        width, stride = _width(geometry.x[1], dtype), geometry.stride[0]
        launch = kernel("depthwise", _name("depthwise", dtype, width, stride, 0))
        sizes = _sizes(geometry.y, geometry.x, geometry.padding, run)
        return lambda x, w, b, y: launch((blocks,), (THREADS,), (x, w, b, y, int(relu), *sizes))

    return [make]


def backward_data(geometry: Geometry, dtype: DTypeLike) -> list[Make]:
    """Return candidates that run with dy, w, dx."""

    def make() -> Run:
        run, blocks = _over(geometry.x, dtype)
        width = _width(geometry.x[1], dtype)
        if geometry.stride[0] == 1:
            pads = [2 - p for p in geometry.padding]
            sizes = _sizes(geometry.x, geometry.y, pads, run)
            turned = kernel("depthwise", _name("depthwise", dtype, width, 1, 1))
            return lambda dy, w, dx: turned((blocks,), (THREADS,), (dy, w, None, dx, 0, *sizes))
        sizes = _sizes(geometry.x, geometry.y, geometry.padding, run)
        spread = kernel("depthwise", _name("depthwise_spread", dtype, width))
        return lambda dy, w, dx: spread((blocks,), (THREADS,), (dy, w, dx, *sizes))

    return [make]


def backward_weight(geometry: Geometry, dtype: DTypeLike) -> list[Make]:
    """Return candidates that run with x, dy, dw, db or None, and add to the last two."""

    def make() -> Run:
        n, channels, height, _ = geometry.y
        width = _width(channels, dtype)
        packs = channels // width
        across = min(32, 1 << (packs - 1).bit_length())
        down, groups = THREADS // across, -(-packs // across)
        shares = max(1, min(-(-n * height // down), BLOCKS // 2 // groups))
        name = _name("depthwise_gradient", dtype, width, geometry.stride[0])
        launch = kernel("depthwise", name)
        add = kernel("depthwise", "add_depthwise")
        sizes = _sizes(geometry.y, geometry.x, geometry.padding, 1)
        shared = 4 * THREADS * width

        def run(x: Array, dy: Array, dw: Array, db: Array | None) -> None:
            part = context().array("depthwise gradient", (shares, 10, channels), np.float32)
            launch((groups, shares), (across, down), (x, dy, part, *sizes), shared_mem=shared)
            blocks = -(-10 * channels // THREADS)
            add((blocks,), (THREADS,), (part, dw, db, shares, channels))

        return run

    return [make]
