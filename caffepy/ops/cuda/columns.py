"""Convolution by im2col and matrix products, image by image, where cuDNN has no plan."""

from math import prod

import numpy as np

from caffepy.core.errors import DeviceError
from caffepy.ops.cuda.blas import matmul
from caffepy.ops.cuda.compiler import kernel
from caffepy.ops.cuda.context import context
from caffepy.ops.cuda.graphs import Geometry
from caffepy.ops.cuda.launch import BLOCKS, THREADS, Array, c_type


class Columns:
    """Convolution by col (C*taps, P), the columns of an image x: y = w @ col, dcol = w.T @ dy, dw =
    dy @ col.T.

    All arrays are C-contiguous.
    """

    def __init__(self, geometry: Geometry) -> None:
        x, w, y = geometry.x, geometry.w, geometry.y
        how = (geometry.stride, geometry.padding, geometry.dilation)
        axes = list(zip(x[2:], w[2:], *how, y[2:], strict=True))
        if len(axes) > 3:
            raise DeviceError(
                f"no GPU convolution of {list(x)} with {list(w)}: more than 3 spatial axes"
            )
        self.images, self.group = x[0], geometry.group
        self.x = (x[0], x[1], prod(x[2:]))
        self.y = (y[0], self.group, y[1] // self.group, prod(y[2:]))
        self.w = (self.group, w[0] // self.group, w[1] * prod(w[2:]))
        missing = [(1, 1, 1, 0, 1, 1)] * (3 - len(axes))
        self.numbers = [np.int32(x[1]), *(np.int32(n) for axis in [*missing, *axes] for n in axis)]

    def _col(self, like: Array) -> Array:
        return context().array("columns", (self.group, self.w[2], self.y[3]), like.dtype)

    def _move(self, name: str, source: Array, to: Array) -> None:
        run = kernel("convolution", f"{name}<{c_type(to)}>")
        run((BLOCKS,), (THREADS,), (source, to, *self.numbers))

    def forward(self, x: Array, w: Array, y: Array) -> None:
        """Write y = w * x."""
        x, w, y = x.reshape(self.x), w.reshape(self.w), y.reshape(self.y)
        col = self._col(x)
        for n in range(self.images):
            self._move("im2col", x[n], col)
            for g in range(self.group):
                matmul(w[g], col[g], y[n, g])  # (O/g, K) @ (K, P)

    def backward_data(self, dy: Array, w: Array, dx: Array) -> None:
        """Write dx."""
        dx, w, dy = dx.reshape(self.x), w.reshape(self.w), dy.reshape(self.y)
        col = self._col(dx)
        for n in range(self.images):
            for g in range(self.group):
                matmul(w[g].T, dy[n, g], col[g])  # (K, O/g) @ (O/g, P)
            self._move("col2im", col, dx[n])

    def backward_weight(self, x: Array, dy: Array, dw: Array) -> None:
        """Write dw."""
        x, dw, dy = x.reshape(self.x), dw.reshape(self.w), dy.reshape(self.y)
        col = self._col(x)
        for n in range(self.images):
            self._move("im2col", x[n], col)
            for g in range(self.group):
                matmul(dy[n, g], col[g].T, dw[g], accumulate=n > 0)  # (O/g, P) @ (P, K)
