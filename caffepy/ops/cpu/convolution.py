"""Convolution over any number of spatial axes, without an im2col matrix: sums of `tile.accumulate`.

Everything is a correlation y[o, p] = sum over k of w[o, k] * x[place[p] + offset[k]], where x
includes its padding:

- forward: the rows of a tile are output positions p, the reduction runs over k, the weights are
  packed in panels (k, o);
- gradient of the data, if strides are 1: a forward correlation of the padded dy with the flipped
  kernel; otherwise by columns, as im2col does;
- gradient of the weights: the rows are weights k, the reduction runs over p, dy is packed in
  panels (p, o).

Work is divided into units that depend on shapes only, so results do not depend on the number of
threads.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from caffepy.device.threads import parallel
from caffepy.ops.cpu.compiler import kernel
from caffepy.ops.cpu.depthwise import Depthwise, suits
from caffepy.ops.cpu.neuron import relu_forward
from caffepy.ops.cpu.tile import (
    Schedule,
    accumulate_by,
    best_shape,
    copy_transposed,
    schedule,
    shapes,
)

Array = NDArray[Any]
Sizes = Sequence[int]

ROWS = 768
"""Output positions, possibly of several images, that are computed at a time: their data stay in
cache.
"""


class _Sizes(NamedTuple):
    """Sizes that the loops need."""

    images: int  # N
    together: int  # images computed at a time
    groups: int
    inputs: int  # C / g
    outputs: int  # O / g
    plane: int  # elements of a plane of x
    width: int  # of the last axis of x
    padded: int  # elements of a padded plane
    positions: int  # P, elements of a plane of y
    taps: int  # elements of a plane of w
    blocks: int  # panels of outputs of a group
    columns: int  # outputs of a panel
    chunks: int  # parts of the gradient of the weights, each of some images


@kernel
def _pad(x: Array, at: int, together: int, sizes: _Sizes, line: Array, to: Array) -> None:
    """Copy the planes of a group, from x[at] on, into padded planes, whose rows begin at `line`."""
    for image in range(together):
        for c in range(sizes.inputs):
            source = at + (image * sizes.groups * sizes.inputs + c) * sizes.plane
            start = (image * sizes.inputs + c) * sizes.padded
            for i in range(line.size):
                a, b = source + i * sizes.width, start + line[i]
                for j in range(sizes.width):
                    to[b + j] = x[a + j]


@kernel
def _pack(w: Array, panels: Array, sizes: _Sizes, lo: int, hi: int) -> None:
    """panels[unit, tap * inputs + i, o] = w[g, block * columns + o, i, tap], 0 beyond; units
    are (g, block).
    """
    for unit in range(lo, hi):
        g, first = unit // sizes.blocks, unit % sizes.blocks * sizes.columns
        count = min(sizes.columns, sizes.outputs - first)
        for i in range(sizes.inputs):
            for tap in range(sizes.taps):
                at = ((unit * sizes.taps + tap) * sizes.inputs + i) * sizes.columns
                for o in range(count):
                    panels[at + o] = w[g, first + o, i, tap]
                for o in range(count, sizes.columns):
                    panels[at + o] = 0


@kernel
def _forward(
    x: Array,
    panels: Array,
    bias: Array,
    y: Array,
    plan: Schedule,
    line: Array,
    sizes: _Sizes,
    lo: int,
    hi: int,
    kind: int,
    vector: tuple[int, ...],
) -> None:
    """Compute units [lo, hi), each (images, group, block of outputs); all arrays flat, panels and
    bias by unit and column.
    """
    columns, positions = sizes.columns, sizes.positions
    rows = sizes.together * positions
    with_pad = sizes.padded != sizes.plane
    buffer = np.zeros(sizes.together * sizes.inputs * sizes.padded if with_pad else 0, x.dtype)
    source = buffer if with_pad else x
    sums = np.empty(min(ROWS, rows) * columns, x.dtype)
    inside = -1
    for unit in range(lo, hi):
        block, which = unit % sizes.blocks, unit // sizes.blocks
        g, image = which % sizes.groups, which // sizes.groups * sizes.together
        at = (image * sizes.groups + g) * sizes.inputs * sizes.plane
        if with_pad:
            if inside != which:
                inside = which
                _pad(x, at, sizes.together, sizes, line, buffer)
            at = 0
        panel = g * sizes.blocks + block
        b_at = panel * sizes.taps * sizes.inputs * columns
        count = min(columns, sizes.outputs - block * columns)
        for part in range(plan.first.size - 1):
            a = part * ROWS
            m = min(ROWS, rows - a)
            for s in range(m):
                for o in range(columns):
                    sums[s * columns + o] = bias[panel * columns + o]
            accumulate_by(kind, source, at, plan, part, panels, b_at, sums, vector)
            s = 0
            while s < m:  # the rows of one image
                i, p = (a + s) // positions, (a + s) % positions
                r = min(m - s, positions - p)
                y_at = (
                    ((image + i) * sizes.groups + g) * sizes.outputs + block * columns
                ) * positions + p
                copy_transposed(sums, s * columns, columns, y, y_at, positions, r, count, vector)
                s += r


@kernel
def _backward_weight(
    x: Array,
    dy: Array,
    parts: Array,
    bias_parts: Array,
    plan: Schedule,
    line: Array,
    sizes: _Sizes,
    lo: int,
    hi: int,
    kind: int,
    vector: tuple[int, ...],
) -> None:
    """Compute units [lo, hi), each (chunk of images, group, block): parts (units, K * columns),
    bias_parts (units, columns).
    """
    columns, positions = sizes.columns, sizes.positions
    rows = sizes.together * positions
    with_pad = sizes.padded != sizes.plane
    buffer = np.zeros(sizes.together * sizes.inputs * sizes.padded if with_pad else 0, x.dtype)
    source = buffer if with_pad else x
    panel = np.zeros(min(ROWS, rows) * columns, x.dtype)
    packs = sizes.images // sizes.together
    origin = np.int64(0)  # with a literal 0 numba would compile the tiles a second time
    for unit in range(lo, hi):
        block, which = unit % sizes.blocks, unit // sizes.blocks
        g, chunk = which % sizes.groups, which // sizes.groups
        sums, bias = parts[unit], bias_parts[unit]
        for i in range(sums.size):
            sums[i] = 0
        for i in range(columns):
            bias[i] = 0
        count = min(columns, sizes.outputs - block * columns)
        if count < columns:
            for i in range(panel.size):
                panel[i] = 0
        for pack in range(packs * chunk // sizes.chunks, packs * (chunk + 1) // sizes.chunks):
            image = pack * sizes.together
            at = (image * sizes.groups + g) * sizes.inputs * sizes.plane
            if with_pad:
                _pad(x, at, sizes.together, sizes, line, buffer)
                at = 0
            for part in range(plan.first.size - 1):
                a = part * ROWS
                m = min(ROWS, rows - a)
                s = 0
                while s < m:  # the rows of one image
                    i, p = (a + s) // positions, (a + s) % positions
                    r = min(m - s, positions - p)
                    dy_at = (
                        ((image + i) * sizes.groups + g) * sizes.outputs + block * columns
                    ) * positions + p
                    copy_transposed(
                        dy, dy_at, positions, panel, s * columns, columns, count, r, vector
                    )
                    s += r
                for s in range(m):
                    for o in range(columns):
                        bias[o] += panel[s * columns + o]
                accumulate_by(kind, source, at, plan, part, panel, origin, sums, vector)


@kernel
def _add_parts(parts: Array, dw: Array, sizes: _Sizes, lo: int, hi: int) -> None:
    """dw[g, block * columns + o, i, tap] += sum over chunks of parts[unit, tap * inputs + i,
    o].
    """
    units = sizes.groups * sizes.blocks
    total = np.empty(sizes.columns, dw.dtype)
    for unit in range(lo, hi):
        g, first = unit // sizes.blocks, unit % sizes.blocks * sizes.columns
        for i in range(sizes.inputs):
            for tap in range(sizes.taps):
                at = (tap * sizes.inputs + i) * sizes.columns
                for o in range(sizes.columns):
                    total[o] = parts[unit, at + o]
                for chunk in range(1, sizes.chunks):
                    for o in range(sizes.columns):
                        total[o] += parts[chunk * units + unit, at + o]
                for o in range(min(sizes.columns, sizes.outputs - first)):
                    dw[g, first + o, i, tap] += total[o]


def _places(counts: Sizes, strides: Sizes, start: int = 0) -> Array:
    """Return i0*strides[0] + i1*strides[1] + ... + start for all indices below counts, in order."""
    total = np.full((), start, np.intp)
    for count, stride in zip(counts, strides, strict=True):
        total = total[..., None] + np.arange(count, dtype=np.intp) * stride
    return total.reshape(-1)


def _strides(counts: Sizes) -> list[int]:
    return [prod(counts[a + 1 :]) for a in range(len(counts))]


def _dot(a: Any, b: Any) -> int:
    return sum(int(p) * int(q) for p, q in zip(a, b, strict=True))


class _Correlation:
    """Correlation of x (N, g, C/g, *size) with w (g, O/g, C/g, offsets), and its gradients, as
    schedules of tiles.
    """

    def __init__(
        self,
        x_shape: Sizes,
        outputs: int,
        kernel: Sizes,
        stride: Sizes,
        pad: Sizes,
        dilation: Sizes,
        dtype: DTypeLike,
    ) -> None:
        n, groups, self.channels, *size = x_shape
        self.kernel, self.dtype = kernel, np.dtype(dtype)
        axes = list(zip(size, kernel, stride, pad, dilation, strict=True))
        self.out = tuple((n + 2 * p - (d * (k - 1) + 1)) // s + 1 for n, k, s, p, d in axes)
        positions, taps = prod(self.out), prod(kernel)
        if not (n and positions):
            return
        padded = [n + 2 * p for n, p in zip(size, pad, strict=True)]
        step = _strides(padded)
        self.padded = prod(padded)
        together = max(
            i
            for i in range(1, n + 1)
            if i == 1
            or (n % i == 0 and i * max(positions, self.channels * self.padded // 128) <= ROWS)
        )
        kind = best_shape(outputs, self.dtype.itemsize)
        self.shape = shapes(self.dtype.itemsize)[kind]
        self.tile = kind, self.shape.width
        columns = self.shape.columns
        blocks = -(-outputs // columns)
        weights = groups * blocks * taps * self.channels * columns
        chunks = min(-(-16 // (groups * blocks)), 1 + 2**21 // weights, n // together)
        self.sizes = _Sizes(
            n,
            together,
            groups,
            self.channels,
            outputs,
            prod(size),
            size[-1],
            self.padded,
            positions,
            taps,
            blocks,
            columns,
            chunks,
        )
        self.image = self.channels * (self.padded if any(pad) else groups * self.padded)
        self.position_step = [s * t for s, t in zip(stride, step, strict=True)]
        self.tap_step = [d * t for d, t in zip(dilation, step, strict=True)]
        # Along each axis, the taps that each position needs and the positions that need each tap.
        needs = [
            _needs(o, s, k, d, p, n) for o, (n, k, s, p, d) in zip(self.out, axes, strict=True)
        ]
        needed = [
            _needs(k, d, o, s, p, n) for o, (n, k, s, p, d) in zip(self.out, axes, strict=True)
        ]
        self.skips = (
            prod(float(a[:, 1].sum() - a[:, 0].sum()) for a in needs) < 0.97 * positions * taps
        )
        line = _places(size[:-1], step[:-1], _dot(pad, step))
        self.forward = _tables(self._forward_schedule(needs), line, self.sizes)
        self.backward = _tables(self._backward_schedule(needed), line, self.sizes)
        self.panels = np.empty(weights, self.dtype)
        self.bias = np.zeros((groups, blocks * columns), self.dtype)

    def _ranges(self, needs: list[Array], counts: Sizes) -> Array:
        """Return (rows, axes, 2) from what each index of each axis needs; everything if hardly
        anything can be skipped.
        """
        if not self.skips:
            return np.tile([[0, c] for c in counts], (prod(map(len, needs)), 1, 1))
        index = np.indices([len(a) for a in needs]).reshape(len(needs), -1)
        return np.stack([a[i] for a, i in zip(needs, index, strict=True)], 1)

    def _forward_schedule(self, needs: list[Array]) -> Schedule:
        place = _places((self.sizes.together, *self.out), (self.image, *self.position_step))
        ranges = np.tile(self._ranges(needs, self.kernel), (self.sizes.together, 1, 1))
        tap_row = [t * self.channels * self.sizes.columns for t in _strides(self.kernel)]

        def steps(block: int, lo: Array, hi: Array) -> Array:
            counts = (*(hi - lo), self.channels)
            x = _places(counts, (*self.tap_step, self.padded), _dot(lo, self.tap_step))
            return np.stack(
                [x, _places(counts, (*tap_row, self.sizes.columns), _dot(lo, tap_row))], 1
            )

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
            counts = (self.sizes.together, *(hi - lo))
            x = _places(counts, (self.image, *self.position_step), _dot(lo, self.position_step))
            position = _places(counts, (self.sizes.positions, *row), _dot(lo, row)) - block * ROWS
            inside = (position >= 0) & (position < ROWS)
            return np.stack([x, position * self.sizes.columns], 1)[inside]

        blocks = -(-self.sizes.together * self.sizes.positions // ROWS)
        return schedule([(place, np.arange(len(place)), ranges)] * blocks, steps, self.shape)

    def correlate(self, x: Array, w: Array, bias: Array | None, y: Array) -> None:
        """Write y; w (g, O/g, C/g, taps)."""
        sizes, panels = self.sizes, self.panels
        units = sizes.groups * sizes.blocks
        parallel(
            lambda lo, hi: _pack(w, panels, sizes, lo, hi), units, 1 + 50_000 * units // w.size
        )
        self.bias[:, : sizes.outputs] = (
            0 if bias is None else bias.reshape(sizes.groups, sizes.outputs)
        )
        x, y, b = x.reshape(-1), y.reshape(-1), self.bias.reshape(-1)
        parallel(
            lambda lo, hi: _forward(x, panels, b, y, *self.forward, lo, hi, *self.tile),
            sizes.images // sizes.together * units,
        )

    def backward_weight(self, x: Array, dy: Array, dw: Array | None, db: Array | None) -> None:
        """Add to dw and db."""
        sizes = self.sizes
        units = sizes.groups * sizes.blocks
        parts = np.empty(
            (sizes.chunks * units, sizes.taps * sizes.inputs * sizes.columns), self.dtype
        )
        bias_parts = np.empty((sizes.chunks * units, sizes.columns), self.dtype)
        x, dy = x.reshape(-1), dy.reshape(-1)
        parallel(
            lambda lo, hi: _backward_weight(
                x, dy, parts, bias_parts, *self.backward, lo, hi, *self.tile
            ),
            sizes.chunks * units,
        )
        if dw is not None:
            dw = dw.reshape(sizes.groups, sizes.outputs, sizes.inputs, sizes.taps)
            parallel(lambda lo, hi: _add_parts(parts, dw, sizes, lo, hi), units)
        if db is not None:
            sums = bias_parts.reshape(sizes.chunks, sizes.groups, -1).sum(axis=0)
            db += sums[:, : sizes.outputs].reshape(-1)


def _tables(plan: Schedule, line: Array, sizes: _Sizes) -> tuple[Any, ...]:
    return plan._replace(steps=plan.steps.reshape(-1)), line, sizes


def _needs(count: int, step: int, other: int, other_step: int, pad: int, size: int) -> Array:
    """Return (count, 2): the range of j below other with 0 <= i*step - pad + j*other_step < size,
    for each i below count.
    """
    at = np.arange(count) * step - pad
    lo = np.clip(-(at // other_step), 0, other)
    return np.stack([lo, np.clip((size - 1 - at) // other_step + 1, lo, other)], 1)


class _Windows:
    """The windows of a plane with any number of axes.

    Output positions are rows of `width` along the last axis. For kernel offset j and row r, `row[j,
    r]` is the index in the plane of the first input row element, or -1 if the row is padding; of
    its `width` outputs those in [first[j], last[j]) read element `start[j] + i * stride` of that
    row, the others padding.
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
        self.last = np.clip((size[-1] - 1 - start) // s + 1, self.first, self.width).astype(
            np.int32
        )


