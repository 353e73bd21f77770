"""Synchronization of GPUs by schedules: one kernel a GPU that works in peer memory, or copies
through the host for GPUs that do not reach each other.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import groupby
from typing import Any

import numpy as np

from caffepy import ops
from caffepy.collectives.rank_group import PATIENCE, RankGroup
from caffepy.collectives.schedule import Operation, Schedule, adding, copying, part, totals
from caffepy.collectives.synchronizer import FlatParams
from caffepy.device.cuda import CudaDevice
from caffepy.device.gpus import import_cupy

log = logging.getLogger(__name__)

PIECE = 1 << 20
"""Elements of a piece of a copy through the host."""

Gather = Callable[[Any], list[Any]]
"""All-gather of Python objects, called in each rank's thread."""


class ScheduleSync:
    """Synchronizer that runs a schedule on GPUs.

    With `root_updates` only the root updates its parameters, as in Caffe. Levels with steps between
    GPUs that do not reach each other's memory go through the host and cannot be captured.
    """

    def __init__(
        self,
        group: RankGroup,
        rank: int,
        all_gather: Gather,
        flats: FlatParams,
        schedule: Schedule,
        root_updates: bool = False,
    ) -> None:
        self.group, self.rank, self.size = group, rank, group.size
        self._device: Any = flats.device
        self.updates = rank == 0 or not root_updates
        staged = sorted(
            {(s.source, s.destination) for level in schedule for s in level if s.staged}
        )
        self.capturable = not staged
        if staged and rank == 0:
            log.info(
                "These steps go through the host: %s", ", ".join(f"{a} to {b}" for a, b in staged)
            )
        self._flag = AbortFlag()
        group.on_abort(self._flag.set)
        self._used: set[str] = set()  # directions that ran before
        self._down: _Execution | None = None
        with flats.device.scope():
            if root_updates:
                self._down = _Execution(
                    self, all_gather, flats.device, flats.data, copying(schedule)
                )
                schedule = adding(schedule)
            self._up = _Execution(self, all_gather, flats.device, flats.diff, schedule)

    @property
    def abort_flag(self) -> int:
        """Host address of the abort flag, nonzero when the group has stopped."""
        return self._flag.address

    def on_start(self) -> None:
        """Get the root's parameters, if only the root updates them."""
        if self._down:
            self._run("down", self._down, self._down.size)

    def after_backward(self, layer: int) -> None:
        """Do nothing: all gradients are summed at once."""

    def on_gradients_ready(self) -> None:
        """Make the diff the mean of all ranks', in the ranks that update parameters."""
        self.reduce(self._up.size)

    def reduce(self, count: int) -> None:
        """Make the first `count` elements of the diff the mean of all ranks'."""
        self._run("up", self._up, count)

    def close(self, patience: float = PATIENCE) -> None:
        """Do nothing: there is no communicator."""

    def _run(self, direction: str, execution: "_Execution", count: int) -> None:
        """Run; the first call in each direction is bracketed by barriers, since loading a kernel
        may block on a waiting GPU.
        """
        first = direction not in self._used
        self._used.add(direction)
        with (
            self.group.synchronized(self.rank, "schedule", self._device.stream.synchronize)
            if first
            else nullcontext()
        ):
            execution.run(count)


class AbortFlag:
    """An int in pinned host memory that kernels poll while they wait for other ranks."""

    def __init__(self) -> None:
        self._page = import_cupy().cuda.alloc_pinned_memory(np.dtype(np.int32).itemsize)
        self._value = np.frombuffer(self._page, np.int32, 1)
        self._value[0] = 0

    @property
    def address(self) -> int:
        """Its address, the same for every device."""
        return int(self._page.ptr)

    def set(self) -> None:
        """End the waits of all kernels that poll it."""
        self._value[0] = 1


class _Execution:
    """One rank's part of a schedule on one flat array: a run for consecutive levels that go through
    the host, or do not.
    """

    def __init__(
        self, sync: ScheduleSync, all_gather: Gather, device: Any, flat: Any, schedule: Schedule
    ) -> None:
        self.size = flat.size
        complete = totals(schedule, sync.size)
        self._runs: list[_Peers | _Staged] = []
        first = 0
        for staged, found in groupby(schedule, lambda level: any(step.staged for step in level)):
            levels = tuple(found)
            done = {(number - first, rank) for number, rank in complete}
            kind = _Staged if staged else _Peers
            self._runs.append(kind(sync, all_gather, device, flat, levels, done))
            first += len(levels)

    def run(self, count: int) -> None:
        """Enqueue it for the first `count` elements."""
        for run in self._runs:
            run.run(count)


