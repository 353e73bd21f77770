"""The inner loop of convolutions: a tile of sums that stays in vector registers.

c[i, o] += sum over r of x[rows[i] + offsets[r]] * b[r, o]

`rows` and `offsets` are places in x, so that a convolution needs no im2col matrix: forward, i is an output position and
r a weight; for the gradient of the weights it is the other way round. A tile is `Shape.rows` values of i by
`Shape.vectors` * `Shape.lanes` of o; for each r its vectors of b are loaded once and each x is multiplied into all.
"""

from functools import cache
from typing import Any, NamedTuple

import llvmlite.binding
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from caffepy.ops.cpu.compiler import kernel

Array = NDArray[Any]


class Shape(NamedTuple):
    """A tile: numbers of rows, of vectors, of lanes in a vector, each as the length of a tuple.

    Lengths of tuples are types for numba, which compiles one loop for each shape.
    """

    rows: tuple[int, ...]
    vectors: tuple[int, ...]
    lanes: tuple[int, ...]

    @property
    def columns(self) -> int:
        """Values of o in a tile."""
        return len(self.vectors) * len(self.lanes)


def _shape(rows: int, vectors: int, lanes: int) -> Shape:
    return Shape((0,) * rows, (0,) * vectors, (0,) * lanes)


@cache
def shapes(itemsize: int) -> list[Shape]:
    """Tiles that fill this processor's registers: most of them sums, the rest for b and x."""
    features = llvmlite.binding.get_host_cpu_features()
    wide, narrow = 64 // itemsize, 32 // itemsize
    if features.get("avx512f"):  # 32 registers of 64 bytes
        return [_shape(*s) for s in ((6, 4, wide), (8, 3, wide), (8, 2, wide), (8, 1, wide), (8, 3, narrow))]
    if features.get("avx"):  # 16 registers of 32 bytes
        return [_shape(6, 2, narrow), _shape(4, 3, narrow)]
    return [_shape(4, 2, narrow // 2)]


def best_shape(outputs: int, itemsize: int) -> Shape:
    """The tile that wastes the fewest columns on this many outputs; the first one of equals."""
    return min(shapes(itemsize), key=lambda s: -(-outputs // s.columns) * s.columns)


def _define_tile(
    typing: Any,
    x: Any,
    x_at: Any,
    rows: Any,
    row_at: Any,
    offsets: Any,
    lo: Any,
    hi: Any,
    b: Any,
    b_at: Any,
    c: Any,
    c_at: Any,
    n_rows: Any,
    n_vectors: Any,
    n_lanes: Any,
) -> Any:
    """One tile for r in [lo, hi); b and c begin at b_at (where r = lo) and c_at, their rows follow each other."""
    i = types.intp
    signature = types.void(x, i, rows, i, offsets, i, i, b, i, c, i, n_rows, n_vectors, n_lanes)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def pointer(array: int, *at: Any) -> Any:
            place = context.make_array(signature.args[array])(context, builder, args[array]).data
            for index in at:
                place = builder.gep(place, [index])
            return place

        def integer(value: int) -> Any:
            return ir.Constant(args[1].type, value)

        def vector_at(place: Any, index: int) -> Any:
            return builder.bitcast(builder.gep(place, [integer(index)]), vector.as_pointer())

        rows_n, vectors_n, lanes_n = (signature.args[k].count for k in (11, 12, 13))
        element = context.get_value_type(signature.args[0].dtype)
        vector = ir.VectorType(element, lanes_n)
        alignment = signature.args[0].dtype.bitwidth // 8
        columns = vectors_n * lanes_n
        row_table = pointer(2, args[3])
        bases = [pointer(0, args[1], builder.load(builder.gep(row_table, [integer(k)]))) for k in range(rows_n)]
        table, start_b, start_c = pointer(4), pointer(7, args[8]), pointer(9, args[10])
        places = [[vector_at(start_c, k * columns + v * lanes_n) for v in range(vectors_n)] for k in range(rows_n)]
        first = [[builder.load(place, align=alignment) for place in row] for row in places]
        fma = cgutils.get_or_insert_function(  # type: ignore[no-untyped-call]
            builder.module,
            ir.FunctionType(vector, [vector] * 3),
            f"llvm.fmuladd.v{lanes_n}f{8 * alignment}",  # fused where the processor can
        )
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), lanes_n), [0] * lanes_n)
        undefined = ir.Constant(vector, ir.Undefined)

        before, loop = builder.block, builder.append_basic_block("reduce")
        builder.branch(loop)
        builder.position_at_end(loop)
        r, b_row = builder.phi(args[5].type), builder.phi(start_b.type)
        sums = [[builder.phi(vector) for _ in row] for row in first]
        offset = builder.load(builder.gep(table, [r]))
        right = [builder.load(vector_at(b_row, v * lanes_n), align=alignment) for v in range(vectors_n)]
        added = []
        for base, row in zip(bases, sums, strict=True):
            left = builder.insert_element(undefined, builder.load(builder.gep(base, [offset])), ir.IntType(32)(0))
            left = builder.shuffle_vector(left, undefined, zeros)
            added.append([builder.call(fma, [left, v, s]) for v, s in zip(right, row, strict=True)])
        r_next, b_next = builder.add(r, integer(1)), builder.gep(b_row, [integer(columns)])
        for phi, start, after in [(r, args[5], r_next), (b_row, start_b, b_next)] + [
            (p, f, a)
            for ps, fs, as_ in zip(sums, first, added, strict=True)
            for p, f, a in zip(ps, fs, as_, strict=True)
        ]:
            phi.add_incoming(start, before)
            phi.add_incoming(after, loop)
        done = builder.append_basic_block("reduced")
        builder.cbranch(builder.icmp_signed("<", r_next, args[6]), loop, done)
        builder.position_at_end(done)
        for row_places, row in zip(places, added, strict=True):
            for place, value in zip(row_places, row, strict=True):
                builder.store(value, place, align=alignment)
        return context.get_dummy_value()

    return signature, generate


_tile: Any = intrinsic(_define_tile)


@kernel
def accumulate(
    x: Array,
    x_at: int,
    rows: Array,
    lo: int,
    hi: int,
    offsets: Array,
    r_lo: int,
    r_hi: int,
    b: Array,
    b_at: int,
    c: Array,
    n_rows: tuple[int, ...],
    n_vectors: tuple[int, ...],
    n_lanes: tuple[int, ...],
) -> None:
    """The sum for rows [lo, hi) and r in [r_lo, r_hi); c holds their tiles, whole ones, from its beginning."""
    step = len(n_rows)
    columns = len(n_vectors) * len(n_lanes)
    for i in range(lo, hi - step + 1, step):
        at = (i - lo) * columns
        _tile(x, x_at, rows, i, offsets, r_lo, r_hi, b, b_at, c, at, n_rows, n_vectors, n_lanes)
    rest = (hi - lo) % step
    if rest:
        last = rows[hi - 1 : hi].repeat(step)
        last[:rest] = rows[hi - rest : hi]
        at = (hi - lo - rest) * columns
        _tile(x, x_at, last, 0, offsets, r_lo, r_hi, b, b_at, c, at, n_rows, n_vectors, n_lanes)
