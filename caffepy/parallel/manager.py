"""P2PManager: a root solver and its workers, each on a device of its own, which train as one solver
with a larger batch.
"""

import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, NoReturn

import numpy as np

from caffepy import ops
from caffepy.collectives import peers
from caffepy.collectives.buckets import Bucket, buckets
from caffepy.collectives.factors import factored
from caffepy.collectives.rank_group import DEADLINES, AllGather, RankGroup, named
from caffepy.collectives.sync import Synchronization, choose
from caffepy.collectives.synchronizer import FlatParams, Synchronizer
from caffepy.collectives.topology import Topology, all_joined, device_pairs, show
from caffepy.collectives.worker_threads import WorkerThreads
from caffepy.core.abandoned import abandon
from caffepy.core.errors import ConfigError, LostDeviceError, UsageError
from caffepy.device.blob import Array, Blob
from caffepy.device.cuda import CudaDevice
from caffepy.device.device import Device
from caffepy.layer import Layer
from caffepy.layer.inner_product import InnerProduct
from caffepy.layer.normalization import BatchNorm
from caffepy.net import Net
from caffepy.net.gradients import adders, large_products
from caffepy.parallel.worker import WorkerSolver
from caffepy.report import Performance, Reporters
from caffepy.solver import Signals, Solver
from caffepy.solver.test_pass import Totals
from caffepy.solver.worker_group import EndedGroup, WorkerGroup

log = logging.getLogger(__name__)

PATIENCE = 5.0
"""Seconds that solvers have to end what they are at."""

LOOK = 1.0
"""Seconds between looks at whether solvers on GPUs get on."""

SETTLING = 2.0
"""Seconds in which GPUs end what waits for others."""

LAST_PATIENCE = 3.0
"""Seconds that the root has to do so when it is told."""


@dataclass(frozen=True)
class SyncOptions:
    """How solvers work together.

    `sync` names the way to synchronize. `statistics`: those of BatchNorm layers in tests and
    snapshots are the "average" of all solvers' or the "root"'s, as in Caffe; with "sync" they are
    of all batches together in training, too, as if there were one. `deadlines` are in seconds, by
    phase.
    """

    sync: str = "auto"
    statistics: str = "average"
    deadlines: Mapping[str, float] = field(default_factory=lambda: DEADLINES)


