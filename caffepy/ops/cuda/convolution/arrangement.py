"""Arrangements: the ways to give a convolution to cuDNN."""

import logging
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from caffepy.ops.cuda import autotune, graphs
from caffepy.ops.cuda.autotune import Run
from caffepy.ops.cuda.bias_relu import bias_relu
from caffepy.ops.cuda.columns import Columns
from caffepy.ops.cuda.compiler import looks_ahead
from caffepy.ops.cuda.filters import Blocks, Filters, dense_filters, plain_filters, suits_blocks
from caffepy.ops.cuda.graphs import Geometry
from caffepy.ops.cuda.launch import Array

log = logging.getLogger(__name__)

DENSE = 4
"""Up to this many groups may be computed as one, with zeros between them."""


class Arrangement:
    """A way to give a convolution to cuDNN: in Caffe's layout if there are no filters; else with
    the channels last, its weights, and its image if it is of blocks, rearranged.
    """

    def __init__(
        self,
        dtype: DTypeLike,
        geometry: Geometry,
        filters: Filters | None = None,
        blocks: Blocks | None = None,
    ) -> None:
        self.dtype, self.geometry, self.blocks = np.dtype(dtype), geometry, blocks
        self.filters: Any = filters

    def image(self, x: Array) -> Array:
        return x if self.blocks is None or looks_ahead() else self.blocks.take(x)

    def weights(self, w: Array, b: Array | None = None) -> tuple[Array, Array | None]:
        return (w, b) if self.filters is None or looks_ahead() else self.filters.take(w, b)

    def plan(self, what: str, arrays: Sequence[Array]) -> Run | None:
        """Return what runs cuDNN's plan; without one None, or im2col in Caffe's layout."""
        last = self.filters is not None
        plan = graphs.find(what, self.geometry, last, arrays)
        if plan is not None:
            return plan.run
        if last or "bias" in what or looks_ahead():
            return None
        message = "cuDNN has no plan for %s of %s: it runs as im2col and matrix products"
        log.warning(message, what, self.geometry)
        run: Run = getattr(Columns(self.geometry), what)
        return run

    def plan_forward(self, x: Array, w: Array, b: Array | None, y: Array, relu: bool) -> Run | None:
        """Return the faster of two: bias and ReLU in cuDNN's plan, or in a kernel after it."""
        image, (weights, bias) = self.image(x), self.weights(w, b)
        what, last = with_bias(relu), self.filters is not None

        def together() -> Run | None:
            plan = self.plan(what, (image, weights, bias, y))
            return plan and (lambda x, w, b, y: plan(self.image(x), *self.weights(w, b), y))

        def apart() -> Run | None:
            plan = self.plan("forward", (image, weights, y))
            if plan is None:
                return None

            def run(x: Array, w: Array, b: Array | None, y: Array) -> None:
                plan(self.image(x), self.weights(w, b)[0], y)
                if b is not None or relu:
                    bias_relu(y, b, relu)

            return run

        candidates = [together, apart] if b is not None or (relu and last) else [apart]
        name = f"{what} apart {self.geometry}{' last' * last}"
        found = autotune.fastest(name, self.dtype, candidates, (x, w, b, y))
        return found and found[1]


def with_bias(relu: bool) -> str:
    """Return the name of a forward pass with a bias."""
    return "forward bias relu" if relu else "forward bias"


def arrangements(geometry: Geometry, dtype: DTypeLike) -> list[Arrangement]:
    """Return the arrangements to time.

    The first is the untimed default: it is likely to be the fastest, or at least never slow (cuDNN
    has few plans for groups).
    """
    ways = [Arrangement(dtype, geometry, plain_filters(geometry, dtype))]
    if 1 < geometry.group <= DENSE:
        ways.insert(0, Arrangement(dtype, *dense_filters(geometry, dtype)))
    if suits_blocks(geometry, dtype):
        blocks = Blocks(geometry, dtype)
        strided = prod(geometry.stride) > 1
        way = Arrangement(dtype, blocks.geometry, blocks.filters, blocks)
        ways.insert(0 if strided else 1, way)
    return ways
