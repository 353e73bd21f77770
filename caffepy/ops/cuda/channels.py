"""Passes over (N, C, P) arrays by channels, in either order, and two sums for each channel in two
stages with a fixed order; see channels.cuh.
"""

from typing import Any

from caffepy.ops.cuda.compiler import kernel
from caffepy.ops.cuda.launch import (
    BLOCKS,
    THREADS,
    Array,
    c_type,
    channels_last,
    launch_blocks,
    scratch,
)

DEVICE = 132
"""Multiprocessors of a large device; that many blocks, times those that one holds at a time, are
one wave.
"""

SHARE = 4096
"""Elements of a plane that are worth a block."""

LINES = 8
"""Lines of channels that are worth a thread."""

Shape = tuple[int, int, int]


def lying(*arrays: Array) -> Shape:
    """(outer, C, inner) of arrays in their memory; with channels last, outer counts lines of them
    and inner is 1.
    """
    n, c, p = arrays[0].shape
    last = channels_last(*arrays)
    return (n * p, c, 1) if last or not n * c * p else (n, c, p)


def _blocks(shape: Shape, itemsize: int, wave: int) -> tuple[int, int]:
    """How many blocks a pass has, and among how many of them each channel is split."""
    outer, channels, inner = shape
    if inner == 1:
        width = 16 // itemsize
        packs = channels // width if channels % width == 0 else channels
        columns = min(32, 1 << max(packs - 1, 0).bit_length())
        groups, worth = -(-packs // columns), -(-outer * columns // (LINES * THREADS))
    else:
        groups, worth, wave = channels, -(-outer * inner // SHARE), 2 * BLOCKS
    splits = max(1, min(worth, wave // max(1, groups)))
    return groups * splits, splits


def _start(
    file: str, name: str, variant: tuple[int, ...], x: Array, blocks: int, *arguments: Any
) -> None:
    if blocks:
        instance = f"{name}<{', '.join([c_type(x), *map(str, variant)])}>"
        kernel(file, instance)((blocks,), (THREADS,), arguments)


def channel_pass(
    file: str,
    name: str,
    x: Array,
    shape: Shape,
    *arguments: Any,
    variant: tuple[int, ...] = (),
    held: int = 4,
) -> None:
    """Run a kernel of a pass, its further arguments first; `held` blocks of it fit on a
    multiprocessor.
    """
    blocks, splits = _blocks(shape, x.itemsize, held * DEVICE)
    _start(file, name, variant, x, blocks, *arguments, *shape, splits)


def sums(
    file: str,
    name: str,
    x: Array,
    *arguments: Any,
    shape: Shape | None = None,
    variant: tuple[int, ...] = (),
) -> tuple[Array, int]:
    """Run a kernel of sums over the channels of x, its further arguments first; (2, splits, C) and
    splits.
    """
    shape = lying(x) if shape is None else shape
    blocks, splits = _blocks(shape, x.itemsize, 3 * DEVICE)
    partial = scratch("channels", 2 * shape[1] * splits)
    _start(file, name, variant, x, blocks, *arguments, partial, *shape, splits)
    return partial, splits


def finish(file: str, name: str, x: Array, *arguments: Any) -> None:
    """Run a kernel that makes something of the sums of each channel of x."""
    launch_blocks(file, name, x, -(-x.shape[1] // 8), *arguments)
