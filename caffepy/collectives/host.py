"""Synchronization of solvers that compute on the CPU: any schedule, on their flat arrays."""

from collections.abc import Sequence

from caffepy.collectives.rank_group import RankGroup
from caffepy.collectives.schedule import Schedule, adding, copying
from caffepy.collectives.synchronizer import Synchronizer
from caffepy.device.blob import Array


class HostSync(Synchronizer):
    """Synchronizer that runs a schedule on numpy arrays: each rank does the steps that write to its
    own array.

    `data` and `diffs` are the flat arrays of all ranks. With `root_updates` only the root updates
    its parameters: the other ranks get them before each iteration, and only the root gets the sum.
    """

    def __init__(
        self,
        group: RankGroup,
        rank: int,
        schedule: Schedule,
        data: Sequence[Array],
        diffs: Sequence[Array],
        root_updates: bool = False,
    ) -> None:
        super().__init__(group, rank)
        self.updates = rank == 0 or not root_updates
        self._data, self._diffs = data, diffs
        self._down = copying(schedule) if root_updates else ()
        self._up = adding(schedule) if root_updates else schedule

    def on_start(self) -> None:
        if self._down:
            self._run(self._down, self._data)

    def on_gradients_ready(self) -> None:
        self.reduce(self._diffs[self.rank].size)

    def reduce(self, count: int) -> None:
        diffs = [diff[:count] for diff in self._diffs]
        self._run(self._up, diffs)
        if self.updates:
            mine = diffs[self.rank]
            mine *= mine.dtype.type(1 / self.size)

    def _run(self, schedule: Schedule, buffers: Sequence[Array]) -> None:
        self.group.barrier(self.rank, "level")
        for level in schedule:
            for step in level:
                if step.destination == self.rank:
                    step.apply(buffers)
            self.group.barrier(self.rank, "level")
