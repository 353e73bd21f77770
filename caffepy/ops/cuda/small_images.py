"""Convolutions of small images of many channels in 16 bits and their gradients, by kernels that
keep whole images or lines of them in shared memory (small_images.cu), compiled for the shapes.

The cost model is that of small_convolution.py with one more kind of cost, the weights, which each
block converts.
"""

from collections.abc import Iterator
from functools import cache, partial
from itertools import product
from math import prod
from typing import Any, NamedTuple

import cupy
import numpy as np
from numpy.typing import DTypeLike

from caffepy.ops.cuda.autotune import Make, Run
from caffepy.ops.cuda.compiler import kernel
from caffepy.ops.cuda.context import context
from caffepy.ops.cuda.graphs import Geometry, Shape
from caffepy.ops.cuda.launch import TYPES, Array
from caffepy.ops.cuda.pooled_convolution import pool_name, suits_windows
from caffepy.ops.cuda.small_convolution import BYTES, DEPTH, LATENCY, OPERATIONS, here
from caffepy.ops.objects import Maxima

POSITIONS = 256
"""Largest plane for which these kernels are candidates."""

CANDIDATES = 2
"""Tilings of an operation that are timed."""

WARPS, RESIDENT = 8, 2
"""Warps of a block, and blocks that a multiprocessor holds at a time."""

MOST = 20
"""Most tiles of a warp's sums of a gradient of weights."""


