"""Tests of a net: its mean outputs over batches."""

import numpy as np

from caffepy import ops
from caffepy.blob import shape_string
from caffepy.errors import DataError
from caffepy.net import Net
from caffepy.reporter import Output
from caffepy.solver.captured import Pass
from caffepy.solver.step import losses


class Trial:
    """A test net and the sums of what it gives, with its loss if that is asked for: `begin`, `batch`..., `means`."""

    def __init__(self, net: Net, what: str, fuse: bool, with_loss: bool) -> None:
        self.net = net
        self.run = Pass(net, fuse and net.device.store is not None, what)
        with net.device.scope():
            outputs = [net.blobs[name] for name in net.outputs]
            self._sums = ops.backend(net.device).Sums(outputs, losses(net) if with_loss else [], net.device)
        self._with_loss = with_loss
        self.begin()

    def begin(self) -> None:
        """Forget the batches before."""
        self._batches = 0
        self._shapes: list[tuple[int, ...]] = []

    def batch(self, replay: bool) -> None:
        """Run a batch, by replay where that may be; DataError for outputs of other shapes than those of the first."""
        if replay and self.run.may_be_replayed():
            self.run.feed()
            self.run.perform("forward", self._forward)
        else:
            self.net.forward(steps=self.run.watched_steps)
        if not self._batches:
            self._shapes = [self.net.blobs[name].shape for name in self.net.outputs]
            self._sums.clear()
        self._check_shapes()
        self._sums.add()
        self._batches += 1

    def _forward(self) -> None:
        self.net.forward(steps=self.run.computing)

    def _check_shapes(self) -> None:
        for name, shape in zip(self.net.outputs, self._shapes, strict=True):
            if self.net.blobs[name].shape != shape:
                raise DataError(
                    f'output "{name}" of a test net changed its shape between batches, from '
                    f"{shape_string(shape)} to {shape_string(self.net.blobs[name].shape)}, so there is no mean"
                )

    def means(self) -> tuple[list[Output], float | None]:
        """The mean outputs, and the mean loss; DataError for what a GPU found wrong with the data."""
        sums, loss = self._sums.read()
        self.net.device.look()
        weights = self.net.blob_loss_weights
        outputs = [
            (name, (total / self._batches).astype(np.float32), weights[name])
            for name, total in zip(self.net.outputs, sums, strict=True)
        ]
        return outputs, loss / self._batches if self._with_loss else None
