"""Synchronizer: one rank's side of a way to keep solvers in step, as the solver calls it."""

from collections.abc import Sequence
from typing import NamedTuple

from caffepy.collectives.buckets import Bucket
from caffepy.collectives.rank_group import PATIENCE, RankGroup
from caffepy.device.blob import Array
from caffepy.device.device import Device
from caffepy.layer.inner_product import InnerProduct

FLOAT32, BF16 = WIRES = "float32", "bf16"
"""Types in which gradients go between nodes (--wire)."""


class FlatParams(NamedTuple):
    """One rank's device and its flat parameters and gradients.

    `buckets` are ranges of the gradients that may be reduced during the backward pass. They leave
    out the weights of the layers `factored`, whose gradients a synchronizer that takes buckets
    computes from the factors of all ranks. The last `metrics` elements of the diff are no gradients
    and always go between nodes as float32.
    """

    device: Device
    data: Array
    diff: Array
    buckets: Sequence[Bucket] = ()
    factored: Sequence[InnerProduct] = ()
    metrics: int = 0


class Synchronizer:
    """One rank's side; all methods are called in the rank's thread, in its device's scope."""

    updates = True  # this rank updates its parameters
    root_updates = False  # the root alone does so, and the others get its in `on_start`
    capturable = False  # its calls only enqueue work on the current stream
    reduces_early = False  # `after_backward` does something
    has_factors = False  # `update_by_factors` does something
    abort_flag = 0
    """Host address of the abort flag; nonzero after the all-reduce means that the averaged gradient
    is invalid. 0 on the CPU.
    """

    def __init__(self, group: RankGroup, rank: int) -> None:
        self.group, self.rank = group, rank
        self.universal_rank = group.world.first_rank + rank
        self.size = group.world.size  # solvers of all nodes

    def on_start(self) -> None:
        """Bring the parameters in step, before the forward pass."""

    def after_backward(self, layer: int) -> None:
        """Reduce what is final after this layer's backward pass, in an iteration of one pass."""

    def on_gradients_ready(self) -> None:
        """Make the diff the mean of all ranks', in the ranks that update parameters."""

    def update_by_factors(self) -> None:
        """Update the weights of layers that exchange factors and have `InnerProduct.update`, with
        the sum of all ranks' gradients.
        """

    def reduce(self, count: int) -> None:
        """Make the first `count` elements of the diff the mean of all ranks'."""

    def close(self, patience: float = PATIENCE) -> None:
        """Release all within `patience` s; captured graphs that use it must be freed first."""
