"""Images a second."""

import time
from collections.abc import Sequence

from caffepy.core.events import Output, Reporter


class Speed:
    """Images a second of training time since the last reading, without the time of pauses."""

    def __init__(self) -> None:
        self._images = 0
        self._since = self._paused_at = time.monotonic()
        self._paused = False

    def add(self, images: int) -> None:
        self._images += images

    def pause(self) -> None:
        if not self._paused:
            self._paused, self._paused_at = True, time.monotonic()

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            self._since += time.monotonic() - self._paused_at

    @property
    def seconds(self) -> float:
        """Training time since the last reading."""
        return (self._paused_at if self._paused else time.monotonic()) - self._since

    def read(self) -> float | None:
        """Return the images a second since the last reading, and reset; None without images."""
        rate = self._images / max(self.seconds, 1e-9) if self._images else None
        self._images, self._since = 0, self._since + self.seconds
        return rate


class Timed(Reporter):
    """Controls clocks of training time: tests and snapshots do not count."""

    def __init__(self, *clocks: Speed) -> None:
        self._clocks = clocks

    def pause(self) -> None:
        for clock in self._clocks:
            clock.pause()

    def test_started(self, iteration: int, k: int) -> None:
        self.pause()

    def test_done(
        self, iteration: int, k: int, outputs: Sequence[Output], loss: float | None
    ) -> None:
        for clock in self._clocks:
            clock.resume()

    def snapshotted(self, kind: str, path: str) -> None:
        self.pause()

    def iterated(self, iteration: int, loss: float | None, rate: float, images: int) -> None:
        for clock in self._clocks:
            clock.resume()
            clock.add(images)

    def finished(self, iteration: int, loss: float | None) -> None:
        self.pause()
