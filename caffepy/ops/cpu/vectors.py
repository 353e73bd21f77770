"""Functions for kernels whose LLVM code we emit ourselves, so that sums stay in vector registers.

`emitted` makes such a function; `Vectors` has what the emitting code shares.
"""

from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any

from llvmlite import ir

from caffepy.ops.cpu.compiler import Deferred


def emitted(arguments: str) -> Callable[[Callable[["Vectors"], None]], Any]:
    """Make a function of these arguments, which kernels can call, from one that emits its code.

    Arrays are flat, numbers are intp. The first argument is an array of the vectors' elements; the
    last is a tuple as long as a vector: lengths of tuples are types for numba.
    """
    names = arguments.split()

    def decorate(emit: Callable[[Vectors], None]) -> Any:
        return Deferred(lambda: _intrinsic(emit, names), emit, _intrinsic, arguments)

    return decorate


def _intrinsic(emit: Callable[["Vectors"], None], names: list[str]) -> Any:
    from numba.core import types
    from numba.extending import intrinsic

    def define(typing: Any, *given: Any) -> Any:
        kinds = [types.intp if isinstance(t, types.Integer) else t for t in given]

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            emit(Vectors(context, builder, names, signature.args, values))
            return context.get_dummy_value()

        return types.void(*kinds), generate

    define.__name__ = emit.__name__
    define.__signature__ = Signature(  # type: ignore[attr-defined]
        [Parameter(name, Parameter.POSITIONAL_ONLY) for name in ("typing", *names)]
    )
    return intrinsic(define)


class Vectors:
    """The builder of a function, its arguments by name, and loads, stores and sums of vectors."""

    def __init__(
        self, context: Any, builder: Any, names: list[str], kinds: Any, values: Any
    ) -> None:
        self.context, self.builder = context, builder
        self.types = dict(zip(names, kinds, strict=True))
        self.args = dict(zip(names, values, strict=True))
        self.width, self.real = kinds[-1].count, kinds[0].dtype
        self.vector = ir.VectorType(context.get_value_type(self.real), self.width)
        self.suffix = f"v{self.width}f{self.real.bitwidth}"
        # Fused where the processor can.
        self.fma = self.declare(f"llvm.fmuladd.{self.suffix}", self.vector, [self.vector] * 3)

    def declare(self, name: str, result: Any, arguments: list[Any]) -> Any:
        from numba.core import cgutils

        return cgutils.get_or_insert_function(  # type: ignore[no-untyped-call]
            self.builder.module, ir.FunctionType(result, arguments), name
        )

    def pointer(self, array: str, *at: Any) -> Any:
        """Return a pointer to an element of the array, at the sum of these indices."""
        start = self.context.make_array(self.types[array])(
            self.context, self.builder, self.args[array]
        ).data
        for a in at:
            start = self.builder.gep(start, [a])
        return start

    def at(self, start: Any, vector: int, kind: Any = None) -> Any:
        """Return a pointer to the vector this many vectors after start."""
        start = self.builder.gep(start, [ir.IntType(64)(vector * self.width)])
        return self.builder.bitcast(start, (kind or self.vector).as_pointer())

    def load(self, start: Any, vector: int = 0) -> Any:
        return self.builder.load(self.at(start, vector), align=self.real.bitwidth // 8)

    def store(self, value: Any, start: Any, vector: int = 0) -> None:
        self.builder.store(value, self.at(start, vector), align=self.real.bitwidth // 8)

    def splat(self, value: Any, kind: Any = None) -> Any:
        """Return a vector whose elements are all this value."""
        undefined = ir.Constant(kind or self.vector, ir.Undefined)
        one = self.builder.insert_element(undefined, value, ir.IntType(32)(0))
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), self.width), [0] * self.width)
        return self.builder.shuffle_vector(one, undefined, zeros)

    def loop(self, lo: Any, hi: Any, step: int, sums: list[Any], body: Any) -> list[Any]:
        """Emit sums = body(i, sums) for i in range(lo, hi, step), at least once."""
        builder, before = self.builder, self.builder.block
        inside, done = (builder.append_basic_block(name) for name in ("sum", "summed"))
        builder.branch(inside)
        builder.position_at_end(inside)
        i = builder.phi(lo.type)
        phis = [builder.phi(s.type) for s in sums]
        after: list[Any] = body(i, phis)
        following = builder.add(i, i.type(step))
        for phi, first, last in zip([i, *phis], [lo, *sums], [following, *after], strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(last, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, hi), inside, done)
        builder.position_at_end(done)
        return after


@emitted("source at to to_at count width")
def copy(v: Vectors) -> None:
    """to[to_at + i] = source[at + i] for i < count, at least 1: rows too short to call memcpy."""
    builder, count = v.builder, v.args["count"]
    start, end = v.pointer("source", v.args["at"]), v.pointer("to", v.args["to_at"])
    index, alignment = ir.VectorType(ir.IntType(64), v.width), ir.IntType(32)(v.real.bitwidth // 8)
    mask, pointer = ir.VectorType(ir.IntType(1), v.width), v.vector.as_pointer()
    kinds = [pointer, alignment.type, mask]
    load = v.declare(f"llvm.masked.load.{v.suffix}.p0", v.vector, [*kinds, v.vector])
    store = v.declare(f"llvm.masked.store.{v.suffix}.p0", ir.VoidType(), [v.vector, *kinds])
    whole = builder.and_(count, count.type(-v.width))

    def move(k: Any, sums: list[Any]) -> list[Any]:
        v.store(v.load(builder.gep(start, [k])), builder.gep(end, [k]))
        return sums

    with builder.if_then(builder.icmp_signed(">", whole, whole.type(0))):
        v.loop(whole.type(0), whole, v.width, [], move)
    with builder.if_then(builder.icmp_signed(">", count, whole)):
        element = ir.Constant(index, list(range(v.width)))
        inside = builder.icmp_signed("<", element, v.splat(builder.sub(count, whole), index))
        a, b = v.at(builder.gep(start, [whole]), 0), v.at(builder.gep(end, [whole]), 0)
        row = builder.call(load, [a, alignment, inside, ir.Constant(v.vector, [0.0] * v.width)])
        builder.call(store, [row, b, alignment, inside])