class P2PManager(WorkerGroup):
    """The workers of a root solver as its followers, while the context lasts.

    `devices` are those of all ranks, the root's first, joined as `topology` says. `signals` are
    heard while the root waits for others, and reach it where it hangs; if it cannot be reached,
    `last_resort` is called with the error. `alone` is how many images a second the root takes by
    itself, if that is known.
    """

    def __init__(
        self,
        root: Solver,
        devices: Sequence[Device],
        topology: Topology,
        sync_options: SyncOptions,
        signals: Signals | None = None,
        last_resort: Callable[[BaseException], object] | None = None,
        alone: float | None = None,
    ) -> None:
        root.workers.check()
        self.root = root
        self._alone = alone
        self.size = len(devices)
        self.group = RankGroup(self.size, sync_options.deadlines)
        if signals:
            self.group.interrupted = signals.check
        self._signals, self._last_resort = signals, last_resort
        self.group.on_abort(self._watch)
        self._devices = devices
        self._sync_options = sync_options
        self._gpu = devices[0].kind == "cuda"
        if self._gpu:
            self.group.hung_ranks = self._hung_ranks
        log.info("%s pairs %s", "GPUs" if self._gpu else "Solvers", show(device_pairs(topology)))
        choice = choose(sync_options.sync, topology, self._gpu)
        self._way = Synchronization(self.group, choice)
        self._factored = self._choose_factored()
        self._gather = AllGather(self.group)
        if sync_options.statistics == "sync" and self._gpu and normalizing(root.net):
            if root.saves_memory:
                raise UsageError("--bn-stats sync needs nets whose blobs share no memory")
            root.run_eagerly("statistics of batches go through the host")
        self._synchronizers: dict[int, Synchronizer] = {}
        self._testers = [0] * len(root.test_nets)  # who has the next batch of each test net
        self._worker_threads = WorkerThreads(self.group, self._make, self._within)
        self._ended = threading.Event()
        self._positions = root.workers_positions
        if self._positions and len(self._positions) != self.size - 1:
            log.warning(
                "The snapshot is of %d solvers, not %d: random numbers of the workers start anew",
                len(self._positions) + 1,
                self.size,
            )
            self._positions = []

    # beginning and end

    def __enter__(self) -> "P2PManager":
        try:
            self._begin()
        except BaseException as error:
            self._end(error)
            with suppress(Exception):  # the error that counts is another
                self._free()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end(error)
        if isinstance(error, Exception) and not isinstance(error, LostDeviceError):
            first = self.group.root_cause(error)
            if str(first) != str(error):  # which may be what another rank's did to this one
                raise first from error

    def _begin(self) -> None:
        root, group = self.root, self.group
        gc.collect()  # to free what earlier solvers left may wait for a GPU that waits for others
        group.join(0)
        for net in (root.net, *root.test_nets):
            mark = root.phase_timer.mark if net is root.net else _no_lap
            net.set_forward_mutex(partial(self._turn, mark, 0))
            for layer in net.shared_layers:
                layer.serve(self._devices)
        with root.device.scope(), quiet():
            self._worker_threads.start()
            if self._gpu:
                threading.Thread(target=self._guard, name="caffepy guard", daemon=True).start()
            self._synchronize(root, 0)
            self._worker_threads.wait_idle()
        group.phase = "idle"
        for rank, device in enumerate(self._devices[1:], start=1):
            place = f"GPU {device.index}" if self._gpu else "the CPU"
            log.info("Solver %d (of 0 to %d) is ready on %s", rank, self.size - 1, place)
        self._tell_batch()
        root.join(self, Reporters(root.reporter, Performance(self.seconds, self._alone)))

    def _tell_batch(self) -> None:
        root, each = self.root, self.root.batch
        if not each:
            return
        passes = root.param.iter_size
        whole = each * passes * self.size
        times = f" x iter_size {passes}" if passes > 1 else ""
        lengths = [layer.length for layer in root.net.layers if layer.length]
        epoch = (
            f"; an epoch of {lengths[0]} is {lengths[0] / whole:.6g} iterations" if lengths else ""
        )
        log.info(
            "An iteration takes %d solvers x %d images%s = %d%s",
            self.size,
            each,
            times,
            whole,
            epoch,
        )
        if root.batch_parts == 1:
            log.info(
                "base_lr is %g; if it is right for one solver, the linear rule gives %g for %d (it is not changed)",
                root.param.base_lr,
                root.param.base_lr * self.size,
                self.size,
            )

    def seconds(self) -> list[dict[str, float]]:
        """Where the time of each solver's iterations went so far, by part."""
        return [solver.phase_timer.read() for solver in (self.root, *self._workers)]

    def _within(self, rank: int) -> AbstractContextManager[object]:
        from caffepy.device.threads import share  # here, since the package loads numba

        return share(rank, self.size)

    def _make(self, rank: int) -> WorkerSolver:
        positions = self._positions[rank - 1] if self._positions else None
        worker = WorkerSolver(self.root, rank, self._devices[rank], positions)
        for net in (worker.net, *worker.test_nets):
            mark = worker.phase_timer.mark if net is worker.net else _no_lap
            net.set_forward_mutex(partial(self._turn, mark, rank))
        with worker.device.scope():
            self._synchronize(worker, rank)
        return worker

    def _synchronize(self, solver: Solver, rank: int) -> None:
        made = {i: layer for i, layer in large_products(solver.net).items() if i in self._factored}
        synchronizer = self._synchronizers[rank] = self._way.join(rank, flats_of(solver, made))
        solver.synchronize(synchronizer, self._way.choice.root_updates)
        if self._sync_options.statistics == "sync":
            for layer in normalizing(solver.net):
                layer.meet(partial(self._together, rank))

    def _choose_factored(self) -> set[int]:
        """Parameters whose gradients every solver makes by itself: GPUs of one kind all make the
        same of the same.
        """
        root = self.root
        alike = (
            len({device.name for device in self._devices if isinstance(device, CudaDevice)}) == 1
        )
        plain = root.param.iter_size == 1 and not root.param.debug_info and root.gradients_untouched
        if not (self._way.choice.name == "nccl" and alike and plain):
            return set()
        made = factored(root.net, self.size, ops.precision_of(root.device))
        if made:
            names = ", ".join(layer.param.name for layer in made.values())
            log.info(
                "Solvers give each other the factors of the weight gradients of %s, not the gradients",
                names,
            )
        return set(made)

    def _together(self, rank: int, values: Array) -> Array:
        return np.stack(self._gather(rank, values))

    def _watch(self) -> None:
        threading.Thread(target=self._reach_root, name="caffepy watch", daemon=True).start()

    def _guard(self) -> None:
        """Find solvers that hang where none waits for another in a way that a deadline would end:
        for a GPU.
        """
        known: object = None
        waited = 0.0  # in looks: a process that was stopped has not hung
        while not (self.group.stopped or self._ended.wait(LOOK)):
            progress = self._progress()
            known, waited = progress, waited + LOOK if progress == known else 0.0
            seconds = self.group.deadlines[self.group.phase]
            if waited > seconds + LOOK:  # those who wait for a solver find it first
                self.group.abort_hung([0], seconds)

    def _progress(self) -> object:
        """What changes while solvers get on."""
        done = [
            solver.update_state.done
            for solver in (self.root, *list(self._worker_threads.members.values()))
        ]
        return (
            self.group.phase,
            self.root.iter,
            done,
            self._worker_threads.left,
            list(self._testers),
        )

    def _hung_ranks(self, missing: list[int]) -> list[int]:
        """Those that hang: whose GPUs, or else threads, are still at work when nothing waits for
        others.
        """
        until = time.monotonic() + SETTLING
        while (hanging := self._at_work()) and time.monotonic() < until:
            time.sleep(LOOK / 10)
        return hanging or missing

    def _at_work(self) -> list[int]:
        return [
            rank for rank, device in enumerate(self._devices) if not device.idle
        ] or self._worker_threads.at_work

    def _reach_root(self) -> None:
        """See to it that the root ends, even if it is where it does not wait for others."""
        failure = self.group.wait_failure()
        assert failure
        rank, error = failure
        if self.group.root_informed(PATIENCE if rank else 0):
            return
        if self._signals and isinstance(error, Exception):
            self._signals.fail(named(rank, error), self.group.mark_root_informed)
        if not self.group.root_informed(LAST_PATIENCE) and self._last_resort:
            self._rescue(error)
            self._last_resort(named(rank, error))

    def _rescue(self, error: BaseException) -> None:
        """Write the snapshot that the root owes in its place, as far as its state can be reached."""
        thread = threading.Thread(
            target=self.root.rescue, args=(error,), name="caffepy rescue", daemon=True
        )
        thread.start()
        thread.join(PATIENCE)
        if thread.is_alive():
            log.error("No snapshot: the state of the last iteration cannot be reached")

    @contextmanager
    def _turn(self, mark: Callable[[str], None], rank: int, layer: Layer) -> Iterator[None]:
        mark("forward")
        with self.group.round_robin(rank, layer), layer.forward_lock:
            yield
        mark("data")

    def _end(self, error: BaseException | None) -> None:
        self._ended.set()
        try:
            if error is None:
                self._part()
                self._free()
        except BaseException as met:
            error = met
            raise
        finally:
            try:
                if error is not None:
                    self._mark_failed()
                    self.group.abort(0, error)
                    self.group.wait_failure()
            finally:
                self._clear(failed=error is not None)

    def _clear(self, failed: bool) -> None:
        """End the threads, and give back what can be."""
        left = self._worker_threads.end(PATIENCE)
        if failed:
            until = time.monotonic() + SETTLING
            endless = [rank for rank in range(1, self.size) if not self._rests(rank, until)]
            if endless or any(device.lost for device in self._devices):
                abandon(self)
            elif not left:
                self._let_go(until)
            left = sorted({*left, *endless})
        if left:
            log.warning(
                "Still at work when the run ended: %s", ", ".join(f"rank {rank}" for rank in left)
            )
        for rank, worker in self._worker_threads.members.items():
            if rank not in left:
                with (
                    suppress(Exception) if failed else nullcontext()
                ):  # what failed may be the device
                    worker.close()

    def _rests(self, rank: int, until: float) -> bool:
        """Whether the rank's device is done, or is so by then."""
        while not self._devices[rank].idle:
            if time.monotonic() > until:
                return False
            time.sleep(LOOK / 100)
        return True

    def _part(self) -> None:
        """Let the root be alone again."""
        self._worker_threads.give(lambda worker: self._leave(worker, worker.rank))
        self._leave(self.root, 0)
        self._worker_threads.wait_idle()

    def _free(self) -> None:
        """The root can go on alone."""
        self.root.leave()
        for net in (self.root.net, *self.root.test_nets):
            net.set_forward_mutex(None)
            for layer in net.shared_layers:
                layer.serve(self._devices[:1])

    def _mark_failed(self) -> None:
        """The root cannot go on: its last iteration may have ended in some ranks."""
        self.root.leave(failed=True)
        for net in (self.root.net, *self.root.test_nets):
            net.set_forward_mutex(_no_turn)

    def _let_go(self, until: float) -> None:
        """After an error, let communicators end: they wait until no recording of any rank refers to
        them.
        """
        if self._rests(0, until):
            for solver in (self.root, *self._worker_threads.members.values()):
                with suppress(Exception):  # the error that counts is another
                    _be_alone(solver)
            for synchronizer in self._synchronizers.values():
                with suppress(Exception):
                    synchronizer.close(max(0.0, until - time.monotonic()))

    def _leave(self, solver: Solver, rank: int) -> None:
        _be_alone(solver)
        self._synchronizers[rank].close()

    # what the root asks for

    @property
    def failed(self) -> bool:  # type: ignore[override]
        """True once an error has ended the workers' run."""
        return self.group.stopped

    @property
    def devices(self) -> Sequence[Device]:  # type: ignore[override]
        """Those of the followers."""
        return self._devices[1:]

    def root_cause(self, error: Exception) -> BaseException:
        """What ended the run where the root has met this error: it itself, or what ended the
        followers before.
        """
        return self.group.root_cause(error)

    def check(self) -> None:
        """Raise what has ended the followers' run, if anything has."""
        self.group.check(0)

    def stop(self, error: BaseException) -> None:
        """The root has met this error, and will not go on: let those end who wait for it."""
        self.group.abort(0, error)

    def during(self, phase: str) -> AbstractContextManager[object]:
        """A block in which all are at this: step, test or snapshot."""
        return self.group.during(phase)

    def iterate(self) -> None:
        """Begin the root's next iteration, when all batches of those before were taken."""
        with self.root.phase_timer.fetching():
            for layer in self.root.net.shared_layers:
                self.group.await_turn(0, layer)
        self._worker_threads.give(WorkerSolver.iterate)

    def forward(self) -> None:
        """Begin a forward pass of the train net."""
        self._worker_threads.give(WorkerSolver.forward)

    def losses(self) -> list[float]:
        """The losses of that pass."""
        self._worker_threads.wait_idle()
        return [worker.loss for worker in self._workers]

    def average_bn_stats(self) -> None:
        """Bring the statistics of BatchNorm layers to one value."""
        if self.failed or self._sync_options.statistics != "average":
            return
        mine = statistics(self.root.net)
        if mine:
            self._settle()
            theirs = [statistics(worker.net) for worker in self._workers]
            for blobs in zip(mine, *theirs, strict=True):
                mean = np.mean([blob.host_data for blob in blobs], axis=0, dtype=np.float64)
                for blob in blobs:
                    blob.host_data[...] = mean

    def begin_test(self, k: int) -> None:
        """Begin to add up what test net `k` gives."""
        self._worker_threads.give(partial(_begin_test, k=k, synchronizers=self._synchronizers))
        self._synchronizers[0].on_start()

    def test(self, k: int, batches: int) -> bool:
        """Begin so many of its batches, at most one a solver; whether one is the root's."""
        ranks = [(self._testers[k] + i) % self.size for i in range(batches)]
        self._testers[k] = (ranks[-1] + 1) % self.size
        for rank in ranks:
            if rank:
                self._worker_threads.give(partial(WorkerSolver.test_batch, k=k), rank)
        return 0 in ranks

    def totals(self, k: int) -> list[Totals]:
        """End the test: what each of the followers that had a batch has added up."""
        self._worker_threads.give(partial(WorkerSolver.end_test, k=k))
        self._worker_threads.wait_idle()
        return [worker.totals for worker in self._workers]

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """A block in which the root restores a state, from which all go on then."""
        if self.group.phase != "idle":
            raise ConfigError(
                f"no state can be restored during a {self.group.phase} of several solvers"
            )
        self._settle()
        yield
        self._testers = [0] * len(self._testers)
        self.group.restart_turns()  # data layers that go on from a state begin with the root's batch
        restored = self.root.workers_positions
        positions = restored if len(restored) == self.size - 1 else [None] * (self.size - 1)
        self._worker_threads.give(
            lambda worker: worker.follow(self.root, positions[worker.rank - 1])
        )
        self._worker_threads.wait_idle()

    def raise_worker_error(self) -> None:
        """Raise what a follower has found wrong, if one has."""
        self._settle()

    def positions(self) -> list[dict[str, Any]]:
        """Where the layers and random numbers of each stand, or stood before the test or iteration
        being done.
        """
        members, iteration = self._worker_threads.members, self.root.iter
        known = list(range(1, self.size))
        if self.failed:
            self._worker_threads.end(PATIENCE)
            until = time.monotonic() + SETTLING
            known = [rank for rank in known if rank in members and self._rests(rank, until)]
        else:
            self._settle()
        return [
            members[rank].positions(iteration) if rank in known else {}
            for rank in range(1, self.size)
        ]

    def _settle(self) -> None:
        self._worker_threads.give(WorkerSolver.wait_idle)
        self._worker_threads.wait_idle()

    @property
    def _workers(self) -> list[WorkerSolver]:
        return [self._worker_threads.members[rank] for rank in range(1, self.size)]


