"""Convolution over any number of spatial axes, without an im2col matrix: sums of `tile.accumulate`.

Everything is a correlation y[o, p] = sum over k of w[o, k] * x[place[p] + offset[k]], where x carries its padding:

- forward: rows are output positions p, the reduction runs over k, the weights lie as panels (k, o);
- gradient of the data, where strides are 1: a forward correlation of the padded dy with the kernel turned round;
- gradient of the weights: rows are weights k, the reduction runs over p, dy lies as panels (p, o).

Work is cut into units that depend on shapes only, so results do not depend on the number of threads.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from caffepy.ops.cpu.compiler import kernel
from caffepy.ops.cpu.threads import parallel
from caffepy.ops.cpu.tile import accumulate, best_shape

Array = NDArray[Any]
Sizes = Sequence[int]

ROWS = 480  # of the sums that a thread works on at a time; a multiple of every tile's rows
REDUCTION = 1024  # steps of a reduction at a time, so that its panel stays in the second-level cache


@kernel
def _pad(
    x: Array, at: int, planes: int, size: int, line: Array, width: int, to: Array, to_at: int, to_size: int
) -> None:
    """Copy planes of x (from x[at] on) into the middle of padded ones; row i begins at line[i]."""
    for c in range(planes):
        for i in range(line.size):
            a, b = at + c * size + i * width, to_at + c * to_size + line[i]
            for j in range(width):
                to[b + j] = x[a + j]


@kernel
def _pack(w: Array, panels: Array, lo: int, hi: int) -> None:
    """panels[g, block, i * offsets + j, lane] = w[g, block * lanes + lane, i, j], 0 beyond; units are (g, block)."""
    outputs, inputs, offsets = w.shape[1:]
    blocks, lanes = panels.shape[1], panels.shape[3]
    for unit in range(lo, hi):
        g, block = unit // blocks, unit % blocks
        first = block * lanes
        count = min(lanes, outputs - first)
        for i in range(inputs):
            for j in range(offsets):
                row = panels[g, block, i * offsets + j]
                for lane in range(count):
                    row[lane] = w[g, first + lane, i, j]
                row[count:] = 0


@kernel
def _forward(
    x: Array,
    panels: Array,
    bias: Array,
    y: Array,
    place: Array,
    offset: Array,
    line: Array,
    channels: int,
    size: int,
    width: int,
    padded: int,
    images: int,
    lo: int,
    hi: int,
    n_rows: Any,
    n_vectors: Any,
    n_lanes: Any,
) -> None:
    """Units [lo, hi), each `images` images of one group for one block of outputs; x flat, y (N, g, O/g, P)."""
    n, groups, outputs, positions = y.shape
    blocks, steps, lanes = panels.shape[1:]
    flat = panels.reshape(-1)
    with_pad = padded != size
    buffer = np.zeros(images * channels * padded if with_pad else 0, x.dtype)
    sums = np.empty((ROWS, lanes), x.dtype)
    flat_sums = sums.reshape(-1)
    inside = -1
    for unit in range(lo, hi):
        block, g, first = unit % blocks, unit // blocks % groups, unit // blocks // groups * images
        last = min(first + images, n)
        if with_pad and inside != unit // blocks:
            inside = unit // blocks
            for i in range(first, last):
                at = (i * groups + g) * channels * size
                _pad(x, at, channels, size, line, width, buffer, (i - first) * channels * padded, padded)
        at = 0 if with_pad else (first * groups + g) * channels * size
        panel = (g * blocks + block) * steps * lanes
        count = min(lanes, outputs - block * lanes)
        rows = (last - first) * positions
        for a in range(0, rows, ROWS):
            b = min(a + ROWS, rows)
            sums[: b - a] = 0
            for r in range(0, steps, REDUCTION):
                e = min(r + REDUCTION, steps)
                if with_pad:
                    accumulate(
                        buffer,
                        at,
                        place,
                        a,
                        b,
                        offset,
                        r,
                        e,
                        flat,
                        panel + r * lanes,
                        flat_sums,
                        n_rows,
                        n_vectors,
                        n_lanes,
                    )
                else:
                    accumulate(
                        x, at, place, a, b, offset, r, e, flat, panel + r * lanes, flat_sums, n_rows, n_vectors, n_lanes
                    )
            while a < b:  # the rows of one image
                i, p = a // positions, a % positions
                m = min(b - a, positions - p)
                for q in range(0, m, 16):
                    for o in range(count):
                        to = y[first + i, g, block * lanes + o]
                        add = bias[g * outputs + block * lanes + o] if bias.size else x.dtype.type(0)
                        for s in range(q, min(q + 16, m)):
                            to[p + s] = sums[a % ROWS + s, o] + add
                a += m


@kernel
def _backward_weight(
    x: Array,
    dy: Array,
    parts: Array,
    bias_parts: Array,
    place: Array,
    offset: Array,
    line: Array,
    channels: int,
    size: int,
    width: int,
    padded: int,
    lo: int,
    hi: int,
    n_rows: Any,
    n_vectors: Any,
    n_lanes: Any,
) -> None:
    """Units [lo, hi) of parts (chunk, g, block, K rounded up, lane), each a chunk of images; bias_parts (chunk, O)."""
    n, groups, outputs, positions = dy.shape
    chunks, blocks, lanes = parts.shape[0], parts.shape[2], parts.shape[4]
    with_pad = padded != size
    buffer = np.zeros(channels * padded if with_pad else 0, x.dtype)
    panel = np.zeros((min(ROWS, positions), lanes), x.dtype)
    flat = panel.reshape(-1)
    for unit in range(lo, hi):
        block, g, chunk = unit % blocks, unit // blocks % groups, unit // blocks // groups
        sums = parts[chunk, g, block]
        sums[:] = 0
        flat_sums = sums.reshape(-1)
        first = block * lanes
        count = min(lanes, outputs - first)
        panel[:, count:] = 0
        bias = bias_parts[chunk, g * outputs + first : g * outputs + first + count]
        bias[:] = 0
        for i in range(n * chunk // chunks, n * (chunk + 1) // chunks):
            at = (i * groups + g) * channels * size
            if with_pad:
                _pad(x, at, channels, size, line, width, buffer, 0, padded)
            for a in range(0, positions, ROWS):
                m = min(ROWS, positions - a)
                for q in range(0, m, 16):
                    for o in range(count):
                        source = dy[i, g, first + o]
                        total = bias[o]
                        for s in range(q, min(q + 16, m)):
                            v = source[a + s]
                            panel[s, o] = v
                            total += v
                        bias[o] = total
                if with_pad:
                    accumulate(
                        buffer,
                        0,
                        offset,
                        0,
                        offset.size,
                        place[a : a + m],
                        0,
                        m,
                        flat,
                        0,
                        flat_sums,
                        n_rows,
                        n_vectors,
                        n_lanes,
                    )
                else:
                    accumulate(
                        x,
                        at,
                        offset,
                        0,
                        offset.size,
                        place[a : a + m],
                        0,
                        m,
                        flat,
                        0,
                        flat_sums,
                        n_rows,
                        n_vectors,
                        n_lanes,
                    )


@kernel
def _add_parts(parts: Array, dw: Array, lo: int, hi: int) -> None:
    """dw (g, O/g, K) += sum over chunks of parts, for [lo, hi) of all blocks."""
    chunks, _, blocks, _, lanes = parts.shape
    outputs, steps = dw.shape[1:]
    for unit in range(lo, hi):
        g, block = unit // blocks, unit % blocks
        for q in range(0, steps, 16):
            for o in range(min(lanes, outputs - block * lanes)):
                to = dw[g, block * lanes + o]
                for k in range(q, min(q + 16, steps)):
                    total = parts[0, g, block, k, o]
                    for chunk in range(1, chunks):
                        total += parts[chunk, g, block, k, o]
                    to[k] += total


class _Correlation:
    """Tables for correlations of (N, g, C/g, *size) with kernels (g, O/g, C/g, *kernel) to (N, g, O/g, *out)."""

    def __init__(
        self, x_shape: Sizes, outputs: int, kernel: Sizes, stride: Sizes, pad: Sizes, dilation: Sizes, dtype: DTypeLike
    ) -> None:
        self.n, self.groups, self.channels, *size = x_shape
        self.outputs, self.dtype = outputs, np.dtype(dtype)
        self.out = tuple(
            (n + 2 * p - (d * (k - 1) + 1)) // s + 1
            for n, k, s, p, d in zip(size, kernel, stride, pad, dilation, strict=True)
        )
        self.positions, self.steps = prod(self.out), self.channels * prod(kernel)
        padded = [n + 2 * p for n, p in zip(size, pad, strict=True)]
        step = [prod(padded[a + 1 :]) for a in range(len(size))]
        self.size, self.width, self.padded = prod(size), size[-1], prod(padded)

        def places(counts: Sizes, strides: Sizes, start: int = 0) -> Array:
            """start + i0*strides[0] + i1*strides[1] + ... for all indices below counts, in order."""
            total = np.full((), start, np.intp)
            for count, s in zip(counts, strides, strict=True):
                total = total[..., None] + np.arange(count, dtype=np.intp) * s
            return np.ascontiguousarray(total.reshape(-1))

        self.line = places(size[:-1], step[:-1], sum(p * s for p, s in zip(pad, step, strict=True)))
        self.offset = places(
            (self.channels, *kernel), (self.padded, *(d * s for d, s in zip(dilation, step, strict=True)))
        )
        self.images = max(1, min(ROWS // max(1, self.positions), self.n))
        image = self.channels * (self.padded if any(pad) else self.groups * self.size)
        self.place = places((self.images, *self.out), (image, *(a * b for a, b in zip(stride, step, strict=True))))
        self.geometry = (self.channels, self.size, self.width, self.padded)
        self.shape = best_shape(outputs, self.dtype.itemsize)
        lanes = self.shape.columns
        self.blocks = -(-outputs // lanes)
        self.panels = np.empty((self.groups, self.blocks, self.steps, lanes), self.dtype)
        self.units = -(-self.n // self.images) * self.groups * self.blocks
        self.no_bias = np.empty(0, self.dtype)
        steps = -(-self.steps // ROWS) * ROWS if self.steps > ROWS else -(-self.steps // 24) * 24
        chunks = min(-(-16 // (self.groups * self.blocks)), 1 + 2**21 // (self.steps * outputs * self.groups), self.n)
        self.parts_shape = (chunks, self.groups, self.blocks, steps, lanes)

    def correlate(self, x: Array, w: Array, bias: Array | None, y: Array) -> None:
        """Write y; w (g, O/g, C/g, offsets)."""
        panels = self.panels
        parallel(lambda lo, hi: _pack(w, panels, lo, hi), self.groups * self.blocks, 1 + 50_000 * self.blocks // w.size)
        x, y = x.reshape(-1), y.reshape(self.n, self.groups, self.outputs, self.positions)
        bias = self.no_bias if bias is None else bias
        tables = (self.place, self.offset, self.line, *self.geometry, self.images)
        parallel(lambda lo, hi: _forward(x, panels, bias, y, *tables, lo, hi, *self.shape), self.units)

    def backward_weight(self, x: Array, dy: Array, dw: Array | None, db: Array | None) -> None:
        """Add to dw and db."""
        parts = np.empty(self.parts_shape, self.dtype)
        bias_parts = np.empty((self.parts_shape[0], self.groups * self.outputs), self.dtype)
        x, dy = x.reshape(-1), dy.reshape(self.n, self.groups, self.outputs, self.positions)
        tables = (self.place, self.offset, self.line, *self.geometry)
        parallel(
            lambda lo, hi: _backward_weight(x, dy, parts, bias_parts, *tables, lo, hi, *self.shape),
            prod(self.parts_shape[:3]),
        )
        if dw is not None:
            dw = dw.reshape(self.groups, self.outputs, self.steps)
            parallel(lambda lo, hi: _add_parts(parts, dw, lo, hi), self.groups * self.blocks)
        if db is not None:
            db += bias_parts.sum(axis=0)


class _Windows:
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
def _col2im(col: Array, x: Array, row: Array, start: Array, first: Array, last: Array, stride: int, width: int) -> None:
    """x (C, plane) += the elements of col (C * offsets, P) that were taken from it."""
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


class _Columns:
    """The gradient of the data by columns: dcol (K, P) = w.T @ dy of an image, whose elements are then added up."""

    def __init__(
        self, x_shape: Sizes, w_shape: Sizes, stride: Sizes, pad: Sizes, dilation: Sizes, group: int, dtype: DTypeLike
    ) -> None:
        self.n, self.c, self.g, self.dtype = x_shape[0], x_shape[1], group, np.dtype(dtype)
        self.size, self.steps = prod(x_shape[2:]), prod(w_shape[1:])
        windows = _Windows(x_shape[2:], w_shape[2:], stride, pad, dilation)
        self.positions = prod(windows.out)
        self.tables = (windows.row, windows.start, windows.first, windows.last, windows.stride, windows.width)

    def backward_data(self, dy: Array, w: Array, dx: Array) -> None:
        """Write dx; w (g, O/g, C/g, offsets)."""
        dx, dy = dx.reshape(self.n, self.c, self.size), dy.reshape(self.n, self.g, w.shape[1], self.positions)
        turned = w.reshape(self.g, w.shape[1], self.steps).transpose(0, 2, 1)

        def images(lo: int, hi: int) -> None:
            col = np.empty((self.g, self.steps, self.positions), self.dtype)
            for n in range(lo, hi):
                np.matmul(turned, dy[n], out=col)  # (g, K, O/g) @ (g, O/g, P) -> (g, K, P)
                dx[n] = 0
                _col2im(col.reshape(self.g * self.steps, self.positions), dx[n], *self.tables)

        parallel(images, self.n)


class Convolution:
    """A convolution of fixed shapes: x (N, C, *spatial), w (O, C/g, *kernel), y (N, O, *out)."""

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
        n, c, *size = x_shape
        o, _, *kernel = w_shape
        self.w_shape = (group, o // group, c // group, prod(kernel))
        self.plan = _Correlation((n, group, c // group, *size), o // group, kernel, stride, pad, dilation, dtype)
        self.y_shape = (n, o, *self.plan.out)
        turned = [d * (k - 1) - p for k, p, d in zip(kernel, pad, dilation, strict=True)]
        self.data_plan: _Correlation | _Columns
        if all(s == 1 for s in stride) and min(turned) >= 0:
            ones = [1] * len(size)
            self.data_plan = _Correlation(
                (n, group, o // group, *self.plan.out), c // group, kernel, ones, turned, dilation, dtype
            )
        else:
            self.data_plan = _Columns(x_shape, w_shape, stride, pad, dilation, group, dtype)

    def forward(self, x: Array, w: Array, b: Array | None, y: Array) -> None:
        """Write y = w * x + b."""
        if y.size:
            self.plan.correlate(x, w.reshape(self.w_shape), b, y)

    def backward_data(self, dy: Array, w: Array, dx: Array) -> None:
        """Write dx."""
        if not dx.size:
            return
        w = w.reshape(self.w_shape)
        if isinstance(self.data_plan, _Correlation):
            self.data_plan.correlate(dy, w.transpose(0, 2, 1, 3)[..., ::-1], None, dx)
        else:
            self.data_plan.backward_data(dy, w, dx)

    def backward_weight(self, x: Array, dy: Array, dw: Array | None, db: Array | None) -> None:
        """Add to dw and db."""
        if dy.size:
            self.plan.backward_weight(x, dy, dw, db)
