"""Convolution of 3x3 with stride 1 by Winograd's minimal filtering F(2x2, 3x3): 16 products for
four outputs instead of 36 (Lavin, Gray: Fast algorithms for convolutional neural networks, 2016).

y = A' [(G w G') * (B' d B)] A for tiles of 2x2 outputs, whose 4x4 inputs d overlap; * is by
elements, summed over channels: 16 matrix products of (O, C) with (C, tiles).

- gradient of the data: the same with dy, whose padding is 2 - pad, and the turned kernel;
- gradient of the weights: the transpose, dw = G' [sum over tiles of (A dy A') * (B' d B)] G.

A plane is split by row and column modulo 2 into four of th + 1 rows of tw + 1 elements, so that the
elements that a tile reads have constant offsets from the tile's number i * (tw + 1) + j: loops run
over long vectors. The last number of each row is no tile; what is computed for it is dropped.

Tiles are computed in blocks, a strip of an image or several images, that follow from shapes alone:
results do not depend on the number of threads. A value that is not finite reaches the other outputs
of its tiles, and an infinity may become NaN there.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from caffepy.device.blob import Array
from caffepy.device.recording import call, recorder, release, temporary
from caffepy.device.threads import parallel, parallel_calls
from caffepy.ops.cpu.blas import bias_gradient
from caffepy.ops.cpu.compiler import inlined, kernel
from caffepy.ops.cpu.gemm import Planes, Product, Transposed, turn
from caffepy.ops.cpu.tile import shapes
from caffepy.ops.cpu.vectors import Vectors, emitted

Sizes = Sequence[int]

TILES = 512  # of a block, about
LEAST = 32  # channels and outputs for which 16 products pay
LEAST_TILES = 160  # of all images, below which the transforms of the weights do not pay
PIECES = 8  # blocks that keep the threads busy; with fewer, they share each block
PARTS = 1 << 21  # elements: the most that parts of the gradient of the weights take

_G = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])
_FILTER = np.kron(_G, _G)  # (16, 9): G w G' of a flat w


def _input(d: list[Any], builder: Any) -> list[Any]:
    """B' of a column of 4."""
    return [
        builder.fsub(d[0], d[2]),
        builder.fadd(d[1], d[2]),
        builder.fsub(d[2], d[1]),
        builder.fsub(d[1], d[3]),
    ]


def _spread(e: list[Any], builder: Any) -> list[Any]:
    """A of a column of 2."""
    return [e[0], builder.fadd(e[0], e[1]), builder.fsub(e[0], e[1]), builder.fneg(e[1])]


def _output(m: list[Any], builder: Any) -> list[Any]:
    """A' of a column of 4."""
    add, sub = builder.fadd, builder.fsub
    return [add(add(m[0], m[1]), m[2]), sub(sub(m[1], m[2]), m[3])]


Columns = list[list[Any]]


def _both_ways(columns: Columns, change: Callable[..., list[Any]], builder: Any) -> Columns:
    """Return the rows of change(change(columns)')."""
    rows = zip(*(change(column, builder) for column in columns), strict=True)
    return [change(list(row), builder) for row in rows]


def _over_tiles(v: Vectors, body: Callable[[Any], None]) -> None:
    """Emit body(q) for vectors that cover `count` tiles, at least one; the last two overlap."""
    last = v.builder.sub(v.args["count"], v.args["count"].type(v.width))

    def step(q: Any, _: list[Any]) -> list[Any]:
        body(q)
        return []

    v.loop(last.type(0), last, v.width, [], step)
    body(last)


