"""P2PManager: a root solver and its workers, each on a device of its own, that train as one solver
with a larger batch.

The root runs on the calling thread, each WorkerSolver in a thread of its own (`workers`). One
iteration on n devices, from top to bottom:

    root: Solver.step                        each worker: its thread in WorkerThreads
    -------------------------------------    ----------------------------------------------------
    test, if due (see below)
    P2PManager.iterate
      wait until all batches are taken
      give every worker an iteration     ->  WorkerSolver.iterate
    synchronizer.on_start                    synchronizer.on_start: parameters are in step
    forward: data layers, which all share, in the order of the ranks under the forward mutex,
             then the other layers, which each has for itself
    backward; NcclSync.after_backward(layer) starts the all-reduce of each bucket that is complete
    synchronizer.on_gradients_ready: the gradients and the loss are the mean of all ranks'
    update; with `--sync tree` in the root alone, and the others get the parameters in on_start
    display, poll signals, snapshot

A root that captures CUDA graphs goes on at once and finds errors of workers later, in
`raise_worker_error`; the workers' queues are at most WorkerThreads' AHEAD items long.

A test is `begin_test`, a `test` for every batch that each rank takes in turn, and `totals`. What
happens on a fault is in `watchdog`, how BatchNorm works in `batch_norm`, what is all-reduced in
`synchronization`, who takes a batch in `turns`.
"""

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from threading import get_ident
from typing import Any

from caffepy.collectives import peers
from caffepy.collectives.synchronizer import Synchronizer
from caffepy.collectives.topology import Topology, all_joined
from caffepy.collectives.world import World
from caffepy.core.errors import CaffeError, ConfigError, LostDeviceError
from caffepy.data.reader import Turn
from caffepy.device.device import Device
from caffepy.device.threads import num_threads
from caffepy.parallel.batch_norm import RunningStatistics
from caffepy.parallel.nodes import (
    check_data,
    follow_first,
    gather,
    own_positions,
    restored_positions,
)
from caffepy.parallel.synchronization import Synchronization, SyncOptions
from caffepy.parallel.turns import Turns
from caffepy.parallel.worker import WorkerSolver, edits
from caffepy.parallel.workers import Workers
from caffepy.proto.caffe_pb2 import SolverParameter
from caffepy.report import Performance, Reporters
from caffepy.solver import Action, Signals, Solver
from caffepy.solver.faults import rescue
from caffepy.solver.step import SyncCallback
from caffepy.solver.test_pass import Totals
from caffepy.solver.worker_group import WorkerGroup

log = logging.getLogger(__name__)


