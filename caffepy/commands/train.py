"""Training from files: what `caffepy train` does."""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

from caffepy import ops
from caffepy.core.errors import STOPPED, ConfigError, DeviceError, UsageError
from caffepy.core.events import Output
from caffepy.core.paths import locate
from caffepy.data.bad_records import tolerating
from caffepy.device.device import CudaDevice, Device, chosen_gpus, tell_devices
from caffepy.parallel.manager import SyncOptions, team_of
from caffepy.proto.caffe_pb2 import SolverParameter
from caffepy.proto.text import locate_field, read_solver
from caffepy.report import Reporters, TensorBoard, baseline, logging_to, open_report
from caffepy.solver import Signals, Solver, Watch, newest_good

log = logging.getLogger(__name__)

AUTO = "auto"
TERMS = SyncOptions()
"""The usual ones."""

HISTOGRAMS = 1000
"""Iterations from one histogram for TensorBoard to the next."""

SEED = 1
"""random_seed of a deterministic run whose solver has none."""


@dataclass(frozen=True)
class TrainResult:
    """How a training run ended.

    `outputs` are the mean outputs (name, values, loss weight) of each test net's last test,
    `snapshot` is the state file that holds the run as it ended, None if none was written.
    """

    iteration: int
    stopped: bool
    outputs: list[list[Output]]
    snapshot: str | None

    @property
    def exit_code(self) -> int:
        """0 for a run that ended by itself or left no snapshot, else 75: go on with `--snapshot`."""
        return STOPPED if self.stopped and self.snapshot else 0


def train(
    solver: str,
    *,
    weights: Sequence[str] = (),
    snapshot: str | None = None,
    gpu: str | None = None,
    cpu: int = 0,
    sync_options: SyncOptions = TERMS,
    global_batch: bool = False,
    deterministic: bool = False,
    max_bad_records: int = 0,
    precision: str | None = None,
    capture: bool = True,
    fuse: bool = True,
    level: int = 0,
    stages: Sequence[str] = (),
    sigint_effect: str = "stop",
    sighup_effect: str = "snapshot",
    log_dir: str | None = None,
    progress: bool | None = None,
    tensorboard: str | None = None,
    tensorboard_histograms: int = HISTOGRAMS,
    threads: int | None = None,
    last_resort: Callable[[BaseException], object] | None = None,
) -> TrainResult:
    """Train as the solver file says; raises the errors of `caffepy.core.errors`.

    `weights`: caffemodels to start from. `snapshot`: a solverstate to resume, or "auto" for the
    newest good one under the solver's snapshot_prefix (a fresh start, from `weights` if given, if
    there is none). `gpu`: the numbers of GPUs, or "all", a solver each; `cpu`: so many solvers on
    the CPU, even if they say solver_mode: GPU. Several solvers train as one, on these `terms`;
    batches are what the net says for each, or with `global_batch` for all together. `deterministic`
    runs are the same each time. So many records of each source that cannot be read are passed over:
    `max_bad_records`. `precision` on a GPU: "fp32", "tf32", "bf16" or "fp16". Without `capture` a
    GPU runs layer by layer, without `fuse` each layer by itself. SIGTERM stops with a snapshot;
    `sigint_effect` and `sighup_effect` are "stop", "snapshot" or "none". `log_dir` gets a log file;
    `progress` False keeps the terminal free of a progress bar; `tensorboard` is a folder for
    events, with histograms and filters every `tensorboard_histograms` iterations, never if that is
    0; `threads` is the number of CPU threads. `last_resort` is called with the error of another
    solver, in its thread, if this one does not get on.
    """
    if snapshot and weights and snapshot != AUTO:
        raise UsageError("Give a snapshot to resume training or weights to finetune but not both.")
    if gpu and cpu:
        raise UsageError("Give --gpu or --cpu, not both.")
    signals = Signals(sigint_effect, sighup_effect)
    with _logging(log_dir):
        param = read_solver(solver)
        devices = [Device() for _ in range(cpu)] if cpu else _devices(param, solver, gpu)
        tell_devices(devices)
        if devices[0].kind == "cuda":
            param.device_id = devices[0].index
        if threads:
            ops.backend(devices[0]).set_num_threads(threads)
        if deterministic:
            _determine(param, devices[0])
        param.train_state.level = level
        param.train_state.stage.extend(stages)
        snapshot = _start(param, solver, snapshot, weights)
        boards = [TensorBoard(tensorboard, tensorboard_histograms)] if tensorboard else []
        with (
            signals,
            tolerating(max_bad_records),
            open_report(
                param.snapshot_prefix or None, param.max_iter, progress, boards
            ) as reporter,
            closing(
                Solver(
                    param,
                    device=devices[0],
                    path=solver,
                    reporter=reporter,
                    precision=precision,
                    batch_parts=len(devices) if global_batch else 1,
                )
            ) as run,
        ):
            signals.listen()
            run.action = signals.poll
            run.capture, run.fuse = capture, fuse
            if capture and fuse and not param.debug_info and sync_options.statistics != "sync":
                run.save_memory()
            for net in (run.net, *run.test_nets):
                net.before_forward.append(signals.check)
                net.before_backward.append(signals.check)
            if snapshot:
                log.info("Resuming from %s", snapshot)
                run.restore(snapshot)
                if run.iter >= param.max_iter:
                    log.warning("Nothing is left to train: max_iter is %d", param.max_iter)
            with team_of(
                run, devices, sync_options, signals, last_resort, _alone(run, len(devices))
            ):
                for board in boards:
                    board.watch = Watch(run, board.every)
                log.info("Starting Optimization")
                run.solve()
            log.info("Optimization Done.")
            if run.stopped and run.saved_now:
                log.info(
                    "A signal stopped the run at iteration %d; --snapshot %s goes on",
                    run.iter,
                    run.saved_now,
                )
            return TrainResult(run.iter, run.stopped, run.last_outputs, run.saved_now)


