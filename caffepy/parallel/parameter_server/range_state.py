"""RangeState: one key range as a server holds it. Its methods are a function of the operations in
their order, so that a replica that gets the primary's operations in its order has its bits.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from caffepy.core.errors import UsageError
from caffepy.device.blob import Array
from caffepy.parallel.parameter_server.filters import differing_rows
from caffepy.parallel.parameter_server.messages import Push, Rule, ServerUpdate, View


class RangeState:
    """Values of a range and the clocks of the members: the number of pushes counted of each.

    Arrays are replaced, never written to, so that they may be sent while pushes go on, and be
    read-only where they were received.
    `version` is the number of operations so far; `row` is the range's, see `KeyRange`. `_early` are
    pushes of a clock that not all members have reached, by clock and worker: with slack 0 they are
    added up together, in the order of the workers, so that it does not matter who came first.
    `update_state` is what the servers' update keeps.
    """

    def __init__(
        self,
        values: Array,
        rule: Rule,
        is_mean: bool,
        row: int = 0,
        update_state: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.values = values.copy()
        self.clocks: dict[int, int] = {}
        self.version = 0
        self.is_mean, self.row = is_mean, row
        self._rule = rule
        self._changed = np.zeros(values.size // row if row else 0, np.int64)  # version, of each row
        self._early: dict[int, dict[int, Array]] = {}
        self._own: dict[int, Array] = {}  # of each worker, if the value is their mean
        self.update_state = dict(update_state)
        self._ended = False

    def push(self, push: Push, decode: Callable[[Any], Array]) -> bool:
        """Count a push unless it is there already, or its worker is no member: return if so."""
        worker, clock = push.worker, push.clock
        if clock < self.clocks.get(worker, clock + 1):
            return False
        self.version += 1
        self.clocks[worker] = clock + 1
        if self._ended:
            return True
        array = decode(push.payload)
        if self.is_mean:
            self._own[worker] = array
            self._average()
        elif self._rule.slack:
            with np.errstate(all="ignore"):  # overflows show in the workers' losses
                change = array * np.float32(1 / push.members)
                change += self.values
                self._set(change)
        else:
            self._early.setdefault(clock, {})[worker] = array
            self._close()
        return True

    def set_members(self, view: View) -> None:
        """Continue with the members of a view: a clock may be complete without those that left.

        With slack 0, of a push that only other ranges have got, this one gets zeros, so that all
        ranges average as many.
        """
        self.version += 1
        members, self._ended = view.members, view.ended
        if self._ended:
            self._early.clear()
        for worker, reached in view.left.items() if not (self.is_mean or self._rule.slack) else ():
            for clock in range(self.clocks.get(worker, reached), reached):
                self._early.setdefault(clock, {})[worker] = np.zeros_like(self.values)
        self._own = {worker: own for worker, own in self._own.items() if worker in members}
        self.clocks = {worker: self.clocks.get(worker, first) for worker, first in members.items()}
        self._close()

    def slowest(self) -> int:
        """Return the clock that all members have reached."""
        return min(self.clocks.values(), default=0)

    def last(self) -> int:
        """Return the worker that has pushed least often."""
        return min(self.clocks, key=self.clocks.__getitem__)

    def rows_since(self, version: int) -> Array | None:
        """Return the rows that changed after this version; None, for all, if it is negative or the
        range has no rows.
        """
        if version < 0 or not self.row:
            return None
        return np.flatnonzero(self._changed > version)

    def _set(self, values: Array) -> None:
        if self.row:
            rows, before = (array.reshape(-1, self.row) for array in (values, self.values))
            differ = differing_rows(rows, before)
            self._changed = np.where(differ, self.version, self._changed)
        self.values = values

    def _average(self) -> None:
        own = [self._own[worker] for worker in sorted(self._own)]
        self._set(_sum(own) * np.float32(1 / len(own)))

    def _close(self) -> None:
        """Add up the pushes of the clocks that all members have reached."""
        for clock in sorted(self._early):
            if clock >= self.slowest():
                break
            pushed = self._early.pop(clock)
            total = _sum([pushed[worker] for worker in sorted(pushed)])
            with np.errstate(all="ignore"):
                total *= np.float32(1 / len(pushed))
                if self._rule.gradients:
                    self._set(total)
                elif self._rule.update:
                    self._set(self._updated(self._rule.update, total))
                else:
                    total += self.values
                    self._set(total)

    def _updated(self, update: ServerUpdate, change: Array) -> Array:
        """Return the new values; UsageError if the update gives something else."""
        values = self.values.view()
        values.flags.writeable = change.flags.writeable = False
        new = update(values, change, self.update_state)
        if np.shape(new) != values.shape:
            raise UsageError(
                "an update of the servers must return the new values, as many as it was given: "
                f"{values.size}, not an array of shape {np.shape(new)}"
            )
        return np.asarray(new, np.float32)


def _sum(arrays: list[Array]) -> Array:
    total = arrays[0].copy()
    with np.errstate(all="ignore"):
        for array in arrays[1:]:
            total += array
    return total
