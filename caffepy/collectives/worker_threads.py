"""WorkerThreads: a thread for each rank but the root, with a queue of work from the root."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Generic, TypeVar

from caffepy.collectives.rank_group import RankGroup
from caffepy.core.abandoned import RANK_THREAD

Member = TypeVar("Member")

AHEAD = 4
"""Most items in a member's queue; the root waits while it has more."""


class WorkerThreads(Generic[Member]):
    """Threads of ranks 1, 2, ..., each with a member that `make` makes in it, inside `within`.

    An error in a thread stops the group; the root gets it wherever it waits for the group.
    """

    def __init__(
        self,
        group: RankGroup,
        make: Callable[[int], Member],
        within: Callable[[int], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.group = group
        self._within = within
        self.members: dict[int, Member] = {}
        self._make = make
        self._work: dict[int, deque[Callable[[Member], object]]] = {
            rank: deque() for rank in range(1, group.size)
        }
        self._awaited = False  # the root waits for members
        self._end: float | None = None  # when the threads must have ended
        self._threads: dict[int, threading.Thread] = {}
        for rank in self._work:
            name = f"{RANK_THREAD} {rank}"
            thread = threading.Thread(target=self._serve, args=(rank,), name=name, daemon=True)
            self._threads[rank] = thread

    def start(self) -> None:
        """Start the threads; returns at once."""
        for thread in self._threads.values():
            thread.start()

    def submit(self, work: Callable[[Member], object], rank: int | None = None) -> None:
        """Append work to the queue of one member, or of all; from the root's thread."""
        ranks = list(self._work) if rank is None else [rank]
        self._await(ranks, AHEAD)
        for r in ranks:
            self._work[r].append(work)
        self.group.wake(*ranks)

    def wait_idle(self) -> None:
        """Wait until all queues are empty; from the root's thread."""
        self._await(list(self._work), 1)

    def _await(self, ranks: Sequence[int], most: int) -> None:
        """Block the root until each rank's queue holds fewer than `most` items."""
        self._awaited = True
        self.group.until(0, lambda: not self._busy(ranks, most), lambda: self._busy(ranks, most))
        self._awaited = False

    @property
    def idents(self) -> list[int]:
        """Identifiers of the threads, in the order of their ranks, as in a dump of stacks."""
        return [thread.ident or 0 for thread in self._threads.values()]

    @property
    def left(self) -> list[int]:
        """Number of items in each rank's queue."""
        return [len(work) for work in self._work.values()]

    @property
    def at_work(self) -> list[int]:
        """Ranks that are busy and not blocked on another rank."""
        waiting = self.group.waiting
        busy = [rank for rank, work in self._work.items() if work and rank not in waiting]
        return [rank for rank in busy if self._threads[rank].is_alive()]

    def _busy(self, ranks: Sequence[int], most: int) -> list[int]:
        """Ranks whose queue has at least `most` items, or whose member is not made yet."""
        return [rank for rank in ranks if len(self._work[rank]) >= most or rank not in self.members]

    def end(self, seconds: float) -> list[int]:
        """End the threads; return those that still run `seconds` after the first call.

        Ranks that hang are not waited for.
        """
        self._end = self._end or time.monotonic() + seconds
        self.group.wake()
        for rank, thread in self._threads.items():
            if thread.ident is not None and rank not in self.group.missing:
                thread.join(max(0.0, self._end - time.monotonic()))
        return [rank for rank, thread in self._threads.items() if thread.is_alive()]

    def _serve(self, rank: int) -> None:
        # The group has the errors: nothing else is to be done with them here.
        with suppress(BaseException), self.group.guard(rank), self._within(rank):
            member = self._make(rank)
            self.members[rank] = member
            self.group.wake(0)
            work = self._work[rank]
            while True:
                self.group.until(rank, lambda: bool(work) or self._end is not None, lambda: [0])
                if not work:
                    break
                work[0](member)  # stays in the queue until it is done
                work.popleft()
                if self._awaited:
                    self.group.wake(0)
