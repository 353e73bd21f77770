"""Handles, workspaces and scratch memory of each stream, for cuDNN and cuBLAS.

Calls on one stream run one after the other, so they share memory for what does not outlast them.
Memory that a captured graph may have seen is never freed.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from itertools import product
from math import prod
from threading import RLock
from typing import Any

import cupy
import numpy as np
from numpy.typing import DTypeLike

from caffepy.core.errors import DeviceError
from caffepy.device import cublas, cudnn

LARGEST_WORKSPACE = 256 << 20
"""Plans that need more bytes than this besides their arrays are not taken."""

CUBLAS = 32 << 20
"""Bytes of cuBLAS's workspace on each stream.

Which kernel it takes, hence how it rounds, depends on the size, and a product must have the same
bits on a side stream of a captured step as on the main one.
"""


class Workspace:
    """Device memory that grows; what it once handed out stays allocated, since captured graphs know
    its address.
    """

    def __init__(self) -> None:
        self.size = 0
        self.kept: list[Any] = []

    def reserve(self, size: int) -> int:
        """Return the address of at least `size` bytes."""
        if size > self.size or not self.kept:
            size = max(size, 1 << 20, min(2 * self.size, LARGEST_WORKSPACE))
            self.kept.append(cupy.cuda.alloc(size))
            self.size = size
        return int(self.kept[-1].ptr)


class Context:
    """Handles and memory of one stream of one device; made at the first call on it."""

    def __init__(self, stream: int) -> None:
        self.stream = stream
        self.workspace = Workspace()
        self._scratch: defaultdict[str, Workspace] = defaultdict(Workspace)
        self._cudnn = 0
        self._cublas = 0

    def array(self, purpose: str, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        """Return an array in the memory of this purpose, valid until the next call with it."""
        memory = self._scratch[purpose]
        memory.reserve(prod(shape) * np.dtype(dtype).itemsize)
        return cupy.ndarray(shape, dtype, memory.kept[-1])

    def copy(self, source: Any, to: Any) -> None:
        """Copy a contiguous array to another one, unless they are the same object."""
        if source is not to:
            runtime, pointers = cupy.cuda.runtime, (to.data.ptr, source.data.ptr)
            runtime.memcpyAsync(*pointers, to.nbytes, runtime.memcpyDeviceToDevice, self.stream)

    @property
    def cudnn(self) -> int:
        """The stream's cuDNN handle; DeviceError if cuDNN cannot be used on this GPU."""
        if not self._cudnn:
            try:
                self._cudnn = _handle("cudnn")
                cudnn.set_stream(self._cudnn, self.stream)
            except cudnn.CudnnError as error:
                raise DeviceError(f"cuDNN cannot be used on this GPU ({error})") from error
        return self._cudnn

    @property
    def cublas(self) -> int:
        """The stream's cuBLAS handle.

        Its stream and workspace are set once: to set the stream again would drop the workspace.
        """
        if not self._cublas:
            handle = _handle("cublas")
            workspace = self.array("cublas", (CUBLAS,), np.uint8).data.ptr
            cublas.set_stream(handle, self.stream, workspace, CUBLAS)
            self._cublas = handle
        return self._cublas


lock = RLock()
"""Held while a handle is made or a plan chosen: timings of two threads would disturb each other."""

CREATE: dict[str, Callable[[], int]] = {
    "cudnn": partial(cudnn.create_handle, 0),
    "cublas": cublas.create_handle,
}

_contexts: dict[tuple[int, int], Context] = {}
_handle_pool: dict[tuple[int, str], Future[int]] = {}


def _create(device: int, kind: str) -> int:
    with cupy.cuda.Device(device):
        return CREATE[kind]()


@cache
def _prepare(device: int) -> None:
    pool = ThreadPoolExecutor(len(CREATE), "caffepy-handles")
    with lock:
        for key in product([device], CREATE):
            _handle_pool.setdefault(key, pool.submit(_create, *key))
    pool.shutdown(wait=False)


def prepare_handles() -> None:
    """Begin to load cuDNN and cuBLAS and to create a handle of each for this device, in a thread;
    once.
    """
    _prepare(cupy.cuda.runtime.getDevice())


def _handle(kind: str) -> int:
    """Return a handle from the pool.

    No handle can be created during a capture, but a capture may need the first one of a new stream:
    so one is always created ahead.
    """
    key = (cupy.cuda.runtime.getDevice(), kind)
    with lock:
        ahead = _handle_pool.pop(key, None)
        handle = ahead.result() if ahead else CREATE[kind]()
        if not cupy.cuda.get_current_stream().is_capturing():
            _handle_pool[key] = Future()
            _handle_pool[key].set_result(CREATE[kind]())
    return handle


@cache
def _capability(device: int) -> int:
    found = cupy.cuda.runtime.getDeviceProperties(device)
    return 10 * int(found["major"]) + int(found["minor"])


def capability() -> int:
    """Return ten times the compute capability of the current device, such as 90."""
    return _capability(cupy.cuda.runtime.getDevice())


def context() -> Context:
    """Return the context of the current device and stream."""
    key = (cupy.cuda.runtime.getDevice(), cupy.cuda.get_current_stream().ptr)
    found = _contexts.get(key)
    if found is None:
        with lock:
            found = _contexts.setdefault(key, Context(key[1]))
    return found


@contextmanager
def temporary_workspace() -> Iterator[None]:
    """Give plans that are tried in this block a separate workspace, and free it afterwards."""
    here = context()
    kept, here.workspace = here.workspace, Workspace()
    try:
        yield
    finally:
        large = here.workspace.size > kept.size
        here.workspace = kept
        if large and not cupy.cuda.get_current_stream().is_capturing():
            cupy.get_default_memory_pool().free_all_blocks()
