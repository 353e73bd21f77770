"""The phase timer and the stopwatch, by the host's clock."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from time import perf_counter

from caffepy.device.device import Device
from caffepy.ops import objects
from caffepy.ops.objects import PARTS


class PhaseTimer:
    """Sums of differences of perf_counter."""

    def __init__(self, device: Device) -> None:
        self.running = False
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._since: float | None = None

    def start(self) -> None:
        self.begin()

    def sample(self, number: int, count: int) -> None:
        """Time each iteration: the CPU enqueues none."""

    def begin(self) -> None:
        self._since = perf_counter() if self.running else None

    def mark(self, part: str) -> None:
        if self._since is not None:
            now = perf_counter()
            self._seconds[part] += now - self._since
            self._since = now

    def stop(self) -> None:
        self._since = None

    @contextmanager
    def fetching(self) -> Iterator[None]:
        self.begin()
        yield
        self.mark("data")

    def issuing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def read(self) -> dict[str, float]:
        return dict(self._seconds)


class Stopwatch(objects.Stopwatch):
    def __init__(self) -> None:
        self._marks: list[float] = []

    def mark(self) -> None:
        self._marks.append(perf_counter() * 1000)

    def read(self) -> list[float]:
        marks, self._marks = self._marks, []
        return [after - before for before, after in pairwise(marks)]