def _parity(v: Vectors, name: str, a: int, b: int, q: Any) -> Any:
    """Return a pointer to row a, column b of tile q in the four planes of an array."""
    builder, pitch, area = v.builder, v.args["pitch"], v.args["area"]
    plane = builder.mul(area, area.type(2 * (a % 2) + b % 2))
    row = builder.mul(pitch, pitch.type(a // 2))
    return v.pointer(name, builder.add(plane, row), pitch.type(b // 2), q)


@emitted("planes area pitch v at step count width")
def _transform_input(v: Vectors) -> None:
    """v[k * step + at + q] = (B' d B)[k] of tiles q."""
    builder = v.builder

    def body(q: Any) -> None:
        d = [[v.load(_parity(v, "planes", a, b, q)) for a in range(4)] for b in range(4)]
        _store_all(v, _both_ways(d, _input, builder), q)

    _over_tiles(v, body)


@emitted("planes area pitch v at step count width")
def _transform_gradient(v: Vectors) -> None:
    """v[k * step + at + q] = (A dy A')[k] of tiles q."""
    builder = v.builder

    def body(q: Any) -> None:
        e = [[v.load(_parity(v, "planes", a, b, q)) for a in range(2)] for b in range(2)]
        _store_all(v, _both_ways(e, _spread, builder), q)

    _over_tiles(v, body)


def _store_all(v: Vectors, rows: Columns, q: Any) -> None:
    at, step = v.builder.add(v.args["at"], q), v.args["step"]
    for k, value in enumerate(value for row in rows for value in row):
        v.store(value, v.pointer("v", at, v.builder.mul(step, step.type(k))))


@emitted("m at step planes area pitch b b_at count width")
def _transform_output(v: Vectors) -> None:
    """The four planes of y = (A' m A) + b[b_at] of tiles q, m as the v of `_transform_input`."""
    builder, step = v.builder, v.args["step"]
    bias = v.splat(builder.load(v.pointer("b", v.args["b_at"])))

    def body(q: Any) -> None:
        at = builder.add(v.args["at"], q)
        m = [
            [v.load(v.pointer("m", at, builder.mul(step, step.type(4 * k + j)))) for k in range(4)]
            for j in range(4)
        ]
        for a, row in enumerate(_both_ways(m, _output, builder)):
            for b, value in enumerate(row):
                v.store(builder.fadd(value, bias), _parity(v, "planes", a, b, q))

    _over_tiles(v, body)


class _Sizes(NamedTuple):
    height: int  # of a plane
    width: int
    pad_h: int  # rows that lie before the first, 0 for planes of outputs
    pad_w: int
    rows: int  # of tiles of a block, in each image
    pitch: int  # tw + 1
    area: int  # of one of the four planes, and the element after it, which the last tile reads
    extra: int  # rows of a plane beyond those of tiles: 1 for inputs


@inlined
def _apart(x: Array, at: int, first: int, s: _Sizes, planes: Array) -> None:
    """Split the rows of the plane at x[at] from row `first` on; rows and columns outside are 0."""
    for r in range(2 * (s.rows + s.extra)):
        row = first + r - s.pad_h
        for b in range(2):
            to = (2 * (r % 2) + b) * s.area + r // 2 * s.pitch
            if 0 <= row < s.height:
                lo = (s.pad_w - b + 1) // 2
                hi = min(s.pitch, (s.width - 1 + s.pad_w - b) // 2 + 1)
                source = np.uintp(at + row * s.width + 2 * lo + b - s.pad_w)
                target = np.uintp(to + lo)
                for j in range(np.uintp(hi - lo)):
                    planes[target + j] = x[source + np.uintp(2) * j]
            else:
                for j in range(s.pitch):
                    planes[to + j] = 0


@inlined
def _together(planes: Array, s: _Sizes, y: Array, at: int, first: int, relu: bool) -> None:
    """Write the rows of the plane at y[at], which has no padding, from row `first` on."""
    zero, two, one = y.dtype.type(0), np.uintp(2), np.uintp(1)
    for r in range(min(2 * s.rows, s.height - first)):
        row = at + (first + r) * s.width
        even = 2 * (r % 2) * s.area + r // 2 * s.pitch
        to, a, b = np.uintp(row), np.uintp(even), np.uintp(even + s.area)
        for j in range(np.uintp(s.width // 2)):
            y[to + two * j] = planes[a + j]
            y[to + two * j + one] = planes[b + j]
        if s.width % 2:
            y[row + s.width - 1] = planes[even + s.width // 2]
        if relu:
            for j in range(row, row + s.width):
                y[j] = zero if y[j] <= zero else y[j]


class _Place(NamedTuple):
    """Places of the tiles of a block."""

    image: int  # the first
    together: int  # images
    first: int  # row of the planes
    channels: int


@kernel
def _to_tiles(
    x: Array,
    place: _Place,
    s: _Sizes,
    gradient: bool,
    v: Array,
    vector: tuple[int, ...],
    lo: int,
    hi: int,
) -> None:
    """v (16, C, images * count) = transforms of planes [lo, hi) of the block; arrays flat."""
    planes = np.zeros(4 * s.area, x.dtype)
    count = s.rows * s.pitch
    tiles = place.together * count
    for unit in range(lo, hi):
        c, i = unit // place.together, unit % place.together
        at = ((place.image + i) * place.channels + c) * s.height * s.width
        _apart(x, at, place.first, s, planes)
        to, step = c * tiles + i * count, place.channels * tiles
        if gradient:
            _transform_gradient(planes, s.area, s.pitch, v, to, step, count, vector)
        else:
            _transform_input(planes, s.area, s.pitch, v, to, step, count, vector)


@kernel
def _from_tiles(
    m: Array,
    place: _Place,
    s: _Sizes,
    b: Array,
    relu: bool,
    y: Array,
    vector: tuple[int, ...],
    lo: int,
    hi: int,
) -> None:
    """The planes [lo, hi) of the block in y from m (16, O, images * count); arrays flat."""
    planes = np.zeros(4 * s.area, y.dtype)
    count = s.rows * s.pitch
    tiles = place.together * count
    for unit in range(lo, hi):
        c, i = unit // place.together, unit % place.together
        at = ((place.image + i) * place.channels + c) * s.height * s.width
        start, step = c * tiles + i * count, place.channels * tiles
        _transform_output(m, start, step, planes, s.area, s.pitch, b, c, count, vector)
        _together(planes, s, y, at, place.first, relu)


_own = threading.local()


def _scratch(name: str, shape: Sizes, dtype: DTypeLike) -> Array:
    """Return an array of the calling thread, which its next call with this name overwrites; one of
    the recording's own, to be released, while it records.

    New memory would be slower than the work on it: the system clears its pages one by one.
    """
    if recorder():
        return temporary(shape, dtype)
    size = prod(shape) * np.dtype(dtype).itemsize
    have: Array | None = getattr(_own, name, None)
    if have is None or have.size < size:
        have = np.empty(size, np.uint8)
        setattr(_own, name, have)
    return have[:size].view(dtype).reshape(shape)


class _Plan:
    """The tiles of planes (N, C, H, W) -> (N, O, Ho, Wo), in blocks."""

    def __init__(self, x_shape: Sizes, outputs: int, pad: Sizes, dtype: DTypeLike) -> None:
        n, self.channels, h, w = x_shape
        self.outputs, self.dtype = outputs, np.dtype(dtype)
        ho, wo = h + 2 * pad[0] - 2, w + 2 * pad[1] - 2
        self.y_shape = n, outputs, ho, wo
        self.vector = shapes(self.dtype.itemsize)[0].width
        th, pitch = -(-ho // 2), -(-wo // 2) + 1
        self.strips = max(1, th * pitch // TILES)
        rows = -(-th // self.strips)
        self.strips = -(-th // rows)
        fitting = (k for k in range(1, n + 1) if n % k == 0 and k * rows * pitch <= TILES)
        self.together = max(fitting, default=1) if self.strips == 1 else 1
        self.blocks = n // self.together * self.strips
        self.tiles = self.together * rows * pitch
        area = (rows + 1) * pitch + 1
        tiles = self.tiles
        inputs, results = (Planes(k * tiles, 0, tiles) for k in (self.channels, outputs))
        size, planes = (outputs, self.channels), (inputs, results)
        self.product = Product(size, (16, 1, tiles), planes, dtype)
        both = (outputs, self.channels, tiles), (16, 1), (results, inputs)
        self.weight_product = Transposed(*both, dtype)
        self.x_sizes = _Sizes(h, w, pad[0], pad[1], rows, pitch, area, 1)
        self.y_sizes = _Sizes(ho, wo, 0, 0, rows, pitch, area, 0)

    def place(self, block: int, channels: int) -> _Place:
        """Return where the planes of a block lie, of an array of `channels`."""
        image, strip = divmod(block, self.strips)
        first = 2 * strip * self.x_sizes.rows
        return _Place(image * self.together, self.together, first, channels)

    def buffer(self, name: str, channels: int) -> Array:
        """Return an array (16, channels, tiles) for a block."""
        return _scratch(name, (16, channels, self.tiles), self.dtype)

    def to_tiles(self, x: Array, block: int, gradient: bool, v: Array) -> None:
        """Transform the planes of a block: x, or dy with `gradient`."""
        channels, sizes = x.shape[1], self.y_sizes if gradient else self.x_sizes
        place, flat = self.place(block, channels), x.reshape(-1)
        run = partial(_to_tiles, flat, place, sizes, gradient, v.reshape(-1), self.vector)
        parallel(run, channels * self.together)

    def multiply(self, x: Array, u: Array, b: Array | None, y: Array, relu: bool) -> None:
        """y = the convolution of x with filters u (16, O, C)."""
        bias = np.zeros(self.outputs, self.dtype) if b is None else b

        def pieces(lo: int, hi: int) -> None:
            v, m = self.buffer("v", self.channels), self.buffer("m", self.outputs)
            for block in range(lo, hi):
                self.to_tiles(x, block, False, v)
                self.product(u, v, None, m)
                place, sizes = self.place(block, self.outputs), self.y_sizes
                arrays = m.reshape(-1), place, sizes, bias, relu, y.reshape(-1), self.vector
                parallel(partial(_from_tiles, *arrays), self.outputs * self.together)
            release(v)
            release(m)

        _over_blocks(pieces, self.blocks)


def _over_blocks(pieces: Callable[[int, int], None], count: int) -> None:
    """Divide many blocks among the threads; they share the work within each of a few."""
    if count >= PIECES:
        parallel_calls(pieces, count)
    else:
        pieces(0, count)


def suits(x_shape: Sizes, w_shape: Sizes, window: Sequence[Sizes], group: int) -> bool:
    """Return True if `Winograd` is to compute a convolution of these shapes."""
    stride, pad, dilation = window
    if len(x_shape) != 4 or group != 1 or min(w_shape[:2]) < LEAST or max(pad) > 2:
        return False
    if (*w_shape[2:], *stride, *dilation) != (3, 3, 1, 1, 1, 1):
        return False
    # A vector must fit into the tiles of an image, of y and of x.
    sizes = zip(x_shape[2:], pad, strict=True)
    h, w = ((min(n, n + 2 * p - 2) + 1) // 2 for n, p in sizes)
    return h > 0 and w > 0 and h * (w + 1) >= 16 and x_shape[0] * h * w >= LEAST_TILES


class Winograd:
    """x (N, C, H, W), w (O, C, 3, 3) -> y (N, O, Ho, Wo)."""

    def __init__(self, x_shape: Sizes, w_shape: Sizes, pad: Sizes, dtype: DTypeLike) -> None:
        self.plan = _Plan(x_shape, w_shape[0], pad, dtype)
        self.y_shape = self.plan.y_shape
        self.data_plan = _Plan(self.y_shape, x_shape[1], [2 - p for p in pad], dtype)

    def _filters(self, w: Array, turned: bool) -> Array:
        """Return G w G' (16, O, C), of the kernels turned by 180 degrees if `turned`."""
        flat = w.reshape(-1, 9)
        left = _FILTER[:, ::-1] if turned else _FILTER
        left = np.ascontiguousarray(left, w.dtype)
        u = _scratch("u", (16, len(flat)), w.dtype)
        cuts = _cut(len(flat))

        def pieces(lo: int, hi: int) -> None:
            for k in range(lo, hi):
                inside = slice(cuts[k], cuts[k + 1])
                call(np.matmul, left, flat[inside].T, u[:, inside])  # (16, 9) @ (9, part)

        parallel_calls(pieces, len(cuts) - 1)
        return u.reshape(16, *w.shape[:2])

    def forward(self, x: Array, w: Array, b: Array | None, y: Array, relu: bool = False) -> None:
        u = self._filters(w, False)
        self.plan.multiply(x, u, b, y, relu)
        release(u)

    def backward_data(self, dy: Array, w: Array, dx: Array) -> None:
        u = self._filters(w, True)
        turned = turn(u, _scratch("turned", (16, *u.shape[:0:-1]), w.dtype))
        release(u)
        self.data_plan.multiply(dy, turned, None, dx, False)
        release(turned)

    def backward_weight(self, x: Array, dy: Array, dw: Array | None, db: Array | None) -> None:
        if db is not None:
            bias_gradient(dy, db)
        if dw is None:
            return
        plan, (o, c) = self.plan, dw.shape[:2]
        # Chunks of blocks have sums of their own, if those are small.
        chunks = PIECES if plan.blocks >= PIECES and PIECES * 16 * o * c <= PARTS else 1
        du = _scratch("u", (chunks, 16, o, c), plan.dtype)

        def pieces(lo: int, hi: int) -> None:
            v, d = plan.buffer("v", c), plan.buffer("m", o)
            for chunk in range(lo, hi):
                first, end = (plan.blocks * k // chunks for k in (chunk, chunk + 1))
                for block in range(first, end):
                    plan.to_tiles(x, block, False, v)
                    plan.to_tiles(dy, block, True, d)
                    self.plan.weight_product(d, v, du[chunk], adds=block > first)
            release(v)
            release(d)

        _over_blocks(pieces, chunks)
        total = du[0].reshape(16, -1)
        for part in du[1:]:
            call(np.add, total, part.reshape(16, -1), total)
        back = np.ascontiguousarray(_FILTER.T, plan.dtype)
        flat, cuts = dw.reshape(-1, 9), _cut(o * c)

        def add(lo: int, hi: int) -> None:
            for k in range(lo, hi):
                inside = slice(cuts[k], cuts[k + 1])
                part = temporary((9, cuts[k + 1] - cuts[k]), plan.dtype)
                call(np.matmul, back, total[:, inside], part)  # (9, 16) @ (16, part)
                call(_add_transposed, part, flat[inside])
                release(part)

        parallel_calls(add, len(cuts) - 1)
        release(du)


@kernel
def _add_transposed(part: Array, out: Array) -> None:
    for i in range(out.shape[0]):
        for k in range(out.shape[1]):
            out[i, k] += part[k, i]


def _cut(count: int) -> list[int]:
    """Return bounds that cut `count` filters into parts."""
    parts = max(1, min(16, count // 4096))
    return [count * k // parts for k in range(parts + 1)]
