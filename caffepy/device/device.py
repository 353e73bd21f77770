"""Device: where arrays live and arithmetic runs; the flags by which operations report bad data."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from caffepy.core.errors import CaffeError
from caffepy.device.host_memory import free_memory
from caffepy.device.math_mode import MathMode
from caffepy.device.random_numbers import RandomNumbers
from caffepy.device.recording import recorder


class ErrorFlag:
    """Two numbers that an operation sets when its data are wrong: 1, and the first bad value."""

    def __init__(self, found: NDArray[Any], error: Callable[[float], CaffeError]) -> None:
        self.found = found
        self.error = error

    def set_where(self, bad: NDArray[Any], values: NDArray[Any]) -> None:
        """Set the flag, with the largest of the values that are bad, if any is: for array
        arithmetic, on any device.
        """
        if not values.size:
            return
        largest = np.max(np.where(bad, values, -np.inf))
        self.found[1:] = np.where(np.any(bad), largest, self.found[1:])
        self.found[:1] = np.maximum(self.found[:1], np.any(bad))

    def check(self) -> None:
        """Raise the error and clear the flag if it is set.

        On a GPU nothing is raised here, since the operation may still run: `Device.check_errors`
        raises.
        """
        if keeps := recorder():
            keeps.check(self.found, self._raise)
        else:
            self._raise()

    def _raise(self) -> None:
        if self.found[0]:
            self.found[0] = 0
            raise self.error(float(self.found[1]))


class Device:
    """The CPU as a solver sees it, and the interface of CudaDevice.

    Every solver has its own Device, hence its own random numbers; `seed` None takes one from the
    system. Methods for what only GPUs have (streams, copies between host and device) do nothing
    here, so that layers, nets and solvers need not know where they run.
    """

    kind = "cpu"
    index = 0
    is_cuda: ClassVar[bool] = False  # blobs have an array on the device beside that on the host
    follows: bool = False  # its solver is the root of a node that is not the first
    runs: ClassVar[bool] = True  # False for nets that are never run: parameters get no values
    writes_files: bool = True  # False for nets that are only looked at or timed

    def __init__(self, seed: int | None = None) -> None:
        self.random = RandomNumbers(seed)
        self.math_mode = MathMode("fp32", deterministic=True)
        self.dirty: set[Any] = set()
        """Memories of blobs whose host array is newer than the device's."""
        self.allocation_version = 0
        """Grows whenever a blob gets another device array: graphs captured before are invalid."""

    @property
    def rng(self) -> np.random.Generator:
        """Random generator for setup and for draws on the host; do not keep it."""
        return self.random.generator

    def seed(self, seed: int | None) -> None:
        """Restart the random generator from this seed."""
        self.random.state = dict(np.random.MT19937(seed).state)

    def draw_seed(self) -> int:
        """Return a 32-bit seed for another generator: a transformer, a dropout mask, a shuffle."""
        return int(self.rng.integers(1 << 32))

    @property
    def step_counter(self) -> Any:
        """Number of forward passes, an int64 array () on a GPU, where masks depend on it; else
        None.
        """
        return None

    def count_step(self) -> None:
        """Count a forward pass that a net runs outside a solver."""

    @property
    def step_count(self) -> int:
        """The value that `step_counter` has after the passes enqueued so far."""
        return 0

    @step_count.setter
    def step_count(self, count: int) -> None:
        pass

    def error_flag(self, error: Callable[[float], CaffeError]) -> ErrorFlag:
        """Return a flag for an operation to set; `error` makes an exception of the bad value."""
        return ErrorFlag(np.zeros(2), error)

    def check_errors(self) -> None:
        """Wait until the device is idle and raise the error of the first flag that is set."""

    @property
    def host(self) -> "Device":
        """The CPU with this device's random numbers, for layers that compute on the host."""
        return self

    def scope(self) -> AbstractContextManager[object]:
        """Return a context in which the calling thread's array operations run on this device."""
        return nullcontext()

    def overlapping(self) -> AbstractContextManager[None]:
        """Return a context in which a GPU uses side streams; at its end the main stream waits for
        all.
        """
        return nullcontext()

    def side_stream(self, name: str = "layer", *after: str) -> AbstractContextManager[object]:
        """Return a context whose operations may overlap those enqueued after it, up to
        `wait_stream`.

        They start after what was enqueued on the main stream (and the side streams `after`) before
        this call, not before the context is entered. Until `wait_stream`, what they read must not
        change and what they write must not be used.
        """
        return nullcontext()

    def wait_stream(self, name: str = "layer") -> None:
        """Make the current stream wait for the work of this side stream."""

    def on_device(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return an array of the device with these values: the array itself, or a copy on a GPU."""
        return array

    def on_host(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return the array as a numpy array: itself, or a copy of a GPU's."""
        return array

    def zeros(self, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return a flat array of zeros on the device."""
        return np.zeros(count, dtype)

    def upload(self, host: NDArray[Any], array: NDArray[Any]) -> None:
        """Copy a host array into an array of this device of the same shape and type."""
        array[...] = host

    def download(self, array: NDArray[Any], host: NDArray[Any]) -> None:
        """Copy an array of this device into a host array of the same size, and wait for it."""
        host[...] = array

    def host_array(self, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return a flat host array of zeros, from which the device copies fast."""
        return np.zeros(count, dtype)

    def copy_beside(self, source: NDArray[Any], target: NDArray[Any]) -> None:
        """Copy between arrays of host and device on a separate stream, and wait for the copy. Any
        thread may call it, also outside of `scope`; no enqueued work may use the arrays.
        """
        target[...] = source

    def flush(self) -> None:
        """Upload host arrays that were written to, for operations on other views of the memory."""

    @property
    def free_memory(self) -> int:
        """Bytes that can still be allocated, as far as the system says."""
        return free_memory()

    def synchronize(self) -> None:
        """Wait until the device is idle."""

    @property
    def idle(self) -> bool:
        """True if all enqueued work is done, or can never be done."""
        return True

    @property
    def lost(self) -> str:
        """The CUDA error that has made the device and its memory unusable; empty if none."""
        return ""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.index})"
