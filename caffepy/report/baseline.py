"""How fast a solver trains by itself, kept from run to run, so that it is known what several gain."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from caffepy.core import cache
from caffepy.report.speed import Speed, Timed

FILE = "alone.json"
FIRST, LEAST = 20, 2.0
"""Iterations at the beginning, which do not count, and seconds of training below which a speed
means nothing.
"""


def key(what: Mapping[str, Any]) -> str:
    """A name for a run; those of which all of this is equal are equally fast."""
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:32]


def known(run: str) -> float | None:
    """Images a second of one solver in such a run, if there was one."""
    kept = cache.read(cache.cache_file(FILE)).get(run)
    return float(kept) if isinstance(kept, (int, float)) else None


class Alone(Timed):
    """Keeps how fast a run of one solver was, at its end."""

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
        """Keep the speed, if the run was long enough for one."""
        self.pause()
        seconds, rate = self._speed.seconds, self._speed.read()
        if rate and self._iterations > FIRST and seconds >= LEAST:
            cache.keep(cache.cache_file(FILE), {self._run: round(rate, 1)})
