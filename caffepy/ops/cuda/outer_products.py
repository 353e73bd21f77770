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

TILES = {64: (64, 256), DEPTH: (128, 128)}
"""Rows and columns of the sums of a block, by the most outer products of a sum."""


def suits(depth: int, shape: Sequence[int], itemsize: int) -> bool:
    """Return True if the kernels take such factors, and are made for them."""
    rows, columns = shape
    return (
        itemsize == 2
        and 0 < depth <= DEPTH
        and rows % 8 == columns % 8 == 0
        and rows * columns >= LEAST
        and capability() >= 80
    )


def suits_product(a: Array, b: Array, out: Array) -> bool:
    """Return True if a @ b is such a sum, to be written as float32."""
    takes = out.dtype == np.float32 and suits(len(b), out.shape, a.itemsize)
    return takes and all(x.flags.c_contiguous for x in (a.T, b, out))


def multiply(a: Array, b: Array, out: Array, accumulate: bool, scale: float) -> None:
    """out = scale * a @ b, or out += that."""
    numbers = (*map(np.int32, (len(b), *out.shape, accumulate)), np.float32(scale))
    _launch("outer_products", c_type(a), out.shape, len(b), a.T, b, out, *numbers)


def fuses_update(depth: int, shape: Sequence[int], dtype: DTypeLike) -> bool:
    return suits(depth, shape, np.dtype(dtype).itemsize)


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
    sizes = map(np.int32, (len(a), *w.shape))
    how = *multipliers(segments, w.dtype), np.int32(segments.l1), *constants(segments, numbers)
    _launch("outer_update", types, w.shape, len(a), a, b, w, *both, *sizes, *how)


def _launch(name: str, types: str, shape: Sequence[int], depth: int, *arguments: Any) -> None:
    tile = rows, columns = next(TILES[most] for most in TILES if depth <= most)
    shared = 2 * 2 * CHUNK * (rows + 8 + columns + 8)  # two pieces of both factors
    found: Any = kernel("outer_products", f"{name}<{types}, {rows}, {columns}>")
    found.max_dynamic_shared_size_bytes = shared
    down, across = (-(-n // of_block) for n, of_block in zip(shape, tile, strict=True))
    found((across, down), (rows // 64 * columns,), arguments, shared_mem=shared)
