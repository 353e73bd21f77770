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
CHANNELS = 2
"""Most channels of a thread: with more, too few threads fit on a multiprocessor."""

COLUMNS = 4
"""Columns of a strip, as in depthwise.cu; 2 for the gradient of the weights with a stride of 2."""

BLOCKS = 132 * 2
"""About as many blocks as a large device needs to be busy."""

RUN, LONG_RUN = 8, 16
"""Most lines of a strip, and for the gradient of the weights."""

WAVE = 132 * 3
"""Blocks of the gradient of the weights that a large device holds at a time."""


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


def _width(channels: int) -> int:
    """Return the channels of a thread."""
    return gcd(channels, CHANNELS)


def _name(name: str, dtype: DTypeLike, *numbers: int) -> str:
    return f"{name}<{TYPES[np.dtype(dtype).name]}, {', '.join(map(str, numbers))}>"


def _run(threads: int, lines: int, most: int) -> int:
    """Return the lines of a strip, if this many threads stand beside each other on the first lines
    of all images: as many as leave the device enough threads, all strips alike.
    """
    run = max(1, min(most, threads * lines // (BLOCKS * THREADS)))
    return -(-lines // -(-lines // run))


def _over(
    target: Sequence[int], source: Sequence[int], pads: Sequence[int], pairs: bool = False
) -> tuple[int, tuple[int, ...]]:
    """Return the blocks and the sizes of a kernel with strips of `target`; of pairs of lines if
    `pairs`.
    """
    n, c, height, width = target
    if pairs:
        height, width = (h + p - p // 2 * 2 for h, p in zip((height, width), pads, strict=True))
        height = -(-height // 2)
    side_by_side = n * (c // _width(c)) * -(-width // COLUMNS)
    run = _run(side_by_side, height, RUN)
    return -(-side_by_side * -(-height // run) // THREADS), _sizes(target, source, pads, run)


def _sizes(
    target: Sequence[int], source: Sequence[int], pads: Sequence[int], run: int
) -> tuple[int, ...]:
    n, c, height, width = target
    return (n, height, width, c, *source[2:], *pads, run)


def forward(geometry: Geometry, dtype: DTypeLike, relu: bool) -> list[Make]:
    """Return candidates that run with x, w, b or None, y."""

    def make() -> Run:
        blocks, sizes = _over(geometry.y, geometry.x, geometry.padding)
        width, stride = _width(geometry.x[1]), geometry.stride[0]
        launch = kernel("depthwise", _name("depthwise", dtype, width, stride, 0))
        return lambda x, w, b, y: launch((blocks,), (THREADS,), (x, w, b, y, int(relu), *sizes))

    return [make]


def backward_data(geometry: Geometry, dtype: DTypeLike) -> list[Make]:
    """Return candidates that run with dy, w, dx."""

    def make() -> Run:
        width, strided = _width(geometry.x[1]), geometry.stride[0] == 2
        pads = geometry.padding if strided else [2 - p for p in geometry.padding]
        blocks, sizes = _over(geometry.x, geometry.y, pads, pairs=strided)
        if strided:
            spread = kernel("depthwise", _name("depthwise_spread", dtype, width))
            return lambda dy, w, dx: spread((blocks,), (THREADS,), (dy, w, dx, *sizes))
        turned = kernel("depthwise", _name("depthwise", dtype, width, 1, 1))
        return lambda dy, w, dx: turned((blocks,), (THREADS,), (dy, w, None, dx, 0, *sizes))

    return [make]


def backward_weight(geometry: Geometry, dtype: DTypeLike) -> list[Make]:
    """Return candidates that run with x, dy, dw, db or None, and add to the last two."""

    def make() -> Run:
        n, channels, height, columns = geometry.y
        width, stride = _width(channels), geometry.stride[0]
        packs, across = channels // width, -(-columns // (COLUMNS // stride))
        run = _run(n * packs * across, height, LONG_RUN)
        strips = n * across * -(-height // run)
        groups = -(-packs // 32)
        lanes = -(-packs // groups)
        rows = THREADS // lanes
        each = -(-strips // (rows * max(1, WAVE // groups)))
        shares = -(-strips // (rows * each))
        launch = kernel("depthwise", _name("depthwise_gradient", dtype, width, stride))
        add = kernel("depthwise", "add_depthwise")
        sizes = _sizes(geometry.y, geometry.x, geometry.padding, run)
        shared = 4 * rows * lanes * width
        sums = -(-10 * channels // 32)

        def gradient(x: Array, dy: Array, dw: Array, db: Array | None) -> None:
            part = context().array("depthwise gradient", (shares, 10, channels), np.float32)
            launch((groups, shares), (lanes, rows), (x, dy, part, *sizes), shared_mem=shared)
            add((sums,), (32, 8), (part, dw, db, shares, channels))

        return gradient

    return [make]
