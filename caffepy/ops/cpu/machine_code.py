"""Machine code of kernels: how it is emitted, loaded and called. Of numba only `emit` knows.

    kernel(x, 3, 0.5)     of an array (N, M), an int and a float
         |                `describe`, then `Entry.pack`: 8 bytes for each argument
    words                 address of x | 3 | bits of 0.5
         |                `enter(words, result)`: emitted with the loop, for each list of types
    loop                  (result, exception, 0, 0, N * M, itemsize, data, N, M, strides, 3, 0.5)

numba passes an array as seven and more numbers, which `enter` reads from numpy's object, and tuples
as their members. So a call costs Python little, and a graph makes it without Python (`graph.py`).
"""

import ctypes
import json
import os
import pickle
import struct
import sys
from collections.abc import Sequence
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader
from importlib.util import find_spec, module_from_spec, spec_from_loader
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple

import llvmlite.binding as llvm
import numpy as np

# arguments

FORMATS: dict[type, str] = {
    int: "q",
    float: "d",
    bool: "?7x",
    np.bool_: "?7x",
    np.float32: "f4x",
    np.float64: "d",
    np.int8: "b7x",
    np.int16: "h6x",
    np.int32: "i4x",
    np.int64: "q",
    np.uint8: "B7x",
    np.uint16: "H6x",
    np.uint32: "I4x",
    np.uint64: "Q",
}
"""Numbers as 8 bytes, in the notation of `struct`."""

LLVM_TYPES = {"q": "i64", "Q": "i64", "d": "double", "f": "float", "?": "i8"}
LLVM_TYPES |= {"b": "i8", "B": "i8", "h": "i16", "H": "i16", "i": "i32", "I": "i32"}

_CONTIGUOUS, _FORTRAN, _ALIGNED, _WRITEABLE = 0x1, 0x2, 0x100, 0x400


@cache
def _layout(flags: int) -> int:
    """Flags of an array that decide its type in numba; Fortran's order if it has no other."""
    order = _CONTIGUOUS if flags & _CONTIGUOUS else flags & _FORTRAN
    return order | flags & (_ALIGNED | _WRITEABLE)


Kinds = tuple[object, ...]
"""Parts of an argument's type, one after the other, tuples with their lengths."""


def describe(args: Sequence[Any], kinds: list[object], words: list[Any]) -> None:
    """Append the kinds of arguments, and their words for `Entry.pack`."""
    for arg in args:
        kind = type(arg)
        if kind is np.ndarray or isinstance(arg, np.ndarray):
            kinds += arg.dtype, arg.ndim, _layout(arg.flags.num)
            words.append(id(arg))
        elif kind in FORMATS:
            kinds.append(kind)
            words.append(arg)
        elif isinstance(arg, tuple):
            kinds += kind, len(arg)
            describe(arg, kinds, words)
        else:
            kinds.append(kind)


class Word(NamedTuple):
    """An argument that is no tuple: its format, "" for None, and an array's axes and itemsize."""

    format: str
    axes: int = -1  # -1: no array
    itemsize: int = 0

    @property
    def passed(self) -> list[str]:
        """The LLVM types of what numba passes."""
        if self.axes >= 0:
            return ["ptr", "ptr", "i64", "i64", "ptr", *["i64"] * (2 * self.axes)]
        return [LLVM_TYPES[self.format[0]] if self.format else "ptr"]


_POINTER = ctypes.sizeof(ctypes.c_void_p)
_FIELDS = {
    field: object.__basicsize__ + index * _POINTER
    for field, index in {"data": 0, "shape": 2, "strides": 3}.items()
}
"""Offsets of the pointers in an array's C object, in bytes; between them is the number of axes."""


@cache
def _numpy_is_known() -> bool:
    """True if numpy's arrays lie as `_FIELDS` says."""
    array = np.zeros((3, 4, 5), np.int16)
    data, shape, strides = (
        ctypes.c_void_p.from_address(id(array) + offset).value for offset in _FIELDS.values()
    )
    if data != array.ctypes.data or not shape or not strides:
        return False
    numbers = [tuple((ctypes.c_ssize_t * 3).from_address(at)) for at in (shape, strides)]
    return numbers == [array.shape, array.strides]


