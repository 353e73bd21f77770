"""Buffers between a thread that fills them and one that enqueues operations; a copy stream uploads
them.

    thread 1   room (waits for _sent) -> fill -> send
    copies     wait for _used -> upload -> record _sent
    thread 2   take: its stream waits for _sent -> operations -> done: record _used

The host waits in `room` alone, until pinned memory has been copied and may be filled again.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate
from math import prod
from typing import Any

import cupy
import numpy as np
from numpy.typing import NDArray

from caffepy.ops.cuda.launch import Array, launch_expression
from caffepy.ops.objects import Specs

ALIGNED = 256


@cache
def _copies(device: int) -> Any:
    """Return the stream of all copies to this device: they run in order, so each is as early as it
    can be.
    """
    with cupy.cuda.Device(device):
        return cupy.cuda.Stream(non_blocking=True)


def _event() -> Any:
    return cupy.cuda.Event(block=True, disable_timing=True)


class Staging:
    def __init__(self) -> None:
        self._layout: Specs = ()
        self._device = cupy.cuda.Device()
        self.gpu = self._device.id
        self._stream = _copies(self.gpu)
        self._sent, self._used = _event(), _event()

    def room(self, layout: Specs) -> list[NDArray[Any]]:
        with self._device:
            self._sent.synchronize()
            if layout != self._layout:
                self._used.synchronize()
                self._allocate(layout)
        return self._on_host

    def _allocate(self, layout: Specs) -> None:
        sizes = [prod(shape) * np.dtype(dtype).itemsize for shape, dtype in layout]
        *starts, size = accumulate((-(-n // ALIGNED) * ALIGNED for n in sizes), initial=0)
        self._host, self._memory = cupy.cuda.alloc_pinned_memory(size), cupy.cuda.alloc(size)
        places = [(*spec, start) for spec, start in zip(layout, starts, strict=True)]
        self._on_host = [
            np.frombuffer(self._host, dtype, prod(shape), start).reshape(shape)
            for shape, dtype, start in places
        ]
        self._on_device: list[Array] = [
            cupy.ndarray(shape, dtype, self._memory + start) for shape, dtype, start in places
        ]
        self._layout, self._size = layout, size

    def target(self, stream: Any) -> Array:
        with self._device:
            stream.wait_event(self._used)
        return self._on_device[0]

    def resize(
        self, stream: Any, images: Sequence[tuple[int, int, int]], to: Sequence[int]
    ) -> None:
        with self._device, stream:
            y = self.target(stream)
            table = cupy.asarray(np.column_stack([images, to]).astype(np.int64))
            threads = len(images) * prod(y.shape[2:])
            launch_expression("resize", "resize_images", threads, table, y, len(to), *y.shape[2:])

    def send(self, there: Sequence[int] = ()) -> None:
        runtime = cupy.cuda.runtime
        with self._device:
            self._stream.wait_event(self._used)
            for start, stop in self._spans(there) if there else [(0, self._size)]:
                pointers = self._memory.ptr + start, self._host.ptr + start
                what = (*pointers, stop - start, runtime.memcpyHostToDevice)
                runtime.memcpyAsync(*what, self._stream.ptr)
            self._sent.record(self._stream)

    def _spans(self, there: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield the bytes of the rows that are not there, and those of all other arrays."""
        rows = self._on_host[0]
        row, before = rows.nbytes // len(rows), -1
        for place in sorted(there):
            if place > before + 1:
                yield (before + 1) * row, place * row
            before = place
        yield (before + 1) * row, self._size

    def take(self) -> list[Array]:
        cupy.cuda.get_current_stream().wait_event(self._sent)
        return self._on_device

    def done(self) -> None:
        self._used.record(cupy.cuda.get_current_stream())
