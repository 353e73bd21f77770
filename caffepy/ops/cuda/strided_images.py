"""A convolution of images of few channels with its bias, MAX pooling and ReLU at once, of a kernel
and stride such as those of GoogLeNet's first; see strided_images.cu.

Numbers of 16 bits with the channels last, compute capability 9.0.
"""

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from caffepy.ops.cuda.autotune import Make, Run
from caffepy.ops.cuda.compiler import kernel, looks_ahead
from caffepy.ops.cuda.context import capability, context
from caffepy.ops.cuda.filters import Filters
from caffepy.ops.cuda.graphs import Geometry
from caffepy.ops.cuda.launch import THREADS, TYPES, Array
from caffepy.ops.objects import Maxima, Windows

OUTPUTS, STEP, CHUNK, RING, KEPT, WARPS = 64, 4, 8, 16, 6, 4
"""As in strided_images.cu; of a chunk the numbers, of a block the warps."""

POOLING: Windows = ((3, 3), (2, 2), (0, 0))

DEPTH = 224
"""Numbers of a row of weights, half of which lie in a warp's registers, at most."""

SHARES = 2
"""Blocks for an image: as many as a multiprocessor holds."""


class _Sizes:
    """Sizes of strided_images.cu: pixels before a window, chunks that a line of it covers."""

    def __init__(self, geometry: Geometry) -> None:
        (_, channels, *_), (_, _, kernel, _), (stride, _) = geometry.x, geometry.w, geometry.stride
        self.lead = -geometry.padding[0] % stride
        self.chunks = -(-(kernel + self.lead) // stride)
        self.depth = kernel * self.chunks * CHUNK
        self.filled = channels * stride
        self.columns = -(-geometry.y[3] // 16) * 16
        self.pitch = self.columns + self.chunks - 1
        self.new = STEP * stride


def suits(geometry: Geometry, dtype: DTypeLike, pooling: Windows) -> bool:
    """Return True if these kernels can do it."""
    if len(geometry.stride) != 2 or pooling != POOLING or geometry.group > 1:
        return False
    (_, _, height, width), (_, _, *kernels) = geometry.x, geometry.w
    square = all(a == b for a, b in (kernels, geometry.stride, geometry.padding, geometry.dilation))
    if not square or np.dtype(dtype).itemsize != 2 or capability() != 90:
        return False
    s, kernel_size, stride = _Sizes(geometry), kernels[0], geometry.stride[0]
    return (
        geometry.dilation[0] == 1
        and geometry.y[1] == OUTPUTS
        and s.filled <= CHUNK
        and s.filled % 2 == 0
        and width % stride == 0
        and height * width * geometry.x[1] % 2 == 0
        and s.chunks % 2 == 0
        and kernel_size * s.chunks % 4 == 0
        and s.depth <= DEPTH
        and s.depth % 32 == 0
        and s.new + kernel_size - stride <= RING
        and s.pitch <= WARPS * 32
        and min(geometry.y[2:]) >= POOLING[0][0]
    )


def forward(geometry: Geometry, maxima: Maxima, dtype: DTypeLike) -> list[Make]:
    """Return candidates that run with x, w, b or None, an output, maxima."""
    if not (maxima.relu and suits(geometry, dtype, maxima.window)):
        return []
    s = _Sizes(geometry)
    kernel_size, stride, channels = geometry.w[2], geometry.stride[0], geometry.x[1]
    places = [
        (u * s.chunks + (v + s.lead) // stride) * CHUNK + (v + s.lead) % stride * channels
        for u in range(kernel_size)
        for v in range(kernel_size)
    ]
    share = -(-maxima.y.shape[2] // SHARES)
    blocks = geometry.x[0] * -(-maxima.y.shape[2] // share)
    shape = _shape(geometry, maxima, share)

    def plan() -> Run:
        filters = Filters(geometry, dtype, (kernel_size, s.chunks, CHUNK), places, False)
        run = _load("convolve_and_pool", geometry, dtype, KEPT)

        def forward(x: Array, w: Array, b: Array | None, _: Array, to: Maxima) -> None:
            weights = w if looks_ahead() else filters.take(w, None)[0]
            run((blocks,), args=(x, weights, b, to.y, to.where, *shape))

        return forward

    return [plan]


def backward_weight(geometry: Geometry, maxima: Maxima, dtype: DTypeLike) -> list[Make]:
    """Return candidates that run with x, an output, maxima, dw, db or None."""
    if not (maxima.relu and suits(geometry, dtype, maxima.window)):
        return []
    depth, lines = _Sizes(geometry).depth, geometry.y[2]
    share = -(-lines // (SHARES * STEP)) * STEP
    blocks = geometry.x[0] * -(-lines // share)
    shape = _shape(geometry, maxima, share)

    def plan() -> Run:
        run = _load("pooled_gradient", geometry, dtype, STEP)
        add = kernel("strided_images", f"add_pooled_gradient<{_numbers(geometry)}>")

        def gradient(x: Array, _: Array, of: Maxima, dw: Array, db: Array | None) -> None:
            partial_sums = context().array("gradient", (blocks, OUTPUTS, depth), np.float32)
            sums = context().array("shares", (blocks, OUTPUTS), np.float32)
            run((blocks,), args=(x, of.y, of.where, partial_sums, sums, *shape))
            add((OUTPUTS, depth // 32), (THREADS,), (partial_sums, sums, dw, db, np.int32(blocks)))

        return gradient

    return [plan]


def _shape(geometry: Geometry, maxima: Maxima, share: int) -> tuple[Any, ...]:
    """Return the arguments of a Shape of strided_images.cu."""
    sizes = *geometry.x[2:], *geometry.y[2:], *maxima.y.shape[2:], share
    return tuple(map(np.int32, sizes))


def _numbers(geometry: Geometry) -> str:
    """Return arguments of the templates: channels, kernel, stride, padding."""
    sizes = geometry.x[1], geometry.w[2], geometry.stride[0], geometry.padding[0]
    return ", ".join(map(str, sizes))


def _load(name: str, geometry: Geometry, dtype: DTypeLike, lines: int) -> Run:
    """Return what launches a kernel that keeps `lines` lines of the convolution."""
    s, kind = _Sizes(geometry), TYPES[np.dtype(dtype).name]
    shared = lines * s.columns * OUTPUTS * 2 + RING * s.pitch * CHUNK * 2
    found: Any = kernel("strided_images", f"{name}<{kind}, {_numbers(geometry)}>")
    found.max_dynamic_shared_size_bytes = shared
    return partial(found, block=(WARPS * 32,), shared_mem=shared)
