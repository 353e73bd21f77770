"""`caffepy train`: from a solver file to a run, and how it ended."""

import gc
import logging
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from caffepy import ops
from caffepy.collectives.launch import check_single
from caffepy.collectives.rank_group import DEADLINES
from caffepy.collectives.synchronizer import FLOAT32
from caffepy.collectives.world import World
from caffepy.commands.devices import choose_for_training
from caffepy.commands.nodes import (
    check_images,
    check_number,
    check_wire,
    gpus_of_process,
    nodes,
    seed_devices,
    threads_of_process,
)
from caffepy.commands.rollback import STOP, Rollback, Start, on_divergence
from caffepy.core.errors import INTERRUPTED, STOPPED, ConfigError, DivergenceError, UsageError
from caffepy.core.events import Output, Reporter
from caffepy.core.files import locate, locked, working_directory
from caffepy.data.decoders import THREADS, decoding
from caffepy.data.loader import tolerating
from caffepy.device.cuda import CudaDevice
from caffepy.device.device import Device
from caffepy.device.threads import num_threads
from caffepy.net.recompute import Recompute
from caffepy.parallel.manager import p2p_manager
from caffepy.parallel.nodes import check_alike
from caffepy.parallel.synchronization import SyncOptions
from caffepy.proto.caffe_pb2 import SolverParameter
from caffepy.proto.text import format as format_text
from caffepy.proto.text import read_net, read_solver
from caffepy.report import Reporters, TensorBoard, logging_to, open_report
from caffepy.report.speed import BaselineRecorder, baseline_key, known_baseline
from caffepy.solver import Monitor, Signals, Solver, StopError, Watch, newest_good
from caffepy.solver.check import at_field, check_max_iter
from caffepy.solver.monitor import GRACE
from caffepy.solver.snapshot import candidates, check_models, clean, instead_of

if TYPE_CHECKING:
    from caffepy.parallel.parameter_server.attachment import Attachment
    from caffepy.parallel.parameter_server.cluster import ClusterOptions

log = logging.getLogger(__name__)

AUTO = "auto"
SEED = 1  # of a deterministic run whose solver has none

Effect = Literal["stop", "snapshot", "none"]


@dataclass(frozen=True)
class TrainOptions:
    """Options of a training run: the flags of `caffepy train`, with its defaults.

    solver: path of the solver prototxt.
    weights: caffemodels to start from.
    snapshot: a solverstate to resume, or "auto" for the newest good one under the solver's
        snapshot_prefix; if there is none, the run starts from `weights` or from scratch.
    keep: number of snapshots of this run that are kept, the last ones; None: all.
    on_divergence: "stop", or "rollback:FACTOR": a run whose loss is not finite goes on from its
        last snapshot, or starts anew, with the learning rate times FACTOR, at most three times;
        "rollback:FACTOR:N": at most N times.
    gpu: numbers of GPUs such as "0,1", or "all"; one solver each, which train as one. With a
        `cluster` each worker has as many; of a local one they are dealt to the workers.
    cpu: number of solvers on the CPU, even if the file says solver_mode: GPU; with a `cluster` of
        each worker.
    sync: how several solvers average gradients: "auto", "nccl", "tree", "muji" or "flat"; or "ps",
        by the parameter server of a `cluster`.
    cluster: the workers and servers of a cluster of Ray.
    wire: type of gradients between nodes: "float32" or "bf16".
    bn_stats: statistics of BatchNorm in tests and snapshots: the "average" of all solvers or those
        of the "root"; with "sync" the solvers normalize their batches as one, in training too.
    nodes: fewest and most processes of mpirun or srun that the run takes. If they differ, it goes
        on from a snapshot also where these solvers take another number of images in an iteration.
    deadlines: seconds after which a solver counts as hung, by phase; a run of one solver ends only
        if they are given, else the log says what hangs.
    batch_mode: the net's batch_size is that of each solver, or of all together ("global").
    deterministic: two runs give the same numbers.
    max_bad_records: number of unreadable records of each source that are skipped.
    decode: what decodes images: "threads", "processes" (one for each thread) or "gpu".
    precision: of a GPU: "fp32", "tf32", "bf16" or "fp16".
    capture: replay the step as a CUDA graph; else run layer by layer.
    fuse: compute layers together where possible.
    recompute: segments of the net of whose data, but for the last, backward computes again what it
        reads; or "auto": of as few layers as make the net fit into the device's free memory.
    level, stages: join the state of the nets.
    sigint_effect, sighup_effect, sigusr1_effect: what these signals do; SIGTERM, SIGUSR2, SIGXCPU
        and SIGQUIT stop with a snapshot, and so does SIGUSR1 by default.
    grace: seconds from a signal that stops to the snapshot, at most; an iteration that takes
        longer is abandoned.
    log_dir: folder for a log file.
    progress: show a progress bar; by default on a terminal.
    tensorboard: folder for TensorBoard's events.
    tensorboard_histograms: iterations between histograms and filters there; 0: none.
    threads: number of CPU threads.
    last_resort: called in another thread, with an error, if the main thread hangs.
    """

    solver: str
    weights: Sequence[str] = ()
    snapshot: str | None = None
    keep: int | None = None
    on_divergence: str = STOP
    gpu: str | None = None
    cpu: int | None = None
    sync: str = "auto"
    cluster: "ClusterOptions | None" = None
    wire: str = FLOAT32
    bn_stats: Literal["average", "root", "sync"] = "average"
    nodes: tuple[int, int] | None = None
    deadlines: Mapping[str, float] = field(default_factory=dict)
    batch_mode: Literal["per-gpu", "global"] = "per-gpu"
    deterministic: bool = False
    max_bad_records: int = 0
    decode: str = THREADS
    precision: str | None = None
    capture: bool = True
    fuse: bool = True
    recompute: Recompute = 1
    level: int = 0
    stages: Sequence[str] = ()
    sigint_effect: Effect = "stop"
    sighup_effect: Effect = "snapshot"
    sigusr1_effect: Effect = "stop"
    grace: float = GRACE
    log_dir: str | None = None
    progress: bool | None = None
    tensorboard: str | None = None
    tensorboard_histograms: int = 1000
    threads: int | None = None
    last_resort: Callable[[BaseException], object] | None = None