def words_of(args: Sequence[Any]) -> list[Word] | None:
    """Return the words of arguments; None if one is of a type that only numba can pass.

    struct.error if a number does not fit, of which numba would make another type.
    """
    if not _numpy_is_known():
        return None
    found: list[Word] = []
    for arg in args:
        if isinstance(arg, np.ndarray):
            found.append(Word("q", arg.ndim, arg.itemsize))
        elif arg is None:
            found.append(Word(""))
        elif isinstance(arg, tuple):
            members = words_of(arg)
            if members is None:
                return None
            found += members
        elif type(arg) in FORMATS:
            struct.pack(FORMATS[type(arg)], arg)
            found.append(Word(FORMATS[type(arg)]))
        else:
            return None
    return found


_ENTER = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_char_p, ctypes.c_void_p)
"""The type of `enter`, which runs without Python's lock."""


class Entry:
    """The code of a kernel for one list of types: `entry(args, words)` calls it."""

    __slots__ = ("_enter", "_result", "address", "pack")

    def __init__(self, address: int, words: Sequence[Word], returns: str) -> None:
        self.address, self._enter = address, _ENTER(address)
        self.pack = struct.Struct("".join(word.format for word in words)).pack
        self._result: Any = getattr(ctypes, returns) if returns else None

    @property
    def returns(self) -> bool:
        """True if calls return a number."""
        return self._result is not None

    def __call__(self, args: Sequence[Any], words: Sequence[Any]) -> Any:
        if self._result is None:
            if failure := self._enter(self.pack(*words), None):
                raise error_at(failure)
            return None
        result = self._result()
        if failure := self._enter(self.pack(*words), ctypes.addressof(result)):
            raise error_at(failure)
        return result.value


def error_at(failure: int) -> BaseException:
    """Return the exception for what `enter` returned: numba pickles it when it compiles."""
    try:
        address = failure & ~1
        pickled = ctypes.c_void_p.from_address(address).value
        size = ctypes.c_int32.from_address(address + _POINTER).value
        assert pickled
        kind, given, *_ = pickle.loads(ctypes.string_at(pickled, size))
        error = kind(*(given or ()))
        assert isinstance(error, BaseException)
        return error
    except Exception as problem:
        return RuntimeError(f"a compiled loop failed; why is not known ({problem!r})")


# emission


def emit(library: str, loop: str, name: str, words: Sequence[Word], has_result: bool) -> bytes:
    """Return an object file of a loop of numba's and of `enter`, called `name`.

    `library` is the optimized LLVM code that numba made for the loop. ValueError if the loop takes
    other arguments than `enter` would pass.
    """
    module = llvm.parse_assembly(library)
    taken = [str(argument.type) for argument in module.get_function(loop).arguments]
    passed = ["ptr", "ptr", *(kind for word in words for kind in word.passed)]
    if taken != passed:
        raise ValueError(f"{loop} takes {taken}, not {passed}")
    module.link_in(llvm.parse_assembly(_enter(name, loop, words, has_result)))
    for value in (*module.functions, *module.global_variables):
        if not value.is_declaration and value.name != name:
            value.linkage = "internal"
    machine = _machine()
    passes = llvm.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()  # numba's own ways of calling the loop
    passes.add_strip_dead_prototype_pass()
    passes.run(module, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options()))
    module.verify()
    needs = [v.name for v in (*module.functions, *module.global_variables) if v.is_declaration]
    needs = [name for name in needs if not name.startswith("llvm.")]
    code: bytes = machine.emit_object(module)
    return json.dumps(needs).encode() + b"\n" + code


def _machine() -> Any:
    """Return LLVM's target that numba compiles for."""
    from numba.core.registry import cpu_target

    triple, cpu, features = cpu_target.target_context.codegen().magic_tuple()
    reloc = "static" if triple.startswith("x86") else "default"
    return llvm.Target.from_triple(triple).create_target_machine(
        cpu, features, opt=3, reloc=reloc, codemodel="jitdefault", jit=True
    )


