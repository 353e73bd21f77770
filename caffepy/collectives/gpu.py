"""Synchronization of GPUs by schedules: one kernel a GPU that works in peer memory, or copies
through the host for GPUs that do not reach each other.
"""

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import groupby
from typing import Any

import numpy as np

from caffepy import ops
from caffepy.collectives import peers
from caffepy.collectives.rank_group import RankGroup
from caffepy.collectives.schedule import (
    Operation,
    Schedule,
    adding,
    copying,
    part,
    partners,
    totals,
)
from caffepy.collectives.synchronizer import FlatParams, Synchronizer
from caffepy.device.gpus import import_cupy

log = logging.getLogger(__name__)

PIECE = 1 << 20
"""Elements of a piece of a copy through the host."""


class ScheduleSync(Synchronizer):
    """Synchronizer that runs a schedule on GPUs.

    With `root_updates` only the root updates its parameters, as in Caffe. Levels with steps between
    GPUs that do not reach each other's memory go through the host and cannot be captured.
    """

    def __init__(
        self,
        group: RankGroup,
        rank: int,
        all_gather: peers.Gather,
        flats: FlatParams,
        schedule: Schedule,
        root_updates: bool = False,
    ) -> None:
        super().__init__(group, rank)
        self.all_gather = all_gather
        self.device: Any = flats.device
        self.root_updates, self.updates = root_updates, rank == 0 or not root_updates
        pairs = {(s.source, s.destination) for level in schedule for s in level if s.staged}
        self.capturable = not pairs
        if pairs and rank == 0:
            named = ", ".join(f"{a} to {b}" for a, b in sorted(pairs))
            log.info("These steps go through the host: %s", named)
        self._flag = AbortFlag()
        self.abort_flag = self._flag.address
        group.on_abort(self._flag.set)
        self._warm = False  # gradients were reduced, so that an iteration has loaded its kernels
        self._data, self._diff = flats.data, flats.diff
        devices = all_gather(self.device.index)
        peers.enable(self.device.index, [devices[other] for other in partners(schedule, rank)])
        with flats.device.scope():
            self._down = self._executors(self._data, copying(schedule)) if root_updates else []
            self._up = self._executors(self._diff, adding(schedule) if root_updates else schedule)

    def _executors(self, flat: Any, schedule: Schedule) -> "list[_Peers | _Staged]":
        """An executor for each run of levels that go through the host, or do not."""
        complete, first, found = totals(schedule, self.size), 0, []
        for staged, group in groupby(schedule, lambda level: any(step.staged for step in level)):
            levels = tuple(group)
            done = {(number - first, rank) for number, rank in complete}
            found.append((_Staged if staged else _Peers)(self, flat, levels, done))
            first += len(levels)
        return found

    def on_start(self) -> None:
        if self._down:
            self._run(self._down, self._data.size)

    def on_gradients_ready(self) -> None:
        self.reduce(self._diff.size)

    def reduce(self, count: int) -> None:
        self._run(self._up, count)
        self._warm = True

    def _run(self, parts: "Sequence[_Peers | _Staged]", count: int) -> None:
        """Run; between barriers until the first iteration has loaded its kernels.

        Loading one blocks while the GPU waits for another rank, which may wait to load its own
        before it comes here: one rank loads at a time.
        """
        with (
            nullcontext()
            if self._warm
            else self.group.synchronized(self.rank, "schedule", self.device.stream.synchronize)
        ):
            for executor in parts:
                executor.run(count)


class AbortFlag:
    """An int in pinned host memory, which kernels poll while they wait for other ranks."""

    def __init__(self) -> None:
        self._page = import_cupy().cuda.alloc_pinned_memory(np.dtype(np.int32).itemsize)
        self.address = int(self._page.ptr)
        self._value = np.frombuffer(self._page, np.int32, 1)
        self._value[0] = 0

    def set(self) -> None:
        """End the waits of all kernels that poll it."""
        self._value[0] = 1


