"""Several reporters as one."""

from collections.abc import Sequence

from caffepy.core.events import Output, Reporter


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

    def test_done(
        self, iteration: int, k: int, outputs: Sequence[Output], loss: float | None
    ) -> None:
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

    def iterated(self, iteration: int, loss: float | None, rate: float, images: int) -> None:
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
