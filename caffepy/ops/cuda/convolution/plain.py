"""Convolution in Caffe's layout."""

from functools import partial
from typing import Any

from numpy.typing import DTypeLike

from caffepy.ops.cuda.autotune import Run, run_kept
from caffepy.ops.cuda.bias_relu import relu_bias_backward
from caffepy.ops.cuda.blas import add_into
from caffepy.ops.cuda.context import context
from caffepy.ops.cuda.convolution.arrangement import Arrangement
from caffepy.ops.cuda.graphs import Geometry
from caffepy.ops.cuda.launch import Array


class Plain:
    """A convolution in Caffe's layout."""

    def __init__(self, geometry: Geometry, dtype: DTypeLike) -> None:
        self._cudnn = Arrangement(dtype, geometry)
        self._runs: dict[Any, Run] = {}

    def forward(self, x: Array, w: Array, b: Array | None, y: Array, relu: bool) -> None:
        arrays = x, w, b, y
        make = partial(self._cudnn.plan_forward, *arrays, relu)
        run_kept(self._runs, ("forward", b is not None, relu), make, arrays)

    def backward_data(self, dy: Array, w: Array, dx: Array) -> None:
        self._run("backward_data", dy, w, dx)

    def backward_weight(self, x: Array, dy: Array, dw: Array, db: Array | None) -> None:
        part = context().array("gradient", dw.shape, dw.dtype)
        self._run("backward_weight", x, dy, part)
        add_into(part, dw)
        if db is not None:
            relu_bias_backward(None, dy, db)

    def _run(self, what: str, *arrays: Array) -> None:
        run_kept(self._runs, what, partial(self._cudnn.plan, what, arrays), arrays)
