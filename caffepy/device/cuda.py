"""CudaDevice: one GPU with its streams, its random numbers and the error flags of its kernels."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.core.errors import CaffeError, DeviceError
from caffepy.device import math_mode
from caffepy.device.device import Device, ErrorFlag
from caffepy.device.gpus import (
    check_gpu,
    gpu_memory,
    gpu_properties,
    import_cupy,
    last_line,
    open_ahead,
    translate_errors,
)
from caffepy.device.graph_nodes import replace_memsets
from caffepy.device.streams import NOT_READY, OF_CAPTURES, Streams

MOST_ERROR_FLAGS = 1024


class _Executable:
    """A captured graph of a GPU, instantiated; it is freed with the object."""

    def __init__(self, runtime: Any, captured: int, gpu: int) -> None:
        try:
            replace_memsets(captured, gpu)
            self._made: int = runtime.graphInstantiate(captured)
        finally:
            runtime.graphDestroy(captured)
        self._runtime = runtime
        weakref.finalize(self, runtime.graphExecDestroy, self._made).atexit = False

    def launch(self, stream: Any) -> None:
        self._runtime.graphLaunch(self._made, stream.ptr)

    def upload(self, stream: Any) -> None:
        self._runtime.graphUpload(self._made, stream.ptr)


class CudaGraph:
    """Captured operations of a stream, with the temporary memory that they use."""

    def __init__(self, graph: Any, stream: Any, pool: Any) -> None:
        self._graph = graph
        self._stream = stream
        self._pool = pool

    def replay(self) -> None:
        """Enqueue all operations again."""
        self._graph.launch(self._stream)

    def close(self) -> None:
        """Free the graph and its memory, even if this object is still referred to."""
        self._graph = self._pool = None


class CudaDevice(Device):
    """GPU `index`, with a main stream on which its work runs in order.

    DeviceError says what to install or to change if there is no CuPy, no driver or no such GPU. It
    has more than 25 methods: those of Device, and streams, graphs and errors, which share the
    device's scope.
    """

    kind = "cuda"
    is_cuda = True

    def __init__(self, index: int = 0, seed: int | None = None) -> None:
        super().__init__(seed)
        self._host = Device()
        self._host.random = self.random
        self.index = index
        self.math_mode = math_mode.new()
        open_ahead(index)
        self._cupy = import_cupy()
        check_gpu(index)
        self._streams = Streams(self._cupy, index)
        self.stream = self._streams.main
        self._error_flags: list[_CudaErrorFlag] = []
        self._step_count = 0

    @property
    def name(self) -> str:
        """NVIDIA's name of the GPU."""
        return str(gpu_properties(self.index)["name"])

    @property
    def free_memory(self) -> int:
        """Bytes of the GPU that are free, and those that CuPy's pool holds unused."""
        unused = self._cupy.get_default_memory_pool().free_bytes()
        return gpu_memory(self.index)[0] + int(unused)

    @property
    def host(self) -> Device:
        """The CPU with this device's random numbers."""
        return self._host

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Return a context in which the calling thread's operations run on the main stream."""
        with (
            translate_errors(self._cupy, self.index),
            self._cupy.cuda.Device(self.index),
            self.stream,
            math_mode.using(self.math_mode),
        ):
            yield

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        self._streams.synchronize()

    @property
    def idle(self) -> bool:
        """True if all enqueued work is done, or can never be done."""
        return all(status != NOT_READY for status in self._streams.statuses())

    @property
    def lost(self) -> str:
        """The CUDA error that has made the device and its memory unusable; empty if none."""
        for status in self._streams.statuses():
            if status not in (0, NOT_READY, *OF_CAPTURES):
                return str(self._cupy.cuda.runtime.CUDARuntimeError(status))
        return ""

    @cached_property
    def step_counter(self) -> Any:
        """An int64 array without axes that counts forward passes; a solver's kernel adds to it."""
        return self.zeros(1, np.dtype(np.int64)).reshape(())

    @property
    def step_count(self) -> int:
        """The value that `step_counter` has after the passes enqueued so far."""
        return self._step_count

    @step_count.setter
    def step_count(self, count: int) -> None:
        self._step_count = count
        self.upload(np.array(count, np.int64), self.step_counter)

    def add_enqueued_steps(self, passes: int) -> None:
        """Add to `step_count` what enqueued kernels will add to `step_counter`."""
        self._step_count += passes

    def count_step(self) -> None:
        """Count a forward pass that a net runs outside a solver."""
        self.step_count += 1

    @cached_property
    def error_flags(self) -> Any:
        """All error flags, an array (MOST_ERROR_FLAGS, 2) with `error_flag_count` rows in use."""
        flat = self.zeros(2 * MOST_ERROR_FLAGS, np.dtype(np.float64))
        return flat.reshape(MOST_ERROR_FLAGS, 2)

    @property
    def error_flag_count(self) -> int:
        """Number of rows of `error_flags` in use."""
        return len(self._error_flags)

    def error_flag(self, error: Callable[[float], CaffeError]) -> ErrorFlag:
        """Return a flag for a kernel to set; `error` makes an exception of the bad value."""
        if len(self._error_flags) == MOST_ERROR_FLAGS:
            raise DeviceError(
                f"nets of one device have {MOST_ERROR_FLAGS} layers that read labels at most"
            )
        flag = _CudaErrorFlag(self.error_flags[len(self._error_flags)], error)
        self._error_flags.append(flag)
        return flag

    def check_errors(self) -> None:
        """Wait until the device is idle and raise the error of the first flag that is set."""
        if not self._error_flags:
            return
        values = self.on_host(self.error_flags[: len(self._error_flags)])
        for flag, (found, value) in zip(self._error_flags, values, strict=True):
            if found:
                with self.scope():
                    self.error_flags.fill(0)
                raise flag.error(float(value))

    def overlapping(self) -> AbstractContextManager[None]:
        """Enable `side_stream` in this context; at its end the main stream waits for all."""
        return self._streams.overlapping()

    def side_stream(self, name: str = "layer", *after: str) -> AbstractContextManager[object]:
        """Return the context of a side stream, which waits for what was enqueued before."""
        return self._streams.fork(name, *after)

    def wait_stream(self, name: str = "layer") -> None:
        """Make the current stream wait for the work of this side stream."""
        self._streams.wait(name)

    def capture(self, work: Callable[[], None]) -> CudaGraph:
        """Capture the operations that `work` enqueues, side streams included, without running them.

        DeviceError if one of them cannot be captured. Temporary memory comes from a pool that lives
        as long as the graph.
        """
        cuda = self._cupy.cuda
        pool = cuda.MemoryPool()
        with self.scope(), cuda.using_allocator(pool.malloc):
            self.stream.begin_capture()
            try:
                with self.overlapping():
                    work()
            except BaseException as error:
                with suppress(cuda.runtime.CUDARuntimeError):
                    self.stream.end_capture()
                if isinstance(error, Exception):
                    raise DeviceError(f"it cannot be captured: {last_line(error)}") from error
                raise
            try:
                captured = cuda.runtime.streamEndCapture(self.stream.ptr)
                graph = _Executable(cuda.runtime, captured, self.index)
                graph.upload(self.stream)
            except cuda.runtime.CUDARuntimeError as error:
                raise DeviceError(f"it cannot be captured: {last_line(error)}") from error
        return CudaGraph(graph, self.stream, pool)

    def on_host(self, array: Any) -> NDArray[Any]:
        """Return a copy of a device array as a numpy array."""
        with self.scope():
            copy: NDArray[Any] = self._cupy.asnumpy(array)
        return copy

    def on_device(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return a copy of a host array on the GPU."""
        with self.scope():
            copy: NDArray[Any] = self._cupy.asarray(array)
        return copy

    def zeros(self, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return a flat device array of zeros, written on the current stream."""
        with self.scope(), self._streams.current:
            array: NDArray[Any] = self._cupy.zeros(count, dtype)
        return array

    def upload(self, host: NDArray[Any], array: Any) -> None:
        """Copy a host array into a device array of its shape and type, on the current stream."""
        with self.scope(), self._streams.current:
            array.set(host)

    def download(self, array: Any, host: NDArray[Any]) -> None:
        """Copy a device array into a host array of the same size; return when it is done."""
        with self.scope():
            array.get(out=host, blocking=True)

    def host_array(self, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return a flat array of zeros in pinned memory."""
        page = self._cupy.cuda.alloc_pinned_memory(max(1, count) * dtype.itemsize)
        array: NDArray[Any] = np.frombuffer(page, dtype, count)
        array[...] = 0
        return array

    def copy_beside(self, source: Any, target: Any) -> None:
        """Copy between host and device on a separate stream."""
        with translate_errors(self._cupy, self.index), self._cupy.cuda.Device(self.index):
            stream = self._cupy.cuda.Stream(non_blocking=True)
            if isinstance(source, np.ndarray):
                target.set(source, stream)
            else:
                source.get(stream, out=target, blocking=False)
            stream.synchronize()

    def flush(self) -> None:
        """Upload the host arrays of blobs that were written to."""
        if self.dirty:
            with self.scope():
                for memory in tuple(self.dirty):
                    memory.flush()


class _CudaErrorFlag(ErrorFlag):
    def check(self) -> None:
        """Do nothing, since the kernel may still run: `CudaDevice.check_errors` raises later."""
