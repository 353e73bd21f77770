"""The phase timer, by the clock of the GPU, and the stopwatch, by CUDA events."""

from itertools import pairwise
from time import perf_counter
from typing import Any

import cupy
import numpy as np

from caffepy.device.blob import Array as HostArray
from caffepy.device.cuda import CudaDevice
from caffepy.ops.cuda.compiler import kernel
from caffepy.ops.objects import HOST, PARTS

BETWEEN = len(PARTS)
"""The index of the time between iterations, which is the data's or the host's."""

STREAM = "phase timer"
"""The side stream of the marks, so that no other work waits for them."""

TICKS = 2_000_000
"""About this many ticks of a device's clock make a millisecond."""


class _HostTime:
    """The host's time in blocks of one kind; `on` inside of one."""

    def __init__(self) -> None:
        self.on = False
        self.seconds = 0.0

    def __enter__(self) -> None:
        self.on = True
        self._begin = perf_counter()

    def __exit__(self, *error: object) -> None:
        self.on = False
        self.seconds += perf_counter() - self._begin


class PhaseTimer:
    """Sums that a kernel of one thread keeps, captured with the others: at each mark it adds the
    time of the GPU's clock since the last one, on a stream beside the work that follows.

    The time that the GPU idles between iterations is split as the host's time was: to data while it
    was `fetching`, to "host" while it was `issuing`.
    """

    def __init__(self, device: CudaDevice) -> None:
        self.running = False
        self._device = device
        self._clock: Any = device.zeros(2 + len(PARTS), np.dtype(np.uint64))
        self._page = cupy.cuda.alloc_pinned_memory(8 * (1 + len(PARTS)))
        self._nanoseconds: HostArray = np.frombuffer(self._page, np.uint64, 1 + len(PARTS))
        self._nanoseconds[:] = 0
        self._stopped = True
        self._begins, self._times = True, 1  # the next iteration begins; how often its parts count
        self._fetching, self._issuing = _HostTime(), _HostTime()
        self._split = dict.fromkeys(("data", HOST), 0.0)
        self._seen = 0.0, 0.0, 0.0

    def start(self) -> None:
        if self.running and self._stopped:
            self._stopped = False
            self._end(-1)

    def sample(self, number: int, count: int) -> None:
        self._begins, self._times = number == 0, count if number == count - 1 else 0

    def begin(self) -> None:
        if self._begins:
            self._end_on_side_stream(BETWEEN)
        elif self._times:
            self._end_on_side_stream(-1)

    def mark(self, part: str) -> None:
        if not self._times:
            return
        if part == PARTS[-1] and self._counts:
            self._device.wait_stream(STREAM)
            self._end(PARTS.index(part))
        else:
            self._end_on_side_stream(PARTS.index(part))

    @property
    def _counts(self) -> bool:
        return self.running and not self._stopped and not self._fetching.on

    def _end_on_side_stream(self, place: int) -> None:
        if self._counts:
            with self._device.side_stream(STREAM):
                self._end(place)

    def _end(self, place: int) -> None:
        times = self._times if 0 <= place < BETWEEN else 1
        arguments = self._clock, self._page.ptr, np.int32(place), np.int32(times)
        kernel("phase_timer", "mark")((1,), (1,), arguments)

    def stop(self) -> None:
        self._stopped = True

    def fetching(self) -> _HostTime:
        return self._fetching

    def issuing(self) -> _HostTime:
        return self._issuing

    def read(self) -> dict[str, float]:
        *seconds, between = (self._nanoseconds / 1e9).tolist()
        fetched, issued = self._fetching.seconds, self._issuing.seconds
        waited, fetching, issuing = (
            now - before for now, before in zip((between, fetched, issued), self._seen, strict=True)
        )
        self._seen = between, fetched, issued
        share = fetching / (fetching + issuing) if fetching else 0.0
        self._split["data"] += waited * share
        self._split[HOST] += waited * (1 - share)
        found = dict(zip(PARTS, seconds, strict=True)) | {HOST: self._split[HOST]}
        found["data"] += self._split["data"]
        return found


class Stopwatch:
    def __init__(self) -> None:
        self._events: list[Any] = []
        self._count = 0

    def hold(self, milliseconds: float) -> None:
        kernel("spin", "spin")((1,), (1,), (np.int64(milliseconds * TICKS),))

    def mark(self) -> None:
        if self._count == len(self._events):
            self._events.append(cupy.cuda.Event())
        self._events[self._count].record(cupy.cuda.get_current_stream())
        self._count += 1

    def read(self) -> list[float]:
        marks, self._count = self._events[: self._count], 0
        if marks:
            marks[-1].synchronize()
        return [float(cupy.cuda.get_elapsed_time(*pair)) for pair in pairwise(marks)]
