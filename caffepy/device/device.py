"""Device: where arrays live and arithmetic runs, with the random state that belongs to it."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from caffepy.core.errors import CaffeError, DeviceError
from caffepy.device.gpus import (
    check_gpu,
    errors_told,
    gpu_properties,
    import_cupy,
    last_line,
)

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


class RandomNumbers:
    """A Mersenne twister, as Caffe's; `state` costs nothing while nobody asked for numbers."""

    def __init__(self, seed: int | None) -> None:
        self._generator = np.random.Generator(np.random.MT19937(seed))
        self._state: dict[str, Any] | None = None

    @property
    def generator(self) -> np.random.Generator:
        """To be drawn from now, not to be kept."""
        self._state = None
        return self._generator

    @property
    def state(self) -> dict[str, Any]:
        """Where the twister stands."""
        if self._state is None:
            self._state = dict(self._generator.bit_generator.state)
        return self._state

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        self.generator.bit_generator.state = state


class Problem:
    """What operations found wrong with data: `found` is 0, then 1 and the first value that could
    not be used.
    """

    def __init__(self, found: NDArray[Any], error: Callable[[float], CaffeError]) -> None:
        self.found = found
        self.error = error

    def check(self) -> None:
        """Raise the error if there is one to be seen by now: a GPU's work has only begun, see
        `Device.look`.
        """
        if self.found[0]:
            self.found[0] = 0
            raise self.error(float(self.found[1]))


class Device:
    """The CPU as a solver sees it: kind "cpu", random generator. CudaDevice is the same for a GPU.

    Every solver has its own Device, hence its own random numbers; `seed` None takes one from the
    system.
    """

    kind = "cpu"
    index = 0

    def __init__(self, seed: int | None = None) -> None:
        self.random = RandomNumbers(seed)

    @property
    def rng(self) -> np.random.Generator:
        """The random generator of setting up and of whatever is drawn on the host; take it anew for
        each use.
        """
        return self.random.generator

    def seed(self, seed: int | None) -> None:
        """Start the random generator anew."""
        self.random.state = dict(np.random.MT19937(seed).state)

    def draw_seed(self) -> int:
        """One 32-bit number that starts a generator of its own: of a transformer, a dropout mask, a
        shuffle.
        """
        return int(self.rng.integers(1 << 32))

    @property
    def tick(self) -> Any:
        """On a GPU an int64 array without axes that counts passes, so that each draws numbers of
        its own; else None.
        """
        return None

    def tick_on(self) -> None:
        """Count a pass that a net makes outside a solver."""

    @property
    def ticks(self) -> int:
        """How far `tick` is counted by the passes that this thread asked for."""
        return 0

    @ticks.setter
    def ticks(self, ticks: int) -> None:
        pass

    def problem(self, error: Callable[[float], CaffeError]) -> Problem:
        """Room for operations to note what is wrong with their data; `error` makes an error of the
        value.
        """
        return Problem(np.zeros(2), error)

    def look(self) -> None:
        """Wait until the device's work is done and raise the error of the first problem that it
        met.
        """

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

    def side_stream(
        self, lane: str = "layer", after: str | None = None
    ) -> "AbstractContextManager[object]":
        """A block whose operations may run beside those that follow it, up to `join`; one lane runs
        in order.

        They wait for the lane `after`, if one is given. What they read must stay as it is until
        they are joined, and what they write belongs to them.
        """
        return nullcontext()

    def join(self, lane: str = "layer") -> None:
        """Let what follows wait for the blocks that run aside in this lane."""

    def on_device(self, array: NDArray[Any]) -> NDArray[Any]:
        """An array of the device with the values of a host array: itself, or a copy on a GPU."""
        return array

    def synchronize(self) -> None:
        """Return when all work given to the device is done."""

    @property
    def idle(self) -> bool:
        """Whether all work given to the device is done, or can be done no more."""
        return True

    @property
    def lost(self) -> str:
        """The error after which the device does nothing more, and its memory cannot be read; empty
        if all is well.
        """
        return ""

    def flush(self) -> None:
        """Bring to the device what was written to host arrays of blobs, before operations use other
        views of those.
        """

    def upload(self, host: NDArray[Any], array: NDArray[Any]) -> None:
        """Copy a host array into an array of this device of the same shape and type."""
        array[...] = host

    def on_host(self, array: NDArray[Any]) -> NDArray[Any]:
        """The array as numpy's: itself, or a copy of a GPU's."""
        return array

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.index})"


MOST_PROBLEMS = 1024

NOT_READY, OF_CAPTURES = 600, range(900, 1000)
"""cudaError of a stream that is not done, and those that end no more than a recording."""

URGENT = -5
"""The priority of streams whose work others wait for, or the nearest that there is; recorded work
keeps it.
"""


