"""Client: a worker's side: it pushes, pulls, and finds the present primary of a range."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from math import inf
from typing import Any

from caffepy.device.blob import Array
from caffepy.device.threads import parallel
from caffepy.parallel.parameter_server.filters import Payload
from caffepy.parallel.parameter_server.heartbeat import WorkerHeartbeat
from caffepy.parallel.parameter_server.kept import Held, Kept
from caffepy.parallel.parameter_server.leases import KEPT, Lease
from caffepy.parallel.parameter_server.messages import (
    COORDINATOR,
    Cut,
    DeadPeerError,
    Engine,
    LeftOutError,
    Push,
    RefusedError,
    Report,
    Rule,
    StaleViewError,
    View,
)
from caffepy.parallel.parameter_server.pulled import Pulled
from caffepy.parallel.parameter_server.ranges import KeyRange

log = logging.getLogger(__name__)

POLL = 0.5
"""Seconds between polls while a worker waits."""

RETRY = 0.02
"""Seconds before a call is tried again."""


class Client:
    """The connection of a worker to the servers.

    `poll` is called while it waits; what it raises ends the wait. `watch` is called with each new
    view. `patience` is how many seconds it looks for a coordinator that does not answer. `bf16`:
    pulled values come rounded to bfloat16, but for means; the servers' stay float32.
    """

    def __init__(
        self,
        engine: Engine,
        worker: int,
        patience: float = 60.0,
        poll: Callable[[], object] = lambda: None,
        watch: Callable[[View], object] = lambda view: None,
        bf16: bool = False,
    ) -> None:
        self.worker, self.poll, self.watch = worker, poll, watch
        self.view = View()
        self.clock = 0  # number of pushes
        self.heartbeat = WorkerHeartbeat(engine, worker)
        self.pulled = Pulled()
        self.again = 0  # pushes that were sent again
        self._engine, self._patience, self._bf16 = engine, patience, bf16
        self._lost = False  # True: the coordinator has not answered for so long

    def start(
        self,
        ranges: Sequence[KeyRange],
        values: Sequence[Array],
        rule: Rule,
        state: object,
        update_states: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Start the servers with these values of the ranges; `state` is for who joins,
        `update_states` has what the servers' update has kept of ranges, by name.
        """
        self.ask("start", ranges, values, rule, state, update_states)

    def attach(self, trainer: str) -> Held | None:
        """Take servers that outlive trainers; return what they hold, None if nothing yet."""
        held: Held | None = self.ask("attach", trainer)
        return held

    def resume(self, state: object) -> None:
        """Continue with servers that hold values, as a new trainer; `state` is for joiners."""
        self.ask("resume", state)

    def leave_behind(self, kept: Kept, ends: bool) -> None:
        """Give servers this for the next trainer; if the run `ends`, pushes change nothing any
        more.
        """
        self.ask("leave_behind", kept, ends)

    def join(self, share: int) -> Any:
        """Become a member, once the servers have started; `share` is the number of batches of a
        clock. Return the state from `start`.
        """
        self.view, state = self.ask("join", self.worker, share)
        self.watch(self.view)
        self.clock = self.view.members[self.worker]
        self.heartbeat.start(share)
        return state

    def await_members(self, count: int) -> None:
        """Return when `count` workers have joined."""
        while len(self.view.members.keys() | self.view.left.keys()) < count:
            self._look(self.view.epoch)

    def await_end(self) -> None:
        """Return when the run is at its end."""
        while not self.heartbeat.ended.wait(POLL):
            self.poll()

    def end(self) -> None:
        """Notify all workers that the run has ended."""
        self.ask("end")

    def report(self) -> "Future[Report]":
        """Return what the servers have seen."""
        return self._engine.call(COORDINATOR, "report")

    @property
    def clock_of_run(self) -> int:
        """The number of pushes since this trainer began."""
        return self.clock - self.view.clock

    def leave(self) -> None:
        """Leave the other workers."""
        self.heartbeat.stop()
        self.ask("leave", self.worker)

    def lease(self, clock: int) -> Lease:
        """Return the batches of this worker at a clock."""
        lease: Lease = self.ask("lease", self.worker, clock)
        newest = {c: own for c, own in self.heartbeat.leases.items() if c > clock - KEPT}
        self.heartbeat.leases = {**newest, clock: lease}
        return lease

    def push(self, payloads: Sequence[Any]) -> None:
        """Push a payload for each range; return when the primaries and their replicas have counted
        them.
        """
        pushes = list[Push]()

        def begin() -> None:
            members = len(self.view.members)
            pushes[:] = (
                Push(i, self.worker, self.clock, members, payload)
                for i, payload in enumerate(payloads)
            )

        def call(server: str, ranges: Sequence[int]) -> "Future[Any]":
            return self._call(server, "push", [pushes[i] for i in ranges])

        self._each(range(len(payloads)), call, lambda ranges, answer: None, begin)
        self.clock += 1

    def pull(self, slack: float | None = None) -> list[Array]:
        """Return the values of all ranges, once no member is more than the slack behind: that of
        the rule, if none is given. They are read-only, and of ranges with rows valid until the next
        pull.
        """
        values: list[Array | None] = [None] * len(self.view.ranges)

        def call(server: str, ranges: Sequence[int]) -> "Future[Any]":
            since = [self.pulled.version(i, self.view.epoch) for i in ranges]
            return self._call(
                server, "pull", self.worker, self.clock, ranges, slack, since, self._bf16
            )

        def take(ranges: Sequence[int], answer: Sequence[tuple[int, Payload]]) -> None:
            view = self.view
            for i, (version, payload) in zip(ranges, answer, strict=True):
                values[i] = self.pulled.take(i, view.ranges[i], view.epoch, version, payload)

        self._each(range(len(values)), call, take)
        return [array for array in values if array is not None]

    def cut(self) -> Cut:
        """Return what the servers hold after the same pushes."""
        cut: Cut = self.ask("cut")
        return cut

    def collect(self) -> tuple[dict[int, Any], list[int]]:
        """Return what a snapshot keeps of the other workers, their `state` by number, and the
        workers that do not answer. With slack 0 it is that of this worker's clock.
        """
        states, missing = self.ask("collect", 0 if self.view.rule.slack else self.clock)
        return states, missing

    def hand_out(self, states: Mapping[int, object]) -> None:
        """Give other workers these states, by number, before they join."""
        self.ask("hand_out", states)

    def take_state(self) -> Any:
        """Return the state that this worker was given, None if none."""
        return self.ask("take_state", self.worker)

    # calls

    def _call(self, server: str, method: str, *arguments: object) -> "Future[Any]":
        return self._engine.call(server, method, self.view.epoch, *arguments)

    def _each(
        self,
        ranges: Iterable[int],
        call: Callable[[str, Sequence[int]], "Future[Any]"],
        take: Callable[[Sequence[int], Any], object],
        begin: Callable[[], object] = lambda: None,
    ) -> None:
        """Call the primary of each of these ranges, those of one together; call again what failed,
        by the next view. `begin` is called at the start, and anew while no server has done a thing.
        """
        missing, untouched = set(ranges), True
        while missing:
            if untouched:
                begin()
            view, epoch = self.view, self.view.epoch
            parts = {
                server: missing.intersection(view.of_primary(server)) for server in view.servers
            }
            calls = [(server, sorted(part)) for server, part in parts.items() if part]
            for (server, part), future in zip(calls, _at_once(call, calls), strict=True):
                try:
                    take(part, self._result(future, epoch))
                    missing.difference_update(part)
                except RefusedError:
                    continue
                except StaleViewError:
                    pass
                except DeadPeerError:
                    log.info("Server %s does not answer", server)
                    self.ask("suspect", server, epoch)
                untouched = False
            if missing:
                self.again += 1
                self._look(epoch)

    def _look(self, epoch: int) -> None:
        """Wait for a view after this epoch; LeftOutError if this worker is no member."""
        while (view := self.ask("current")).epoch <= epoch:
            self.poll()
            time.sleep(RETRY)
        if self.worker not in view.members or view.run != self.view.run:
            raise LeftOutError(
                f"worker {self.worker} was left out: the others did not hear of it for too long, "
                "as of a process that is stopped; resume from the last snapshot"
            )
        if self.worker == 0:
            _log_changes(self.view, view)
        self.view = view
        self.watch(view)

    def ask(self, method: str, *arguments: object) -> Any:
        """Call the coordinator; again, if it died, as long as the patience lasts. One that has been
        lost for so long is called once, so that the run's last snapshot does not wait for it again.
        """
        until = time.monotonic() + self._patience
        while True:
            try:
                answer = self._result(self._engine.call(COORDINATOR, method, *arguments))
                self._lost = False
                return answer
            except DeadPeerError:
                if self._lost or time.monotonic() > until:
                    self._lost = True
                    raise
                time.sleep(RETRY)

    def _result(self, future: "Future[Any]", epoch: float = inf) -> Any:
        """Wait for an answer; StaleViewError if there is a view after this epoch before."""
        while not wait([future], timeout=POLL).done:
            self.poll()
            if self.heartbeat.epoch > epoch:  # a server that has stopped does not answer
                raise StaleViewError("the view has changed before a server answered")
        return future.result()


def _at_once(
    call: Callable[[str, Sequence[int]], "Future[Any]"], calls: Sequence[tuple[str, Sequence[int]]]
) -> "list[Future[Any]]":
    """Make these calls; return their answers. What is pushed is copied as it is sent, so threads
    share that.
    """
    futures: list[Future[Any]] = [Future()] * len(calls)

    def send(first: int, end: int) -> None:
        for k in range(first, end):
            futures[k] = call(*calls[k])

    parallel(send, len(calls))
    return futures


def _log_changes(before: View, now: View) -> None:
    """Log which servers and workers have come and gone, and that the coordinator was away."""
    if now.restarts > before.restarts:
        log.warning("The coordinator has died and was started again; the run goes on")
    for server in before.servers:
        if server not in now.servers:
            log.warning("Server %s is out; %d servers go on", server, len(now.servers))
    for server in now.servers:
        if server not in before.servers:
            log.info("Server %s has joined", server)
    for worker in before.members:
        if worker not in now.members:
            log.warning("Worker %d is out; %d workers go on", worker, len(now.members))
    for worker, clock in now.members.items():
        if worker not in before.members:
            log.info("Worker %d has joined at clock %d", worker, clock)
