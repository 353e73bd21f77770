"""Gradients of the weights of convolutions in tf32, channels last, by tensor cores
(filter_gradient.cu, which has the picture).

Libraries are slow at this one: the fast products of Hopper want both factors by pixels, where here
they lie by channels, and of an image with few channels little is left to multiply.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from functools import cache, partial
from math import prod
from typing import Any, ClassVar

import numpy as np
from numpy.typing import DTypeLike

from caffepy.device import math_mode
from caffepy.ops.cuda.autotune import Make, Run
from caffepy.ops.cuda.bias_relu import relu_bias_backward
from caffepy.ops.cuda.compiler import kernel
from caffepy.ops.cuda.context import context
from caffepy.ops.cuda.graphs import Geometry
from caffepy.ops.cuda.launch import Array
from caffepy.ops.cuda.small_convolution import here

LEAST = 1 << 28
"""Least number of multiplications: for fewer other ways are as fast."""

PIXELS, SEEN = 14, 18
"""Most pixels of a line of a run, and about the most that a kernel of three columns sees of its
lines: more do not fit into shared memory. Sizes of images are multiples of 7.
"""

FEW, NUMBERS, LINES = 4, 5, 16
"""Most channels of an image with few, eights of numbers of a line that its kernel sees, and lines
of the kernel.
"""

RATE, BYTES, START = 400, 2000, 2500
"""For the choice of the number of shares: multiplications a cycle of a multiprocessor, bytes a
cycle of the device, and cycles until a block multiplies.
"""

SHARES = 64
"""Most shares of the pixels, if these are enough for all multiprocessors."""

REGISTERS, OF_THREAD = 1 << 16, 128
"""Of a multiprocessor, and of a thread of `line_gradient`, about."""


def _padded(floats: int) -> int:
    """Return the floats from a run to the next: `apart` of filter_gradient.cu."""
    return (floats + 23) // 32 * 32 + 8


@dataclass(frozen=True)
class Tiling(ABC):
    """How a kernel divides its work. The fields are the arguments of its template, in order."""

    kernel: ClassVar[str]
    others: ClassVar[int] = 0
    """Threads of a block that copy for those that multiply."""

    width: int  # of a run of pixels
    high: int  # its lines

    @property
    @abstractmethod
    def tile(self) -> tuple[int, int, int]:
        """Outputs, lines of the kernel and channels of a block."""

    @property
    @abstractmethod
    def sums(self) -> int:
        """Sums of a thread."""

    @property
    @abstractmethod
    def threads(self) -> int:
        """Threads of a block that multiply."""

    @property
    @abstractmethod
    def shared(self) -> int:
        """Bytes of shared memory of a block."""

    @property
    @abstractmethod
    def held(self) -> int:
        """Blocks that a multiprocessor holds at a time."""


@dataclass(frozen=True)
class FewTiling(Tiling):
    """That of `line_gradient`."""

    kernel = "line_gradient"

    m: int  # sixteens of outputs
    lines: int
    j: int  # eights of numbers that a line of the kernel sees
    channels: int
    stride: int
    stages: int

    @property
    def tile(self) -> tuple[int, int, int]:
        return 16 * self.m, self.lines, self.channels

    @property
    def sums(self) -> int:
        return 4 * self.m * self.j

    @property
    def threads(self) -> int:
        return 32 * self.lines

    @property
    def shared(self) -> int:
        run = self.width * self.high
        line = (self.width - 1) * self.stride * self.channels + 8 * self.j
        of_dy, of_x = _padded((run + run % 2) * 16 * self.m), _padded(self.high * line)
        return 16 * self.stages * (of_dy + self.lines * of_x)

    @property
    def held(self) -> int:
        by_registers = REGISTERS // (OF_THREAD * self.threads)
        return max(1, min(by_registers, here().shared // (self.shared + 1024)))


@dataclass(frozen=True)
class WideTiling(Tiling):
    """That of `filter_gradient`, for compute capability 9.0."""

    kernel = "filter_gradient"
    others = 128

    lines: int
    blocks: int  # of 64 channels
    columns: int
    outputs: int
    dilation: int

    @property
    def tile(self) -> tuple[int, int, int]:
        return self.outputs, self.lines, 64 * self.blocks

    @property
    def sums(self) -> int:
        return self.columns * self.outputs // 2

    @property
    def threads(self) -> int:
        return 128 * self.lines * self.blocks

    @property
    def shared(self) -> int:
        seen = self.width + (self.columns - 1) * self.dilation
        of_dy = _padded(self.width * self.high * self.outputs)
        of_x = _padded(self.high * seen * 64 * self.blocks)
        turned = (self.high * (self.width + 1) + 1) * self.outputs * 4
        return 4 * (2 * turned + 2 * 4 * of_dy + 3 * 4 * self.lines * of_x)

    @property
    def held(self) -> int:
        return 1


OF_COLUMNS = {3: ((1, 2, 128), (3, 1, 64)), 5: ((1, 2, 64), (2, 1, 64))}
"""Lines, blocks of channels and outputs of wide tilings, for each number of columns of a kernel."""


def suits(geometry: Geometry, dtype: DTypeLike) -> bool:
    """Return True if these kernels may be faster than cuDNN."""
    return (
        np.dtype(dtype) == np.float32
        and math_mode.current().precision == "tf32"
        and len(geometry.stride) == 2
        and geometry.operations >= 2 * LEAST
        and max(prod(geometry.x), prod(geometry.y)) < 1 << 31
        and bool(_tilings(geometry, here()))
    )


def backward_weight(geometry: Geometry, dtype: DTypeLike) -> list[Make]:
    """Return candidates that run with x, dy, dw, db or None, and add to the last two."""
    return [partial(_plan, geometry, tiling) for tiling in _tilings(geometry, here())]


@cache
def _tilings(geometry: Geometry, _device: Any) -> list[Tiling]:
    return [tiling for tiling in _all_tilings(geometry) if tiling.shared <= here().shared]


def _all_tilings(geometry: Geometry) -> Iterator[Tiling]:
    outputs, channels, lines, columns = geometry.w
    outputs //= geometry.group
    run = _run(geometry.y[3])
    if outputs % 4:
        return
    if channels <= FEW and geometry.group == 1:
        j, alone = -(-columns * channels // 8), geometry.dilation == (1, 1)
        if here().capability >= 80 and j <= NUMBERS and 1 < lines <= LINES and alone:
            m = min(4, -(-outputs // 16))
            few = [
                FewTiling(*run, m, lines, j, channels, geometry.stride[1], stages)
                for stages in (4, 3, 2)
            ]
            yield from [tiling for tiling in few if tiling.shared <= here().shared][:1]
    elif here().capability == 90 and geometry.stride == (1, 1) and channels % 4 == 0:
        for down, blocks, across in OF_COLUMNS.get(columns, ()) if channels >= 16 else ():
            yield WideTiling(*run, down, blocks, columns, across, geometry.dilation[1])


def _run(wide: int) -> tuple[int, int]:
    """Return the pixels of a line of a run, and its lines, for lines of y of `wide` pixels: those
    with the fewest that are zeros, then the longest.
    """

    def zeros(choice: tuple[int, int]) -> tuple[float, int]:
        width, high = choice
        computed = -(-wide // width) * (width * high + width * high % 2) / high
        return computed / wide, -width

    most = min(wide, PIXELS)
    widths = [(width, max(1, SEEN // (width + 2))) for width in range(-(-most // 2), most + 1)]
    return min(widths, key=zeros)


def _grid(geometry: Geometry, tiling: Tiling) -> tuple[int, int]:
    """Return the number of tiles of dw, and of shares of the pixels."""
    outputs, lines, channels = tiling.tile
    to_group = geometry.w[0] // geometry.group
    tiles = geometry.group * -(-to_group // outputs)
    tiles *= -(-geometry.w[2] // lines) * -(-geometry.w[1] // channels)
    runs = -(-geometry.y[0] * geometry.y[2] // tiling.high) * -(-geometry.y[3] // tiling.width)
    pieces, slots = -(-runs // 4), here().processors * tiling.held
    sums = tiling.sums * tiling.threads
    of_piece = 4 * tiling.width * tiling.high * sums * tiling.held / RATE

    def cycles(shares: int) -> float:
        waves = -(-tiles * shares // slots)
        added = 8 * tiles * shares * sums / BYTES
        return waves * (START + -(-pieces // shares) * of_piece) + added

    most = min(pieces, max(SHARES, -(-slots // tiles)))
    return tiles, min(range(1, most + 1), key=cycles)


def _plan(geometry: Geometry, tiling: Tiling) -> Run:
    tiles, shares = _grid(geometry, tiling)
    arguments = ", ".join(map(str, astuple(tiling)))
    run: Any = kernel("filter_gradient", f"{tiling.kernel}<{arguments}>")
    run.max_dynamic_shared_size_bytes = tiling.shared
    add = kernel("filter_gradient", f"add_{tiling.kernel}<{arguments}>")
    sizes = (
        *(geometry.x[0], *geometry.x[2:], geometry.x[1], *geometry.y[2:], geometry.y[1]),
        *(geometry.w[1], geometry.w[0] // geometry.group, *geometry.w[2:]),
        *(geometry.stride[0], geometry.dilation[0], *geometry.padding, shares),
    )
    threads, shared = tiling.threads, tiling.shared

    def gradient(x: Array, dy: Array, dw: Array, db: Array | None) -> None:
        sums = tiles * tiling.sums * threads
        part = context().array("filter gradient", (shares, sums), np.float32)
        given = x, dy, part, *sizes
        run((tiles, shares), (threads + tiling.others,), given, shared_mem=shared)
        add((tiles, tiling.sums), (threads,), (part, dw, *sizes))
        if db is not None:
            relu_bias_backward(None, dy, db)

    return gradient
