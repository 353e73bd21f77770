"""Depthwise convolutions, 3 x 3, with the channels last, by kernels of our own (depthwise.cu):
cuDNN's are made for groups of many channels, and take several times as long.

The interface is that of small_convolution: lists of candidates for the autotuner.
"""

from collections.abc import Callable, Sequence
from math import gcd, prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from caffepy.ops.cuda.autotune import Make, Run
from caffepy.ops.cuda.compiler import kernel
from caffepy.ops.cuda.context import context
from caffepy.ops.cuda.graphs import Geometry
from caffepy.ops.cuda.launch import TYPES, Array, scratch
from caffepy.ops.cuda.normalization import (
    BY_X,
    BY_Y,
    NO_MASK,
    Addition,
    finish_norm,
    norm_sums,
    what_follows,
)
from caffepy.ops.objects import Normalized, NormGradient, NormSums

THREADS = 256
CHANNELS = 2
"""Most channels of a thread: with more, too few threads fit on a multiprocessor."""

COLUMNS = 4
"""Columns of a strip, as in depthwise.cu; 2 for the gradient of the weights with a stride of 2."""

BLOCKS = 132 * 2
"""About as many blocks as a large device needs to be busy."""

RUN = 8
"""Most lines of a strip whose sums nobody wants."""

WAVE, WAVE_OF_BOTH = 132 * 3, 132 * 2
"""Blocks of the gradient of the weights, and of both gradients, that a large device holds at a
time.
"""


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


def suits_both(geometry: Geometry, dtype: DTypeLike) -> bool:
    """Return True if `backward_both` can do it, and is likely to be faster than a pass for each."""
    return suits(geometry, dtype) and np.dtype(dtype).itemsize == 2


def _width(channels: int) -> int:
    """Return the channels of a thread."""
    return gcd(channels, CHANNELS)


def _name(name: str, dtype: DTypeLike, *numbers: int) -> str:
    return f"{name}<{TYPES[np.dtype(dtype).name]}, {', '.join(map(str, numbers))}>"