@dataclass(frozen=True)
class TrainResult:
    """The end of a training run.

    `outputs` are the mean outputs (name, values, loss weight) of each test net's last test,
    `snapshot` is the state file of the last iteration, None if none was written.
    """

    iteration: int
    stopped: bool
    outputs: list[list[Output]]
    snapshot: str | None

    @property
    def exit_code(self) -> int:
        """0 for a run that reached its end, 75 for one that was stopped and can be resumed, 130 for
        one that was stopped and left no snapshot.
        """
        if not self.stopped:
            return 0
        return STOPPED if self.snapshot else INTERRUPTED


def train(options: TrainOptions) -> TrainResult:
    """Train as the options say, until max_iter or a signal.

    Raises the errors of `caffepy.core.errors`: UsageError, ConfigError, DataError, ...
    """
    if options.cluster:
        check_single("caffepy train --cluster")
    signals = Signals(options.sigint_effect, options.sighup_effect, options.sigusr1_effect)
    monitor = Monitor(signals, options.grace, options.last_resort)
    deadlines = {**DEADLINES, **options.deadlines}
    with signals, monitor, nodes(deadlines["set-up"], options.last_resort) as world:
        if world:
            monitor.begin(deadlines, ends=True)
            world.set_up.deadline = deadlines["set-up"]
            world.set_up.interrupted = signals.check
        return _train_as_node(options, monitor, world)


