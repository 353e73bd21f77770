"""Convolutions with a kernel of 1 between normalizations, whose channels are few and no whole packs
of 16 bytes: the output with its sums, and both gradients at once, by pointwise_few.cu.
"""

from functools import partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from caffepy.ops.cuda import folding, pointwise
from caffepy.ops.cuda.autotune import Make, Run
from caffepy.ops.cuda.channels import DEVICE
from caffepy.ops.cuda.compiler import kernel
from caffepy.ops.cuda.context import context
from caffepy.ops.cuda.graphs import Geometry
from caffepy.ops.cuda.launch import TYPES, Array, scratch
from caffepy.ops.cuda.normalization import NO_RELU, what_follows
from caffepy.ops.cuda.small_convolution import here
from caffepy.ops.objects import Normalized, NormGradient, NormSums

SIDES = (64, 128)
"""Most channels on either side, for each of which there is a kernel."""

THREADS, STAGES = 512, 3
"""Constants of pointwise_few.cu."""


def suits(geometry: Geometry, dtype: DTypeLike) -> bool:
    """Return True if the functions below can do it, and are likely to be faster than others."""
    return (
        bool(_sides(geometry))
        and folding.suits(geometry, dtype)
        and max(prod(geometry.x), prod(geometry.y)) < 1 << 30
        and here().capability >= 80
        and here().shared >= max(map(_shared, SIDES))
    )


def _sides(geometry: Geometry) -> list[int]:
    """Return the sides that have room for the channels, of which there are even numbers."""
    channels = geometry.w[:2]
    return [side for side in SIDES if max(channels) <= side and not any(c % 2 for c in channels)]


def _rows(side: int) -> int:
    """Return the rows of a tile."""
    return 64 * 128 // side


def _shared(side: int, arrays: int = 3) -> int:
    """Return the bytes of shared memory of a kernel that reads `arrays` arrays: the ring, two
    arrays by rows, numbers of channels.
    """
    rows = _rows(side)
    return 2 * (STAGES * arrays * rows * side + 2 * rows * (side + 8)) + 6 * side * 4


def _kernel(name: str, shared: int, *variant: Any) -> Any:
    found: Any = kernel("pointwise_few", f"few_{name}<{', '.join(map(str, variant))}>")
    found.max_dynamic_shared_size_bytes = shared
    return found


def _blocks(geometry: Geometry, side: int) -> int:
    """Return the blocks that have tiles, at most one for each multiprocessor of a large device."""
    return max(1, min(-(-pointwise.rows(geometry) // _rows(side)), DEVICE))


def moments(
    geometry: Geometry, x: Array, w: Array, y: Array, given: Normalized | None = None
) -> tuple[Array, int]:
    """Compute y of x, or of what the `given` normalization makes of it; return partial sums of y
    and y^2, and into how many each is split.
    """
    (outputs, inputs), side = geometry.w[:2], _sides(geometry)[0]
    blocks, shared = _blocks(geometry, side), _shared(side, arrays=1)
    numbers, ceiling = (None,) * 4 if given is None else given.numbers, given and given.ceiling
    variant = TYPES[y.dtype.name], side, int(given is not None), what_follows(ceiling)
    sums = scratch("channels", 2 * blocks * outputs)
    how, sizes = (*numbers[2:], ceiling or 0.0), (pointwise.rows(geometry), outputs, inputs)
    launch = _kernel("moments", shared, *variant)
    launch((blocks,), (THREADS,), (x, w, *how, y, sums, *sizes), shared_mem=shared)
    return sums, blocks


def both(geometry: Geometry, dtype: DTypeLike) -> list[Make]:
    """Return candidates that run with x or None, weights (O, C), the gradient of the output, and
    what the normalization before wants, without more and y, or the gradient of x. They return
    partial sums, into how many each is split, and shares (shares, O, C) of the gradient of the
    weights.
    """
    return [partial(_both, geometry, dtype, side) for side in _sides(geometry)]


def _both(geometry: Geometry, dtype: DTypeLike, side: int) -> Run:
    (outputs, inputs), kind = geometry.w[:2], TYPES[np.dtype(dtype).name]
    blocks, shared = _blocks(geometry, side), _shared(side)

    def run(
        x: Array | None, w: Array, dy: NormGradient, to: NormSums | Array
    ) -> tuple[tuple[Array, int], Array]:
        sums = scratch("channels", 2 * blocks * inputs)
        part = context().array("gradients of weights", (blocks, outputs, inputs), np.float32)
        if isinstance(to, NormSums):
            (mean, _, factor, shift), after = to.numbers, what_follows(to.ceiling)
            of_x, dx = (to.x, mean, factor, shift, to.ceiling or 0.0), to.masked
        else:
            of_x, dx, after = (x, None, None, None, 0.0), to, NO_RELU
        launch = _kernel("both", shared, kind, side, int(isinstance(to, NormSums)), after)
        of_dy, sizes = (dy.g, dy.x, dy.numbers[2], dy.line), (pointwise.rows(geometry), inputs)
        arguments = *of_dy, w, *of_x, dx, sums, part, *sizes, outputs
        launch((blocks,), (THREADS,), arguments, shared_mem=shared)
        return (sums, blocks), part

    return run


def add(part: Array, dw: Array) -> None:
    """Add the shares of gradients of weights to these."""
    run = kernel("pointwise_few", "add_products")
    run((-(-dw.size // 32),), (1024,), (part, dw, len(part), dw.size))
