"""Convolutions with a kernel of 1, channels last, as products of pixels and weights.

Gradients of the weights: a product that cuBLAS adds to float32 sums, where cuDNN leaves a narrow
gradient that another pass adds; the interface is that of small_convolution, of which it has this
pass alone. Products whose results a BatchNorm reads are kernels of our own (pointwise.cu), in 16
bits: they give the sums of each channel too, for which another pass would read all results again.
"""

from collections.abc import Callable
from math import prod
from typing import Any

import cupy
import numpy as np
from numpy.typing import DTypeLike

from caffepy.ops.cuda.autotune import Make, Run
from caffepy.ops.cuda.bias_relu import relu_bias_backward
from caffepy.ops.cuda.blas import matmul
from caffepy.ops.cuda.channels import DEVICE
from caffepy.ops.cuda.compiler import kernel
from caffepy.ops.cuda.context import context
from caffepy.ops.cuda.graphs import Geometry
from caffepy.ops.cuda.launch import THREADS, TYPES, Array, divisor, scratch
from caffepy.ops.cuda.small_convolution import here
from caffepy.ops.objects import NormSums

WIDTHS = (64, 128)
"""Outputs of a block's tile, among which the autotuner chooses."""

ROWS, DEEP, STAGES = 128, 32, 4
"""As in pointwise.cu: rows of a tile, and the ring of pieces of both factors."""

RESIDENT = 2
"""Blocks that a multiprocessor holds at a time."""


def suits(geometry: Geometry, dtype: DTypeLike) -> bool:
    """Return True if a pixel of the output is a product of the weights and one of the input."""
    return _is_product(geometry) and prod(geometry.stride) == 1


def _is_product(geometry: Geometry) -> bool:
    return (
        geometry.group == prod(geometry.w[2:]) == 1
        and not any(geometry.padding)
        and geometry.w[1] > 1
    )


def backward_weight(geometry: Geometry, dtype: DTypeLike) -> list[Make]:
    """Return candidates that run with x, dy, dw, db or None, and add to the last two."""

    def pixels(x: Array) -> Array:
        return x.transpose(0, 2, 3, 1).reshape(-1, x.shape[1])

    def run(x: Array, dy: Array, dw: Array, db: Array | None) -> None:
        matmul(pixels(dy).T, pixels(x), dw.reshape(dw.shape[:2]), accumulate=True)
        if db is not None:
            relu_bias_backward(None, dy, db)

    def make() -> Run:
        return run

    return [make]


def suits_gradients(geometry: Geometry, dtype: DTypeLike) -> bool:
    """Return True if pointwise.cu has the gradient of the data: packs of 8 channels, strides alike.

    That of a larger stride is 0 at the pixels that it steps over.
    """
    return _is_product(geometry) and _suits(geometry, dtype)


def suits_moments(geometry: Geometry, dtype: DTypeLike) -> bool:
    """Return True if pointwise.cu has the product: packs of 8 channels, strides alike. A larger
    kernel must be without padding, stride and dilation.
    """
    lines = not any(geometry.padding) and prod(geometry.stride) == prod(geometry.dilation) == 1
    return (_is_product(geometry) or lines) and _suits(geometry, dtype)


def _suits(geometry: Geometry, dtype: DTypeLike) -> bool:
    return (
        np.dtype(dtype).itemsize == 2
        and len(geometry.stride) == 2
        and geometry.group == 1
        and geometry.stride[0] == geometry.stride[1]
        and geometry.x[1] % 8 == geometry.y[1] % 8 == 0
        and here().capability >= 80
        and here().shared >= max(_shared(width) for width in WIDTHS)
    )


def _name(name: str, dtype: DTypeLike, *numbers: int) -> str:
    return f"pointwise_{name}<{TYPES[np.dtype(dtype).name]}, {', '.join(map(str, numbers))}>"


def _shared(width: int) -> int:
    """Return the bytes of shared memory of a block: the ring, a tile of results, sums of warps."""
    ring = STAGES * DEEP * (ROWS + width)
    return 2 * (ring + ROWS * (width + 8)) + 4 * 2 * width * THREADS // 32


