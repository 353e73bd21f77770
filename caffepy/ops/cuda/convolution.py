"""Convolution on a GPU: chosen, for each method at its first call, among several candidates.

With the channels last, the levels of candidates of a forward are:

    Convolution.forward                            key in the tuned plans
    +- "... small": cuDNN, or a kernel for small convolutions
       +- small_convolution: the best tilings by estimated cycles
       +- cuDNN, "... ways": how weights and image are arranged for it (filters.py)
          |     plain        weights (O, kernel, C/g)
          |     dense        few groups as one, with zeros between them
          |     blocks       space to depth; channels padded for tensor cores
          +- "... apart": bias and ReLU in cuDNN's plan, or in a kernel after it
             +- plans.find: cuDNN's plans for the graph, by its heuristics

Each level is timed by autotune.fastest, from the innermost outwards, and remembered on disk. The
gradients have the same levels without "apart"; the gradient of the data has no blocks.

In Caffe's layout (_Plain) there is one level, "apart". Where cuDNN has no plan, arrays with the
channels last are converted to float32 in Caffe's layout; where it has none there either, im2col and
matrix products (columns.py) do it.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import cupy
import numpy as np
from numpy.typing import DTypeLike

from caffepy.core.errors import DeviceError
from caffepy.ops.cuda import autotune, graphs, small_convolution
from caffepy.ops.cuda.bias_relu import bias_relu, relu_bias_backward
from caffepy.ops.cuda.blas import add_into
from caffepy.ops.cuda.columns import Columns
from caffepy.ops.cuda.context import context
from caffepy.ops.cuda.copies import convert
from caffepy.ops.cuda.filters import Blocks, Filters, dense_filters, plain_filters, suits_blocks
from caffepy.ops.cuda.graphs import Geometry
from caffepy.ops.cuda.launch import channels_last, lies_channels_last

log = logging.getLogger(__name__)

Array = Any  # cupy.ndarray
Sizes = Sequence[int]
Run = Callable[..., Any]
Make = Callable[[], Run | None]

DENSE = 4
"""Up to this many groups may be computed as one, with zeros between them."""


class Convolution:
    """A convolution; its arrays may have any layout in any call."""

    def __init__(
        self,
        x_shape: Sizes,
        w_shape: Sizes,
        stride: Sizes,
        pad: Sizes,
        dilation: Sizes,
        group: int,
        dtype: DTypeLike,
    ) -> None:
        x_shape, w_shape, stride, pad, dilation = (
            tuple(int(n) for n in sizes) for sizes in (x_shape, w_shape, stride, pad, dilation)
        )
        axes = list(zip(x_shape[2:], w_shape[2:], stride, pad, dilation, strict=True))
        out = tuple((n + 2 * p - (d * (k - 1) + 1)) // s + 1 for n, k, s, p, d in axes)
        self.y_shape = (x_shape[0], w_shape[0], *out)
        assert x_shape[1] == group * w_shape[1]
        missing = (1,) * (2 - len(axes))  # cuDNN knows no convolution over one axis
        self._geometry = Geometry(
            (*x_shape[:2], *missing, *x_shape[2:]),
            (*w_shape[:2], *missing, *w_shape[2:]),
            (*self.y_shape[:2], *missing, *out),
            missing + stride,
            (0,) * len(missing) + pad,
            missing + dilation,
        )
        self._made: dict[Any, _Plain | _ChannelsLast] = {}

    def forward(self, x: Array, w: Array, b: Array | None, y: Array, relu: bool = False) -> None:
        if y.size:
            self._for(x, y).forward(x, w, b, self._shaped(y), relu)

    def backward_data(self, dy: Array, w: Array, dx: Array) -> None:
        if not dx.size:
            return
        if dy.size:
            self._for(dx, dy).backward_data(dy, w, dx)
        else:
            dx.fill(0)

    def backward_weight(self, x: Array, dy: Array, dw: Array | None, db: Array | None) -> None:
        if not dy.size:
            return
        dy = self._shaped(dy)
        if dw is not None:
            self._for(x, dy).backward_weight(x, dy, dw, db)
        elif db is not None:
            relu_bias_backward(None, dy, db)

    def _shaped(self, y: Array) -> Array:
        """Return y in its usual shape: its first axes may be several in place of N, and the last
        one may be missing.
        """
        return y if y.shape == self.y_shape else y.reshape(self.y_shape)

    def _for(self, x: Array, y: Array) -> "_Plain | _ChannelsLast":
        key = x.dtype, x.strides, y.strides
        if key not in self._made:
            narrow = x.dtype.itemsize == 2
            if narrow and not (lies_channels_last(x) and lies_channels_last(y)):
                raise DeviceError(
                    "numbers of 16 bits must lie with the channels last, "
                    f"not {x.shape} by {x.strides}"
                )
            kind = _ChannelsLast if narrow or channels_last(x, y) else _Plain
            self._made[key] = kind(self._geometry, x.dtype)
        return self._made[key]


class _Plain:
    """A convolution in Caffe's layout."""

    def __init__(self, geometry: Geometry, dtype: DTypeLike) -> None:
        self.geometry, self.dtype = geometry, np.dtype(dtype)
        self._forward: dict[tuple[bool, bool], Run] = {}
        self._backward_data: Run | None = None
        self._backward_weight: Run | None = None

    def forward(self, x: Array, w: Array, b: Array | None, y: Array, relu: bool) -> None:
        key = b is not None, relu
        if key not in self._forward:
            self._forward[key] = self._plan_forward(x, w, b, y, relu)
        self._forward[key](x, w, b, y)

    def backward_data(self, dy: Array, w: Array, dx: Array) -> None:
        self._backward_data = self._backward_data or self._plan("backward_data", (dy, w, dx))
        self._backward_data(dy, w, dx)

    def backward_weight(self, x: Array, dy: Array, dw: Array, db: Array | None) -> None:
        part = context().array("gradient", dw.shape, dw.dtype)
        self._backward_weight = self._backward_weight or self._plan(
            "backward_weight", (x, dy, part)
        )
        self._backward_weight(x, dy, part)
        add_into(part, dw)
        if db is not None:
            relu_bias_backward(None, dy, db)

    def _plan(self, what: str, arrays: Sequence[Array]) -> Run:
        plan = graphs.find(what, self.geometry, False, arrays)
        if plan is not None:
            return plan.run
        log.warning(
            "cuDNN has no plan for %s of %s: it runs as im2col and matrix products",
            what,
            self.geometry,
        )
        run: Run = getattr(Columns(self.geometry), what)
        return run

    def _plan_forward(self, x: Array, w: Array, b: Array | None, y: Array, relu: bool) -> Run:
        def apart() -> Run:
            plain = self._plan("forward", (x, w, y))

            def run(x: Array, w: Array, b: Array | None, y: Array) -> None:
                plain(x, w, y)
                if b is not None or relu:
                    bias_relu(y, b, relu)

            return run

        def together() -> Run | None:
            plan = graphs.find(_with_bias(relu), self.geometry, False, (x, w, b, y))
            return None if plan is None else plan.run

        candidates = [apart] if b is None else [together, apart]
        found = autotune.fastest(
            f"{_with_bias(relu)} apart {self.geometry}", self.dtype, candidates, (x, w, b, y)
        )
        assert found is not None
        return found[1]