def _train_as_node(options: TrainOptions, monitor: Monitor, world: World | None) -> TrainResult:
    if options.cluster:
        _check_cluster(options, options.cluster)
    elif options.nodes:
        check_number(world, options.nodes)
    if options.snapshot and options.weights and options.snapshot != AUTO:
        raise UsageError("Give a snapshot to resume training or weights to finetune but not both.")
    rollback, log_dir = on_divergence(options.on_divergence), options.log_dir
    if rollback and options.keep == 1:
        raise UsageError(
            "--on-divergence rollback needs --keep 2 or more: where the iteration after a snapshot "
            "diverges, it goes back to the one before"
        )
    with nullcontext() if log_dir is None else logging_to(stderr=False, log_dir=log_dir):
        check_wire(options.wire, world)
        param = read_solver(options.solver)
        check_max_iter(param, options.solver)
        _check_recompute(options, param)
        gpu = gpus_of_process(options.gpu, world)
        devices = choose_for_training(gpu, options.cpu, param, options.solver)
        if options.cluster:
            if devices[0].is_cuda:
                devices = list(options.cluster.dealt(devices))
            if not options.threads:
                ops.backend(devices[0]).set_num_threads(options.cluster.threads())
        run = _Run(options, param, devices, monitor, world)
        if world is None:
            together = len(devices) > 1 and not options.cluster  # who may wait for long
            ends = bool(options.deadlines) or together
            monitor.begin({**DEADLINES, **options.deadlines}, ends)
        else:
            _meet(run, world)
        _set_up(run)
        first: str | None = None
        alone: AbstractContextManager[None] = nullcontext()
        if world is None or world.writes_files:
            clean(param.snapshot_prefix)
            first = _starting_point(options, param)
            alone = _alone(param, options.solver)
        start = Start(first, anew=first is None)
        with alone, tolerating(options.max_bad_records), decoding(options.decode):
            while True:
                end = _train(run, start, rollback)
                if isinstance(end, TrainResult):
                    return end
                start = end
                if start.snapshot:
                    del param.weights[:]
                gc.collect()  # the nets that diverged, before their like are built


@dataclass(frozen=True)
class _Run:
    """A training run: what stays the same when it is rolled back. `world` has all nodes, if mpirun
    or srun started some.
    """

    options: TrainOptions
    param: SolverParameter
    devices: Sequence[Device]
    monitor: Monitor
    world: World | None

    @property
    def solvers(self) -> int:
        """Number of solvers that train in step, on all nodes."""
        return self.world.size if self.world else len(self.devices)

    @property
    def follows(self) -> bool:
        """True on nodes other than the first, which write no files."""
        return self.devices[0].follows


def _train(run: _Run, start: Start, rollback: Rollback | None) -> TrainResult | Start:
    """Train from `start` to the end, or to a divergence that is rolled back: return where to."""
    options, param, monitor, folder = run.options, run.param, run.monitor, working_directory()
    drawn, boards = None, list[TensorBoard]()
    if param.random_seed < 0 and not options.cluster:
        drawn = seed_devices(run.world, run.devices)
    if options.tensorboard and not run.follows:
        boards = [TensorBoard(options.tensorboard, options.tensorboard_histograms)]
    with (
        _report(run, boards) as reporter,
        closing(_solver(run, reporter)) as solver,
        _attached(options) as attachment,
    ):
        monitor.watch(solver)
        _configure(run, solver)
        resumed = _restore(run, solver, start.snapshot, attachment)
        if drawn is not None and not resumed and not run.follows:
            log.info("The random seed is %d; random_seed: %d repeats the run", drawn, drawn)
        if start.rate_factor is not None:
            solver.iterations.rate_factor = start.rate_factor
        try:
            with _joined(run, solver, attachment):
                for board in boards:
                    board.watch = Watch(solver, board.every)
                log.info("Starting Optimization")
                solver.solve(goes_on=start.rollbacks > 0)
            log.info("Optimization Done.")
        except KeyboardInterrupt as interrupt:
            if not (isinstance(interrupt, StopError) or solver.resume_state.saved_now):
                raise
            solver.stopped = True
        except DivergenceError as error:
            if folder:
                os.chdir(folder)  # a layer may have changed it
            monitor.forget()
            return start.after(error, solver, rollback)
        saved = solver.resume_state.saved_now
        if solver.stopped and saved:
            message = "A signal stopped the run at iteration %d; --snapshot %s resumes it"
            log.info(message, solver.iter, saved)
        result = TrainResult(solver.iter, solver.stopped, solver.last_outputs, saved)
        monitor.signals.ended, monitor.exit_code = True, result.exit_code
        return result


def _report(run: _Run, boards: Sequence[TensorBoard]) -> AbstractContextManager[Reporter]:
    """Return a block with the run's reporter; nodes that follow only log."""
    options, param = run.options, run.param
    prefix = None if run.follows else param.snapshot_prefix or None
    progress = False if run.follows else options.progress
    # MPI and Ray count the processes that they start
    beside = run.world is None and options.cluster is None
    return open_report(prefix, param.max_iter, progress, boards, beside)


