"""Direct convolution over any number of spatial axes: sums of `tile.accumulate`.

It is a correlation y[o, p] = sum over k of w[o, k] * x[place[p] + offset[k]], where x includes its
padding:

- forward: the rows of a tile are output positions p, the reduction runs over k, the weights are
  packed in panels (k, o);
- gradient of the weights: the rows are weights k, the reduction runs over p, dy is packed in
  panels (p, o).
"""

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from caffepy.device.blob import Array
from caffepy.device.recording import release, temporary
from caffepy.device.threads import parallel
from caffepy.ops.cpu.compiler import EXACT, kernel
from caffepy.ops.cpu.tile import (
    Schedule,
    accumulate_by,
    best_shape,
    copy_transposed,
    schedule,
    shapes,
)

Sizes = Sequence[int]

ROWS = 768
"""Output positions, of one image or several, that are computed at a time, in cache."""

TURNED = 16
"""Inputs whose weights are laid in another order at a time."""


class Shapes(NamedTuple):
    """A convolution: (N, C, *spatial) with (O, C/g, *kernel)."""

    x: Sizes
    w: Sizes
    stride: Sizes
    pad: Sizes
    dilation: Sizes
    group: int
    dtype: np.dtype[Any]


class _Sizes(NamedTuple):
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


class _Tables(NamedTuple):
    plan: Schedule
    line: Array  # the place in a padded plane of each row of x
    sizes: _Sizes
    kind: int  # the tile's shape
    vector: tuple[int, ...]


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
    """panels[(g, block), tap * inputs + i, o] = w[g, block * columns + o, i, tap], 0 beyond.

    Of some inputs at a time: rows of w lie far apart, and what is written stays in the cache.
    """
    columns, inputs = sizes.columns, sizes.inputs
    for unit in range(lo, hi):
        g, first = unit // sizes.blocks, unit % sizes.blocks * columns
        count = min(columns, sizes.outputs - first)
        start = unit * sizes.taps * inputs * columns
        for i0 in range(0, inputs, TURNED):
            end = min(inputs, i0 + TURNED)
            for o in range(columns):
                for i in range(i0, end):
                    for tap in range(sizes.taps):
                        at = start + (tap * inputs + i) * columns + o
                        panels[at] = w[g, first + o, i, tap] if o < count else 0


@kernel
def _lay_bias(b: Array | None, outputs: int, to: Array, lo: int, hi: int) -> None:
    """Copy a bias (g * O/g) to the columns of the panels (g, columns), or 0."""
    for g in range(lo, hi):
        for o in range(outputs):
            to[g, o] = 0 if b is None else b[g * outputs + o]


@kernel
def _forward(
    x: Array, panels: Array, bias: Array, y: Array, tables: _Tables, lo: int, hi: int
) -> None:
    """Compute units (images, group, block of outputs); panels and bias by unit; all arrays flat."""
    plan, line, sizes, kind, vector = tables
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
            accumulate_by(kind, source[at:], plan, part, panels[b_at:], sums, vector)
            s = 0
            while s < m:  # the rows of one image
                i, p = (a + s) // positions, (a + s) % positions
                r = min(m - s, positions - p)
                y_at = (
                    ((image + i) * sizes.groups + g) * sizes.outputs + block * columns
                ) * positions + p
                to = y[y_at:]
                copy_transposed(sums[s * columns :], columns, to, positions, r, count, vector)
                s += r