_idle_streams: dict[tuple[int, str], list[Any]] = {}
"""By GPU and lane: handles of libraries and their memory belong to a stream, and last as long as
the process.
"""

_layer_streams: set[int] = set()


def is_layer_lane(stream: int) -> bool:
    """Whether the stream with this handle is for gradients that layers compute aside."""
    return stream in _layer_streams


def _give_back(streams: Sequence[tuple[tuple[int, str], Any]]) -> None:
    for kind, stream in streams:
        _idle_streams[kind].append(stream)


class CudaDevice(Device):
    """GPU `index`, with a stream of its own on which all its work runs in order.

    DeviceError says what to install or to change if there is no CuPy, no driver or no such GPU.
    """

    kind = "cuda"

    def __init__(self, index: int = 0, seed: int | None = None) -> None:
        super().__init__(seed)
        self._host = Device()
        self._host.random = self.random
        self.index = index
        self._cupy = import_cupy()
        check_gpu(index)
        self._taken: list[tuple[tuple[int, str], Any]] = []
        self.stream = self._take_stream()
        weakref.finalize(self, _give_back, self._taken).atexit = False
        self.dirty: set[Any] = set()  # memories whose host array is newer
        self.epoch = 0  # how often a memory got another array
        self._overlaps = False
        self._lanes: dict[str, Any] = {}  # a stream each
        self._apart: set[str] = set()  # lanes that were not joined yet
        self._problems: list[_Noted] = []
        self._ticks = 0

    def _take_stream(self, lane: str = "") -> Any:
        """A stream that no other CudaDevice uses, one that another has used before for this lane if
        there is one.
        """
        kind = self.index, lane
        try:
            stream = _idle_streams.setdefault(kind, []).pop()
        except IndexError:
            priority = URGENT if lane in ("", "sync", "phase timer") else 0  # 0 is the lowest
            with self._cupy.cuda.Device(self.index):
                stream = self._cupy.cuda.Stream(non_blocking=True, priority=priority)
            if lane == "layer":
                _layer_streams.add(stream.ptr)
        self._taken.append((kind, stream))
        return stream

    @property
    def name(self) -> str:
        """What NVIDIA calls it."""
        return str(gpu_properties(self.index)["name"])

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
        with errors_told(self._cupy, self.index), self._cupy.cuda.Device(self.index), self.stream:
            yield

    def scope(self) -> "AbstractContextManager[object]":
        """The context in which the calling thread's array operations run on this device's stream."""
        return self._scope()

    def synchronize(self) -> None:
        """Return when all work given to the device is done."""
        for stream in (self.stream, *self._lanes.values()):
            stream.synchronize()

    @property
    def idle(self) -> bool:
        """Whether all work given to the device is done, or can be done no more."""
        return all(status != NOT_READY for status in self._statuses())

    @property
    def lost(self) -> str:
        """The error after which the device does nothing more, and its memory cannot be read; empty
        if all is well.
        """
        failed = (
            status for status in self._statuses() if status not in (0, NOT_READY, *OF_CAPTURES)
        )
        return next(
            (str(self._cupy.cuda.runtime.CUDARuntimeError(status)) for status in failed), ""
        )

    def _statuses(self) -> Iterator[int]:
        for stream in (self.stream, *tuple(self._lanes.values())):
            yield 0 if stream.done else int(self._cupy.cuda.runtime.streamQuery(stream.ptr))

    @cached_property
    def tick(self) -> Any:
        """An int64 array without axes that counts passes, so that each draws numbers of its own."""
        return self.zeros(1, np.dtype(np.int64)).reshape(())

    @property
    def ticks(self) -> int:
        """How far `tick` is counted by the passes that this thread asked for."""
        return self._ticks

    @ticks.setter
    def ticks(self, ticks: int) -> None:
        self._ticks = ticks
        self.upload(np.array(ticks, np.int64), self.tick)

    def counted(self, passes: int) -> None:
        """Operations were given to the device that count so many passes."""
        self._ticks += passes

    def tick_on(self) -> None:
        """Count a pass that a net makes outside a solver."""
        self.ticks += 1

    @cached_property
    def problems(self) -> Any:
        """What all operations noted: an array (MOST_PROBLEMS, 2), of which `problem_count` rows are
        in use.
        """
        return self.zeros(2 * MOST_PROBLEMS, np.dtype(np.float64)).reshape(MOST_PROBLEMS, 2)

    @property
    def problem_count(self) -> int:
        """How many rows of `problems` are in use."""
        return len(self._problems)

    def problem(self, error: Callable[[float], CaffeError]) -> Problem:
        """Room for operations to note what is wrong with their data; `error` makes an error of the
        value.
        """
        if len(self._problems) == MOST_PROBLEMS:
            raise DeviceError(
                f"nets of one device have {MOST_PROBLEMS} layers that read labels at most"
            )
        self._problems.append(_Noted(self.problems[len(self._problems)], error))
        return self._problems[-1]

    def look(self) -> None:
        """Wait until the device's work is done and raise the error of the first problem that it
        met.
        """
        if not self._problems:
            return
        noted = self.on_host(self.problems[: len(self._problems)])
        for problem, (found, value) in zip(self._problems, noted, strict=True):
            if found:
                with self.scope():
                    self.problems.fill(0)
                raise problem.error(float(value))

    def flush(self) -> None:
        """Bring to the device what was written to host arrays of blobs, before operations use other
        views of those.
        """
        if self.dirty:
            with self.scope():
                for memory in tuple(self.dirty):
                    memory.flush()

    @contextmanager
    def overlapping(self) -> Iterator[None]:
        """In this context `aside` has an effect; all lanes are joined at its end."""
        self._overlaps = True
        try:
            yield
            for lane in tuple(self._apart):
                self.join(lane)
        finally:
            self._overlaps = False
            self._apart.clear()

    def side_stream(
        self, lane: str = "layer", after: str | None = None
    ) -> "AbstractContextManager[object]":
        """A block whose operations may run beside those that follow it, up to `join`; one lane runs
        in order.

        They wait for the lane `after`, if one is given.
        """
        return self._aside(lane, after) if self._overlaps else nullcontext()

    @contextmanager
    def _aside(self, lane: str, after: str | None) -> Iterator[None]:
        stream = self._lanes.get(lane)
        if stream is None:
            stream = self._lanes[lane] = self._take_stream(lane)
        self._wait(stream, self.stream)
        if after in self._apart:
            self._wait(stream, self._lanes[after])
        self._apart.add(lane)
        with stream:
            yield

    def join(self, lane: str = "layer") -> None:
        """Let what follows wait for the blocks that run aside in this lane."""
        if lane in self._apart:
            self._apart.discard(lane)
            self._wait(self.stream, self._lanes[lane])

    def _wait(self, stream: Any, other: Any) -> None:
        event = self._cupy.cuda.Event(disable_timing=True)
        event.record(other)
        stream.wait_event(event)

    def capture(self, work: Callable[[], None]) -> "CudaGraph":
        """Record the operations of `work`, which are not carried out; DeviceError if they cannot be
        recorded.

        Memory that it takes for a while stays reserved for the recording.
        """
        cuda = self._cupy.cuda
        pool = cuda.MemoryPool()
        with self.scope(), cuda.using_allocator(pool.malloc):
            self.stream.begin_capture()
            try:
                with self.overlapping():
                    work()
            except BaseException as error:
                with suppress(cuda.runtime.CUDARuntimeError):
                    self.stream.end_capture()
                if isinstance(error, Exception):
                    raise DeviceError(f"it cannot be recorded: {last_line(error)}") from error
                raise
            try:
                graph = self.stream.end_capture()
                graph.upload(self.stream)
            except cuda.runtime.CUDARuntimeError as error:
                raise DeviceError(f"it cannot be recorded: {last_line(error)}") from error
        return CudaGraph(graph, self.stream, pool)

    def on_host(self, array: Any) -> NDArray[Any]:
        """A copy of a device array as numpy's."""
        with self.scope():
            copy: NDArray[Any] = self._cupy.asnumpy(array)
        return copy

    def on_device(self, array: NDArray[Any]) -> NDArray[Any]:
        """A copy of a host array on the GPU."""
        with self.scope():
            copy: NDArray[Any] = self._cupy.asarray(array)
        return copy

    def zeros(self, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """A flat device array of zeros."""
        with self.scope():
            array: NDArray[Any] = self._cupy.zeros(count, dtype)
        return array

    def upload(self, host: NDArray[Any], array: Any) -> None:
        """Copy a host array into a device array of the same shape and type."""
        with self.scope():
            array.set(host)

    def download(self, array: Any, host: NDArray[Any]) -> None:
        """Copy a device array into a host array of the same size; returns when it is there."""
        with self.scope():
            array.get(out=host, blocking=True)


class _Noted(Problem):
    """A problem that is noted on a GPU."""

    def check(self) -> None:
        """The work that may find it has only begun: `look` tells."""


class CudaGraph:
    """Operations of a stream that were recorded once, with the memory that they took for a while."""

    def __init__(self, graph: Any, stream: Any, pool: Any) -> None:
        self._graph = graph
        self._stream = stream
        self._pool = pool

    def replay(self) -> None:
        """Give all of them to the stream again."""
        self._graph.launch(self._stream)

    def close(self) -> None:
        """Give back what it holds, whoever still refers to it; there is nothing to replay then."""
        self._graph = self._pool = None