def flats_of(solver: Solver, made: Mapping[int, InnerProduct] | None = None) -> FlatParams:
    """What of a solver is to be synchronized; the weights of the layers `made`, by parameter, are
    so by factors.
    """
    params, parts = solver.params, []
    made = made or {}
    if solver.param.iter_size == 1 and solver.net.learnable_params:
        adding = adders(solver.net)
        if made:
            parts.append(Bucket((), frozenset().union(*(adding[i] for i in made))))
        ends = [
            *map(int, params.ends),
            params.reduced_diff.size,
        ]  # the notes are there before the backward pass
        parts += buckets(ends, [*adding, frozenset()], without=made)
    return FlatParams(
        solver.device, params.data_with_scale, params.reduced_diff, parts, list(made.values())
    )


def team_of(
    root: Solver,
    devices: Sequence[Device],
    sync_options: SyncOptions,
    signals: Signals | None = None,
    last_resort: Callable[[BaseException], object] | None = None,
    alone: float | None = None,
) -> AbstractContextManager["P2PManager | None"]:
    """The team of a root solver on the first of these devices; None for a single one."""
    if len(devices) == 1:
        return nullcontext()
    gpus = [device.index for device in devices if device.kind == "cuda"]
    joined = peers.prepare(peers.query(gpus)) if gpus else all_joined(len(devices))
    return P2PManager(root, devices, joined, sync_options, signals, last_resort, alone)


