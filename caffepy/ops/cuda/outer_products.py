"""Sums of few outer products, a.T @ b of factors with few lines, and parameters that are updated
with them as gradient: kernels of outer_products.cu.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from caffepy.ops.cuda.compiler import kernel
from caffepy.ops.cuda.context import capability
from caffepy.ops.cuda.launch import THREADS, Array, c_type
from caffepy.ops.cuda.update import constants, multipliers
from caffepy.ops.update_state import Number, Segments

ROWS, COLUMNS, CHUNK = 64, 256, 64
"""Sums of a block, and outer products that it adds at a time."""

SHARED = 2 * 2 * CHUNK * (ROWS + 8 + COLUMNS + 8)
"""Bytes of shared memory of a block: for two pieces of both factors."""

DEPTH, LEAST = 512, 1 << 21
"""Most outer products of a sum and least number of sums for which these kernels are made."""


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
    (rows, columns), depth = out.shape, len(b)
    numbers = (*map(np.int32, (depth, rows, columns, accumulate)), np.float32(scale))
    _launch(f"outer_products<{c_type(a)}>", rows, columns, a.T, b, out, *numbers)


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
    rows, columns = w.shape
    expression = f"outer_update<{c_type(a)}, {rule.capitalize()}<float>>"
    both = (*histories, *[None] * (2 - len(histories)))
    sizes = map(np.int32, (len(a), rows, columns))
    how = *multipliers(segments, w.dtype), np.int32(segments.l1), *constants(segments, numbers)
    _launch(expression, rows, columns, a, b, w, *both, *sizes, *how)


def _launch(expression: str, rows: int, columns: int, *arguments: Any) -> None:
    found: Any = kernel("outer_products", expression)
    found.max_dynamic_shared_size_bytes = SHARED
    grid = -(-columns // COLUMNS), -(-rows // ROWS)
    found(grid, (THREADS,), arguments, shared_mem=SHARED)
