"""cuDNN 9 by its backend API (its header cudnn_graph.h), through ctypes.

    tensors -> operations -> Graph -> engine configurations, by heuristics -> Plan

What takes long, asking heuristics and building a plan, runs without Python's lock, so that threads
do it side by side; short calls keep the lock, since a busy thread gives it back late.
"""

import ctypes
import importlib.util
import math
import os
import re
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from caffepy.core.errors import DeviceError, install

Attribute = tuple[int, int, Any]
"""(name, type, a value or a sequence of them)"""

ALIGNED = 16
"""Bytes of which the addresses of all arrays are multiples."""

MOST_KNOBS = 44
"""CUDNN_KNOB_TYPE_COUNTS."""

# cudnnDataType_t
FLOAT, DOUBLE, HALF, BFLOAT16 = 0, 1, 2, 9
DATA_TYPES = {"float32": FLOAT, "float64": DOUBLE, "float16": HALF, "uint16": BFLOAT16}

# cudnnBackendNumericalNote_t and cudnnBackendBehaviorNote_t
TENSOR_CORE, DOWN_CONVERT_INPUTS, REDUCED_PRECISION_REDUCTION, FFT, NONDETERMINISTIC = range(5)
WINOGRAD = range(5, 9)  # of any tile
RUNTIME_COMPILATION = 0

# cudnnBackendHeurMode_t
HEURISTIC_FALLBACK, HEURISTIC_A = 2, 3

# cudnnBackendAttributeType_t
_HANDLE, _DATA_TYPE, _BOOLEAN, _INT64, _FLOAT, _DOUBLE, _POINTER = range(7)
_CONVOLUTION_MODE, _HEURISTIC, _KNOB = range(7, 10)
_NUMERICAL_NOTE, _POINTWISE_MODE, _DESCRIPTOR, _BEHAVIOR_NOTE = 11, 14, 15, 19
_C_TYPES: dict[int, Any] = {
    _HANDLE: ctypes.c_void_p,
    _BOOLEAN: ctypes.c_bool,
    _INT64: ctypes.c_int64,
    _FLOAT: ctypes.c_float,
    _DOUBLE: ctypes.c_double,
    _POINTER: ctypes.c_void_p,
    _DESCRIPTOR: ctypes.c_void_p,
}
"""The others are enumerations: int."""

_ADD, _RELU = 0, 100  # cudnnPointwiseMode_t
_CROSS_CORRELATION = 1  # cudnnConvolutionMode_t


class CudnnError(RuntimeError):
    """A call that cuDNN declined, or that failed."""


class _Library(NamedTuple):
    short: Any  # calls that keep Python's lock
    long: Any  # calls without it


def wheel() -> str:
    """Return the path of cuDNN in its wheel; empty if that is not installed."""
    try:
        spec = importlib.util.find_spec("nvidia.cudnn")
    except ModuleNotFoundError:
        return ""
    folders = spec.submodule_search_locations if spec else None
    paths = (os.path.join(folder, "lib", "libcudnn.so.9") for folder in folders or ())
    return next(filter(os.path.exists, paths), "")


@cache
def library() -> _Library:
    """Return cuDNN: its wheel's, or what the dynamic linker finds; DeviceError without one."""
    path = wheel() or "libcudnn.so.9"
    try:
        long = ctypes.CDLL(path)
    except OSError as error:
        remedy = f"{install('cuda13')}, or cuda12"
        raise DeviceError(f"cuDNN 9 cannot be loaded ({error}): {remedy}") from error
    long.cudnnGetVersion.restype = ctypes.c_size_t
    return _Library(ctypes.PyDLL(path, handle=long._handle), long)


def version() -> int:
    """Return cuDNN's version, such as 91900 for 9.19.0."""
    return int(library().long.cudnnGetVersion())


def _check(status: int) -> None:
    if status:
        text = ctypes.create_string_buffer(1024)
        library().short.cudnnGetLastErrorString(text, ctypes.c_size_t(len(text)))
        raise CudnnError(f"cuDNN's status {status}: {text.value.decode(errors='replace')}")


def create_handle(stream: int) -> int:
    """Return a handle for the current device and a stream of it."""
    handle = ctypes.c_void_p()
    _check(library().long.cudnnCreate(ctypes.byref(handle)))
    set_stream(handle.value or 0, stream)
    return handle.value or 0


