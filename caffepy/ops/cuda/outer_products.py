"""Sums of few outer products, a.T @ b of factors with few lines, and parameters that are updated
with them as gradient: kernels of outer_products.cu.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from caffepy.ops.cuda.compiler import kernel
from caffepy.ops.cuda.context import capability
from caffepy.ops.cuda.launch import Array, c_type
from caffepy.ops.cuda.update import constants, multipliers
from caffepy.ops.update_state import Number, Segments

CHUNK = 64
"""Outer products that a block adds at a time."""

DEPTH, LEAST = 512, 1 << 21
"""Most outer products of a sum and least number of sums for which these kernels are made."""

DEEPEST = 1024
"""Most outer products of an update by wgmma, which is worth more of them."""

TILES = {64: (64, 256, 2), DEEPEST: (128, 128, 3)}
"""Rows and columns of the sums of a block, and by wgmma the chunks in its shared memory; by the
most outer products of a sum.
"""


def _by_wgmma() -> bool:
    return capability() == 90


def suits(depth: int, shape: Sequence[int], itemsize: int, most: int) -> bool:
    """Return True if the kernels take such factors, and are made for `most` or fewer of them."""
    rows, columns = shape
    return (
        itemsize == 2
        and 0 < depth <= most
        and rows % 8 == columns % 8 == 0
        and rows * columns >= LEAST
        and capability() >= 80
    )


def suits_product(a: Array, b: Array, out: Array) -> bool:
    """Return True if a @ b is such a sum, to be written as float32."""
    takes = out.dtype == np.float32 and suits(len(b), out.shape, a.itemsize, DEPTH)
    return takes and all(x.flags.c_contiguous for x in (a.T, b, out))


def multiply(a: Array, b: Array, out: Array, accumulate: bool, scale: float) -> None:
    """out = scale * a @ b, or out += that."""
    how = np.int32(accumulate), np.float32(scale)
    _launch("outer_products", c_type(a), (a.T, b, out), (len(b), *out.shape), how)


def fuses_update(depth: int, shape: Sequence[int], dtype: DTypeLike) -> bool:
    most = DEEPEST if _by_wgmma() else DEPTH
    return suits(depth, shape, np.dtype(dtype).itemsize, most)


def product_update(
    rule: str,
    a: Array,
    b: Array,
    arrays: Sequence[Array],
    segments: Segments,
    numbers: Sequence[Number],
) -> None:
    w, *histories = arrays
    types = f"{c_type(a)}, {rule.capitalize()}<float>"
    both = (*histories, *[None] * (2 - len(histories)))
    how = *multipliers(segments, w.dtype), np.int32(segments.l1), *constants(segments, numbers)
    _launch("outer_update", types, (a, b, w, *both), (len(a), *w.shape), how)


def _launch(
    name: str, types: str, arrays: Sequence[Any], sizes: tuple[int, int, int], how: Sequence[Any]
) -> None:
    """`sizes` are depth, rows and columns."""
    depth, *shape = sizes
    rows, columns, stages = next(TILES[most] for most in TILES if depth <= most)
    padding = 0
    if not _by_wgmma():  # see Piece in outer_products.cu
        padding, stages = 8, 2
    of_factors = stages * 2 * CHUNK * (rows + columns + 2 * padding)
    shared = max(of_factors, 4 * rows * (columns + 8))
    found: Any = kernel("outer_products", f"{name}<{types}, {rows}, {columns}, {stages}>")
    found.max_dynamic_shared_size_bytes = shared
    grid = -(-shape[1] // columns), -(-shape[0] // rows)
    arguments = (*arrays, *map(np.int32, sizes), *how)
    found(grid, (rows * columns // 64,), arguments, shared_mem=shared)
