"""RankGroup: the ranks of one process, a thread each, that wait for one another and stop together,
and with those of other nodes, if there are some (`world`).

Every wait ends: when its condition holds, when a rank has failed, or when the deadline of the phase
has passed. In the last case the error names the ranks that hang, and the log has the stacks of all
threads.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from caffepy.collectives.rank_names import REMOTE, named, rank_name
from caffepy.collectives.world import DeadNodeError, World
from caffepy.core.errors import DivergenceError, SyncError
from caffepy.core.hangs import stacks

log = logging.getLogger(__name__)

DEADLINES = {"set-up": 900.0, "step": 300.0, "test": 900.0, "snapshot": 900.0, "idle": math.inf}
"""Seconds after which a rank that others wait for counts as hung, by phase."""

POLL = 0.5
"""Seconds between checks for failures while a rank waits."""

MOST_COUNTED = 2 * POLL
"""Seconds that one poll adds to a wait at most: if more have passed, the whole process was stopped.
"""

PATIENCE = 3.0
"""Seconds to wait for a library to release its resources."""

WATCH = 0.1
"""Seconds between looks for failures of other nodes."""


class GroupStoppedError(SyncError):
    """Raised in the ranks other than the root and the failed one when a rank has failed."""


class RankGroup:
    """`size` ranks of this node, rank 0 being the root; `world` has the other nodes.

    It is large, since all waits and failures of ranks meet under one lock. All methods may be
    called from any rank's thread; only the root's waits for other nodes.

    Wherever the root waits for others, it gets the error of the rank that failed, with its name.
    While it waits it calls `interrupted` now and then, which may raise. When a deadline passes,
    `hung_ranks` is given the ranks that are missing and returns those that hang by themselves; by
    then the callbacks of `on_abort` have ended all waits outside the group.
    """

    def __init__(
        self, size: int, deadlines: Mapping[str, float] = DEADLINES, world: World | None = None
    ) -> None:
        self.size = size
        self.world = world or World(solvers=size)
        self.deadlines = {**DEADLINES, **deadlines}
        self.failure: tuple[int, BaseException] | None = None  # the rank is here, or REMOTE
        self.missing: list[int] = []  # ranks that were found to hang
        self.interrupted: Callable[[], object] = lambda: None
        self.hung_ranks: Callable[[list[int]], list[int]] = lambda missing: missing
        self.waiting: dict[int, Callable[[], list[int]]] = {}  # ranks that wait, for which others
        self.root_is_away = False  # the root waits for other nodes
        self._finding_hung = False  # a deadline has passed; which ranks hang is being found out
        self._failed = threading.Event()  # `failure` is set
        self.root_informed = threading.Event()  # the root knows that the group has stopped
        self._lock = threading.RLock()
        # A semaphore per rank, as a Lock: a waiting rank acquires it, `wake` releases it.
        self._asleep = [threading.Lock() for _ in range(size)]
        for asleep in self._asleep:
            asleep.acquire()
        self.phase = "set-up"
        self._arrived: dict[str, set[int]] = {}  # by barrier
        self._rounds: dict[str, int] = {}  # by barrier: how often it was passed
        self._gathered: list[Any] = [None] * size  # what `all_gather` was called with, by rank
        self._of_all: list[Any] = []  # the same of all nodes
        self._threads: dict[int, int] = {}  # rank -> thread
        self._watching: threading.Event | None = None  # of other nodes; set to end that
        self._on_abort: list[Callable[[], object]] = []

    @property
    def phase(self) -> str:
        """Phase of the ranks, which decides how long one may wait for another."""
        return self._phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self._phase, self.since = phase, time.monotonic()

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """A block that is another phase."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def join(self, rank: int) -> None:
        """Register the calling thread as this rank's."""
        self._threads[rank] = threading.get_ident()

    # failures

    def on_abort(self, callback: Callable[[], object]) -> None:
        """Call this when the group stops for an error: to end waits outside it, as in NCCL."""
        self._on_abort.append(callback)

    def abort(self, rank: int, error: BaseException) -> None:
        """Stop all ranks because of this error of this rank; the first error counts."""
        if rank == 0:
            self.root_informed.set()
        with self._lock:
            if self.stopped:  # errors after the first may be its consequences
                return
            self._fail(rank, error)
        if self.world.nodes > 1 and rank != REMOTE:
            self.world.send_failure(named(self.world, rank, error))
        self._call_on_abort()

    def watch_nodes(self) -> None:
        """Stop when another node tells of a failure, or dies, until `leave_nodes`."""
        if self.world.nodes == 1:
            return
        ended = self._watching = threading.Event()

        def watch() -> None:
            while not (self.stopped or ended.wait(WATCH)):
                if error := self.world.failure():
                    self.abort(REMOTE, error)
                self.world.answer(self.root_is_away)

        threading.Thread(target=watch, name="caffepy nodes", daemon=True).start()

    def leave_nodes(self) -> None:
        """End that."""
        if self._watching:
            self._watching.set()

    def abort_hung(self, missing: list[int], seconds: float, more: str = "") -> None:
        """Stop all ranks because these, or ranks that they wait for, made no progress for so long.

        Errors of ranks while `hung_ranks` runs do not count.
        """
        with self._lock:
            if self.stopped:
                return
            self._finding_hung = True
        found, doing, each_other = missing, "", ""
        try:
            doing = stacks(self._threads, first=missing)
            each_other = self._waits_of(missing)
            self._call_on_abort()
            found = self.hung_ranks(missing)
        finally:
            self.missing = found
            names = ", ".join(rank_name(self.world, rank) for rank in found) or "another rank"
            waited = more + each_other if found == missing else ""
            error = self._no_progress(names, seconds, waited)
            log.error("%s\n%s", error, doing)
            self._fail(found[0] if found else 0, error)
            if self.world.nodes > 1:
                self.world.send_failure(named(self.world, found[0] if found else 0, error))

    def _waits_of(self, ranks: list[int]) -> str:
        """Return, as text, for which ranks these ranks wait: if one of those waits for one of
        these, none of them ever continues.
        """
        text = ""
        for rank in ranks:
            others = self.waiting.get(rank, list)()
            if others:
                names = " and ".join(rank_name(self.world, other) for other in others)
                text += f"; {rank_name(self.world, rank)} waited for {names}"
        return text

    def _no_progress(self, names: str, seconds: float, more: str = "") -> SyncError:
        return SyncError(
            f"{names} made no progress for {seconds:g} s ({self.phase}{self.world.at}){more}"
        )

    def _fail(self, rank: int, error: BaseException) -> None:
        self.failure = rank, error
        self._finding_hung = False
        self._failed.set()
        self.wake()

    @property
    def stopped(self) -> bool:
        """True if a rank has failed, or a deadline has passed."""
        return self._finding_hung or self.failure is not None

    def wait_failure(self) -> tuple[int, BaseException] | None:
        """Return the failure, if any; wait for it while hung ranks are being found."""
        if self._finding_hung:
            self._failed.wait()
        return self.failure

    def _call_on_abort(self) -> None:
        callbacks, self._on_abort = self._on_abort, []
        for callback in callbacks:
            callback()

    @contextmanager
    def guard(self, rank: int) -> Iterator[None]:
        """A block of this rank whose errors stop the group."""
        self.join(rank)
        try:
            yield
        except GroupStoppedError:
            raise
        except BaseException as error:
            self.abort(rank, error)
            raise

    def check(self, rank: int | None = None) -> None:
        """Raise a failed rank's error in the root, GroupStoppedError in other ranks."""
        failure = self.wait_failure() if rank == 0 else self.failure
        if failure:
            failed, error = failure
            if rank == 0:
                self.root_informed.set()
                raise named(self.world, failed, error)
            raise GroupStoppedError(f"{rank_name(self.world, failed)} failed: {error}") from error

    def root_cause(self, error: Exception) -> BaseException:
        """Return what ended the run when the root met `error`: that, or a rank's earlier one."""
        failure = self.wait_failure()
        if failure is None:
            return error
        self.root_informed.set()
        rank, cause = failure
        if isinstance(cause, DivergenceError) and isinstance(error, DivergenceError):
            return error
        return named(self.world, rank, cause) if rank or self.world.nodes > 1 else cause

    # waits

    def until(self, rank: int, holds: Callable[[], bool], missing: Callable[[], list[int]]) -> None:
        """Wait until `holds()`; raise as `check` does.

        Other ranks make it hold, keep it so and call `wake`. `missing()` are the ranks waited for.
        """
        if holds():
            self.check(rank)
            return
        self.waiting[rank] = missing
        try:
            wait = _Wait(self, rank)
            while not holds():
                self.check(rank)
                if rank == 0:
                    self.interrupted()
                left = wait.left()
                if left < 0:
                    waiting = f"; {rank_name(self.world, rank)} waited for it"
                    self.abort_hung(missing(), self.deadlines[self.phase], waiting)
                    self.check(rank)
                self._asleep[rank].acquire(timeout=min(POLL, left + 1e-3) if left >= 0 else POLL)
        finally:
            self.waiting.pop(rank, None)
        self.check(rank)

    @contextmanager
    def among_nodes(
        self, blamed: str = "another node", hint: Callable[[], str] = lambda: ""
    ) -> Iterator[World]:
        """A block in which the root waits for other nodes: failures and the deadline end that.

        Then the error names the nodes that do not wait, or `blamed` with a hint if all do.
        """
        wait, world = _Wait(self, 0), self.world

        def poll(missing: Sequence[int]) -> None:
            self.check(0)
            self.interrupted()
            if wait.left() < 0:
                hung = world.find_hung(missing)
                self.check(0)  # another node may have found it meanwhile
                names, more = " and ".join(map(world.describe, hung)), ""
                if not names:
                    names, more = blamed, hint()
                error = self._no_progress(names, self.deadlines[self.phase], more)
                log.info("%s", error)
                world.dead.update(hung)
                world.send_failure(error)
                self.abort(REMOTE, error)

        before, world.poll = world.poll, poll
        self.waiting[0] = lambda: [REMOTE]
        self.root_is_away = True
        try:
            yield world
        except DeadNodeError as error:
            self.abort(REMOTE, error)
            self.check(0)
        finally:
            world.poll = before
            self.root_is_away = False
            self.waiting.pop(0, None)

    def wake(self, *ranks: int) -> None:
        """Make these ranks, or all, look again at what they wait for."""
        with self._lock:
            for rank in ranks or range(self.size):
                if self._asleep[rank].locked():
                    self._asleep[rank].release()

    def barrier(self, rank: int, name: str = "") -> None:
        """Return when all ranks of all nodes have called this with this name."""
        self.local_barrier(rank, name)
        if self.world.nodes > 1:
            if rank == 0:
                with self.among_nodes() as world:
                    world.barrier()
            self.local_barrier(rank, f"{name} of nodes")

    def local_barrier(self, rank: int, name: str = "") -> None:
        """Return when all ranks of this node have called this with this name."""
        with self._lock:
            arrived = self._arrived.setdefault(name, set())
            passed = self._rounds.get(name, 0)
            arrived.add(rank)
            if len(arrived) == self.size:
                self._arrived[name] = set()
                self._rounds[name] = passed + 1
                self.wake()
        self.until(
            rank,
            lambda: self._rounds.get(name, 0) > passed,
            lambda: sorted(set(range(self.size)) - self._arrived[name]),
        )

    def all_gather(self, rank: int, value: Any) -> list[Any]:
        """Return the values of all ranks of all nodes, by rank; each calls it with its own."""
        values = self.local_gather(rank, value)
        if self.world.nodes == 1:
            return values
        if rank == 0:
            with self.among_nodes() as world:
                self._of_all = [value for node in world.gather(values) for value in node]
        self.local_barrier(rank, "all-gather of nodes")
        return list(self._of_all)

    def local_gather(self, rank: int, value: Any) -> list[Any]:
        """Return the values of the ranks of this node."""
        self._gathered[rank] = value
        self.local_barrier(rank, "all-gather")
        values = list(self._gathered)
        self.local_barrier(rank, "all-gather")
        return values

    @contextmanager
    def synchronized(self, rank: int, name: str, done: Callable[[], object]) -> Iterator[None]:
        """A block that all ranks begin together, and leave when `done` has returned in all.

        The first use of a kernel or communicator goes in here: loading it may wait for the GPU,
        which must not be waiting for other ranks meanwhile.
        """
        self.barrier(rank, name)
        yield
        done()
        self.barrier(rank, name)


class _Wait:
    """A wait of a rank: the seconds left of the deadline of the phase that the group is in.

    They begin anew with each phase, and while the root, for which others wait, waits for nodes.
    """

    def __init__(self, group: RankGroup, rank: int) -> None:
        self._group, self._rank, self._since = group, rank, group.since
        self._waited, self._looked = 0.0, time.monotonic()

    def left(self) -> float:
        """Return the seconds left; a pause of the whole process hardly counts."""
        group, now = self._group, time.monotonic()
        passed = min(now - self._looked, MOST_COUNTED)
        anew = self._since != group.since or (self._rank and group.root_is_away)
        self._waited = 0.0 if anew else self._waited + passed
        self._looked, self._since = now, group.since
        return group.deadlines[group.phase] - self._waited
