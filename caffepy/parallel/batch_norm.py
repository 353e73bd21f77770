"""BatchNorm statistics of solvers that train as one.

`--bn-stats` says which are tested and saved: those of the "root", as in Caffe, or the "average" of
all solvers' running statistics, which leaves each its own. With "sync" each batch is normalized
with the statistics of the batches of all ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from caffepy.device.blob import Array
from caffepy.layer.normalization import BatchNorm
from caffepy.net import Net
from caffepy.solver.statistics import Statistics, mean

Gather = Callable[[Sequence[list[Array]]], Sequence[list[Array]]]


def normalizing(net: Net) -> list[BatchNorm]:
    """Return the layers that compute statistics of their batches."""
    return [layer for layer in net.layers if isinstance(layer, BatchNorm) and not layer.is_global]


def average(solvers: Sequence[Statistics], gather: Gather = list) -> None:
    """Give all solvers, which must be idle, the mean of their statistics.

    Here and below, `gather` returns the values of all nodes' solvers for those of this node's.
    """
    _write(solvers, [mean(gather([each.present for each in solvers]))] * len(solvers))


def _write(solvers: Sequence[Statistics], values: Sequence[Sequence[Array]]) -> None:
    for each, own in zip(solvers, values, strict=True):
        each.write(own)


@contextmanager
def averaged(
    solvers: Sequence[Statistics], wait_idle: Callable[[], object], gather: Gather = list
) -> Iterator[None]:
    """A block in which all solvers have the mean of their statistics, the root's first; then each
    has its own again. They are idle, and so after `wait_idle`.

    After an error the workers, which may hang, are left alone.
    """
    root, *workers = solvers
    before = [each.present for each in solvers]
    for each in solvers:
        each.hold()
    with root.replaced(mean(gather(before))):
        _write(workers, [root.present] * len(workers))
        yield
        wait_idle()
    _write(workers, before[1:])


def copy(solvers: Sequence[Statistics], gather: Gather = list) -> None:
    """Give all solvers, which must be idle, the statistics of the first of all."""
    first, *_ = gather([solvers[0].present])
    _write(solvers, [first] * len(solvers))


def restore(
    solvers: Sequence[Statistics], saved: Sequence[Sequence[Array]], first: int, size: int
) -> None:
    """Give each solver its own statistics of a state that the root, the first, has restored.

    `first` is the universal rank of the root, `size` the number of solvers of all nodes. If the
    state is of another number, or the root has other statistics by now than their mean, all keep
    what they have.
    """
    if len(saved) == size and solvers[0].are(mean(saved)):
        _write(solvers, saved[first : first + len(solvers)])


def share_batches(net: Net, all_gather: Callable[[Array], Sequence[Array]] | None) -> None:
    """Normalize with the statistics of the batches of all ranks from now on; None: of its own."""
    for layer in normalizing(net):
        layer.meet(all_gather and (lambda values: np.stack(all_gather(values))))
