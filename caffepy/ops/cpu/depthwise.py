"""Depthwise convolution over planes of (N, C, H, W): each channel has m outputs, o = c * m + k.

A padded plane is split by row and column modulo stride, into rows of `columns` elements. In this
order, the element that a tap of the kernel reads has a constant offset, the tap's own, from the
number i * columns + j of the window. Rows of y get the same length, so every pass is one sum over
long vectors:

- forward: y[q] = b + sum over taps of w[tap] * x[offset + q];
- gradient of the data, for each remainder modulo stride:
  dx[e] = sum over its taps of w[tap] * dy[e - shift];
- gradient of the weights: dw[tap] = sum over q of dy[q] * x[offset + q], where dy is 0 between
  its rows.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from caffepy.device.blob import Array
from caffepy.device.recording import release, temporary
from caffepy.device.threads import parallel
from caffepy.ops.cpu.compiler import EXACT, inlined, kernel
from caffepy.ops.cpu.tile import shapes
from caffepy.ops.cpu.vectors import Vectors, copy, emitted

Sizes = Sequence[int]
Width = tuple[int, ...]
Maybe = Array | None

BLOCK = 2048
"""Elements that all taps process before the next: they stay in L1, and float32 sums are short."""

TAPS = 9
"""Taps whose gradients are summed at a time, in registers."""

VECTORS = (0,) * 4
"""Vectors of outputs that are summed at a time; a tuple, because its length is a type for numba."""

MULTIPLE = 16
"""Most outputs of a channel for these loops: with more, vectors of outputs are faster."""


@emitted("source w at taps lo hi total e vectors width")
def _weigh(v: Vectors) -> None:
    """total[e + i] += sum over taps lo < hi of w[at + which] * source[offset + e + i]."""
    builder, args, n = v.builder, v.args, v.types["vectors"].count
    start, table, to = (
        v.pointer("source", args["e"]),
        v.pointer("taps"),
        v.pointer("total", args["e"]),
    )

    def add(t: Any, sums: list[Any]) -> list[Any]:
        entry = builder.gep(table, [builder.mul(t, t.type(2))])
        x = builder.gep(start, [builder.load(entry)])
        which = builder.load(builder.gep(entry, [t.type(1)]))
        weight = v.splat(builder.load(v.pointer("w", args["at"], which)))
        return [builder.call(v.fma, [weight, v.load(x, k), s]) for k, s in enumerate(sums)]

    sums = v.loop(args["lo"], args["hi"], 1, [v.load(to, k) for k in range(n)], add)
    for k, value in enumerate(sums):
        v.store(value, to, k)


@emitted("d source offsets first lo hi part at width")
def _sum(v: Vectors) -> None:
    """part[at][k] += sum over q in [lo, hi) of d[q] * source[offsets[first + k] + q], k < TAPS;
    part[at][TAPS] of d[q].

    Every element of a vector has its own sum; part (..., width) is of doubles.
    """
    builder, args, first = v.builder, v.args, v.args["first"]
    offsets = [builder.load(v.pointer("offsets", first, first.type(k))) for k in range(TAPS)]
    starts, d = [v.pointer("source", offset) for offset in offsets], v.pointer("d")

    def add(q: Any, sums: list[Any]) -> list[Any]:
        left = v.load(builder.gep(d, [q]))
        products = [
            builder.call(v.fma, [left, v.load(builder.gep(x, [q])), s])
            for x, s in zip(starts, sums, strict=False)
        ]
        return [*products, builder.fadd(left, sums[-1])]

    zero = ir.Constant(v.vector, [0.0] * v.width)
    doubles = ir.VectorType(ir.DoubleType(), v.width)
    sums = v.loop(args["lo"], args["hi"], v.width, [zero] * (TAPS + 1), add)
    for k, value in enumerate(sums):
        to = v.at(v.pointer("part", args["at"]), k, doubles)
        wide = value if v.vector == doubles else builder.fpext(value, doubles)
        builder.store(builder.fadd(builder.load(to, align=8), wide), to, align=8)


@inlined
def _apart(x: Array, at: int, width: int, lines: Array, buffer: Array, vector: Width) -> None:
    """Copy the plane at x[at] to its places: that of (r, c), c < stride, is lines[r, c]."""
    height, apart = lines.shape
    two, zero = np.uintp(2), np.uintp(0)
    for r in range(height):
        row = at + r * width
        if apart == 1:
            copy(x, row, buffer, lines[r, 0], width, vector)
        elif apart == 2:
            source, even, odd = np.uintp(row), np.uintp(lines[r, 0]), np.uintp(lines[r, 1])
            for c in range(zero, np.uintp(width // 2)):
                buffer[even + c] = x[source + two * c]
                buffer[odd + c] = x[source + two * c + np.uintp(1)]
            if width % 2:
                buffer[lines[r, 0] + width // 2] = x[row + width - 1]
        else:
            for first in range(apart):
                for c in range((width - first - 1) // apart + 1):
                    buffer[lines[r, first] + c] = x[row + first + c * apart]


@inlined
def _together(buffer: Array, lines: Array, width: int, x: Array, at: int, vector: Width) -> None:
    """Copy the plane at x[at] back from its places."""
    height, apart = lines.shape
    two, zero = np.uintp(2), np.uintp(0)
    for r in range(height):
        row = at + r * width
        if apart == 1:
            copy(buffer, lines[r, 0], x, row, width, vector)
        elif apart == 2:
            to, even, odd = np.uintp(row), np.uintp(lines[r, 0]), np.uintp(lines[r, 1])
            for c in range(zero, np.uintp(width // 2)):
                x[to + two * c] = buffer[even + c]
                x[to + two * c + np.uintp(1)] = buffer[odd + c]
            if width % 2:
                x[row + width - 1] = buffer[lines[r, 0] + width // 2]
        else:
            for first in range(apart):
                for c in range((width - first - 1) // apart + 1):
                    x[row + first + c * apart] = buffer[lines[r, first] + c]


@inlined
def _correlate(
    source: Array, w: Array, at: int, spans: Array, taps: Array, total: Array, vector: Width
) -> None:
    """total[e] += sum over taps of w[at + which] * source[offset + e], spans (start, end, first
    tap, last tap + 1).

    The last vectors may reach beyond the end of a span.
    """
    for s in range(spans.shape[0]):
        if spans[s, 2] < spans[s, 3]:
            for e in range(spans[s, 0], spans[s, 1], len(VECTORS) * len(vector)):
                _weigh(source, w, at, taps, spans[s, 2], spans[s, 3], total, e, VECTORS, vector)


class _Sizes(NamedTuple):
    channels: int
    outputs: int  # m, of a channel
    taps: int
    height: int
    width: int
    ho: int
    wo: int
    x: int  # elements of a padded plane of x
    dy: int  # and of dy, for the gradient of the data
    images: int
    chunks: int  # parts of the gradient of the weights, each of some images


class _Tables(NamedTuple):
    x_lines: Array  # places of the rows of x, or dx
    y_lines: Array  # places of the rows of y, or dy
    spans: Array
    taps: Array
    sizes: _Sizes
    vector: Width


@kernel
def _forward(x: Array, w: Array, b: Array, y: Array, tables: _Tables, lo: int, hi: int) -> None:
    """Compute planes of x (N, C, H, W), w (C, m, taps), b (C, m), y (N, C, m, Ho, Wo), all flat."""
    x_lines, y_lines, spans, taps, sizes, vector = tables
    m = sizes.outputs
    buffer = np.zeros(sizes.x, x.dtype)
    total = np.empty(spans[0, 1] + len(VECTORS) * len(vector), x.dtype)
    for plane in range(lo, hi):
        c = plane % sizes.channels
        _apart(x, plane * sizes.height * sizes.width, sizes.width, x_lines, buffer, vector)
        for k in range(m):
            total[:] = b[c * m + k]
            _correlate(buffer, w, (c * m + k) * sizes.taps, spans, taps, total, vector)
            _together(total, y_lines, sizes.wo, y, (plane * m + k) * sizes.ho * sizes.wo, vector)


@kernel
def _backward_data(dy: Array, w: Array, dx: Array, tables: _Tables, lo: int, hi: int) -> None:
    """Compute planes [lo, hi) of dx, shapes as in `_forward`."""
    x_lines, y_lines, spans, taps, sizes, vector = tables
    m = sizes.outputs
    buffer, total = np.zeros(sizes.dy, dy.dtype), np.empty(sizes.x, dy.dtype)
    for plane in range(lo, hi):
        c = plane % sizes.channels
        total[:] = 0
        for k in range(m):
            _apart(dy, (plane * m + k) * sizes.ho * sizes.wo, sizes.wo, y_lines, buffer, vector)
            _correlate(buffer, w, (c * m + k) * sizes.taps, spans, taps, total, vector)
        _together(total, x_lines, sizes.width, dx, plane * sizes.height * sizes.width, vector)


@kernel
def _backward_weight(x: Array, dy: Array, parts: Array, tables: _Tables, lo: int, hi: int) -> None:
    """Compute units [lo, hi), each (chunk of images, channel): parts (chunks, C, m, parts of TAPS,
    TAPS + 1, width), flat.
    """
    x_lines, y_lines, spans, offsets, sizes, vector = tables
    m, windows, blocks = sizes.outputs, spans[0, 1], offsets.size // TAPS
    part = (TAPS + 1) * len(vector)
    buffer, d = np.zeros(sizes.x, x.dtype), np.zeros(windows + len(vector), x.dtype)
    for unit in range(lo, hi):
        parts[unit * m * blocks * part : (unit + 1) * m * blocks * part] = 0
        chunk, c = unit // sizes.channels, unit % sizes.channels
        first = sizes.images * chunk // sizes.chunks
        for n in range(first, sizes.images * (chunk + 1) // sizes.chunks):
            plane = n * sizes.channels + c
            _apart(x, plane * sizes.height * sizes.width, sizes.width, x_lines, buffer, vector)
            for k in range(m):
                _apart(dy, (plane * m + k) * sizes.ho * sizes.wo, sizes.wo, y_lines, d, vector)
                for a in range(0, windows, BLOCK):
                    b = min(a + BLOCK, windows)
                    for t in range(blocks):
                        at = ((unit * m + k) * blocks + t) * part
                        _sum(d, buffer, offsets, t * TAPS, a, b, parts, at, vector)


@partial(kernel, fastmath=EXACT)
def _add_parts(parts: Array, dw: Maybe, db: Maybe, taps: int, width: int, lo: int, hi: int) -> None:
    """dw (O, taps) and db (O) += the sums of parts (chunks, O, parts of TAPS, TAPS + 1, width)."""
    chunks = parts.shape[0]
    for o in range(lo, hi):
        for tap in range(taps + 1):
            block, at = (tap // TAPS, tap % TAPS) if tap < taps else (0, TAPS)
            total = 0.0
            for chunk in range(chunks):
                for k in range(width):
                    total += parts[chunk, o, block, at, k]
            if tap < taps:
                if dw is not None:
                    dw[o, tap] += total
            elif db is not None:
                db[o] += total


def suits(x_shape: Sizes, w_shape: Sizes, group: int) -> bool:
    """Return True if `Depthwise` is to compute a convolution of these shapes."""
    return len(x_shape) == 4 and group == x_shape[1] and w_shape[0] <= MULTIPLE * group


class Depthwise:
    """A convolution with a group for each channel: x (N, C, H, W), w (C * m, 1, kh, kw)."""

    def __init__(
        self, x_shape: Sizes, w_shape: Sizes, stride: Sizes, pad: Sizes, dilation: Sizes, dtype: Any
    ) -> None:
        n, c, h, w = x_shape
        o, _, kh, kw = w_shape
        (sh, sw), (ph, pw), (dh, dw) = stride, pad, dilation
        ho = (h + 2 * ph - (dh * (kh - 1) + 1)) // sh + 1
        wo = (w + 2 * pw - (dw * (kw - 1) + 1)) // sw + 1
        self.y_shape, self.dtype = (n, o, ho, wo), np.dtype(dtype)

        down, right = dh * (kh - 1) // sh, dw * (kw - 1) // sw
        rows = max(ho + down, (h + ph - 1) // sh + 1)
        columns = max(wo + right, (w + pw - 1) // sw + 1)
        vector = shapes(self.dtype.itemsize)[0].width
        area, margin = rows * columns + len(VECTORS) * len(vector), down * columns + right
        planes = area * sh * sw, margin + area
        sizes = _Sizes(c, o // c, kh * kw, h, w, ho, wo, *planes, n, min(n, -(-16 // c)))
        r, s = np.ogrid[ph : ph + h, pw : pw + min(sw, w)]
        x_lines = (r % sh * sw + s % sw) * area + r // sh * columns + s // sw
        y_lines = np.arange(ho)[:, None] * columns

        a, b = np.indices((kh, kw)).reshape(2, -1) * [[dh], [dw]]
        remainder, shift = a % sh * sw + b % sw, a // sh * columns + b // sw
        tap = np.arange(kh * kw)
        taps = np.stack([remainder * area + shift, tap], 1)
        offsets = np.pad(taps[:, 0], (0, -len(tap) % TAPS), "edge")
        spans = np.array([[0, (ho - 1) * columns + wo, 0, kh * kw]])
        self.tables = _Tables(x_lines, y_lines, spans, taps, sizes, vector)
        self.weight_tables = self.tables._replace(taps=offsets)
        # The spans of dx are the rows of each remainder that lie in the plane; its elements count
        # through all of them.
        order = np.argsort(remainder, kind="stable")
        taps = np.stack([margin - shift - remainder * area, tap], 1)[order]
        which = np.arange(sh * sw)
        first, last = -((which // sw - ph) // sh), (h - 1 + ph - which // sw) // sh + 1
        bounds = np.searchsorted(remainder[order], [which, which + 1])
        spans = np.stack(
            [which * area + first * columns, which * area + last * columns, *bounds], 1
        )
        self.data_tables = _Tables(x_lines, margin + y_lines, spans, taps, sizes, vector)

    def _share(self, loop: Any, *arguments: Any) -> None:
        sizes = self.tables.sizes
        parallel(partial(loop, *arguments), sizes.images * sizes.channels, 1 + 20_000 // sizes.x)

    def forward(self, x: Array, w: Array, b: Array | None, y: Array) -> None:
        b = np.zeros(self.y_shape[1], self.dtype) if b is None else b
        self._share(_forward, *(a.reshape(-1) for a in (x, w, b, y)), self.tables)

    def backward_data(self, dy: Array, w: Array, dx: Array) -> None:
        self._share(_backward_data, *(a.reshape(-1) for a in (dy, w, dx)), self.data_tables)

    def backward_weight(self, x: Array, dy: Array, dw: Array | None, db: Array | None) -> None:
        tables, sizes = self.weight_tables, self.tables.sizes
        shape = sizes.chunks, self.y_shape[1], tables.taps.size // TAPS, TAPS + 1
        parts = temporary((*shape, len(tables.vector)), np.float64)
        parallel(
            partial(_backward_weight, *(a.reshape(-1) for a in (x, dy, parts)), tables),
            sizes.chunks * sizes.channels,
            1 + 20_000 * sizes.chunks // (sizes.images * sizes.x),
        )
        dw = None if dw is None else dw.reshape(self.y_shape[1], sizes.taps)
        add = partial(_add_parts, parts, dw, db, sizes.taps, len(tables.vector))
        parallel(add, self.y_shape[1], 1 + 20_000 * self.y_shape[1] // parts.size)
        release(parts)
