"""Streams of a GPU: a main one, and side streams whose work may overlap that of the main one.

    main     --+-- dx2 --+-- dx1 --+--+-- dx0 ----------+-- update -->
               |         |         ^  |                 ^
    "layer"    +-- dw2 --+-- dw1 --+  |                 |
                                      |                 |
    "sync"                            +-- all-reduce ---+

`fork(name)` (going down) makes a side stream wait for what the main one was given so far, and
`wait(name)` (going up) makes the main stream, or the side stream in whose context it
is called, wait for the side stream. Both are CUDA events: the
host waits for nothing. What the main one is given between `fork` and its context is enqueued first,
but not waited for. Work of one side stream runs in order, and forks no further: a branch
computes its weight gradients itself.

| side stream | work | enqueued by |
|---|---|---|
| `layer` | weight gradients | layers, in backward |
| `branch 1` and so on | branches of a net | the net's loops |
| `update` | updates of large weights with their gradients | layers, in backward |
| `weights` | large weights in 16 bits | the solver's step |
| `sync` | all-reduce of a bucket of gradients | the NCCL synchronizer |
| `factors` | products of factors, sums of what others copied | the NCCL synchronizer |
| `control` | loss check | the solver's step |
| `phase timer` | time stamps | the phase timer |
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

NOT_READY, OF_CAPTURES = 600, range(900, 1000)
"""cudaError of a stream that is still at work, and those that only end a capture."""

BRANCH = "branch"
"""The beginning of the names of streams for branches."""

URGENT = "", "sync", "phase timer"
"""Streams whose work others wait for, beside branches; "" is the main one."""
UPDATE = "update"
"""The stream whose work nothing waits for within a step: all others come first."""

PRIORITY = -5
"""Priority of urgent streams, or the nearest that the GPU has; kernels of a graph keep it. The
lowest is 0."""

_idle_streams: dict[tuple[int, str], list[Any]] = {}
"""Streams by GPU and name, for the next device: handles and workspaces of libraries belong to a
stream, and last as long as the process."""


def _give_back(streams: Sequence[tuple[tuple[int, str], Any]]) -> None:
    for key, stream in streams:
        _idle_streams[key].append(stream)


class Streams:
    """The streams of one CudaDevice; no two devices use the same stream at a time."""

    def __init__(self, cupy: Any, gpu: int) -> None:
        self._cupy = cupy
        self._gpu = gpu
        self._taken: list[tuple[tuple[int, str], Any]] = []
        self.main = self._take("")
        self.side: dict[str, Any] = {}
        self._forked: set[str] = set()  # side streams that the main one has not waited for
        self._overlaps = False
        self.current: Any = self.main  # or the side stream in whose context the caller is
        weakref.finalize(self, _give_back, self._taken).atexit = False

    def _take(self, name: str) -> Any:
        key = self._gpu, name
        try:
            stream = _idle_streams.setdefault(key, []).pop()
        except IndexError:
            with self._cupy.cuda.Device(self._gpu):
                urgent = name in URGENT or name.startswith(BRANCH)
                priority = PRIORITY if urgent else 0 if name == UPDATE else -1
                stream = self._cupy.cuda.Stream(non_blocking=True, priority=priority)
        self._taken.append((key, stream))
        return stream

    @contextmanager
    def overlapping(self) -> Iterator[None]:
        """Enable `fork` in this context; at its end the main stream waits for all side streams."""
        self._overlaps = True
        try:
            yield
            for name in tuple(self._forked):
                self.wait(name)
        finally:
            self._overlaps = False
            self._forked.clear()

    def fork(self, name: str, *after: str) -> AbstractContextManager[None]:
        """Return the context of a side stream, which first waits for what the main one, and the
        side streams `after`, were given before this call; outside `overlapping`, or in another such
        context, operations stay where they are.
        """
        if not self._overlaps or self.current is not self.main:
            return nullcontext()
        before = [self._mark(self.main)]
        before += [self._mark(self.side[other]) for other in after if other in self._forked]
        return self._on_side(name, before)

    @contextmanager
    def _on_side(self, name: str, before: Sequence[Any]) -> Iterator[None]:
        stream = self.side.get(name)
        if stream is None:
            stream = self.side[name] = self._take(name)
        for event in before:
            stream.wait_event(event)
        self._forked.add(name)
        self.current = stream
        try:
            with stream:
                yield
        finally:
            self.current = self.main

    def wait(self, name: str) -> None:
        """Make the current stream wait for this side stream, unless the main one already has."""
        if name in self._forked:
            if self.current is self.main:
                self._forked.discard(name)
            self.current.wait_event(self._mark(self.side[name]))

    def _mark(self, stream: Any) -> Any:
        event = self._cupy.cuda.Event(disable_timing=True)
        event.record(stream)
        return event

    def synchronize(self) -> None:
        """Wait on the host until all streams are idle."""
        for stream in (self.main, *self.side.values()):
            stream.synchronize()

    def statuses(self) -> Iterator[int]:
        """The cudaError of each stream: 0 if it is idle, NOT_READY if it is at work."""
        for stream in (self.main, *tuple(self.side.values())):
            yield 0 if stream.done else int(self._cupy.cuda.runtime.streamQuery(stream.ptr))
