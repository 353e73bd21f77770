"""The speed of a single device, kept from run to run: what several are compared with."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from caffepy.core import cache
from caffepy.report.speed import Speed, Timed

FILE = "alone.json"
FIRST, LEAST = 20, 2.0
"""Iterations at the beginning that do not count; seconds of training that a measurement needs."""


def key(what: Mapping[str, Any]) -> str:
    """Return the key of a run; runs with equal settings have the same key."""
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:32]


def known(run: str) -> float | None:
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
            cache.keep(cache.cache_file(FILE), {self._run: round(rate, 1)})