def _run(threads: int, lines: int) -> int:
    """Return the lines of a strip, if this many threads stand beside each other on the first lines
    of all images: as many as leave the device enough threads, all strips alike.
    """
    run = max(1, min(RUN, threads * lines // (BLOCKS * THREADS)))
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
    run = _run(side_by_side, height)
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


def moments(
    geometry: Geometry, dtype: DTypeLike, given: Normalized | None = None
) -> Callable[[Array, Array, Array], tuple[Array, int]]:
    """Return what runs with x, w, y; it returns partial sums of y and y^2, and into how many each
    is split. With `given` the input is not x but x normalized by it.
    """
    n, channels, height, columns = geometry.y
    width, across = _width(channels), n * -(-columns // COLUMNS)
    blocks, threads, run = _shares(channels // width, across, height, WAVE)
    numbers, ceiling = (None,) * 4 if given is None else given.numbers, given and given.ceiling
    variant = width, geometry.stride[0], channels, int(given is not None), what_follows(ceiling)
    launch = kernel("depthwise", _name("depthwise_moments", dtype, *variant))
    sizes = _sizes(geometry.y, geometry.x, geometry.padding, run)
    shared = 8 * prod(threads) * width
    how = numbers[2], numbers[3], ceiling or 0.0

    def call(x: Array, w: Array, y: Array) -> tuple[Array, int]:
        partial = scratch("channels", 2 * blocks[1] * channels)
        launch(blocks, threads, (x, w, *how, y, partial, *sizes), shared_mem=shared)
        return partial, blocks[1]

    return call


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


def _shares(
    packs: int, across: int, lines: int, wave: int, size: int = THREADS
) -> tuple[tuple[int, int], tuple[int, int], int]:
    """Return blocks and threads, at most `size`, of a kernel that sums over strips of these lines,
    and the lines of a strip. That many packs of channels and strips of all images stand beside each
    other; a large device holds `wave` blocks at a time, and they end about at once.
    """
    groups = -(-packs // 32)
    lanes = -(-packs // groups)
    rows = size // lanes

    def each(run: int) -> int:
        """Strips of a thread."""
        return -(-across * -(-lines // run) // (rows * max(1, wave // groups)))

    runs = sorted({-(-lines // parts) for parts in range(1, lines + 1)}, reverse=True)
    run = min(runs, key=lambda run: each(run) * (run + 2))  # two lines more are read
    shares = -(-across * -(-lines // run) // (rows * each(run)))
    return (groups, shares), (lanes, rows), run


def backward_weight(geometry: Geometry, dtype: DTypeLike) -> list[Make]:
    """Return candidates that run with x, dy, dw, db or None, and add to the last two."""

    def make() -> Run:
        n, channels, height, columns = geometry.y
        width, stride = _width(channels), geometry.stride[0]
        across = n * -(-columns // (COLUMNS // stride))
        of = channels // width, across, height, WAVE
        (groups, shares), (lanes, rows), run = _shares(*of)
        launch = kernel("depthwise", _name("depthwise_gradient", dtype, width, stride))
        sizes = _sizes(geometry.y, geometry.x, geometry.padding, run)
        shared = 4 * rows * lanes * width

        def gradient(x: Array, dy: Array, dw: Array, db: Array | None) -> None:
            part = _part(shares, channels)
            launch((groups, shares), (lanes, rows), (x, dy, part, *sizes), shared_mem=shared)
            _add(part, dw, db)

        return gradient

    return [make]


def _part(shares: int, channels: int) -> Array:
    return context().array("depthwise gradient", (shares, 10, channels), np.float32)


def _add(part: Array, dw: Array, db: Array | None) -> None:
    shares, sums, channels = part.shape
    blocks = -(-sums * channels // 32)
    kernel("depthwise", "add_depthwise")((blocks,), (32, 32), (part, dw, db, shares, channels))


def backward_both(
    geometry: Geometry,
    x: Array | None,
    w: Array,
    dy: NormGradient,
    dw: Array | None,
    to: NormSums | Array,
) -> None:
    """Compute `objects.Convolution.backward_norm_gradient` in one pass, with the sums that a
    normalization before it wants unless there is more to be added.
    """
    n, channels, height, columns = geometry.x
    width, strided = _width(channels), geometry.stride[0] == 2
    pads = geometry.padding if strided else [2 - p for p in geometry.padding]
    lines = height
    if strided:  # pairs of lines, and of columns
        height, columns = (k + p - p // 2 * 2 for k, p in zip((height, columns), pads, strict=True))
        lines = -(-height // 2)
    mask, after, ceiling, source = NO_MASK, 0, None, x
    numbers: Any = (None,) * 4
    at_once = isinstance(to, NormSums) and to.more is None
    if isinstance(to, NormSums) and at_once:
        after, ceiling = what_follows(to.ceiling), to.ceiling
        if to.x is None:
            mask = NO_MASK if ceiling is None else BY_Y
        elif to.y is None:
            mask, numbers, source = BY_X, to.numbers, to.x
        else:
            at_once, after = False, 0
    assert source is not None
    across = n * -(-columns // COLUMNS)
    held = (WAVE, THREADS // 2) if mask == BY_X else (WAVE_OF_BOTH, THREADS)
    blocks, threads, run = _shares(channels // width, across, lines, *held)
    part, shares = _part(blocks[1], channels), blocks[1]
    sums = scratch("channels", 2 * shares * channels)
    mean, _, factor, shift = numbers
    dx = to.masked if isinstance(to, NormSums) else to
    variant = width, geometry.stride[0], channels, mask, after
    launch = kernel("depthwise", _name("depthwise_both", dy.g.dtype, *variant))
    of_dy = dy.g, dy.x, dy.numbers[2], dy.line
    before = mean, factor, shift, float(ceiling or 0)
    sizes = _sizes(geometry.x, geometry.y, pads, run)
    arguments = (source, w, *of_dy, *before, dx, part, sums, *sizes)
    launch(blocks, threads, arguments, shared_mem=4 * threads[0] * threads[1] * width)
    finishes = isinstance(to, NormSums) and at_once and to.x is not None
    if dw is not None and not finishes:
        _add(part, dw, None)
    if isinstance(to, NormSums) and at_once:
        taps = dw is not None and finishes
        of_dw = part, dw, shares, 10 * channels, 9 * channels, channels, 9
        finish_norm((sums, shares), to, Addition(*of_dw) if taps else None)
    elif isinstance(to, NormSums):
        norm_sums(to)
