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
from caffepy.ops.cpu.tile import Schedule, accumulate, best_shape, schedule, transpose

Array = NDArray[Any]
Sizes = Sequence[int]

ROWS = 768
"""Output positions, perhaps of several images, that are worked on at a time: what belongs to them stays in cache."""


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
    """panels[g, block, j * inputs + i, lane] = w[g, block * lanes + lane, i, j], 0 beyond; units are (g, block)."""
    outputs, inputs, offsets = w.shape[1:]
    blocks, lanes = panels.shape[1], panels.shape[3]
    for unit in range(lo, hi):
        g, block = unit // blocks, unit % blocks
        first = block * lanes
        count = min(lanes, outputs - first)
        for i in range(inputs):
            for j in range(offsets):
                row = panels[g, block, j * inputs + i]
                for lane in range(count):
                    row[lane] = w[g, first + lane, i, j]
                row[count:] = 0


@kernel
def _forward(
    x: Array,
    panels: Array,
    bias: Array,
    y: Array,
    first: Array,
    place: Array,
    to: Array,
    span: Array,
    steps: Array,
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
    """Units [lo, hi), each (images, group, block of outputs); x flat, bias (g, blocks, lanes), y (N, g, O/g, P)."""
    groups, outputs, positions = y.shape[1:]
    blocks, depth, lanes = panels.shape[1:]
    flat_panels, flat_steps, flat_y = panels.reshape(-1), steps.reshape(-1), y.reshape(-1)
    with_pad = padded != size
    buffer = np.zeros(images * channels * padded if with_pad else 0, x.dtype)
    source = buffer if with_pad else x
    sums = np.empty((min(ROWS, images * positions), lanes), x.dtype)
    flat_sums = sums.reshape(-1)
    inside = -1
    across = len(n_lanes)
    for unit in range(lo, hi):
        block, g, image = unit % blocks, unit // blocks % groups, unit // blocks // groups * images
        at = (image * groups + g) * channels * size
        if with_pad:
            if inside != unit // blocks:
                inside = unit // blocks
                for i in range(images):
                    from_ = at + i * groups * channels * size
                    _pad(x, from_, channels, size, line, width, buffer, i * channels * padded, padded)
            at = 0
        panel = (g * blocks + block) * depth * lanes
        count = min(lanes, outputs - block * lanes)
        for part in range(first.size - 1):
            a, b = part * ROWS, min((part + 1) * ROWS, images * positions)
            for s in range(b - a):
                sums[s] = bias[g, block]
            accumulate(
                source,
                at,
                first,
                place,
                to,
                span,
                flat_steps,
                part,
                flat_panels,
                panel,
                flat_sums,
                n_rows,
                n_vectors,
                n_lanes,
            )
            s = 0
            while a + s < b:  # the rows of one image
                i, p = (a + s) // positions, (a + s) % positions
                m = min(b - a - s, positions - p)
                to_y = ((image + i) * groups + g) * outputs + block * lanes
                for q in range(0, m, across):
                    for o in range(0, count, across):
                        if q + across <= m and o + across <= count:
                            transpose(
                                flat_sums,
                                (s + q) * lanes + o,
                                lanes,
                                flat_y,
                                (to_y + o) * positions + p + q,
                                positions,
                                n_lanes,
                            )
                        else:
                            for u in range(o, min(o + across, count)):
                                for v in range(q, min(q + across, m)):
                                    flat_y[(to_y + u) * positions + p + v] = sums[s + v, u]
                s += m


@kernel
def _backward_weight(
    x: Array,
    dy: Array,
    parts: Array,
    bias_parts: Array,
    first: Array,
    place: Array,
    to: Array,
    span: Array,
    steps: Array,
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
    """Units [lo, hi) of parts (chunk, g, block, K, lane), each of some images; bias_parts (chunk, g, block, lane)."""
    n, groups, outputs, positions = dy.shape
    chunks, blocks, lanes = parts.shape[0], parts.shape[2], parts.shape[4]
    flat_dy, flat_steps = dy.reshape(-1), steps.reshape(-1)
    with_pad = padded != size
    buffer = np.zeros(images * channels * padded if with_pad else 0, x.dtype)
    source = buffer if with_pad else x
    panel = np.zeros((min(ROWS, images * positions), lanes), x.dtype)
    flat_panel = panel.reshape(-1)
    across = len(n_lanes)
    for unit in range(lo, hi):
        block, g, chunk = unit % blocks, unit // blocks % groups, unit // blocks // groups
        sums = parts[chunk, g, block]
        sums[:] = 0
        flat_sums = sums.reshape(-1)
        count = min(lanes, outputs - block * lanes)
        panel[:, count:] = 0
        bias = bias_parts[chunk, g, block]
        bias[:] = 0
        packs = n // images
        for pack in range(packs * chunk // chunks, packs * (chunk + 1) // chunks):
            image = pack * images
            at = (image * groups + g) * channels * size
            if with_pad:
                for i in range(images):
                    from_ = at + i * groups * channels * size
                    _pad(x, from_, channels, size, line, width, buffer, i * channels * padded, padded)
                at = 0
            for part in range(first.size - 1):
                a, b = part * ROWS, min((part + 1) * ROWS, images * positions)
                s = 0
                while a + s < b:
                    i, p = (a + s) // positions, (a + s) % positions
                    m = min(b - a - s, positions - p)
                    from_dy = ((image + i) * groups + g) * outputs + block * lanes
                    for o in range(0, count, across):
                        for q in range(0, m, across):
                            if q + across <= m and o + across <= count:
                                transpose(
                                    flat_dy,
                                    (from_dy + o) * positions + p + q,
                                    positions,
                                    flat_panel,
                                    (s + q) * lanes + o,
                                    lanes,
                                    n_lanes,
                                )
                            else:
                                for u in range(o, min(o + across, count)):
                                    for v in range(q, min(q + across, m)):
                                        panel[s + v, u] = flat_dy[(from_dy + u) * positions + p + v]
                    s += m
                for s in range(b - a):
                    for o in range(lanes):
                        bias[o] += panel[s, o]
                accumulate(
                    source,
                    at,
                    first,
                    place,
                    to,
                    span,
                    flat_steps,
                    part,
                    flat_panel,
                    0,
                    flat_sums,
                    n_rows,
                    n_vectors,
                    n_lanes,
                )


@kernel
def _add_parts(parts: Array, dw: Array, lo: int, hi: int) -> None:
    """dw (g, O/g, C/g, offsets) += sum over chunks of parts, whose rows are j * inputs + i; units are (g, block)."""
    chunks, _, blocks, _, lanes = parts.shape
    outputs, inputs, offsets = dw.shape[1:]
    for unit in range(lo, hi):
        g, block = unit // blocks, unit % blocks
        count = min(lanes, outputs - block * lanes)
        total = np.empty(lanes, dw.dtype)
        for i in range(inputs):
            for j in range(offsets):
                total[:] = parts[0, g, block, j * inputs + i]
                for chunk in range(1, chunks):
                    total += parts[chunk, g, block, j * inputs + i]
                for o in range(count):
                    dw[g, block * lanes + o, i, j] += total[o]


def _places(counts: Sizes, strides: Sizes, start: int = 0) -> Array:
    """start + i0*strides[0] + i1*strides[1] + ... for all indices below counts, in order."""
    total = np.full((), start, np.intp)
    for count, stride in zip(counts, strides, strict=True):
        total = total[..., None] + np.arange(count, dtype=np.intp) * stride
    return total.reshape(-1)


def _strides(counts: Sizes) -> list[int]:
    return [prod(counts[a + 1 :]) for a in range(len(counts))]


def _dot(a: Any, b: Any) -> int:
    return sum(int(p) * int(q) for p, q in zip(a, b, strict=True))


class _Correlation:
    """Correlation of x (N, g, C/g, *size) with w (g, O/g, C/g, offsets), and its gradients, as schedules of tiles."""

    def __init__(
        self, x_shape: Sizes, outputs: int, kernel: Sizes, stride: Sizes, pad: Sizes, dilation: Sizes, dtype: DTypeLike
    ) -> None:
        self.n, self.groups, self.channels, *size = x_shape
        self.outputs, self.kernel, self.dtype = outputs, kernel, np.dtype(dtype)
        axes = list(zip(size, kernel, stride, pad, dilation, strict=True))
        self.out = tuple((n + 2 * p - (d * (k - 1) + 1)) // s + 1 for n, k, s, p, d in axes)
        self.positions, self.taps = prod(self.out), prod(kernel)
        self.shape = best_shape(outputs, self.dtype.itemsize)
        self.lanes = self.shape.columns
        self.blocks = -(-outputs // self.lanes)
        if not (self.n and self.positions):
            return
        padded = [n + 2 * p for n, p in zip(size, pad, strict=True)]
        step = _strides(padded)
        self.padded = prod(padded)
        self.line = _places(size[:-1], step[:-1], _dot(pad, step))
        self.images = max(
            i
            for i in range(1, self.n + 1)
            if i == 1 or (self.n % i == 0 and i * max(self.positions, self.channels * self.padded // 128) <= ROWS)
        )
        self.geometry = (self.line, self.channels, prod(size), size[-1], self.padded, self.images)
        self.image = self.channels * (self.padded if any(pad) else self.groups * self.padded)
        self.position_step = [s * t for s, t in zip(stride, step, strict=True)]
        self.tap_step = [d * t for d, t in zip(dilation, step, strict=True)]
        # Along each axis, the taps that each position needs and the positions that need each tap.
        needs = [_needs(o, s, k, d, p, n) for o, (n, k, s, p, d) in zip(self.out, axes, strict=True)]
        needed = [_needs(k, d, o, s, p, n) for o, (n, k, s, p, d) in zip(self.out, axes, strict=True)]
        self.skips = prod(float(a[:, 1].sum() - a[:, 0].sum()) for a in needs) < 0.97 * self.positions * self.taps
        self.forward = self._forward_schedule(needs)
        self.backward = self._backward_schedule(needed)
        self.panels = np.empty((self.groups, self.blocks, self.channels * self.taps, self.lanes), self.dtype)
        self.bias = np.zeros((self.groups, self.blocks, self.lanes), self.dtype)
        units = self.groups * self.blocks
        chunks = min(-(-16 // units), 1 + 2**21 // self.panels.size, self.n // self.images)
        self.parts_shape = (chunks, *self.panels.shape)

    def _ranges(self, needs: list[Array], counts: Sizes) -> Array:
        """(rows, axes, 2) from what each index of each axis needs; everything where hardly anything can be skipped."""
        if not self.skips:
            return np.tile([[0, c] for c in counts], (prod(map(len, needs)), 1, 1))
        index = np.indices([len(a) for a in needs]).reshape(len(needs), -1)
        return np.stack([a[i] for a, i in zip(needs, index, strict=True)], 1)

    def _forward_schedule(self, needs: list[Array]) -> Schedule:
        place = _places((self.images, *self.out), (self.image, *self.position_step))
        ranges = np.tile(self._ranges(needs, self.kernel), (self.images, 1, 1))
        tap_row = [t * self.channels * self.lanes for t in _strides(self.kernel)]

        def steps(block: int, lo: Array, hi: Array) -> Array:
            counts = (*(hi - lo), self.channels)
            x = _places(counts, (*self.tap_step, self.padded), _dot(lo, self.tap_step))
            return np.stack([x, _places(counts, (*tap_row, self.lanes), _dot(lo, tap_row))], 1)

        return schedule(
            (
                (place[a : a + ROWS], np.arange(len(place[a : a + ROWS])), ranges[a : a + ROWS])
                for a in range(0, len(place), ROWS)
            ),
            steps,
            self.shape,
        )

    def _backward_schedule(self, needed: list[Array]) -> Schedule:
        place = _places((*self.kernel, self.channels), (*self.tap_step, self.padded))
        ranges = np.repeat(self._ranges(needed, self.out), self.channels, 0)
        row = _strides(self.out)

        def steps(block: int, lo: Array, hi: Array) -> Array:
            counts = (self.images, *(hi - lo))
            x = _places(counts, (self.image, *self.position_step), _dot(lo, self.position_step))
            position = _places(counts, (self.positions, *row), _dot(lo, row)) - block * ROWS
            inside = (position >= 0) & (position < ROWS)
            return np.stack([x, position * self.lanes], 1)[inside]

        blocks = -(-self.images * self.positions // ROWS)
        return schedule([(place, np.arange(len(place)), ranges)] * blocks, steps, self.shape)

    def correlate(self, x: Array, w: Array, bias: Array | None, y: Array) -> None:
        """Write y."""
        panels = self.panels
        parallel(lambda lo, hi: _pack(w, panels, lo, hi), self.groups * self.blocks, 1 + 50_000 * self.blocks // w.size)
        self.bias.reshape(self.groups, -1)[:, : self.outputs] = (
            0 if bias is None else bias.reshape(self.groups, self.outputs)
        )
        x, y, b = x.reshape(-1), y.reshape(self.n, self.groups, self.outputs, self.positions), self.bias
        tables = (*self.forward, *self.geometry)
        units = self.n // self.images * self.groups * self.blocks
        parallel(lambda lo, hi: _forward(x, panels, b, y, *tables, lo, hi, *self.shape), units)

    def backward_weight(self, x: Array, dy: Array, dw: Array | None, db: Array | None) -> None:
        """Add to dw and db."""
        parts = np.empty(self.parts_shape, self.dtype)
        bias_parts = np.empty((*self.parts_shape[:3], self.lanes), self.dtype)
        x, dy = x.reshape(-1), dy.reshape(self.n, self.groups, self.outputs, self.positions)
        tables = (*self.backward, *self.geometry)
        parallel(
            lambda lo, hi: _backward_weight(x, dy, parts, bias_parts, *tables, lo, hi, *self.shape),
            prod(self.parts_shape[:3]),
        )
        if dw is not None:
            dw = dw.reshape(self.groups, self.outputs, self.channels, self.taps)
            parallel(lambda lo, hi: _add_parts(parts, dw, lo, hi), self.groups * self.blocks)
        if db is not None:
            sums = bias_parts.sum(axis=0).reshape(self.groups, -1)
            db += sums[:, : self.outputs].reshape(-1)


def _needs(count: int, step: int, other: int, other_step: int, pad: int, size: int) -> Array:
    """(count, 2): the range of j below other with 0 <= i*step - pad + j*other_step < size, for each i below count."""
    at = np.arange(count) * step - pad
    lo = np.clip(-(at // other_step), 0, other)
    return np.stack([lo, np.clip((size - 1 - at) // other_step + 1, lo, other)], 1)


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