class _Product:
    """A kernel of pointwise.cu for products (rows, depth) * (depth, outputs), with rows for the
    pixels of a convolution's y.
    """

    def __init__(self, name: str, width: int, geometry: Geometry, outputs: int, depth: int) -> None:
        found: Any = kernel("pointwise", name)
        found.max_dynamic_shared_size_bytes = self._shared = _shared(width)
        self._kernel = found
        (_, _, height, line), (images, _, *out) = geometry.x, geometry.y
        rows, across = images * prod(out), -(-outputs // width)
        self.outputs = outputs
        self.streams = max(1, min(-(-rows // ROWS), RESIDENT * DEVICE // across))
        self._blocks = self.streams * across
        sizes = rows, outputs, depth, self.streams
        # rows may lie side by side
        stride = geometry.stride[0] if out != [height, line] else 0
        pixels = stride, out[1], line, height * line, prod(out)
        divisors = divisor(prod(out)), divisor(out[1])
        self._sizes = (*map(np.int32, sizes), *map(np.int32, pixels), *divisors)

    def __call__(self, *arguments: Any, after: tuple[Any, ...] = ()) -> tuple[Array, int]:
        """Run with arrays and numbers, some of them after the sizes; return partial sums (2,
        streams, outputs), and streams.
        """
        partial = scratch("channels", 2 * self.streams * self.outputs)
        given = (*arguments, partial, *self._sizes, *after)
        self._kernel((self._blocks,), (THREADS,), given, shared_mem=self._shared)
        return partial, self.streams


def moments(
    geometry: Geometry, dtype: DTypeLike, width: int
) -> Callable[[Array, Array, Array], tuple[Array, int]]:
    """Return what runs with x, weights (O, C), y; it returns partial sums of y and y^2, and into
    how many each is split.
    """
    (_, channels, _, line), outputs, (high, wide) = geometry.x, geometry.y[1], geometry.w[2:]
    run, depth = wide * channels, high * wide * channels
    product = _Product(_name("moments", dtype, width), width, geometry, outputs, depth)
    taps = np.int32(channels), np.int32(line * channels - run), divisor(run)
    return lambda x, w, y: product(x, w, y, after=taps)


def spread(
    geometry: Geometry, dtype: DTypeLike, width: int
) -> Callable[[Array, Array, Array], None]:
    """Return what runs with dy, weights (O, C), dx."""
    sizes = geometry.x[1], geometry.y[1]
    run = _Product(_name("spread", dtype, width), width, geometry, *sizes)

    def call(dy: Array, w: Array, dx: Array) -> None:
        _clear(geometry, dx)
        run(dy, w, dx)

    return call


def _clear(geometry: Geometry, dx: Array) -> None:
    """Write zeros, if there are pixels that no row writes."""
    if prod(geometry.stride) > 1:
        cupy.cuda.runtime.memsetAsync(dx.data.ptr, 0, dx.nbytes, context().stream)


def gradient(
    geometry: Geometry, dtype: DTypeLike, width: int, variant: tuple[int, int, int]
) -> Callable[[Array, Array, NormSums], tuple[Array, int]]:
    """Return what runs with dy, weights (O, C) and what a normalization wants; it returns partial
    sums of masked and of masked * (x - mean), and into how many each is split.

    The variant is the kind of mask, what follows the normalization, and 1 if there is more. With a
    stride `more` must be 0 where dx is.
    """
    sizes = geometry.x[1], geometry.y[1]
    run = _Product(_name("gradient", dtype, width, *variant), width, geometry, *sizes)

    def call(dy: Array, w: Array, norm: NormSums) -> tuple[Array, int]:
        mean, _, factor, shift = norm.numbers
        numbers = mean, factor, shift, norm.ceiling or 0.0
        _clear(geometry, norm.masked)
        return run(dy, w, norm.x, *numbers, norm.more, norm.bits, norm.masked)

    return call