@kernel
def _backward_weight(
    x: Array, dy: Array, parts: Array, bias_parts: Array, tables: _Tables, lo: int, hi: int
) -> None:
    """Write parts (units, K * columns), bias_parts (units, columns); unit (chunk, group, block)."""
    plan, line, sizes, kind, vector = tables
    columns, positions = sizes.columns, sizes.positions
    rows = sizes.together * positions
    with_pad = sizes.padded != sizes.plane
    buffer = np.zeros(sizes.together * sizes.inputs * sizes.padded if with_pad else 0, x.dtype)
    source = buffer if with_pad else x
    panel = np.zeros(min(ROWS, rows) * columns, x.dtype)
    packs = sizes.images // sizes.together
    for unit in range(lo, hi):
        block, which = unit % sizes.blocks, unit // sizes.blocks
        g, chunk = which % sizes.groups, which // sizes.groups
        sums, bias = parts[unit], bias_parts[unit]
        sums[:], bias[:] = 0, 0
        count = min(columns, sizes.outputs - block * columns)
        if count < columns:
            panel[:] = 0
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
                    to = panel[s * columns :]
                    copy_transposed(dy[dy_at:], positions, to, columns, count, r, vector)
                    s += r
                for s in range(m):
                    for o in range(columns):
                        bias[o] += panel[s * columns + o]
                accumulate_by(kind, source[at:], plan, part, panel, sums, vector)


@kernel
def _add_parts(
    parts: Array, dw: Array, sizes: _Sizes, vector: tuple[int, ...], lo: int, hi: int
) -> None:
    """dw[g, block * columns + o, i, tap] += sum of parts[unit, tap * inputs + i, o] over chunks.

    Parts of the first chunk are overwritten. Of some inputs at a time, as in `_pack`.
    """
    units, columns, taps = sizes.groups * sizes.blocks, sizes.columns, sizes.taps
    weights = taps * sizes.inputs * columns
    turned = np.empty((columns, taps * TURNED), dw.dtype)
    for unit in range(lo, hi):
        g, first = unit // sizes.blocks, unit % sizes.blocks * columns
        for chunk in range(1, sizes.chunks):
            part = parts[chunk * units + unit]
            for k in range(weights):
                parts[unit, k] += part[k]
        for i in range(0, sizes.inputs, TURNED):
            count = min(sizes.inputs - i, TURNED)
            for tap in range(taps):
                source, to = parts[unit, (tap * sizes.inputs + i) * columns :], tap * TURNED
                step = taps * TURNED
                copy_transposed(
                    source, columns, turned.reshape(-1)[to:], step, count, columns, vector
                )
            for o in range(min(columns, sizes.outputs - first)):
                row = turned[o]
                for k in range(count):
                    for tap in range(taps):
                        dw[g, first + o, (i + k) * taps + tap] += row[tap * TURNED + k]


@partial(kernel, fastmath=EXACT)
def _add_bias_parts(parts: Array, db: Array, sizes: _Sizes, lo: int, hi: int) -> None:
    """db[g * O/g + block * columns + o] += sum of parts[unit, o] over chunks."""
    units = sizes.groups * sizes.blocks
    for unit in range(lo, hi):
        g, first = unit // sizes.blocks, unit % sizes.blocks * sizes.columns
        for o in range(min(sizes.columns, sizes.outputs - first)):
            total = parts[unit, o]
            for chunk in range(1, sizes.chunks):
                total += parts[chunk * units + unit, o]
            db[g * sizes.outputs + first + o] += total


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


