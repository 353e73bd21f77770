"""Coordinator: an actor that knows which servers and workers there are, and deals the data.

Every change of the view goes the same way, one at a time:

    freeze    all servers stop counting pushes, and tell what they hold; who does not answer is out
    choose    the ring of those that live says which ranges they own
    give      owners that lack a range, or later operations on it, get it from who has the most
    install   all servers take the new view and go on; calls by an older epoch are refused
    tell      workers get it when they ask

So no two servers are the primary of a range in one epoch, and an old primary cannot count: its
replicas refuse what it sends.

A coordinator that died and was started again takes the newest view from the servers, and what it
has dealt from the beats of the workers. Without servers it knows nothing: workers that have begun
tell it so, and their run ends.
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from caffepy.core.errors import SyncError
from caffepy.device.blob import Array
from caffepy.parallel.parameter_server.leases import Dealer, Lease
from caffepy.parallel.parameter_server.messages import (
    Cut,
    DeadPeerError,
    Engine,
    LeftOutError,
    Report,
    Rule,
    View,
    total,
)
from caffepy.parallel.parameter_server.ranges import KeyRange, owners
from caffepy.parallel.parameter_server.server_calls import ANSWER, TRANSFER, ByRange, ServerCalls

log = logging.getLogger(__name__)

PING = 0.5
"""Seconds between pings."""

TELL = 1.5
"""Seconds that a coordinator that was started again hears beats before it deals batches."""

COLLECT = 20.0
"""Seconds that workers may take to hand in what a snapshot keeps of them."""

LOOK = 0.02
"""Seconds between looks for what they hand in."""

ALL_DEAD = "the coordinator and all servers have died: resume from the last snapshot"


class Coordinator:
    """The coordinator of `servers` servers; each range has `replicas` copies. A worker that was not
    heard of for `deadline` seconds is left out. `stays`: after the end of a run, for the next.
    """

    stays = False

    def __init__(self, engine: Engine, servers: int, replicas: int, deadline: float = 10.0) -> None:
        self._engine, self._servers = engine, ServerCalls(engine)
        self._wanted, self._copies = servers, replicas
        self._deadline = deadline
        self.view = View()
        self._installed = View()  # that all servers have
        self.lost: SyncError | None = None  # what made it impossible to go on
        self._changing = asyncio.Lock()
        self._spawned = 0
        self._beats: dict[int, float] = {}  # when each worker was last heard of
        self._dealer = Dealer()
        self._state: object = None
        self._states: dict[int, object] = {}  # of workers: handed out or in
        self._request = (0, 0)  # number and clock of who collects states
        self._started = asyncio.Event()
        self._ended = False

    # what workers call

    async def start(
        self,
        ranges: Sequence[KeyRange],
        values: Sequence[Array],
        rule: Rule,
        state: object = None,
        update_states: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    ) -> None:
        """Start the servers with these values of the ranges; worker 0 calls it. `state` is for the
        workers that join; `update_states` has what the servers' update has kept of ranges, by name.
        """
        async with self._changing:
            self._state = state
            names = [self._new_name() for _ in range(self._wanted)]
            for name in names:
                self._engine.spawn_server(name)
            of_ranges = owners(ranges, names, self._copies)
            view = View(1, tuple(names), of_ranges, {}, tuple(ranges), rule)
            for name in names:
                own = {i: values[i] for i in range(len(ranges)) if name in of_ranges[i]}
                kept = {i: update_states.get(ranges[i].name, {}) for i in own}
                await self._servers.one(name, "begin", own, view, kept)
                await self._servers.one(name, "keep", state)
            for name in names:
                await self._servers.one(name, "install", view)
            self.view = self._installed = view
        self._started.set()

    async def current(self) -> View:
        """Return the newest view that all servers have, so that it outlives this coordinator;
        SyncError if the run cannot go on.
        """
        if self.lost:
            raise self.lost
        return self._installed

    async def join(self, worker: int, share: int) -> tuple[View, object]:
        """Make a worker a member, which takes `share` batches a clock, from the next clock on;
        return the view and the state from `start`, for which it waits.
        """
        await self._started.wait()
        self._dealer.shares[worker], self._beats[worker] = share, time.monotonic()
        await self._dealer.knows.wait()
        await self._change(joining=worker)
        return await self.current(), self._state

    async def leave(self, worker: int) -> None:
        """Go on without a worker; those that wait for it go on, too."""
        await self._dealer.knows.wait()
        self._beats.pop(worker, None)
        if worker in self.view.members:
            await self._change(leaving={worker})

    async def suspect(self, server: str, epoch: int) -> None:
        """Check all servers, since one did not answer a call by the view of this epoch; return when
        there is a later view, or the run cannot go on.
        """
        if epoch > self.view.epoch:
            self.lost = SyncError(ALL_DEAD)
        if epoch >= self.view.epoch:
            await self._change(since=epoch)

    async def hand_out(self, states: Mapping[int, object]) -> None:
        """Keep states for these workers until they `take_state`."""
        self._states = dict(states)

    async def take_state(self, worker: int) -> object:
        """Return the state that was handed out to a worker; None if there is none."""
        return self._states.pop(worker, None)

    async def collect(self, clock: int) -> tuple[dict[int, object], list[int]]:
        """Return the states of the workers but the first, at this clock or later, that hand them in
        within COLLECT seconds, and the workers that do not.
        """
        self._request, self._states = (time.time_ns(), clock), {}
        until = time.monotonic() + COLLECT
        while (others := self.view.members.keys() - {0}) - self._states.keys():
            if time.monotonic() > until:
                break
            await asyncio.sleep(LOOK)
        self._request, states, self._states = (0, 0), self._states, {}
        return {w: states[w] for w in others & states.keys()}, sorted(others - states.keys())

    async def hand_in(self, worker: int, request: int, state: object) -> None:
        """Take the state of a worker, for the worker that collects them by this request."""
        if request == self._request[0]:
            self._states[worker] = state

    async def beat(
        self, worker: int, share: int, leases: Mapping[int, Lease]
    ) -> tuple[bool, int, tuple[int, int]]:
        """Note that a worker lives, its share, and what it was dealt lately, by clock; return true
        when the run is at its end, the epoch, and the number and clock of the request for states,
        0 if there is none.
        """
        if worker in self._beats:
            self._beats[worker] = time.monotonic()
            self._dealer.hear(worker, share, leases)
        return self._ended, self.view.epoch, self._request

    async def lease(self, worker: int, clock: int) -> Lease:
        """Return the batches of a worker at a clock, see `Dealer`; LeftOutError unless it is a
        member.
        """
        await self._dealer.knows.wait()
        self._check_begun()
        if worker not in self.view.members:
            raise LeftOutError(f"worker {worker} is no member")
        return self._dealer.lease(self.view, worker, clock)

    async def cut(self) -> Cut:
        """Return what the servers hold after the same pushes: a consistent cut."""
        await self._dealer.knows.wait()
        self._check_begun()
        seconds = ANSWER
        while True:
            async with self._changing:
                if self.lost:
                    raise self.lost
                epoch = self.view.epoch
                held, dead = await self._servers.freeze(self.view.servers)
                marks = {worker: max(clocks) for worker, clocks in self._clocks(held).items()}
                try:
                    if not dead:
                        values, states = await self._servers.cut(self.view, marks, seconds)
                        return Cut(values, marks, self._batches(marks), states)
                except (DeadPeerError, TimeoutError):  # of a server, or a worker's push is missing
                    seconds = min(2 * seconds, TRANSFER)
                finally:
                    await self._servers.each(self.view.servers, "thaw", seconds=ANSWER)
            await self._change(since=epoch)

    def _check_begun(self) -> None:
        """Raise SyncError if a worker has begun, as this call says, and no servers are known."""
        if not self.view.epoch:
            self.lost = SyncError(ALL_DEAD)
        if self.lost:
            raise self.lost

    def _batches(self, marks: Mapping[int, int]) -> int:
        """Return the number of batches of all pushes up to these clocks; with slack 0 up to the
        clock that all have reached, since later ones are not added up yet.
        """
        members, reached = self.view.members, marks
        if not self.view.rule.slack and marks:
            reached = dict.fromkeys(marks, min(marks.values()))
        own = sum(self._dealer.shares.get(w, 0) * max(reached[w] - members[w], 0) for w in marks)
        return own + self.view.of_left

    async def report(self) -> Report:
        """Return what all servers have seen that answer."""
        answers = await self._servers.each(self.view.servers, "report", seconds=ANSWER)
        return total(answer for answer in answers.values() if isinstance(answer, Report))

    async def ping(self) -> tuple[str, int]:
        """Return the host and the number of the process."""
        return socket.gethostname(), os.getpid()

    async def end(self) -> None:
        """Notify the workers that the run has ended."""
        self._ended = True

    # after a restart

    async def recover(self) -> None:
        """Go on for a coordinator that died: with the newest view of its servers."""
        names = [n for n in await asyncio.to_thread(self._engine.names) if n.startswith("server-")]
        views = await self._servers.each(names, "tell", seconds=ANSWER)
        views = {n: view for n, view in views.items() if isinstance(view, View) and view.epoch}
        self._spawned = 1 + max((int(name.partition("-")[2]) for name in names), default=-1)
        self._tasks = [asyncio.ensure_future(self.watch())]
        if not views:
            return
        newest = max(views.values(), key=lambda view: view.epoch)
        self.view = replace(newest, restarts=newest.restarts + 1)
        log.warning("The coordinator was started again, with %d servers", len(views))
        self._beats = dict.fromkeys(self.view.members, time.monotonic())
        self._dealer.knows.clear()
        self._state = await self._servers.one(max(views, key=lambda n: views[n].epoch), "kept")
        self._started.set()
        await self._change(adding=sorted(set(views).difference(self.view.servers)))
        self._tasks.append(asyncio.ensure_future(self._recall()))

    async def _recall(self) -> None:
        await asyncio.sleep(TELL)
        self._dealer.recall(self.view)

    # membership

    async def watch(self) -> None:
        """Look after servers and workers for ever."""
        while self.stays or not self._ended:
            slept = time.monotonic()
            await asyncio.sleep(PING)
            late = time.monotonic() - slept - PING  # of a coordinator that heard nobody
            self._beats = {worker: beat + late for worker, beat in self._beats.items()}
            view = self.view
            if dead := await self._servers.ping(view.servers):
                await self._change(since=view.epoch, without=dead)
            elif len(view.servers) < self._wanted and view.servers:
                await self._add_server()
            now = time.monotonic()
            silent = {w for w, beat in self._beats.items() if now - beat > self._deadline}
            for worker in silent:
                log.warning(
                    "Worker %d was not heard of for %g s: it is left out", worker, self._deadline
                )
                await self.leave(worker)

    async def _add_server(self) -> None:
        name = self._new_name()
        self._engine.spawn_server(name)
        try:
            await self._servers.one(name, "keep", self._state, seconds=TRANSFER)
        except (DeadPeerError, TimeoutError):
            self._engine.kill(name)
            return
        await self._change(adding=[name])

    def _new_name(self) -> str:
        self._spawned += 1
        return f"server-{self._spawned - 1}"

    async def _change(
        self,
        joining: int | None = None,
        leaving: set[int] | None = None,
        adding: Sequence[str] = (),
        since: int | None = None,
        without: Sequence[str] = (),
    ) -> None:
        """Change the view as the head of this file says. `since`: unless it is later already;
        `without`: servers that are known not to answer.
        """
        async with self._changing:
            if since is not None and since < self.view.epoch:
                return
            servers = [s for s in (*self.view.servers, *adding) if s not in without]
            while not self.lost:
                held, dead = await self._servers.freeze(servers)
                servers = [server for server in servers if server not in dead]
                for server in (*without, *dead):
                    log.warning("Server %s has died or does not answer", server)
                    self._engine.kill(server)
                without = ()
                try:
                    view = self._next(servers, held, joining, leaving or set())
                    await self._servers.give(view, held)
                except (DeadPeerError, TimeoutError):
                    continue
                except SyncError as error:
                    self.lost = error
                    return
                joined = view.members.keys() - self.view.members.keys()
                self.view = view
                for worker in joined:
                    self._dealer.join(worker, view.members[worker])
                for worker in leaving or ():
                    self._dealer.leave(worker, view.left.get(worker, 0))
                answers = await self._servers.each(servers, "install", view, seconds=TRANSFER)
                if not any(isinstance(answer, Exception) for answer in answers.values()):
                    self._installed = view
                    return

    def _next(
        self,
        servers: Sequence[str],
        held: Mapping[str, ByRange],
        joining: int | None,
        leaving: set[int],
    ) -> View:
        old = self.view
        for i, key_range in enumerate(old.ranges):
            if not any(i in states for states in held.values()):
                raise SyncError(
                    f"all servers that held {key_range.name} have died: resume from the last "
                    "snapshot; --replicas 2 survives the death of one server, 3 that of two at once"
                )
        members = {w: first for w, first in old.members.items() if w not in leaving}
        clocks = self._clocks(held)
        left = {w: max(clocks[w]) for w in old.members if w in leaving}
        of_left = sum(
            self._dealer.shares.get(w, 0) * (clock - old.members[w]) for w, clock in left.items()
        )
        if joining is not None and joining not in members:
            reached = [clock for counted in clocks.values() for clock in counted]
            members[joining] = max([*reached, *members.values()], default=old.clock)
        return replace(
            old,
            epoch=old.epoch + 1,
            servers=tuple(servers),
            owners=owners(old.ranges, servers, self._copies),
            members=members,
            left={w: c for w, c in {**old.left, **left}.items() if w not in members},
            of_left=old.of_left + of_left,
        )

    def _clocks(self, held: Mapping[str, ByRange]) -> dict[int, list[int]]:
        """Return the clocks of each member on all ranges."""
        clocks: dict[int, list[int]] = {w: [first] for w, first in self.view.members.items()}
        for states in held.values():
            for _, counted in states.values():
                for worker, clock in counted.items():
                    if worker in clocks:
                        clocks[worker].append(clock)
        return clocks