def set_stream(handle: int, stream: int) -> None:
    """Set the stream on which a handle's work runs."""
    _check(library().short.cudnnSetStream(ctypes.c_void_p(handle), ctypes.c_void_p(stream)))


class Descriptor:
    """A descriptor of the backend, made of attributes and finalized; without any, one that
    `Descriptor.get` fills.
    """

    def __init__(self, kind: int, *attributes: Attribute) -> None:
        self.pointer = ctypes.c_void_p()
        self._needs = [value for _, type_, value in attributes if type_ == _DESCRIPTOR]
        _check(library().short.cudnnBackendCreateDescriptor(kind, ctypes.byref(self.pointer)))
        for attribute in attributes:
            self._set(*attribute)
        if attributes:
            _check(library().long.cudnnBackendFinalize(self.pointer))

    def _set(self, name: int, type_: int, value: Any) -> None:
        values = value if isinstance(value, Sequence) else [value]
        if type_ == _DESCRIPTOR:
            values = [each.pointer for each in values]
        array = (_C_TYPES.get(type_, ctypes.c_int) * len(values))(*values)
        count = ctypes.c_int64(len(values))
        _check(library().short.cudnnBackendSetAttribute(self.pointer, name, type_, count, array))

    def get(self, name: int, type_: int, most: int = 1) -> list[Any]:
        """Return up to `most` values of an attribute."""
        values = (_C_TYPES.get(type_, ctypes.c_int) * most)()
        return list(values[: self._get(name, type_, most, values)])

    def descriptors(self, name: int, kind: int, most: int | None = None) -> list["Descriptor"]:
        """Return the descriptors of this kind that an attribute is; some attributes state no count,
        but only up to `most` of them.
        """
        count = self._get(name, _DESCRIPTOR, 0, None) if most is None else most
        found = [Descriptor(kind) for _ in range(count)]
        values = (ctypes.c_void_p * count)(*(each.pointer for each in found))
        return found[: self._get(name, _DESCRIPTOR, count, values)]

    def _get(self, name: int, type_: int, most: int, values: Any) -> int:
        count = ctypes.c_int64()
        sizes = ctypes.c_int64(most), ctypes.byref(count)
        _check(library().long.cudnnBackendGetAttribute(self.pointer, name, type_, *sizes, values))
        return count.value if values is None else min(count.value, most)

    def __del__(self) -> None:
        if self.pointer and not sys.is_finalizing():
            library().short.cudnnBackendDestroyDescriptor(self.pointer)


def tensor(
    uid: int, dim: Sequence[int], stride: Sequence[int], data_type: int, virtual: bool = False
) -> Descriptor:
    """Return a tensor; one that is virtual is not in memory."""
    return Descriptor(
        17,
        (900, _INT64, ALIGNED),
        (901, _DATA_TYPE, data_type),
        (902, _INT64, list(dim)),
        (903, _INT64, list(stride)),
        (906, _INT64, uid),
        (907, _BOOLEAN, virtual),
    )


_CONVOLUTIONS = {
    # what: kind, alpha, beta, convolution, tensors in the order of the arguments
    "forward": (10, 700, 701, 702, (704, 703, 705)),  # x, w, y
    "backward_data": (12, 706, 707, 708, (711, 709, 710)),  # dy, w, dx
    "backward_weight": (11, 712, 713, 714, (716, 717, 715)),  # x, dy, dw
}


def convolution(
    what: str,
    window: tuple[Sequence[int], Sequence[int], Sequence[int]],
    compute_type: int,
    tensors: Sequence[Descriptor],
) -> Descriptor:
    """Return a convolution or a gradient of one: "forward" of x, w, y; "backward_data" of dy, w,
    dx; "backward_weight" of x, dy, dw. The window is stride, padding, dilation.
    """
    stride, padding, dilation = (list(numbers) for numbers in window)
    kind, alpha, beta, described, names = _CONVOLUTIONS[what]
    how = Descriptor(
        1,
        (100, _DATA_TYPE, compute_type),
        (101, _CONVOLUTION_MODE, _CROSS_CORRELATION),
        (102, _INT64, dilation),
        (103, _INT64, stride),
        (104, _INT64, padding),
        (105, _INT64, padding),
        (106, _INT64, len(stride)),
    )
    arguments = [(name, _DESCRIPTOR, [each]) for name, each in zip(names, tensors, strict=True)]
    kind_of_factors = _DOUBLE if compute_type == DOUBLE else _FLOAT
    factors = (alpha, kind_of_factors, 1.0), (beta, kind_of_factors, 0.0)
    return Descriptor(kind, *arguments, (described, _DESCRIPTOR, [how]), *factors)


