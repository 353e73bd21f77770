"""Convolution by cuDNN graphs; by columns and a matrix product where cuDNN has no plan."""

import logging
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from caffepy.errors import DeviceError
from caffepy.ops.cuda import plans
from caffepy.ops.cuda.blas import BLOCKS, THREADS, add_bias, add_into, bias_gradient, c_type, matmul
from caffepy.ops.cuda.compiler import kernel

log = logging.getLogger(__name__)

Array = Any  # cupy.ndarray
Sizes = Sequence[int]
Run = Callable[..., None]


class Convolution:
    """A convolution of fixed shapes: x (N, C, *spatial), w (O, C/g, *kernel), y (N, O, *out).

    Plans are made at the first call of each method, with the precision of that time.
    """

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
            [int(n) for n in sizes] for sizes in (x_shape, w_shape, stride, pad, dilation)
        )
        sizes = list(zip(x_shape[2:], w_shape[2:], stride, pad, dilation, strict=True))
        out = [(n + 2 * p - (d * (k - 1) + 1)) // s + 1 for n, k, s, p, d in sizes]
        self.y_shape = (x_shape[0], w_shape[0], *out)
        self.group, self.dtype = group, np.dtype(dtype)
        self._axes = [(*size, o) for size, o in zip(sizes, out, strict=True)]
        while len(self._axes) < 2:  # cuDNN knows no convolution over one axis
            self._axes.insert(0, (1, 1, 1, 0, 1, 1))
        size, taps, stride, pad, dilation, out = (list(axis) for axis in zip(*self._axes, strict=True))
        self._x = [*x_shape[:2], *size]
        self._w = [*w_shape[:2], *taps]
        self._y = [*self.y_shape[:2], *out]
        self._how = {"stride": stride, "padding": pad, "dilation": dilation}
        self._forward: Run | None = None
        self._forward_bias: Run | None = None
        self._data: Run | None = None
        self._weight: Run | None = None

    def forward(self, x: Array, w: Array, b: Array | None, y: Array) -> None:
        """Write y = w * x + b."""
        if not y.size:
            return
        if b is None:
            self._forward = self._forward or self._plan("forward", (x, w, y))
            self._forward(x, w, y)
        else:
            self._forward_bias = self._forward_bias or self._plan_with_bias(x, w, b, y)
            self._forward_bias(x, w, b, y)

    def backward_data(self, dy: Array, w: Array, dx: Array) -> None:
        """Write dx."""
        if not dx.size:
            return
        if not dy.size:
            dx.fill(0)
            return
        self._data = self._data or self._plan("backward_data", (dy, w, dx))
        self._data(dy, w, dx)

    def backward_weight(self, x: Array, dy: Array, dw: Array | None, db: Array | None) -> None:
        """Add to dw and db."""
        if not dy.size:
            return
        if dw is not None:
            part = plans.context().array("gradient", dw.shape, dw.dtype)
            self._weight = self._weight or self._plan("backward_weight", (x, dy, part))
            self._weight(x, dy, part)
            add_into(part, dw)
        if db is not None:
            bias_gradient(dy, db)

    def _find(self, what: str, arrays: Sequence[Array]) -> plans.Plan | None:
        builds = {
            "forward": self._build_forward,
            "forward_bias": self._build_forward_bias,
            "backward_data": self._build_backward_data,
            "backward_weight": self._build_backward_weight,
        }
        return plans.find(self._name(what), self.dtype, builds[what], arrays)

    def _name(self, what: str) -> str:
        how = " ".join(f"{name} {value}" for name, value in self._how.items())
        return f"{what} x {self._x} w {self._w} {how}"

    def _plan(self, what: str, arrays: Sequence[Array]) -> Run:
        plan = self._find(what, arrays)
        if plan is not None:
            return plan.run
        log.warning("cuDNN has no plan for %s of %s by %s: it runs image by image", what, self._x, self._w)
        columns = _Columns(self._x, self._w, self._y, self._axes, self.group)
        return {"forward": columns.forward, "backward_data": columns.backward_data}.get(what, columns.backward_weight)

    def _plan_with_bias(self, x: Array, w: Array, b: Array, y: Array) -> Run:
        """One graph for both, or the convolution and then the bias: what there is, and if both, what is faster."""
        self._forward = self._forward or self._plan("forward", (x, w, y))
        plain, together = self._forward, self._find("forward_bias", (x, w, b, y))

        def apart(x: Array, w: Array, b: Array, y: Array) -> None:
            plain(x, w, y)
            add_bias(y, b)

        if together is None:
            return apart
        name = self._name("bias apart")
        if plans.second_is_faster(name, self.dtype, lambda: together.run(x, w, b, y), lambda: apart(x, w, b, y)):
            return apart
        return together.run

    def _build_forward(self, cudnn: Any, graph: Any) -> list[Any]:
        x, w = _tensor(graph, self._x), _tensor(graph, self._w)
        return [x, w, _output(graph, graph.conv_fprop(image=x, weight=w, **self._how), self._y)]

    def _build_forward_bias(self, cudnn: Any, graph: Any) -> list[Any]:
        x, w = _tensor(graph, self._x), _tensor(graph, self._w)
        b = _tensor(graph, [1, self._y[1], *[1] * len(self._axes)])
        product = graph.conv_fprop(image=x, weight=w, **self._how)
        product.set_dim(self._y).set_stride(_strides(self._y))  # or else it is taken to lie in NHWC order
        return [x, w, b, _output(graph, graph.bias(product, b), self._y)]

    def _build_backward_data(self, cudnn: Any, graph: Any) -> list[Any]:
        dy, w = _tensor(graph, self._y), _tensor(graph, self._w)
        return [dy, w, _output(graph, graph.conv_dgrad(loss=dy, filter=w, **self._how), self._x)]

    def _build_backward_weight(self, cudnn: Any, graph: Any) -> list[Any]:
        x, dy = _tensor(graph, self._x), _tensor(graph, self._y)
        return [x, dy, _output(graph, graph.conv_wgrad(image=x, loss=dy, **self._how), self._w)]


def _tensor(graph: Any, shape: list[int]) -> Any:
    return graph.tensor(dim=shape, stride=_strides(shape))


def _output(graph: Any, tensor: Any, shape: list[int]) -> Any:
    kind = graph.context.io_data_type
    return tensor.set_output(True).set_data_type(kind).set_dim(shape).set_stride(_strides(shape))


def _strides(shape: Sizes) -> list[int]:
    return [prod(shape[a + 1 :]) for a in range(len(shape))]


class _Columns:
    """The same of each image by col (C*taps, P), the columns of x: y = w @ col, dcol = w.T @ dy, dw = dy @ col.T."""

    def __init__(self, x: Sizes, w: Sizes, y: Sizes, axes: Sequence[tuple[int, ...]], group: int) -> None:
        if len(axes) > 3:
            raise DeviceError(f"no GPU convolution of {list(x)} with {list(w)}: more than 3 spatial axes")
        self.images, self.group = x[0], group
        self.x = (x[0], x[1], prod(x[2:]))
        self.y = (y[0], group, y[1] // group, prod(y[2:]))
        self.w = (group, w[0] // group, w[1] * prod(w[2:]))
        missing = [(1, 1, 1, 0, 1, 1)] * (3 - len(axes))
        self.numbers = [np.int32(x[1]), *(np.int32(n) for axis in [*missing, *axes] for n in axis)]

    def _col(self, like: Array) -> Array:
        return plans.context().array("columns", (self.group, self.w[2], self.y[3]), like.dtype)

    def _im2col(self, x: Array, col: Array) -> None:
        kernel("convolution", f"im2col<{c_type(x)}>")((BLOCKS,), (THREADS,), (x, col, *self.numbers))

    def forward(self, x: Array, w: Array, y: Array) -> None:
        x, w, y = x.reshape(self.x), w.reshape(self.w), y.reshape(self.y)
        col = self._col(x)
        for n in range(self.images):
            self._im2col(x[n], col)
            for g in range(self.group):
                matmul(w[g], col[g], y[n, g])  # (O/g, K) @ (K, P)

    def backward_data(self, dy: Array, w: Array, dx: Array) -> None:
        dx, w, dy = dx.reshape(self.x), w.reshape(self.w), dy.reshape(self.y)
        col = self._col(dx)
        for n in range(self.images):
            for g in range(self.group):
                matmul(w[g].T, dy[n, g], col[g])  # (K, O/g) @ (O/g, P)
            kernel("convolution", f"col2im<{c_type(dx)}>")((BLOCKS,), (THREADS,), (col, dx[n], *self.numbers))

    def backward_weight(self, x: Array, dy: Array, dw: Array) -> None:
        x, dw, dy = x.reshape(self.x), dw.reshape(self.w), dy.reshape(self.y)
        col = self._col(x)
        for n in range(self.images):
            self._im2col(x[n], col)
            for g in range(self.group):
                matmul(dy[n, g], col[g].T, dw[g], accumulate=n > 0)  # (O/g, P) @ (P, K)
