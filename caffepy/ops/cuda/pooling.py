"""Max, average and stochastic pooling."""

from collections.abc import Sequence
from math import gcd, prod
from typing import Any

import numpy as np
from cupy import empty_like

from caffepy.ops.cuda.bias_relu import add_shares, relu_bias_backward
from caffepy.ops.cuda.compiler import kernel
from caffepy.ops.cuda.context import capability, context
from caffepy.ops.cuda.launch import (
    MOST,
    THREADS,
    Array,
    c_type,
    channels_last,
    divisor,
    launch_expression,
)
from caffepy.ops.cuda.normalization import are_packs, maxima_gradient, norm_backward
from caffepy.ops.cuda.small_convolution import here
from caffepy.ops.objects import Windows
from caffepy.ops.protocol.types import Maybe, Pair, Seed

WIDE = 32
"""A warp sums a window of this many elements or more, if planes are contiguous."""
AHEAD = 4
"""Most elements of a row that a thread loads at a time."""
BUSY = 1 << 16
"""A large device needs this many threads; packs of channels get narrower for them."""
RESIDENT = 3
"""Blocks of a multiprocessor of the gradient with sums."""
WIDEST = 3
"""The largest window of kernels that take tiles."""
TILE = 4
"""Neighbours of a row of the larger array that a thread of these takes, as in pooling.cu."""

_INDEX = {"uint8": "unsigned char", "int32": "int"}


def pool_index_type(kernel: Pair) -> "np.dtype[Any]":
    return np.dtype(np.uint8 if prod(kernel) < 256 else np.int32)


