"""Convolution over any number of spatial axes, without an im2col matrix.

A kernel of one element is `pointwise`, a group for each channel `depthwise`, a kernel of 3x3 with
stride 1 and many channels `winograd`, everything else `direct`. The gradient of the data is then a
direct convolution of the padded dy with the flipped kernel if strides are 1, otherwise it goes by
columns, as im2col does.

Work is divided into units that depend on shapes only, so results do not depend on the number of
threads.
"""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from caffepy.device.blob import Array, Layout
from caffepy.device.threads import parallel
from caffepy.ops.cpu.compiler import kernel
from caffepy.ops.cpu.depthwise import Depthwise
from caffepy.ops.cpu.depthwise import suits as is_depthwise
from caffepy.ops.cpu.direct import Direct, Shapes, Sizes
from caffepy.ops.cpu.neuron import relu_bias_backward, relu_forward
from caffepy.ops.cpu.normalization import (
    batch_norm_prepare,
    norm_backward,
    norm_forward,
    norm_gradient,
    norm_sums,
    normalized,
)
from caffepy.ops.cpu.pointwise import Pointwise
from caffepy.ops.cpu.pointwise import suits as is_pointwise
from caffepy.ops.cpu.pooling import max_pool_backward, max_pool_forward
from caffepy.ops.cpu.winograd import Winograd
from caffepy.ops.cpu.winograd import suits as is_winograd
from caffepy.ops.objects import (
    Maxima,
    Normalized,
    NormForward,
    NormGradient,
    NormSums,
    Preparation,
    Windows,
)


class _Windows(NamedTuple):
    """The windows of a plane with any number of axes.

    Output positions are rows of `width` along the last axis. For kernel offset j and row r, `row[j,
    r]` is the index in the plane of the first input row element, or -1 if the row is padding; of
    its `width` outputs those in [first[j], last[j]) read element `start[j] + i * stride` of that
    row, the others padding.
    """

    row: Array
    start: Array
    first: Array
    last: Array
    stride: int
    width: int


