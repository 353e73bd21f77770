"""Launches of kernels with one result of all blocks: the last block to finish sums those of all, in
the order of blocks (block_reduce.cuh).
"""

from typing import Any

import cupy
import numpy as np

from caffepy.ops.cuda.launch import Array, launch_blocks, scratch

MOST_BLOCKS = 512

_arrivals: dict[tuple[int, int], Array] = {}


def _arrived() -> Array:
    """Return the counter of finished blocks of launches on this stream: 0 before and after."""
    key = (cupy.cuda.runtime.getDevice(), cupy.cuda.get_current_stream().ptr)
    if key not in _arrivals:
        _arrivals[key] = cupy.zeros((), np.uint64)
    return _arrivals[key]


def launch_reduce(
    file: str, name: str, like: Array, worth: int, arguments: tuple[Any, ...]
) -> None:
    """Launch the template `name` for the element type of `like` in about `worth` blocks, at least
    one.
    """
    blocks = max(1, min(worth, MOST_BLOCKS))
    launch_blocks(file, name, like, blocks, *arguments, scratch("loss", 3 * blocks), _arrived())
