"""Biases of planes and of rows, and their gradients."""

from typing import Any

import numpy as np

from caffepy.ops.cuda.bias_relu import bias_relu, relu_bias_backward
from caffepy.ops.cuda.compiler import kernel
from caffepy.ops.cuda.context import context
from caffepy.ops.cuda.launch import BLOCKS, Array, c_type, planes

STRIP, WIDTH = 32, 512
"""Columns and threads of a block, as in columns.cuh."""

FEW = 512
"""Up to this many rows are summed by one block."""


def add_bias(y: Array, b: Array) -> None:
    bias_relu(y, b, False)


def bias_gradient(dy: Array, db: Array, copy: Array | None = None) -> None:
    rows, outputs, positions = planes(dy)
    if copy is not None:
        assert positions == 1
        assert dy.dtype == np.float32
        over_columns("bias", "bias_gradient_narrowing", copy, (rows, outputs), db, dy, copy)
    elif positions == 1 and rows <= FEW:
        over_columns("bias", "bias_gradient_rows", dy, (rows, outputs), db, dy)
    else:
        relu_bias_backward(None, dy, db)


def over_columns(
    file: str, name: str, like: Array, shape: tuple[int, int], db: Array | None, *arguments: Any
) -> None:
    """Run a kernel of columns.cuh over the columns of arrays of this shape; db, if any, += its
    sums.
    """
    rows, columns = shape
    if not rows * columns:
        return
    kind, strips = c_type(like), -(-columns // STRIP)
    shares = 1 if rows <= FEW else max(1, min(2 * rows // FEW, BLOCKS // (2 * strips)))
    part: Any = 0
    if db is not None and shares > 1:
        part = context().array("shares", (columns, shares), db.dtype)
    sums = 0 if db is None else db, part, shares
    kernel(file, f"{name}<{kind}>")((strips, shares), (WIDTH,), (*arguments, rows, columns, *sums))
    if db is not None and shares > 1:
        kernel("bias_relu", f"add_shares<{kind}>")(
            (-(-columns // 8),), (256,), (part, db, columns, shares)
        )
