"""Convolution over any number of spatial axes: im2col into a buffer of the thread, then BLAS.

col (K, P): K = C/g * kernel, P = output positions;  y = w @ col, dcol = w.T @ dy, dw += dy @ col.T.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from caffepy.ops.cpu.blas import add_bias, bias_gradient
from caffepy.ops.cpu.compiler import kernel
from caffepy.ops.cpu.threads import parallel

Array = NDArray[Any]


class Windows:
    """Where the windows of a plane of any number of axes lie.

    Output positions are rows of `width` along the last axis. For kernel offset j and row r, `row[j, r]` is the index in
    the plane of the first input row element, or -1 if the row lies in the padding; of its `width` outputs those in
    [first[j], last[j]) read element `start[j] + i * stride` of that row, the others padding.
    """

    def __init__(
        self,
        size: Sequence[int],
        kernel: Sequence[int],
        stride: Sequence[int],
        pad: Sequence[int],
        dilation: Sequence[int],
    ) -> None:
        self.size, self.stride = tuple(size), stride[-1]
        self.out = tuple(
            (n + 2 * p - (d * (k - 1) + 1)) // s + 1
            for n, k, s, p, d in zip(size, kernel, stride, pad, dilation, strict=True)
        )
        self.width = self.out[-1]
        offsets = np.indices(kernel).reshape(len(kernel), -1)  # (axes, kernel offsets)
        rows = np.indices(self.out[:-1]).reshape(len(kernel) - 1, prod(self.out[:-1]))
        index = np.zeros((offsets.shape[1], rows.shape[1]), np.int64)
        inside = np.ones(index.shape, bool)
        for a in range(len(kernel) - 1):
            at = rows[a] * stride[a] - pad[a] + offsets[a][:, None] * dilation[a]
            inside &= (at >= 0) & (at < size[a])
            index = index * size[a] + at
        self.row = np.where(inside, index * size[-1], -1).astype(np.int32)
        start = offsets[-1] * dilation[-1] - pad[-1]
        s = self.stride
        self.start = start.astype(np.int32)
        self.first = np.clip(-(start // s), 0, self.width).astype(np.int32)
        self.last = np.clip((size[-1] - 1 - start) // s + 1, self.first, self.width).astype(np.int32)


@kernel
def _im2col(
    x: Array, col: Array, row: Array, start: Array, first: Array, last: Array, stride: int, width: int, lo: int, hi: int
) -> None:
    """x (C, plane) -> col (C * offsets, (hi - lo) * width), rows lo..hi of the output."""
    offsets = row.shape[0]
    for c in range(x.shape[0]):
        plane = x[c]
        for j in range(offsets):
            to = col[c * offsets + j]
            a, b, s = first[j], last[j], start[j]
            for r in range(lo, hi):
                q, at = (r - lo) * width, row[j, r]
                if at < 0:
                    to[q : q + width] = 0
                    continue
                to[q : q + a] = 0
                if stride == 1:
                    for i in range(a, b):
                        to[q + i] = plane[at + s + i]
                else:
                    for i in range(a, b):
                        to[q + i] = plane[at + s + i * stride]
                to[q + b : q + width] = 0


@kernel
def _col2im(
    col: Array, x: Array, row: Array, start: Array, first: Array, last: Array, stride: int, width: int, lo: int, hi: int
) -> None:
    """The transpose of _im2col: adds to x."""
    offsets = row.shape[0]
    for c in range(x.shape[0]):
        plane = x[c]
        for j in range(offsets):
            source = col[c * offsets + j]
            a, b, s = first[j], last[j], start[j]
            for r in range(lo, hi):
                q, at = (r - lo) * width, row[j, r]
                if at < 0:
                    continue
                if stride == 1:
                    for i in range(a, b):
                        plane[at + s + i] += source[q + i]
                else:
                    for i in range(a, b):
                        plane[at + s + i * stride] += source[q + i]


class Convolution:
    """A convolution of fixed shapes: x (N, C, *spatial), w (O, C/g, *kernel), y (N, O, *out)."""

    def __init__(
        self,
        x_shape: Sequence[int],
        w_shape: Sequence[int],
        stride: Sequence[int],
        pad: Sequence[int],
        dilation: Sequence[int],
        group: int,
        dtype: DTypeLike,
    ) -> None:
        self.dtype = np.dtype(dtype)
        self.n, self.c = x_shape[:2]
        self.o = w_shape[0]
        self.g = group
        self.windows = windows = Windows(x_shape[2:], w_shape[2:], stride, pad, dilation)
        self.y_shape = (self.n, self.o, *windows.out)
        self.plane = prod(x_shape[2:])
        self.k = prod(w_shape[1:])
        self.p = prod(windows.out)
        self.tables = (windows.row, windows.start, windows.first, windows.last, windows.stride, windows.width)
        self.rows = windows.row.shape[1]
        self.plain = all(k == s == 1 for k, s in zip(w_shape[2:], stride, strict=True)) and not any(pad)
        self.chunks = min(self.n, 8)

    def _x(self, x: Array) -> Array:
        return x.reshape(self.n, self.c, self.plane)

    def _y(self, y: Array) -> Array:
        return y.reshape(self.n, self.g, self.o // self.g, self.p)

    def _col(self) -> Array:
        return np.empty((self.g, self.k, self.p), self.dtype)

    def _unfold(self, x: Array, col: Array) -> Array:
        """The (g, K, P) matrices of one image x (C, plane), in col if they need room."""
        if self.plain:
            return x.reshape(col.shape)
        _im2col(x, col.reshape(-1, self.p), *self.tables, 0, self.rows)
        return col

    def forward(self, x: Array, w: Array, b: Array | None, y: Array) -> None:
        """Write y = w * x + b."""
        x, y = self._x(x), self._y(y)
        w = w.reshape(self.g, self.o // self.g, self.k)

        def images(lo: int, hi: int) -> None:
            col = self._col()
            for n in range(lo, hi):
                np.matmul(w, self._unfold(x[n], col), out=y[n])  # (g, O/g, K) @ (g, K, P) -> (g, O/g, P)

        parallel(images, self.n)
        if b is not None:
            add_bias(y.reshape(self.n, self.o, self.p), b)

    def backward_data(self, dy: Array, w: Array, dx: Array) -> None:
        """Write dx."""
        dx, dy = self._x(dx), self._y(dy)
        wt = w.reshape(self.g, self.o // self.g, self.k).transpose(0, 2, 1)

        def images(lo: int, hi: int) -> None:
            col = self._col()
            for n in range(lo, hi):
                if self.plain:
                    np.matmul(wt, dy[n], out=dx[n].reshape(col.shape))
                else:
                    np.matmul(wt, dy[n], out=col)  # (g, K, O/g) @ (g, O/g, P) -> (g, K, P)
                    dx[n] = 0
                    _col2im(col.reshape(-1, self.p), dx[n], *self.tables, 0, self.rows)

        parallel(images, self.n)

    def backward_weight(self, x: Array, dy: Array, dw: Array | None, db: Array | None) -> None:
        """Add to dw and db."""
        if db is not None:
            bias_gradient(dy.reshape(self.n, self.o, self.p), db)
        if dw is None:
            return
        x, dy = self._x(x), self._y(dy)
        parts = np.zeros((self.chunks, self.g, self.o // self.g, self.k), self.dtype)

        def chunks(lo: int, hi: int) -> None:
            col = self._col()
            for i in range(lo, hi):
                for n in range(self.n * i // self.chunks, self.n * (i + 1) // self.chunks):
                    parts[i] += dy[n] @ self._unfold(x[n], col).transpose(0, 2, 1)

        parallel(chunks, self.chunks)
        dw += parts.sum(axis=0).reshape(dw.shape)
