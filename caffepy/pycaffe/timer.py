"""pycaffe's Timer."""

import time

from caffepy.device.gpus import synchronize_gpu
from caffepy.pycaffe import mode


class Timer:
    """A stopwatch; in GPU mode, start and stop wait for the GPU."""

    def __init__(self) -> None:
        self._started: float | None = None
        self._seconds = 0.0

    def start(self) -> None:
        """Start the clock."""
        self._started = _now()

    def stop(self) -> None:
        """Stop the clock, if it runs."""
        if self._started is not None:
            self._seconds = _now() - self._started
            self._started = None

    @property
    def ms(self) -> float:
        """Milliseconds between the last start and stop; a running clock is stopped."""
        self.stop()
        return self._seconds * 1000


def _now() -> float:
    gpu = mode.gpu()
    if gpu is not None:
        synchronize_gpu(gpu)
    return time.perf_counter()
