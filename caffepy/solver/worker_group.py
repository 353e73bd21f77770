"""WorkerGroup: the solvers that take part in what a root solver does, as the root sees them."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

from caffepy.core.errors import SyncError
from caffepy.device.device import Device
from caffepy.solver.test_pass import Totals


class WorkerGroup:
    """None: the solver is alone. A team of several overrides all of it.

    What is begun goes on beside what the root does then; errors of followers come up where the root
    waits for them.
    """

    size = 1
    failed = False  # followers have ended the run
    devices: Sequence[Device] = ()

    def stop(self, error: BaseException) -> None:
        """The solver has met this error, and will not go on: let those end who wait for it."""

    def root_cause(self, error: Exception) -> BaseException:
        """What ended the run where the solver has met this error: it itself, or what ended the
        followers before.
        """
        return error

    def check(self) -> None:
        """Raise what has ended the followers' run, if anything has."""

    def during(self, phase: str) -> AbstractContextManager[object]:
        """A block in which all are at this: step, test or snapshot."""
        return nullcontext()

    def iterate(self) -> None:
        """Begin the root's next iteration, when all batches of those before were taken."""

    def forward(self) -> None:
        """Begin a forward pass of the train net."""

    def losses(self) -> list[float]:
        """The losses of that pass."""
        return []

    def average_bn_stats(self) -> None:
        """Bring what every solver has of its own among the parameters, such as statistics, to one
        value.
        """

    def begin_test(self, k: int) -> None:
        """Begin to add up what test net `k` gives."""

    def test(self, k: int, batches: int) -> bool:
        """Begin so many of its batches, at most one a solver; whether one is the root's."""
        return True

    def totals(self, k: int) -> list[Totals]:
        """End the test: what each of the followers that had a batch has added up."""
        return []

    def restoring(self) -> AbstractContextManager[object]:
        """A block in which the solver restores a state, from which all go on then."""
        return nullcontext()

    def raise_worker_error(self) -> None:
        """Raise what a follower has found wrong, if one has."""

    def positions(self) -> list[dict[str, Any]]:
        """Where the layers and random numbers of each stand, or stood before the test or iteration
        being done.
        """
        return []


class Ended(WorkerGroup):
    """Those of a solver that met an error while it trained with others: it can still save, but not
    go on.
    """

    def check(self) -> NoReturn:
        """Say so."""
        raise SyncError(
            "this solver trained together with others until an error ended that, so that it cannot go on; a new one "
            "can, from a snapshot"
        )

    def during(self, phase: str) -> AbstractContextManager[object]:
        """Only a snapshot is left."""
        return nullcontext() if phase == "snapshot" else self.check()

    def restoring(self) -> NoReturn:
        """Another solver can do so."""
        self.check()