def addition(compute_type: int, x: Descriptor, b: Descriptor, y: Descriptor) -> Descriptor:
    """Return y = x + b."""
    how = Descriptor(0, (0, _POINTWISE_MODE, _ADD), (1, _DATA_TYPE, compute_type))
    arguments = zip((750, 751, 752, 753), (how, x, b, y), strict=True)
    return Descriptor(13, *((name, _DESCRIPTOR, [each]) for name, each in arguments))


def relu(compute_type: int, x: Descriptor, y: Descriptor) -> Descriptor:
    """Return y = max(x, 0)."""
    how = Descriptor(
        0,
        (0, _POINTWISE_MODE, _RELU),
        (1, _DATA_TYPE, compute_type),
        (3, _DOUBLE, 0.0),
        (4, _DOUBLE, 3.4028234663852886e38 if compute_type == FLOAT else math.inf),
        (5, _DOUBLE, 0.0),
    )
    arguments = zip((750, 751, 753), (how, x, y), strict=True)
    return Descriptor(13, *((name, _DESCRIPTOR, [each]) for name, each in arguments))


class Engine(NamedTuple):
    """An engine with its settings, which can be built as a plan of its graph."""

    number: int
    config: Descriptor
    numerical_notes: list[int]
    behavior_notes: list[int]

    @property
    def name(self) -> str:
        """The number, and each knob with its value, such as eng17_k24=3."""
        knobs = [
            (choice.get(600, _KNOB)[0], choice.get(601, _INT64)[0])
            for choice in self.config.descriptors(302, 7, MOST_KNOBS)
        ]
        return f"eng{self.number}" + "".join(f"_k{knob}={value}" for knob, value in knobs)


class Graph:
    """Operations as a graph, with what engines there are for it."""

    def __init__(self, handle: int, operations: Sequence[Descriptor]) -> None:
        self._graph = Descriptor(15, (800, _HANDLE, handle), (801, _DESCRIPTOR, list(operations)))

    def engines(self, heuristic: int) -> list[Engine]:
        """Return the engines that a heuristic recommends, the best first."""
        graph = (201, _DESCRIPTOR, [self._graph])
        asked = Descriptor(4, graph, (200, _HEURISTIC, heuristic))
        return [self._engine_of(config) for config in asked.descriptors(202, 3)]

    def _engine_of(self, config: Descriptor) -> Engine:
        (engine,) = config.descriptors(300, 2, 1)
        (number,) = engine.get(1301, _INT64)
        notes = engine.get(1303, _NUMERICAL_NOTE, 16), engine.get(1305, _BEHAVIOR_NOTE, 16)
        return Engine(number, config, *notes)

    def config(self, name: str) -> Descriptor:
        """Return the configuration that an engine's name says."""
        number, *knobs = (int(number) for number in re.findall(r"-?\d+", name))
        engine = Descriptor(2, (1300, _DESCRIPTOR, [self._graph]), (1301, _INT64, number))
        choices = [
            Descriptor(7, (600, _KNOB, knob), (601, _INT64, value))
            for knob, value in zip(knobs[::2], knobs[1::2], strict=True)
        ]
        chosen = [(302, _DESCRIPTOR, choices)] if choices else []
        return Descriptor(3, (300, _DESCRIPTOR, [engine]), *chosen)


class Plan:
    """A configuration that is built, to be run with the arrays of tensors 0, 1, ...

    `workspace` is the number of bytes that it needs besides.
    """

    def __init__(self, handle: int, config: Descriptor) -> None:
        self._plan = Descriptor(5, (400, _HANDLE, handle), (401, _DESCRIPTOR, [config]))
        (self.workspace,) = self._plan.get(402, _INT64)

    def execute(self, handle: int, pointers: Sequence[int], workspace: int) -> None:
        """Enqueue it on the handle's stream."""
        pack = Descriptor(
            16,
            (1000, _INT64, range(len(pointers))),
            (1001, _POINTER, pointers),
            (1003, _POINTER, workspace),
        )
        run = library().short.cudnnBackendExecute
        _check(run(ctypes.c_void_p(handle), self._plan.pointer, pack.pointer))
