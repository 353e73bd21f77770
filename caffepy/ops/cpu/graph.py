"""Graph: the calls of an operation on the CPU, recorded once and replayed without Python.

    recorded    kernel(arrays, numbers, lo, hi)      np.matmul(a, b, out)      a Python function
                          |                                   |                        |
    table       thunk | function | words            thunk | loop | words               |
                          +-------- one call of `replay` -----+                     a call

A kernel that numba compiled takes every array as seven and more numbers: pointer, shape, strides. A
ufunc has loops in C, which numpy's own calls end in. `words` are these numbers, laid out once; a
thunk is a few instructions that read them and make the call, one for each list of argument types.
So a replay calls the same machine code with the same arguments, and gives the same bits.

What cannot be called so (work that threads share, other functions) is kept as a Python call.
"""

import ctypes
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, cast

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.core.compiler_lock import global_compiler_lock

from caffepy.device.blob import Array
from caffepy.device.recording import Seeds, Temporaries, recording
from caffepy.device.threads import parallel, ranges
from caffepy.ops.cpu.compiler import Kernel, kernel

LONG = 2e-4
"""Seconds of a run after which other Python threads may go on beside a replay."""

MOST_SEEDS = 1 << 12
"""Seeds that one call of `Graph.replay` can draw."""

Words = list[int]


@kernel
def _next_seed(seeds: Array, place: Array, into: Array) -> None:
    into[()] = seeds[place[0]]
    place[0] += 1


class _Row(NamedTuple):
    """A call of compiled code: the types of its arguments, its address, the arguments."""

    kind: tuple[str, ...]
    address: int
    words: Array


class _Bound(NamedTuple):
    """Rows that follow each other, as `replay` takes them; the calls they stand for."""

    table: Array
    address: int
    rows: int
    calls: list[Callable[[], object]]


class Graph:
    """Calls of compiled code: a Recorder, see `caffepy.device.recording`.

    The arrays of recorded calls stay alive with it. `temporaries` may be those of other graphs that
    are never replayed at the same time.
    """

    def __init__(self, temporaries: Temporaries | None = None) -> None:
        self.temporaries = temporaries or Temporaries()
        self._calls: list[tuple[_Row | None, Callable[[], object]]] = []
        self._parts: list[_Bound | Callable[[], object]] = []
        self._kept: list[object] = []
        self.is_one_call = True  # of compiled code, or none
        self.seeds: list[Seeds] = []  # of each seed of a replay, what it is drawn from
        self._drawn = np.zeros(0, np.int64)  # seeds of a call, drawn before it
        self._place = np.zeros(1, np.int64)  # of the next one
        self._replay = _code().replay

    # recording

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        """Call a function and keep the call."""
        with recording(None):
            function(*args)
        self._keep(_bind(function, args), partial(function, *args))

    def parallel(
        self, function: Callable[[int, int], Any], n: int, grain: int, most: int | None
    ) -> None:
        """Call a function by `threads.parallel` and keep the call."""
        with recording(None):
            parallel(function, n, grain, most)
        pieces = ranges(n, grain, most)
        row = None
        if pieces == 1 and isinstance(function, partial) and not function.keywords:
            row = _bind(function.func, (*function.args, 0, n))
        if pieces:
            self._keep(row, partial(parallel, function, n, grain, most))

    def check(self, found: Array, check: Callable[[], object]) -> None:
        """Call `check`, and in a replay if found[0] is not 0."""
        with recording(None):
            check()
        assert found.dtype == np.float64
        self._kept.append(found)
        self._keep(_Row(CHECK, found.ctypes.data, np.zeros(1, np.int64)), check)

    def seed(self, source: Seeds, into: Array) -> None:
        """Write a new seed into an array and keep that: a call draws all its seeds first."""
        if not self.seeds:
            self._drawn = np.zeros(MOST_SEEDS, np.int64)
        self.seeds.append(source)
        self._drawn[0], self._place[0] = source.draw_seed(), 0
        self.call(_next_seed, self._drawn, self._place, into)

    @property
    def most(self) -> int:
        """Number of times that `replay` can be asked for."""
        return MOST_SEEDS // len(self.seeds) if self.seeds else sys.maxsize

    def _draw(self, times: int) -> None:
        drawn = [source.draw_seed() for _ in range(times) for source in self.seeds]
        self._drawn[: len(drawn)], self._place[0] = drawn, 0

    def _keep(self, row: _Row | None, again: Callable[[], object]) -> None:
        self._calls.append((row, again))

    def finish(self, seconds: float) -> None:
        """End the recording; a replay will take about so many seconds."""
        self._replay = _code().replay_beside if seconds > LONG else _code().replay
        thunks = _thunks({row.kind for row, _ in self._calls if row})
        self._parts, rows, calls = [], list[_Row](), list[Callable[[], object]]()

        def bound() -> None:
            if rows:
                numbers = [(thunks[r.kind], r.address, r.words.ctypes.data) for r in rows]
                table = np.array(numbers, np.uint64)
                self._kept.extend(row.words for row in rows)
                self._parts.append(_Bound(table, table.ctypes.data, len(rows), calls[:]))
            rows.clear()
            calls.clear()

        for row, again in self._calls:
            if row is None:
                bound()
                self._parts.append(again)
            else:
                rows.append(row)
                calls.append(again)
        bound()
        self._kept.extend(again for _, again in self._calls)
        self._calls.clear()
        self.is_one_call = all(isinstance(part, _Bound) for part in self._parts)

    # replay

    def replay(self, times: int = 1) -> None:
        """Make all calls again; the exception of one is raised, those after it are not made.

        Several `times` only if it `is_one_call`, and `most` of them. After an exception those
        seeds are drawn that were used.
        """
        if not self.seeds:
            self._run(times)
            return
        before = [source.random.state for source in self.seeds]
        self._draw(times)
        try:
            self._run(times)
        except BaseException:
            for source, state in zip(self.seeds, before, strict=True):
                source.random.state = state
            for i in range(int(self._place[0])):
                self.seeds[i % len(self.seeds)].draw_seed()
            raise

    def _run(self, times: int) -> None:
        for part in self._parts:
            if isinstance(part, _Bound):
                done = self._replay(part.address, part.rows, times)
                if done < part.rows * times:
                    part.calls[done % part.rows]()  # raises what it found
                    raise AssertionError("a call failed that does not fail again")
            else:
                part()

    @property
    def python_calls(self) -> list[str]:
        """The names of what a replay calls by Python, for tests."""
        return [_name(part) for part in self._parts if not isinstance(part, _Bound)]


