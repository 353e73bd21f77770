"""Synchronization of solvers that compute on the CPU: any schedule, on their flat arrays."""

from collections.abc import Sequence

from caffepy.collectives.rank_group import PATIENCE, RankGroup
from caffepy.collectives.schedule import Level, Schedule, adding, copying
from caffepy.device.blob import Array


class HostSync:
    """Synchronizer that runs a schedule on numpy arrays: each rank does the steps that write to its
    own array.

    `data` and `diffs` are the flat arrays of all ranks. With `root_updates` only the root updates
    its parameters: the other ranks get them before each iteration, and only the root gets the sum.
    """

    capturable = False
    abort_flag = 0

    def __init__(
        self,
        group: RankGroup,
        rank: int,
        schedule: Schedule,
        data: Sequence[Array],
        diffs: Sequence[Array],
        root_updates: bool = False,
    ) -> None:
        self.group, self.rank, self.size = group, rank, group.size
        self.updates = rank == 0 or not root_updates
        self._schedule, self._data, self._diffs = schedule, data, diffs
        self._down, self._up = copying(schedule), adding(schedule)
        self._root_updates = root_updates

    def on_start(self) -> None:
        """Get the root's parameters, if only the root updates them."""
        if self._root_updates:
            self._run(self._down, self._data)

    def after_backward(self, layer: int) -> None:
        """Do nothing: all gradients are summed at once."""

    def on_gradients_ready(self) -> None:
        """Make the diff the mean of all ranks', in the ranks that update parameters."""
        self.reduce(self._diffs[self.rank].size)

    def reduce(self, count: int) -> None:
        """Make the first `count` elements of the diff the mean of all ranks'."""
        diffs = [diff[:count] for diff in self._diffs]
        self._run(self._up if self._root_updates else self._schedule, diffs)
        if self.updates:
            mine = diffs[self.rank]
            mine *= mine.dtype.type(1 / self.size)

    def close(self, patience: float = PATIENCE) -> None:
        """Do nothing: there is no communicator."""

    def _run(self, levels: Sequence[Level], buffers: Sequence[Array]) -> None:
        self.group.barrier(self.rank, "level")
        for level in levels:
            for step in level:
                if step.destination == self.rank:
                    step.apply(buffers)
            self.group.barrier(self.rank, "level")
