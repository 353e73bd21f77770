"""What a solver tells while it works: events that do nothing here and that reports override."""

from collections.abc import Sequence
from typing import Protocol

from caffepy.blob import Array

Output = tuple[str, Array, float]
"""An output of a net: name, a copy of its values, its weight in the loss."""


class Reporter(Protocol):
    """The events of a run, in the order of Caffe's log lines; speeds are iterations a second, times seconds."""

    def solving(self, net_name: str, lr_policy: str) -> None:
        """Solve starts."""
        return None

    def test_started(self, iteration: int, k: int) -> None:
        """Test net k starts."""
        return None

    def test_done(self, iteration: int, k: int, outputs: Sequence[Output], loss: float | None) -> None:
        """Test net k is done; outputs are means over its batches, the loss is there with test_compute_loss."""
        return None

    def displayed(
        self,
        iteration: int,
        loss: float,
        outputs: Sequence[Output],
        iterations_per_s: float,
        seconds: float,
        display: int,
    ) -> None:
        """An iteration is displayed: smoothed loss, outputs of its last batch, speed since the last one."""
        return None

    def lr(self, iteration: int, rate: float) -> None:
        """The learning rate of a displayed iteration."""
        return None

    def iterated(self, iteration: int, loss: float, rate: float, images: int) -> None:
        """An iteration is done: smoothed loss, rate, how many images it used (0 if unknown)."""
        return None

    def snapshotted(self, kind: str, path: str) -> None:
        """A file of a snapshot is about to be written; kind is "model" or "state"."""
        return None

    def finished(self, iteration: int, loss: float | None) -> None:
        """All iterations are done; the loss of a last forward pass, if display asks for one."""
        return None

    def done(self, stopped_early: bool) -> None:
        """Solve ends."""
        return None


class Silent(Reporter):
    """Hears everything and does nothing about it."""
