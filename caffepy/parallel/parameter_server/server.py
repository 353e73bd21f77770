"""Server: an actor that holds key ranges, as the primary of some and a replica of others.

A push is counted by the primary, sent to the replicas in the primary's order, and answered when
they have counted it, too: what was answered survives the death of all but one of the owners.
Otherwise the worker sends it again, to the primary of that time, and it is counted once.

Methods run on one event loop. Between two awaits nothing else happens, which is why counting and
sending to replicas stay in one order without locks.
"""

import asyncio
import os
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from caffepy.device.blob import Array
from caffepy.parallel.parameter_server.filters import Payload, decode, nbytes, pack
from caffepy.parallel.parameter_server.messages import (
    COORDINATOR,
    DeadPeerError,
    Engine,
    Push,
    RefusedError,
    Report,
    StaleViewError,
    View,
)
from caffepy.parallel.parameter_server.range_state import RangeState

PATIENCE = 20.0
"""Seconds that a replica may take for pushes before the primary reports it."""


class Server:
    """One server. A call by another epoch than its own raises StaleViewError, unless the server is
    about to get that view: it waits for it.
    """

    def __init__(self, name: str, engine: Engine) -> None:
        self.name = name
        self.view = View()
        self._engine = engine
        self._ranges: dict[int, RangeState] = {}
        self._frozen = True  # until it has a view
        self._marks: Mapping[int, int] = {}  # clocks of workers up to which a cut counts pushes
        self._changed = asyncio.Condition()
        self._state: object = None  # the coordinator's
        self._staleness, self._waits = Counter[int](), defaultdict[tuple[int, int], float](float)
        self._behind = self._received = self._sent = 0  # see Report

    # what workers call

    async def push(self, epoch: int, pushes: Sequence[Push]) -> None:
        """Count these pushes; return when all replicas have."""
        await self._thawed(epoch, pushes)
        view, copies = self.view, dict[str, list[tuple[int, Push]]]()
        for push in pushes:
            state = self._primary_state(push.range)
            self._received += nbytes(push.payload)
            if state.push(push, decode):
                for replica in view.owners[push.range][1:]:
                    copies.setdefault(replica, []).append((state.version, push))
        await self._replicate(epoch, copies)
        await self._wake()

    async def pull(
        self,
        epoch: int,
        worker: int,
        clock: int,
        ranges: Sequence[int],
        slack: float | None,
        since: Sequence[int],
        bf16: bool,
    ) -> list[tuple[int, Payload]]:
        """Return the versions and values of these ranges, when no member is more than the slack
        behind `clock`, the number of pushes of `worker`, which asks: of ranges with rows only what
        changed after the versions `since`, which are of this epoch, or -1. By default the slack is
        that of the rule.
        """
        await self._thawed(epoch)
        slack = self.view.rule.slack if slack is None else slack
        states = [self._primary_state(i) for i in ranges]

        awaited, since_when = worker, time.monotonic()

        def may_go() -> bool:
            nonlocal awaited, since_when
            now = time.monotonic()
            if awaited != worker:
                self._waits[worker, awaited] += now - since_when
            late = next((s for s in states if s.slowest() < clock - slack), None)
            awaited, since_when = late.last() if late else worker, now
            return self.view.epoch != epoch or not (self._frozen or late)

        async with self._changed:
            await self._changed.wait_for(may_go)
        if self.view.epoch != epoch:
            raise StaleViewError("the view has changed while a worker waited")
        for other, reached in states[0].clocks.items() if states else ():
            if other != worker:
                self._staleness[max(0, clock - reached)] += 1
        answer = [
            (s.version, pack(s.values, s.row, s.rows_since(version), bf16 and not s.is_mean))
            for s, version in zip(states, since, strict=True)
        ]
        self._sent += sum(nbytes(payload) for _, payload in answer)
        return answer

    # what primaries call

    async def replicate(self, epoch: int, pushes: Sequence[tuple[int, Push]]) -> None:
        """Count pushes of the primary, whose state has the version that stands before each then."""
        async with self._changed:
            await self._changed.wait_for(lambda: epoch <= self.view.epoch)
        if epoch < self.view.epoch:
            raise StaleViewError("this primary has been replaced")
        for version, push in pushes:
            state = self._ranges.get(push.range)
            if state is None or version > state.version + 1:
                raise StaleViewError("a push before this one did not arrive: the view will change")
            if version == state.version + 1:
                state.push(push, decode)

    async def adopt(self, states: Mapping[int, RangeState]) -> None:
        """Take over the states of ranges."""
        self._ranges.update(states)

    # what the coordinator calls

    async def ping(self) -> tuple[str, int]:
        """Return the host and the number of the process."""
        return socket.gethostname(), os.getpid()

    async def keep(self, state: object) -> None:
        """Keep the coordinator's state for one that is started again."""
        self._state = state

    async def kept(self) -> object:
        """Return what `keep` was given."""
        return self._state

    async def tell(self) -> View:
        """Return the view that this server has."""
        return self.view

    async def freeze(self) -> dict[int, tuple[int, Mapping[int, int]]]:
        """Count no push until the next view; return version and clocks by range."""
        self._frozen = True
        await self._wake()
        return {i: (state.version, dict(state.clocks)) for i, state in self._ranges.items()}

    async def report(self) -> Report:
        """Return what this server has seen, of the ranges of which it is the primary."""
        states = [self._ranges[i] for i in self.view.of_primary(self.name) if i in self._ranges]
        clocks = {
            worker: min(state.clocks[worker] for state in states)
            for worker in self.view.members
            if states
        }
        return Report(
            clocks,
            dict(self._staleness),
            dict(self._waits),
            self._behind,
            self._received,
            self._sent,
        )

    async def give(self, server: str, ranges: Sequence[int]) -> None:
        """Copy the states of ranges to another server."""
        states = {i: self._ranges[i] for i in ranges}
        await asyncio.wrap_future(self._engine.call(server, "adopt", states))

    async def begin(
        self,
        values: Mapping[int, Array],
        view: View,
        update_states: Mapping[int, Mapping[str, Any]],
    ) -> None:
        """Hold ranges with these values, without clocks; `update_states` is what the
        servers' update has kept of them.
        """
        for i, array in values.items():
            own, kept = view.ranges[i], update_states[i]
            self._ranges[i] = RangeState(array, view.rule, own.is_mean, own.row, kept)

    async def install(self, view: View) -> None:
        """Go on with this view; drop the ranges that are others' now."""
        if view.epoch < self.view.epoch:
            raise StaleViewError("this coordinator has been replaced")
        self.view = view
        for state in self._ranges.values():
            state.set_members(view)
        self._ranges = {i: s for i, s in self._ranges.items() if self.name in view.owners[i]}
        await self.thaw()

    async def thaw(self) -> None:
        """Go on with the same view."""
        self._frozen, self._marks = False, {}
        await self._wake()

    async def cut(
        self, marks: Mapping[int, int], ranges: Sequence[int]
    ) -> list[tuple[Array, dict[str, Any]]]:
        """While frozen: count what these workers push up to these clocks, which is on its way;
        return the values of these ranges then, and what the servers' update keeps of them.
        """
        self._marks = marks
        states = [self._ranges[i] for i in ranges]

        def complete() -> bool:
            return all(
                clock >= marks.get(worker, 0)
                for state in states
                for worker, clock in state.clocks.items()
            )

        await self._wake()
        async with self._changed:
            await self._changed.wait_for(complete)
        return [(state.values, dict(state.update_state)) for state in states]

    # inside

    def _primary_state(self, i: int) -> RangeState:
        if self.view.owners[i][0] != self.name or i not in self._ranges:
            raise StaleViewError(f"range {i} is not this server's")
        return self._ranges[i]

    async def _thawed(self, epoch: int, pushes: Sequence[Push] = ()) -> None:
        """Wait until this server has the view of this epoch and is not frozen, or these pushes
        belong to a cut; RefusedError if it has a later view.
        """

        def may_go() -> bool:
            if epoch > self.view.epoch:
                return False
            belongs = pushes and all(
                push.clock < self._marks.get(push.worker, 0) for push in pushes
            )
            return not self._frozen or bool(belongs) or epoch < self.view.epoch

        async with self._changed:
            await self._changed.wait_for(may_go)
        if epoch < self.view.epoch:
            raise RefusedError("there is a later view")

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _replicate(self, epoch: int, copies: Mapping[str, list[tuple[int, Push]]]) -> None:
        """Send pushes to replicas; one that does not answer is reported, and the
        coordinator's next view has another, which gets the whole state.
        """
        calls = {
            replica: self._engine.call(replica, "replicate", epoch, pushes)
            for replica, pushes in copies.items()
        }
        self._behind += sum(map(len, copies.values()))
        for replica, call in calls.items():
            try:
                await asyncio.wait_for(asyncio.wrap_future(call), PATIENCE)
            except (DeadPeerError, TimeoutError):
                report = self._engine.call(COORDINATOR, "suspect", replica, epoch)
                await asyncio.wrap_future(report)
            finally:
                self._behind -= len(copies[replica])