def _enter(name: str, loop: str, words: Sequence[Word], has_result: bool) -> str:
    lines, values, at = list[str](), list[str](), 0
    for i, word in enumerate(words):
        if not word.format:
            values.append("null")
            continue
        lines.append(f"%w{i} = getelementptr i64, ptr %words, i64 {at}")
        at += 1
        if word.axes >= 0:
            found, code = _array(f"%x{i}", f"%w{i}", word)
            values += found
            lines += code
        else:
            lines.append(f"%x{i} = load {word.passed[0]}, ptr %w{i}")
            values.append(f"%x{i}")
    kinds = ["ptr", "ptr", *(kind for word in words for kind in word.passed)]
    values = ["%result" if has_result else "%none", "%error", *values]
    given = ", ".join(f"{kind} {value}" for kind, value in zip(kinds, values, strict=True))
    body = "\n  ".join(lines)
    return f"""
declare i32 @"{loop}"({", ".join(kinds)})
define i64 @"{name}"(ptr %words, ptr %result) {{
  %none = alloca i64
  %error = alloca ptr
  store ptr null, ptr %error
  {body}
  %status = call i32 @"{loop}"({given})
  %returned = icmp eq i32 %status, 0
  %returned_none = icmp eq i32 %status, {RETURNED_NONE}
  %fine = or i1 %returned, %returned_none
  %what = load ptr, ptr %error
  %address = ptrtoint ptr %what to i64
  %failure = or i64 %address, 1
  %outcome = select i1 %fine, i64 0, i64 %failure
  ret i64 %outcome
}}
"""


RETURNED_NONE = -2
"""A status of numba's calls, as 0 is; others are failures."""


def _array(name: str, word: str, kind: Word) -> tuple[list[str], list[str]]:
    """Return what numba passes for an array, and the code that finds it."""
    lines = [f"{name} = load ptr, ptr {word}"]
    for field, offset in _FIELDS.items():
        lines.append(f"{name}.{field}.at = getelementptr i8, ptr {name}, i64 {offset}")
        lines.append(f"{name}.{field} = load ptr, ptr {name}.{field}.at")
    count = "1"
    for k in range(kind.axes):
        for field in ("shape", "strides"):
            at = f"{name}.{field}{k}"
            lines.append(f"{at}.at = getelementptr i64, ptr {name}.{field}, i64 {k}")
            lines.append(f"{at} = load i64, ptr {at}.at")
        lines.append(f"{name}.count{k} = mul i64 {count}, {name}.shape{k}")
        count = f"{name}.count{k}"
    numbers = [f"{name}.{field}{k}" for field in ("shape", "strides") for k in range(kind.axes)]
    return ["null", "null", count, str(kind.itemsize), f"{name}.data", *numbers], lines


# loading

lock = RLock()
"""Held while code is loaded or compiled."""

if hasattr(os, "register_at_fork"):
    # A fork waits for a kernel that another thread compiles: the child has no such thread, so that
    # this lock, and those of numba and LLVM, would stay taken there.
    os.register_at_fork(
        before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release
    )


def load(emitted: bytes, name: str) -> int | None:
    """Return the address of `enter`, called `name`; None if what the code calls is not known."""
    needs, _, code = emitted.partition(b"\n")
    with lock:
        engine = _engine()  # first, since it makes the symbols of this process known
        if not all(map(_is_known, json.loads(needs))):
            return None
        engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        engine.finalize_object()
        address: int = engine.get_function_address(name)
    return address


@cache
def _engine() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)


def compile_text(text: str, *names: str) -> list[int]:
    """Compile LLVM code; return the addresses of these functions."""
    with lock:
        engine = _engine()
        engine.add_module(llvm.parse_assembly(text))
        engine.finalize_object()
        return [engine.get_function_address(name) for name in names]


def _is_known(symbol: str) -> bool:
    """True if this process has what compiled code calls by this name."""
    if llvm.address_of_symbol(symbol) is None:
        for prefix, module in RUNTIME.items():
            if symbol.startswith(prefix):
                _add_symbols(prefix, module)
    return llvm.address_of_symbol(symbol) is not None


RUNTIME = {"NRT_": "numba.core.runtime._nrt_python", "numba_": "numba._helperlib"}
"""The extension modules of numba's with the functions, named so, that its code calls: those that
allocate arrays, for instance.
"""


@cache
def _add_symbols(prefix: str, name: str) -> None:
    """Register these functions with LLVM. The extension is loaded without numba (0.15 s)."""
    module = sys.modules.get(name) or _extension(name)
    for symbol, address in getattr(module, "c_helpers", {}).items():
        llvm.add_symbol(symbol if symbol.startswith("_") else prefix + symbol, address)


def _extension(name: str) -> Any:
    numba = find_spec("numba")
    for folder in (numba and numba.submodule_search_locations) or []:
        for suffix in EXTENSION_SUFFIXES:
            path = Path(folder, *name.split(".")[1:]).with_suffix(suffix)
            if path.exists():
                spec = spec_from_loader(name, ExtensionFileLoader(name, str(path)))
                assert spec
                assert spec.loader
                module = module_from_spec(spec)
                spec.loader.exec_module(module)
                return module
    return None
