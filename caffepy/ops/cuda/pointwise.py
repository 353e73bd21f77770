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
from caffepy.ops.cuda.normalization import BY_X, NO_MASK, mask_kind, what_follows
from caffepy.ops.cuda.small_convolution import here
from caffepy.ops.objects import Normalized, NormForward, NormGradient, NormSums

WIDTHS = (64, 128)
"""Outputs of a block's tile, among which the autotuner chooses."""

ROWS, DEEP, STAGES = 128, 32, 4
"""As in pointwise.cu: rows of a tile, and the ring of pieces of both factors."""

HELD = {32: 4, 64: 3, 128: 2}
"""Blocks of each width that a multiprocessor holds at a time."""


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

    def pixels_of(x: Array) -> Array:
        return x.transpose(0, 2, 3, 1).reshape(-1, x.shape[1])

    def run(x: Array, dy: Array, dw: Array, db: Array | None) -> None:
        matmul(pixels_of(dy).T, pixels_of(x), dw.reshape(dw.shape[:2]), accumulate=True)
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


def rows(geometry: Geometry) -> int:
    """Return the pixels of all outputs."""
    images, _, *out = geometry.y
    return images * prod(out)


def pixels(geometry: Geometry) -> tuple[Any, ...]:
    """Return arguments of a kernel: where the pixels of the outputs are among those of x."""
    (_, _, height, line), out = geometry.x, geometry.y[2:]
    stride = geometry.stride[0] if tuple(out) != (height, line) else 0  # 0: side by side
    numbers = stride, out[1], line, height * line, prod(out)
    return *map(np.int32, numbers), divisor(prod(out)), divisor(out[1])


