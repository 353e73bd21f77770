"""Bias and ReLU after a convolution or product, and the gradients of both, each in one pass."""

from typing import Any

import numpy as np

from caffepy.ops.cuda.compiler import kernel
from caffepy.ops.cuda.context import context
from caffepy.ops.cuda.launch import (
    BLOCKS,
    THREADS,
    Array,
    c_type,
    channels_last,
    launch,
    packs,
    planes,
)

MOST_BLOCKS = 132 * 4
"""About as many blocks as a large device holds at a time."""

ROWS = 16
"""Rows that a thread sums at least, before a second block takes a share."""

LINE = 1024
"""Elements of a plane that a warp sums at a time."""

STRIP, WIDTH = 32, 512
"""Columns and threads of a block, as in columns.cuh."""

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
        across = outputs // pack
        strips = -(-across // THREADS)
        lines = THREADS // min(across, THREADS)
        shares = max(1, min(-(-outer // (ROWS * lines)), MOST_BLOCKS // strips))
        name, grid = "relu_bias_rows", (strips, shares)
        sizes: tuple[int, ...] = (outer, outputs, shares, pack)
    else:
        lines = outer * -(-inner // LINE)
        shares = max(1, min(-(-lines // 8), MOST_BLOCKS // outputs))
        name, grid = "relu_bias_planes", (outputs, shares)
        sizes = (outer, outputs, inner, shares, LINE)
    part = _shares(db, outputs, shares)
    kernel("bias_relu", f"{name}<{c_type(dy)}>")(grid, (THREADS,), (y, dy, db, part, *sizes))
    _add_shares(part, db, dy)


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
    _add_shares(part, db, like)


def _shares(db: Array | None, columns: int, shares: int) -> Array | None:
    """Return memory for the shares of the sums in db, if there are several."""
    if db is None or shares == 1:
        return None
    return context().array("shares", (columns, shares), db.dtype)


def _add_shares(part: Array | None, db: Array | None, like: Array) -> None:
    if part is not None:
        grid, arguments = (-(-len(part) // (THREADS // 32)),), (part, db, *part.shape)
        kernel("bias_relu", f"add_shares<{c_type(like)}>")(grid, (THREADS,), arguments)
