"""The events of a training run. A reporter overrides those it cares about; the solver has a class of the same methods.

An iteration has the number that Caffe prints: 0 for the first. Events of one iteration come in this order: a test
before the iteration's work, `displayed` and `lr` after its gradients, `snapshotted` and `iterated` after its update.
"""

from collections.abc import Sequence
from types import TracebackType

from caffepy.report.text import Output


class Reporter:
    """Hears what happens and does nothing about it; as a context manager it ends with `close`."""

    def solving(self, net_name: str, lr_policy: str) -> None:
        """The solver begins."""

    def test_started(self, iteration: int, k: int) -> None:
        """Test net `k` begins its batches."""

    def test_done(self, iteration: int, k: int, outputs: Sequence[Output], loss: float | None) -> None:
        """Test net `k` gave these means; `loss` only where the solver asks for it."""

    def displayed(
        self,
        iteration: int,
        loss: float,
        outputs: Sequence[Output],
        iterations_per_s: float,
        seconds: float,
        display: int,
    ) -> None:
        """An iteration that is to be shown: smoothed loss, the train net's outputs, the speed since the last one."""

    def lr(self, iteration: int, rate: float) -> None:
        """The learning rate of an iteration that is to be shown."""

    def iterated(self, iteration: int, loss: float, rate: float, images: int) -> None:
        """Every iteration, after its update; `images` is how many it used, 0 if that is unknown."""

    def snapshotted(self, kind: str, path: str) -> None:
        """A file is about to be written; `kind` as in "solver state to HDF5"."""

    def finished(self, iteration: int, loss: float | None) -> None:
        """The iterations are over; `loss` is that of the extra forward pass, if there was one."""

    def done(self, stopped_early: bool) -> None:
        """The solver ends."""

    def close(self, complete: bool = True) -> None:
        """Release what is held; `complete` false means: quickly, the user wants to leave."""

    def __enter__(self) -> "Reporter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(complete=error is None or isinstance(error, Exception))


class Reporters(Reporter):
    """Passes each event on to several reporters, in their order."""

    def __init__(self, *reporters: Reporter) -> None:
        self.reporters = reporters

    def solving(self, net_name: str, lr_policy: str) -> None:
        """Pass on."""
        for reporter in self.reporters:
            reporter.solving(net_name, lr_policy)

    def test_started(self, iteration: int, k: int) -> None:
        """Pass on."""
        for reporter in self.reporters:
            reporter.test_started(iteration, k)

    def test_done(self, iteration: int, k: int, outputs: Sequence[Output], loss: float | None) -> None:
        """Pass on."""
        for reporter in self.reporters:
            reporter.test_done(iteration, k, outputs, loss)

    def displayed(
        self,
        iteration: int,
        loss: float,
        outputs: Sequence[Output],
        iterations_per_s: float,
        seconds: float,
        display: int,
    ) -> None:
        """Pass on."""
        for reporter in self.reporters:
            reporter.displayed(iteration, loss, outputs, iterations_per_s, seconds, display)

    def lr(self, iteration: int, rate: float) -> None:
        """Pass on."""
        for reporter in self.reporters:
            reporter.lr(iteration, rate)

    def iterated(self, iteration: int, loss: float, rate: float, images: int) -> None:
        """Pass on."""
        for reporter in self.reporters:
            reporter.iterated(iteration, loss, rate, images)

    def snapshotted(self, kind: str, path: str) -> None:
        """Pass on."""
        for reporter in self.reporters:
            reporter.snapshotted(kind, path)

    def finished(self, iteration: int, loss: float | None) -> None:
        """Pass on."""
        for reporter in self.reporters:
            reporter.finished(iteration, loss)

    def done(self, stopped_early: bool) -> None:
        """Pass on."""
        for reporter in self.reporters:
            reporter.done(stopped_early)

    def close(self, complete: bool = True) -> None:
        """Close all."""
        for reporter in self.reporters:
            reporter.close(complete)
