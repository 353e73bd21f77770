"""Bias and ReLU after a convolution or product, and the gradients of both, each in one pass."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from caffepy.ops.cuda.compiler import kernel
from caffepy.ops.cuda.context import context
from caffepy.ops.cuda.copies import cut
from caffepy.ops.cuda.elementwise import eltwise_sum
from caffepy.ops.cuda.launch import (
    BLOCKS,
    THREADS,
    Array,
    c_type,
    channels_last,
    launch,
    lies_channels_last,
    packs,
    planes,
)

MOST_BLOCKS = 132 * 4
"""About as many blocks as a large device holds at a time."""

CUT_BLOCKS = 132 * 3
"""The same for cut_relu_rows."""

ROWS = 16
"""Rows that a thread sums at least, before a second block takes a share."""

LINE = 1024
"""Elements of a plane that a warp sums at a time."""

STRIP, WIDTH = 32, 512
"""Columns and threads of a block, as in columns.cuh."""

PARTS = 8
"""Most arrays of a kind of a launch of cut_relu_rows."""

FEW = 512
"""Up to this many rows are summed by one block of columns.cuh."""


def bias_relu(y: Array, b: Array | None, relu: bool) -> None:
    """y = relu(y + b) in place, or y + b; y (N, O, ...)."""
    launch("bias_relu", "bias_relu", y, packs(y), y, b, *planes(y), int(relu))


def add_bias(y: Array, b: Array) -> None:
    bias_relu(y, b, False)


def bias_gradient(dy: Array, db: Array, copy: Array | None = None) -> None:
    rows, outputs, positions = planes(dy)
    if copy is not None:
        assert positions == 1
        assert dy.dtype == np.float32
        over_columns("bias_relu", "bias_gradient_narrowing", copy, (rows, outputs), db, dy, copy)
    elif positions == 1 and rows <= FEW:
        over_columns("bias_relu", "bias_gradient_rows", dy, (rows, outputs), db, dy)
    else:
        relu_bias_backward(None, dy, db)


def relu_bias_backward(y: Array | None, dy: Array, db: Array | None) -> None:
    if not dy.size or (y is None and db is None):
        return
    if y is not None:
        channels_last(y, dy)  # raises if their layouts differ
    outer, outputs, inner = planes(dy)
    if inner == 1:
        # Packs of at most 16 bytes that begin in the same column.
        pack = 16 // dy.itemsize
        arrays = (dy,) if y is None else (y, dy)
        while outputs % pack or any(a.data.ptr % (pack * dy.itemsize) for a in arrays):
            pack //= 2
        strips, shares = _blocks_of_rows(outer, outputs // pack, MOST_BLOCKS)
        name, grid = "relu_bias_rows", (strips, shares)
        sizes: tuple[int, ...] = (outer, outputs, shares, pack)
    else:
        lines = outer * -(-inner // LINE)
        shares = max(1, min(-(-lines // 8), MOST_BLOCKS // outputs))
        name, grid = "relu_bias_planes", (outputs, shares)
        sizes = (outer, outputs, inner, shares, LINE)
    part = _shares(db, outputs, shares)
    kernel("bias_relu", f"{name}<{c_type(dy)}>")(grid, (THREADS,), (y, dy, db, part, *sizes))
    add_shares(part, db, dy)


def _blocks_of_rows(rows: int, across: int, most: int) -> tuple[int, int]:
    """Return into how many strips and shares blocks divide `rows` rows of `across` packs."""
    strips = -(-across // THREADS)
    lines = THREADS // min(across, THREADS)
    return strips, max(1, min(-(-rows // (ROWS * lines)), most // strips))


def cut_relu_backward(
    dys: Sequence[Array], ys: Sequence[Array], dxs: Sequence[Array], dbs: Sequence[Array | None]
) -> None:
    dy = dys[0]
    if not dy.size:
        return
    pack = 16 // dy.itemsize
    last = all(lies_channels_last(a) for a in (*dys, *ys, *dxs))
    whole = all(y.shape[1] % pack == 0 for y in ys)
    aligned = all(a.data.ptr % 16 == 0 for a in (*dys, *ys, *dxs))
    if not (last and whole and aligned and max(len(dys), len(ys)) <= PARTS):
        sizes = [y.shape[1] for y in ys]
        if len(dys) > 1:
            eltwise_sum(dys, [1.0] * len(dys), dy)
        cut(dy, sizes, dxs, 1)
        for y, dx, db in zip(ys, dxs, dbs, strict=True):
            relu_bias_backward(y, dx, db)
        return
    rows, outputs, _ = planes(dy)
    across = outputs // pack
    strips, shares = _blocks_of_rows(rows, across, CUT_BLOCKS)
    part = context().array("shares", (outputs, shares), np.promote_types(dy.dtype, np.float32))
    ends = list(accumulate(y.shape[1] for y in ys))
    arrays = (*_filled(dys), *_filled(ys), *_filled(dxs), *_filled([e // pack for e in ends]))
    name = f"cut_relu_rows<{c_type(dy)}, {len(dys)}>"
    numbers = (part, rows, across, shares)
    kernel("bias_relu", name)((strips, shares), (THREADS,), (*arrays, *numbers))
    if all(db is None for db in dbs):
        return
    to, grid = (*_filled(dbs), *_filled(ends)), (-(-outputs // (THREADS // 32)),)
    name = f"add_shares_of_parts<{c_type(dy)}>"
    kernel("bias_relu", name)(grid, (THREADS,), (part, *to, outputs, shares))


def _filled(values: Sequence[Any]) -> list[Any]:
    """Return PARTS values, the last one again where there are fewer."""
    return [*values, *[values[-1]] * (PARTS - len(values))]


def over_columns(
    file: str, name: str, like: Array, shape: tuple[int, int], db: Array | None, *arguments: Any
) -> None:
    """Run a kernel of columns.cuh over the columns of arrays of this shape; db, if any, += its
    sums.
    """
    rows, columns = shape
    if not rows * columns:
        return
    strips = -(-columns // STRIP)
    shares = 1 if rows <= FEW else max(1, min(2 * rows // FEW, BLOCKS // (2 * strips)))
    part = _shares(db, columns, shares)
    numbers = (rows, columns, db, part, shares)
    kernel(file, f"{name}<{c_type(like)}>")((strips, shares), (WIDTH,), (*arguments, *numbers))
    add_shares(part, db, like)


def _shares(db: Array | None, columns: int, shares: int) -> Array | None:
    """Return memory for the shares of the sums in db, if there are several."""
    if db is None or shares == 1:
        return None
    return context().array("shares", (columns, shares), db.dtype)


def add_shares(part: Array | None, db: Array | None, like: Array) -> None:
    """db += the sums of part (columns, shares), if there is one, over the shares."""
    if part is not None:
        grid, arguments = (-(-len(part) // (THREADS // 32)),), (part, db, *part.shape)
        kernel("bias_relu", f"add_shares<{c_type(like)}>")(grid, (THREADS,), arguments)
