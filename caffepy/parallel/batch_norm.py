"""BatchNorm statistics of solvers that train as one.

`--bn-stats` says which are tested and saved: those of the "root", as in Caffe, or the "average" of
all solvers' running statistics, which leaves each its own. With "sync" each batch is normalized
with the statistics of the batches of all ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from caffepy.collectives.rank_group import RankGroup
from caffepy.device.blob import Array
from caffepy.layer.batch_norm import BatchNorm
from caffepy.net import Net
from caffepy.parallel.nodes import gather
from caffepy.solver.statistics import Statistics, mean
from caffepy.solver.worker_group import GroupStatistics


def normalizing(net: Net) -> list[BatchNorm]:
    """Return the layers that compute statistics of their batches."""
    return [layer for layer in net.layers if isinstance(layer, BatchNorm) and not layer.is_global]


class RunningStatistics(GroupStatistics):
    """The running statistics of all solvers; `solvers` are this node's, the root's first.

    `kind` is that of --bn-stats. `wait_idle` waits for the workers and raises the error of one.
    """

    def __init__(
        self,
        kind: str,
        solvers: Sequence[Statistics],
        group: RankGroup,
        wait_idle: Callable[[], object],
    ) -> None:
        self._kind = kind
        self._solvers = solvers
        self._group = group
        self._wait_idle = wait_idle

    def _has(self, kind: str) -> bool:
        """True if --bn-stats is this and there are statistics; the workers are idle then."""
        has = self._kind == kind and not self._group.stopped and bool(self._solvers[0])
        if has:
            self._wait_idle()
        return has

    def _write(self, values: Sequence[Sequence[Array]]) -> None:
        for each, own in zip(self._solvers, values, strict=True):
            each.write(own)

    def average(self) -> None:
        """Replace the statistics of all solvers by their mean, for good."""
        if self._has("average"):
            every = gather(self._group, [each.present for each in self._solvers])
            self._write([mean(every)] * len(self._solvers))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Return a block in which all have the mean of their statistics; then each has its own
        again.

        After an error the workers, which may hang, are left alone.
        """
        if not self._has("average"):
            yield
            return
        root, *workers = self._solvers
        before = [each.present for each in self._solvers]
        for each in self._solvers:
            each.hold()
        means = mean(gather(self._group, before))
        with root.replaced(means):
            for each in workers:
                each.write(means)
            yield
            self._wait_idle()
        for each, own in zip(workers, before[1:], strict=True):
            each.write(own)

    def each(self, own: list[Array]) -> list[list[Array]]:
        """Return those that each solver trains on with, if they are averaged; else `own`."""
        if not self._has("average"):
            return [own]
        return gather(self._group, [own, *(each.own for each in self._solvers[1:])])

    def copy(self) -> None:
        """Give all solvers the statistics of the first of all, if those are tested."""
        if self._has("root"):
            first, *_ = gather(self._group, [self._solvers[0].present])
            self._write([first] * len(self._solvers))

    def restore(self, saved: Sequence[Sequence[Array]]) -> None:
        """Give each solver its own statistics of a state that the root has restored, if they are
        averaged.

        If the state is of another number of solvers, or the root has other statistics by now than
        their mean, all keep what they have.
        """
        world = self._group.world
        fits = len(saved) == world.size and self._solvers[0].are(mean(saved))
        if self._kind == "average" and fits:
            self._write(saved[world.first_rank :][: len(self._solvers)])


def share_batches(net: Net, all_gather: Callable[[Array], Sequence[Array]] | None) -> None:
    """Normalize with the statistics of the batches of all ranks from now on; None: of its own."""
    for layer in normalizing(net):
        layer.meet(all_gather and (lambda values: np.stack(all_gather(values))))
