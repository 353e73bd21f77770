"""Convolutions of small images by kernels of our own (small_convolution.cu), one launch each;
gradients of weights and bias take two.

Libraries are made for large problems: for small images or few channels they pad pixels, rearrange
weights and leave multiprocessors idle. Here the tilings with the fewest estimated cycles are
candidates for the autotuner.

The cost model. A block keeps the weights of 8n outputs in shared memory and goes through `rounds`
pieces of the source, of `images` * `lines`. A warp makes 16m x 8n sums, m * n tiles of the
instruction mma (16 x 8 sums, depth 8 words); `split` warps share the depth of the same sums.

    block  = LATENCY + weights + rounds * (LATENCY + fetch + products + split sums + write)
    weights, fetch, write = bytes / BYTES, or the cycles to issue the loads if those are more
    products = the largest of what a multiprocessor needs for `steps` of depth (_cycles):
        shared memory  each step of a warp has 4m loads of x, 2n of w, 2 of offsets: 1 cycle each
        tensor cores   1.6 cycles an mma
        latency        a warp's steps follow each other: 30 cycles, and 2 for each of its mma

Blocks on the same multiprocessor (`resident`) share its rates, not its latencies. The constants are
rough: only the order of the tilings matters, and the best of them are timed.
"""

from collections.abc import Iterator
from functools import cache, partial
from itertools import product
from math import prod
from typing import Any, NamedTuple

import cupy
import numpy as np
from numpy.typing import DTypeLike

from caffepy.device import math_mode
from caffepy.ops.cuda.autotune import Make, Run
from caffepy.ops.cuda.compiler import kernel
from caffepy.ops.cuda.context import context
from caffepy.ops.cuda.graphs import Geometry, Shape
from caffepy.ops.cuda.launch import TYPES, Array, divisor

OPERATIONS, DEPTH = 4e9, 2048
"""Largest convolution, in operations, and longest depth for which these kernels are candidates."""

CANDIDATES = 2
"""Tilings of an operation that are timed."""

TILES = [(m, n) for n in (1, 2, 3, 4, 5, 7) for m in range(1, 9) if m * n <= 16]
"""(m, n): tiles of 16 rows and 8 columns of a warp; its sums must fit into registers."""

WARPS, SPLITS = (8, 16), (1, 2, 4, 8, 16)

BYTES = 20
"""Bytes a cycle that a multiprocessor gets from device memory while all others do so too."""

LATENCY = 600
"""Cycles until fetched data can be used, or until a block starts."""


class Tiling(NamedTuple):
    """The division of work in a kernel of small_convolution.cu."""

    cycles: float  # as estimated
    m: int  # tiles of 16 rows of a warp
    n: int  # tiles of 8 columns of a warp
    warps: int
    split: int  # warps that divide the depth of the same sums
    images: int  # of a piece, which a block keeps at a time
    lines: int  # of results of each image
    shared: int  # bytes

    @property
    def groups(self) -> int:
        """Groups of warps with rows of their own."""
        return self.warps // self.split


class _Device(NamedTuple):
    processors: int
    shared: int
    capability: int


@cache
def _device(index: int) -> _Device:
    found = cupy.cuda.runtime.getDeviceProperties(index)
    return _Device(
        found["multiProcessorCount"],
        found["sharedMemPerBlockOptin"],
        10 * found["major"] + found["minor"],
    )


def here() -> _Device:
    """Return what the current device has."""
    return _device(cupy.cuda.runtime.getDevice())


def suits(geometry: Geometry, dtype: DTypeLike) -> bool:
    """Return True if these kernels may be faster than cuDNN, in a type that tensor cores take."""
    taps = prod(geometry.w[2:])
    return (
        geometry.group == 1
        and len(geometry.stride) == 2
        and 1 < taps <= DEPTH // max(geometry.w[:2])
        and 0 < geometry.operations <= OPERATIONS
        and max(prod(geometry.x), prod(geometry.y)) < 1 << 30
        and (np.dtype(dtype).itemsize == 2 or math_mode.current().precision != "fp32")
        and here().capability >= 80
    )