def _be_alone(solver: Solver) -> None:
    solver.synchronize(None)
    for layer in normalizing(solver.net):
        layer.meet(None)


def _no_turn(layer: Layer) -> NoReturn:
    EndedGroup().check()


def _no_lap(part: str) -> None:
    """Tests do not count."""


def _begin_test(worker: WorkerSolver, k: int, synchronizers: Mapping[int, Synchronizer]) -> None:
    worker.begin_test(k)
    with worker.device.scope():
        synchronizers[worker.rank].on_start()


def normalizing(net: Net) -> list[BatchNorm]:
    """The layers that compute statistics of their batches."""
    return [layer for layer in net.layers if isinstance(layer, BatchNorm) and not layer.is_global]


def statistics(net: Net) -> list[Blob]:
    """The parameters that layers compute from the data they see, rather than from gradients."""
    return [blob for layer in net.layers for blob in layer.statistics]


class _Quiet(logging.Filter):
    """What workers set up is what the root has set up; of theirs only what is shared is told."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to let the record through."""
        ours = (record.threadName or "").startswith(WorkerThreads.NAME)
        return (
            not ours
            or record.levelno >= logging.ERROR
            or record.getMessage().startswith("Sharing layer")
        )


@contextmanager
def quiet() -> Iterator[None]:
    """A block in which the log has nothing of what workers set up but what they share."""
    handlers = [*logging.getLogger("caffepy").handlers, *logging.getLogger().handlers]
    quiet = _Quiet()
    for handler in handlers:
        handler.addFilter(quiet)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(quiet)
