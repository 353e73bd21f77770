"""Graph: the calls of an operation on the CPU, recorded once and replayed without Python.

    recorded    kernel(arrays, numbers, lo, hi)      np.matmul(a, b, out)      a Python function
                          |                                   |                        |
    table           enter | words                        loop | words                  |
                          +-------- one call of `replay` -----+                     a call

`enter` is what Python's calls of a kernel end in (`machine_code.py`), with `words` for its
arguments. A ufunc has loops in C, which numpy's own calls end in; `loop` calls one. So a replay
calls the same machine code with the same arguments, and gives the same bits.

What cannot be called so (work that threads share, other functions) is kept as a Python call.
"""

import ctypes
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from caffepy.device.blob import Array
from caffepy.device.recording import Seeds, Temporaries, recording
from caffepy.device.threads import parallel, ranges
from caffepy.ops.cpu import machine_code
from caffepy.ops.cpu.compiler import Kernel, kernel

LONG = 2e-4
"""Seconds of a run after which other Python threads may go on beside a replay."""

MOST_SEEDS = 1 << 12
"""Seeds that one call of `Graph.replay` can draw."""


@kernel
def _next_seed(seeds: Array, place: Array, into: Array) -> None:
    into[()] = seeds[place[0]]
    place[0] += 1


class _Row(NamedTuple):
    """A call of compiled code: its address, the words of its arguments."""

    address: int
    words: Array


class _Bound(NamedTuple):
    """Consecutive rows, as `replay` takes them, and the calls they stand for."""

    table: Array
    address: int
    rows: int
    calls: list[Callable[[], object]]


class Graph:
    """A Recorder of calls of compiled code, see `caffepy.device.recording`.

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
        self._keep(_Row(_code().check, np.array([found.ctypes.data], np.uint64)), check)

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
        """End the recording; a replay will take about `seconds`."""
        self._replay = _code().replay_beside if seconds > LONG else _code().replay
        self._parts, rows, calls = [], list[_Row](), list[Callable[[], object]]()

        def bound() -> None:
            if rows:
                numbers = [(row.address, row.words.ctypes.data) for row in rows]
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
    """Return the row for a call that has just been made, None if only Python can make it."""
    if isinstance(function, np.ufunc):
        return _bind_ufunc(function, args)
    if isinstance(function, Kernel) and (bound := function.bound(args)):
        address, words = bound
        return _Row(address, np.frombuffer(words, np.uint8))
    return None


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
    words = np.zeros(5 + sum(map(len, tables)), np.int64)
    words[0], words[4] = function, struct.data[index] or 0
    at = 5
    for i, table in enumerate(tables):
        words[1 + i] = words.ctypes.data + 8 * at
        words[at : at + len(table)] = table
        at += len(table)
    return _Row(_code().loop, words)


# Machine code: the loop over a table, and what it calls for ufuncs and checks.

_TEXT = """
define i64 @replay(ptr %table, i64 %count, i64 %times) {
entry:
  %all = mul i64 %count, %times
  br label %call
call:
  %made = phi i64 [0, %entry], [%next, %done]
  %i = phi i64 [0, %entry], [%row, %done]
  %at = mul i64 %i, 2
  %at1 = add i64 %at, 1
  %p0 = getelementptr i64, ptr %table, i64 %at
  %p1 = getelementptr i64, ptr %table, i64 %at1
  %enter = load ptr, ptr %p0
  %words = load ptr, ptr %p1
  %failure = call i64 %enter(ptr %words, ptr null)
  %failed = icmp ne i64 %failure, 0
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
}

; of words (loop, its arrays, sizes, strides, data)
define i64 @loop(ptr %words, ptr %result) {
  %p1 = getelementptr i64, ptr %words, i64 1
  %p2 = getelementptr i64, ptr %words, i64 2
  %p3 = getelementptr i64, ptr %words, i64 3
  %p4 = getelementptr i64, ptr %words, i64 4
  %loop = load ptr, ptr %words
  %arrays = load ptr, ptr %p1
  %sizes = load ptr, ptr %p2
  %strides = load ptr, ptr %p3
  %data = load ptr, ptr %p4
  call void %loop(ptr %arrays, ptr %sizes, ptr %strides, ptr %data)
  ret i64 0
}

; of one word, the address of a float64: is it other than 0?
define i64 @check(ptr %words, ptr %result) {
  %number = load ptr, ptr %words
  %bits = load i64, ptr %number
  %set = icmp ne i64 %bits, 0
  %status = zext i1 %set to i64
  ret i64 %status
}
"""


class _Code(NamedTuple):
    replay: Any  # (table, count, times) -> number of calls made, with Python's lock
    replay_beside: Any  # the same without it
    loop: int
    check: int


@cache
def _code() -> _Code:
    replay, loop, check = machine_code.compile_text(_TEXT, "replay", "loop", "check")
    arguments = ctypes.c_int64, ctypes.c_uint64, ctypes.c_int64, ctypes.c_int64
    with_lock, beside = ctypes.PYFUNCTYPE(*arguments), ctypes.CFUNCTYPE(*arguments)
    return _Code(with_lock(replay), beside(replay), loop, check)
