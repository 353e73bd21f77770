"""Where the time of a solver's iterations goes, by the clock of its GPU."""

from time import perf_counter
from typing import Any

import cupy
import numpy as np

from caffepy.device.blob import Array as HostArray
from caffepy.device.device import CudaDevice
from caffepy.ops.cuda.compiler import kernel
from caffepy.ops.phase_timer import HOST, PARTS

BETWEEN = len(PARTS)
"""The place of what goes by between iterations, which is the data's or the host's."""

LANE = "laps"
"""Where laps end, so that nothing waits for that."""


class _Spells:
    """The host's time in blocks of one kind."""

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
    """Seconds by part; nothing is measured unless `running` is set.

    Between `stop` and `start` no time is counted. An iteration is `begin`, then a `lap` at the end
    of each part: a kernel of one thread, to be recorded with the others, beside the work that
    follows. `read` waits for nothing.

    What the GPU idles between iterations is shared out as the host's time was: to data while it was
    `fetching`, to "host" while it was `issuing`.
    """

    def __init__(self, device: CudaDevice) -> None:
        self.running = False
        self._device = device
        self._clock: Any = device.zeros(2 + len(PARTS), np.dtype(np.uint64))
        self._page = cupy.cuda.alloc_pinned_memory(8 * (1 + len(PARTS)))
        self._nanoseconds: HostArray = np.frombuffer(self._page, np.uint64, 1 + len(PARTS))
        self._nanoseconds[:] = 0
        self._stopped = True
        self._fetching, self._issuing = _Spells(), _Spells()
        self._split = dict.fromkeys(("data", HOST), 0.0)
        self._seen = 0.0, 0.0, 0.0

    def start(self) -> None:
        """Count time again."""
        if self.running and self._stopped:
            self._stopped = False
            self._end(-1)

    def begin(self) -> None:
        """An iteration, or a pass of it, begins."""
        self._end_aside(BETWEEN)

    def mark(self, part: str) -> None:
        """What went by since the last call went into this part."""
        if part == PARTS[-1] and self._counts:
            self._device.join(LANE)
            self._end(PARTS.index(part))
        else:
            self._end_aside(PARTS.index(part))

    @property
    def _counts(self) -> bool:
        return self.running and not self._stopped and not self._fetching.on

    def _end_aside(self, place: int) -> None:
        if self._counts:
            with self._device.side_stream(LANE):
                self._end(place)

    def _end(self, place: int) -> None:
        kernel("phase_timer", "mark")((1,), (1,), (self._clock, self._page.ptr, np.int32(place)))

    def stop(self) -> None:
        """Count no time."""
        self._stopped = True

    def fetching(self) -> "_Spells":
        """A block between iterations in which the host waits for data, or gives them to the device."""
        return self._fetching

    def issuing(self) -> "_Spells":
        """A block in which the host gives other work to the device."""
        return self._issuing

    def read(self) -> dict[str, float]:
        """Seconds by part, so far; those of the last iterations may not be in it yet."""
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
