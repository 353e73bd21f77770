"""Leases: the batches that a worker of a parameter server takes, share after share; Dealer: who
gets which, for the coordinator.

All workers read the same batches 0, 1, 2, ... of the data. No batch is dealt to two workers, and a
worker gets as many as it is fast.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import NamedTuple

from caffepy.data.reader import Turn
from caffepy.parallel.parameter_server.messages import View


class Lease(NamedTuple):
    """The batches `first`, `first + stride`, ... of one clock of a worker."""

    first: int
    stride: int


class Leases:
    """The leases of a worker from `clock` on, of `share` batches each; `ask` returns that of a
    clock. Data layers stand at batch `position` now, which may be below 0.

    Any thread may ask: those of data layers are ahead of the solver.
    """

    def __init__(
        self, ask: Callable[[int], Lease], share: int, clock: int, position: int = 0
    ) -> None:
        self.share = share
        self._ask, self._clock, self._position = ask, clock, position
        self._leases: list[Lease] = []
        self._lock = threading.Lock()

    def number(self, i: int) -> int:
        """Return the number of the worker's batch `i`, counted from 0."""
        k, j = divmod(i, self.share)
        with self._lock:
            while k >= len(self._leases):
                self._leases.append(self._ask(self._clock + len(self._leases)))
            first, stride = self._leases[k]
        return first + j * stride

    def after(self, taken: int) -> int:
        """Return the number of the batch at which data layers stand after so many were taken."""
        return self.number(taken - 1) + 1 if taken else self._position

    def turns(self, taken: int) -> Iterator[Turn]:
        """Yield what a data layer that has given so many batches skips and gives then."""
        position = self.after(taken)
        for i in count(taken):
            number = self.number(i)
            yield Turn(number - position, 0, 0)
            position = number + 1


class Dealer:
    """Deals batches to the members of a view.

    With slack 0 the members of a clock take batches in turn, as solvers do that train in step: a
    clock is dealt to all of them when the first one asks. `shares` are the batches that each worker
    takes a clock. `knows` is unset from a restart until `recall`.
    """

    def __init__(self) -> None:
        self.shares: dict[int, int] = {}
        self.knows = asyncio.Event()
        self.knows.set()
        self._next = 0  # the batch that is dealt next
        self._dealt: dict[int, dict[int, Lease]] = {}  # not asked for, by clock and worker
        self._told: dict[int, dict[int, Lease]] = {}  # asked for, as workers tell

    def lease(self, view: View, worker: int, clock: int) -> Lease:
        """Return the batches of a worker at a clock."""
        if view.rule.slack:
            return self._deal(self.shares[worker])
        if clock not in self._dealt:
            self._deal_clock(view, clock)
        lease = self._dealt[clock].pop(worker, None) or self._deal(self.shares[worker])
        for earlier in [c for c in self._dealt if c <= clock]:
            if not self._dealt[earlier].keys() & view.members.keys():
                del self._dealt[earlier]
        return lease

    def hear(self, worker: int, share: int, leases: Mapping[int, Lease]) -> None:
        """Note the share of a worker; after a restart also what it was dealt lately, by clock."""
        self.shares[worker] = share
        for clock, lease in leases.items() if not self.knows.is_set() else ():
            self._told.setdefault(clock, {})[worker] = lease

    def recall(self, view: View) -> None:
        """Go on from what workers told."""
        for clock, told in sorted(self._told.items()):
            ends = [first + stride * self.shares[w] for w, (first, stride) in told.items()]
            shares = self._of_clock(view, clock)
            alike = len({*shares.values()}) == 1
            worker, (first, stride) = min(told.items())
            if not view.rule.slack and stride == (len(shares) if alike else 1):
                before = [w for w in shares if w < worker]
                self._next = first - (len(before) if alike else sum(shares[w] for w in before))
                self._deal_clock(view, clock)
                for own in told:
                    self._dealt[clock].pop(own, None)
            else:
                self._next = max(self._next, *ends)
        self._told = {}
        self.knows.set()

    def _deal(self, batches: int) -> Lease:
        self._next += batches
        return Lease(self._next - batches, 1)

    def _deal_clock(self, view: View, clock: int) -> None:
        shares = self._of_clock(view, clock)
        if len({*shares.values()}) == 1:
            first, _ = self._deal(sum(shares.values()))
            self._dealt[clock] = {w: Lease(first + i, len(shares)) for i, w in enumerate(shares)}
        else:
            self._dealt[clock] = {w: self._deal(own) for w, own in shares.items()}

    def _of_clock(self, view: View, clock: int) -> dict[int, int]:
        """Return the shares of the members at a clock, in their order."""
        members = sorted(view.members.items())
        return {w: self.shares.get(w, 0) for w, begins in members if begins <= clock}