def _solver(run: _Run, reporter: Reporter) -> Solver:
    """Return the root solver of this process."""
    options = run.options
    return Solver(
        run.param,
        device=run.devices[0],
        path=options.solver,
        reporter=reporter,
        precision=options.precision,
        rank=run.world.first_rank if run.world else 0,
        batch_parts=run.solvers if options.batch_mode == "global" else 1,
    )


def _attached(options: TrainOptions) -> AbstractContextManager["Attachment | None"]:
    """Return a block with the servers that outlive the run, if --cluster names some."""
    cluster = options.cluster
    if not cluster or not cluster.name:
        return nullcontext()
    from caffepy.parallel.parameter_server.attachment import attached  # loads asyncio

    return attached(cluster.cluster, cluster.name, options.solver)


def _configure(run: _Run, solver: Solver) -> None:
    """Choose how the solver runs: captured, fused, with blobs that share memory."""
    options, devices = run.options, run.devices
    solver.resume_state.keep = options.keep
    solver.capture, solver.fuse = options.capture, options.fuse
    looked_at = solver.param.debug_info or options.bn_stats == "sync"
    if options.recompute != 1:
        solvers = 1 if devices[0].is_cuda else len(devices)
        solver.save_memory(options.recompute, solvers=solvers)
    elif solver.capture and solver.fuse and not looked_at:
        solver.save_memory()


def _restore(
    run: _Run, solver: Solver, snapshot: str | None, attachment: "Attachment | None"
) -> bool:
    """Continue from what servers hold, or from a snapshot; True if there was a snapshot."""
    if attachment and attachment.held:
        _go_on(solver, run.options, attachment)
        snapshot = None
    elif snapshot == AUTO:
        snapshot = newest_good(solver.param.snapshot_prefix, solver.resume_state.run)
    if snapshot:
        log.info("Resuming from %s", snapshot)
        solver.restore(snapshot)
        if run.world:
            check_images(run.world, solver, snapshot, run.options.nodes)
    if solver.iter and solver.iter >= solver.param.max_iter:
        log.warning("Nothing is left to train: max_iter is %d", solver.param.max_iter)
    return bool(snapshot)


@contextmanager
def _joined(run: _Run, solver: Solver, attachment: "Attachment | None") -> Iterator[None]:
    """Return a block in which the solver trains with others, if there are any."""
    options, cluster = run.options, run.options.cluster
    way = AUTO if cluster else options.sync
    sync = SyncOptions(way, options.bn_stats, options.deadlines, options.wire)
    known = None if cluster else _baseline(solver, run.solvers)
    signals, last_resort = run.monitor.signals, options.last_resort
    with p2p_manager(solver, run.devices, sync, signals, last_resort, known, run.world):
        if cluster is None:
            yield
            return
        from caffepy.parallel.parameter_server.cluster import options_of_worker, served

        worker = options_of_worker(
            solver,
            cluster,
            gpu=options.gpu,
            precision=options.precision,
            threads=num_threads(),
            cpu=options.cpu or 1,
            decode=options.decode,
        )
        with served(solver, cluster, worker, attachment):
            yield


def _go_on(solver: Solver, options: TrainOptions, attachment: "Attachment") -> None:
    """Continue with what servers hold; UsageError if the options name another start."""
    assert options.cluster
    given = {"--snapshot": (options.snapshot or AUTO) != AUTO, "--weights": bool(options.weights)}
    for flag, is_given in given.items():
        if is_given:
            raise UsageError(
                f'{flag}: the servers "{attachment.name}" hold a net, which this run would go on '
                f"with: leave {flag} out, or start servers under another name"
            )
    attachment.restore(solver, options.cluster.rule())


def _check_cluster(options: TrainOptions, cluster: "ClusterOptions") -> None:
    """Raise UsageError unless the options go together with a parameter server."""
    cluster.rule()
    refused = {
        "--bn-stats sync": options.bn_stats == "sync",
        "--batch-mode global": options.batch_mode == "global",
        "--on-divergence rollback": on_divergence(options.on_divergence) is not None,
    }
    for what, given in refused.items():
        if given:
            raise UsageError(f"--cluster does not go together with {what}")


def _check_recompute(options: TrainOptions, param: SolverParameter) -> None:
    """Raise UsageError if --recompute is given with what needs the first forward's data."""
    refused = {
        "--cluster": options.cluster is not None,
        "--bn-stats sync": options.bn_stats == "sync",
        "debug_info, which shows every blob": param.debug_info,
    }
    for what, given in refused.items():
        if given and options.recompute != 1:
            raise UsageError(f"--recompute does not go together with {what}")