def _windows(conv: Shapes, out: Sizes) -> _Windows:
    size, kernel, stride, width = conv.x[2:], conv.w[2:], conv.stride, out[-1]
    offsets = np.indices(kernel).reshape(len(kernel), -1)  # (axes, kernel offsets)
    rows = np.indices(out[:-1]).reshape(len(kernel) - 1, prod(out[:-1]))
    index = np.zeros((offsets.shape[1], rows.shape[1]), np.int64)
    inside = np.ones(index.shape, bool)
    for a in range(len(kernel) - 1):
        at = rows[a] * stride[a] - conv.pad[a] + offsets[a][:, None] * conv.dilation[a]
        inside &= (at >= 0) & (at < size[a])
        index = index * size[a] + at
    start, s = offsets[-1] * conv.dilation[-1] - conv.pad[-1], stride[-1]
    first = np.clip(-(start // s), 0, width)
    last = np.clip((size[-1] - 1 - start) // s + 1, first, width)
    tables = np.where(inside, index * size[-1], -1), start, first, last
    row, start, first, last = (table.astype(np.int32) for table in tables)
    return _Windows(row, start, first, last, s, width)


@kernel
def _col2im(col: Array, x: Array, windows: _Windows) -> None:
    """x (C, plane) += the elements of col (C * offsets, P) that were taken from it."""
    row, start, first, last, stride, width = windows
    offsets = row.shape[0]
    for c in range(x.shape[0]):
        plane = x[c]
        for j in range(offsets):
            source = col[c * offsets + j]
            a, b, s = first[j], last[j], start[j]
            for r in range(row.shape[1]):
                q, at = r * width, row[j, r]
                if at < 0:
                    continue
                if stride == 1:
                    for i in range(a, b):
                        plane[at + s + i] += source[q + i]
                else:
                    for i in range(a, b):
                        plane[at + s + i * stride] += source[q + i]


class Convolution:
    def __init__(
        self, x_shape: Sizes, w_shape: Sizes, window: Sequence[Sizes], group: int, dtype: DTypeLike
    ) -> None:
        stride, pad, dilation = window
        conv = Shapes(x_shape, w_shape, stride, pad, dilation, group, np.dtype(dtype))
        self.plan: Depthwise | Pointwise | Winograd | Direct
        self.data_plan: Depthwise | Pointwise | Winograd | Direct | _Windows
        if is_depthwise(x_shape, w_shape, group):
            self.plan = self.data_plan = Depthwise(x_shape, w_shape, stride, pad, dilation, dtype)
            self.y_shape: tuple[int, ...] = self.plan.y_shape
            return
        if is_pointwise(w_shape, pad):
            self.plan = self.data_plan = Pointwise(x_shape, w_shape, stride, group, dtype)
            self.y_shape = self.plan.y_shape
            return
        if is_winograd(x_shape, w_shape, window, group):
            self.plan = self.data_plan = Winograd(x_shape, w_shape, pad, dtype)
            self.y_shape = self.plan.y_shape
            return
        o, inputs, *kernel = w_shape
        self.w_shape = group, o // group, inputs, prod(kernel)
        self.plan = Direct(conv)
        self.y_shape = x_shape[0], o, *self.plan.out
        turned = [d * (k - 1) - p for k, p, d in zip(kernel, pad, dilation, strict=True)]
        if all(s == 1 for s in stride) and min(turned) >= 0:
            shapes = x_shape[1], o // group, *kernel
            self.data_plan = Direct(conv._replace(x=self.y_shape, w=shapes, pad=turned))
        else:
            self.data_plan = _windows(conv, self.plan.out)

    can_replay = True

    def forward(self, x: Array, w: Array, b: Array | None, y: Array, relu: bool = False) -> None:
        if y.size:
            self.plan.forward(x, w, b, y)
        if relu:
            relu_forward(y, y, 0.0)

    def arrange_ahead(self, w: Array) -> bool:
        return False

    def end_ahead(self) -> None:
        pass

    def takes_normalized(self, layout: Layout) -> bool:
        return False

    def forward_prepare(
        self,
        x: Array,
        w: Array,
        b: Array | None,
        y: Array,
        preparation: Preparation,
        given: Normalized | None = None,
    ) -> None:
        self.forward(x if given is None else normalized(x, given), w, b, y)
        batch_norm_prepare(_planes(y), *preparation)

    def pools(self, layout: Layout, window: Windows) -> bool:
        return False

    def forward_maxima(
        self, x: Array, w: Array, b: Array | None, output: Array, maxima: Maxima
    ) -> None:
        self.forward(x, w, b, output)
        max_pool_forward(output, *maxima)

    def backward_data(self, dy: Array, w: Array, dx: Array) -> None:
        plan = self.data_plan
        if not dx.size:
            return
        if isinstance(plan, Depthwise | Pointwise | Winograd):
            plan.backward_data(dy, w, dx)
            return
        w = w.reshape(self.w_shape)
        if isinstance(plan, Direct):
            plan.forward(dy, w.transpose(0, 2, 1, 3)[..., ::-1], None, dx)
            return
        # By columns: dcol (g, K, P) = w.T @ dy of an image, then col2im.
        n, _, *out = self.y_shape  # where a layer's axis is not 1, x and y have more axes
        g, o, inputs, taps = w.shape
        steps, positions = inputs * taps, prod(out)
        dx, dy = dx.reshape(n, g * inputs, -1), dy.reshape(n, g, o, positions)
        turned = w.reshape(g, o, steps).transpose(0, 2, 1)

        def images(lo: int, hi: int) -> None:
            col = np.empty((g, steps, positions), dy.dtype)
            for n in range(lo, hi):
                np.matmul(turned, dy[n], out=col)  # (g, K, O/g) @ (g, O/g, P) -> (g, K, P)
                dx[n] = 0
                _col2im(col.reshape(g * steps, positions), dx[n], plan)

        parallel(images, n)

    def sums_gradients(self, dy: Array, dx: Array, alike: bool) -> bool:
        return False  # norm_backward goes through a channel while it is in the cache

    def backward_data_norm(self, dy: Array, w: Array, norm: NormSums) -> None:
        self.backward_data(dy, w, norm.masked)
        norm_sums(norm)

    def backward_weight(self, x: Array, dy: Array, dw: Array | None, db: Array | None) -> None:
        if dy.size:  # where a layer's axis is not 1, dy has more axes
            self.plan.backward_weight(x, dy.reshape(self.y_shape), dw, db)

    def backward_weight_maxima(
        self, x: Array, output: Array, maxima: Maxima, dw: Array | None, db: Array | None
    ) -> None:
        max_pool_backward(maxima.y, maxima.where, output, maxima.window)
        self.backward_weight(x, output, dw, db)

    def backward_weight_relu(
        self, x: Array, y: Array, dy: Array, dw: Array | None, db: Array | None
    ) -> None:
        relu_bias_backward(y.reshape(self.y_shape), dy.reshape(self.y_shape), db)
        if dw is not None:
            self.backward_weight(x, dy, dw, None)

    def skips_gradient(self, layout: Layout) -> bool:
        return False

    def backward_norm_gradient(
        self, x: Array | None, w: Array, dy: NormGradient, dw: Array | None, to: NormSums | Array
    ) -> None:
        if x is None:
            assert isinstance(to, NormSums)
            assert to.x is not None
            x = normalized(to.x, Normalized(to.numbers, to.ceiling))
        of = np.empty(dy.g.shape, dy.g.dtype)
        norm_gradient(_planes(dy.x), dy.numbers, dy.line, _planes(dy.g), _planes(of))
        self.backward_weight(x, of, dw, None)
        if isinstance(to, NormSums):
            self.backward_data_norm(of, w, to)
        else:
            self.backward_data(of, w, to)

    def skips_output(self, layout: Layout) -> bool:
        return False

    def forward_normalized(self, x: Array, w: Array, norm: NormForward) -> None:
        z = np.empty(self.y_shape, norm.y.dtype)
        self.forward(x, w, None, z)
        z, y = _planes(z), _planes(norm.y)
        if norm.preparation is not None:
            batch_norm_prepare(z, *norm.preparation)
        other = None if norm.other is None else _planes(norm.other)
        norm_forward(z, norm.numbers, other, norm.ceiling, y)

    def backward_normalized(
        self,
        x: Array,
        w: Array,
        g: Array,
        numbers: Array,
        gradients: Sequence[Array | None],
        to: NormSums | Array | None,
    ) -> None:
        z, (dw, dscale, dbias) = np.empty(self.y_shape, g.dtype), gradients
        self.forward(x, w, None, z)
        planes, dz = _planes(z), np.empty_like(z)
        how = None, None, None, _planes(dz), dscale, dbias, False
        norm_backward(planes, numbers, [_planes(g)], *how)
        self.backward_weight(x, dz, dw, None)
        if isinstance(to, NormSums):
            self.backward_data_norm(dz, w, to)
        elif to is not None:
            self.backward_data(dz, w, to)


def _planes(x: Array) -> Array:
    planes: Array = x.reshape(*x.shape[:2], prod(x.shape[2:]))
    return planes
