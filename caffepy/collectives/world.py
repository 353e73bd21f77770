"""World: the processes that train together, as one of them sees them.

Each is a node: a root solver on its main thread and a worker for every further device. A solver's
rank counts from 0 in its node, its universal rank (NVCaffe's word) counts over all nodes, in their
order. A Transport carries messages between nodes and never blocks; World makes of it what solvers
need, and polls with short sleeps while it waits. Node 0 collects and distributes, so that it knows
which nodes are missing.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from enum import IntEnum
from functools import reduce
from operator import or_
from typing import Any, Protocol, cast

from caffepy.core.errors import (
    ConfigError,
    DataError,
    DeviceError,
    DivergenceError,
    RecordError,
    SyncError,
    UsageError,
)
from caffepy.device.blob import Array

SPIN = 200e-6
"""Seconds that a wait polls without sleeping."""

LONGEST_SLEEP = 5e-3
"""Seconds between polls of a long wait: it costs about 1 % of a core."""

ARRAY_SLEEP = 1e-3
"""The same while arrays are on their way: MPI moves them only when it is polled."""

SLEEP_SHARE = 1 / 16
"""Length of a sleep as part of the time waited: a wait ends so much late at most."""

VOTE_SECONDS = 0.1
"""Seconds between votes, about."""

MOST_BETWEEN_VOTES = 64

SET_UP_DEADLINE = 900.0
"""Seconds that the nodes wait for each other before they train."""

LONGER = 3.0
"""Seconds that the others then wait longer than node 0, which knows who is missing."""

TIME_TO_ANSWER = 1.0
"""Seconds that a node has to say if it waits, too, when another has waited too long. They are
counted in sleeps, which take longer on a machine that is busy.
"""

MOST_TO_ANSWER = 3.0
"""The same by the clock."""

LAST_WAIT = 30.0
"""Seconds that nodes wait after a failure for the one that writes the snapshot."""

SHARED = (
    *(RecordError, DataError, UsageError, ConfigError, DivergenceError, DeviceError),
    SyncError,  # any other
)
"""Classes of errors that keep their class on other nodes."""


class Tag(IntEnum):
    """Streams of messages; those of one sender, receiver and tag arrive in order."""

    GATHER = 1
    VOTE = 2
    FAILURE = 3
    ARRAY = 4
    WRITTEN = 5
    QUESTION = 6
    ANSWER = 7
    LEFT = 8


class DeadNodeError(SyncError):
    """A node whose process has ended; `node` is its number."""

    def __init__(self, node: int) -> None:
        super().__init__(f"node {node} has died")
        self.node = node


class Request(Protocol):
    """A message on its way; `value` is what was received."""

    value: Any

    def done(self) -> bool:
        """Return true once it is sent or received; DeadNodeError if the other node is dead."""


class Transport(Protocol):
    """Messages between nodes; no method blocks, and any thread may call them.

    `hosts` are the host names of the nodes.
    """

    node: int
    nodes: int
    hosts: Sequence[str]

    def send(self, node: int, tag: Tag, value: object) -> Request:
        """Send a value that can be pickled."""

    def receive(self, node: int, tag: Tag) -> Request:
        """Receive a value."""

    def send_array(self, node: int, tag: Tag, array: Array) -> Request:
        """Send a contiguous array, which stays as it is until that is done."""

    def receive_array(self, node: int, tag: Tag, array: Array) -> Request:
        """Receive into a contiguous array."""

    def close(self, failed: bool) -> None:
        """End the connection; after a failure without waiting for anybody."""


class World:
    """The nodes of a run. All nodes call `gather`, `broadcast`, `barrier` and `vote` in the same
    order; one thread of a node at a time.

    `poll` is called while a wait lasts, with the nodes that are missing; what it raises ends the
    wait. `solvers` is the number of solvers of each node, known after `join`. Without a transport
    it is the world of one process. `dead` are nodes that died or do not answer.
    """

    def __init__(self, transport: Transport | None = None, solvers: int = 0) -> None:
        self.node, self.nodes = (transport.node, transport.nodes) if transport else (0, 1)
        self.hosts: Sequence[str] = transport.hosts if transport else ["localhost"]
        self.solvers: Sequence[int] = [solvers] * self.nodes
        self.dead: set[int] = set()
        self.iteration: Callable[[], int] | None = None  # of this node's root
        self.set_up = _SetUp(self)
        self.poll: Callable[[Sequence[int]], object] = self.set_up
        self._others = [node for node in range(self.nodes) if node != self.node]
        if transport:
            self.transport = transport
        self._notices = {node: self.transport.receive(node, Tag.FAILURE) for node in self._others}
        self._questions = {
            node: self.transport.receive(node, Tag.QUESTION) for node in self._others
        }
        self._leaving = {node: self.transport.receive(node, Tag.LEFT) for node in self._others}
        self._left_at: dict[int, float] = {}  # when it was found out
        self._unawaited = list[Request]()  # messages that nobody waits for
        self._votes = _Votes(self)

    # who is who

    def join(self, solvers: int) -> None:
        """Tell the others how many solvers this node has; returns when all have."""
        self.solvers = self.gather(solvers)

    @property
    def first_rank(self) -> int:
        """Universal rank of this node's root."""
        return sum(self.solvers[: self.node])

    @property
    def size(self) -> int:
        """Number of solvers of all nodes."""
        return sum(self.solvers)

    @property
    def writes_files(self) -> bool:
        """True for the lowest node that lives."""
        return self.node == self._writer

    @property
    def _writer(self) -> int:
        living = (node for node in range(self.nodes) if node not in self.dead)
        return min(living, default=self.node)

    @property
    def rank_on_host(self) -> int:
        """Number of this node among those of its host."""
        return list(self.hosts[: self.node]).count(self.hosts[self.node])

    def node_of(self, universal_rank: int) -> int:
        """Return the node of a universal rank."""
        node = 0
        while universal_rank >= self.solvers[node]:
            universal_rank -= self.solvers[node]
            node += 1
        return node

    def describe(self, node: int) -> str:
        """Return a node's number, host and universal ranks, for messages."""
        first, count = sum(self.solvers[:node]), self.solvers[node]
        ranks = f", universal rank{'s' if count > 1 else ''} {first}" if count else ""
        ranks += f" to {first + count - 1}" if count > 1 else ""
        return f"node {node} (host {self.hosts[node]}{ranks})"

    @property
    def at(self) -> str:
        """The iteration, for messages over several nodes: ", iteration 7"."""
        return f", iteration {self.iteration()}" if self.iteration and self.nodes > 1 else ""

    # what all nodes do together

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all nodes; each calls it with its own."""
        if self.node:
            self.wait([(0, self.transport.send(0, Tag.GATHER, value))])
            values: list[Any] = self._receive(Tag.GATHER, [0])[0]
            return values
        values = [value, *(self._receive(Tag.GATHER, self._others))]
        self._send_all(Tag.GATHER, values)
        return values

    def broadcast(self, value: Any = None) -> Any:
        """Return the value of node 0, whatever the others call it with."""
        if self.node:
            return self._receive(Tag.GATHER, [0])[0]
        self._send_all(Tag.GATHER, value)
        return value

    def barrier(self) -> None:
        """Return when all nodes have called it."""
        self.gather(None)

    def vote(self, mine: int) -> int:
        """Return flags that any node has set: the same, at the same call, on all nodes.

        That is some calls after the node that sets them; about every VOTE_SECONDS messages are
        exchanged.
        """
        return self._votes.cast(mine) if self.nodes > 1 else mine

    def exchange(
        self, sends: Sequence[tuple[int, Array]], receives: Sequence[tuple[int, Array]]
    ) -> None:
        """Send arrays to nodes and receive others; arrays of two nodes pair in their order."""
        transport = self.transport
        requests = [
            (node, transport.receive_array(node, Tag.ARRAY, array)) for node, array in receives
        ] + [(node, transport.send_array(node, Tag.ARRAY, array)) for node, array in sends]
        self.wait(requests, ARRAY_SLEEP)

    # failures

    def send_failure(self, error: BaseException) -> None:
        """Send the other nodes the error that ended this one, without waiting for them."""
        text = str(error) or f"node {self.node} was interrupted"
        kind = next((kind for kind in SHARED if isinstance(error, kind)), SyncError)
        for node in self._others:
            if node not in self.dead:
                failure = kind(text), self.dead
                self._unawaited.append(self.transport.send(node, Tag.FAILURE, failure))

    def failure(self) -> BaseException | None:
        """Return the error that another node sent or died of, if any; never blocks."""
        for notice in self._notices.values():
            try:
                if notice.done():
                    error, dead = notice.value
                    self.dead |= dead
                    return cast(BaseException, error)
            except DeadNodeError as error:
                return self._died(error)
        return None

    def answer(self, waits: bool) -> None:
        """Tell the nodes that have asked if this one waits for another; never blocks."""
        for node, question in self._questions.items():
            with suppress(DeadNodeError):
                if question.done():
                    self._unawaited.append(self.transport.send(node, Tag.ANSWER, waits))
                    self._questions[node] = self.transport.receive(node, Tag.QUESTION)

    def find_hung(self, missing: Sequence[int]) -> list[int]:
        """Return the nodes that do not answer, or do not wait for others: for them all wait. If
        there are none, those that are `missing` here.
        """
        hung, waited, until = list[int](), 0.0, time.monotonic() + MOST_TO_ANSWER
        answers: dict[int, Request] = {}
        for node in self._others:
            with suppress(DeadNodeError):
                answers[node] = self.transport.receive(node, Tag.ANSWER)
                self._unawaited.append(self.transport.send(node, Tag.QUESTION, None))
        for node in self._others:
            waits = False
            with suppress(DeadNodeError, KeyError):
                while not (came := answers[node].done()) and waited < TIME_TO_ANSWER:
                    time.sleep(LONGEST_SLEEP)
                    waited += LONGEST_SLEEP if time.monotonic() < until else TIME_TO_ANSWER
                waits = came and answers[node].value
            if not waits:
                hung.append(node)
        return hung or list(missing)

    def leave(self, status: int | None = None) -> None:
        """Leave the others, when all do, with this exit status if it is known.

        A node that waits for one that leaves raises SyncError, and so does this one then.
        """
        if self.nodes == 1:
            return
        self._send_all(Tag.LEFT, status)
        self.wait(list(self._leaving.items()))
        self._votes.end()
        self.transport.close(failed=False)

    def close(self, failed: bool = False) -> bool:
        """Leave the others, when all do. After a failure the node that writes files leaves first:
        launchers end all processes when one has failed. Return true if it did, and this is another.
        """
        left = False
        if not failed:
            self._votes.end()
            self.barrier()
        elif self.nodes > 1:
            left = self._await_writer()
        if self.nodes > 1:
            self.transport.close(failed)
        return left

    def _await_writer(self) -> bool:
        until = time.monotonic() + LAST_WAIT
        while not self.writes_files and time.monotonic() < until:
            writer = self._writer
            request = self.transport.receive(writer, Tag.WRITTEN)
            try:
                while not (left := request.done()) and time.monotonic() < until:
                    self.failure()  # which may tell that the writer is dead
                    if self._writer != writer:
                        break
                    time.sleep(LONGEST_SLEEP)
                else:
                    return left
            except DeadNodeError as error:
                self.dead.add(error.node)
        living = [node for node in self._others if node not in self.dead]
        sent = [self.transport.send(node, Tag.WRITTEN, None) for node in living]
        until = min(until, time.monotonic() + 1)
        with suppress(DeadNodeError):
            while not all(request.done() for request in sent) and time.monotonic() < until:
                time.sleep(LONGEST_SLEEP)
        return False

    # waits

    def wait(self, requests: Sequence[tuple[int, Request]], longest: float = LONGEST_SLEEP) -> None:
        """Wait until all these requests to and from nodes are done; sleep so long at most."""
        begun = time.perf_counter()
        try:
            while not all(request.done() for _, request in requests):
                waited = time.perf_counter() - begun
                if waited < SPIN:
                    continue
                missing = sorted({node for node, request in requests if not request.done()})
                self._check_left(missing)
                self.poll(missing)
                time.sleep(min(SLEEP_SHARE * waited, longest))
        except DeadNodeError as error:
            raise self._died(error) from None

    def _check_left(self, missing: Sequence[int]) -> None:
        """Raise SyncError if a node has left for which this one waits; what it sent before may come
        a little later.
        """
        now = time.perf_counter()
        for node, leaving in self._leaving.items():
            if node not in missing or not leaving.done():
                continue
            if now - self._left_at.setdefault(node, now) > TIME_TO_ANSWER:
                status = leaving.value
                code = "" if status is None else f" with exit code {status}"
                raise SyncError(
                    f"{self.describe(node)} has ended{code}, while node {self.node} waits for it"
                )

    def _died(self, error: DeadNodeError) -> DeadNodeError:
        self.dead.add(error.node)
        error.message = f"{self.describe(error.node)} has died{self.at}"
        error.args = (error.message,)
        return error

    def _receive(self, tag: Tag, nodes: Iterable[int]) -> list[Any]:
        requests = [(node, self.transport.receive(node, tag)) for node in nodes]
        self.wait(requests)
        return [request.value for _, request in requests]

    def _send_all(self, tag: Tag, value: Any) -> None:
        self.wait([(node, self.transport.send(node, tag, value)) for node in self._others])


class _SetUp:
    """Value of `poll` before solvers are there: it raises another node's error, and when the nodes
    wait too long. It calls `interrupted`, which may raise.
    """

    def __init__(self, world: World) -> None:
        self.deadline = SET_UP_DEADLINE
        self.interrupted: Callable[[], object] = lambda: None
        self._world = world
        self._begun, self._last = 0.0, 0.0

    def __call__(self, missing: Sequence[int]) -> None:
        if error := self._world.failure():
            raise error
        self.interrupted()
        now = time.monotonic()
        if now - self._last > 1:  # another wait
            self._begun = now
        self._last = now
        if now - self._begun > self.deadline + (LONGER if self._world.node else 0):
            self._world.dead.update(missing)
            nodes = " and ".join(map(self._world.describe, missing))
            raise SyncError(f"{nodes} did not answer for {self.deadline:g} s (set-up)")


class _Votes:
    """Votes that are under way while solvers compute.

    At the first call, and then every `interval` calls, each node sends node 0 the flags that were
    set since, and takes the result of the vote before, with the next interval. All nodes thus act
    at the same call, and none waits unless another is a whole interval behind.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._flags = 0  # of this node, not sent yet
        self._calls_left = 0
        self._sent: list[tuple[int, Request]] | None = None  # the vote under way
        self._own = 0  # node 0's flags in it
        self._begun, self._interval = 0.0, 1

    def cast(self, mine: int) -> int:
        self._flags |= mine
        if self._calls_left:
            self._calls_left -= 1
            return 0
        result = self._count() if self._sent is not None else 0
        self._calls_left = self._interval - 1
        world, flags, self._flags = self._world, self._flags, 0
        self._own = flags
        self._sent = [(0, world.transport.send(0, Tag.VOTE, flags))] if world.node else []
        return result

    def _count(self) -> int:
        """End the vote under way; return its result."""
        world = self._world
        if world.node:
            assert self._sent is not None
            world.wait(self._sent)
            flags, self._interval = world._receive(Tag.VOTE, [0])[0]
            return int(flags)
        now = time.monotonic()
        seconds, self._begun = (now - self._begun) / self._interval, now
        self._interval = min(max(1, int(VOTE_SECONDS / max(seconds, 1e-6))), MOST_BETWEEN_VOTES)
        flags = reduce(or_, world._receive(Tag.VOTE, world._others), self._own)
        world._send_all(Tag.VOTE, (flags, self._interval))
        return flags

    def end(self) -> None:
        """Take in the vote under way."""
        if self._sent is not None:
            self._count()
            self._sent = None