def _with_bias(relu: bool) -> str:
    return "forward bias relu" if relu else "forward bias"


class _Candidate:
    """An arrangement for cuDNN: a convolution of these sizes, its weights and, if it is of blocks,
    its image.
    """

    def __init__(self, geometry: Geometry, filters: Filters, blocks: Blocks | None = None) -> None:
        self.geometry, self.filters, self.blocks = geometry, filters, blocks

    def image(self, x: Array) -> Array:
        return x if self.blocks is None else self.blocks.take(x)

    def forget(self) -> None:
        self.filters.forget()
        if self.blocks is not None:
            self.blocks.forget()


def _candidates(geometry: Geometry, dtype: DTypeLike) -> list[_Candidate]:
    """Return the arrangements to time.

    The first is the untimed default: it is likely to be the fastest, or at least never slow (cuDNN
    has few plans for groups).
    """
    candidates = [_Candidate(geometry, plain_filters(geometry, dtype))]
    if 1 < geometry.group <= DENSE:
        candidates.insert(0, _Candidate(*dense_filters(geometry, dtype)))
    if suits_blocks(geometry, dtype):
        blocks = Blocks(geometry, dtype)
        strided = prod(geometry.stride) > 1
        candidates.insert(0 if strided else 1, _Candidate(blocks.geometry, blocks.filters, blocks))
    return candidates


