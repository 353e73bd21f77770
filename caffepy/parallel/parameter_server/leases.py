"""Leases: the batches that a worker of a parameter server takes, share after share.

All workers read the same batches 0, 1, 2, ... of the data. The coordinator deals them: no batch to
two workers, and to a worker as many as it is fast.
"""

import threading
from collections.abc import Callable, Iterator
from itertools import count
from typing import NamedTuple

from caffepy.data.reader import Turn


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
