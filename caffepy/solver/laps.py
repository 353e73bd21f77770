"""Laps: where the time of a solver's iterations goes, by the host's clock."""

import time

PARTS = ("data", "forward", "backward", "synchronization", "update")


class Laps:
    """Seconds by part; each `lap` is the time since the one before it, or since `start`.

    Between `stop` and `start` there are no laps: not of iterations that the host only gives to a GPU.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._since: float | None = None

    def start(self) -> None:
        """Begin a lap."""
        self._since = time.perf_counter()

    def lap(self, part: str) -> None:
        """End a lap, which went into this part, and begin the next."""
        if self._since is not None:
            now = time.perf_counter()
            self.seconds[part] += now - self._since
            self._since = now

    def stop(self) -> None:
        """Forget the lap that was begun."""
        self._since = None
