"""Bias and ReLU after a convolution or product, and the gradients of both, each in one pass."""

from typing import Any

from caffepy.ops.cuda.compiler import kernel
from caffepy.ops.cuda.context import context
from caffepy.ops.cuda.launch import THREADS, Array, c_type, channels_last, launch, packs, planes

BLOCKS = 132 * 4
"""About as many blocks as a large device holds at a time."""

ROWS = 16
"""Rows that a thread sums at least, before a second block takes a share."""

LINE = 1024
"""Elements of a plane that a warp sums at a time."""


def bias_relu(y: Array, b: Array | None, relu: bool) -> None:
    """y = relu(y + b) in place, or y + b; y (N, O, ...)."""
    launch("bias_relu", "bias_relu", y, packs(y), y, 0 if b is None else b, *planes(y), int(relu))


def relu_bias_backward(y: Array | None, dy: Array, db: Array | None) -> None:
    if not dy.size or (y is None and db is None):
        return
    if y is not None:
        channels_last(y, dy)  # raises if their layouts differ
    outer, outputs, inner = planes(dy)
    if inner == 1:
        pack = _pack(outputs, *(a for a in (y, dy) if a is not None))
        across = outputs // pack
        strips = -(-across // THREADS)
        lines = THREADS // min(across, THREADS)
        shares = max(1, min(-(-outer // (ROWS * lines)), BLOCKS // strips))
        _run("relu_bias_rows", y, dy, db, (strips, shares), outer, outputs, shares, pack)
    else:
        lines = outer * -(-inner // LINE)
        shares = max(1, min(-(-lines // 8), BLOCKS // outputs))
        _run("relu_bias_planes", y, dy, db, (outputs, shares), outer, outputs, inner, shares, LINE)


def _run(
    name: str, y: Array | None, dy: Array, db: Array | None, grid: tuple[int, int], *sizes: int
) -> None:
    outputs, shares, kind = dy.shape[1], grid[1], c_type(dy)
    parts: Any = 0
    if db is not None and shares > 1:
        parts = context().array("shares", (outputs, shares), db.dtype)
    arguments = (0 if y is None else y, dy, 0 if db is None else db, parts, *sizes)
    kernel("bias_relu", f"{name}<{kind}>")(grid, (THREADS,), arguments)
    if db is not None and shares > 1:
        warps = THREADS // 32
        add_shares = kernel("bias_relu", f"add_shares<{kind}>")
        add_shares((-(-outputs // warps),), (THREADS,), (parts, db, outputs, shares))


def _pack(outputs: int, *arrays: Array) -> int:
    """Return the number of elements, at most 16 bytes, of packs that begin in the same column."""
    size: int = arrays[0].itemsize
    pack = 16 // size
    while outputs % pack or any(a.data.ptr % (pack * size) for a in arrays):
        pack //= 2
    return pack
