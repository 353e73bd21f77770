"""Vectors across channels, divided by their norms; formulas in `Ops.normalize_forward`."""

from typing import Any

from caffepy.ops.cuda.channels import DEVICE, lying
from caffepy.ops.cuda.compiler import kernel
from caffepy.ops.cuda.context import context
from caffepy.ops.cuda.launch import MOST, THREADS, Array, c_type, launch_blocks
from caffepy.ops.cuda.normalization import scale_backward, scale_forward
from caffepy.ops.protocol.types import Maybe

MOST_PACKS, MOST_CHANNELS = 8, 1024
"""Most packs of 16 bytes of a vector that a lane holds, and most elements of a vector: sums of each
warp have to fit into shared memory.
"""


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


def _packs(*arrays: Array) -> int:
    """Return the packs of a lane if a warp can hold a vector of each of these arrays, else 0."""
    _, channels, inner = lying(*arrays)
    width = 16 // arrays[0].itemsize
    fit = inner == 1 and channels % width == 0 and not any(a.data.ptr % 16 for a in arrays)
    packs = -(-channels // (32 * width))
    return packs if fit and packs <= MOST_PACKS and channels <= MOST_CHANNELS else 0


def _each_warp(name: str, x: Array, packs: int, held: int) -> tuple[Any, int]:
    """Return a kernel with a warp for each vector, and the blocks of which `held` fit on a
    multiprocessor.
    """
    expression = f"{name}<{c_type(x)}, {16 // x.itemsize}, {packs}>"
    vectors = x.size // x.shape[1]
    return kernel("vector_norm", expression), min(-(-vectors * 32 // THREADS), held * DEVICE)


def scaled_norm_forward(x: Array, scale: Array, y: Array, norm: Array, eps: float) -> None:
    packs, channels = _packs(x, y), x.shape[1]
    if not packs:
        normalize_forward(x, y, norm, eps, False)
        scale_forward(y, scale, None, y)
    elif x.size:
        run, blocks = _each_warp("scaled_norm_forward", x, packs, 6)
        arguments = x, scale, y, norm, float(eps), x.size // channels, channels
        run((blocks,), (THREADS,), arguments)


def scaled_norm_backward(
    x: Array, scale: Array, norm: Array, eps: float, dy: Array, dx: Maybe, dscale: Maybe
) -> None:
    packs = _packs(x, dy, dy if dx is None else dx)
    if not x.size:
        return
    if not packs:
        _scaled_norm_backward_in_steps(x, scale, eps, dy, dx, dscale)
        return
    channels, wide = x.shape[1], scale.dtype
    run, blocks = _each_warp("scaled_norm_backward", x, packs, 3)
    part = context().array("norm scales", (blocks, channels), wide)
    arguments = x, scale, norm, dy, dx, part, x.size // channels, channels
    run((blocks,), (THREADS,), arguments, shared_mem=THREADS // 32 * channels * wide.itemsize)
    if dscale is not None:
        add = kernel("vector_norm", f"add_scales<{c_type(scale)}>")
        add((-(-channels // 32),), (32, 8), (part, dscale, blocks, channels))


def _scaled_norm_backward_in_steps(
    x: Array, scale: Array, eps: float, dy: Array, dx: Maybe, dscale: Maybe
) -> None:
    """The same for vectors that no warp holds, with x / norm in memory."""
    n, channels, positions = x.shape
    y = context().array("normalized", x.shape, x.dtype)
    if not x.flags.c_contiguous:
        y = y.reshape(n, positions, channels).transpose(0, 2, 1)
    norm = context().array("norms", (n, positions), scale.dtype)
    normalize_forward(x, y, norm, eps, False)
    if dscale is not None:
        scale_backward(y, scale, dy, None, dscale, None)
    if dx is not None:
        normalize_backward(y, norm, dy, None, dx, False)
        scale_forward(dx, scale, None, dx)
