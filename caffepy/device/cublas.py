"""cuBLAS, which comes with CuPy, by the few of its functions that are used, through ctypes.

CuPy's own module sets the stream before each call, which drops the workspace.
"""

import ctypes
from functools import cache
from typing import Any

from caffepy.core.errors import DeviceError, install
from caffepy.device.gpus import cuda_library

_INT, _POINTER = ctypes.c_int, ctypes.c_void_p
_ARGUMENTS = (
    (_POINTER, *(_INT,) * 5, _POINTER)  # handle, transposed, sizes, alpha
    + (_POINTER, _INT, _INT) * 2  # the factors, each with type and leading dimension
    + (_POINTER, _POINTER, *(_INT,) * 4)  # beta, result, type, dimension, compute type, algorithm
)


class CublasError(RuntimeError):
    """A call that failed."""


@cache
def library() -> Any:
    """Return the library; DeviceError if it cannot be loaded."""
    try:
        found = cuda_library("cublas")
    except OSError as error:
        remedy = f"{install('cuda13')}, or cuda12"
        raise DeviceError(f"cuBLAS cannot be loaded ({error}): {remedy}") from error
    found.cublasGemmEx.argtypes = _ARGUMENTS
    return found


def version() -> str:
    """Return cuBLAS's version, such as 13.1.0."""
    numbers = [_INT() for _ in range(3)]
    for i, number in enumerate(numbers):
        _check(library().cublasGetProperty(i, ctypes.byref(number)))
    return ".".join(str(number.value) for number in numbers)


def _check(status: int) -> None:
    if status:
        raise CublasError(f"cuBLAS failed with status {status}")


def create_handle() -> int:
    """Return a handle for the current device."""
    handle = _POINTER()
    _check(library().cublasCreate_v2(ctypes.byref(handle)))
    return handle.value or 0


def set_stream(handle: int, stream: int, workspace: int, size: int) -> None:
    """Set the stream of a handle's products, and their workspace of `size` bytes."""
    _check(library().cublasSetStream_v2(_POINTER(handle), _POINTER(stream)))
    where = _POINTER(handle), _POINTER(workspace), ctypes.c_size_t(size)
    _check(library().cublasSetWorkspace_v2(*where))


def gemm(*arguments: int) -> None:
    """Enqueue cublasGemmEx, whose last argument, the algorithm, is the default."""
    _check(library().cublasGemmEx(*arguments, -1))
