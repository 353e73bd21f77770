"""WorkerState: what a snapshot keeps of a worker, as it was at its last push."""

import copy
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from caffepy.device.blob import Array
from caffepy.parallel.nodes import own_positions
from caffepy.parallel.parameter_server.filters import Filters
from caffepy.solver import Solver
from caffepy.solver.positions import take_positions


class WorkerState:
    """Momentum, random numbers, running statistics and what filters kept back, of one clock.

    has_history: whether the momentum is the worker's own, and not in Caffe's files.
    """

    def __init__(self, solvers: Sequence[Solver], filters: Filters, has_history: bool) -> None:
        self._solvers, self._filters, self._has_history = solvers, filters, has_history
        self._keeping = threading.Lock()  # of what follows
        self._kept: dict[str, Any] = {}
        self._history: list[Array] = []

    def keep(self, clock: int) -> None:
        """Keep what there is at this clock, at which all solvers are idle."""
        solver, *_ = self._solvers
        positions = []
        for each in self._solvers:
            own = own_positions(take_positions([each.net], each.device), solver)
            positions.append(copy.deepcopy(own))
        with self._keeping:
            if self._has_history:
                with solver.device.scope():
                    self._history = self._history or [flat.copy() for flat in solver.history]
                    for mine, flat in zip(self._history, solver.history, strict=True):
                        mine[...] = flat
                    solver.device.synchronize()
            self._kept = {
                "clock": clock,
                "positions": positions,
                "statistics": [each.iterations.statistics.present for each in self._solvers],
                "rests": self._filters.rests,
            }

    def at(self, clock: int) -> dict[str, Any] | None:
        """Return what is kept if it is of this clock or a later one. Any thread may call it."""
        with self._keeping:
            if self._kept["clock"] < clock:
                return None
            history = []
            for flat in self._history:
                host = np.empty(flat.shape, flat.dtype)
                self._solvers[0].device.copy_beside(flat, host)
                history.append(host)
            return {**self._kept, "history": history}
