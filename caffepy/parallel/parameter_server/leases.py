"""Leases: the batches that a worker of a parameter server takes, share after share; Dealer: who
gets which, for the coordinator.

All workers read the same batches 0, 1, 2, ... of the data. No batch is dealt to two workers, and a
worker gets as many as it is fast. A worker reads forwards only.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count

from caffepy.data.reader import Turn
from caffepy.parallel.parameter_server.messages import View

KEPT = 32
"""Clocks of which it is kept what a worker was dealt: more than data layers read ahead."""

Lease = Sequence[int]
"""The numbers of the batches of one clock of a worker, in rising order."""


class Leases:
    """The leases of a worker from `clock` on; `ask` returns that of a clock. Data layers stand at
    batch `position` now, which may be below 0.

    A worker of several `solvers` takes as many batches at a time, one for each: a lease has
    `share` times `solvers` batches, and all workers have as many solvers.

    Any thread may ask: those of data layers are ahead of the solver.
    """

    def __init__(
        self,
        ask: Callable[[int], Lease],
        share: int,
        clock: int,
        position: int = 0,
        solvers: int = 1,
    ) -> None:
        self.share, self.solvers = share, solvers
        self._ask, self._clock, self._position = ask, clock, position
        self._leases: list[Lease] = []
        self._lock = threading.Lock()

    def number(self, i: int) -> int:
        """Return the number of the worker's batch `i`, counted from 0."""
        times, solver = divmod(i, self.solvers)
        k, j = divmod(times, self.share)
        with self._lock:
            while k >= len(self._leases):
                self._leases.append(self._ask(self._clock + len(self._leases)))
            return self._leases[k][j] * self.solvers + solver

    def after(self, taken: int) -> int:
        """Return the number of the batch at which data layers stand after `taken` batches."""
        return self.number(taken - 1) + 1 if taken else self._position

    def turns(self, taken: int) -> Iterator[Turn]:
        """Yield what a data layer skips and gives after the first `taken` batches."""
        position = self.after(taken)
        for i in count(taken):
            number = self.number(i)
            yield Turn(number - position, i % self.solvers, 0)
            position = number + 1


class Dealer:
    """Deals batches to the members of a view.

    With slack 0 the members of a clock take batches in turn, as solvers do that train in step: a
    clock is dealt to all of them when the first one asks. Batches of which the worker has left, or
    died, before it pushed what it learned from them are dealt again: to the next that has not read
    beyond them, at the latest one that joins.

    `shares` are the batches that each worker takes a clock. `knows` is unset from a restart until
    `recall`.
    """

    def __init__(self) -> None:
        self.shares: dict[int, int] = {}
        self.again: list[int] = []  # to be dealt again, in rising order
        self.knows = asyncio.Event()
        self.knows.set()
        self._next = 0  # the batch that is dealt next
        self._clock = 0  # with slack 0 the clock that is dealt next
        self._dealt: dict[tuple[int, int], Lease] = {}  # not asked for, by clock and worker
        self._taken: dict[int, dict[int, Lease]] = {}  # by worker and clock
        self._read: dict[int, int] = {}  # up to where each worker reads

    def lease(self, view: View, worker: int, clock: int) -> Lease:
        """Return the batches of a worker at a clock; the same when it asks again."""
        taken = self._taken.setdefault(worker, {})
        if clock not in taken:
            if not view.rule.slack and clock >= self._clock:
                self._deal(clock, self._of_clock(view, clock))
                self._clock = clock + 1
            if (clock, worker) not in self._dealt:
                self._deal(clock, {worker: self.shares[worker]})
            taken[clock] = self._dealt.pop((clock, worker))
            for old in [c for c in taken if c <= clock - KEPT]:
                del taken[old]
        return taken[clock]

    def join(self, worker: int, clock: int) -> None:
        """Deal to a worker, whose first clock this is, of the clocks that are dealt already."""
        for dealt in range(clock, self._clock):
            self._deal(dealt, {worker: self.shares[worker]})

    def leave(self, worker: int, clock: int) -> None:
        """Deal again what a worker, who has left, has not pushed: that of this clock and later."""
        taken = self._taken.pop(worker, {})
        back = [lease for c, lease in taken.items() if c >= clock]
        back += [self._dealt.pop(key) for key in [*self._dealt] if key[1] == worker]
        self.again = sorted({*self.again}.union(*back))

    def hear(self, worker: int, share: int, leases: Mapping[int, Lease]) -> None:
        """Note the share of a worker; after a restart also what it was dealt lately, by clock."""
        self.shares[worker] = share
        if not self.knows.is_set():
            self._taken.setdefault(worker, {}).update(leases)

    def recall(self, view: View) -> None:
        """Continue from what workers reported."""
        leased: dict[int, dict[int, Lease]] = {}
        for worker, taken in self._taken.items():
            self._read[worker] = max((lease[-1] + 1 for lease in taken.values()), default=0)
            for clock, lease in taken.items():
                leased.setdefault(clock, {})[worker] = lease
        for clock, leases in sorted(leased.items()):
            shares = self._of_clock(view, clock)
            worker, lease = min(leases.items())
            fresh = _in_turn(0, shares)
            if not view.rule.slack and worker in fresh:
                first = lease[0] - fresh[worker][0]
                if list(lease) == [first + number for number in fresh[worker]]:
                    dealt = _in_turn(first, shares)
                    self._dealt |= {(clock, w): dealt[w] for w in shares if w not in leases}
                    self._next = max(self._next, first + sum(shares.values()))
                self._clock = clock + 1
            self._next = max(self._next, *(own[-1] + 1 for own in leases.values()))
        self.knows.set()

    def _deal(self, clock: int, shares: Mapping[int, int]) -> None:
        """Deal batches of a clock: first those that are to be dealt again."""
        found = dict[int, list[int]]()
        for worker, share in shares.items():
            ahead = [n for n in self.again if n >= self._read.get(worker, 0)]
            found[worker] = ahead[:share]
            self.again = [n for n in self.again if n not in found[worker]]
        missing = {worker: share - len(found[worker]) for worker, share in shares.items()}
        for worker, fresh in _in_turn(self._next, missing).items():
            lease = [*found[worker], *fresh] if found[worker] else fresh
            self._dealt[clock, worker] = lease
            self._read[worker] = max([self._read.get(worker, 0), *(n + 1 for n in lease[-1:])])
        self._next += sum(missing.values())

    def _of_clock(self, view: View, clock: int) -> dict[int, int]:
        """Return the shares of the members at a clock, in their order."""
        members = sorted(view.members.items())
        return {w: self.shares.get(w, 0) for w, begins in members if begins <= clock}


def _in_turn(first: int, shares: Mapping[int, int]) -> dict[int, range]:
    """Return the batches of workers from the `first` on: in turn, or if their shares differ one
    after the other.
    """
    if len({*shares.values()}) == 1:
        end = first + sum(shares.values())
        return {w: range(first + i, end, len(shares)) for i, w in enumerate(shares)}
    leases = dict[int, range]()
    for worker, share in shares.items():
        leases[worker] = range(first, first + share)
        first += share
    return leases
