"""Launches of kernels that end with what all blocks found: the last block to end adds it up, in the
blocks' order.
"""

from typing import Any

import cupy
import numpy as np

from caffepy.ops.cuda.launch import Array, launch_blocks, scratch

MOST_BLOCKS = 512

_arrivals: dict[tuple[int, int], Array] = {}


def _arrived() -> Array:
    """Where the blocks of a launch on this stream count themselves: zero before and after."""
    key = (cupy.cuda.runtime.getDevice(), cupy.cuda.get_current_stream().ptr)
    if key not in _arrivals:
        _arrivals[key] = cupy.zeros((), np.uint64)
    return _arrivals[key]


def launch_finding(
    file: str, name: str, like: Array, worth: int, arguments: tuple[Any, ...]
) -> None:
    """The template `name` for the element type of `like` in about `worth` blocks, at least one:
    block_reduce.cuh.
    """
    blocks = max(1, min(worth, MOST_BLOCKS))
    launch_blocks(file, name, like, blocks, *arguments, scratch("loss", 3 * blocks), _arrived())
