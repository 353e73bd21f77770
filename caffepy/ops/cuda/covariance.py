"""Convolutions with a kernel of 1 before a normalization, without their output: what is needed of
it follows from products of the input, which has fewer channels; see covariance.cu.

Numbers of 16 bits with the channels last, on GPUs with wgmma.
"""

from typing import Any

import cupy
import numpy as np
from numpy.typing import DTypeLike

from caffepy.ops.cuda import pointwise
from caffepy.ops.cuda.channels import DEVICE
from caffepy.ops.cuda.compiler import kernel
from caffepy.ops.cuda.context import capability, context
from caffepy.ops.cuda.graphs import Geometry
from caffepy.ops.cuda.launch import THREADS, TYPES, Array
from caffepy.ops.objects import Preparation

ACROSS, DEEP, STAGES, STAGES_OF_ONE = 128, 64, 3, 6
"""As in cross_products.cu: the ring of pieces of both factors, or of one that is both."""

MANY, LARGEST, EACH = 1024, 128, 2
"""As in covariance.cu. With more inputs the matrices of their pairs cost more than is saved."""

RESIDENT = 2
"""Blocks of cross products that a multiprocessor holds at a time."""

WORTH = 20 << 20
"""Bytes of an output from which on it is faster not to have it."""


def suits(geometry: Geometry, dtype: DTypeLike) -> bool:
    """Return True if it is possible without the output, and likely to be faster."""
    (images, outputs, *out), inputs = geometry.y, geometry.x[1]
    return (
        pointwise.suits_gradients(geometry, dtype)
        and capability() == 90
        and 2 * inputs <= outputs
        and inputs <= LARGEST
        and images * outputs * int(np.prod(out)) * np.dtype(dtype).itemsize >= WORTH
    )


class Covariance:
    """Statistics of a convolution's output: means and covariance of its input (C, C), and what
    follows from them, until the gradient is computed.
    """

    def __init__(self, geometry: Geometry, dtype: DTypeLike) -> None:
        self._inputs, self._outputs = geometry.x[1], geometry.y[1]
        self._pixels, self._rows = pointwise.pixels(geometry), pointwise.rows(geometry)
        self._dtype = np.dtype(dtype)
        inputs, outputs, wide = self._inputs, self._outputs, np.float32
        self._covariance = cupy.empty((inputs, inputs), wide)
        self._means = cupy.empty(inputs, wide)
        self._by_w = cupy.empty((outputs, inputs), wide)  # the weights times the covariance
        self._line = cupy.empty((2, outputs), wide)
        self.joined = cupy.empty((outputs + inputs, inputs), dtype)
        """Weights of the gradients of the normalized output, then of the input, in the gradient of
        the input, to which `base` is added.
        """
        self.base = cupy.empty(inputs, wide)

    def prepare(self, x: Array, w: Array, preparation: Preparation) -> None:
        """Compute `Ops.batch_norm_prepare` of the output; w (O, C)."""
        running, fraction, eps, affine, numbers = preparation
        inputs = self._inputs
        products, sums, streams = self._cross(x, x, inputs, alike=True)
        given = products, sums, self._covariance, self._means
        self._launch("finish", inputs, *given, *_ints(self._rows, inputs, streams))
        to = self._by_w, *running, *affine, numbers, fraction, eps
        sizes = _ints(self._rows, self._outputs, inputs)
        blocks = -(-self._outputs // EACH)
        self._launch("prepare", blocks, w, self._covariance, self._means, *to, *sizes)

    def gradient(
        self,
        x: Array,
        w: Array,
        g: Array,
        numbers: Array,
        dw: Array | None,
        dscale: Array | None,
        dbias: Array | None,
    ) -> None:
        """Add to dw, dscale and dbias, write `joined` and `base`; g is the gradient of what the
        normalization gave.
        """
        (_, inverse, factor, _), sizes = numbers, (self._rows, self._outputs, self._inputs)
        products, sums, streams = self._cross(g, x, self._outputs, alike=False)
        given = products, sums, w, self._by_w, self._means, inverse, factor
        to = dw, dscale, dbias, self._line, self.joined
        blocks = -(-self._outputs // EACH)
        self._launch("gradient", blocks, *given, *to, *_ints(*sizes, streams))
        of_both = w, self._line, self._means, self.joined, self.base
        self._launch("factors", self._inputs, *of_both, *_ints(*sizes))

    def _cross(self, a: Array, x: Array, outputs: int, alike: bool) -> tuple[Array, Array, int]:
        """Return partial products of the channels of a, `outputs`, and of x, partial sums
        of those of a, and into how many they are split; a is x, if `alike`, or has its pixels only.
        """
        inputs, width = self._inputs, 64 if self._inputs <= 64 else 128
        tiles = -(-outputs // ACROSS) * -(-inputs // width)
        streams = max(1, min(-(-self._rows // DEEP), RESIDENT * DEVICE // tiles))
        products = context().array("products", (streams, outputs, inputs), np.float32)
        sums = context().array("sums of products", (streams, outputs), np.float32)
        name = f"cross_products<{TYPES[self._dtype.name]}, {width}, {int(alike)}, {int(alike)}>"
        found: Any = kernel("cross_products", name)
        ring = STAGES_OF_ONE * width if alike else STAGES * (ACROSS + width)
        shared = ring * DEEP * 2
        found.max_dynamic_shared_size_bytes = shared
        arguments = a, x, products, sums, *_ints(self._rows, outputs, inputs, streams)
        grid = (tiles * streams,)
        found(grid, (THREADS,), (*arguments, *self._pixels), shared_mem=shared)
        return products, sums, streams

    def _launch(self, name: str, blocks: int, *arguments: Any) -> None:
        kind = TYPES[self._dtype.name]
        kernel("covariance", f"covariance_{name}<{kind}>")((blocks,), (MANY,), arguments)


def _ints(*sizes: int) -> tuple[Any, ...]:
    """Return sizes as arguments of a kernel."""
    return tuple(map(np.int32, sizes))