class _Peers:
    """Levels whose steps are all between GPUs that reach each other's memory: one kernel launch."""

    def __init__(
        self,
        sync: ScheduleSync,
        all_gather: Gather,
        device: CudaDevice,
        flat: Any,
        levels: Schedule,
        complete: set[tuple[int, int]],
    ) -> None:
        from caffepy.ops.cuda.schedule import ADD, COPY, ScheduleRun, pointers

        rank = sync.rank
        codes = {Operation.ADD: ADD, Operation.COPY: COPY}
        mine, last = part(levels, rank)
        steps = [
            (a.level, codes[a.operation], a.source, a.waits, (a.level - 1, rank) in complete)
            for a in mine
        ]
        most = max(len(part(levels, other).actions) for other in range(sync.size))
        self._run = ScheduleRun(rank, len(levels), steps, last, most, sync.abort_flag)
        device.synchronize()
        self._progress: Sequence[Any] = all_gather(self._run.progress)
        self._flats: Sequence[Any] = all_gather(flat)
        self._run.connect(self._progress)
        self._pointers = pointers(self._flats)
        self._scale = 1 / sync.size

    def run(self, count: int) -> None:
        """Launch the kernel."""
        self._run.run(self._pointers, count, self._scale)


class _Staged:
    """Levels whose steps go through the host.

    In a level each source copies its array to pinned memory piece by piece and records an event
    after each; barrier; each destination waits for the event of a piece, copies it to the device
    and adds it, then records an event of its own; barrier; each source waits for that event before
    it changes its array again.
    """

    def __init__(
        self,
        sync: ScheduleSync,
        all_gather: Gather,
        device: CudaDevice,
        flat: Any,
        levels: Schedule,
        complete: set[tuple[int, int]],
    ) -> None:
        self._cupy = import_cupy()
        self._group, self._rank, self._scale = sync.group, sync.rank, np.float32(1 / sync.size)
        self._device, self._flat, self._levels, self._complete = device, flat, levels, complete
        self._add = ops.backend(device).add
        sources = {step.source for level in levels for step in level}
        page = self._cupy.cuda.alloc_pinned_memory(flat.nbytes) if self._rank in sources else None
        host = np.frombuffer(page, flat.dtype, flat.size) if page is not None else None
        self._hosts: Sequence[Any] = all_gather(host)
        self._pieces = [slice(start, start + PIECE) for start in range(0, flat.size, PIECE)]
        self._sent: Sequence[Any] = all_gather(
            [self._event() for _ in self._pieces]
        )  # of all ranks
        self._taken: Sequence[Any] = all_gather(self._event())
        self._buffer = self._cupy.empty(min(PIECE, flat.size), flat.dtype)

    def _event(self) -> Any:
        return self._cupy.cuda.Event(disable_timing=True)

    def run(self, count: int) -> None:
        """Enqueue the copies."""
        pieces = [slice(p.start, min(p.stop, count)) for p in self._pieces if p.start < count]
        for number, level in enumerate(self._levels):
            if any(step.source == self._rank for step in level):
                self._send(pieces)
            self._group.barrier(self._rank, "sent")
            for step in level:
                if step.destination == self._rank:
                    self._take(
                        step.operation, step.source, pieces, (number, self._rank) in self._complete
                    )
            self._group.barrier(self._rank, "taken")
            for step in level:
                if step.source == self._rank:
                    self._device.stream.wait_event(self._taken[step.destination])

    def _send(self, pieces: Sequence[slice]) -> None:
        for piece, event in zip(pieces, self._sent[self._rank], strict=False):
            self._copy(self._hosts[self._rank][piece].ctypes.data, self._flat[piece], to_host=True)
            event.record(self._device.stream)

    def _take(
        self, operation: Operation, source: int, pieces: Sequence[slice], complete: bool
    ) -> None:
        for piece, event in zip(pieces, self._sent[source], strict=False):
            self._device.stream.wait_event(event)
            mine, theirs = self._flat[piece], self._hosts[source][piece].ctypes.data
            if operation is Operation.COPY:
                self._copy(theirs, mine)
                continue
            buffer = self._buffer[: mine.size]
            self._copy(theirs, buffer)
            self._add(buffer, mine)
            if complete:
                mine *= self._scale
        self._taken[self._rank].record(self._device.stream)

    def _copy(self, host: int, array: Any, to_host: bool = False) -> None:
        runtime, stream = self._cupy.cuda.runtime, self._device.stream.ptr
        if to_host:
            runtime.memcpyAsync(
                host, array.data.ptr, array.nbytes, runtime.memcpyDeviceToHost, stream
            )
        else:
            runtime.memcpyAsync(
                array.data.ptr, host, array.nbytes, runtime.memcpyHostToDevice, stream
            )