def _name(function: Any) -> str:
    while isinstance(function, partial):
        inner = function.args[0] if function.func is parallel else function.func
        function = inner
    return str(getattr(function, "__name__", function))


# Binding: arguments as words.


def _bind(function: Callable[..., Any], args: Sequence[Any]) -> _Row | None:
    """Return the row for a call, None if only Python can make it."""
    if isinstance(function, np.ufunc):
        return _bind_ufunc(function, args)
    if isinstance(function, Kernel):
        return _bind_kernel(function.dispatcher, args)
    return None


def _bind_kernel(kernel: Any, args: Sequence[Any]) -> _Row | None:
    """Bind a call of numba's that has just been made, so that it is compiled."""
    compiled = kernel.overloads.get(tuple(map(kernel.typeof_pyval, args)))
    if compiled is None or compiled.fndesc.restype != types.none:
        return None
    words: Words = []
    for kind, arg in zip(compiled.fndesc.argtypes, args, strict=True):
        if not _lay_out(kind, arg, words):
            return None
    packer = compiled.target_context.get_arg_packer(compiled.fndesc.argtypes)
    kinds = tuple(map(_kind, packer.argument_types))
    if len(kinds) != len(words) or None in kinds:
        return None
    address = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
    return _Row(cast("tuple[str, ...]", kinds), address, np.array(words, np.uint64))


def _kind(argument: Any) -> str | None:
    """The type of an argument in a thunk: all pointers are numbers there."""
    if isinstance(argument, ir.PointerType):
        return "i64"
    text = str(argument)
    return text if text in LOADS else None


def _lay_out(kind: Any, value: Any, words: Words) -> bool:
    """Append what numba passes for an argument; False if it is of a kind that is not known."""
    if isinstance(kind, types.Array):
        count = kind.ndim
        numbers = value.size, value.itemsize, value.ctypes.data, *value.shape, *value.strides
        words += [0, 0, *(n % (1 << 64) for n in numbers)]
        return len(value.shape) == count
    if isinstance(kind, types.BaseTuple):
        members: Sequence[Any] = list(kind)  # type: ignore[call-overload]
        return all(_lay_out(k, v, words) for k, v in zip(members, value, strict=True))
    if isinstance(kind, types.Float):
        real: Any = {32: np.float32, 64: np.float64}.get(kind.bitwidth)
        if real is None:
            return False
        words.append(int.from_bytes(real(value).tobytes(), "little"))
    elif isinstance(kind, types.Integer | types.Boolean):
        words.append(int(value) % (1 << 64))
    elif kind == types.none:
        words.append(0)
    else:
        return False
    return True


