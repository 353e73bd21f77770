"""DetachedCoordinator: the coordinator of servers that outlive a trainer.

    attach        a trainer takes the servers, when no other has them; it gets what they hold
    start         ... and fills them, if they hold nothing
    resume        ... or goes on with them
    leave_behind  it leaves what the next one needs beside the values: at each snapshot, and at the
                  end of its run, from which on what its workers push changes nothing

`caffepy server` attends to it: it asks how it goes, again and again, and in the end takes what the
servers hold.
"""

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from types import MappingProxyType
from typing import Any, NamedTuple

from caffepy.core.errors import SyncError, UsageError
from caffepy.device.blob import Array
from caffepy.parallel.parameter_server.coordinator import Coordinator
from caffepy.parallel.parameter_server.kept import Held, Kept
from caffepy.parallel.parameter_server.leases import Dealer, Lease
from caffepy.parallel.parameter_server.messages import Rule, View
from caffepy.parallel.parameter_server.ranges import KeyRange
from caffepy.parallel.parameter_server.server_calls import ByRange

PROMISE = 60.0
"""Seconds that a trainer which has attached may take until its first worker joins."""

ABSENT = 5.0
"""Seconds without a question after which nobody attends to the servers."""

LOOK = 0.05
"""Seconds between two looks whether the last trainer has gone."""


class Entrusted(NamedTuple):
    """State that servers keep for a coordinator: see `Coordinator.start`; `Kept`; the trainer."""

    begin: object
    kept: Kept | None = None
    trainer: str = ""


@dataclass(frozen=True)
class Status:
    """State of servers that outlive a trainer.

    trainer, keeper: who trains, and who attends to them; "" if nobody does.
    servers, wanted, copies: servers that live, that should, and copies of each range.
    members: workers.
    clock, iteration: those at which the run began or, if nobody trains, ended; None if the servers
        hold nothing yet.
    stopping: they will end.
    lost: why they cannot go on.
    """

    trainer: str
    keeper: str
    servers: tuple[str, ...]
    wanted: int
    copies: int
    members: tuple[int, ...]
    clock: int
    iteration: int | None
    every: int
    stopping: bool
    lost: str