class Filter(NamedTuple):
    """Arguments of the template Filter: a correlation of images (C, H, W) to O outputs."""

    image: Shape
    outputs: int
    kernel: Shape
    stride: Shape
    padding: Shape
    turned: bool

    @property
    def size(self) -> list[int]:
        """Lines and columns of the result."""
        axes = zip(self.image[1:], self.kernel, self.stride, self.padding, strict=True)
        return [(n + 2 * p - k) // s + 1 for n, k, s, p in axes]

    @property
    def steps(self) -> int:
        """Steps of 16 of the depth."""
        return prod(self.kernel) * self._blocks

    @property
    def of_output(self) -> int:
        """Words of the weights of an output in shared memory."""
        return (prod(self.kernel) * (8 * self._blocks + 1) + 3) // 8 * 8 + 4

    @property
    def tiles(self) -> int:
        """Tiles of 8 outputs."""
        return -(-self.outputs // 8)

    @property
    def _blocks(self) -> int:
        return -(-self.image[0] // 16)

    def name(self) -> str:
        """The template's name with its arguments."""
        numbers = *self.image, self.outputs, *self.kernel, *self.stride, *self.padding
        return f"Filter<{', '.join(map(str, numbers))}, {str(self.turned).lower()}>"

    def words(self, lines: int) -> int:
        """Words of the pixels of one image under `lines` lines of the result."""
        columns = (self.size[1] - 1) * self.stride[1] + self.kernel[1]
        rows = (lines - 1) * self.stride[0] + self.kernel[0]
        return rows * columns * (8 * self._blocks + 4)


class Tiling(NamedTuple):
    """The division of work in a kernel of small_images.cu."""

    cycles: float  # as estimated
    images: int  # of a piece
    lines: int  # of results of each image
    m: int  # tiles of 16 positions of a warp
    n: int  # tiles of 8 outputs of a warp
    down: int  # warps with positions of their own; the others share their depth
    shared: int  # bytes
    grid: Shape


class GradientTiling(NamedTuple):
    """The division of work in image_gradient."""

    cycles: float  # as estimated
    images: int  # of a piece
    wide: int  # warps of a block
    m: int  # tiles of 16 channels under a tap of a warp
    n: int  # tiles of 8 outputs of a warp
    shared: int  # bytes
    grid: Shape


def suits(geometry: Geometry, dtype: DTypeLike) -> bool:
    """Return True if these kernels may be faster than cuDNN."""
    channels, outputs = geometry.x[1], geometry.y[1]
    return (
        np.dtype(dtype).itemsize == 2
        and here().capability >= 80
        and len(geometry.stride) == 2
        and geometry.group == prod(geometry.dilation) == 1
        and 1 < prod(geometry.w[2:]) <= DEPTH // max(channels, outputs)
        and channels % 2 == outputs % 2 == 0
        and min(channels, outputs) >= 16
        and max(prod(geometry.x[2:]), prod(geometry.y[2:])) <= POSITIONS
        and 0 < geometry.operations <= OPERATIONS
    )


def forward(geometry: Geometry, dtype: DTypeLike, relu: bool) -> list[Make]:
    """Return candidates that run with x, w, b or None, y."""
    if not suits(geometry, dtype):
        return []
    kernel_size, outputs = geometry.w[2:], geometry.w[0]
    sizes = geometry.x[1:], outputs, kernel_size, geometry.stride, geometry.padding
    return _candidates(Filter(*sizes, False), geometry.x[0], dtype, relu)


def forward_maxima(geometry: Geometry, maxima: Maxima, dtype: DTypeLike) -> list[Make]:
    """Return candidates that run with x, w, b or None, an output, maxima."""
    if not (suits(geometry, dtype) and suits_windows(geometry, maxima, dtype)):
        return []
    sizes = geometry.x[1:], geometry.w[0], geometry.w[2:], geometry.stride, geometry.padding
    return _candidates(Filter(*sizes, False), geometry.x[0], dtype, maxima.relu, maxima)


def backward_data(geometry: Geometry, dtype: DTypeLike) -> list[Make]:
    """Return candidates that run with dy, w, dx, if strides are 1."""
    kernel_size = geometry.w[2:]
    before = tuple(k - 1 - p for k, p in zip(kernel_size, geometry.padding, strict=True))
    if not suits(geometry, dtype) or prod(geometry.stride) > 1 or min(before) < 0:
        return []
    sizes = geometry.y[1:], geometry.x[1], kernel_size, geometry.stride, before
    found = _candidates(Filter(*sizes, True), geometry.x[0], dtype, False)

    def make(candidate: Make) -> Run | None:
        run = candidate()
        return run and (lambda dy, w, dx: run(dy, w, None, dx))

    return [partial(make, candidate) for candidate in found]


def backward_weight(geometry: Geometry, dtype: DTypeLike) -> list[Make]:
    """Return candidates that run with x, dy, dw, db or None, and add to the last two."""
    if not suits(geometry, dtype):
        return []
    sizes = geometry.x[1:], geometry.w[0], geometry.w[2:], geometry.stride, geometry.padding
    filters, number = Filter(*sizes, False), geometry.x[0]
    best: dict[Shape, GradientTiling] = {}
    for tiling in sorted(_gradient_tilings(cupy.cuda.runtime.getDevice(), filters, number)):
        best.setdefault(tiling.grid[1:], tiling)
    chosen = list(best.values())[:CANDIDATES]
    return [partial(_plan_gradient, filters, number, np.dtype(dtype), each) for each in chosen]


def _candidates(
    filters: Filter, number: int, dtype: DTypeLike, relu: bool, maxima: Maxima | None = None
) -> list[Make]:
    """Return the best tilings; of whole planes for maxima, and what is made takes these then."""
    best: dict[tuple[int, int], Tiling] = {}
    for tiling in sorted(_tilings(cupy.cuda.runtime.getDevice(), filters, number)):
        if maxima is None or tiling.lines == filters.size[0]:
            best.setdefault((tiling.down, tiling.grid[1]), tiling)
    given = filters, number, np.dtype(dtype), relu
    pool = "NoPool" if maxima is None else pool_name(maxima)
    return [partial(_plan, *given, each, pool) for each in list(best.values())[:CANDIDATES]]


@cache
def _tilings(device: int, filters: Filter, number: int) -> list[Tiling]:
    """Return all tilings that fit into shared memory and registers."""
    return list(_fitting(filters, number))


def _fitting(filters: Filter, number: int) -> Iterator[Tiling]:
    height, width = filters.size
    wide = filters.tiles
    processors = here().processors
    whole = [(images, height) for images in (8, 4, 2, 1)]
    for images, lines in [*whole, *((1, -(-height // k)) for k in (2, 3, 4))]:
        pieces = -(-number // images) * -(-height // lines)
        tiles = -(-images * lines * width // 16)
        for across in range(-(-wide // 4), wide + 1):
            n = -(-wide // across)
            for down in (1, 2, 4, 8):
                m, split = -(-tiles // down), WARPS // down
                if m > 4 or (across - 1) * n >= wide:
                    continue
                parts = 128 * WARPS * (m - m // split) * n if split > 1 else 0
                pixels = images * filters.words(lines)
                outputs = images * lines * width * 4 * (n | 1)
                shared = 4 * (8 * n * filters.of_output + max(pixels, parts, outputs))
                if shared > here().shared:
                    continue
                resident = max(1, min(RESIDENT, here().shared // (shared + 1024)))
                grid = min(pieces, max(1, processors * resident // across)), across
                together = min(resident, -(-prod(grid) // processors))
                weights = 8 * n * filters.image[0] * prod(filters.kernel)
                work = 4 * pixels / BYTES + _cycles(filters.steps, m, n, down) + parts / 16
                work += 16 * m * down * 8 * n * 2 / BYTES
                rounds = -(-pieces // grid[0])
                cycles = 2 * LATENCY + together * weights * 4 / BYTES
                cycles += rounds * (LATENCY + together * work)
                yield Tiling(cycles, images, lines, m, n, down, shared, grid)


def _cycles(steps: int, m: int, n: int, down: int) -> float:
    """Return the cycles of a multiprocessor for the products of a block: loads, tensor cores or the
    latency of steps, as in small_convolution.py.
    """
    split = WARPS // down
    return max(
        steps * down * (4 * m + 2 * n),
        steps * down * m * n * 1.6,
        steps / split * (40 + 2 * m * n),
    )


def _plan(
    filters: Filter,
    number: int,
    dtype: "np.dtype[Any]",
    relu: bool,
    tiling: Tiling,
    pool: str = "NoPool",
) -> Run:
    """Return what runs with the source, w, b or None, the target, and maxima if there is a pool."""
    _, images, lines, m, n, down, shared, grid = tiling
    tiles = f"{images}, {lines}, {m}, {n}, {down}, {str(relu).lower()}, {pool}"
    found: Any = kernel(
        "small_images", f"image_convolution<{TYPES[dtype.name]}, {filters.name()}, {tiles}>"
    )
    found.max_dynamic_shared_size_bytes = here().shared

    def run(x: Array, w: Array, b: Array | None, y: Array, maxima: Maxima | None = None) -> None:
        to = (y, None) if maxima is None else (maxima.y, maxima.where)
        found(grid, (32 * WARPS,), (x, w, b, *to, np.int32(number)), shared_mem=shared)

    return run


@cache
def _gradient_tilings(device: int, filters: Filter, number: int) -> list[GradientTiling]:
    """Return all tilings that fit into shared memory and registers."""
    return list(_fitting_gradient(filters, number))


def _fitting_gradient(filters: Filter, number: int) -> Iterator[GradientTiling]:
    (height, width), processors = filters.size, here().processors
    ways = product((1, 2, 4, 8), (8, 10, 12), range(1, 7), range(1, filters.tiles + 1))
    for images, wide, m, across in ways:
        n, down = -(-filters.tiles // across), -(-filters.steps // (wide * m))
        if n > 4 or (across - 1) * n >= filters.tiles or m * n > MOST or images > number:
            continue
        steps = -(-images * height * width // 16)
        words = images * filters.words(height) + steps * 16 * 4 * (n | 1) + 4
        if 8 * words > here().shared:
            continue
        resident = 1 if m * n > 8 else max(1, min(RESIDENT, here().shared // (8 * words + 1024)))
        pieces, blocks = -(-number // images), across * down
        shares = min(pieces, max(1, processors * resident // blocks))
        rounds = -(-pieces // shares)
        shares = -(-pieces // rounds)
        together = min(resident, -(-shares * blocks // processors))
        products = steps * wide * max(4 * m + 2 * n, 1.6 * m * n)
        work = max(together * max(products, 4 * words / BYTES), steps * (60 + 2.5 * m * n))
        sums = wide * m * n * 128 + 8 * n
        ends = together * sums * 4 / BYTES + shares * blocks * sums * 4 / BYTES / processors
        cycles = 4 * LATENCY + 8 * words / 128 + rounds * (300 + work) + ends + shares / 8 * 60
        yield GradientTiling(cycles, images, wide, m, n, 8 * words, (shares, across, down))


def _plan_gradient(
    filters: Filter, number: int, dtype: "np.dtype[Any]", tiling: GradientTiling
) -> Run:
    """Return what runs with x, dy, dw, db or None."""
    _, images, wide, m, n, shared, grid = tiling
    sizes, tiles = filters.name(), f"{wide}, {m}, {n}"
    name = f"image_gradient<{TYPES[dtype.name]}, {sizes}, {images}, {tiles}>"
    found: Any = kernel("small_images", name)
    found.max_dynamic_shared_size_bytes = here().shared
    finish = kernel("small_images", f"add_image_gradient<{sizes}, {tiles}>")
    shares, across, down = grid
    sums = across * down * (wide * m * n * 128 + 8 * n)

    def both(x: Array, dy: Array, dw: Array, db: Array | None) -> None:
        part = context().array("image gradient", (shares, sums), np.float32)
        found(grid, (32 * wide,), (x, dy, part, np.int32(number)), shared_mem=shared)
        numbers = (np.int32(k) for k in (shares, across, sums))
        finish((-(-sums // 32),), (32 * WARPS,), (part, dw, db, *numbers))

    return both