def output_sizes(shapes: Shapes) -> list[int]:
    """Return the sizes of the spatial axes of y."""
    axes = zip(shapes.x[2:], shapes.w[2:], shapes.stride, shapes.pad, shapes.dilation, strict=True)
    return [(n + 2 * p - (d * (k - 1) + 1)) // s + 1 for n, k, s, p, d in axes]


class Direct:
    """Correlation of x with w, and its gradients, as schedules of tiles."""

    def __init__(self, conv: Shapes) -> None:
        (n, _, *size), (o, self.channels, *self.kernel), stride, pad, dilation, groups, _ = conv
        self.out, outputs = output_sizes(conv), o // groups
        positions, taps = prod(self.out), prod(self.kernel)
        if not (n and positions):
            return
        padded = [n + 2 * p for n, p in zip(size, pad, strict=True)]
        step = _strides(padded)
        self.padded = prod(padded)
        largest = max(positions, self.channels * self.padded // 128)
        together = max(i for i in range(1, n + 1) if i == 1 or (n % i == 0 and i * largest <= ROWS))
        kind = best_shape(outputs, conv.dtype.itemsize)
        self.shape = shapes(conv.dtype.itemsize)[kind]
        columns = self.shape.columns
        blocks = -(-outputs // columns)
        weights = groups * blocks * taps * self.channels * columns
        chunks = min(-(-16 // (groups * blocks)), 1 + 2**21 // weights, n // together)
        planes = prod(size), size[-1], self.padded, positions, taps
        self.sizes = _Sizes(
            n, together, groups, self.channels, outputs, *planes, blocks, columns, chunks
        )
        self.image = self.channels * (self.padded if any(pad) else groups * self.padded)
        self.position_step = [s * t for s, t in zip(stride, step, strict=True)]
        self.tap_step = [d * t for d, t in zip(dilation, step, strict=True)]
        # Along each axis, the taps that each position needs and the positions that need each tap.
        axes = list(zip(self.out, stride, self.kernel, dilation, pad, size, strict=True))
        needs = [_needs(o, s, k, d, p, n) for o, s, k, d, p, n in axes]
        needed = [_needs(k, d, o, s, p, n) for o, s, k, d, p, n in axes]
        used = prod(float(a[:, 1].sum() - a[:, 0].sum()) for a in needs)
        self.skips = used < 0.97 * positions * taps
        line = _places(size[:-1], step[:-1], _dot(pad, step))
        rest = line, self.sizes, kind, self.shape.width
        self.forward_tables = _Tables(self._forward_schedule(needs), *rest)
        self.weight_tables = _Tables(self._backward_schedule(needed), *rest)
        self.panels = np.empty(weights, conv.dtype)
        self.bias = np.zeros((groups, blocks * columns), conv.dtype)

    def _ranges(self, needs: list[Array], counts: Sizes) -> Array:
        """Return (rows, axes, 2) from the needs of each axis; all if hardly any can be skipped."""
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

    def forward(self, x: Array, w: Array, bias: Array | None, y: Array) -> None:
        sizes, panels = self.sizes, self.panels
        w = w.reshape(sizes.groups, sizes.outputs, sizes.inputs, sizes.taps)
        units = sizes.groups * sizes.blocks
        parallel(partial(_pack, w, panels, sizes), units, 1 + 50_000 * units // w.size)
        lay = partial(_lay_bias, bias, sizes.outputs, self.bias)
        parallel(lay, sizes.groups, sizes.groups)
        arrays = x.reshape(-1), panels, self.bias.reshape(-1), y.reshape(-1)
        run = partial(_forward, *arrays, self.forward_tables)
        parallel(run, sizes.images // sizes.together * units)

    def backward_weight(self, x: Array, dy: Array, dw: Array | None, db: Array | None) -> None:
        sizes, dtype = self.sizes, self.panels.dtype
        units = sizes.groups * sizes.blocks
        rows, weights = sizes.chunks * units, sizes.taps * sizes.inputs * sizes.columns
        parts, bias_parts = (
            temporary((rows, weights), dtype),
            np.empty((rows, sizes.columns), dtype),
        )
        arrays = x.reshape(-1), dy.reshape(-1), parts, bias_parts
        parallel(partial(_backward_weight, *arrays, self.weight_tables), rows)
        if dw is not None:
            dw = dw.reshape(sizes.groups, sizes.outputs, sizes.inputs * sizes.taps)
            parallel(partial(_add_parts, parts, dw, sizes, self.shape.width), units)
        if db is not None:
            parallel(partial(_add_bias_parts, bias_parts, db, sizes), units, units)
        release(parts)


def _needs(count: int, step: int, other: int, other_step: int, pad: int, size: int) -> Array:
    """Return for i < count the range of j < other with 0 <= i*step - pad + j*other_step < size."""
    at = np.arange(count) * step - pad
    lo = np.clip(-(at // other_step), 0, other)
    return np.stack([lo, np.clip((size - 1 - at) // other_step + 1, lo, other)], 1)
