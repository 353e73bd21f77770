"""Two sums for each channel of (outer, C, inner) arrays, in two stages with a fixed order; see channels.cuh."""

from typing import Any

from caffepy.ops.cuda.blas import BLOCKS, THREADS
from caffepy.ops.cuda.launch import Array, launch_blocks, scratch

SHARE = 4096
"""Elements that are worth a block."""


def sums(file: str, name: str, x: Array, *arguments: Any) -> tuple[Array, int]:
    """Run a kernel of sums over the channels of x, its further arguments first; (2, C, splits) and splits."""
    outer, channels, inner = x.shape
    groups = channels if inner != 1 else -(-channels // 32)
    share = SHARE if inner != 1 else SHARE // 32
    splits = max(1, min(-(-outer * inner // share), 2 * BLOCKS // max(1, groups)))
    partial = scratch("channels", 2 * channels * splits)
    launch_blocks(file, name, x, groups * splits, *arguments, partial, outer, channels, inner, splits)
    return partial, splits


def finish(file: str, name: str, x: Array, *arguments: Any) -> None:
    """Run a kernel that has a warp for each channel of x."""
    launch_blocks(file, name, x, -(-32 * x.shape[1] // THREADS), *arguments)
