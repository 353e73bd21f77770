"""Compilation of the kernels of this back end: by NVRTC through CuPy, at the first use on a device,
cached on disk.

Each kernel of kernels/NAME.cu is a module of its own, such as `foo<float, 4>`, and compiled in a
thread of a pool: to compile several at a time, ask for all of them first (`prefetch`), or run the
calls that would launch them in a block in which nothing is launched (`compile_ahead`). `#include
"NAME.cuh"` is replaced by the text of the file beside it, because the key of CuPy's cache is the
text of the module. Files of ACCELERATED are compiled for compute capability 9.0a where the device
has 9.0, which CuPy cannot ask for, and cached by caffepy.

A kernel's scalar arguments must have the C type that the kernel declares: numpy.int32(n) for int,
numpy.float32(x) for float; a Python int is passed as long long, a Python float as double.
"""

import logging
import re
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import cupy

from caffepy.core.cache import add_entries, cache_file, read
from caffepy.device.threads import cores

Kernel = Callable[..., None]  # (grid, block, arguments)
Key = tuple[int, str, str]  # device, file, name

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent / "kernels"
OPTIONS = ("-std=c++17",)

ACCELERATED = dict.fromkeys(
    ("pointwise", "cross_products", "outer_products", "filter_gradient"), ("90", "sm_90a")
)
"""Files with code for one architecture, such as wgmma, and other code for all: the compute
capability of the device, and the architecture.
"""

_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"$', re.MULTILINE)

LOG_SECONDS = 2.0

_logged = time.perf_counter()
_kernels: dict[Key, Kernel] = {}
_jobs: dict[Key, Future[Kernel]] = {}
_lock = threading.Lock()


class _Thread(threading.local):
    ahead = False  # this thread is in `compile_ahead`


_thread = _Thread()


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(cores(), "caffepy-compile")


def kernel(file: str, name: str) -> Kernel:
    """Return the kernel of kernels/FILE.cu with a name expression such as
    `max_pool_forward<float>`, for this device.

    Called as kernel(grid, block, arguments). Its first use compiles and loads, so it must not be
    inside a capture.
    """
    key = (cupy.cuda.runtime.getDevice(), file, name)
    if _thread.ahead:
        _job(key)
        return _launch_nothing
    found = _kernels.get(key)
    if found is None:
        job = _job(key)
        waits_for_a_thread = job.cancel()
        found = _kernels[key] = _compile(*key) if waits_for_a_thread else job.result()
        log_progress("%d of %d kernels compiled", len(_kernels), len(_jobs))
    return found


def log_progress(text: str, *numbers: int) -> None:
    """Log how far the start of a process is, every LOG_SECONDS while it lasts."""
    global _logged
    if time.perf_counter() - _logged > LOG_SECONDS:
        log.info(text, *numbers)
        _logged = time.perf_counter()


def prefetch(file: str, names: Iterable[str]) -> None:
    """Begin to compile kernels of a file for this device, all at a time."""
    for name in names:
        _job((cupy.cuda.runtime.getDevice(), file, name))


@contextmanager
def compile_ahead() -> Iterator[None]:
    """Return a block in which kernels that this thread would launch are compiled, and none is
    launched.

    For calls that do nothing but launch kernels, which do not keep what `kernel` returned.
    """
    before, _thread.ahead = _thread.ahead, True
    try:
        yield
    finally:
        _thread.ahead = before


def looks_ahead() -> bool:
    """Return True in a block of `compile_ahead`."""
    return _thread.ahead


def _launch_nothing(*_: object, **__: object) -> None:
    pass


def _job(key: Key) -> Future[Kernel]:
    """Return what compiles and loads a kernel, or has done so."""
    with _lock:
        if key not in _jobs:
            _jobs[key] = _pool().submit(_compile, *key)
        return _jobs[key]


def _compile(device: int, file: str, name: str) -> Kernel:
    with cupy.cuda.Device(device) as here:
        capability, architecture = ACCELERATED.get(file, ("", ""))
        if here.compute_capability == capability:
            return _accelerated(source(file), name, architecture)
        module = cupy.RawModule(code=source(file), options=OPTIONS, name_expressions=(name,))
        function: Kernel = module.get_function(name)
        return function


def _accelerated(text: str, name: str, architecture: str) -> Kernel:
    """Compile for an architecture, or take what was compiled before, and load."""
    nvrtc, options = cupy.cuda.nvrtc, (*OPTIONS, f"-arch={architecture}")
    what = repr((text, name, options, nvrtc.getVersion()))
    path = cache_file(f"kernels/{sha256(what.encode()).hexdigest()}.json")
    kept = read(path)
    if not kept.keys() >= {"name", "cubin"}:
        program = nvrtc.createProgram(text, "kernel.cu", (), ())
        try:
            nvrtc.addNameExpression(program, name)
            nvrtc.compileProgram(program, options)
            cubin = b64encode(nvrtc.getCUBIN(program)).decode()
            kept = {"name": nvrtc.getLoweredName(program, name), "cubin": cubin}
        finally:
            nvrtc.destroyProgram(program)
        add_entries(path, kept)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(b64decode(kept["cubin"]))
        function: Any = cupy.RawModule(path=str(file)).get_function(kept["name"])
        function.compile()  # loads the file
        loaded: Kernel = function
        return loaded


@cache
def source(file: str) -> str:
    """Return the text of kernels/FILE.cu with its includes."""
    text = (FOLDER / f"{file}.cu").read_text()
    return _INCLUDE.sub(lambda match: (FOLDER / match[1]).read_text(), text)