class _UFunc(ctypes.Structure):
    """The head of numpy's PyUFuncObject."""

    _fields_ = (
        ("head", ctypes.c_byte * object.__basicsize__),
        ("nin", ctypes.c_int),
        ("nout", ctypes.c_int),
        ("nargs", ctypes.c_int),
        ("identity", ctypes.c_int),
        ("functions", ctypes.POINTER(ctypes.c_void_p)),
        ("data", ctypes.POINTER(ctypes.c_void_p)),
        ("ntypes", ctypes.c_int),
    )


def _bind_ufunc(ufunc: np.ufunc, args: Sequence[Any]) -> _Row | None:
    """Bind a call of numpy's on arrays of one type: of matmul, or on whole arrays of one shape."""
    of_matrices = ufunc is np.matmul
    arrays = [a for a in args if isinstance(a, np.ndarray)]
    signature = "".join(a.dtype.char for a in arrays)
    signature = f"{signature[: ufunc.nin]}->{signature[ufunc.nin :]}"
    if len(arrays) < len(args) or ufunc.nargs != len(args) or signature not in ufunc.types:
        return None
    if len({a.dtype for a in arrays}) > 1 or not all(a.size and a.flags.aligned for a in arrays):
        return None
    if of_matrices:
        if any(a.ndim != 2 for a in arrays):
            return None
        a, b, _ = arrays
        sizes = [1, a.shape[0], a.shape[1], b.shape[1]]
        strides = [0, 0, 0, *(s for array in arrays for s in array.strides)]
    else:
        if len({a.shape for a in arrays}) > 1 or not all(a.flags.c_contiguous for a in arrays):
            return None
        sizes, strides = [arrays[0].size], [a.itemsize for a in arrays]
    struct = _UFunc.from_address(id(ufunc))
    if (struct.nin, struct.nargs, struct.ntypes) != (ufunc.nin, ufunc.nargs, ufunc.ntypes):
        return None  # another numpy lays it out otherwise
    index = ufunc.types.index(signature)
    function = struct.functions[index]
    if not function:
        return None  # numpy has a loop of another kind for these types
    # The loop takes three pointers to numbers, which lie behind them.
    tables = [[a.ctypes.data for a in arrays], sizes, strides]
    words = np.zeros(4 + sum(map(len, tables)), np.int64)
    at = 4
    for i, table in enumerate(tables):
        words[i] = words.ctypes.data + 8 * at
        words[at : at + len(table)] = table
        at += len(table)
    words[3] = struct.data[index] or 0
    return _Row(LOOP, function, words)


# Machine code: thunks, and the loop over a table.

CHECK = ("check",)
"""No call: is a float64 other than 0?"""

LOOP = ("loop",)
"""A ufunc's loop of four pointers, which returns nothing."""

LOADS = {
    "i64": "{to} = bitcast i64 {word} to i64",
    "i32": "{to} = trunc i64 {word} to i32",
    "i16": "{to} = trunc i64 {word} to i16",
    "i8": "{to} = trunc i64 {word} to i8",
    "i1": "{to} = trunc i64 {word} to i1",
    "double": "{to} = bitcast i64 {word} to double",
    "float": "{to}.low = trunc i64 {word} to i32\n  {to} = bitcast i32 {to}.low to float",
}
"""How a word becomes an argument of each type."""

_POINTER = str(ir.IntType(64).as_pointer())

_HEAD = f"""
define i64 @replay(i64 %table, i64 %count, i64 %times) {{
entry:
  %rows = inttoptr i64 %table to {_POINTER}
  %all = mul i64 %count, %times
  br label %call
call:
  %made = phi i64 [0, %entry], [%next, %done]
  %i = phi i64 [0, %entry], [%row, %done]
  %at = mul i64 %i, 3
  %at1 = add i64 %at, 1
  %at2 = add i64 %at, 2
  %p0 = getelementptr i64, {_POINTER} %rows, i64 %at
  %p1 = getelementptr i64, {_POINTER} %rows, i64 %at1
  %p2 = getelementptr i64, {_POINTER} %rows, i64 %at2
  %thunk = load i64, {_POINTER} %p0
  %function = load i64, {_POINTER} %p1
  %words = load i64, {_POINTER} %p2
  %code = inttoptr i64 %thunk to {{pointer}}
  %status = call i32 %code(i64 %function, i64 %words)
  %failed = icmp ne i32 %status, 0
  br i1 %failed, label %stop, label %done
done:
  %next = add i64 %made, 1
  %after = add i64 %i, 1
  %ends = icmp eq i64 %after, %count
  %row = select i1 %ends, i64 0, i64 %after
  %more = icmp slt i64 %next, %all
  br i1 %more, label %call, label %end
stop:
  ret i64 %made
end:
  ret i64 %all
}}
""".replace("{pointer}", str(ir.FunctionType(ir.IntType(32), [ir.IntType(64)] * 2).as_pointer()))