def _meet(run: _Run, world: World) -> None:
    """Count the solvers of all nodes; ConfigError unless all nodes have the same options."""
    options, param, devices = run.options, run.param, run.devices
    if on_divergence(options.on_divergence) is not None:
        raise UsageError("--on-divergence rollback is for one process: give --on-divergence stop")
    check_alike(
        world,
        {
            "solver": format_text(param),
            "net": [format_text(read_net(path)) for path in _net_files(param, options.solver)],
            "kind of device": devices[0].kind,
            "precision": options.precision,
            "--sync": options.sync,
            "--wire": options.wire,
            "--bn-stats": options.bn_stats,
            "--batch-mode": options.batch_mode,
        },
    )
    world.join(len(devices))
    follows = world.node > 0
    devices[0].follows, devices[0].writes_files = follows, not follows
    if follows:
        del param.weights[:]  # those of the first node come
    if not options.threads:
        ops.backend(devices[0]).set_num_threads(threads_of_process(world))


def _net_files(param: SolverParameter, path: str) -> list[str]:
    names = [param.net, param.train_net, *param.test_net]
    return [locate(name, path) for name in names if name]


def _alone(param: SolverParameter, path: str) -> AbstractContextManager[None]:
    """Return a context in which no other run writes under the prefix; entering it raises
    ConfigError if one does.
    """
    folder, name = os.path.split(os.path.join(working_directory(), param.snapshot_prefix))
    begun = time.strftime("%Y-%m-%d %H:%M:%S")
    holder = f"process {os.getpid()} on {platform.node()}, which trains {path} since {begun}"
    where = at_field(path, "snapshot_prefix") or path
    return locked(os.path.join(folder, f".{name}.lock"), holder, where)


def _set_up(run: _Run) -> None:
    """Copy options into the fields of the solver and the device that have them."""
    options, param, device = run.options, run.param, run.devices[0]
    if device.kind == "cuda":
        param.device_id = device.index
    if options.threads:
        ops.backend(device).set_num_threads(options.threads)
    if options.deterministic:
        if param.random_seed < 0:
            param.random_seed = SEED
            log.info("Deterministic: random_seed is %d", SEED)
        device.math_mode.deterministic = True
    param.train_state.level = options.level
    param.train_state.stage.extend(options.stages)


def _starting_point(options: TrainOptions, param: SolverParameter) -> str | None:
    """Return the state file to resume from, if any, or "auto" if there are some to choose from; put
    the weights to start from into `param`.
    """
    snapshot = options.snapshot
    if snapshot == AUTO:
        if not candidates(param.snapshot_prefix):
            check_models(param.snapshot_prefix, options.weights)
            snapshot = None
            log.info("No snapshot under %s; starting from scratch", param.snapshot_prefix)
        elif options.weights:
            log.info("The snapshot replaces the weights %s", ", ".join(options.weights))
    if not snapshot:
        if options.weights:
            try:
                param.weights[:] = list(options.weights)
            except UnicodeEncodeError as error:
                raise ConfigError(
                    f'--weights "{error.object}": this name is not UTF-8, as those in a solver '
                    "are; rename the file, or the folder"
                ) from None
        return None
    if snapshot != AUTO:
        snapshot = locate(snapshot, options.solver)
        if not os.path.exists(snapshot):
            raise ConfigError(
                f'snapshot "{snapshot}" does not exist{instead_of(snapshot)} '
                f"(the working directory is {os.getcwd()})"
            )
    del param.weights[:]  # the snapshot has its own
    return snapshot


def _baseline(solver: Solver, solvers: int) -> float | None:
    """Return the images a second of a single such GPU, if a run of one solver has measured them."""
    device = solver.device
    if not isinstance(device, CudaDevice):
        return None
    run = baseline_key(
        {
            "device": device.name,
            "net": solver.net.param.SerializeToString(deterministic=True).hex(),
            "batch": solver.batch,
            "passes": solver.param.iter_size,
            "type": solver.param.type,
            "precision": device.math_mode.precision,
            "how": [solver.capture, solver.fuse],
        }
    )
    if solvers == 1:
        solver.reporter = Reporters(solver.reporter, BaselineRecorder(run))
    return known_baseline(run)