class P2PManager(WorkerGroup):
    """A context in which a root solver trains with workers.

    `devices` are those of all ranks, the root's first, joined as `topology` says. For `signals` and
    `last_resort` see `Watchdog`. `baseline` is the number of images a second of the root alone, if
    it is known. `workers` are all solvers but the root, by rank, once they are ready.
    """

    def __init__(
        self,
        root: Solver,
        devices: Sequence[Device],
        topology: Topology,
        sync_options: SyncOptions,
        signals: Signals | None = None,
        last_resort: Callable[[BaseException], object] | None = None,
        baseline: float | None = None,
        world: World | None = None,
    ) -> None:
        root.workers.check()
        self.root = root
        self.devices = devices[1:]
        self._baseline = baseline
        self._bn_stats = sync_options.bn_stats
        self._ranks = Workers(
            devices,
            self._make_worker,
            sync_options.deadlines,
            signals,
            partial(rescue, root.resume_state),
            last_resort,
            world,
        )
        self.group, self._threads = self._ranks.group, self._ranks.threads
        self.group.world.iteration = lambda: root.iter
        self.size, self._first = self.group.world.size, self.group.world.first_rank
        self.watchdog = self._ranks.watchdog
        self._turns = Turns(self.group, devices, self.raise_worker_error)
        self._sync = Synchronization(root, devices, topology, self.group, sync_options)
        self.workers: list[WorkerSolver] = []
        self._param = SolverParameter()  # the settings that the workers have
        self._param.CopyFrom(root.param)
        restored = root.resume_state.workers_positions
        if restored and len(restored) != self.size - 1:
            anew = "The snapshot is of %d solvers, not %d: random numbers of the workers start anew"
            log.warning(anew, len(restored) + 1, self.size)

    # begin and end

    def _make_worker(self, rank: int) -> WorkerSolver:
        """Make the worker of this rank, in its thread; all ranks meet in here."""
        universal = self._first + rank
        positions = restored_positions(self.root, self.size)[universal - 1]
        worker = WorkerSolver(self.root, universal, self.devices[rank - 1], positions)
        self._turns.join(worker, rank)
        self._sync.join(worker, rank)
        return worker

    def _progress(self) -> object:
        """Return what changes as long as a solver of this node makes progress."""
        members, left = list(self._threads.members.values()), self._threads.left
        done = [solver.update_state.done for solver in (self.root, *members)]
        return self.group.phase, self.root.iter, done, left, self._turns.taken

    def __enter__(self) -> "P2PManager":
        root = self.root
        try:
            gc.collect()  # freeing an earlier solver later might wait for a GPU that waits for us
            self.group.join(0)
            self.group.watch_nodes()
            check_data(root.iterations.nets, root.device, self.group)
            follow_first(root, self.group)
            self._turns.join(root, 0)
            with self._ranks.starting(self._progress):
                self._sync.join(root, 0)
            self.workers = self._ranks.members
            solvers = [solver.iterations.statistics for solver in (root, *self.workers)]
            self.statistics: RunningStatistics = RunningStatistics(
                self._bn_stats, solvers, self.group, self.raise_worker_error
            )
            self.statistics.restore(root.resume_state.statistics)
            self.group.phase = "idle"
            _log_ready(self.devices, [get_ident(), *self._threads.idents], self.group.world)
            threads = None if root.device.is_cuda else num_threads()
            nodes = self.group.world.nodes
            performance = Performance(self.seconds, self._baseline, threads, nodes)
            root.join(self, Reporters(root.reporter, performance))
            _log_batch(root, self.size)
        except BaseException as error:
            self._end(error)
            with suppress(Exception):  # the error that counts is the one being raised
                self._detach()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._end(error)
        if isinstance(error, Exception) and not isinstance(error, LostDeviceError):
            cause = self.group.root_cause(error)
            if str(cause) != str(error):  # the root's error may follow from another rank's
                raise cause from error

    def _end(self, error: BaseException | None) -> None:
        self.watchdog.stop()
        if error is None:
            self.group.leave_nodes()
        try:
            if error is None:
                self.statistics.average()
                self._threads.submit(lambda worker: self._sync.leave(worker.rank - self._first))
                self._sync.leave(0)
                self._threads.wait_idle()
                self._detach()
        except BaseException as met:
            error = met
            raise
        finally:
            try:
                if error is not None:
                    self._detach(failed=True)
                    self._ranks.abort(error)
            finally:
                self._ranks.end(error is not None, self._sync.release)

    def _detach(self, failed: bool = False) -> None:
        """Free the root to train alone; after an error its last iteration may be half done."""
        self.root.leave(failed)
        self._turns.end(failed)

    def seconds(self) -> list[dict[str, float]]:
        """Return the seconds that each solver's iterations took so far, by part; of all nodes."""
        own = [solver.phase_timer.read() for solver in (self.root, *self.workers)]
        return gather(self.group, own)

    # what a worker of a parameter server needs whose solvers these are, see `ServedWorkers`

    def each(self, work: Callable[[Solver, int], object]) -> None:
        """Call this with each solver and its rank in its thread; return when all are done."""
        self._threads.submit(lambda worker: work(worker, worker.rank - self._first))
        work(self.root, 0)
        self._threads.wait_idle()

    def surround(self, outer: Callable[[Synchronizer, int], SyncCallback]) -> None:
        """Replace each solver's synchronizer by what `outer` makes of it and of the rank."""
        self.each(lambda _, rank: self._sync.surround(rank, lambda own: outer(own, rank)))

    def lease(self, turns: Callable[[int], Iterator[Turn]] | None) -> None:
        """Train on the batches of these turns, see `Turns.lease`."""
        self._turns.lease(turns)

    def away(self) -> AbstractContextManager[object]:
        """Return a block in which the root waits for other processes, as long as that takes."""
        return self.group.among_nodes()

    # what the root calls, see WorkerGroup

    @property
    def phase(self) -> str:  # type: ignore[override]
        return self.group.phase

    @property
    def failed(self) -> bool:  # type: ignore[override]
        return self.group.stopped

    def root_cause(self, error: Exception) -> BaseException:
        return self.group.root_cause(error)

    def check(self) -> None:
        self.group.check(0)

    def stop(self, error: BaseException) -> None:
        self.group.abort(0, error)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        after_script = self.group.phase == "idle" and phase != "snapshot"
        with self.group.during(phase):
            if after_script:
                self._turns.resume()
                edited = edits(self.root)
                if edited or self.root.param != self._param:
                    self._param.CopyFrom(self.root.param)
                    self._threads.submit(
                        partial(WorkerSolver.take, param=self._param, edited=edited)
                    )
                    self._threads.wait_idle()
            yield

    @property
    def takes_several(self) -> bool:  # type: ignore[override]
        return self.group.world.nodes == 1  # others vote after each iteration

    def iterate(self, count: int = 1) -> None:
        with self.root.phase_timer.fetching():
            self._turns.wait()
        self._threads.submit(partial(WorkerSolver.iterate, count=count))

    def forward(self) -> None:
        self._threads.submit(WorkerSolver.forward)
        self._sync.bring_params()

    def losses(self, own: float) -> list[float]:
        self._threads.wait_idle()
        return gather(self.group, [own, *(worker.loss for worker in self.workers)])

    def begin_test(self, k: int) -> None:
        self.statistics.copy()
        self._turns.begin_test(k, self.root.param.test_iter[k])
        self._threads.submit(partial(WorkerSolver.begin_test, k=k))
        self._sync.bring_params()

    def test(self, k: int, batches: int) -> bool:
        ranks = self._turns.deal(k, batches)
        for rank in ranks:
            if rank:
                self._threads.submit(partial(WorkerSolver.test_batch, k=k), rank)
        return 0 in ranks

    def totals(self, k: int, own: Totals) -> list[Totals]:
        self._threads.submit(partial(WorkerSolver.end_test, k=k))
        self._threads.wait_idle()
        self._turns.end_test(k)
        return gather(self.group, [own, *(worker.totals for worker in self.workers)])

    @contextmanager
    def restoring(self) -> Iterator[None]:
        if self.group.phase != "idle":
            raise ConfigError(
                f"no state can be restored during a {self.group.phase} of several solvers"
            )
        self.raise_worker_error()
        yield
        follow_first(self.root, self.group)
        self._turns.restart()  # data layers go on from a state with the root's batch
        positions = restored_positions(self.root, self.size)
        self._threads.submit(lambda worker: worker.follow(self.root, positions[worker.rank - 1]))
        self._threads.wait_idle()
        self.statistics.restore(self.root.resume_state.statistics)

    def raise_worker_error(self) -> None:
        self._threads.submit(WorkerSolver.wait_idle)
        self._threads.wait_idle()

    def positions(self) -> list[dict[str, Any]]:
        root, own = self.root, list[dict[str, Any]]()
        if not self.failed:
            self.raise_worker_error()
            own = [worker.positions(root.iter) for worker in self.workers]
            roots = own_positions(root.iterations.positions(), root)
            return gather(self.group, [roots, *own])[1:]
        idle = self._ranks.wait_until_idle()  # nothing is known of a worker that hangs
        every: list[dict[str, Any]] = [{}] * self.size  # nor of other nodes
        for rank in idle:
            every[self._first + rank] = self._threads.members[rank].positions(root.iter)
        return every[1:]

    @property
    def writes_files(self) -> bool:  # type: ignore[override]
        return self.group.world.writes_files

    def write(self, files: Callable[[], object]) -> None:
        error: CaffeError | None = None
        try:
            super().write(files)
        except CaffeError as met:
            error = met
        if self.group.world.nodes > 1 and not self.failed:
            with self.group.among_nodes() as world:
                error = world.broadcast(error)
        if error:
            raise error

    def vote(self, action: Action) -> Action:
        if self.group.world.nodes == 1:
            return action
        with self.group.among_nodes() as world:
            return Action(world.vote(action.value))


