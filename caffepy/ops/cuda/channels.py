"""Elementwise passes over (N, C, P) arrays with numbers of each channel, in either layout, and two
sums for each channel, in two stages and a fixed order; see channels.cuh.
"""

from math import gcd
from typing import Any

from caffepy.ops.cuda.launch import BLOCKS, THREADS, Array, channels_last, launch_blocks, scratch

DEVICE = 132
"""Multiprocessors of a large device: this times the blocks that one holds at a time is a wave."""

SHARE = 4096
"""Elements of a plane for which one more block pays."""

FINISHING = 1024
"""Threads of a block that finishes sums: they wait for memory, and there are few blocks."""

LINES = 8
"""Pixels (channels last) for which one more thread pays."""

Shape = tuple[int, int, int]


def lying(*arrays: Array) -> Shape:
    """Return (outer, C, inner) of arrays in their memory: with the channels last, outer counts
    pixels and inner is 1.
    """
    n, c, p = arrays[0].shape
    last = channels_last(*arrays)
    return (n * p, c, 1) if last or not n * c * p else (n, c, p)


def _folded(shape: Shape, itemsize: int) -> tuple[Shape, int]:
    """Return a shape in which lines without whole packs of channels are several side by side, and
    how many.
    """
    outer, channels, inner = shape
    width = 16 // itemsize
    lines = width // gcd(width, channels)
    fits = inner == 1 and outer % lines == 0
    return ((outer // lines, lines * channels, 1), lines) if fits else (shape, 1)


def _blocks(shape: Shape, itemsize: int, wave: int) -> tuple[int, int]:
    """Return the number of blocks of a pass, and by how many of them each channel is divided."""
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


def channel_pass(
    file: str, name: str, x: Array, shape: Shape, *arguments: Any, variant: str = "", held: int = 4
) -> None:
    """Run a kernel of a pass, its further arguments first; `held` of its blocks fit on a
    multiprocessor.
    """
    period, (shape, _) = shape[1], _folded(shape, x.itemsize)
    blocks, splits = _blocks(shape, x.itemsize, held * DEVICE)
    sizes = *shape, splits, period
    launch_blocks(file, name, x, blocks, *arguments, *sizes, variant=variant)


def sums(
    file: str, name: str, x: Array, shape: Shape, *arguments: Any, variant: str = ""
) -> tuple[Array, int]:
    """Run a kernel that sums over the channels of x, its further arguments first; return (2,
    splits, C) partial sums and splits.
    """
    period, (shape, lines) = shape[1], _folded(shape, x.itemsize)
    blocks, splits = _blocks(shape, x.itemsize, 3 * DEVICE)
    partial = scratch("channels", 2 * shape[1] * splits)
    sizes = *shape, splits, period
    launch_blocks(file, name, x, blocks, *arguments, partial, *sizes, variant=variant)
    return partial, lines * splits


def finish(file: str, name: str, x: Array, *arguments: Any, more: int = 0) -> None:
    """Run a kernel that finishes the sums of each channel of x, with `more` blocks beside those."""
    blocks = -(-x.shape[1] // 8) + more
    launch_blocks(file, name, x, blocks, *arguments, threads=FINISHING)
