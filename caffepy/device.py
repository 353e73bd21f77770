"""Device: where arrays live and arithmetic runs, with the random state that belongs to it."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from caffepy.errors import DeviceError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

INSTALL = "pip install 'caffepy[cuda13]' (or caffepy[cuda12] for a driver of CUDA 12)"


class Device:
    """The CPU as a solver sees it: kind "cpu", random generator. CudaDevice is the same for a GPU.

    Every solver has its own Device, hence its own random numbers; `seed` None takes one from the system.
    """

    kind = "cpu"
    index = 0

    def __init__(self, seed: int | None = None) -> None:
        self.rng = np.random.Generator(np.random.MT19937(seed))

    def seed(self, seed: int | None) -> None:
        """Start the random generator anew (Mersenne twister, as Caffe's)."""
        self.rng.bit_generator.state = np.random.MT19937(seed).state

    def draw_seed(self) -> int:
        """One 32-bit number that starts a generator of its own: of a transformer, a dropout mask, a shuffle."""
        return int(self.rng.integers(1 << 32))

    @property
    def store(self) -> "CudaDevice | None":
        """Where blobs take their memory from; None for the host's."""
        return None

    @property
    def host(self) -> "Device":
        """The CPU with this device's random numbers, for layers that compute on the host."""
        return self

    def scope(self) -> "AbstractContextManager[object]":
        """The context in which the calling thread's array operations run on this device."""
        return nullcontext()

    def synchronize(self) -> None:
        """Return when all work given to the device is done."""

    def on_host(self, array: NDArray[Any]) -> NDArray[Any]:
        """The array as numpy's: itself, or a copy of a GPU's."""
        return array

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.index})"


class CudaDevice(Device):
    """GPU `index`, with a stream of its own on which all its work runs in order.

    DeviceError says what to install or to change if there is no CuPy, no driver or no such GPU.
    """

    kind = "cuda"

    def __init__(self, index: int = 0, seed: int | None = None) -> None:
        super().__init__(seed)
        self._host = Device()
        self._host.rng = self.rng
        self.index = index
        self._cupy = import_cupy()
        count = count_gpus()
        if not 0 <= index < count:
            raise DeviceError(f"there is no GPU {index}: this machine has {count}, numbered from 0")
        with self._cupy.cuda.Device(index):
            self.stream = self._cupy.cuda.Stream(non_blocking=True)

    @property
    def store(self) -> "CudaDevice":
        """The GPU itself."""
        return self

    @property
    def host(self) -> Device:
        """The CPU with this device's random numbers."""
        return self._host

    @contextmanager
    def _scope(self) -> Iterator[None]:
        with self._cupy.cuda.Device(self.index), self.stream, out_of_memory_told(self._cupy):
            yield

    def scope(self) -> "AbstractContextManager[object]":
        """The context in which the calling thread's array operations run on this device's stream."""
        return self._scope()

    def synchronize(self) -> None:
        """Return when all work given to the stream is done."""
        self.stream.synchronize()

    def on_host(self, array: Any) -> NDArray[Any]:
        """A copy of a device array as numpy's."""
        with self.scope():
            copy: NDArray[Any] = self._cupy.asnumpy(array)
        return copy

    def zeros(self, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """A flat device array of zeros."""
        with self.scope():
            array: NDArray[Any] = self._cupy.zeros(count, dtype)
        return array

    def upload(self, host: NDArray[Any], array: Any) -> None:
        """Copy a host array into a device array of the same size."""
        with self.scope():
            array.set(host)

    def download(self, array: Any, host: NDArray[Any]) -> None:
        """Copy a device array into a host array of the same size; returns when it is there."""
        with self.scope():
            array.get(out=host, blocking=True)


def import_cupy() -> Any:
    """CuPy; DeviceError that says what to install if it cannot be imported."""
    try:
        import cupy
    except ImportError as error:
        raise DeviceError(f"a GPU needs CuPy: {INSTALL} ({error})") from None
    return cupy


def count_gpus() -> int:
    """How many GPUs CUDA sees; DeviceError that says what is wrong if it cannot be asked."""
    cupy = import_cupy()
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise DeviceError(f"CUDA finds no GPU ({error}); is an NVIDIA driver installed?") from None


@contextmanager
def out_of_memory_told(cupy: Any) -> Iterator[None]:
    """Turn CuPy's out-of-memory error into a DeviceError that says what helps."""
    try:
        yield
    except cupy.cuda.memory.OutOfMemoryError as error:
        raise DeviceError(f"the GPU's memory is full ({error}); a smaller batch_size, with iter_size, helps") from None