def _pool(
    name: str,
    over: Array,
    large: Array,
    small: Array,
    arrays: tuple[Array, ...],
    window: Windows,
    *others: Any,
    flags: Sequence[bool] = (),
) -> None:
    """Call a kernel with a thread for each part of `over`: the large (N, C, H, W) or the small (N,
    C, Ho, Wo) array.

    It has a variant for each value of the flags.
    """
    if not over.size:
        return
    n, c = large.shape[:2]
    kernel, stride, _ = window
    images, channels = (n, c) if channels_last(large, small) else (n * c, 1)
    v = 16 // large.itemsize
    while v > 1 and (
        channels % v or over.size < v * BUSY or any(a.data.ptr % (v * a.itemsize) for a in arrays)
    ):
        v //= 2
    types = [c_type(large), *(_INDEX[a.dtype.name] for a in arrays if a.dtype.name in _INDEX)]
    numbers, threads = [v], over.size // v
    if name == "ave_pool_forward" and channels == 1 and prod(kernel) >= WIDE:
        name, numbers, threads = "ave_pool_forward_wide", [], over.size * 32
    elif not name.startswith("stochastic"):
        numbers.append(min(kernel[1] if over is small else -(-kernel[1] // stride[1]), AHEAD))
    sizes = window_sizes(images, channels // v, over, large, small, window)
    expression = f"{name}<{', '.join([*types, *map(str, numbers), *(str(int(f)) for f in flags)])}>"
    launch_expression("pooling", expression, threads, *arrays, *sizes, *others)


def window_sizes(
    images: int, packs: int, over: Array, large: Array, small: Array, window: Windows
) -> list[int]:
    """Return the numbers of WINDOWS in windows.cuh, for a pass over the large or small array."""
    planes = (*large.shape[2:], *small.shape[2:])
    divisors = (divisor(int(d)) for d in (packs, *over.shape[:1:-1], *window[1]))
    return [images, packs, *planes, *(int(side) for pair in window for side in pair), *divisors]


def max_pool_forward(x: Array, y: Array, index: Array, window: Windows, relu: bool = False) -> None:
    narrow = x.dtype.itemsize == 2 and capability() >= 90
    if narrow and suits_tiles(y, x, y, index, window):
        threads, numbers, sizes = _tiles(y, TILE // window[1][0], x, y, window)
        expression = f"max_pool_forward_tiles<{numbers}, {int(relu)}>"
        launch_expression("pooling", expression, threads, x, y, index, *sizes)
        return
    flags = relu, False
    _pool("max_pool_forward", y, x, y, (x, y, index), window, None, None, 0, flags=flags)


def norm_max_pool_forward(
    x: Array, numbers: Array, y: Array, index: Array, window: Windows
) -> None:
    _, _, factor, shift = numbers
    others = factor, shift, 0 if channels_last(x, y) else x.shape[1]
    _pool("max_pool_forward", y, x, y, (x, y, index), window, *others, flags=(True, True))


def norm_max_pool_backward(
    x: Array,
    numbers: Array,
    dy: Array,
    index: Array,
    window: Windows,
    dx: Maybe,
    dscale: Maybe,
    dbias: Maybe,
    frozen: bool,
) -> None:
    if not x.size:
        return
    flat = x.reshape(*x.shape[:2], -1)
    whole = channels_last(x, dy) and x.shape[1] % (16 // x.itemsize) == 0
    if not (whole and are_packs(x, dy, index, dx)) or index.dtype != np.uint8 or dx is None:
        g = empty_like(x) if dx is None else dx
        max_pool_backward(dy, index, g, window)
        to, g = None if dx is None else g.reshape(flat.shape), g.reshape(flat.shape)
        norm_backward(flat, numbers, [g], None, None, None, to, dscale, dbias, frozen)
        return
    kernel, stride, _ = window
    across = min(-(-kernel[1] // stride[1]), AHEAD)
    packs = x.shape[1] * x.itemsize // 16
    of_x, of_dy = (window_sizes(len(x), packs, over, x, dy, window) for over in (x, dy))
    given = (dy, index), dx, dscale, dbias, frozen, of_x, of_dy, across
    maxima_gradient(flat, numbers, *given, _fours(x, dy, window))


def _fours(x: Array, dy: Array, window: Windows) -> Sequence[int] | None:
    """Return the sizes that maxima_fours takes; None if it does not suit."""
    (height, width), (high, wide), (kernel, stride, pads) = x.shape[2:], dy.shape[2:], window
    packs = x.shape[1] * x.itemsize // 16
    inside = 2 * (high - 1) - pads[0] < height and 2 * (wide - 1) - pads[1] < width
    if (*kernel, *stride) != (3, 3, 2, 2) or max(pads) > 1 or packs > THREADS or not inside:
        return None
    sides = (-(-(n + p) // 2) for n, p in zip((height, width), pads, strict=True))
    sizes = len(x), packs, height, width, high, wide, *pads
    return *sizes, *(divisor(side) for side in sides)


def max_pool_backward(
    dy: Array, index: Array, dx: Array, window: Windows, db: Maybe = None
) -> None:
    arrays = (dy, index, dx)
    if suits_tiles(dx, dx, dy, index, window):
        _max_pool_backward_tiles(*arrays, window, db)
    else:
        _pool("max_pool_backward", dx, dx, dy, arrays, window)
        relu_bias_backward(None, dx, db)


def _max_pool_backward_tiles(
    dy: Array, index: Array, dx: Array, window: Windows, db: Maybe
) -> None:
    threads, numbers, sizes = _tiles(dx, TILE, dx, dy, window)
    blocks, part = min(-(-threads // THREADS), MOST), None
    if db is not None:  # a thread keeps to its pack of channels
        packs = dx.shape[1] * dx.itemsize // 16
        whole = packs // gcd(packs, THREADS)
        blocks = -(-min(blocks, RESIDENT * here().processors) // whole) * whole
        part = context().array("shares", (dx.shape[1], blocks), db.dtype)
    expression = f"max_pool_backward_tiles<{numbers}, {int(db is not None)}>"
    given = (dy, index, dx, *sizes, part)
    kernel("pooling", expression)((blocks,), (THREADS,), given)
    add_shares(part, db, dx)


def suits_tiles(over: Array, large: Array, small: Array, index: Array, window: Windows) -> bool:
    """Return True if kernels of tiles can do it, and have enough to do: square windows, none of
    which begins beyond the plane, over whole packs of channels.
    """
    (kernel, *kernels), (stride, *strides), (pad, *pads) = ({*pair} for pair in window)
    pack = 16 // large.itemsize
    begins = ((n - 1) * stride - pad for n in small.shape[2:])
    return (
        not (kernels or strides or pads)
        and stride in (1, 2)
        and pad < kernel <= WIDEST
        and index.dtype == np.uint8
        and all(begin < size for begin, size in zip(begins, large.shape[2:], strict=True))
        and over.size >= pack * TILE * BUSY // 2
        and channels_last(large, small)
        and large.shape[1] % pack == 0
        and all(a.data.ptr % (pack * a.itemsize) == 0 for a in (large, small, index))
    )


def _tiles(
    over: Array, tile: int, large: Array, small: Array, window: Windows
) -> tuple[int, str, tuple[int, ...]]:
    """Return the threads that take each pack of channels of `tile` neighbours of a row of `over`,
    and the template arguments and sizes of a kernel.
    """
    (n, c, *size), pack = over.shape, 16 // over.itemsize
    (kernel, _), (stride, _), (pad, _) = window
    packs, tiles = c // pack, -(-size[1] // tile)
    planes = (*large.shape[2:], *small.shape[2:])
    sizes = (n, packs, *planes, *(int(side) for pair in window for side in pair))
    divisors = (divisor(int(d)) for d in (packs, tiles, size[0], stride, stride))
    numbers = f"{c_type(over)}, {kernel}, {stride}, {pad}"
    return n * size[0] * tiles * packs, numbers, (*sizes, *divisors)


def ave_pool_forward(x: Array, y: Array, window: Windows, relu: bool = False) -> None:
    _pool("ave_pool_forward", y, x, y, (x, y), window, flags=(relu,))


def ave_pool_backward(
    dy: Array, dx: Array, window: Windows, y: Array | None = None, x: Array | None = None
) -> None:
    assert y is None or x is None
    mask = y if x is None else x
    if mask is not None:
        channels_last(dy, mask)  # raises if their layouts differ
    arrays = (dy, dx, dy if mask is None else mask)
    _pool("ave_pool_backward", dx, dx, dy, arrays, window, flags=(y is not None, x is not None))


def stochastic_pool_forward(
    x: Array, y: Array, index: Array, window: Windows, seed: Seed, step_counter: Array | None = None
) -> None:
    numbers = seed, step_counter
    _pool("stochastic_pool_forward", y, x, y, (x, y, index), window, *numbers)


def stochastic_pool_mean(x: Array, y: Array, window: Windows) -> None:
    _pool("stochastic_pool_mean", y, x, y, (x, y), window)