def forward(geometry: Geometry, dtype: DTypeLike, relu: bool) -> list[Make]:
    """Return candidates that run with x, w, b or None, y."""
    ways = _best(cupy.cuda.runtime.getDevice(), _Correlation, geometry, np.dtype(dtype))
    return [partial(work.plan, tiling, relu) for work, tiling in ways]


def backward_data(geometry: Geometry, dtype: DTypeLike) -> list[Make]:
    """Return candidates that run with dy, w, dx."""
    ways = _best(cupy.cuda.runtime.getDevice(), _Correlation, geometry, np.dtype(dtype), True)

    def make(correlation: _Correlation, tiling: Tiling) -> Run:
        run = correlation.plan(tiling, False)
        return lambda dy, w, dx: run(dy, w, None, dx)

    return [partial(make, *way) for way in ways]


def backward_weight(geometry: Geometry, dtype: DTypeLike) -> list[Make]:
    """Return candidates that run with x, dy, dw, db or None, and add to the last two."""
    ways = _best(cupy.cuda.runtime.getDevice(), _WeightGradient, geometry, np.dtype(dtype))
    return [partial(work.plan, tiling) for work, tiling in ways]


@cache
def _best(device: int, kind: Any, *problem: Any) -> list[tuple[Any, Tiling]]:
    """Return the work of a kind on a problem with its best tilings, each with another `split`."""
    work = kind(*problem)
    best: dict[int, Tiling] = {}
    for tiling in work.tilings():
        if tiling.split not in best or tiling < best[tiling.split]:
            best[tiling.split] = tiling
    return [(work, tiling) for tiling in sorted(best.values())[:CANDIDATES]]