def _alone(run: Solver, solvers: int) -> float | None:
    """How many images a second a GPU takes by itself, if it is known; a run of one solver makes it
    known.
    """
    device = run.device
    if not isinstance(device, CudaDevice):
        return None
    alike = baseline.key(
        {
            "device": device.name,
            "net": run.net.param.SerializeToString(deterministic=True).hex(),
            "batch": run.batch,
            "passes": run.param.iter_size,
            "type": run.param.type,
            "precision": ops.precision_of(device),
            "how": [run.capture, run.fuse],
        }
    )
    if solvers == 1:
        run.reporter = Reporters(run.reporter, baseline.Alone(alike))
    return baseline.known(alike)


@contextmanager
def _logging(log_dir: str | None) -> Iterator[None]:
    if log_dir is None:
        yield
    else:
        with logging_to(stderr=False, log_dir=log_dir):
            yield


def _devices(param: SolverParameter, path: str, gpu: str | None) -> list[Device]:
    """The devices of the run: the CPU unless `gpu` or an explicit solver_mode asks for others, as
    in Caffe's tool.
    """
    if gpu:
        return chosen_gpus(gpu)
    if param.HasField("solver_mode") and param.solver_mode == SolverParameter.GPU:
        index = param.device_id if param.HasField("device_id") else 0
        try:
            return [CudaDevice(index)]
        except DeviceError as error:
            raise DeviceError(
                f"solver_mode: GPU asks for GPU {index}, but {error.message}; or set solver_mode: CPU, or give --cpu",
                locate_field(path, "solver_mode"),
            ) from None
    return [Device()]


def _determine(param: SolverParameter, device: Device) -> None:
    """See to it that nothing is left to chance."""
    if param.random_seed < 0:
        param.random_seed = SEED
        log.info("Deterministic: random_seed is %d", SEED)
    ops.set_deterministic(device)


def _start(
    param: SolverParameter, path: str, snapshot: str | None, weights: Sequence[str]
) -> str | None:
    """The state file to go on from, if any, and in `param` the weights to begin with: a snapshot
    needs none.
    """
    if snapshot == AUTO:
        snapshot = _newest(param)
        if snapshot and weights:
            log.info("The snapshot goes before the weights %s", ", ".join(weights))
    if not snapshot:
        if weights:
            param.weights[:] = list(weights)
        return None
    snapshot = locate(snapshot, path)
    if not os.path.exists(snapshot):
        raise ConfigError(
            f'snapshot "{snapshot}" does not exist (the working directory is {os.getcwd()})'
        )
    del param.weights[:]
    return snapshot


def _newest(param: SolverParameter) -> str | None:
    state = newest_good(param.snapshot_prefix)
    if state is None:
        log.info("No snapshot under %s; starting from scratch", param.snapshot_prefix)
    return state
