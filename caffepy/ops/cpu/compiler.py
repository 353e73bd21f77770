"""Compilation of the loops of this back end: by numba, without the GIL, at the first call with a
list of types. The machine code is kept on disk, and loaded by later processes without numba.

Kernels work on a range [lo, hi) of their outer index, so that `threads.parallel` can divide it.
They call no other kernels, but functions that are `inlined`.

A call, in order: the kinds of its arguments; the code that the process has for them; else a file
with it; else numba compiles, and the file is written. Code is called in one way, wherever it comes
from (`machine_code.py`). What cannot be called so, since an argument is of another kind or numba
passes arguments otherwise than is known here, numba calls itself, and keeps in files of its own.
"""

import errno
import functools
import hashlib
import importlib.util
import logging
import os
import sys
import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm
import numpy as np

from caffepy.core.cache import cache_file
from caffepy.core.errors import UsageError
from caffepy.core.files import temporary
from caffepy.ops.cpu import machine_code
from caffepy.ops.cpu.machine_code import Entry, Kinds, describe, words_of

log = logging.getLogger(__name__)

COMPILING = "Compiling CPU kernels: the first run of an installation takes 10 to 30 seconds longer"
NO_CACHE = (
    "Compiled CPU kernels cannot be kept (%s), so every start compiles anew; "
    "set NUMBA_CACHE_DIR to a folder"
)
DAMAGED = "Files of the compiled CPU kernels in %s are damaged and are made anew"
BY_NUMBA = "Compiled CPU kernels are called by numba (%s), so that starts and calls take longer"

# All of fastmath but "nnan" and "ninf": NaNs and infinities must not be lost.
FASTMATH = {"contract", "reassoc", "nsz", "arcp"}

# For code whose rounding matters: terms stay in the order written.
EXACT = {"contract"}

Function = Callable[..., Any]


def compile_ahead() -> AbstractContextManager[None]:
    return nullcontext()


def kernel(function: Function, fastmath: set[str] = FASTMATH) -> Any:
    """Compile a loop at its first call with a list of types; later processes load it from a file.

    The file lies beside the module or among the user's files (NUMBA_CACHE_DIR chooses another
    place); where none can be written, each process compiles.
    """
    return Kernel(function, {"fastmath": fastmath})


def inlined(function: Function, fastmath: set[str] = FASTMATH) -> Any:
    """Compile a function as a part of each kernel that calls it.

    So are plain functions of ours that a kernel calls, which Python calls as they are.
    """
    return Kernel(function, {"fastmath": fastmath, "forceinline": True})


class Deferred:
    """A global of kernels that numba makes: it is made when a kernel that uses it is compiled."""

    def __init__(self, make: Callable[[], Any], *code: Function | str) -> None:
        self._make, self.code = make, code  # what decides what it is

    @cached_property
    def made(self) -> Any:
        return self._make()


def external(name: str, result: str, *arguments: str) -> Any:
    """Return a function of C's for kernels to call; types are named as numba does."""

    def make() -> Any:
        from numba.core import types as numbas

        kinds = (getattr(numbas, kind) for kind in (result, *arguments))
        return numbas.ExternalFunction(name, next(kinds)(*kinds))

    return Deferred(make, name, result, *arguments)


