"""CUDA graphs: operations captured once and launched many times."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from caffepy.core.errors import DeviceError
from caffepy.device.gpus import last_line


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
        """Free the graph and its memory, whoever still refers to this object."""
        self._graph = self._pool = None


def capture(cupy: Any, stream: Any, work: Callable[[], None]) -> CudaGraph:
    """Capture the operations that `work` enqueues on the current stream, without running them.

    DeviceError if one of them cannot be captured. Temporary memory comes from a pool that lives as
    long as the graph.
    """
    cuda = cupy.cuda
    pool = cuda.MemoryPool()
    with cuda.using_allocator(pool.malloc):
        stream.begin_capture()
        try:
            work()
        except BaseException as error:
            with suppress(cuda.runtime.CUDARuntimeError):
                stream.end_capture()
            if isinstance(error, Exception):
                raise DeviceError(f"it cannot be captured: {last_line(error)}") from error
            raise
        try:
            graph = stream.end_capture()
            graph.upload(stream)
        except cuda.runtime.CUDARuntimeError as error:
            raise DeviceError(f"it cannot be captured: {last_line(error)}") from error
    return CudaGraph(graph, stream, pool)
