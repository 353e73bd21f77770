"""Where the time of a solver's iterations goes, by the host's clock."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from caffepy.device.device import Device
from caffepy.ops.phase_timer import PARTS


class PhaseTimer:
    """Seconds by part; nothing is measured unless `running` is set.

    Between `stop` and `start` no time is counted. An iteration is `begin`, then a `lap` at the end
    of each part.
    """

    def __init__(self, device: Device) -> None:
        self.running = False
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._since: float | None = None

    def start(self) -> None:
        """Count time again."""
        self.begin()

    def begin(self) -> None:
        """An iteration begins; time between iterations is not counted."""
        self._since = time.perf_counter() if self.running else None

    def mark(self, part: str) -> None:
        """What went by since the last call went into this part."""
        if self._since is not None:
            now = time.perf_counter()
            self._seconds[part] += now - self._since
            self._since = now

    def stop(self) -> None:
        """Count no time."""
        self._since = None

    @contextmanager
    def fetching(self) -> Iterator[None]:
        """A block between iterations that waits for data."""
        self.begin()
        yield
        self.mark("data")

    def read(self) -> dict[str, float]:
        """Seconds by part, so far."""
        return dict(self._seconds)
