"""Convolutions of images with few channels, such as a net's first one: forward, and the gradients
of weights and bias with the mask of the ReLU behind it, in one pass over dy and y
(few_channels.cu).
"""

from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from caffepy.ops.cuda.autotune import Make, Run
from caffepy.ops.cuda.compiler import kernel, prefetch
from caffepy.ops.cuda.context import context
from caffepy.ops.cuda.graphs import Geometry
from caffepy.ops.cuda.launch import THREADS, TYPES, Array, divisor
from caffepy.ops.cuda.small_convolution import here

ROWS, OUTPUTS = 32, 64
"""Weights of an output, with its bias, and outputs of a block, as in few_channels.cu."""

LINES, SHARED = 8, 40 << 10
"""Most lines of y that a block takes at a time; most bytes of shared memory."""

AHEAD = 2 * 8 * 16 * THREADS
"""Bytes of shared memory of a gradient for what threads load before they need it."""

RESIDENT = 2
"""Blocks of a multiprocessor."""

LEAST = 1 << 24
"""Least number of elements of y: for fewer other ways are as fast."""


def _pitch(geometry: Geometry) -> int:
    """Return the words of a line of x: those that whole steps of 16 positions see."""
    positions = -(-geometry.y[3] // 16) * 16
    pixels = (positions - 1) * geometry.stride[1] + (geometry.w[3] - 1) * geometry.dilation[1] + 1
    return pixels * geometry.x[1]


def _shared(geometry: Geometry, lines: int) -> int:
    """Return the bytes of shared memory for `lines` lines of y."""
    seen = (lines - 1) * geometry.stride[0] + (geometry.w[2] - 1) * geometry.dilation[0] + 1
    return 4 * max(seen * _pitch(geometry), ROWS * OUTPUTS)


def _room(ahead: int) -> int:
    """Return the bytes of shared memory for lines of x beside `ahead` others."""
    return min(SHARED, here().shared - ahead)


def suits(geometry: Geometry, dtype: DTypeLike) -> bool:
    """Return True if the gradient's kernel takes this convolution and may be the fastest way."""
    return (
        geometry.group == 1
        and len(geometry.stride) == 2
        and prod(geometry.w[1:]) < ROWS
        and geometry.w[0] % OUTPUTS == 0
        and prod(geometry.y) >= LEAST
        and np.dtype(dtype).itemsize == 2
        and here().capability >= 80
        and _shared(geometry, 1) <= _room(AHEAD)
    )


class _Work(NamedTuple):
    """The division of a convolution among blocks."""

    name: str  # of the kernel
    numbers: tuple[np.int32, ...]
    divisors: tuple[int, ...]
    grid: tuple[int, int]
    shared: int

    def launch(self, *arrays: Any) -> None:
        run: Any = kernel("few_channels", self.name)
        run.max_dynamic_shared_size_bytes = self.shared
        given = *arrays, *self.numbers, *self.divisors
        run(self.grid, (THREADS,), given, shared_mem=self.shared)


def _work(
    name: str, geometry: Geometry, dtype: DTypeLike, variant: str = "", ahead: int = 0
) -> _Work:
    full = f"{name}<{TYPES[np.dtype(dtype).name]}{variant}>"
    prefetch("few_channels", [full])
    lines = max(n for n in range(1, LINES + 1) if _shared(geometry, n) <= _room(ahead))
    tiles = geometry.y[0] * -(-geometry.y[2] // lines)
    pitch, steps = _pitch(geometry), -(-geometry.y[3] // 16)
    sizes = (*geometry.x, *geometry.y[1:], *geometry.w[2:], *geometry.dilation)
    numbers = (*sizes, *geometry.stride, *geometry.padding, lines, pitch)
    grid = min(tiles, RESIDENT * here().processors), geometry.w[0] // OUTPUTS
    divisors = divisor(pitch), divisor(steps)
    return _Work(
        full, tuple(map(np.int32, numbers)), divisors, grid, ahead + _shared(geometry, lines)
    )


def forward(geometry: Geometry, dtype: DTypeLike, relu: bool) -> list[Make]:
    """Return candidates that run with x, w, b or None, y."""
    channels, _, width = geometry.w[1:]
    depth = geometry.w[2] * (-(-width * channels // 2) * 2)
    if geometry.dilation[1] > 1 or depth > ROWS:
        return []

    def make() -> Run:
        work = _work("few_channels", geometry, dtype, f", {-(-depth // 16)}")
        return lambda x, w, b, y: work.launch(x, w, b, y, np.int32(relu))

    return [make]


def backward_weight_relu(geometry: Geometry, dtype: DTypeLike) -> Run:
    """Return what runs with x, y, dy, dw, db or None, and adds to the last two."""
    work = _work("few_channels_gradient", geometry, dtype, ahead=AHEAD)
    prefetch("few_channels", ["add_few_channels"])
    outputs, shares = geometry.w[0], work.grid[0]
    ends = [np.int32(n) for n in (shares, prod(geometry.w[1:]), outputs)]

    def run(x: Array, y: Array, dy: Array, dw: Array, db: Array | None) -> None:
        part = context().array("few channels", (shares, outputs * ROWS), np.float32)
        work.launch(x, y, dy, part)
        finish = kernel("few_channels", "add_few_channels")
        finish((outputs * ROWS // 32,), (THREADS,), (part, dw, db, *ends))

    return run
