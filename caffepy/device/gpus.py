"""GPUs of the machine, and messages that say what to do if there are none or if they fail."""

import ctypes
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from caffepy.core.errors import DeviceError, UsageError, install

INSTALL = f"{install('cuda13')}, or cuda12 for a driver of CUDA 12"
NO_DRIVER = "no NVIDIA driver is found: install one, or give the container access to the GPU"
NO_GPU = "this machine has no GPU"

DRIVER_FILE = Path("/proc/driver/nvidia/version")
LEFT_OUT = {"clockRate": 13, "deviceOverlap": 15, "kernelExecTimeoutEnabled": 17, "memPitch": 11}
"""cudaDeviceAttr of the properties that CuPy, or CUDA 13, left out."""


def gpu_numbers(gpus: str) -> list[int]:
    """Return the GPUs that a list such as "0,1" or "all" names; UsageError for anything else."""
    if gpus == "all":
        count = count_gpus()
        if not count:
            raise DeviceError(NO_GPU)
        return list(range(count))
    tokens = [token.strip() for token in gpus.split(",")]
    if not all(re.fullmatch(r"[0-9]+", token) for token in tokens):
        raise UsageError(f'{gpus!r} is neither "all" nor device numbers separated by commas')
    return [int(token) for token in tokens]


@cache
def open_ahead(index: int) -> None:
    """Begin to open a GPU, in a thread: that takes the driver a quarter of a second, in which CuPy
    is imported. Errors are left to the first use of the GPU.
    """

    def open_it() -> None:
        try:
            cuda = ctypes.CDLL("libcuda.so.1")
        except OSError:
            return
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if not cuda.cuInit(0) and not cuda.cuDeviceGet(ctypes.byref(device), index):
            cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)

    threading.Thread(target=open_it, name="caffepy-open", daemon=True).start()


def import_cupy() -> Any:
    """Return the module cupy; DeviceError says what to install if it cannot be imported."""
    try:
        import cupy
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "cupy":
            needs = f"a GPU needs CuPy: {INSTALL} ({error})"
            raise DeviceError(needs if cuda_of_driver() else f"{NO_DRIVER}; {needs}") from None
        if "libcuda.so" in str(error):
            raise DeviceError(NO_DRIVER) from None
        raise DeviceError(
            f"CuPy is installed but cannot be loaded ({last_line(error)}): {INSTALL}"
        ) from None
    return cupy


def cuda_library(name: str) -> ctypes.CDLL:
    """Return a library of CUDA, such as "cublas", as CuPy finds it; OSError without it."""
    import_cupy()
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        return ctypes.CDLL(load_nvidia_dynamic_lib(name).abs_path)
    except (ImportError, RuntimeError) as error:  # not found
        raise OSError(last_line(error)) from None


def last_line(error: BaseException) -> str:
    """Return the last line of an error's text that has words in it."""
    lines = [line.strip() for line in str(error).splitlines() if re.search(r"\w", line)]
    return lines[-1] if lines else type(error).__name__


def count_gpus() -> int:
    """Return the number of GPUs that CUDA sees; DeviceError says what is wrong if it fails."""
    runtime = import_cupy().cuda.runtime
    try:
        return int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as error:
        built, driver = cuda_of_cupy(), cuda_of_driver()
        if not driver:
            raise DeviceError(NO_DRIVER) from None
        if driver // 1000 < built // 1000:
            raise DeviceError(too_old(driver, built)) from None
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        chosen = "" if visible is None else f'; CUDA_VISIBLE_DEVICES is "{visible}"'
        raise DeviceError(f"CUDA finds no GPU ({error}){chosen}") from None


def too_old(driver: int, built: int) -> str:
    """Return the remedy if CuPy is built for a newer CUDA than the driver supports."""
    other = f", or pip uninstall cupy-cuda13x and {install('cuda12')}"
    return (
        f"CuPy is built for CUDA {cuda_version(built)}, but the NVIDIA driver goes up to CUDA "
        f"{cuda_version(driver)}: update the driver{other if driver // 1000 == 12 else ''}"
    )


def cuda_version(number: int) -> str:
    """Return a CUDA version as people write it: 12.4 for 12040."""
    return f"{number // 1000}.{number % 1000 // 10}"


def cuda_of_cupy() -> int:
    """Return the CUDA version that CuPy is built for."""
    return int(import_cupy().cuda.runtime.runtimeGetVersion())


def cuda_of_driver() -> int:
    """Return the newest CUDA version of the driver, 0 without a driver; needs no CuPy."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    version = ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(version))
    return version.value


def driver_version() -> str:
    """Return the NVIDIA driver's version, empty if it is unknown."""
    try:
        found = re.search(r"\s(\d+\.[\d.]+)\s", DRIVER_FILE.read_text())
    except OSError:
        return ""
    return found[1] if found else ""


def nccl_version() -> int:
    """Return NCCL's version, such as 22809 for 2.28.9; ImportError if it cannot be loaded."""
    import_cupy()
    from cupy.cuda import nccl

    return int(nccl.get_version())


def check_gpu(index: int) -> None:
    """Raise DeviceError if there is no such GPU."""
    count = count_gpus()
    if not 0 <= index < count:
        raise DeviceError(f"there is no GPU {index}: this machine has {count}, numbered from 0")


def gpu_properties(index: int) -> dict[str, Any]:
    """Return the fields of cudaDeviceProp, including those that CUDA 13 or CuPy left out."""
    check_gpu(index)
    runtime = import_cupy().cuda.runtime
    properties = dict(runtime.getDeviceProperties(index))
    left_out = {name: int(runtime.deviceGetAttribute(k, index)) for name, k in LEFT_OUT.items()}
    return properties | left_out | {"name": properties["name"].decode()}


def gpu_memory(index: int) -> tuple[int, int]:
    """Return free and total bytes of the GPU's memory."""
    cupy = import_cupy()
    with cupy.cuda.Device(index):
        free, total = cupy.cuda.runtime.memGetInfo()
    return int(free), int(total)


def synchronize_gpu(index: int) -> None:
    """Wait until all work that this process enqueued on the GPU is done."""
    import_cupy().cuda.Device(index).synchronize()


@contextmanager
def translate_errors(cupy: Any, index: int) -> Iterator[None]:
    """Raise errors of CuPy and CUDA as DeviceError, with a remedy if memory is full."""
    try:
        yield
    except cupy.cuda.memory.OutOfMemoryError as error:
        raise DeviceError(
            f"the GPU's memory is full ({error}); --recompute, or a smaller batch_size with "
            "iter_size, helps"
        ) from None
    except (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError) as error:
        raise DeviceError(f"GPU {index} failed: {last_line(error)}") from error
