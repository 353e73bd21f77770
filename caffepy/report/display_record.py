"""Display records: all that is known of an iteration that was displayed or tested."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from caffepy.core.events import Displayed, Output, Reporter
from caffepy.report.speed import Speed


@dataclass
class DisplayRecord:
    """One displayed or tested iteration; values that are unknown are None or empty.

    `loss` is smoothed; `outputs` are those of the train net, `tests` those of each test net;
    `images_per_s` is the speed of training since the record before, without tests.
    """

    iteration: int
    loss: float | None = None
    lr: float | None = None
    outputs: Sequence[Output] = ()
    tests: dict[int, Sequence[Output]] = field(default_factory=dict)
    images_per_s: float | None = None


def elements(outputs: Sequence[Output]) -> Iterator[tuple[str, float]]:
    """Yield name and value of each scalar; `NAME[i]` if an output has several."""
    for name, values, _ in outputs:
        scalars = values.reshape(-1)
        for i, value in enumerate(scalars):
            yield f"{name}[{i}]" if len(scalars) > 1 else name, value


class DisplayCollector(Reporter):
    """Collects the events of an iteration and calls `show` with its record when it is complete.

    `begin` is called before the first record.
    """

    def __init__(self) -> None:
        self._record: DisplayRecord | None = None  # of the current iteration
        self._started = False
        self._speed = Speed()

    @property
    def takes_several(self) -> bool:
        return True

    def begin(self, iteration: int) -> None:
        """Called with the first iteration of the run that has a record."""

    def show(self, record: DisplayRecord) -> None:
        """Called with each complete record."""

    def solving(self, net_name: str, lr_policy: str) -> None:
        self._speed.read()

    def test_started(self, iteration: int, k: int) -> None:
        """Stop the clock: a test is not training time."""
        self._speed.pause()
        self._at(iteration)

    def test_done(
        self, iteration: int, k: int, outputs: Sequence[Output], loss: float | None
    ) -> None:
        self._speed.resume()
        self._at(iteration).tests[k] = outputs

    def displayed(self, shown: Displayed) -> None:
        record = self._at(shown.iteration)
        record.loss, record.outputs = shown.loss, shown.outputs

    def lr(self, iteration: int, rate: float) -> None:
        self._at(iteration).lr = rate

    def iterated(self, iteration: int, loss: float | None, rate: float, images: int) -> None:
        self._speed.add(images)
        if record := self._record:
            record.loss = loss if record.loss is None else record.loss
            record.lr = rate if record.lr is None else record.lr
            self.show_pending()

    def finished(self, iteration: int, loss: float | None) -> None:
        if loss is not None:
            self._at(iteration).loss = loss

    def done(self, stopped_early: bool) -> None:
        self.show_pending()

    def show_pending(self) -> None:
        """Show the current record as far as it is known; after an interrupted test nothing is."""
        record, self._record = self._record, None
        if record and (record.loss is not None or record.lr is not None or record.tests):
            record.images_per_s = self._speed.read()
            self.show(record)

    def _begin_once(self, iteration: int) -> None:
        if not self._started:
            self._started = True
            self.begin(iteration)

    def _at(self, iteration: int) -> DisplayRecord:
        self._begin_once(iteration)
        if self._record and self._record.iteration != iteration:
            self.show_pending()
        self._record = self._record or DisplayRecord(iteration)
        return self._record
