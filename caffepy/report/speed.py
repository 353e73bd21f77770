"""Images a second; that of a single device is kept from run to run, to compare several with."""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from caffepy.core import cache
from caffepy.core.events import Output, Reporter

FILE = "alone.json"
FIRST, LEAST = 20, 2.0
"""Iterations at the beginning that do not count; seconds of training that a measurement needs."""


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

    takes_several = True

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


def baseline_key(what: Mapping[str, Any]) -> str:
    """Return the key of a run; runs with equal settings have the same key."""
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:32]


def known_baseline(run: str) -> float | None:
    """Return the images a second of one solver in such a run, None if it was never measured."""
    kept = cache.read(cache.cache_file(FILE)).get(run)
    return float(kept) if isinstance(kept, (int, float)) else None


class BaselineRecorder(Timed):
    """Measures the speed of a run of one solver and keeps it when the run ends."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._speed = Speed()
        self._iterations = 0
        super().__init__(self._speed)

    def iterated(self, iteration: int, loss: float | None, rate: float, images: int) -> None:
        """Count its images, unless it is one of the first."""
        super().iterated(iteration, loss, rate, images)
        self._iterations += 1
        if self._iterations == FIRST:
            self._speed.read()

    def done(self, stopped_early: bool) -> None:
        """Keep the speed, if the run was long enough to measure it."""
        self.pause()
        seconds, rate = self._speed.seconds, self._speed.read()
        if rate and self._iterations > FIRST and seconds >= LEAST:
            cache.add_entries(cache.cache_file(FILE), {self._run: round(rate, 1)})
