"""Events of a training run: the solver calls them, and a reporter overrides those that it needs.

Iterations are numbered as Caffe prints them, from 0. Events of one iteration come in this order: a
test before its forward pass, `displayed` and `lr` after its gradients, `snapshotted` and `iterated`
after its update.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from numpy.typing import NDArray

Output = tuple[str, NDArray[Any], float]
"""An output of a net: name, copy of its values, loss weight."""


asked_to_end = threading.Event()
"""Set in a run that was asked to stop: from then on, nothing waits for long."""


class Displayed(NamedTuple):
    """A display: smoothed loss, outputs of the train net, and the speed since the display
    before, which is one every `display` iterations.
    """

    iteration: int
    loss: float
    outputs: Sequence[Output]
    iterations_per_s: float
    seconds: float
    display: int


class Served(NamedTuple):
    """Counts of a parameter server since the run began, as of an iteration of worker 0.

    pushes: by worker, those that all servers have counted.
    staleness: how often a worker pulled values that lacked 0, 1, 2... pushes of another.
    sent, on_wire: bytes that worker 0 has pushed and pulled, before and after the filters.
    waited: seconds in which worker 0 did not train for it.
    behind: pushes of parts of the parameters that replicas have not counted yet.
    """

    iteration: int
    pushes: Mapping[int, int]
    staleness: Mapping[int, int]
    sent: int
    on_wire: int
    waited: float
    behind: int


class Reporter:
    """Base class that does nothing; as a context manager it ends with `close`."""

    @property
    def takes_several(self) -> bool:
        """True if `iterated` may be called for several iterations after the last of them: it does
        not look at the solver. By default of a class that does not override it.
        """
        return type(self).iterated is Reporter.iterated

    def solving(self, net_name: str, lr_policy: str) -> None:
        """Called when the solver begins."""

    def test_started(self, iteration: int, k: int) -> None:
        """Called before the batches of test net `k`."""

    def test_done(
        self, iteration: int, k: int, outputs: Sequence[Output], loss: float | None
    ) -> None:
        """Called with the mean outputs of test net `k`; `loss` if the solver computes it."""

    def displayed(self, shown: Displayed) -> None:
        """Called for an iteration to display."""

    def lr(self, iteration: int, rate: float) -> None:
        """Called with the learning rate of an iteration to display."""

    def iterated(self, iteration: int, loss: float | None, rate: float, images: int) -> None:
        """Called after every update; `images` is the number used, 0 if unknown.

        `loss` is the smoothed loss, None while none is known. On a GPU, which lags behind the host,
        it may be that of a recent iteration; when something is displayed or tested it is that of
        this one.
        """

    def served(self, counts: Served) -> None:
        """Called some time after an iteration to display, if servers have the parameters."""

    def snapshotted(self, kind: str, path: str) -> None:
        """Called before a snapshot file is written; `kind` as in "solver state to HDF5"."""

    def finished(self, iteration: int, loss: float | None) -> None:
        """Called after the last iteration; `loss` is that of the extra forward pass, if any."""

    def done(self, stopped_early: bool) -> None:
        """Called when the solver ends."""

    def close(self, complete: bool = True) -> None:
        """Release resources; quickly, without finishing work, if not `complete`."""

    def __enter__(self) -> "Reporter":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.close(complete=error is None or isinstance(error, Exception))
