"""The thread's settings, `set_mode_gpu`, `set_device`, `set_random_seed`, ..., and the Timer."""

import operator
import threading
import time

from caffepy.core.errors import CaffeError
from caffepy.device import math_mode
from caffepy.device.cuda import CudaDevice
from caffepy.device.device import Device
from caffepy.device.gpus import synchronize_gpu


class _Mode(threading.local):
    """The calling thread's settings, and the random numbers that seed its nets."""

    def __init__(self) -> None:
        self.gpu = False
        self.index = 0
        self.random = Device()
        self.solver_count = 1
        self.solver_rank = 0
        self.multiprocess = False


_mode = _Mode()


def new_device(rank: int = 0) -> Device:
    """Return a device of the chosen kind for a new net, seeded from the thread's random numbers and
    the universal rank of its solver.
    """
    seed = _mode.random.draw_seed() + rank
    return CudaDevice(_mode.index, seed) if _mode.gpu else Device(seed)


def set_mode_cpu() -> None:
    """Build nets on the CPU from now on (the default)."""
    _mode.gpu = False


def set_mode_gpu() -> None:
    """Build nets on the GPU from now on."""
    _mode.gpu = True


def set_device(index: int) -> None:
    """Choose the GPU, numbered from 0, for nets that are built from now on.

    CaffeError for a number below 0; a GPU that is not there is an error of the first net.
    """
    if operator.index(index) < 0:
        raise CaffeError(f"a GPU has a number from 0, not {index}")
    _mode.index = index


def set_random_seed(seed: int) -> None:
    """Seed the calling thread's random numbers; call it before building nets.

    CaffeError for a seed below 0.
    """
    if seed < 0:
        raise CaffeError(f"a random seed is 0 or more, not {seed}")
    _mode.random.seed(seed)


def solver_count() -> int:
    """Return the number of solvers that train together."""
    return _mode.solver_count


def set_solver_count(count: int) -> None:
    """Set the number of solvers that train together, before this thread's is built.

    CaffeError for a number below 1.
    """
    if count < 1:
        raise CaffeError(f"a solver count is 1 or more, not {count}")
    _mode.solver_count = count


def solver_rank() -> int:
    """Return the rank of this thread's solver."""
    return _mode.solver_rank


def set_solver_rank(rank: int) -> None:
    """Set the rank of this thread's solver; rank 0 alone tests, displays and saves.

    CaffeError for a rank below 0.
    """
    if rank < 0:
        raise CaffeError(f"a solver rank is 0 or more, not {rank}")
    _mode.solver_rank = rank


def multiprocess() -> bool:
    """True if the other solvers are in other processes."""
    return _mode.multiprocess


def set_multiprocess(multiprocess: bool) -> None:
    """Set whether the other solvers are in other processes, else in other threads of this one."""
    _mode.multiprocess = multiprocess


def set_precision(name: str) -> None:
    """Set the precision of new nets on GPUs, from exact to fast: "fp32", "tf32" (at first), "bf16",
    "fp16".

    tf32 rounds factors of products to 10 bits; bf16 and fp16 keep activations and their gradients
    in 16 bits. Call it before building nets.
    """
    math_mode.default().precision = math_mode.checked(name)


class Timer:
    """A stopwatch; in GPU mode, start and stop wait for the GPU."""

    def __init__(self) -> None:
        self._started: float | None = None
        self._seconds = 0.0

    def start(self) -> None:
        """Start the clock."""
        self._started = self._now()

    def stop(self) -> None:
        """Stop the clock, if it runs."""
        if self._started is not None:
            self._seconds = self._now() - self._started
            self._started = None

    @property
    def ms(self) -> float:
        """Milliseconds between the last start and stop; a running clock is stopped."""
        self.stop()
        return self._seconds * 1000

    @staticmethod
    def _now() -> float:
        if _mode.gpu:
            synchronize_gpu(_mode.index)
        return time.perf_counter()