class _Code(NamedTuple):
    replay: Any  # (table, count, times) -> number of calls made, with Python's lock
    replay_beside: Any  # the same without it


_engines: list[Any] = []  # own the machine code
_known: dict[tuple[str, ...], int] = {}  # the address of each thunk


def _compile(text: str) -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(opt=0)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(text), machine)
    engine.finalize_object()
    _engines.append(engine)
    return engine


@cache
@global_compiler_lock
def _code() -> _Code:
    address = _compile(_HEAD).get_function_address("replay")
    arguments = ctypes.c_int64, ctypes.c_uint64, ctypes.c_int64, ctypes.c_int64
    kinds = ctypes.PYFUNCTYPE(*arguments), ctypes.CFUNCTYPE(*arguments)
    return _Code(*(kind(address) for kind in kinds))


@global_compiler_lock
def _thunks(kinds: set[tuple[str, ...]]) -> dict[tuple[str, ...], int]:
    """Return the addresses of the thunks for these arguments; compiles those that are new."""
    new = [kind for kind in kinds if kind not in _known]
    if new:
        engine = _compile("\n".join(_thunk(f"thunk{i}", kind) for i, kind in enumerate(new)))
        for i, kind in enumerate(new):
            _known[kind] = engine.get_function_address(f"thunk{i}")
    return _known


def _thunk(name: str, kind: tuple[str, ...]) -> str:
    head = f"define i32 @{name}(i64 %function, i64 %words) {{\nentry:\n"
    if kind == CHECK:
        return (
            f"{head}  %p = inttoptr i64 %function to {_POINTER}\n"
            f"  %bits = load i64, {_POINTER} %p\n"
            "  %set = icmp ne i64 %bits, 0\n"
            "  %status = zext i1 %set to i32\n"
            "  ret i32 %status\n}\n"
        )
    is_loop = kind == LOOP
    given = ["i64"] * 4 if is_loop else list(kind)
    i32, i64 = ir.IntType(32), ir.IntType(64)
    plain = {"float": ir.FloatType(), "double": ir.DoubleType()}
    arguments = [plain.get(k) or ir.IntType(int(k[1:])) for k in given]
    lines = [f"  %p = inttoptr i64 %words to {_POINTER}"]
    passed = []
    for i, k in enumerate(given):
        lines.append(f"  %p{i} = getelementptr i64, {_POINTER} %p, i64 {i}")
        lines.append(f"  %w{i} = load i64, {_POINTER} %p{i}")
        lines.append("  " + LOADS[k].format(to=f"%a{i}", word=f"%w{i}"))
        passed.append(f"{k} %a{i}")
    if is_loop:
        pointer = ir.FunctionType(ir.VoidType(), arguments).as_pointer()
        lines.append(f"  %code = inttoptr i64 %function to {pointer}")
        lines.append(f"  call void %code({', '.join(passed)})")
        lines.append("  ret i32 0\n}\n")
    else:
        # numba's convention: where the result goes, where an exception goes, the arguments
        pointer = ir.FunctionType(i32, [i64, i64, *arguments]).as_pointer()
        lines.append("  %room = alloca i64, i64 4")
        lines.append(f"  %result = ptrtoint {_POINTER} %room to i64")
        lines.append("  %error = add i64 %result, 16")
        lines.append(f"  %code = inttoptr i64 %function to {pointer}")
        given_first = ", ".join(["i64 %result", "i64 %error", *passed])
        lines.append(f"  %status = call i32 %code({given_first})")
        lines.append("  %is_none = icmp eq i32 %status, -2")
        lines.append("  %told = select i1 %is_none, i32 0, i32 %status")
        lines.append("  ret i32 %told\n}\n")
    return head + "\n".join(lines)
