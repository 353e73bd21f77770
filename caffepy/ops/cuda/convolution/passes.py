"""The passes of a convolution with the channels last, each by cuDNN or by a kernel of our own."""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from types import ModuleType
from typing import Any

import cupy
import numpy as np
from numpy.typing import DTypeLike

from caffepy.ops.cuda import (
    autotune,
    compiler,
    depthwise,
    few_channels,
    filter_gradient,
    folding,
    pointwise,
    rgb_images,
    small_convolution,
    small_images,
)
from caffepy.ops.cuda.autotune import Make, Run, run_kept
from caffepy.ops.cuda.bias_relu import relu_bias_backward
from caffepy.ops.cuda.compiler import looks_ahead
from caffepy.ops.cuda.convolution.arrangement import with_bias
from caffepy.ops.cuda.convolution.cudnn_passes import CudnnPasses
from caffepy.ops.cuda.folding import Folding
from caffepy.ops.cuda.graphs import Geometry
from caffepy.ops.cuda.launch import TYPES, Array

LAUNCHES = 10
"""The host takes as long for a convolution and a pass after it as for this many kernels, while
others are compiled.
"""


class Passes:
    """Forward and gradients in any element type."""

    def __init__(self, geometry: Geometry, dtype: DTypeLike) -> None:
        self.geometry, self.dtype = geometry, np.dtype(dtype)
        self.cudnn = CudnnPasses(geometry, dtype)
        own = (
            (small_convolution, "small"),
            (few_channels, "few channels"),
            (depthwise, "depthwise"),
            (pointwise, "pointwise"),
        )
        suiting = (each for each in own if each[0].suits(geometry, dtype))
        self._own: list[ModuleType]
        self._own, self._kind = next((([module], kind) for module, kind in suiting), ([], "small"))
        if small_images.suits(geometry, dtype):
            self._own.append(small_images)
        if rgb_images.suits(geometry, dtype):
            self._own.append(rgb_images)
            self._kind += " rgb"
        if filter_gradient.suits(geometry, dtype):
            self._own.append(filter_gradient)
            self._kind += " filter gradient"
        self.folding: Folding | None = None
        if folding.suits(geometry, dtype):
            self.folding, self._kind = Folding(geometry, dtype), "folding"
        self._runs: dict[Any, Run] = {}
        self._begin_to_compile()

    def _begin_to_compile(self) -> None:
        """Compile the kernels that candidates of cuDNN need."""
        kind = TYPES[self.dtype.name]
        names = "bias_relu", "relu_bias_rows", "add_shares"
        compiler.prefetch("bias_relu", [f"{name}<{kind}>" for name in names])

    def arrange_ahead(self, w: Array) -> bool:
        """Arrange the weights for the next forward passes; return True if that is of use."""
        folded = self.folding is not None and self.folding.arrange_ahead(w)
        return self.cudnn.arrange_ahead(w) or folded

    def end_ahead(self) -> None:
        """Note that the weights may change again."""
        self.cudnn.end_ahead()
        if self.folding is not None:
            self.folding.end_ahead()

    def forward(self, x: Array, w: Array, b: Array | None, y: Array, relu: bool) -> None:
        arrays = x, w, b, y

        def make() -> Run | None:
            what = with_bias(relu) if b is not None else "forward"
            own = self._own_way("forward")
            cudnn = partial(self.cudnn.forward, *arrays, relu)
            return self._cudnn_or_own(what, cudnn, own and partial(own, relu=relu), arrays)

        self.cudnn.begin_forward()
        if self.folding is not None:
            self.folding.begin_forward()
        run_kept(self._runs, ("forward", b is not None, relu), make, arrays)

    def backward_data(self, dy: Array, w: Array, dx: Array) -> None:
        what, arrays = "backward_data", (dy, w, dx)

        def make() -> Run | None:
            cudnn = partial(self.cudnn.backward_data, *arrays)
            own = self._own_way(what)
            if own is None and pointwise.suits_gradients(self.geometry, self.dtype):
                own = self._spreads
            return self._cudnn_or_own(what, cudnn, own, arrays)

        run_kept(self._runs, what, make, arrays)

    def _spreads(self, *_: Any) -> list[Make]:
        """Return candidates that run with dy, w, dx, with a stride."""
        strided = prod(self.geometry.stride) > 1
        return [partial(self._spread, width) for width in pointwise.WIDTHS if strided]

    def _spread(self, width: int) -> Run:
        found = pointwise.spread(self.geometry, self.dtype, width)
        return lambda dy, w, dx: found(dy, self.product_weights(w), dx)

    def product_weights(self, w: Array) -> Array:
        """Return the weights of a product: in the first arrangement."""
        return self.cudnn.weights(self.cudnn.arrangements[0], w)

    def backward_weight(self, x: Array, dy: Array, dw: Array, db: Array | None) -> None:
        what = "backward_weight bias" if db is not None else "backward_weight"

        def make() -> Run | None:
            own = self._own_way("backward_weight")
            cudnn = partial(self.cudnn.backward_weight, x, dy)
            return self._cudnn_or_own(what, cudnn, own, (x, dy, *zeros_like(dw, db)))

        run_kept(self._runs, what, make, (x, dy, dw, db))

    def backward_weight_relu(
        self, x: Array, y: Array, dy: Array, dw: Array, db: Array | None
    ) -> None:
        """The same with the mask of y, which dy may get."""

        def apart(x: Array, y: Array, dy: Array, dw: Array, db: Array | None) -> None:
            relu_bias_backward(y, dy, db)
            self.backward_weight(x, dy, dw, None)

        def make() -> Run | None:
            if not few_channels.suits(self.geometry, self.dtype):
                return apart
            own = partial(few_channels.backward_weight_relu, self.geometry, self.dtype)
            candidates: list[Make] = [lambda: apart, own]
            name, arrays = f"backward_weight relu {self.geometry}", (x, y, dy, *zeros_like(dw, db))
            found = autotune.fastest(name, self.dtype, candidates, arrays, LAUNCHES)
            return found and found[1]

        run_kept(self._runs, ("relu", db is not None), make, (x, y, dy, dw, db))

    def _own_way(self, what: str) -> Callable[..., list[Make]] | None:
        """Return what lists our own candidates for a pass; None without any."""
        listed = [getattr(module, what) for module in self._own if hasattr(module, what)]
        folded = getattr(self.folding, what, None)

        def all_of(*given: Any, **how: Any) -> list[Make]:
            made = [make for each in listed for make in each(*given, **how)]
            return made if folded is None else [*made, *folded(**how)]

        return all_of if listed or folded else None

    def _cudnn_or_own(
        self,
        what: str,
        cudnn: Make,
        own: Callable[..., list[Make]] | None,
        arguments: Sequence[Any],
    ) -> Run | None:
        """Return the fastest of cuDNN and the kernels of our own, if they suit; None ahead."""
        candidates = [cudnn, *(own(self.geometry, self.dtype) if own else [])]
        name = f"{what} {self._kind} {self.geometry}"
        launches = 1 if self.folding is None else LAUNCHES
        found = autotune.fastest(name, self.dtype, candidates, arguments, launches)
        return found and found[1]


def zeros_like(*gradients: Array | None) -> list[Array | None]:
    """Return arrays like these, to be added to while candidates are timed; ahead these."""
    return [a if a is None or looks_ahead() else cupy.zeros_like(a) for a in gradients]
