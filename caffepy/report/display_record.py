"""What is known of an iteration that was displayed or tested, gathered until the iteration is over."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from caffepy.core.events import Output, Reporter
from caffepy.report.speed import Speed


@dataclass
class Shown:
    """An iteration: smoothed loss, learning rate, outputs of the train net and of each test net,
    images a second of training since the one before, tests not counted. What is unknown is None or
    empty."""

    iteration: int
    loss: float | None = None
    lr: float | None = None
    outputs: Sequence[Output] = ()
    tests: dict[int, Sequence[Output]] = field(default_factory=dict)
    images_per_s: float | None = None

    @property
    def says_nothing(self) -> bool:
        """Nothing is known of it, as of a test that was interrupted."""
        return self.loss is None and self.lr is None and not self.tests


def elements(outputs: Sequence[Output]) -> Iterator[tuple[str, float]]:
    """Name and value of each scalar; `NAME[i]` where an output has several."""
    for name, values, _ in outputs:
        scalars = values.reshape(-1)
        for i, value in enumerate(scalars):
            yield f"{name}[{i}]" if len(scalars) > 1 else name, value


class DisplayCollector(Reporter):
    """Hands each iteration that was displayed or tested to `show`, when all of it is known.

    `begin` is called with the first of them, before.
    """

    def __init__(self) -> None:
        self._shown: Shown | None = None  # the iteration at hand
        self._started = False
        self._speed = Speed()

    def begin(self, iteration: int) -> None:
        """The first iteration of the run of which something is told."""

    def show(self, shown: Shown) -> None:
        """An iteration is over."""

    def solving(self, net_name: str, lr_policy: str) -> None:
        """Time begins."""
        self._speed.read()

    def test_started(self, iteration: int, k: int) -> None:
        """The time of a test is not training time."""
        self._speed.pause()
        self._at(iteration)

    def test_done(
        self, iteration: int, k: int, outputs: Sequence[Output], loss: float | None
    ) -> None:
        """Take the outputs."""
        self._speed.resume()
        self._at(iteration).tests[k] = outputs

    def displayed(
        self,
        iteration: int,
        loss: float,
        outputs: Sequence[Output],
        iterations_per_s: float,
        seconds: float,
        display: int,
    ) -> None:
        """Take loss and outputs."""
        shown = self._at(iteration)
        shown.loss, shown.outputs = loss, outputs

    def lr(self, iteration: int, rate: float) -> None:
        """Take the rate."""
        self._at(iteration).lr = rate

    def iterated(self, iteration: int, loss: float | None, rate: float, images: int) -> None:
        """Show the iteration, if there is something to show."""
        self._speed.add(images)
        if self._shown:
            self._shown.loss = loss if self._shown.loss is None else self._shown.loss
            self._shown.lr = rate if self._shown.lr is None else self._shown.lr
            self.show_rest()

    def finished(self, iteration: int, loss: float | None) -> None:
        """Take the loss of the last forward pass."""
        if loss is not None:
            self._at(iteration).loss = loss

    def done(self, stopped_early: bool) -> None:
        """Show the last one."""
        self.show_rest()

    def show_rest(self) -> None:
        """Show the iteration at hand with what is known of it."""
        shown, self._shown = self._shown, None
        if shown and not shown.says_nothing:
            shown.images_per_s = self._speed.read()
            self.show(shown)

    def _begin_once(self, iteration: int) -> None:
        if not self._started:
            self._started = True
            self.begin(iteration)

    def _at(self, iteration: int) -> Shown:
        self._begin_once(iteration)
        if self._shown and self._shown.iteration != iteration:
            self.show_rest()
        self._shown = self._shown or Shown(iteration)
        return self._shown
