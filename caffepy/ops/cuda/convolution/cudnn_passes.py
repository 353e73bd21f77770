"""A convolution by cuDNN with the channels last, its weights and image arranged for it.

Where cuDNN has no plan, arrays are converted to float32 in Caffe's layout and back.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from caffepy.ops.cuda import autotune
from caffepy.ops.cuda.autotune import Run
from caffepy.ops.cuda.bias_relu import relu_bias_backward
from caffepy.ops.cuda.compiler import looks_ahead
from caffepy.ops.cuda.context import context
from caffepy.ops.cuda.convolution.arrangement import Arrangement, arrangements
from caffepy.ops.cuda.convolution.plain import Plain
from caffepy.ops.cuda.copies import convert
from caffepy.ops.cuda.graphs import Geometry
from caffepy.ops.cuda.launch import Array

log = logging.getLogger(__name__)


class CudnnPasses:
    """Runners of each pass: those of the fastest arrangement, for these arrays.

    Forward leaves weights and image as it arranged them; a backward whose arrangement is the same
    reuses them. So does what is no pass of cuDNN and arranges the weights alike.
    """

    def __init__(self, geometry: Geometry, dtype: DTypeLike) -> None:
        self.geometry, self.dtype = geometry, np.dtype(dtype)
        self.arrangements = arrangements(geometry, dtype)
        self._used: list[Arrangement] = []
        self._last_forward: Arrangement | None = None  # whose weights are those of the last one
        self._last_image = 0  # address of the x that its blocks were made of
        self._ahead: Arrangement | None = None  # whose weights are there for the next one
        self._plain = Plain(geometry, np.float32)

    def begin_forward(self) -> None:
        """Note that what was arranged belongs to an earlier forward pass."""
        self._last_forward = None

    def end_forward(self, way: Arrangement | None, x: Array) -> None:
        """Note that a forward pass of x arranged its weights and image this way, if any."""
        self._last_forward, self._last_image = way, x.data.ptr

    def arrange_ahead(self, w: Array) -> bool:
        """Arrange the weights for the next forward passes as the last one did; return True if there
        is anything to do.
        """
        way = self._last_forward
        if way is None or way.filters.kept(w) is w:
            return False
        way.filters.take(w, None)
        way.filters.ahead, self._ahead = True, way
        return True

    def end_ahead(self) -> None:
        """Note that the weights may change again."""
        if self._ahead is not None:
            self._ahead.filters.ahead = False
        self._ahead = None

    def use(self, way: Arrangement) -> None:
        """Leave it its memory whatever is chosen for other passes."""
        self._used.append(way)

    def weights(self, way: Arrangement, w: Array) -> Array:
        """Return the weights arranged, by forward if it did so."""
        kept: Array = way.filters.kept(w) if way is self._last_forward else way.weights(w)[0]
        return kept

    def forward(self, x: Array, w: Array, b: Array | None, y: Array, relu: bool) -> Run:
        """Return what runs with x, w, b, y."""
        what, arrays = f"forward{' bias' * (b is not None)}{' relu' * relu}", (x, w, b, y)

        def plain(x: Array, w: Array, b: Array | None, y: Array) -> None:
            to = _moved("y", y, read=False)
            self._plain.forward(_moved("x", x), w, b, to, relu)
            convert(to, y)

        ways = self.arrangements
        found = self._fastest(what, ways, lambda way: way.plan_forward(*arrays, relu), arrays)
        way, plan = found or (None, plain)

        def run(x: Array, w: Array, b: Array | None, y: Array) -> None:
            plan(x, w, b, y)
            self.end_forward(way, x)

        return run

    def backward_data(self, dy: Array, w: Array, dx: Array) -> Run:
        """Return what runs with dy, w, dx."""

        def plan(way: Arrangement) -> Run | None:
            found = way.plan("backward_data", (dy, way.weights(w)[0], dx))
            return found and (lambda dy, w, dx: found(dy, self.weights(way, w), dx))

        def plain(dy: Array, w: Array, dx: Array) -> None:
            to = _moved("x", dx, read=False)
            self._plain.backward_data(_moved("y", dy), w, to)
            convert(to, dx)

        ways = [way for way in self.arrangements if way.blocks is None]
        best = self._fastest("backward_data", ways, plan, (dy, w, dx))
        return best[1] if best else plain

    def backward_weight(self, x: Array, dy: Array) -> Run:
        """Return what runs with x, dy, dw, db or None, and adds to the last two."""

        def plan(way: Arrangement) -> Run | None:
            def part() -> Array:
                return context().array("gradient", way.filters.shape, self.dtype)

            found = way.plan("backward_weight", (self._image(way, x), dy, part()))
            if found is None:
                return None

            def gradient(x: Array, dy: Array) -> Array:
                to = part()
                found(self._image(way, x), dy, to)
                return to

            return gradient

        best = self._fastest("backward_weight", self.arrangements, plan, (x, dy))

        def run(x: Array, dy: Array, dw: Array, db: Array | None) -> None:
            if best is None:
                self._plain.backward_weight(_moved("x", x), _moved("y", dy), dw, None)
            else:
                way, gradient = best
                way.filters.add(gradient(x, dy), dw)
            if db is not None:
                relu_bias_backward(None, dy, db)

        return run

    def _image(self, way: Arrangement, x: Array) -> Array:
        """Return the image arranged, by forward if it did so."""
        if way.blocks is None:
            return x
        if way is self._last_forward and x.data.ptr == self._last_image:
            kept: Array = way.blocks.kept
            return kept
        self._last_image = 0
        return way.blocks.take(x)

    def _fastest(
        self,
        what: str,
        ways: Sequence[Arrangement],
        plan: Callable[[Arrangement], Run | None],
        arguments: Sequence[Any],
    ) -> tuple[Arrangement, Run] | None:
        """Return the fastest arrangement and what runs it; the others free their memory."""
        name, plans = f"{what} ways {self.geometry}", [partial(plan, way) for way in ways]
        found = autotune.fastest(name, self.dtype, plans, arguments)
        if found is None:
            if not looks_ahead():
                missing = "cuDNN has no plan for %s of %s with the channels last, but by conversion"
                log.debug(missing, what, self.geometry)
            return None
        self.use(ways[found[0]])
        for way in self.arrangements:
            if way not in self._used:
                for rearranged in (way.filters, way.blocks):
                    if rearranged is not None:
                        rearranged.forget()
        return self._used[-1], found[1]


def _moved(purpose: str, array: Array, read: bool = True) -> Array:
    to = context().array(f"moved {purpose}", array.shape, np.float32)
    if read:
        convert(array, to)
    return to
