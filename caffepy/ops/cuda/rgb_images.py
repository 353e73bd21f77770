"""Convolutions of images with three channels, 3 x 3 with a stride of 2, to few outputs, channels
last, in numbers of 16 bits: rgb_images.cu. The first of MobileNet and ShuffleNet.

The interface is that of small_convolution, of which it has the gradient of the weights, and
`moments` as of depthwise.
"""

from collections.abc import Callable
from math import prod

import numpy as np
from numpy.typing import DTypeLike

from caffepy.ops.cuda.autotune import Make, Run
from caffepy.ops.cuda.bias_relu import relu_bias_backward
from caffepy.ops.cuda.channels import DEVICE
from caffepy.ops.cuda.compiler import kernel
from caffepy.ops.cuda.context import context
from caffepy.ops.cuda.graphs import Geometry
from caffepy.ops.cuda.launch import THREADS, TYPES, Array, scratch
from caffepy.ops.cuda.small_convolution import here

BAND, PIXELS, WARPS, NUMBERS = 8, 16, 8, 32
"""As in rgb_images.cu: lines of y that a block has at a time, pixels of a warp, warps, and numbers
of a window.
"""

SHARED = 44 << 10
"""Most bytes of shared memory of a block, beside its sums."""

HELD = 3
"""Blocks that a multiprocessor holds at a time."""


def _lines(geometry: Geometry) -> int:
    """Return the bytes of the lines of x that a block needs at a time."""
    pixels = -(-geometry.y[3] // PIXELS) * PIXELS
    return (2 * BAND + 1) * -(-((pixels - 1) * 3 + 5) // 4) * 16


def suits(geometry: Geometry, dtype: DTypeLike) -> bool:
    """Return True if these kernels can do it."""
    return (
        tuple(geometry.w[1:]) == (3, 3, 3)
        and geometry.group == 1
        and geometry.y[1] in (8, 16, 24, 32)
        and tuple(geometry.stride) == (2, 2)
        and tuple(geometry.dilation) == (1, 1)
        and np.dtype(dtype).itemsize == 2
        and _lines(geometry) <= SHARED
        and max(prod(geometry.x), prod(geometry.y)) < 1 << 30
        and here().capability >= 80
    )


def _name(name: str, geometry: Geometry, dtype: DTypeLike) -> str:
    return f"rgb_{name}<{TYPES[np.dtype(dtype).name]}, {geometry.y[1]}>"


def _blocks(geometry: Geometry) -> int:
    bands = geometry.y[0] * -(-geometry.y[2] // BAND)
    return max(1, min(bands, HELD * DEVICE))


def _sizes(geometry: Geometry) -> tuple[int, ...]:
    return geometry.x[0], *geometry.x[2:], *geometry.y[2:], *geometry.padding


def moments(
    geometry: Geometry, dtype: DTypeLike
) -> Callable[[Array, Array, Array], tuple[Array, int]]:
    """Return what runs with x, w, y; it returns partial sums of y and y^2, and into how many each
    is split.
    """
    launch, blocks = kernel("rgb_images", _name("moments", geometry, dtype)), _blocks(geometry)
    shared, sizes = _lines(geometry), _sizes(geometry)

    def call(x: Array, w: Array, y: Array) -> tuple[Array, int]:
        partial = scratch("channels", 2 * blocks * geometry.y[1])
        launch((blocks,), (THREADS,), (x, w, y, partial, *sizes), shared_mem=shared)
        return partial, blocks

    return call


def backward_weight(geometry: Geometry, dtype: DTypeLike) -> list[Make]:
    """Return candidates that run with x, dy, dw, db or None, and add to the last two."""
    outputs = geometry.y[1]

    def make() -> Run:
        launch, blocks = kernel("rgb_images", _name("gradient", geometry, dtype)), _blocks(geometry)
        add, sizes = kernel("rgb_images", "rgb_add"), _sizes(geometry)
        shared = max(_lines(geometry), 4 * WARPS * NUMBERS * outputs)

        def gradient(x: Array, dy: Array, dw: Array, db: Array | None) -> None:
            part = context().array("rgb gradient", (blocks, NUMBERS, outputs), np.float32)
            launch((blocks,), (THREADS,), (x, dy, part, *sizes), shared_mem=shared)
            add((NUMBERS * outputs // 32,), (32, 32), (part, dw, blocks, outputs))
            if db is not None:
                relu_bias_backward(None, dy, db)

        return gradient

    return [make]