class Kernel:
    """A loop that is compiled for each list of types."""

    def __init__(self, function: Function, options: dict[str, Any]) -> None:
        self.function = function
        self.options = {"nogil": True, "error_model": "numpy", **options}
        self.entries: dict[Kinds, Callable[..., Any]] = {}
        self.__name__ = function.__name__

    def __call__(self, *args: Any) -> Any:
        kinds: list[object] = []
        words: list[Any] = []
        describe(args, kinds, words)
        key = tuple(kinds)
        entry = self.entries.get(key) or self._find(key, args)
        return entry(args, words)

    def bound(self, args: Sequence[Any]) -> tuple[int, bytes] | None:
        """Return the address of the code that was called with these arguments, and their words;
        None if only Python can call it. The arguments must be kept.
        """
        kinds: list[object] = []
        words: list[Any] = []
        describe(args, kinds, words)
        entry = self.entries.get(tuple(kinds))
        if not isinstance(entry, Entry) or entry.returns:
            return None
        return entry.address, entry.pack(*words)

    def _find(self, key: Kinds, args: Sequence[Any]) -> Callable[..., Any]:
        """Load or compile the code for these arguments."""
        with machine_code.lock:
            if key not in self.entries:
                words = words_of(args)
                entry = None if words is None else _Kept(self, key).entry(args, words)
                self.entries[key] = entry or self._call_by_numba
            return self.entries[key]

    @cached_property
    def dispatcher(self) -> Any:
        """numba's function, which compiles for each list of types, and which only kernels call."""
        options = {**self.options, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
        return _compiling_numba().njit(**options)(self._for_numba())

    @cached_property
    def _kept_by_numba(self) -> Any:
        numba = _compiling_numba()
        try:
            return numba.njit(**self.options, cache=True)(self._for_numba())
        except RuntimeError as error:  # no place for its files
            _warn(NO_CACHE, str(error))
            return numba.njit(**self.options)(self._for_numba())

    def _call_by_numba(self, args: Sequence[Any], words: Sequence[Any]) -> Any:
        return self._kept_by_numba(*args)

    def _for_numba(self) -> Function:
        """Return the function with numba's objects in place of what is ours."""

        def made(value: Any) -> Any:
            if isinstance(value, types.FunctionType) and value.__module__.startswith("caffepy."):
                value = Kernel(value, {**self.options, "forceinline": True})
            if isinstance(value, Kernel):
                return value.dispatcher
            return value.made if isinstance(value, Deferred) else value

        function = self.function
        code, known = function.__code__, function.__globals__
        names = {name: made(known[name]) for name in code.co_names if name in known}
        cells = function.__closure__ and tuple(
            types.CellType(made(cell.cell_contents)) for cell in function.__closure__
        )
        return types.FunctionType(
            code, {**known, **names}, function.__name__, function.__defaults__, cells
        )


def _compiling_numba() -> Any:
    """Import numba; UsageError if compilation is forbidden."""
    import numba

    if vars(numba.config)["DISABLE_JIT"]:
        raise UsageError(
            "NUMBA_DISABLE_JIT is set, but caffepy's CPU kernels run compiled only; unset it"
        )
    return numba


# files

CHECKSUM = 16  # bytes, with which a file begins


class _Kept:
    """The file with the code of a kernel for one list of types.

    Its name holds kernel, place (installation, versions, processor), code, and types.
    """

    def __init__(self, kernel: Kernel, kinds: Kinds) -> None:
        self._kernel, function = kernel, kernel.function
        self._folder = Path(function.__code__.co_filename).parent
        module = function.__module__.rpartition(".")[2]
        place = _digest(_environment(), function.__code__.co_filename)
        self._group = f"{module}.{function.__qualname__.rpartition('.')[2]}-{place}-"
        self._code = _digest(identity(kernel))
        self._types = _digest(*map(_type_key, kinds))
        self._name = f"{self._group}{self._code}-{self._types}.kernel"

    def entry(self, args: Sequence[Any], words: Sequence[machine_code.Word]) -> Entry | None:
        """Load the code, which is compiled first if need be; None: numba must call it."""
        return self._load(words) or self._compile(args, words)

    def _load(self, words: Sequence[machine_code.Word]) -> Entry | None:
        for folder in folders(self._folder):
            try:
                content = (folder / self._name).read_bytes()
            except OSError:
                continue
            if content[:CHECKSUM] == _checksum(content[CHECKSUM:]):
                return self._entry(content[CHECKSUM:], words)
            _warn(DAMAGED, str(folder))
        return None

    def _entry(self, content: bytes, words: Sequence[machine_code.Word]) -> Entry | None:
        returns, _, emitted = content.partition(b"\n")
        address = machine_code.load(emitted, self._name)
        return None if address is None else Entry(address, words, returns.decode())

    def _compile(self, args: Sequence[Any], words: Sequence[machine_code.Word]) -> Entry | None:
        import numba

        _log_compiling()
        dispatcher = self._kernel.dispatcher
        signature = tuple(map(numba.typeof, args))
        dispatcher.compile(signature)
        described = dispatcher.overloads[signature].fndesc
        returns = _result(described.restype)
        if returns is None:
            return None
        try:
            library, loop = dispatcher.inspect_llvm(signature), described.llvm_func_name
            emitted = machine_code.emit(library, loop, self._name, words, bool(returns))
        except Exception as error:  # of a numba or LLVM that does otherwise
            _warn(BY_NUMBA, str(error))
            return None
        content = returns.encode() + b"\n" + emitted
        self._write(_checksum(content) + content)
        return self._entry(content, words)

    def _write(self, content: bytes) -> None:
        """Write the file, in place of those of older code."""
        try:
            folder = folder_to_write(self._folder)
            with temporary(str(folder / self._name)) as new:
                Path(new).write_bytes(content)
                os.replace(new, folder / self._name)
        except OSError as error:
            _warn(NO_CACHE, str(error))
            return
        for path in folder.glob(f"{self._group}*.kernel"):
            if not path.name.startswith(self._group + self._code):
                with suppress(OSError):
                    path.unlink()


def folders(beside: Path) -> list[Path]:
    """Return where code is looked for whose modules lie in this folder."""
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        return [Path(chosen)]
    return [beside / "__pycache__", cache_file("kernels")]


def folder_to_write(beside: Path = Path(__file__).parent) -> Path:
    """Return the first of these folders that takes files; OSError if none does."""
    *others, last = folders(beside)
    for folder in others:
        with suppress(OSError):
            return _made(folder)
    return _made(last)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    return folder


def _result(kind: Any) -> str | None:
    """Return ctypes' name of a result, "" for none; None if it is no number."""
    from numba.core import types as numbas

    if kind == numbas.none:
        return ""
    if kind == numbas.boolean:
        return "c_bool"
    if isinstance(kind, numbas.Integer | numbas.Float):
        return {"float32": "c_float", "float64": "c_double"}.get(kind.name, f"c_{kind.name}")
    return None


def _checksum(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=CHECKSUM).digest()


def _digest(*values: object) -> str:
    return hashlib.blake2b(repr(values).encode(), digest_size=6).hexdigest()


@functools.cache
def _environment() -> str:
    """Return what code depends on beside its source: how it is called, versions, the processor,
    numba's settings.
    """
    numba = importlib.util.find_spec("numba")
    assert numba
    assert numba.origin
    version = os.stat(Path(numba.origin).with_name("_version.py"))
    settings = [item for item in os.environ.items() if item[0].startswith("NUMBA_")]
    return _digest(
        [Path(source).read_bytes() for source in (machine_code.__file__, __file__)],
        (sys.version_info, np.__version__, llvmlite.__version__),
        (version.st_mtime_ns, version.st_size),
        (llvm.get_process_triple(), llvm.get_host_cpu_name()),
        llvm.get_host_cpu_features().flatten(),
        sorted(item for item in settings if item[0] != "NUMBA_CACHE_DIR"),
    )


def _type_key(kind: object) -> object:
    """Return what identifies a kind of argument in every process."""
    if isinstance(kind, type):
        return kind.__module__, kind.__qualname__, getattr(kind, "_fields", ())
    return kind.str if isinstance(kind, np.dtype) else kind


def identity(kernel: Kernel) -> str:
    """Return a digest of the code of a kernel, and of all that it refers to by name."""
    parts: list[object] = []
    waiting: list[Any] = [kernel]
    seen = set[int]()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Kernel):
            parts.append([(k, _constant(value.options[k])) for k in sorted(value.options)])
            waiting.append(value.function)
        elif isinstance(value, str):
            parts.append(value)
        elif isinstance(value, Deferred):
            waiting += value.code
        elif isinstance(value, type):
            waiting += [v for v in vars(value).values() if isinstance(v, types.FunctionType)]
        else:
            parts += _code(value.__code__, value.__doc__), value.__defaults__
            names = map(value.__globals__.get, value.__code__.co_names)
            for referred in (*names, *(cell.cell_contents for cell in value.__closure__ or ())):
                if _is_ours(referred):
                    waiting.append(referred)
                else:
                    parts.append(_constant(referred))
    return _digest(parts)


def _is_ours(value: Any) -> bool:
    if isinstance(value, type):
        return value.__module__.startswith("caffepy.")
    return isinstance(value, Kernel | Deferred | types.FunctionType)


def _code(code: types.CodeType, doc: str | None = None) -> object:
    constants = [_constant(value) for value in code.co_consts if value != doc]
    return code.co_code, code.co_names, code.co_varnames, constants


def _constant(value: Any) -> object:
    """Return what identifies a constant of code in every process."""
    if isinstance(value, types.CodeType):
        return _code(value)
    if isinstance(value, tuple | list):
        return [_constant(member) for member in value]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if value is None or isinstance(value, int | float | str | bytes | np.generic | np.dtype):
        return repr(value)
    return type(value).__qualname__


_logged: set[str] = set()


def _warn(message: str, *values: str) -> None:
    """Log a message once, whatever its values."""
    if message not in _logged:
        _logged.add(message)
        log.warning(message, *values)


def _log_compiling() -> None:
    """Log once why the first iteration takes its time."""
    if COMPILING not in _logged:
        _logged.add(COMPILING)
        log.info(COMPILING)
