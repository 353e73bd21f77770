"""Vectors across channels, divided by their norms; formulas in `Ops.normalize_forward`."""

from typing import Any

from caffepy.ops.cuda.channels import lying
from caffepy.ops.cuda.launch import MOST, THREADS, Array, launch_blocks
from caffepy.ops.protocol import Maybe


def normalize_forward(x: Array, y: Array, norm: Array, eps: float, absolute: bool) -> None:
    _each_vector("normalize_forward", (x, y), x, y, norm, float(eps), int(absolute))


def normalize_backward(
    y: Array, norm: Array, dy: Array, dnorm: Maybe, dx: Array, absolute: bool
) -> None:
    _each_vector("normalize_backward", (y, dy, dx), y, norm, dy, dnorm, dx, int(absolute))


def _each_vector(name: str, arrays: tuple[Array, ...], *arguments: Any) -> None:
    """Launch a thread for each vector; a block where its elements follow each other in memory."""
    outer, channels, inner = lying(*arrays)
    if inner == 1:
        threads, blocks = min(THREADS, -(-channels // 32) * 32), min(outer, MOST)
    else:
        threads, blocks = THREADS, min(-(-outer * inner // THREADS), MOST)
    if arrays[0].size:
        sizes, variant = (outer, channels, inner), f", {int(inner == 1)}"
        file = "vector_norm"
        launch_blocks(
            file, name, arrays[0], blocks, *arguments, *sizes, threads=threads, variant=variant
        )
