"""Matrix products of convolutions, in tiles of sums that stay in vector registers.

    c (M, N) = a (M, K) @ b (K, N)

    panel of b, packed (K, columns):   |  vector 0  |  vector 1  |  ...
                                       +------------+------------+-----
    a[i, k], copied to a whole vector  |  c[i, ...] |  c[i, ...] |  ...    rows of a tile

Matrices are read where they lie in blobs: `Product` takes planes of images side by side as the
columns of b, `Transposed` as the rows of both factors, whose products it sums over the images. A
panel is packed once, stays in the cache and meets all rows of a.

An element is the sum of its products in their order, whichever tile computes it, so results do not
depend on how work is divided.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from caffepy.device.blob import Array
from caffepy.device.recording import release, temporary
from caffepy.device.threads import parallel
from caffepy.ops.cpu.compiler import inlined, kernel
from caffepy.ops.cpu.tile import copy_transposed, shapes
from caffepy.ops.cpu.vectors import Vectors, copy, emitted

Lengths = tuple[int, ...]  # a tuple for its length, which is a type for numba

VECTORS = 3  # of a tile
STEPS = 512  # of `Transposed` at a time: the panel stays in the cache
PIECES = 32  # that keep many threads busy
ROWS = 64  # of a piece, at least
PARTS = 1 << 21  # elements: the most that parts of a sum take
PART = 64  # rows of a factor that is turned, at a time
WORK = 200_000  # multiplications for which one more thread pays
TURNED = 1 << 15  # elements for which one more thread pays when a factor is turned

_ONE, _TWO, _THREE = (0,), (0,) * 2, (0,) * 3


def _tile_of(dtype: DTypeLike) -> tuple[Lengths, Lengths]:
    """Return the rows and the elements of a vector of a tile that nearly fills the registers."""
    width = shapes(np.dtype(dtype).itemsize)[0].width
    registers_of_64_bytes = len(width) * np.dtype(dtype).itemsize == 64
    return (0,) * (8 if registers_of_64_bytes else 4), width


def _emit(v: Vectors, first: Callable[[Any, Any, int], Any]) -> None:
    """c[i, j] = first(i, place of c[i], j) + sum over k of a[i, k] * panel[k, j], i <= last."""
    builder, args = v.builder, v.args
    index, vectors = args["steps"].type, range(v.types["vectors"].count)
    a, c, panel = v.pointer("a", args["a_at"]), v.pointer("c", args["c_at"]), v.pointer("panel")
    rows = []
    for i in range(v.types["rows"].count):  # those after the last repeat it
        inside = builder.icmp_signed("<", index(i), args["last"])
        rows.append(builder.select(inside, index(i), args["last"]))
    bases = [builder.gep(a, [builder.mul(args["a_row"], row)]) for row in rows]
    targets = [builder.gep(c, [builder.mul(args["c_row"], row)]) for row in rows]

    def add(k: Any, sums: list[Any]) -> list[Any]:
        b = builder.gep(panel, [builder.mul(k, index(len(vectors) * v.width))])
        right = [v.load(b, j) for j in vectors]
        lefts = [v.splat(builder.load(builder.gep(base, [k]))) for base in bases]
        pairs = [(left, value) for left in lefts for value in right]
        return [builder.call(v.fma, [*p, s]) for p, s in zip(pairs, sums, strict=True)]

    sums = [
        first(row, target, j) for row, target in zip(rows, targets, strict=True) for j in vectors
    ]
    sums = v.loop(index(0), args["steps"], 1, sums, add)
    for k, value in enumerate(sums):
        v.store(value, targets[k // len(vectors)], k % len(vectors))


@emitted("a a_at a_row panel bias bias_at c c_at c_row last steps rows vectors width")
def _tile(v: Vectors) -> None:
    """c = bias + a @ panel."""
    _emit(v, lambda i, *_: v.splat(v.builder.load(v.pointer("bias", v.args["bias_at"], i))))


@emitted("a a_at a_row panel c c_at c_row last steps rows vectors width")
def _tile_added(v: Vectors) -> None:
    """c += a @ panel."""
    _emit(v, lambda _, target, j: v.load(target, j))


class Planes(NamedTuple):
    """Place of matrices in a flat array: the elements between the beginnings of two of them."""

    product: int  # between the matrices of two products
    image: int
    row: int
    step: int = 1  # between two elements of a row; for c of `Transposed` if that is turned


class _Sizes(NamedTuple):
    rows: int  # M
    steps: int  # K; for Transposed, of an image
    columns: int  # N
    products: int
    images: int
    positions: int  # columns of an image, for Product
    chunks: int  # of images, each with a c of its own, for Transposed
    panels: int  # of N columns
    blocks: int  # of M rows
    block: int  # rows of a block
    a: Planes
    b: Planes
    c: Planes


@inlined
def _pack(
    b: Array, at: int, s: _Sizes, first: int, count: int, panel: Array, columns: int, width: Lengths
) -> None:
    """panel[k, j] = b[k, first + j] for j < count, else 0."""
    j = 0
    while j < count:  # the columns of one image
        image, p = (first + j) // s.positions, (first + j) % s.positions
        run = min(count - j, s.positions - p)
        source = at + image * s.b.image + p
        for k in range(s.steps):
            copy(b, source + k * s.b.row, panel, k * columns + j, run, width)
        j += run
    for k in range(s.steps):
        for j in range(count, columns):
            panel[k * columns + j] = 0


@kernel
def _turn(a: Array, to: Array, width: Lengths, lo: int, hi: int) -> None:
    """to (Z, M, K) = a (Z, K, M), for parts [lo, hi) of PART rows of a."""
    steps, rows = a.shape[1], a.shape[2]
    parts = -(-steps // PART)
    for unit in range(lo, hi):
        z, first = unit // parts, unit % parts * PART
        count = min(PART, steps - first)
        source, target = a[z].reshape(-1)[first * rows :], to[z].reshape(-1)[first:]
        copy_transposed(source, rows, target, steps, count, rows, width)


def turn(a: Array, out: Array) -> Array:
    """Write the transposes of matrices a (Z, K, M) into out (Z, M, K); return it."""
    products, steps, rows = a.shape
    units = products * -(-steps // PART)
    _, width = _tile_of(a.dtype)
    parallel(partial(_turn, a, out, width), units, 1 + TURNED // (PART * rows))
    return out


@kernel
def _multiply(
    a: Array,
    b: Array,
    bias: Array,
    c: Array,
    s: _Sizes,
    rows: Lengths,
    width: Lengths,
    lo: int,
    hi: int,
) -> None:
    """Compute units (product, panel, block of rows); arrays flat, bias (products * M)."""
    n, r = len(width), len(rows)
    panel = np.empty(s.steps * VECTORS * n, a.dtype)
    scratch = np.empty(s.block * VECTORS * n, a.dtype)
    inside = -1
    for unit in range(lo, hi):
        which, block = unit // s.blocks, unit % s.blocks
        product, first = which // s.panels, which % s.panels * VECTORS * n
        count = min(VECTORS * n, s.columns - first)
        vectors = -(-count // n)
        columns = vectors * n
        if inside != which:
            inside = which
            _pack(b, product * s.b.product, s, first, count, panel, columns, width)
        begin, end = block * s.block, min(s.rows, (block + 1) * s.block)
        image, p = first // s.positions, first % s.positions
        to = product * s.c.product + image * s.c.image + p
        direct = count == columns and p + count <= s.positions
        out, c_at, c_row = (c, to + begin * s.c.row, s.c.row) if direct else (scratch, 0, columns)
        for i in range(begin, end, r):
            x, y = product * s.a.product + i * s.a.row, product * s.rows + i
            z, last = c_at + (i - begin) * c_row, min(r, end - i) - 1
            if vectors == 3:
                _tile(
                    a, x, s.a.row, panel, bias, y, out, z, c_row, last, s.steps,
                    rows, _THREE, width,
                )  # fmt: skip
            elif vectors == 2:
                _tile(
                    a, x, s.a.row, panel, bias, y, out, z, c_row, last, s.steps,
                    rows, _TWO, width,
                )  # fmt: skip
            else:
                _tile(
                    a, x, s.a.row, panel, bias, y, out, z, c_row, last, s.steps,
                    rows, _ONE, width,
                )  # fmt: skip
        j = count if direct else 0
        while j < count:
            image, p = (first + j) // s.positions, (first + j) % s.positions
            run = min(count - j, s.positions - p)
            to = product * s.c.product + image * s.c.image + p
            for i in range(begin, end):
                copy(scratch, (i - begin) * columns + j, c, to + i * s.c.row, run, width)
            j += run


@kernel
def _multiply_transposed(
    a: Array,
    b: Array,
    c: Array,
    s: _Sizes,
    adds: bool,
    rows: Lengths,
    width: Lengths,
    lo: int,
    hi: int,
) -> None:
    """Compute units (chunk, product, panel, block of rows); arrays flat."""
    n, r = len(width), len(rows)
    panel = np.empty(min(STEPS, s.steps) * VECTORS * n, a.dtype)
    scratch = np.empty(s.block * VECTORS * n, a.dtype)
    for unit in range(lo, hi):
        which, block = unit // s.blocks, unit % s.blocks
        which, first = which // s.panels, which % s.panels * VECTORS * n
        chunk, product = which // s.products, which % s.products
        count = min(VECTORS * n, s.columns - first)
        vectors = -(-count // n)
        columns = vectors * n
        begin, end = block * s.block, min(s.rows, (block + 1) * s.block)
        scratch[:] = 0
        if count < columns:
            panel[:] = 0
        for image in range(s.images * chunk // s.chunks, s.images * (chunk + 1) // s.chunks):
            a_at = product * s.a.product + image * s.a.image
            b_at = product * s.b.product + image * s.b.image + first * s.b.row
            for k in range(0, s.steps, STEPS):
                steps = min(STEPS, s.steps - k)
                copy_transposed(b[b_at + k :], s.b.row, panel, columns, count, steps, width)
                for i in range(begin, end, r):
                    x, z, last = a_at + i * s.a.row + k, (i - begin) * columns, min(r, end - i) - 1
                    if vectors == 3:
                        _tile_added(
                            a, x, s.a.row, panel, scratch, z, columns, last, steps,
                            rows, _THREE, width,
                        )  # fmt: skip
                    elif vectors == 2:
                        _tile_added(
                            a, x, s.a.row, panel, scratch, z, columns, last, steps,
                            rows, _TWO, width,
                        )  # fmt: skip
                    else:
                        _tile_added(
                            a, x, s.a.row, panel, scratch, z, columns, last, steps,
                            rows, _ONE, width,
                        )  # fmt: skip
        to = chunk * s.products * s.c.product + product * s.c.product + first * s.c.step
        if s.c.step == 1:
            for i in range(begin, end):
                at, source = to + i * s.c.row, (i - begin) * columns
                for j in range(np.uintp(count)):
                    value = scratch[np.uintp(source) + j]
                    c[np.uintp(at) + j] = c[np.uintp(at) + j] + value if adds else value
        else:
            for j in range(count):
                at = to + j * s.c.step
                for i in range(begin, end):
                    value = scratch[(i - begin) * columns + j]
                    c[at + i] = c[at + i] + value if adds else value


@kernel
def _add_parts(parts: Array, c: Array, adds: bool, lo: int, hi: int) -> None:
    """c (K) += the sum of parts (chunks, K), of which it overwrites the first; = without `adds`."""
    to, first = c[lo:hi], parts[0, lo:hi]
    for k in range(1, parts.shape[0]):
        part = parts[k, lo:hi]
        for i in range(to.size):
            first[i] += part[i]
    for i in range(to.size):
        to[i] = to[i] + first[i] if adds else first[i]


def _blocks(rows: int, units: int, tile: int) -> tuple[int, int]:
    """Return in how many blocks of how many rows M is cut, where there are `units` panels."""
    blocks = max(1, min(-(-PIECES // units), rows // ROWS))
    block = -(-rows // (blocks * tile)) * tile
    return -(-rows // block), block


class Product:
    """c (M, N) = a (M, K) @ b (K, N) + bias (M), N = images * positions, for each product."""

    def __init__(
        self,
        size: tuple[int, int],
        counts: tuple[int, int, int],
        planes: tuple[Planes, Planes],
        dtype: DTypeLike,
    ) -> None:
        """size is M, K; counts are of products, images and positions; planes are of b and c."""
        rows, steps = size
        products, images, positions = counts
        tile, width = _tile_of(dtype)
        panels = -(-images * positions // (VECTORS * len(width)))
        blocks, block = _blocks(rows, products * panels, len(tile))
        self.units = products * panels * blocks
        self.grain = 1 + WORK * self.units // (products * rows * steps * images * positions)
        cuts = 1, panels, blocks, block
        a, columns = Planes(rows * steps, 0, steps), images * positions
        self.sizes = _Sizes(rows, steps, columns, products, images, positions, *cuts, a, *planes)
        self.tile = tile, width
        self.no_bias = np.zeros(products * rows, dtype)

    def __call__(self, a: Array, b: Array, bias: Array | None, c: Array) -> None:
        s, (tile, width) = self.sizes, self.tile
        a, b, c = a.reshape(-1), b.reshape(-1), c.reshape(-1)
        bias = self.no_bias if bias is None else bias.reshape(-1)
        parallel(partial(_multiply, a, b, bias, c, s, tile, width), self.units, self.grain)


class Transposed:
    """c (M, N) += the sum over images of a (M, K) @ b (N, K).T, for each product."""

    def __init__(
        self,
        size: tuple[int, int, int],
        counts: tuple[int, int],
        planes: tuple[Planes, Planes],
        dtype: DTypeLike,
        turned: bool = False,
    ) -> None:
        """size is M, N, K; counts are of products and images; planes are of a and b. `turned`: c is
        (N, M) where it lies.
        """
        rows, columns, steps = size
        products, images = counts
        tile, width = _tile_of(dtype)
        panels = -(-columns // (VECTORS * len(width)))
        blocks, block = _blocks(rows, products * panels, len(tile))
        units = products * panels * blocks
        self.elements = products * rows * columns
        chunks = max(1, min(-(-PIECES // units), PARTS // self.elements, images))
        self.units = units * chunks
        self.grain = 1 + WORK * self.units // (products * rows * columns * steps * images)
        c = Planes(rows * columns, 0, *((1, rows) if turned else (columns, 1)))
        cuts = chunks, panels, blocks, block
        self.sizes = _Sizes(rows, steps, columns, products, images, 1, *cuts, *planes, c)
        self.tile = tile, width

    def __call__(self, a: Array, b: Array, c: Array, adds: bool = True) -> None:
        """Add the product to c; with `adds` False overwrite c."""
        a, b, c = a.reshape(-1), b.reshape(-1), c.reshape(-1)
        chunks = self.sizes.chunks
        parts = temporary((chunks, self.elements), c.dtype) if chunks > 1 else None
        to, adds_to = (c, adds) if parts is None else (parts.reshape(-1), False)
        given = a, b, to, self.sizes, adds_to, *self.tile
        parallel(partial(_multiply_transposed, *given), self.units, self.grain)
        if parts is not None:
            parallel(partial(_add_parts, parts, c, adds), self.elements, WORK)
            release(parts)