class DetachedCoordinator(Coordinator):
    """See the head of this file."""

    stays = True
    _state: Entrusted

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._state = Entrusted(None)
        self._promised = -inf  # when a trainer that has attached must have joined
        self._heard = -inf  # when worker 0 was heard of
        self._keeper, self._attended = "", -inf
        self._stopping = self._ending = False
        self._watching: asyncio.Future[None] | None = None

    # what trainers call

    async def attach(self, trainer: str) -> Held | None:
        """Give the servers to a trainer; return what they hold, None if nothing yet. UsageError
        while another has them; one that has died has them until its workers are left out.
        """
        since = time.monotonic()
        while trainer != self._state.trainer and (self._state.trainer or self.view.members):
            if self._heard > since or (0 not in self.view.members and since < self._promised):
                raise UsageError(
                    f"these servers have a trainer already, {self._state.trainer}: wait until it "
                    "has ended, or start others under another name"
                )
            await self._check()
            await asyncio.sleep(LOOK)
        await self._check()
        self._started.clear()  # of workers, which begin after the first
        self._state = self._state._replace(trainer=trainer)
        self._promised = time.monotonic() + PROMISE
        return await self.held()

    async def start(
        self,
        ranges: Sequence[KeyRange],
        values: Sequence[Array],
        rule: Rule,
        state: object = None,
        update_states: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    ) -> None:
        """Implement `Coordinator.start`; `state` is an `Entrusted`."""
        self._ended = False
        await super().start(ranges, values, rule, state, update_states)

    async def resume(self, state: Entrusted) -> None:
        """Begin another run with the values that the servers hold, whose batches count anew; worker
        0 calls it.
        """
        self._ended, self._dealer = False, Dealer()
        old = self.view
        self.view = replace(
            old, left={}, of_left=0, run=old.run + 1, clock=self._reached(), ended=False
        )
        await self._entrust(state)
        await self._change()
        self._started.set()

    async def leave_behind(self, kept: Kept, ends: bool) -> None:
        """Keep this for the next trainer; if the run `ends`, so that what its workers still push
        changes nothing.
        """
        if ends:
            self._ending = True
            try:
                await self._change()
            finally:
                self._ending = False
            kept = replace(kept, clock=self.view.clock)
        await self._entrust(self._state._replace(kept=kept))

    async def join(self, worker: int, share: int) -> tuple[View, object]:
        """Implement `Coordinator.join`."""
        view, _ = await super().join(worker, share)
        if worker == 0:
            self._heard, self._promised = time.monotonic(), -inf
        return view, self._state.begin

    async def leave(self, worker: int) -> None:
        """Implement `Coordinator.leave`; with worker 0 its trainer leaves."""
        await super().leave(worker)
        if worker == 0:
            await self.release(self._state.trainer)

    async def release(self, trainer: str) -> None:
        """Note that a trainer has gone."""
        if trainer == self._state.trainer:
            self._state, self._promised = self._state._replace(trainer=""), -inf

    async def beat(
        self, worker: int, share: int, leases: Mapping[int, Lease]
    ) -> tuple[bool, int, tuple[int, int]]:
        """Implement `Coordinator.beat`; the run of worker 0 ends with the servers, too."""
        if worker == 0:
            self._heard = time.monotonic()
        ended, epoch, request = await super().beat(worker, share, leases)
        return ended or (worker == 0 and self._stopping), epoch, request

    # what `caffepy server` calls

    async def attend(self, keeper: str) -> Status:
        """Look after servers and workers from now on for this keeper; UsageError if there is
        another one. One that has died has them for ABSENT seconds more.
        """
        since = self._attended
        while (present := self._present()) not in ("", keeper):
            if self._attended > since:
                raise UsageError(
                    f"these servers run already, by {present}: train with them, end them with "
                    "--stop, or give another name"
                )
            await asyncio.sleep(LOOK)
        if present != keeper:  # the one before may have failed to end the servers
            self._stopping = False
        self._keeper, self._attended = keeper, time.monotonic()
        if self._watching is None:
            self._watching = asyncio.ensure_future(self.watch())
        return await self.status()

    async def status(self) -> Status:
        """Return how it goes."""
        clock, kept = self._reached(), self._state.kept
        return Status(
            self._state.trainer,
            self._present(),
            self.view.servers,
            self._wanted,
            self._copies,
            tuple(sorted(self.view.members.keys() & self._beats.keys())),
            clock,
            kept.iteration(clock) if kept else None,
            kept.every if kept else 1,
            self._stopping,
            str(self.lost or ""),
        )

    async def stop(self) -> None:
        """Ask who trains to stop, and who attends to finish."""
        self._stopping = True

    async def refuse(self, reason: str) -> None:
        """Count no more pushes; the trainer gets this as an error."""
        async with self._changing:
            await self._servers.freeze(self.view.servers)
            self.lost = SyncError(reason)
            self.view = replace(self.view, epoch=self.view.epoch + 1)  # beats tell it

    # inside

    def _present(self) -> str:
        return self._keeper if time.monotonic() - self._attended < ABSENT else ""

    async def _check(self) -> None:
        if self._stopping:
            raise UsageError("these servers are being stopped")
        if self.lost:
            raise self.lost

    def _reached(self) -> int:
        """Return the clock at which a trainer begins now."""
        left = () if self.view.ended else self.view.left.values()
        return max(left, default=self.view.clock)

    async def held(self) -> Held | None:
        """Return what the servers hold, None if nothing yet."""
        kept = self._state.kept
        if kept is None or not self.view.epoch:
            return None
        cut = await self.cut()
        clock = self._of_all(() if self.view.ended else cut.clocks.values())
        return Held(kept, cut, self.view.ranges, self.view.rule, clock)

    def _of_all(self, clocks: Collection[int]) -> int:
        """Return the clock of the run that has these clocks of workers: with slack 0 pushes count
        when all have pushed.
        """
        return (max if self.view.rule.slack else min)(clocks, default=self._reached())

    def _next(
        self,
        servers: Sequence[str],
        held: Mapping[str, ByRange],
        joining: int | None,
        leaving: set[int],
    ) -> View:
        view = super()._next(servers, held, joining, leaving)
        if self.view.ended:
            return replace(view, of_left=self.view.of_left)
        if not self._ending:
            return view
        marks = {worker: max(clocks) for worker, clocks in self._clocks(held).items()}
        clock, batches = self._of_all(marks.values()), self._batches(marks)
        return replace(view, ended=True, clock=clock, of_left=batches)

    def _batches(self, marks: Mapping[int, int]) -> int:
        return self.view.of_left if self.view.ended else super()._batches(marks)

    async def _entrust(self, state: Entrusted) -> None:
        self._state = state
        await self._servers.each(self.view.servers, "keep", state)

    async def recover(self) -> None:
        """Implement `Coordinator.recover`."""
        await super().recover()
        self._watching = self._tasks[0]
        if self.view.epoch and 0 not in self.view.members:
            await self.release(self._state.trainer)
