"""WorkerGroup: the solvers that train together with a root solver, as the root sees them.

The interface between a solver and what runs its workers (`parallel.manager.P2PManager`). The
manager calls on the root solver:

    root.join(workers, reporter)     all are ready: from now on the root calls the methods below
    root.leave(failed=False)         train alone again; `failed`: only a snapshot is possible
    root.synchronize(synchronizer)   which averages the gradients; None: no more
    root.run_eagerly(reason)         each layer by itself

Neither assigns attributes of the other. WorkerGroup itself is the null object: a solver without
workers; P2PManager overrides every method. Work that is started here runs on the workers
concurrently with the root's; errors of workers are raised where the root waits for them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from operator import attrgetter
from typing import Any, NoReturn

from caffepy.core.errors import SyncError
from caffepy.device.blob import Array
from caffepy.device.device import Device
from caffepy.solver.signals import Action
from caffepy.solver.test_pass import Totals


class GroupStatistics:
    """Null object: the running statistics of a solver without workers."""

    def averaged(self) -> AbstractContextManager[object]:
        """Return a block in which all solvers have the mean of their statistics, to test with."""
        return nullcontext()

    def each(self, own: list[Array]) -> list[list[Array]]:
        """Return the statistics with which each solver continues, if a snapshot has the mean of
        all; else those of the root, `own`.
        """
        return [own]


class WorkerGroup:
    """Null object: a solver without workers.

    `writes_files`: snapshots and tables; false on nodes other than the first.
    """

    size = 1  # number of solvers, on all nodes
    takes_several = True  # nothing is to be done between iterations
    phase = "idle"  # what all are in: set-up, step, test, snapshot or idle
    failed = False  # an error has ended the workers' run
    devices: Sequence[Device] = ()
    statistics = GroupStatistics()

    def __init__(self, writes_files: bool = True) -> None:
        self.writes_files = writes_files

    def stop(self, error: BaseException) -> None:
        """End the workers that wait for the root, which met this error."""

    def root_cause(self, error: Exception) -> BaseException:
        """Return the cause of an error of the root: itself, or an earlier error of a worker."""
        return error

    def check(self) -> None:
        """Raise the error that has ended the workers' run, if any."""

    def during(self, phase: str) -> AbstractContextManager[object]:
        """Return a block in which all are in this phase: step, test or snapshot."""
        return self._during(phase)

    @contextmanager
    def _during(self, phase: str) -> Iterator[None]:
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def iterate(self, count: int = 1) -> None:
        """Start an iteration, or several as one graph, once earlier batches were taken."""

    def iterated(self) -> None:
        """Called when an iteration is enqueued or done: push and pull, where solvers do not keep
        step.
        """

    def forward(self) -> None:
        """Start a forward pass of the train net."""

    def losses(self, own: float) -> list[float]:
        """Wait for that pass; return the losses of all solvers, of which this is the root's."""
        return [own]

    def begin_test(self, k: int) -> None:
        """Zero the totals of test net `k`."""

    def test(self, k: int, batches: int) -> bool:
        """Start this number of its batches, at most one a solver; True if one is the root's."""
        return True

    def totals(self, k: int, own: Totals) -> list[Totals]:
        """End the test; return the totals of all solvers, of which these are the root's."""
        return [own]

    def write(self, files: Callable[[], object]) -> None:
        """Write files by this call, on one node; all raise the CaffeError that it raises there."""
        if self.writes_files:
            files()

    def saved(self, state: Any, sidecar: dict[str, Any]) -> None:
        """A snapshot with this state and sidecar was written."""

    def vote(self, action: Action) -> Action:
        """Return what the signals of any node ask for, at the same call on all nodes."""
        return action

    def restoring(self) -> AbstractContextManager[object]:
        """Return a block in which the root restores a state, which the workers take over at its
        end.
        """
        return nullcontext()

    def raise_worker_error(self) -> None:
        """Wait for the workers' iterations; raise the error of one, if any."""

    def positions(self) -> list[dict[str, Any]]:
        """Return the positions of each worker, now or before the test or iteration in progress."""
        return []

    def state(self) -> dict[str, Any]:
        """Return the further state of the group that a snapshot keeps."""
        return {}


class OuterGroup(WorkerGroup):
    """A group around another, `inner`, which does what this one does not override."""

    takes_several = False

    def __init__(self, inner: WorkerGroup, writes_files: bool = True) -> None:
        super().__init__(writes_files)
        self.inner = inner

    def write(self, files: Callable[[], object]) -> None:
        """Write files by this call, if both groups do."""
        if self.writes_files:
            self.inner.write(files)


def _by_inner(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def of_inner(self: OuterGroup, *arguments: Any, **named: Any) -> Any:
        return getattr(self.inner, method.__name__)(*arguments, **named)

    return of_inner


for _name, _method in vars(WorkerGroup).items():
    if callable(_method) and not _name.startswith("_") and _name not in vars(OuterGroup):
        setattr(OuterGroup, _name, _by_inner(_method))

for _name in ("size", "phase", "failed", "devices"):
    setattr(OuterGroup, _name, property(attrgetter(f"inner.{_name}")))


class EndedGroup(WorkerGroup):
    """After an error of a solver that trained with others: it can save, but not go on."""

    def check(self) -> NoReturn:
        """Raise SyncError."""
        raise SyncError(
            "this solver trained together with others until an error ended that, and cannot go on; "
            "build a new one and restore a snapshot"
        )

    def during(self, phase: str) -> AbstractContextManager[object]:
        """Allow a snapshot only."""
        return super().during(phase) if phase == "snapshot" else self.check()

    def restoring(self) -> NoReturn:
        """Raise SyncError."""
        self.check()
