"""Convolutions with a kernel of 1, channels last, whose channels are no whole packs of 16 bytes:
several pixels side by side count as one.

y (R, O) = x (R, C) @ w.T is y (R/f, f O) = x (R/f, f C) @ W.T as the arrays lie, with w in f places
of the diagonal of W and zeros beside them. Kernels that load 16 bytes at a time can do that, those
of cuBLAS and of pointwise.cu, and their sums of channels are f times as many shares.
"""

import cupy
import numpy as np
from numpy.typing import DTypeLike

from caffepy.ops.cuda import pointwise
from caffepy.ops.cuda.autotune import Make, Run
from caffepy.ops.cuda.bias_relu import bias_relu, relu_bias_backward
from caffepy.ops.cuda.blas import matmul
from caffepy.ops.cuda.compiler import prefetch
from caffepy.ops.cuda.context import context
from caffepy.ops.cuda.filters import CHUNK
from caffepy.ops.cuda.graphs import Geometry
from caffepy.ops.cuda.launch import TYPES, Array, launch, launch_expression
from caffepy.ops.objects import NormSums

MOST, WIDEST = 4, 512
"""Most pixels that count as one, and channels that they have: f times as much is multiplied."""


def _pixels(geometry: Geometry, dtype: DTypeLike) -> int:
    """Return how many pixels have whole packs of channels."""
    pack = CHUNK // np.dtype(dtype).itemsize
    channels = geometry.x[1], geometry.y[1]
    return next((f for f in range(1, MOST + 1) if not any(f * c % pack for c in channels)), 0)


def suits(geometry: Geometry, dtype: DTypeLike) -> bool:
    """Return True if several pixels can count as one where a single one has no whole packs."""
    pixels = _pixels(geometry, dtype)
    return (
        pixels > 1
        and np.dtype(dtype).itemsize == 2
        and pointwise.suits(geometry, dtype)
        and pointwise.rows(geometry) % pixels == 0
        and pixels * max(geometry.x[1], geometry.y[1]) <= WIDEST
    )


class Folding:
    """The passes of a convolution that `suits`, in lists of candidates as of small_convolution.

    Forward leaves the weights as it folded them; a backward reuses them.
    """

    def __init__(self, geometry: Geometry, dtype: DTypeLike) -> None:
        self._dtype, self._pixels = np.dtype(dtype), _pixels(geometry, dtype)
        self._inputs, self._outputs = geometry.x[1], geometry.y[1]
        self._rows = pointwise.rows(geometry) // self._pixels
        depth, across = self._pixels * self._inputs, self._pixels * self._outputs
        sizes = (1, depth, 1, self._rows), (across, depth, 1, 1), (1, across, 1, self._rows)
        self._geometry = Geometry(*sizes, (1, 1), (0, 0), (1, 1))
        self._weights: Array | None = None
        self._kept = False  # the weights are those of the last forward
        self._ahead = False  # what `_take` would make is there
        prefetch("folding", [f"fold_weights<{TYPES[self._dtype.name]}>", "add_folded"])

    def begin_forward(self) -> None:
        """Note that the weights belong to an earlier forward pass."""
        self._kept = False

    def arrange_ahead(self, w: Array) -> bool:
        """Make the weights for the next forward passes, if the last one had them; True if so."""
        if self._kept:
            self._take(w)
            self._ahead = True
        return self._ahead

    def end_ahead(self) -> None:
        """Note that the weights may change again."""
        self._ahead = False

    def _take(self, w: Array) -> Array:
        """Return the weights (f O, f C) of folded pixels."""
        if self._ahead and self._weights is not None:
            return self._weights
        if self._weights is None:
            self._weights = cupy.zeros(self._geometry.w[:2], self._dtype)
        sizes = self._outputs, self._inputs, self._pixels
        launch("folding", "fold_weights", self._weights, w.size, w, self._weights, *sizes)
        return self._weights

    def _take_kept(self, w: Array) -> Array:
        """Return the same, made by forward if it was that."""
        return self._weights if self._kept and self._weights is not None else self._take(w)

    def _folded(self, x: Array) -> Array:
        """Return x (N, C, H, W), whose channels lie last, as rows of folded pixels."""
        return x.transpose(0, 2, 3, 1).reshape(self._rows, -1)

    def forward(self, relu: bool) -> list[Make]:
        """Return candidates that run with x, w, b or None, y."""

        def run(x: Array, w: Array, b: Array | None, y: Array) -> None:
            matmul(self._folded(x), self._take(w).T, self._folded(y))
            self._kept = True
            if b is not None or relu:
                bias_relu(y, b, relu)

        return [lambda: run]

    def moments(self, width: int) -> Run:
        """Return what runs with x, w, None, y and y as planes, and returns partial sums."""
        found = pointwise.moments(self._geometry, self._dtype, width)

        def run(x: Array, w: Array, b: None, y: Array, planes: Array) -> tuple[Array, int]:
            partial, shares = found(x, self._take(w), y)
            self._kept = True
            return partial, shares * self._pixels

        return run

    def backward_data(self) -> list[Make]:
        """Return candidates that run with dy, w, dx."""

        def run(dy: Array, w: Array, dx: Array) -> None:
            matmul(self._folded(dy), self._take_kept(w), self._folded(dx))

        return [lambda: run]

    def gradient(self, width: int, variant: pointwise.Variant) -> Run:
        """Return what runs with dy, w, and what a normalization wants, and returns partial sums."""
        of = self._geometry, self._dtype, width, variant
        found = pointwise.gradient(*of, period=self._inputs)

        def run(dy: Array, w: Array, norm: NormSums) -> tuple[Array, int]:
            partial, shares = found(dy, self._take_kept(w), norm)
            return partial, shares * self._pixels

        return run

    def backward_weight(self) -> list[Make]:
        """Return candidates that run with x, dy, dw, db or None, and add to the last two."""

        def run(x: Array, dy: Array, dw: Array, db: Array | None) -> None:
            part = context().array("folded gradient", self._geometry.w[:2], np.float32)
            matmul(self._folded(dy).T, self._folded(x), part)
            sizes = self._outputs, self._inputs, self._pixels
            launch_expression("folding", "add_folded", dw.size, part, dw, *sizes)
            if db is not None:
                relu_bias_backward(None, dy, db)

        return [lambda: run]
