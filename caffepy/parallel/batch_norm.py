"""BatchNorm statistics of solvers that train as one.

`--bn-stats` says which are tested and saved: those of the "root", as in Caffe, or the "average" of
all solvers' running statistics. With "sync" each batch is normalized with the statistics of the
batches of all ranks.
"""

from collections.abc import Callable, Sequence

import numpy as np

from caffepy.device.blob import Array, Blob
from caffepy.layer.normalization import BatchNorm
from caffepy.net import Net


def normalizing(net: Net) -> list[BatchNorm]:
    """Return the layers that compute statistics of their batches."""
    return [layer for layer in net.layers if isinstance(layer, BatchNorm) and not layer.is_global]


def statistics(net: Net) -> list[Blob]:
    """Return the parameters that layers compute from the data they see, not from gradients."""
    return [blob for layer in net.layers for blob in layer.statistics]


def average(nets: Sequence[Net]) -> None:
    """Make the statistics of these nets, which must be idle, the mean over all of them."""
    for blobs in zip(*map(statistics, nets), strict=True):
        mean = np.mean([blob.host_data for blob in blobs], axis=0, dtype=np.float64)
        for blob in blobs:
            blob.host_data[...] = mean


def copy(nets: Sequence[Net]) -> None:
    """Give these nets, which must be idle, the statistics of the first."""
    for first, *others in zip(*map(statistics, nets), strict=True):
        for blob in others:
            blob.host_data[...] = first.host_data


def share_batches(net: Net, all_gather: Callable[[Array], Sequence[Array]] | None) -> None:
    """Normalize with the statistics of the batches of all ranks from now on; None: of its own."""
    for layer in normalizing(net):
        layer.meet(all_gather and (lambda values: np.stack(all_gather(values))))