class _ChannelsLast:
    """A convolution with the channels last, in any element type.

    Forward leaves weights and image as it arranged them; a backward whose candidate is the same
    reuses them.
    """

    def __init__(self, geometry: Geometry, dtype: DTypeLike) -> None:
        self.geometry, self.dtype = geometry, np.dtype(dtype)
        self._candidates = _candidates(geometry, dtype)
        self._small = small_convolution.suits(geometry, dtype)
        self._used: list[_Candidate] = []
        self._forward: dict[tuple[bool, bool], Run] = {}
        self._backward_data: Run | None = None
        self._backward_weight: dict[bool, Run] = {}
        self._last_forward: _Candidate | None = None  # whose weights are those of the last forward
        self._last_image = 0  # address of the x that its blocks were made of
        self._plain = _Plain(geometry, np.float32)

    def forward(self, x: Array, w: Array, b: Array | None, y: Array, relu: bool) -> None:
        key = b is not None, relu
        if key not in self._forward:
            candidates: list[Make] = [partial(self._cudnn_forward, x, w, b, y, relu)]
            if self._small:
                candidates += small_convolution.forward(self.geometry, self.dtype, relu)
            self._forward[key] = self._cudnn_or_small(
                _with_bias(relu) if key[0] else "forward", candidates, (x, w, b, y)
            )
        self._last_forward = None
        self._forward[key](x, w, b, y)

    def backward_data(self, dy: Array, w: Array, dx: Array) -> None:
        if self._backward_data is None:
            candidates: list[Make] = [partial(self._cudnn_backward_data, dy, w, dx)]
            if self._small:
                candidates += small_convolution.backward_data(self.geometry, self.dtype)
            self._backward_data = self._cudnn_or_small("backward_data", candidates, (dy, w, dx))
        self._backward_data(dy, w, dx)

    def backward_weight(self, x: Array, dy: Array, dw: Array, db: Array | None) -> None:
        key = db is not None
        if key not in self._backward_weight:
            candidates: list[Make] = [partial(self._cudnn_backward_weight, x, dy)]
            if self._small:
                candidates += small_convolution.backward_weight(self.geometry, self.dtype)
            scratch = [None if a is None else cupy.zeros_like(a) for a in (dw, db)]
            what = f"backward_weight{' bias' * key}"
            self._backward_weight[key] = self._cudnn_or_small(what, candidates, (x, dy, *scratch))
        self._backward_weight[key](x, dy, dw, db)

    def _cudnn_or_small(
        self, what: str, candidates: Sequence[Make], arguments: Sequence[Any]
    ) -> Run:
        """Return the fastest of cuDNN and the kernels for small convolutions."""
        found = autotune.fastest(f"{what} small {self.geometry}", self.dtype, candidates, arguments)
        assert found is not None
        return found[1]

    def _cudnn_forward(self, x: Array, w: Array, b: Array | None, y: Array, relu: bool) -> Run:
        what = f"forward{' bias' * (b is not None)}{' relu' * relu}"
        found = self._fastest(
            what, self._candidates, partial(self._plan_forward, x, w, b, y, relu), (x, w, b, y)
        )
        candidate, plan = found or (None, partial(self._forward_plain, relu))

        def run(x: Array, w: Array, b: Array | None, y: Array) -> None:
            plan(x, w, b, y)
            self._last_forward, self._last_image = candidate, x.data.ptr

        return run

    def _cudnn_backward_data(self, dy: Array, w: Array, dx: Array) -> Run:
        candidates = [candidate for candidate in self._candidates if candidate.blocks is None]
        found = self._fastest(
            "backward_data", candidates, partial(self._plan_backward_data, dy, w, dx), (dy, w, dx)
        )
        return found[1] if found else self._backward_data_plain

    def _cudnn_backward_weight(self, x: Array, dy: Array) -> Run:
        found = self._fastest(
            "backward_weight", self._candidates, partial(self._plan_backward_weight, x, dy), (x, dy)
        )
        add = partial(self._add_gradient, *found) if found else self._backward_weight_plain

        def run(x: Array, dy: Array, dw: Array, db: Array | None) -> None:
            add(x, dy, dw)
            if db is not None:
                relu_bias_backward(None, dy, db)

        return run

    def _fastest(
        self,
        what: str,
        candidates: Sequence[_Candidate],
        plan: Callable[[_Candidate], Run | None],
        arguments: Sequence[Any],
    ) -> tuple[_Candidate, Run] | None:
        """Return the fastest arrangement and what runs it; the others free their memory."""
        name = f"{what} ways {self.geometry}"
        found = autotune.fastest(
            name, self.dtype, [partial(plan, candidate) for candidate in candidates], arguments
        )
        if found is None:
            log.debug(
                "cuDNN has no plan for %s of %s with the channels last: arrays are converted",
                what,
                self.geometry,
            )
            return None
        self._used.append(candidates[found[0]])
        for candidate in self._candidates:
            if candidate not in self._used:
                candidate.forget()
        return self._used[-1], found[1]

    def _plan_forward(
        self, x: Array, w: Array, b: Array | None, y: Array, relu: bool, candidate: _Candidate
    ) -> Run | None:
        image, (weights, bias) = candidate.image(x), candidate.filters.take(w, b)

        def together() -> Run | None:
            plan = graphs.find(
                _with_bias(relu), candidate.geometry, True, (image, weights, bias, y)
            )
            return (
                None
                if plan is None
                else lambda x, w, b, y: plan.run(
                    candidate.image(x), *candidate.filters.take(w, b), y
                )
            )

        def apart() -> Run | None:
            plan = graphs.find("forward", candidate.geometry, True, (image, weights, y))
            if plan is None:
                return None

            def run(x: Array, w: Array, b: Array | None, y: Array) -> None:
                plan.run(candidate.image(x), candidate.filters.take(w, b)[0], y)
                if b is not None or relu:
                    bias_relu(y, b, relu)

            return run

        candidates = [together, apart] if b is not None or relu else [apart]
        found = autotune.fastest(
            f"{_with_bias(relu)} apart {candidate.geometry} last",
            self.dtype,
            candidates,
            (x, w, b, y),
        )
        return found and found[1]

    def _plan_backward_data(
        self, dy: Array, w: Array, dx: Array, candidate: _Candidate
    ) -> Run | None:
        plan = graphs.find(
            "backward_data", candidate.geometry, True, (dy, candidate.filters.take(w, None)[0], dx)
        )

        def weights(w: Array) -> Array:
            return (
                candidate.filters.kept(w)
                if candidate is self._last_forward
                else candidate.filters.take(w, None)[0]
            )

        return None if plan is None else lambda dy, w, dx: plan.run(dy, weights(w), dx)

    def _plan_backward_weight(self, x: Array, dy: Array, candidate: _Candidate) -> Run | None:
        def part() -> Array:
            return context().array("gradient", candidate.filters.shape, self.dtype)

        def image(x: Array) -> Array:
            if candidate.blocks is None:
                return x
            if candidate is self._last_forward and x.data.ptr == self._last_image:
                return candidate.blocks.kept
            self._last_image = 0
            return candidate.blocks.take(x)

        plan = graphs.find("backward_weight", candidate.geometry, True, (image(x), dy, part()))
        if plan is None:
            return None

        def run(x: Array, dy: Array) -> Array:
            gradient = part()
            plan.run(image(x), dy, gradient)
            return gradient

        return run

    @staticmethod
    def _add_gradient(candidate: _Candidate, run: Run, x: Array, dy: Array, dw: Array) -> None:
        candidate.filters.add(run(x, dy), dw)

    # Without a plan of cuDNN: by float32 arrays in Caffe's layout.

    def _moved(self, purpose: str, array: Array, read: bool = True) -> Array:
        to = context().array(f"moved {purpose}", array.shape, np.float32)
        if read:
            convert(array, to)
        return to

    def _forward_plain(self, relu: bool, x: Array, w: Array, b: Array | None, y: Array) -> None:
        to = self._moved("y", y, read=False)
        self._plain.forward(self._moved("x", x), w, b, to, relu)
        convert(to, y)

    def _backward_data_plain(self, dy: Array, w: Array, dx: Array) -> None:
        to = self._moved("x", dx, read=False)
        self._plain.backward_data(self._moved("y", dy), w, to)
        convert(to, dx)

    def _backward_weight_plain(self, x: Array, dy: Array, dw: Array) -> None:
        self._plain.backward_weight(self._moved("x", x), self._moved("y", dy), dw, None)