def p2p_manager(
    root: Solver,
    devices: Sequence[Device],
    sync_options: SyncOptions,
    signals: Signals | None = None,
    last_resort: Callable[[BaseException], object] | None = None,
    baseline: float | None = None,
    world: World | None = None,
) -> AbstractContextManager[P2PManager | None]:
    """Make the manager of a root solver on the first of these devices; None for a single one.

    `world` has the other nodes, if there are some, whose solvers it has counted.
    """
    nodes = world.nodes if world else 1
    if len(devices) == nodes == 1:
        if sync_options.sync != "auto":
            log.warning("One solver has nothing to synchronize by %s", sync_options.sync)
        return nullcontext()
    gpus = [device.index for device in devices if device.kind == "cuda"]
    if gpus:
        topology = peers.prepare(peers.query(gpus))
    else:
        topology = all_joined(world.size if world else len(devices))
    return P2PManager(root, devices, topology, sync_options, signals, last_resort, baseline, world)


def _log_ready(devices: Sequence[Device], idents: Sequence[int], world: World) -> None:
    """Log the devices of the workers and the threads of all solvers of this node."""
    first = world.first_rank
    last = first + len(devices)
    if world.nodes > 1:
        text = "MPI global rank %d of %d on %s: universal ranks %d to %d of %d"
        log.info(text, world.node, world.nodes, world.hosts[world.node], first, last, world.size)
    for rank, device in enumerate(devices, start=first + 1):
        place = f"GPU {device.index}" if device.kind == "cuda" else "the CPU"
        log.info("Solver %d (of 0 to %d) is ready on %s", rank, world.size - 1, place)
    shown = ", ".join(f"0x{ident:016x}" for ident in idents)
    log.info("Threads of solvers %d to %d: %s", first, last, shown)  # to read an abort by


def _log_batch(root: Solver, size: int) -> None:
    """Log the batch of all solvers together, the iterations of an epoch, and the linear rule."""
    param = root.param
    if not root.batch:
        return
    whole = root.batch * param.iter_size * size
    times = f" x iter_size {param.iter_size}" if param.iter_size > 1 else ""
    lengths = [layer.length for layer in root.net.layers if layer.length]
    epoch = f"; an epoch of {lengths[0]} is {lengths[0] / whole:.6g} iterations" if lengths else ""
    log.info(
        "An iteration takes %d solvers x %d images%s = %d%s", size, root.batch, times, whole, epoch
    )
    if root.batch_parts == 1:
        log.info(
            "base_lr is %g; if it is right for one solver, the linear rule gives %g for %d "
            "(it is not changed)",
            *(param.base_lr, param.base_lr * size, size),
        )
