"""Messages between workers, servers and the coordinator of a parameter server, and the engine
that carries it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple, Protocol

import numpy as np

from caffepy.core.errors import SyncError, UsageError
from caffepy.device.blob import Array
from caffepy.parallel.parameter_server.ranges import KeyRange

COORDINATOR = "coordinator"


class DeadPeerError(SyncError):
    """An actor whose process has ended, or that cannot be reached; `peer` is its name."""

    def __init__(self, peer: str) -> None:
        super().__init__(f"{peer} has died or cannot be reached")
        self.args = (peer,)  # of which pickle makes another
        self.peer = peer


class LeftOutError(SyncError):
    """The view lacks this worker, which was silent for too long."""


class StaleViewError(SyncError):
    """A call by an older, or newer, view than the server's: ask the coordinator and call again."""


class RefusedError(StaleViewError):
    """The same of a call that has done nothing, for sure."""


class Engine(Protocol):
    """Carries calls between actors: objects with asynchronous methods, each in a process."""

    def call(self, actor: str, method: str, *arguments: object) -> "Future[Any]":
        """Call a method of the actor of this name. Calls by one caller to one actor begin in their
        order. The future raises what the method raises, or DeadPeerError.
        """

    def spawn_server(self, name: str) -> None:
        """Start a `Server` under this name."""

    def kill(self, actor: str, starts_again: bool = False) -> None:
        """End an actor's process at once, if it lives; a coordinator that `starts_again` has
        another.
        """

    def names(self) -> list[str]:
        """Return the names of the actors that live, or lived a moment ago."""


ServerUpdate = Callable[[Array, Array, dict[str, Any]], Array]
"""Return the new values of a range from its values, neither of which it writes to, the mean change
of the workers at a clock, and what it keeps from clock to clock, which is empty at first: arrays,
numbers and text, which a snapshot has, too. Arrays that it keeps are replaced, never written to.
"""


@dataclass(frozen=True)
class Nesterov:
    """The servers' update with Nesterov momentum: the mean change takes the gradient's place."""

    momentum: float
    rate: float

    def __call__(self, values: Array, change: Array, state: dict[str, Any]) -> Array:
        """As `ServerUpdate`."""
        momentum, rate = np.float32(self.momentum), np.float32(self.rate)
        velocity = state["velocity"] = momentum * state.get("velocity", np.float32(0)) + change
        new: Array = values + rate * (change + momentum * velocity)
        return new


@dataclass(frozen=True)
class Rule:
    """The rule by which workers and servers train together.

    slack: clocks that a worker may be ahead of the slowest: 0 is synchronous, inf asynchronous.
    gradients: workers push gradients and pull their mean, with slack 0; else they push the changes
        of their parameters and pull values.
    update: what the servers do with the mean change, with slack 0; by default they add it. Server
        and replica each call it, so it must give the same bits to both.
    """

    slack: float = 0
    gradients: bool = False
    update: ServerUpdate | None = None

    @property
    def name(self) -> str:
        """As `--consistency` calls it."""
        return {0: "sync", inf: "async"}.get(self.slack) or f"ssp:{self.slack:g}"


def slack_of(consistency: str) -> float:
    """Return the slack of "sync", "ssp:S" or "async"; UsageError for anything else."""
    name, colon, number = consistency.partition(":")
    if name in ("sync", "async") and not colon:
        return 0 if name == "sync" else inf
    if name == "ssp" and number.isascii() and number.isdigit():
        return int(number)
    raise UsageError(f"--consistency {consistency!r} is none of sync, ssp:S, async")


@dataclass(frozen=True)
class View:
    """The servers and workers that take part: the same for all that know the same `epoch`.

    owners: of each range its primary and its replicas.
    members: the first clock of each worker; earlier ones do not wait for it.
    left: the clock of each worker that has left: up to it the others' pushes are averaged as if it
        had pushed to all ranges.
    of_left: batches of the pushes of the workers that have left.
    run, clock: number of the trainer that servers which outlive it have now, and the clock at which
        it began; what is told of members and those that left is of this run.
    ended: this run is at its end: pushes change nothing any more, and the next begins at `clock`.
    restarts: how often a coordinator that died was started again.
    """

    epoch: int = 0
    servers: tuple[str, ...] = ()
    owners: tuple[tuple[str, ...], ...] = ()
    members: Mapping[int, int] = field(default_factory=dict)
    ranges: Sequence[KeyRange] = ()
    rule: Rule = Rule()
    left: Mapping[int, int] = field(default_factory=dict)
    of_left: int = 0
    run: int = 0
    clock: int = 0
    ended: bool = False
    restarts: int = 0

    def of_primary(self, server: str) -> list[int]:
        """Return the numbers of the ranges whose primary this server is."""
        return [i for i, owners in enumerate(self.owners) if owners[0] == server]


class Cut(NamedTuple):
    """Contents of all servers after the same pushes.

    values: of each range.
    clocks: of each worker, the number of its pushes among these.
    batches: that these pushes are of.
    update_states: what the servers' update keeps of each range, see `ServerUpdate`.
    """

    values: list[Array]
    clocks: dict[int, int]
    batches: int
    update_states: list[dict[str, Any]]


class Report(NamedTuple):
    """Counts of the servers since they started.

    clocks: of each worker, the number of its pushes that all ranges have counted.
    staleness: how often a pull lacked n pushes of another worker, by n.
    waits: seconds that pulls of a worker waited for another, by (worker, other).
    behind: pushes of ranges that replicas have not counted yet.
    received, sent: bytes of the pushes of workers, and of what they pulled.
    """

    clocks: Mapping[int, int]
    staleness: Mapping[int, int]
    waits: Mapping[tuple[int, int], float]
    behind: int
    received: int
    sent: int


def total(reports: Iterable[Report]) -> Report:
    """Return the report of several servers."""
    all_reports, clocks, waits = list(reports), dict[int, int](), dict[tuple[int, int], float]()
    for each in all_reports:
        for worker, clock in each.clocks.items():
            clocks[worker] = min(clock, clocks.get(worker, clock))
        for pair, seconds in each.waits.items():  # a worker pulls from all at one time
            waits[pair] = max(seconds, waits.get(pair, 0.0))
    staleness = sum((Counter(each.staleness) for each in all_reports), Counter[int]())
    behind, received, sent = (
        sum(getattr(each, name) for each in all_reports) for name in ("behind", "received", "sent")
    )
    return Report(clocks, staleness, waits, behind, received, sent)


class Push(NamedTuple):
    """A worker's push of one range at one clock, which is its sequence number: the first of several
    counts. `payload` is what the worker's filters made of the array. With slack, servers add it
    divided by `members`, the number of workers that its worker knew of: the same for all ranges,
    whatever comes meanwhile.
    """

    range: int
    worker: int
    clock: int
    members: int
    payload: Any
