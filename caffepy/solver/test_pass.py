"""TestPass: a test net and its mean outputs over batches."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from caffepy import ops
from caffepy.core.errors import DataError
from caffepy.core.events import Output
from caffepy.device.blob import Array, shape_string
from caffepy.net import Net
from caffepy.solver.capture import GraphRunner
from caffepy.solver.step import losses

Shape = tuple[int, ...]


class Totals(NamedTuple):
    """Sums over a number of batches: of the outputs, in double precision, and of the loss."""

    batches: int
    outputs: list[Array]
    loss: float


class TestPass:
    """A test net and the sums of its outputs, and of its loss if asked for: `begin`, `batch` for
    each batch, `totals`; then `average` of the totals of all solvers.
    """

    def __init__(self, net: Net, what: str, fuse: bool, with_loss: bool) -> None:
        self.net = net
        self.graphs = GraphRunner(net, fuse and net.device.is_cuda, what)
        with net.device.scope():
            outputs = [net.blobs[name] for name in net.outputs]
            weighted = losses(net) if with_loss else []
            self._sums = ops.backend(net.device).Sums(outputs, weighted, net.device)
        self._with_loss = with_loss
        self.last_outputs: list[Output] = []  # the means of the last test
        self._batches = 0
        self._shapes: list[Shape] = []

    def begin(self, train_net: Net) -> None:
        """Zero the totals and share the parameters of this train net."""
        self.net.share_trained_layers_with(train_net)
        self._batches = 0

    def batch(self, replay: bool) -> None:
        """Run a batch, captured if `replay`; DataError if the shape of an output changes."""
        self.graphs.forward(replay)
        shapes = [self.net.blobs[name].shape for name in self.net.outputs]
        if not self._batches:
            self._shapes = shapes
            self._sums.clear()
        self._compare(self._shapes, shapes)
        self._sums.add()
        self._batches += 1

    def _compare(self, shapes: Sequence[Shape], others: Sequence[Shape]) -> None:
        for name, shape, other in zip(self.net.outputs, shapes, others, strict=True):
            if other != shape:
                raise DataError(
                    f'output "{name}" of a test net changed its shape between batches, from '
                    f"{shape_string(shape)} to {shape_string(other)}, so there is no mean"
                )

    def totals(self) -> Totals:
        """Return the sums; DataError if a GPU found bad data."""
        sums, loss = self._sums.read() if self._batches else ([], 0.0)
        self.net.device.check_errors()
        return Totals(self._batches, sums, loss)

    def average(self, parts: Sequence[Totals]) -> float | None:
        """Average the totals of all solvers into `last_outputs`; return the mean loss, if any."""
        parts = [part for part in parts if part.batches]
        batches = sum(part.batches for part in parts)
        weights = self.net.blob_loss_weights
        shapes = [[output.shape for output in part.outputs] for part in parts]
        for others in shapes[1:]:
            self._compare(shapes[0], others)
        self.last_outputs = []
        for name, *sums in zip(self.net.outputs, *(part.outputs for part in parts), strict=True):
            mean = (sum(sums) / batches).astype(np.float32)
            self.last_outputs.append((name, mean, weights[name]))
        return sum(part.loss for part in parts) / batches if self._with_loss else None