def _divisions(outputs: int, most: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (m, n, warps, split) of tilings for `outputs`, with a split of at most `most`."""
    for (m, n), warps, split in product(TILES, WARPS, SPLITS):
        if 8 * n < outputs + 8 and split <= min(warps, most):
            yield m, n, warps, split


def _pieces(capacity: int, number: int, lines: int, columns: int) -> tuple[int, int] | None:
    """Return how many images, and lines of each, fit into this many rows, in pieces of about one
    size.
    """
    if lines * columns <= capacity:
        images = min(number, capacity // (lines * columns))
        return -(-number // -(-number // images)), lines
    most = capacity // columns
    return (1, -(-lines // -(-lines // most))) if most else None


def _window(out: Shape, step: Shape, taps: Shape, dilation: Shape) -> list[int]:
    """Return the lines and columns of a source that `out` of the result depend on."""
    axes = zip(out, step, taps, dilation, strict=True)
    return [(n - 1) * s + (k - 1) * d + 1 for n, s, k, d in axes]


def _tiles(tiling: Tiling, shape: Shape) -> int:
    """Return the number of pieces of an array of this shape."""
    return -(-shape[0] // tiling.images) * -(-shape[2] // tiling.lines)


def _resident(tiling: Tiling) -> int:
    """Return how many blocks a multiprocessor holds at a time."""
    return max(1, min(here().shared // (tiling.shared + 1024), 16 // tiling.warps))


def _name(name: str, dtype: DTypeLike, tiling: Tiling) -> str:
    return f"{name}<{TYPES[np.dtype(dtype).name]}, {tiling.m}, {tiling.n}>"


def _prepare(name: str, dtype: np.dtype[Any], tiling: Tiling) -> Run:
    found: Any = kernel("small_convolution", _name(name, dtype, tiling))
    found.max_dynamic_shared_size_bytes = here().shared
    return partial(found, block=(32 * tiling.warps,), shared_mem=tiling.shared)


def _cycles(tiling: Tiling, steps: float) -> float:
    """Return the cycles of a multiprocessor for the products of a block (module docstring)."""
    m, n = tiling.m, tiling.n
    return max(
        steps * tiling.groups * (4 * m + 2 * n + 2),
        steps * tiling.groups * m * n * 1.6,
        steps / tiling.split * (30 + 2 * m * n),
    )


class _Correlation:
    """target = sum over taps of source * weight: y from x or, `backward`, dx from dy, spread by the
    stride, with the kernel flipped.
    """

    def __init__(self, geometry: Geometry, dtype: DTypeLike, backward: bool = False) -> None:
        self.dtype, self.backward = np.dtype(dtype), backward
        self.taps, self.dilation = geometry.w[2:], geometry.dilation
        one: Shape = (1, 1)
        if backward:
            self.source, self.target = geometry.y, geometry.x
            self.step, self.spread = one, geometry.stride
            axes = zip(self.taps, self.dilation, geometry.padding, strict=True)
            self.before = tuple((k - 1) * d - p for k, d, p in axes)
        else:
            self.source, self.target = geometry.x, geometry.y
            self.step, self.spread, self.before = geometry.stride, one, geometry.padding
        self.words = -(-self.source[1] * self.dtype.itemsize // 4)  # of a pixel
        self.steps = -(-self.words * prod(self.taps) // 8)

    def window(self, lines: int) -> list[int]:
        return _window((lines, self.target[3]), self.step, self.taps, self.dilation)

    def tilings(self) -> Iterator[Tiling]:
        """Yield all tilings that fit into shared memory."""
        number, outputs, *out = self.target
        line = (self.steps | 1) * 8
        for m, n, warps, split in _divisions(outputs, self.steps):
            piece = _pieces(16 * m * (warps // split), number, *out)
            if piece is None:
                continue
            images, lines = piece
            pixels = images * prod(self.window(lines))
            parts = 128 * m * n * warps if split > 1 else 0
            shared = 4 * (8 * self.steps + 8 * n * line + max(pixels * (self.words | 1), parts))
            if shared <= here().shared:
                tiling = Tiling(0, m, n, warps, split, images, lines, shared)
                yield tiling._replace(cycles=self._cycles(tiling, pixels))

    def _grid(self, tiling: Tiling) -> tuple[int, int]:
        across = -(-self.target[1] // (8 * tiling.n))
        blocks = max(1, here().processors * _resident(tiling) // across)
        return min(_tiles(tiling, self.target), blocks), across

    def _cycles(self, tiling: Tiling, pixels: int) -> float:
        blocks, across = self._grid(tiling)
        rounds = -(-_tiles(tiling, self.target) // blocks)
        resident = min(_resident(tiling), -(-blocks * across // here().processors))
        weights = 8 * tiling.n * self.source[1] * prod(self.taps) * 4 / BYTES
        fetched = pixels * self.words * max(0.15, 4 / BYTES)
        written = 16 * tiling.m * tiling.groups * 8 * tiling.n * self.dtype.itemsize / BYTES
        sums = 8 * tiling.warps * tiling.m * tiling.n + 200 if tiling.split > 1 else 0
        work = fetched + written + sums + _cycles(tiling, self.steps)
        return LATENCY + resident * weights + rounds * (LATENCY + resident * work)

    def plan(self, tiling: Tiling, relu: bool) -> Run:
        """Return what runs with the source, w, b or None, the target."""
        rows, columns = self.window(tiling.lines)
        sizes = (*self.source, *self.target[1:], *self.taps, *self.dilation, *self.step)
        how = (*self.spread, *self.before, self.backward, relu)
        pieces = (tiling.images, tiling.lines, tiling.split)
        divisors = [divisor(d) for d in (self.words, columns, rows, prod(self.taps))]
        arguments = (*(np.int32(n) for n in (*sizes, *how, *pieces)), *divisors)
        run, grid = _prepare("small_convolution", self.dtype, tiling), self._grid(tiling)
        return lambda x, w, b, y: run(grid, args=(x, w, b, y, *arguments))


class _WeightGradient:
    """The gradient of weights and bias."""

    def __init__(self, geometry: Geometry, dtype: DTypeLike) -> None:
        self.geometry, self.dtype = geometry, np.dtype(dtype)
        self.each = 4 // self.dtype.itemsize  # positions of a word
        self.taps = prod(geometry.w[2:])
        self.length = geometry.w[1] * self.taps
        self.across = -(-geometry.y[3] // self.each)

    def window(self, lines: int) -> list[int]:
        geometry, out = self.geometry, (lines, self.across * self.each)
        return _window(out, geometry.stride, geometry.w[2:], geometry.dilation)

    def channels(self, rows: int) -> int:
        """Return the most channels that a block of this many rows contains."""
        return max(
            (min(first + rows, self.length) - 1) // self.taps - first // self.taps + 1
            for first in range(0, self.length, rows)
        )

    def tilings(self) -> Iterator[Tiling]:
        number, outputs, height, width = self.geometry.y
        for m, n, warps, split in _divisions(outputs, max(SPLITS)):
            rows = 16 * m * (warps // split)
            if rows >= self.length + 16 * m:
                continue
            channels = self.channels(rows)
            for positions in (64, 128, 256, 512):
                piece = _pieces(max(positions, width), number, height, width)
                assert piece is not None
                images, lines = piece
                steps = -(-images * lines * self.across // 8)
                pixels = images * prod(self.window(lines))
                parts = 128 * m * n * warps if split > 1 else 0
                right = 8 * steps * (8 * (n | 1) + 1)
                shared = 4 * (right + 32 * warps + max(pixels * (channels | 1), parts))
                if shared <= here().shared:
                    tiling = Tiling(0, m, n, warps, split, images, lines, shared)
                    yield tiling._replace(cycles=self._cycles(tiling, channels, pixels, steps))

    def _grid(self, tiling: Tiling) -> tuple[int, int, int]:
        tiles = _tiles(tiling, self.geometry.y)
        down = -(-self.length // (16 * tiling.m * tiling.groups))
        across = -(-self.geometry.y[1] // (8 * tiling.n))
        blocks = here().processors * _resident(tiling)
        shares = min(tiles, max(1, blocks // (down * across)))
        return -(-tiles // -(-tiles // shares)), down, across

    def _cycles(self, tiling: Tiling, channels: int, pixels: int, steps: int) -> float:
        shares, down, across = self._grid(tiling)
        processors, outputs = here().processors, self.geometry.y[1]
        rounds = -(-_tiles(tiling, self.geometry.y) // shares)
        resident = min(_resident(tiling), -(-shares * down * across // processors))
        fetched = pixels * channels * max(0.17 * self.each, 4 / BYTES)
        fetched += 8 * steps * min(outputs, 8 * tiling.n) * max(0.1 * self.each, 4 / BYTES)
        sums = 128 * tiling.m * tiling.n * tiling.groups
        ends = LATENCY + resident * sums * (tiling.split / 16 + 4 / BYTES)
        added = sums * shares * down * across * 4 / BYTES / processors
        finish = 2 * LATENCY + added + shares / 8 * 60
        work = rounds * (LATENCY + resident * (fetched + _cycles(tiling, steps)))
        return LATENCY + work + ends + finish

    def plan(self, tiling: Tiling) -> Run:
        """Return what runs with x, dy, dw, db or None."""
        geometry = self.geometry
        outputs, (shares, down, across) = geometry.y[1], self._grid(tiling)
        rows, columns = self.window(tiling.lines)
        most = self.channels(16 * tiling.m * tiling.groups)
        sizes = (*geometry.x, *geometry.y[1:], *geometry.w[2:], *geometry.dilation)
        how = (*geometry.stride, *geometry.padding)
        pieces = (tiling.images, tiling.lines, tiling.split, most)
        arguments = [np.int32(n) for n in (*sizes, *how, *pieces)]
        divisors = [divisor(d) for d in (most, columns, rows, self.across)]
        run = _prepare("small_gradient", self.dtype, tiling)
        finish = kernel("small_convolution", "add_gradient")
        elements = 128 * tiling.m * tiling.n * tiling.groups * down * across

        def both(x: Array, dy: Array, dw: Array, db: Array | None) -> None:
            sums = elements + (0 if db is None else outputs)
            part = context().array("small gradient", (shares, sums), np.float32)
            numbers = (*arguments, np.int32(db is not None), *divisors)
            run((shares, down, across), args=(x, dy, part, *numbers))
            ends = (shares, sums, self.length, outputs, tiling.m, tiling.n, tiling.groups, down)
            finish((-(-sums // 32),), (256,), (part, dw, db, *(np.int32(n) for n in ends)))

        return both