@kernel
def _col2im(
    col: Array,
    x: Array,
    row: Array,
    start: Array,
    first: Array,
    last: Array,
    stride: int,
    width: int,
) -> None:
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
    """The gradient of the data by columns: dcol (K, P) = w.T @ dy of an image, then col2im."""

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
        self.n, self.c, self.g, self.dtype = x_shape[0], x_shape[1], group, np.dtype(dtype)
        self.size, self.steps = prod(x_shape[2:]), prod(w_shape[1:])
        windows = _Windows(x_shape[2:], w_shape[2:], stride, pad, dilation)
        self.positions = prod(windows.out)
        self.tables = (
            windows.row,
            windows.start,
            windows.first,
            windows.last,
            windows.stride,
            windows.width,
        )

    def backward_data(self, dy: Array, w: Array, dx: Array) -> None:
        """Write dx; w (g, O/g, C/g, offsets)."""
        dx, dy = (
            dx.reshape(self.n, self.c, self.size),
            dy.reshape(self.n, self.g, w.shape[1], self.positions),
        )
        turned = w.reshape(self.g, w.shape[1], self.steps).transpose(0, 2, 1)

        def images(lo: int, hi: int) -> None:
            col = np.empty((self.g, self.steps, self.positions), self.dtype)
            for n in range(lo, hi):
                np.matmul(turned, dy[n], out=col)  # (g, K, O/g) @ (g, O/g, P) -> (g, K, P)
                dx[n] = 0
                _col2im(col.reshape(self.g * self.steps, self.positions), dx[n], *self.tables)

        parallel(images, self.n)


