"""Compilation of the kernels of this back end: by NVRTC through CuPy, at the first use on a device,
cached on disk.

The kernels of kernels/NAME.cu that are `template <typename T>` are compiled together for the type
that is asked for; every other name expression, such as `foo<float, 4>`, becomes a module of its
own. `#include "NAME.cuh"` is replaced by the text of the file beside it, because the key of CuPy's
cache is the text of the module.

A kernel's scalar arguments must have the C type that the kernel declares: numpy.int32(n) for int,
numpy.float32(x) for float; a Python int is passed as long long, a Python float as double.
"""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from threading import RLock

import cupy

Kernel = Callable[..., None]  # (grid, block, arguments)

FOLDER = Path(__file__).parent / "kernels"
OPTIONS = ("-std=c++17",)

_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"$', re.MULTILINE)
_BOUNDS = r"__launch_bounds__\([^)]*\)"
_TEMPLATE = re.compile(
    rf"template\s*<(?:typename|class)\s+\w+>\s*__global__\s+(?:(?:void|{_BOUNDS})\s+){{1,2}}(\w+)"
)
_ONE_TYPE = re.compile(r"(\w+)<([\w ]+)>")

_kernels: dict[tuple[int, str, str], Kernel] = {}
_lock = RLock()


def kernel(file: str, name: str) -> Kernel:
    """Return the kernel of kernels/FILE.cu with a name expression such as
    `max_pool_forward<float>`, for this device.

    Called as kernel(grid, block, arguments). Its first use compiles and loads, so it must not be
    inside a capture.
    """
    key = (cupy.cuda.runtime.getDevice(), file, name)
    found = _kernels.get(key)
    return found if found is not None else _load(*key)


def _load(device: int, file: str, name: str) -> Kernel:
    with _lock:
        try:
            functions = _compile(file, expressions(file, name))
        except cupy.cuda.compiler.CompileException:
            # Another template of the file is not for this type.
            functions = _compile(file, [name])
        for each, function in functions.items():
            _kernels.setdefault((device, file, each), function)
        return _kernels[device, file, name]


def _compile(file: str, names: list[str]) -> dict[str, Kernel]:
    module = cupy.RawModule(code=source(file), options=OPTIONS, name_expressions=tuple(names))
    return {name: module.get_function(name) for name in names}


def expressions(file: str, name: str) -> list[str]:
    """Return the name expressions that are compiled together with this one."""
    if match := _ONE_TYPE.fullmatch(name):
        kind = match[2]
        together = [f"{template}<{kind}>" for template in _TEMPLATE.findall(source(file))]
        if name in together:
            return together
    return [name]


@cache
def source(file: str) -> str:
    """Return the text of kernels/FILE.cu with its includes."""
    text = (FOLDER / f"{file}.cu").read_text()
    return _INCLUDE.sub(lambda match: (FOLDER / match[1]).read_text(), text)
