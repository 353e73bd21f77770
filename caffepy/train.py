"""Training from files: what `caffepy train` does."""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

from caffepy import ops
from caffepy.device import CudaDevice, Device, gpu_numbers
from caffepy.errors import STOPPED, ConfigError, DeviceError, UsageError
from caffepy.paths import locate
from caffepy.proto.caffe_pb2 import SolverParameter
from caffepy.proto.text import locate_field, read_solver
from caffepy.report import logging_to, open_report
from caffepy.reporter import Output
from caffepy.solver import Signals, Solver, newest_good

log = logging.getLogger(__name__)

AUTO = "auto"


@dataclass(frozen=True)
class TrainResult:
    """How a training run ended.

    `outputs` are the mean outputs (name, values, loss weight) of each test net's last test, `snapshot` is the state
    file that holds the run as it ended, None if none was written.
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
    cpu: bool = False,
    precision: str | None = None,
    capture: bool = True,
    fuse: bool = True,
    level: int = 0,
    stages: Sequence[str] = (),
    sigint_effect: str = "stop",
    sighup_effect: str = "snapshot",
    log_dir: str | None = None,
    progress: bool | None = None,
    threads: int | None = None,
) -> TrainResult:
    """Train as the solver file says; raises the errors of `caffepy.errors`.

    `weights`: caffemodels to start from. `snapshot`: a solverstate to resume, or "auto" for the newest good one under
    the solver's snapshot_prefix (a fresh start, from `weights` if given, if there is none). `gpu`: the number of a GPU,
    or "all" for the first; `cpu` keeps a solver that says solver_mode: GPU on the CPU; `precision` on a GPU: "fp32",
    "tf32", "bf16" or "fp16". Without `capture` a GPU runs layer by layer, without `fuse` each layer by itself. SIGTERM
    stops with a snapshot; `sigint_effect` and `sighup_effect` are "stop", "snapshot" or
    "none". `log_dir` gets a log file; `progress` False keeps the terminal free of a progress bar; `threads` is the
    number of CPU threads.
    """
    if snapshot and weights and snapshot != AUTO:
        raise UsageError("Give a snapshot to resume training or weights to finetune but not both.")
    if gpu and cpu:
        raise UsageError("Give --gpu or --cpu, not both.")
    signals = Signals(sigint_effect, sighup_effect)
    with _logging(log_dir):
        param = read_solver(solver)
        device = Device() if cpu else _device(param, solver, gpu)
        _tell(device)
        if device.kind == "cuda":
            param.device_id = device.index
        if threads:
            ops.backend(device).set_num_threads(threads)
        param.train_state.level = level
        param.train_state.stage.extend(stages)
        snapshot = _start(param, solver, snapshot, weights)
        with (
            signals,
            open_report(param.snapshot_prefix or None, param.max_iter, progress) as reporter,
            closing(Solver(param, device=device, path=solver, reporter=reporter, precision=precision)) as run,
        ):
            signals.listen()
            run.action = signals.poll
            run.capture, run.fuse = capture, fuse
            if capture and fuse and not param.debug_info:
                run.save_memory()
            for net in (run.net, *run.test_nets):
                net.before_forward.append(signals.check)
                net.before_backward.append(signals.check)
            if snapshot:
                log.info("Resuming from %s", snapshot)
                run.restore(snapshot)
            log.info("Starting Optimization")
            run.solve()
            log.info("Optimization Done.")
            return TrainResult(run.iter, run.stopped, run.last_outputs, run.saved_now)


@contextmanager
def _logging(log_dir: str | None) -> Iterator[None]:
    if log_dir is None:
        yield
    else:
        with logging_to(stderr=False, log_dir=log_dir):
            yield


def _device(param: SolverParameter, path: str, gpu: str | None) -> Device:
    """The device of the run: the CPU unless `gpu` or an explicit solver_mode asks for another, as in Caffe's tool."""
    if gpu:
        numbers = gpu_numbers(gpu)
        if len(numbers) > 1 and gpu != "all":
            raise DeviceError("training on several GPUs at once is not there yet; give one")
        return CudaDevice(numbers[0])
    if param.HasField("solver_mode") and param.solver_mode == SolverParameter.GPU:
        index = param.device_id if param.HasField("device_id") else 0
        try:
            return CudaDevice(index)
        except DeviceError as error:
            raise DeviceError(
                f"solver_mode: GPU asks for GPU {index}, but {error.message}; or set solver_mode: CPU, or give --cpu",
                locate_field(path, "solver_mode"),
            ) from None
    return Device()


def _tell(device: Device) -> None:
    if isinstance(device, CudaDevice):
        log.info("Using GPUs %d", device.index)
        log.info("GPU %d: %s", device.index, device.name)
    else:
        log.info("Use CPU.")


def _start(param: SolverParameter, path: str, snapshot: str | None, weights: Sequence[str]) -> str | None:
    """The state file to go on from, if any, and in `param` the weights to begin with: a snapshot needs none."""
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
        raise ConfigError(f'snapshot "{snapshot}" does not exist (the working directory is {os.getcwd()})')
    del param.weights[:]
    return snapshot


def _newest(param: SolverParameter) -> str | None:
    state = newest_good(param.snapshot_prefix)
    if state is None:
        log.info("No snapshot under %s; starting from scratch", param.snapshot_prefix)
    return state