class _Peers:
    """Levels whose steps are all between GPUs that reach each other's memory: one kernel launch.

    `complete` are the (level, rank) where the last buffer is added.
    """

    def __init__(
        self, sync: ScheduleSync, flat: Any, levels: Schedule, complete: set[tuple[int, int]]
    ) -> None:
        from caffepy.ops.cuda.schedule import ADD, COPY, ScheduleRun, pointers

        codes = {Operation.ADD: ADD, Operation.COPY: COPY}
        parts = [part(levels, rank) for rank in range(sync.size)]
        mine, last = parts[sync.rank]
        steps = [
            (a.level, codes[a.operation], a.source, a.waits, (a.level - 1, sync.rank) in complete)
            for a in mine
        ]
        most = max(len(each.actions) for each in parts)
        self._kernel = ScheduleRun(sync.rank, len(levels), steps, last, most, sync.abort_flag)
        sync.device.synchronize()
        self._progress: Sequence[Any] = sync.all_gather(self._kernel.progress)
        self._flats: Sequence[Any] = sync.all_gather(flat)
        self._kernel.connect(self._progress)
        self._pointers = pointers(self._flats)
        self._scale = 1 / sync.size

    def run(self, count: int) -> None:
        self._kernel.run(self._pointers, count, self._scale)


class _Staged:
    """Levels whose steps go through the host.

    In a level each source copies its array to pinned memory piece by piece and records an event
    after each; barrier; each destination waits for the event of a piece, copies it to the device
    and adds it, then records an event of its own; barrier; each source waits for that event before
    it changes its array again.
    """

    def __init__(
        self, sync: ScheduleSync, flat: Any, levels: Schedule, complete: set[tuple[int, int]]
    ) -> None:
        self._cuda = cuda = import_cupy().cuda
        self._group, self._rank, self._scale = sync.group, sync.rank, np.float32(1 / sync.size)
        self._stream, self._flat = sync.device.stream, flat
        self._levels, self._complete = levels, complete
        self._add = ops.backend(sync.device).add
        host = None
        if any(step.source == sync.rank for level in levels for step in level):
            host = np.frombuffer(cuda.alloc_pinned_memory(flat.nbytes), flat.dtype, flat.size)
        self._hosts: Sequence[Any] = sync.all_gather(host)
        self._pieces = [slice(start, start + PIECE) for start in range(0, flat.size, PIECE)]
        events = [cuda.Event(disable_timing=True) for _ in self._pieces]
        self._sent: Sequence[Any] = sync.all_gather(events)  # of all ranks
        self._taken: Sequence[Any] = sync.all_gather(cuda.Event(disable_timing=True))
        self._buffer = import_cupy().empty(min(PIECE, flat.size), flat.dtype)

    def run(self, count: int) -> None:
        pieces = [slice(p.start, min(p.stop, count)) for p in self._pieces if p.start < count]
        for number, level in enumerate(self._levels):
            if any(step.source == self._rank for step in level):
                self._send(pieces)
            self._group.barrier(self._rank, "sent")
            for step in level:
                if step.destination == self._rank:
                    complete = (number, self._rank) in self._complete
                    self._take(step.operation, step.source, pieces, complete)
            self._group.barrier(self._rank, "taken")
            for step in level:
                if step.source == self._rank:
                    self._stream.wait_event(self._taken[step.destination])

    def _send(self, pieces: Sequence[slice]) -> None:
        runtime = self._cuda.runtime
        for piece, event in zip(pieces, self._sent[self._rank], strict=False):
            host, mine = self._hosts[self._rank][piece].ctypes.data, self._flat[piece]
            how = runtime.memcpyDeviceToHost
            runtime.memcpyAsync(host, mine.data.ptr, mine.nbytes, how, self._stream.ptr)
            event.record(self._stream)

    def _take(
        self, operation: Operation, source: int, pieces: Sequence[slice], complete: bool
    ) -> None:
        runtime = self._cuda.runtime
        for piece, event in zip(pieces, self._sent[source], strict=False):
            self._stream.wait_event(event)
            mine, theirs = self._flat[piece], self._hosts[source][piece].ctypes.data
            to = mine if operation is Operation.COPY else self._buffer[: mine.size]
            how = runtime.memcpyHostToDevice
            runtime.memcpyAsync(to.data.ptr, theirs, mine.nbytes, how, self._stream.ptr)
            if operation is Operation.ADD:
                self._add(to, mine)
                if complete:
                    mine *= self._scale
        self._taken[self._rank].record(self._stream)
