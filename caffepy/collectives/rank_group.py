"""Group: ranks that work in threads of one process, wait for one another, and stop together.

Every wait ends: when its condition holds, when a rank has failed, or when the deadline of the phase
has passed; then the rank that is missing is named, with what every thread was doing.
"""

import logging
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy

from caffepy.core.errors import CaffeError, DivergenceError, SyncError

log = logging.getLogger(__name__)

DEADLINES = {"set-up": 900.0, "step": 300.0, "test": 900.0, "snapshot": 900.0, "idle": math.inf}
"""Seconds after which a rank that others wait for counts as hung, by phase."""

TICK = 0.5
"""Seconds between looks at whether others have failed, for a rank that waits where nobody can wake
it.
"""

MOST = 2 * TICK
"""Seconds that count at most from one look to the next: more have passed where the whole process
was stopped.
"""

PATIENCE = 3.0
"""Seconds after which nobody waits any longer for a library to let go of its memory."""


class GroupStoppedError(SyncError):
    """Raised in the other ranks, but not in the root, when one has failed: the group has stopped."""


class RankGroup:
    """`size` ranks, rank 0 being the root. All methods may be called from any rank's thread.

    The root gets the error of the rank that failed, which it names, wherever it waits for others.
    While it waits it calls `interrupted` now and then, which may raise. Of ranks that hang
    `hung_ranks` finds those that others only wait for, given the ones that are missing; what waits
    outside was ended before.
    """

    def __init__(self, size: int, deadlines: Mapping[str, float] = DEADLINES) -> None:
        self.size = size
        self.deadlines = {**DEADLINES, **deadlines}
        self.failure: tuple[int, BaseException] | None = None
        self.missing: list[int] = []  # ranks that were found to hang
        self.interrupted: Callable[[], object] = lambda: None
        self.hung_ranks: Callable[[list[int]], list[int]] = lambda missing: missing
        self.waiting: set[int] = set()  # ranks that wait for others
        self._giving_up = False  # ranks hang, and which is being found out
        self._settled = threading.Event()  # there is a failure
        self._lock = threading.RLock()
        self._asleep = [
            threading.Lock() for _ in range(size)
        ]  # what a rank that waits takes, and who wakes it gives
        for asleep in self._asleep:
            asleep.acquire()
        self.phase = "set-up"
        self._arrived: dict[str, set[int]] = {}
        self._rounds: dict[str, int] = {}
        self._turns: dict[object, int] = {}
        self._names: dict[int, int] = {}  # rank -> thread
        self._on_abort: list[Callable[[], object]] = []
        self._noticed = threading.Event()

    @property
    def phase(self) -> str:
        """What the ranks are at, which decides how long one may wait for another."""
        return self._phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self._phase, self._since = phase, time.monotonic()

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """A block that is another phase."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def join(self, rank: int) -> None:
        """Say that the calling thread is this rank's."""
        self._names[rank] = threading.get_ident()

    def on_abort(self, callback: Callable[[], object]) -> None:
        """Call this once when the group stops for an error: to end what waits outside, such as a
        communicator.
        """
        self._on_abort.append(callback)

    def abort(self, rank: int, error: BaseException) -> None:
        """Let every rank stop because of this error, which the rank itself has met; the first one
        counts.
        """
        if rank == 0:
            self.notice()
        with self._lock:
            if self.stopped:  # what is met after that may be what the first one did to others
                return
            self._fail(rank, error)
        self._end_waits()

    def abort_hung(self, missing: list[int], seconds: float, more: str = "") -> None:
        """Let every rank stop because these, or those that they wait for, made no progress for so
        long.

        Errors that ranks meet while the hung_ranks are found do not count.
        """
        with self._lock:
            if self.stopped:
                return
            self._giving_up = True
        found, doing = missing, ""
        try:
            doing = stacks(self._names)
            self._end_waits()
            found = self.hung_ranks(missing)
        finally:
            self.missing = found
            names = ", ".join(f"rank {rank}" for rank in found) or "another rank"
            waited = more if found == missing else ""
            error = SyncError(f"{names} made no progress for {seconds:g} s ({self.phase}){waited}")
            log.error("%s\n%s", error, doing)
            self._fail(found[0] if found else 0, error)

    def _fail(self, rank: int, error: BaseException) -> None:
        self.failure = rank, error
        self._giving_up = False
        self._settled.set()
        self.wake()

    @property
    def stopped(self) -> bool:
        """Whether a rank has failed, or ranks were found to hang."""
        return self._giving_up or self.failure is not None

    def wait_failure(self) -> tuple[int, BaseException] | None:
        """The failure, also if it is only being found out; None if there is none."""
        if self._giving_up:
            self._settled.wait()
        return self.failure

    def _end_waits(self) -> None:
        """End what waits outside, as `on_abort` said."""
        callbacks, self._on_abort = self._on_abort, []
        for callback in callbacks:
            callback()

    def notice(self) -> None:
        """Say that the root has heard that the group has stopped."""
        self._noticed.set()

    def root_notices(self, seconds: float) -> bool:
        """Whether the root has heard, or hears within so many seconds, that the group has stopped."""
        return self._noticed.wait(seconds)

    @contextmanager
    def guard(self, rank: int) -> Iterator[None]:
        """Whatever the block raises stops the group."""
        self.join(rank)
        try:
            yield
        except GroupStoppedError:
            raise
        except BaseException as error:
            self.abort(rank, error)
            raise

    def check(self, rank: int | None = None) -> None:
        """If a rank has failed, its error in the root, GroupStoppedError in others."""
        failure = self.wait_failure() if rank == 0 else self.failure
        if failure:
            failed, error = failure
            if rank == 0:
                self.notice()
                raise named(failed, error)
            raise GroupStoppedError(f"rank {failed} failed: {error}") from error

    def until(self, rank: int, holds: Callable[[], bool], missing: Callable[[], list[int]]) -> None:
        """Return when `holds()`, which others bring about, leave so and tell by `wake`; `missing()`
        are waited for.
        """
        if not holds():
            self._wait(rank, holds, missing)
        self.check(rank)

    def wake(self, *ranks: int) -> None:
        """Let these ranks, or all, look whether they still wait."""
        with self._lock:
            for rank in ranks or range(self.size):
                if self._asleep[rank].locked():
                    self._asleep[rank].release()

    def root_cause(self, error: Exception) -> BaseException:
        """The error that counts where the root has met this one: what a rank failed of before, if
        one did.
        """
        failure = self.wait_failure()
        if failure is None:
            return error
        self.notice()
        rank, cause = failure
        if isinstance(cause, DivergenceError) and isinstance(error, DivergenceError):
            return error
        return named(rank, cause) if rank else cause

    def _wait(self, rank: int, holds: Callable[[], bool], missing: Callable[[], list[int]]) -> None:
        self.waiting.add(rank)
        try:
            self._wait_until(rank, holds, missing)
        finally:
            self.waiting.discard(rank)

    def _wait_until(
        self, rank: int, holds: Callable[[], bool], missing: Callable[[], list[int]]
    ) -> None:
        waited, looked, since = 0.0, time.monotonic(), self._since
        while not holds():
            self.check(rank)
            if rank == 0:
                self.interrupted()
            now = time.monotonic()
            waited = waited + min(now - looked, MOST) if since == self._since else 0.0
            looked, since = now, self._since
            seconds = self.deadlines[self.phase]
            left = seconds - waited
            if left < 0:
                self.abort_hung(missing(), seconds, f"; rank {rank} waited for it")
                self.check(rank)
            self._asleep[rank].acquire(timeout=min(TICK, left + 1e-3) if left >= 0 else TICK)

    def barrier(self, rank: int, name: str = "") -> None:
        """Return when all ranks have come here."""
        with self._lock:
            arrived = self._arrived.setdefault(name, set())
            turn = self._rounds.get(name, 0)
            arrived.add(rank)
            if len(arrived) == self.size:
                self._arrived[name] = set()
                self._rounds[name] = turn + 1
                self.wake()
        self.until(
            rank,
            lambda: self._rounds.get(name, 0) > turn,
            lambda: sorted(set(range(self.size)) - self._arrived[name]),
        )

    @contextmanager
    def synchronized(self, rank: int, name: str, done: Callable[[], object]) -> Iterator[None]:
        """A block that all ranks begin together, and leave when `done` has returned in all.

        So that nothing is set up, such as a kernel that is loaded, while a GPU waits for others: it
        may wait for that.
        """
        self.barrier(rank, name)
        yield
        done()
        self.barrier(rank, name)

    @contextmanager
    def round_robin(self, rank: int, key: object) -> Iterator[None]:
        """The ranks enter the block one after the other, 0, 1, ..., and again from 0; `key` names
        what they share.
        """
        self.await_turn(rank, key)
        yield
        following = self._turns[key] = (rank + 1) % self.size
        self.wake(following)

    def await_turn(self, rank: int, key: object) -> None:
        """Return when `turn` would let the rank enter; it does not count as one."""
        self.until(rank, lambda: self._turns.get(key, 0) == rank, lambda: [self._turns.get(key, 0)])

    def restart_turns(self) -> None:
        """Let the next turns be rank 0's; nobody may be in one or wait for one."""
        self._turns.clear()


def named(rank: int, error: BaseException) -> BaseException:
    """The error with the rank that it comes from."""
    place, note = f"rank {rank}", f"(rank {rank})"
    if not isinstance(error, CaffeError):
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        return error
    told = copy(error)  # of which where it is raised may tell
    if not str(error).startswith("rank "):
        told.where = f"{place}: {error.where}" if error.where else place
    return told.with_traceback(error.__traceback__)


def stacks(names: Mapping[int, int]) -> str:
    """What every thread is doing; `names` gives the threads of ranks."""
    ranks = {thread: f"rank {rank}" for rank, thread in names.items()}
    threads = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"{ranks.get(ident, threads.get(ident, str(ident)))}:\n{''.join(traceback.format_stack(frame)).rstrip()}"
        for ident, frame in sys._current_frames().items()
    )