class _General:
    """A convolution of any shapes, as sums of tiles."""

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
        self.plan = _Correlation(
            (n, group, c // group, *size), o // group, kernel, stride, pad, dilation, dtype
        )
        self.y_shape = (n, o, *self.plan.out)
        turned = [d * (k - 1) - p for k, p, d in zip(kernel, pad, dilation, strict=True)]
        self.data_plan: _Correlation | _Columns
        if all(s == 1 for s in stride) and min(turned) >= 0:
            ones = [1] * len(size)
            self.data_plan = _Correlation(
                (n, group, o // group, *self.plan.out),
                c // group,
                kernel,
                ones,
                turned,
                dilation,
                dtype,
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
        self.loops: Depthwise | _General
        if suits(x_shape, w_shape, group):
            self.loops = Depthwise(x_shape, w_shape, stride, pad, dilation, dtype)
        else:
            self.loops = _General(x_shape, w_shape, stride, pad, dilation, group, dtype)
        self.y_shape = self.loops.y_shape

    def forward(self, x: Array, w: Array, b: Array | None, y: Array, relu: bool = False) -> None:
        self.loops.forward(x, w, b, y)
        if relu:
            relu_forward(y, y, 0.0)

    def backward_data(self, dy: Array, w: Array, dx: Array) -> None:
        self.loops.backward_data(dy, w, dx)

    def backward_weight(self, x: Array, dy: Array, dw: Array | None, db: Array | None) -> None:
        self.loops.backward_weight(x, dy, dw, db)
