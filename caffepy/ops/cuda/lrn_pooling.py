"""MAX pooling behind local response normalization, and the gradients of both, in one pass each
where channels lie last.
"""

from typing import Any

import cupy

from caffepy.ops.cuda.bias_relu import add_shares
from caffepy.ops.cuda.compiler import kernel
from caffepy.ops.cuda.context import capability, context
from caffepy.ops.cuda.copies import copy
from caffepy.ops.cuda.launch import MOST, Array, c_type, channels_last, divisor
from caffepy.ops.cuda.lrn import WIDEST, lrn_backward, lrn_forward
from caffepy.ops.cuda.pooling import max_pool_backward, max_pool_forward, suits_tiles
from caffepy.ops.cuda.small_convolution import here
from caffepy.ops.objects import Windows
from caffepy.ops.protocol.normalization import Terms
from caffepy.ops.protocol.types import Maybe

PACK, THREADS = 8, 128
"""Channels of a thread, and threads of a block, as in lrn_pooling.cu."""
RESIDENT = 4
"""Blocks of a gradient for each multiprocessor."""
ROWS, LENGTH = 2, 9
"""Rows, and about as many neighbours of a row, of maxima that a thread makes."""
WARP = 32
INNER = 30
"""Threads of a warp that have a neighbour in it on both sides."""
LEAST = 1e-30
"""s is no subnormal number if k is this or more."""


def lrn_max_pool_forward(x: Array, y: Array, index: Array, terms: Terms, window: Windows) -> None:
    if x.dtype.itemsize != 2 or not _suits(x, y, index, x, terms, window):
        max_pool_forward(_normalized(x, terms)[0], y, index, window)
        return
    (images, channels, *size), (height, width) = x.shape, y.shape[2:]
    size_of_window, alpha, _, k = terms
    length = -(-width // -(-width // LENGTH))
    runs = images * -(-height // ROWS) * -(-width // length) * (channels // PACK)
    sizes = (images, channels, *size, height, width, length)
    given = (x, y, index, *sizes, float(alpha / size_of_window), float(k))
    found = kernel("lrn_pooling", _instance("lrn_max_pool_forward", x, terms, window))
    found((min(-(-runs // THREADS), MOST),), (THREADS,), given)


def lrn_max_pool_backward(
    x: Array, dy: Array, index: Array, dx: Array, terms: Terms, window: Windows, db: Maybe
) -> None:
    packs = x.shape[1] // PACK
    step = WARP if packs and WARP % packs == 0 else INNER
    chunk = step * (THREADS // WARP)
    suits = _suits(x, dy, index, dx, terms, window)
    if not suits or packs > step or chunk % packs:
        g = cupy.empty_like(x)
        max_pool_backward(dy, index, g, window)
        normalized, scale = (x, None) if channels_last(x, g) else _normalized(x, terms)
        lrn_backward(x, normalized, scale, g, g, terms, True, db)
        copy(g, dx)
        return
    (images, channels, *size), (stride, _), (pad, _) = x.shape, *window[1:]
    tiles = [-(-(n + pad) // stride) for n in size]
    resident = RESIDENT * here().processors
    blocks = min(resident, -(-images * tiles[0] * tiles[1] * packs // chunk))
    part = None if db is None else context().array("shares", (channels, blocks), db.dtype)
    sizes = (images, channels, *size, *dy.shape[2:], *tiles, step)
    divisors = (divisor(packs), divisor(tiles[1]), divisor(tiles[0]))
    size_of_window, alpha, beta, k = terms
    numbers = (alpha / size_of_window, 2 * alpha * beta / size_of_window, k)
    given = (x, dy, index, dx, *sizes, *divisors, *map(float, numbers), part)
    found: Any = kernel("lrn_pooling", _instance("lrn_max_pool_backward", x, terms, window))
    over = ((window[0][0] - 1) // stride + 1) ** 2  # windows that cover a tile
    shared = 2 * THREADS * ((over + stride**2) * PACK * x.itemsize + over * PACK)
    found.max_dynamic_shared_size_bytes = shared
    found((blocks,), (THREADS,), given, shared_mem=shared)
    add_shares(part, db, x)


def _suits(x: Array, small: Array, index: Array, dx: Array, terms: Terms, window: Windows) -> bool:
    """Return True if kernels of one pass can do it, and have enough to do."""
    size, _, beta, k = terms
    return (
        x.dtype.itemsize <= 4
        and x.shape[1] % PACK == 0
        and beta == 0.75
        and k >= LEAST
        and 1 <= size // 2 <= WIDEST
        and capability() >= 90
        and suits_tiles(x, x, small, index, window)
        and channels_last(x, dx)
        and dx.data.ptr % 16 == 0
    )


def _instance(name: str, x: Array, terms: Terms, window: Windows) -> str:
    (kernel, _), (stride, _), (pad, _) = window
    return f"{name}<{c_type(x)}, {terms[0] // 2}, {kernel}, {stride}, {pad}>"


def _normalized(x: Array, terms: Terms) -> tuple[Array, Array | None]:
    """Return LRN of x and what it keeps for the gradient."""
    y = cupy.empty_like(x)
    scale = None if channels_last(x, y) else cupy.empty(x.shape, x.dtype)
    lrn_forward(x, y, scale, terms)
    return y, scale