class _Product:
    """A kernel of pointwise.cu for products (rows, depth) * (depth, outputs), with rows for the
    pixels of a convolution's y.
    """

    def __init__(self, name: str, width: int, geometry: Geometry, outputs: int, depth: int) -> None:
        found: Any = kernel("pointwise", name)
        found.max_dynamic_shared_size_bytes = self._shared = _shared(width)
        self._kernel = found
        across, of_all = -(-outputs // width), rows(geometry)
        self.outputs = outputs
        self.streams = max(1, min(-(-of_all // ROWS), HELD[width] * DEVICE // across))
        self._blocks = self.streams * across
        sizes = of_all, outputs, depth, self.streams
        self._sizes = *map(np.int32, sizes), *pixels(geometry)

    def __call__(self, *arguments: Any, after: tuple[Any, ...] = ()) -> tuple[Array, int]:
        """Run with arrays and numbers, some of them after the sizes; return partial sums (2,
        streams, outputs), and streams.
        """
        partial = scratch("channels", 2 * self.streams * self.outputs)
        given = (*arguments, partial, *self._sizes, *after)
        self._kernel((self._blocks,), (THREADS,), given, shared_mem=self._shared)
        return partial, self.streams


def widths(geometry: Geometry) -> tuple[int, ...]:
    """Return the widths among which the autotuner chooses for `moments`."""
    return (32, 64) if geometry.y[1] <= 32 else WIDTHS


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


def normalized(
    geometry: Geometry, dtype: DTypeLike, width: int, variant: tuple[int, int, int]
) -> Callable[..., None]:
    """Return what runs with x, weights (O, C), and the normalization of their product.

    The variant is 1 if there is an addend, what follows the normalization, and 1 if there are bits.
    """
    sizes = geometry.y[1], geometry.x[1]
    run = _Product(_name("normalized", dtype, width, *variant), width, geometry, *sizes)

    def call(x: Array, w: Array, norm: NormForward) -> None:
        _, _, factor, shift = norm.numbers
        run(x, w, factor, shift, norm.ceiling or 0.0, norm.other, norm.y, norm.bits)

    return call


NARROW = (16, 32)
"""Inputs up to which a product may run in registers throughout (narrow.cu)."""


DEEPEST = 512
"""Most channels on the other side of a product with few, whose weights lie in shared memory."""


def suits_narrow(geometry: Geometry, norm: NormForward) -> bool:
    """Return True if `narrow_normalized` can do what `normalized` does."""
    alone = norm.other is None and norm.bits is None
    return alone and geometry.x[1] <= NARROW[-1] and prod(geometry.stride) == 1


def narrow_normalized(
    geometry: Geometry, dtype: DTypeLike, after: int
) -> Callable[[Array, Array, NormForward], None]:
    """Return what runs with x, weights (O, C), and the normalization of their product, without an
    addend and bits; `after` is what follows it.
    """
    depth, outputs, of_all = geometry.x[1], geometry.y[1], rows(geometry)
    name = _name("normalized", dtype, next(k for k in NARROW if depth <= k), after)
    launch = kernel("narrow", name.replace("pointwise", "narrow"))
    slices = -(-outputs // 64)
    blocks = max(1, min(-(-of_all // ROWS), HELD[128] * DEVICE // slices)), slices

    def call(x: Array, w: Array, norm: NormForward) -> None:
        _, _, factor, shift = norm.numbers
        ceiling = norm.ceiling or 0.0
        launch(blocks, (THREADS,), (x, w, factor, shift, ceiling, norm.y, of_all, outputs, depth))

    return call


Variant = tuple[int, int, int, int]
"""Of what a normalization wants: the kind of mask, what follows the normalization, 1 if there is
more, and 1 if sums are wanted.
"""


def variant_of(norm: NormSums) -> Variant:
    """Return what a normalization wants."""
    mask, after = mask_kind(norm.ceiling, norm.y, norm.bits), what_follows(norm.ceiling)
    return mask, after, int(norm.more is not None), int(norm.x is not None)


Behind = tuple[Array, Array]
"""What is multiplied with the last rows of joined weights (O + C, C), at the pixels of the output,
and the base that is added to the product.
"""


def _behind(geometry: Geometry, behind: Behind | None) -> tuple[Any, ...]:
    array, base = behind or (None, None)
    return array, np.int32(geometry.x[1]), base


def spread(
    geometry: Geometry, dtype: DTypeLike, width: int, joined: bool = False
) -> Callable[..., None]:
    """Return what runs with dy, weights (O, C), dx, and what is behind dy if it is `joined`."""
    sizes = geometry.x[1], geometry.y[1]
    run = _Product(_name("spread", dtype, width, int(joined)), width, geometry, *sizes)

    def call(dy: Array, w: Array, dx: Array, behind: Behind | None = None) -> None:
        _clear(geometry, dx)
        run(dy, w, dx, after=_behind(geometry, behind))

    return call


def suits_narrow_sums(geometry: Geometry, variant: Variant) -> bool:
    """Return True if `narrow_sums` can do what `gradient` does."""
    mask, _, more, sums = variant
    alone = mask in (NO_MASK, BY_X) and not more and bool(sums)
    return alone and geometry.y[1] <= NARROW[-1] and prod(geometry.stride) == 1


def narrow_sums(
    geometry: Geometry, dtype: DTypeLike, after: int
) -> Callable[[Array, Array, NormSums], tuple[Array, int]]:
    """Return what runs as `gradient`; `after` is what follows the normalization."""
    depth, outputs, of_all = geometry.y[1], geometry.x[1], rows(geometry)
    name = _name("sums", dtype, next(k for k in NARROW if depth <= k), after)
    launch = kernel("narrow", name.replace("pointwise", "narrow"))
    slices = -(-outputs // 32)
    blocks = max(1, min(-(-of_all // ROWS), HELD[128] * DEVICE // slices))

    def call(dy: Array, w: Array, norm: NormSums) -> tuple[Array, int]:
        partial = scratch("channels", 2 * blocks * outputs)
        mean, _, factor, shift = norm.numbers
        of_x = norm.x, mean, factor, shift, norm.ceiling or 0.0
        launch(
            (blocks, slices),
            (THREADS,),
            (dy, w, *of_x, norm.masked, partial, of_all, outputs, depth),
        )
        return partial, blocks

    return call


def suits_narrow_both(geometry: Geometry, dtype: DTypeLike) -> bool:
    """Return True if `narrow_both` can do it, and is likely to be faster than a pass for each."""
    return (
        suits_gradients(geometry, dtype)
        and prod(geometry.stride) == 1
        and geometry.y[1] <= NARROW[-1]
        and geometry.y[1] < geometry.x[1] <= DEEPEST
        and prod(geometry.x) < 1 << 30
    )


def narrow_moments(
    geometry: Geometry, dtype: DTypeLike, given: Normalized
) -> Callable[[Array, Array, Array], tuple[Array, int]]:
    """Return what runs with x, weights (O, C), y as `moments`, for the product of what the `given`
    normalization makes of x, where `suits_narrow_both`.
    """
    depth, outputs, of_all = geometry.x[1], geometry.y[1], rows(geometry)
    name = _name("moments", dtype, outputs, what_follows(given.ceiling))
    launch = kernel("narrow", name.replace("pointwise", "narrow"))
    steps = -(-depth // 32)
    shared = steps * (2 * (outputs // 8) * 32 * 8 + 2 * 32 * 4)
    blocks = max(1, min(-(-of_all // ROWS), HELD[128] * DEVICE))
    _, _, factor, shift = given.numbers
    how = factor, shift, given.ceiling or 0.0

    def call(x: Array, w: Array, y: Array) -> tuple[Array, int]:
        partial = scratch("channels", 2 * blocks * outputs)
        arguments = x, w, *how, y, partial, of_all, outputs, depth
        launch((blocks,), (THREADS,), arguments, shared_mem=shared)
        return partial, blocks

    return call


def narrow_both(
    geometry: Geometry, dtype: DTypeLike, after: int
) -> Callable[[NormGradient, Array, NormSums], tuple[tuple[Array, int], Array]]:
    """Return what runs with the gradient of the output, weights (O, C), and what the normalization
    before wants, without more and y; it returns what `gradient` does, and shares (shares, O, C) of
    the gradient of the weights. `after` is what follows the normalization before.
    """
    depth, outputs, of_all = geometry.y[1], geometry.x[1], rows(geometry)
    name = _name("both", dtype, next(k for k in NARROW if depth <= k), after)
    launch = kernel("narrow", name.replace("pointwise", "narrow"))
    slices = -(-outputs // 32)
    blocks = max(1, min(-(-of_all // (ROWS // 2)), HELD[64] * DEVICE // slices))

    def call(dy: NormGradient, w: Array, norm: NormSums) -> tuple[tuple[Array, int], Array]:
        partial = scratch("channels", 2 * blocks * outputs)
        part = context().array("narrow gradient", (blocks, depth, outputs), np.float32)
        mean, _, factor, shift = norm.numbers
        of_dy = dy.g, dy.x, dy.numbers[2], dy.line
        of_x = norm.x, mean, factor, shift, norm.ceiling or 0.0
        to = norm.masked, partial, part
        launch((blocks, slices), (THREADS // 2,), (*of_dy, w, *of_x, *to, of_all, outputs, depth))
        return (partial, blocks), part

    return call


def suits_narrow_gradient(geometry: Geometry, norm: NormSums) -> bool:
    """Return True if `narrow_gradient` can do what a joined `gradient` does."""
    linear = norm.ceiling is None and norm.x is not None
    narrow = geometry.x[1] <= NARROW[-1] and prod(geometry.stride) == 1
    return linear and narrow and _shared_narrow(geometry) <= 40 << 10


def _shared_narrow(geometry: Geometry) -> int:
    """Return the bytes of shared memory for the weights of `narrow_gradient`."""
    inputs, outputs = geometry.x[1], geometry.y[1]
    return (-(-outputs // 32) + 1) * 2 * (inputs // 8) * 32 * 8


def narrow_gradient(
    geometry: Geometry, dtype: DTypeLike, more: bool
) -> Callable[..., tuple[Array, int]]:
    """Return what runs as a joined `gradient`, for a normalization with no ReLU after it."""
    inputs, outputs, of_all = geometry.x[1], geometry.y[1], rows(geometry)
    name = _name("gradient", dtype, inputs, int(more)).replace("pointwise", "narrow")
    launch, shared = kernel("narrow", name), _shared_narrow(geometry)
    blocks = max(1, min(-(-of_all // ROWS), HELD[128] * DEVICE))

    def call(g: Array, w: Array, norm: NormSums, behind: Behind) -> tuple[Array, int]:
        partial = scratch("channels", 2 * blocks * inputs)
        arrays = g, w, *behind, norm.x, norm.numbers[0], norm.more, norm.masked, partial
        launch((blocks,), (THREADS,), (*arrays, of_all, inputs, outputs), shared_mem=shared)
        return partial, blocks

    return call


def _clear(geometry: Geometry, dx: Array) -> None:
    """Write zeros, if there are pixels that no row writes."""
    if prod(geometry.stride) > 1:
        cupy.cuda.runtime.memsetAsync(dx.data.ptr, 0, dx.nbytes, context().stream)


def gradient(
    geometry: Geometry,
    dtype: DTypeLike,
    width: int,
    variant: Variant,
    joined: bool = False,
    period: int = 0,
) -> Callable[..., tuple[Array, int]]:
    """Return what runs with dy, weights (O, C), what a normalization wants, and what is behind dy
    if it is `joined`; it returns partial sums of masked and of masked * (x - mean), and into how
    many each is split.

    With a stride `more` must be 0 where dx is. With a `period` the normalization has the numbers of
    `period` channels, which repeat.
    """
    sizes, numbers = (geometry.x[1], geometry.y[1]), (*variant, int(joined), int(period > 0))
    run = _Product(_name("gradient", dtype, width, *numbers), width, geometry, *sizes)

    def call(
        dy: Array, w: Array, norm: NormSums, behind: Behind | None = None
    ) -> tuple[Array, int]:
        mean, _, factor, shift = norm.numbers
        given = norm.x, mean, factor, shift, norm.ceiling or 0.0, norm.more, norm.bits, norm.masked
        _clear(geometry, norm.masked)
        return run(dy, w, *given, after=(*_behind(geometry, behind), np.int32(period)))

    return call
