"""The inner loop of convolutions: a tile of sums that stays in vector registers.

c[i, o] += sum over r of x[place[i] + offset[r]] * b[r, o]

Places and offsets are indices in x, so that a convolution needs no im2col matrix: forward, i is an
output position and r a weight; for the gradient of the weights it is the other way round.

                          b[r]  |  vector 0  |  vector 1  |  ...    `vectors` loads for each r,
                                +------------+------------+-----    all panels of b are this wide
    x[place[0] + offset[r]]  *  |  c[0, ...] |  c[0, ...] |  ...
    x[place[1] + offset[r]]  *  |  c[1, ...] |  c[1, ...] |  ...    rows * vectors registers of sums
             ...                |            |            |
             `rows` scalars, each copied to all elements of a vector

For each r a tile needs rows + vectors loads for rows * vectors multiply-adds of `width` elements.
Tiles nearly fill the registers (`shapes`). A Schedule says which rows share a tile and which r a
tile needs: those that would only meet padding are left out.
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

import llvmlite.binding
import numpy as np
from llvmlite import ir

from caffepy.device.blob import Array
from caffepy.ops.cpu.compiler import kernel
from caffepy.ops.cpu.vectors import Vectors, emitted

Lengths = tuple[int, ...]  # a tuple for its length, which is a type for numba


class Shape(NamedTuple):
    """A tile: its rows, vectors and elements of a vector, each number as the length of a tuple.

    Lengths of tuples are types for numba, which compiles one loop for each shape.
    """

    rows: Lengths
    vectors: Lengths
    width: Lengths

    @property
    def columns(self) -> int:
        """Values of o in a tile."""
        return len(self.vectors) * len(self.width)


def _shape(rows: int, vectors: int, width: int) -> Shape:
    return Shape((0,) * rows, (0,) * vectors, (0,) * width)


@cache
def shapes(itemsize: int) -> list[Shape]:
    """Four tiles that fill this processor's registers: most of them sums, the rest for b and x."""
    features = llvmlite.binding.get_host_cpu_features()
    if features.get("avx512f"):  # 32 registers of 64 bytes
        size, tiles = 64, ((6, 4), (8, 3), (8, 2), (8, 1))
    elif features.get("avx"):  # 16 registers of 32 bytes
        size, tiles = 32, ((4, 3), (6, 2), (6, 2), (8, 1))
    else:
        size, tiles = 16, ((8, 2), (8, 2), (8, 2), (8, 1))
    return [_shape(rows, vectors, size // itemsize) for rows, vectors in tiles]


def best_shape(outputs: int, itemsize: int) -> int:
    """Return the first of `shapes` that wastes the fewest columns on this many outputs."""
    columns = [s.columns for s in shapes(itemsize)]
    return min(range(len(columns)), key=lambda k: -(-outputs // columns[k]) * columns[k])


class Schedule(NamedTuple):
    """Tiles of rows in blocks: what `accumulate` walks through."""

    first: Array  # block b has the tiles from first[b] to first[b + 1]
    place: Array  # of each row of each tile, in x
    to: Array  # the row of c, counted from the block's first
    span: Array  # (tiles, 2): a tile reduces over steps[span[t, 0] : span[t, 1]]
    steps: Array  # (steps, 2): offset in x, index of the row's first element in b


Ranges = Array
"""(rows, axes, 2): along each axis of the reduction the first index of a row, and the end."""


def schedule(
    blocks: Iterable[tuple[Array, Array, Ranges]],
    steps: Callable[[int, Array, Array], Array],
    shape: Shape,
) -> Schedule:
    """A schedule for blocks of rows (place, to, ranges).

    Rows of like ranges share a tile, which covers the ranges of all its rows; a row that fills up a
    tile is computed twice. steps(block, lo, hi) are the steps of a tile with these bounds.
    """
    size = len(shape.rows)
    first, places, rows, spans, chosen = [0], [], [], [], []
    known: dict[tuple[Any, ...], tuple[int, int]] = {}
    end = 0
    for block, (place, to, ranges) in enumerate(blocks):
        order = np.lexsort(ranges.reshape(len(place), -1).T)
        tiles = np.append(order, np.repeat(order[-1:], -len(order) % size)).reshape(-1, size)
        for lo, hi in zip(ranges[tiles, :, 0].min(1), ranges[tiles, :, 1].max(1), strict=True):
            key = (block, *lo, *hi)
            if key not in known:
                found = steps(block, lo, hi)
                known[key] = end, end + len(found)
                end += len(found)
                chosen.append(found)
            spans.append(known[key])
        places.append(place[tiles.ravel()])
        rows.append(to[tiles.ravel()])
        first.append(first[-1] + len(tiles))
    table = [np.concatenate(a).astype(np.int32) for a in (places, rows, chosen)]
    return Schedule(np.array(first), table[0], table[1], np.array(spans), table[2])


@emitted("x place to row_at steps lo hi b c rows vectors width")
def _tile(v: Vectors) -> None:
    """One tile, its rows from row_at on in place and to, for steps[lo:hi], at least one."""
    builder, args = v.builder, v.args
    index, vectors = args["lo"].type, range(v.types["vectors"].count)

    def load_index(table: Any, at: Any) -> Any:
        return builder.sext(builder.load(builder.gep(table, [at])), index)

    place, to, steps = v.pointer("place"), v.pointer("to"), v.pointer("steps")
    b, bases, targets = v.pointer("b"), [], []
    for k in range(v.types["rows"].count):
        row = builder.add(args["row_at"], index(k))
        bases.append(v.pointer("x", load_index(place, row)))
        columns = index(len(vectors) * v.width)
        targets.append(v.pointer("c", builder.mul(load_index(to, row), columns)))

    def add(r: Any, sums: list[Any]) -> list[Any]:
        at = builder.mul(r, index(2))
        offset, start = load_index(steps, at), load_index(steps, builder.add(at, index(1)))
        right = [v.load(builder.gep(b, [start]), k) for k in vectors]
        lefts = [v.splat(builder.load(builder.gep(base, [offset]))) for base in bases]
        pairs = [(left, value) for left in lefts for value in right]
        return [builder.call(v.fma, [*p, s]) for p, s in zip(pairs, sums, strict=True)]

    sums = [v.load(target, k) for target in targets for k in vectors]
    sums = v.loop(args["lo"], args["hi"], 1, sums, add)
    for k, value in enumerate(sums):
        v.store(value, targets[k // len(vectors)], k % len(vectors))


@emitted("a a_at a_step b b_at b_step width")
def transpose(v: Vectors) -> None:
    """b[j, i] = a[i, j] for width x width elements; rows begin a_step and b_step elements apart."""
    builder, args, n = v.builder, v.args, v.width

    def row(array: str, k: int) -> Any:
        step = args[f"{array}_step"]
        return v.pointer(array, builder.add(args[f"{array}_at"], builder.mul(step, step.type(k))))

    def pick(mask: list[int], k: int, m: int) -> Any:
        which = ir.Constant(ir.VectorType(ir.IntType(32), n), mask)
        return builder.shuffle_vector(rows[k], rows[m], which)

    rows = [v.load(row("a", k)) for k in range(n)]
    d = n // 2
    while d:  # exchange the quarters off the diagonal of each block of 2d x 2d
        for k in range(n):
            if not k & d:
                upper = [n + j - d if j & d else j for j in range(n)]
                lower = [n + j if j & d else j + d for j in range(n)]
                rows[k], rows[k + d] = pick(upper, k, k + d), pick(lower, k, k + d)
        d //= 2
    for k in range(n):
        v.store(rows[k], row("b", k))


@kernel
def copy_transposed(
    a: Array, a_step: int, b: Array, b_step: int, rows: int, columns: int, vector: Lengths
) -> None:
    """b[j, i] = a[i, j] for rows x columns elements of flat arrays, in blocks of vectors."""
    width = len(vector)
    for i in range(0, rows, width):
        for j in range(0, columns, width):
            if i + width <= rows and j + width <= columns:
                transpose(a, i * a_step + j, a_step, b, j * b_step + i, b_step, vector)
            else:
                for u in range(j, min(j + width, columns)):
                    for v in range(i, min(i + width, rows)):
                        b[u * b_step + v] = a[v * a_step + u]


@kernel
def accumulate(x: Array, plan: Schedule, block: int, b: Array, c: Array, shape: Shape) -> None:
    """Compute all tiles of a block; x, b, c flat."""
    rows, vectors, width = shape
    for t in range(plan.first[block], plan.first[block + 1]):
        lo, hi, at = plan.span[t, 0], plan.span[t, 1], t * len(rows)
        if lo < hi:
            _tile(x, plan.place, plan.to, at, plan.steps, lo, hi, b, c, rows, vectors, width)


_FIRST, _SECOND, _THIRD, _FOURTH = ((shape.rows, shape.vectors) for shape in shapes(4))


@kernel
def accumulate_by(
    kind: int, x: Array, plan: Schedule, block: int, b: Array, c: Array, vector: Lengths
) -> None:
    """`accumulate` with tiles of the shape with this index: one compiled caller for all shapes."""
    if kind == 0:
        accumulate(x, plan, block, b, c, Shape(*_FIRST, vector))
    elif kind == 1:
        accumulate(x, plan, block, b, c, Shape(*_SECOND, vector))
    elif kind == 2:
        accumulate(x, plan, block, b, c, Shape(*_THIRD, vector))
    else:
        accumulate(x, plan, block, b, c, Shape(*_FOURTH, vector))
