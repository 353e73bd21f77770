"""The events of a training run: the solver calls them, a reporter overrides those that it cares
about.

An iteration has the number that Caffe prints: 0 for the first. Events of one iteration come in this
order: a test before the iteration's work, `displayed` and `lr` after its gradients, `snapshotted`
and `iterated` after its update.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from numpy.typing import NDArray

Output = tuple[str, NDArray[Any], float]
"""An output of a net: name, a copy of its values, its weight in the loss."""


class Reporter:
    """Hears what happens and does nothing about it; as a context manager it ends with `close`."""

    def solving(self, net_name: str, lr_policy: str) -> None:
        """The solver begins."""

    def test_started(self, iteration: int, k: int) -> None:
        """Test net `k` begins its batches."""

    def test_done(
        self, iteration: int, k: int, outputs: Sequence[Output], loss: float | None
    ) -> None:
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
        """An iteration that is to be shown: smoothed loss, the train net's outputs, the speed since
        the last one.
        """

    def lr(self, iteration: int, rate: float) -> None:
        """The learning rate of an iteration that is to be shown."""

    def iterated(self, iteration: int, loss: float | None, rate: float, images: int) -> None:
        """Every iteration, after its update; `images` is how many it used, 0 if that is unknown.

        `loss` is the smoothed loss, of an iteration just before on a GPU that is some iterations
        behind, and None while none is known. Where something is displayed or tested it is that of
        the iteration itself.
        """

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
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(complete=error is None or isinstance(error, Exception))
