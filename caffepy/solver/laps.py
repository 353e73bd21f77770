"""Laps: where the time of a solver's iterations goes, by the host's clock."""

import time

PARTS = ("data", "forward", "backward", "synchronization", "update")


class Laps:
    """Seconds by part; each `lap` is the time since the one before it, or since `start`.

    A GPU that replays iterations has no laps: the host only gives them to it.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._since = time.perf_counter()

    def start(self) -> None:
        """Begin a lap; what was since the last one counts for nothing."""
        self._since = time.perf_counter()

    def lap(self, part: str) -> None:
        """End a lap, which went into this part, and begin the next."""
        now = time.perf_counter()
        self.seconds[part] += now - self._since
        self._since = now
