"""Solver: the training loop, in the order of Caffe's Solver::Step, Solve, Test and ApplyUpdate."""

import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from math import isclose, isfinite
from typing import Any, NamedTuple

import numpy as np

from caffepy import ops
from caffepy.core.abandoned import abandon
from caffepy.core.errors import CaffeError, ConfigError, DataError, DivergenceError, LostDeviceError
from caffepy.core.events import Output, Reporter
from caffepy.core.paths import locate
from caffepy.device.device import Device
from caffepy.net import Net, memory
from caffepy.net.weights import load_weights
from caffepy.ops.update_state import StepResult, StepStatus
from caffepy.proto.caffe_pb2 import SolverParameter
from caffepy.proto.nvcaffe import choose_precision
from caffepy.proto.text import format as format_text
from caffepy.solver.check import check_param
from caffepy.solver.divergence import HINT, check_params, diverged, diverged_before
from caffepy.solver.nets import Source, net_sources
from caffepy.solver.policy import advance, next_step, rate
from caffepy.solver.preflight import check_layers, check_prefix, check_snapshots
from caffepy.solver.resume_state import (
    compare_layers,
    completed,
    data_layers,
    set_positions,
    take_data_positions,
    take_positions,
    warn_of_layers,
)
from caffepy.solver.sidecar import taken_up
from caffepy.solver.signals import Action
from caffepy.solver.smoothed_loss import LossWindow
from caffepy.solver.snapshot import (
    Files,
    State,
    check_histories,
    find_model,
    read_sidecar,
    read_state,
    sidecar_of,
    verify,
    write,
)
from caffepy.solver.step import Callback, Step, Synchronizer
from caffepy.solver.test_pass import TestPass
from caffepy.solver.worker_group import EndedGroup, WorkerGroup

log = logging.getLogger(__name__)

SATURATED = 87.3365  # -log of the smallest float32, the most that SoftmaxWithLoss gives


class Given(NamedTuple):
    """An iteration that was given to the device: where everything stood before it."""

    iteration: int
    current_step: int
    positions: dict[str, Any]


class _Passing:
    """Passes on to a synchronizer which layers are done."""

    capturable = adds_nothing = True

    def __init__(self, synchronizer: Synchronizer) -> None:
        self._synchronizer = synchronizer

    def __call__(self, layer: int) -> None:
        self._synchronizer.after_backward(layer)


class Solver:
    """Trains the net of a SolverParameter, with any of the update rules that `type` names.

    `path` is the solver file: messages name places in it, and nets and weights may lie beside it.
    `action` is polled once an iteration and once a test batch. `rank` is added to random_seed.
    `precision` goes before what the train net says of number formats. With a `root` the layers that
    are shared in parallel are its; only rank 0 can do without. Batches of the train net are a
    `batch_parts`-th of what the net says. ConfigError and DataError say what does not fit.

    On a GPU an iteration is recorded and replayed, unless `capture` is set to False. Losses and
    whatever goes wrong are then known some iterations later, at the latest where something is
    displayed, tested or saved and when `step` ends; an iteration that goes wrong updates nothing,
    nor does one after it.
    """

    def __init__(
        self,
        param: SolverParameter,
        *,
        device: Device | None = None,
        path: str | None = None,
        reporter: Reporter | None = None,
        rank: int = 0,
        precision: str | None = None,
        root: "Solver | None" = None,
        batch_parts: int = 1,
    ) -> None:
        self.param = param
        self.path = path
        self.precision = precision
        self._root = root
        self.batch_parts = batch_parts
        self.device = device or Device()
        self.ops = ops.backend(self.device)
        self.reporter = reporter or Reporter()
        self.action: Callable[[], Action] = lambda: Action.NONE
        self.callbacks: list[Callback] = []
        self.workers = WorkerGroup()
        self._own_reporter: Reporter | None = None  # from before `join`
        self.workers_positions: list[
            dict[str, Any]
        ] = []  # where those of the state that was restored stood
        if log.isEnabledFor(logging.INFO):
            log.info("Initializing solver from parameters: \n%s", format_text(param).rstrip("\n"))
        check_param(param, path)
        if param.snapshot > 0:
            check_prefix(param, path)
        if param.random_seed >= 0:
            self.device.seed(param.random_seed + rank)
        source, test_sources = net_sources(param, path)
        ops.set_precision(self.device, choose_precision(source.param, precision))
        self.net = self._build_train_net(source)
        if rank > 0:
            self._check_shared()
        self.test_nets = [
            self._build_test_net(i, test_source) for i, test_source in enumerate(test_sources)
        ]
        self.iter = 0
        self.current_step = 0
        self._started_at = 0  # the iteration of the state that was restored
        self.stopped = False  # the last step or solve ended early because `action` asked for it
        self.last_outputs: list[list[Output]] = [
            [] for _ in self.test_nets
        ]  # what each test net gave last

        self._step = Step(param, self.net, self.device, self.callbacks)
        self.params, self.history, self.update_state = (
            self._step.params,
            self._step.history,
            self._step.update_state,
        )
        self.capture = True
        self._fuse = True
        self._given: deque[Given] = deque()  # iterations of which no step_result was heard yet
        self._verdict = StepResult(0.0, 0.0, 1.0, 1.0, StepStatus.DONE)
        self._interrupted = False  # the last step was interrupted at a place unknown
        self.saves_memory = (
            False  # blobs share memory: what a pass wrote to them is not there after it
        )
        self._loss_weights = self.net.blob_loss_weights
        fed = [node.tops[0] for node in self.net.nodes if node.tops and not node.bottoms]
        self._batch = fed[0] if fed else None
        self._feeds = [data_layers(net) for net in self._nets]
        self._window = LossWindow(param.average_loss, 0)
        self._window_restored = False  # the next step goes on with it
        self._shown: tuple[int, float] | None = None  # iteration and time of the last display
        self._saved: tuple[int, str] | None = None  # iteration and state file of the last snapshot
        self._restored_from: str | None = None  # the state file that was restored
        self._failed_at = -1
        self._saturation_explained = False
        self._positions_before: dict[str, Any] | None = (
            None  # before the test or iteration that is being done
        )
        if param.snapshot > 0:
            check_layers(param, self.net)
        log.info("Solver scaffolding done.")

    # construction

    def _build_train_net(self, source: Source) -> Net:
        by_file = source.origin.partition(": ")
        log.info(
            "Creating training net %s %s", "from" if by_file[1] else "specified in", source.origin
        )
        root_net = self._root.net if self._root else None
        parts = self.batch_parts
        net = Net(
            source.param, device=self.device, path=source.path, root_net=root_net, batch_parts=parts
        )
        self._load_weights(net)
        return net

    def _check_shared(self) -> None:
        for layer in self.net.shared_layers:
            if self._root is None:
                raise ConfigError(
                    f'root_net needs to be set for all non-root solvers: layer "{layer.param.name}" ({layer.type}) is '
                    "the root's alone"
                )
            if layer.blobs:
                raise ConfigError(
                    f'layer "{layer.param.name}" ({layer.type}) has parameters, so that solvers cannot share it',
                    self.net.path,
                )

    def _build_test_net(self, k: int, source: Source) -> Net:
        log.info("Creating test net (#%d) specified by %s", k, source.origin)
        root_net = self._root.test_nets[k] if self._root else None
        net = Net(source.param, device=self.device, path=source.path, root_net=root_net)
        self._load_weights(net)
        net.debug_info = self.param.debug_info
        return net

    def _load_weights(self, net: Net) -> None:
        for entry in self.param.weights:
            for name in entry.split(","):
                file = locate(name.strip(), self.path)
                log.info("Finetuning from %s", file)
                load_weights(net, file)

    @property
    def fuse(self) -> bool:
        """Whether a GPU computes layers together where it can; what lies between them is then not
        to be looked at.
        """
        return self._fuse

    @fuse.setter
    def fuse(self, fuse: bool) -> None:
        if fuse != self._fuse:
            self._fuse = fuse
            self._step.fuse(fuse)
            self.__dict__.pop("_trials", None)

    @cached_property
    def _test_passes(self) -> list[TestPass]:
        with_loss = self.param.test_compute_loss
        return [
            TestPass(net, f"Test net #{k} runs", self._fuse, with_loss)
            for k, net in enumerate(self.test_nets)
        ]

    def save_memory(self) -> None:
        """Let the blobs of all nets share memory on a GPU, for good: after a pass most of them hold
        nothing of use.
        """
        if self.device.is_cuda:
            tests = (
                memory.Usage(test_pass.net, test_pass.run.steps, False)
                for test_pass in self._test_passes
            )
            memory.save_memory(
                [memory.Usage(self.net, self._step.run.steps, True), *tests], memory.WORTH
            )
            self.saves_memory = True

    def add_callback(self, callback: Callback) -> None:
        """Call its `on_start` before, and its `on_gradients_ready` after, the gradients of each
        iteration.
        """
        self.callbacks.append(callback)

    def synchronize(self, synchronizer: Synchronizer | None, pulls: bool = False) -> None:
        """Keep in step with other solvers by this from now on; None: be alone again.

        `pulls`: parameters come from another solver before each iteration, which the time of one
        has a part for.
        """
        before, self._step.synchronizer = self._step.synchronizer, synchronizer
        self._step.pulls, self.phase_timer.running = pulls, synchronizer is not None
        if before:
            self.callbacks[:] = [callback for callback in self.callbacks if callback is not before]
            self._step.fuse(self._fuse)  # recordings of its calls go
        passed_on = self.net.after_backward
        passed_on[:] = [callback for callback in passed_on if not isinstance(callback, _Passing)]
        if synchronizer:
            self.add_callback(synchronizer)
            if self.param.iter_size == 1:
                passed_on.append(_Passing(synchronizer))

    def join(self, workers: WorkerGroup, reporter: Reporter) -> None:
        """Train with these workers from now on, and report to `reporter`."""
        self._own_reporter = self.reporter
        self.workers, self.reporter = workers, reporter

    def leave(self, failed: bool = False) -> None:
        """Train alone again, with the reporter from before `join`.

        After an error (`failed`) the last iteration may have ended on some ranks only: a snapshot
        can still be written, everything else raises SyncError.
        """
        self.workers = EndedGroup() if failed else WorkerGroup()
        self.reporter, self._own_reporter = self._own_reporter or self.reporter, None

    def run_eagerly(self, reason: str) -> None:
        """Run each layer by itself from now on; the log says why."""
        log.info("Layer by layer: %s", reason)
        self.capture = self.fuse = False

    def close(self) -> None:
        """Stop the threads of data layers and release files."""
        for net in self._nets:
            net.close()
        if self.device.lost:
            abandon(self)
        else:
            with self.device.scope():
                self.device.synchronize()

    # the loop

    def step(self, n: int) -> None:
        """Do n iterations, or fewer if `action` asks to stop."""
        if not self._window_restored:
            self._window = LossWindow(self.param.average_loss, self.iter)
        self._window_restored = False
        self.stopped = False
        self._shown = self._shown or (self.iter, time.monotonic())
        end = self.iter + n
        with self.workers.during("step"), self.device.scope(), self.ops.blas_scope():
            self._recover()
            try:
                while self.iter < end and not self.stopped:
                    self._iterate()
                self._collect_results(wait=True)
            except BaseException as error:
                self._interrupted = True
                if not self.device.lost and (isinstance(error, CaffeError) or self.workers.failed):
                    self._collect_results(wait=True)  # what went wrong before comes first
                first = self.workers.root_cause(error) if isinstance(error, Exception) else error
                self.workers.stop(first)
                if self._step.begun:
                    with suppress(Exception):  # of a device that failed, say
                        self._step.restore_stats()
                if first is not error:
                    raise first from error
                raise

    def _recover(self) -> None:
        """Find out where the device stands after a step that was interrupted."""
        if self._interrupted:
            self.update_state.resync()
            self._given.clear()
            self.device.step_count = (
                self.device.step_count
            )  # the host's count is the one that holds: upload it
            self._interrupted = False

    def _iterate(self) -> None:
        param, iteration, window = self.param, self.iter, self._window
        self.device.flush()
        tests = self._test_is_due() and (iteration > 0 or param.test_initialization)
        if tests:
            self._collect_results(wait=True)
            self.update_state.begin([self.params.diff])
            self.test_all()
            if self.stopped:
                return
        display = self._displays
        self.net.debug_info = display and param.debug_info
        self.workers.iterate()
        learning_rate = self._advance(tests or display)
        images = self.batch * param.iter_size * self.workers.size
        self.reporter.iterated(
            iteration, window.smoothed if window.losses else None, learning_rate, images
        )
        action = self.action()
        if Action.SNAPSHOT in action or (param.snapshot > 0 and self.iter % param.snapshot == 0):
            self._collect_results(wait=True)
            self._try_snapshot()
        self.stopped = Action.STOP in action

    @property
    def batch(self) -> int:
        """How many images a pass takes, 0 if that is unknown."""
        return self._batch.shape[0] if self._batch and self._batch.shape else 0

    @property
    def gradients_untouched(self) -> bool:
        """Whether nobody is called within iterations who may add to gradients."""
        return self._step.gradients_untouched

    @property
    def phase_timer(self) -> Any:
        """Where the time of iterations goes while there is a synchronizer: `PhaseTimer` of the back
        end.
        """
        return self._step.phase_timer

    def _advance(self, show: bool) -> float:
        """Do an iteration, or give it to the device; returns the rate."""
        self.phase_timer.start()
        if self.capture and self._step.run.can_capture():
            return self._enqueue(show)
        self._collect_results(wait=True)
        return self._run_eager()

    @property
    def _displays(self) -> bool:
        return self.param.display > 0 and self.iter % self.param.display == 0

    def _test_is_due(self) -> bool:
        return self.param.test_interval > 0 and self.iter % self.param.test_interval == 0

    # an iteration layer by layer

    def _run_eager(self) -> float:
        """Do an iteration and wait for its loss; returns the rate."""
        self.phase_timer.begin()
        self._positions_before = take_positions(self._nets, self.device)
        with self._step.overwriting():
            self._step.begin()
            for _ in range(self.param.iter_size):
                self._forward()
                self.phase_timer.mark("forward")
                self.net.backward(steps=self._step.run.eager_steps)
                self.phase_timer.mark("backward")
            self._step.gradients_ready()
        loss = self.update_state.mean()
        self.workers.check()  # else it may be the loss of some, or of none
        self._window.add(self.iter, loss)
        if self._displays:
            self._display(self._window.smoothed)
        return self.apply_update()

    def _forward(self) -> float:
        """The loss of one batch; DivergenceError before one that is not finite can do harm."""
        self.net.forward(steps=self._step.run.eager_steps)
        self._step.accumulate_loss()
        loss: float = self.update_state.loss()
        if not isfinite(loss):
            raise (diverged_before if self.saves_memory else diverged)(self.net, self.iter, loss)
        return loss

    def rate(self) -> float:
        """The learning rate of this iteration; moves the step counter of policies that have one."""
        self.current_step = advance(self.param, self.iter, self.current_step)
        return rate(self.param, self.iter, self.current_step)

    def apply_update(self) -> float:
        """Clip, normalise, regularise and update with the gradients at hand, count the iteration;
        returns the rate.
        """
        learning_rate = self.rate()
        if self._displays:
            self.reporter.lr(self.iter, learning_rate)
        with self.device.scope():
            self._recover()
            self.device.flush()
            self._step.set_hyperparams(learning_rate, self.iter)
            self._step.update()
            self.update_state.mark_enqueued()
            (step_result,) = self.update_state.step_results(wait=True)
        if step_result.status is StepStatus.STOPPED:
            self._fail(step_result)
        self._verdict = step_result
        self._log_clipping()
        self._log_overflow(self.iter, step_result)
        self.iter += 1
        self._positions_before = None
        return learning_rate

    # an iteration that a GPU replays

    def _enqueue(self, show: bool) -> float:
        """Give an iteration to the device, without waiting for it unless it is to be shown; returns
        the rate.
        """
        self._collect_results(wait=False)
        before = Given(self.iter, self.current_step, take_data_positions(self._feeds, self.device))
        self._positions_before = before.positions
        moved = next_step(self.param, self.iter, self.current_step)
        learning_rate = rate(self.param, self.iter, moved)
        self._step.set_hyperparams(learning_rate, self.iter)
        self._step.perform()
        self.update_state.mark_enqueued()
        self._given.append(before)
        self._positions_before = None
        if show:
            self._collect_results(wait=True)
        if self._displays:
            self._display(self._window.smoothed)
        self.current_step = advance(self.param, self.iter, self.current_step)
        if self._displays:
            self.reporter.lr(self.iter, learning_rate)
            self._log_clipping()
        self.iter += 1
        return learning_rate

    def _collect_results(self, wait: bool) -> None:
        """Take in what became of iterations that were given: of all, or of those known by now.

        Of one that went wrong comes its error, and the solver stands where it stood before it.
        """
        if not self._given:
            return
        for step_result in self.update_state.step_results(wait):
            given = self._given.popleft()
            if step_result.status is StepStatus.STOPPED:
                self._given.clear()
                self.iter, self.current_step, self._positions_before = given
                self._fail(step_result)
            self._window.add(given.iteration, step_result.loss)
            self._verdict = step_result
            self._log_overflow(given.iteration, step_result)

    def _fail(self, step_result: StepResult) -> None:
        self._step.restore_stats()
        self.update_state.resume()
        self.workers.check()
        self.device.check_errors()
        self.workers.raise_worker_error()
        raise diverged_before(self.net, self.iter, step_result.loss)

    # what is told

    def _log_clipping(self) -> None:
        _, norm, factor, *_ = self._verdict
        if factor != 1.0:
            log.info(
                "Gradient clipping: scaling down gradients (L2 norm %.6g > %.6g) by scale factor %.6g",
                norm,
                self.param.clip_gradients,
                factor,
            )

    @staticmethod
    def _log_overflow(iteration: int, step_result: StepResult) -> None:
        if step_result.status is StepStatus.SKIPPED:
            log.info(
                "Iteration %d: gradients overflow, no update; loss scale = %g",
                iteration,
                step_result.loss_scale,
            )

    def _display(self, loss: float) -> None:
        assert self._shown
        last, since = self._shown
        now = time.monotonic()
        self._shown = self.iter, now
        outputs = [
            (name, self.net.blobs[name].host_data.copy(), self._loss_weights[name])
            for name in self.net.outputs
        ]
        speed = (self.iter - last) / max(now - since, 1e-9)
        self.reporter.displayed(self.iter, loss, outputs, speed, now - since, self.param.display)
        if isclose(loss, SATURATED, abs_tol=1e-3) and not self._saturation_explained:
            self._saturation_explained = True
            log.warning(
                "A loss of 87.3365 means probability 0 for every label: the scores overflowed; %s",
                HINT,
            )

    def solve(self, state_file: str | None = None) -> None:
        """Train up to max_iter, from a snapshot if one is given, with all tests and snapshots that
        are asked for.
        """
        param = self.param
        if param.snapshot > 0 or param.snapshot_after_train:
            model = self.params.data.nbytes * (2 if param.snapshot_diff else 1)
            check_snapshots(
                param, self.path, self.net, model, sum(flat.nbytes for flat in self.history)
            )
        self.reporter.solving(self.net.name, param.lr_policy)
        if state_file is not None:
            log.info("Restoring previous solver status from %s", state_file)
            self.restore(state_file)
        try:
            self.step(param.max_iter - self.iter)
        except Exception as error:
            if not self.device.lost:
                together = self.workers.failed and not isinstance(error, DivergenceError)
                if together or isinstance(error, DataError):
                    self._save_before_failing(error)
            if self.device.lost:
                raise self._loss_of_devices() from error
            raise
        unsaved = param.snapshot_after_train and not (
            param.snapshot > 0 and self.iter % param.snapshot == 0
        )
        if not self.saved_now and (unsaved or self._failed_at == self.iter):
            self.snapshot()
        if not self.stopped:
            self._finish()
        self.reporter.done(self.stopped)

    def _loss_of_devices(self) -> LostDeviceError:
        """The error for a device whose memory cannot be read: what is left of the run."""
        devices = [device for device in (self.device, *self.workers.devices) if device.lost]
        names = " and ".join(f"GPU {device.index}" for device in devices)
        left = "is lost; set snapshot in the solver to lose less the next time"
        if last := self._saved[1] if self._saved else self._restored_from:
            left = f"after the last snapshot is lost; go on from that with --snapshot {last}"
        return LostDeviceError(
            f"{names} failed ({self.device.lost}), and the memory cannot be read any more: what was learned {left}"
        )

    def rescue(self, error: BaseException) -> None:
        """The snapshot that the run owes, from another thread than the one that hangs, if the state
        is whole.
        """
        with suppress(Exception), self.device.scope():
            self._collect_results(wait=True)
        self._save_before_failing(error)

    def _save_before_failing(self, error: BaseException) -> None:
        """The snapshot that the run owes, of its last whole iteration."""
        wanted = self.param.snapshot > 0 or self.param.snapshot_after_train
        if not wanted or self.saved_now or self.iter == self._started_at or not self._step.whole:
            return
        if self._step.begun:
            self._step.restore_stats()
        what = "The data" if isinstance(error, DataError) else "A solver"
        log.warning(
            "%s failed; what was learned up to iteration %d is saved before the run ends",
            what,
            self.iter,
        )
        try:
            self.snapshot()
        except CaffeError as error:
            log.error("No snapshot of iteration %d: %s", self.iter, error)

    def _finish(self) -> None:
        self.phase_timer.stop()
        loss = None
        if self._displays:
            with self.workers.during("step"), self.device.scope(), self.ops.blas_scope():
                self.workers.forward()
                losses = [self._forward(), *self.workers.losses()]
            self.device.step_count += 1
            self.device.check_errors()
            self._window.add(self.iter, sum(losses) / len(losses))
            loss = self._window.smoothed
        self.reporter.finished(self.iter, loss)
        if self._test_is_due():
            self.test_all()

    # tests

    def test_all(self) -> None:
        """Test all test nets, unless `action` asks to stop; until they are done, a snapshot begins
        before them.
        """
        self.workers.average_bn_stats()
        self._positions_before = take_positions(self._nets, self.device)
        for k in range(len(self.test_nets)):
            if not self.stopped:
                self.test(k)
        if not self.stopped:
            self._positions_before = None

    def test(self, k: int) -> None:
        """Run test net k on its test_iter batches with the train net's weights and report the mean
        outputs.
        """
        self.phase_timer.stop()
        test_pass, workers = self._test_passes[k], self.workers
        self.reporter.test_started(self.iter, k)
        with workers.during("test"), self.device.scope(), self.ops.blas_scope():
            workers.begin_test(k)
            test_pass.begin(self.net)
            for done in range(0, self.param.test_iter[k], workers.size):
                self._poll_in_test()
                if self.stopped:
                    log.info("Test interrupted.")
                    return
                if workers.test(k, min(workers.size, self.param.test_iter[k] - done)):
                    test_pass.batch(self.capture)
            self.last_outputs[k], loss = test_pass.means([test_pass.totals(), *workers.totals(k)])
        self.reporter.test_done(self.iter, k, self.last_outputs[k], loss)

    def _poll_in_test(self) -> None:
        action = self.action()
        if Action.SNAPSHOT in action:
            self._try_snapshot()
        self.stopped = Action.STOP in action

    # snapshots

    def snapshot(self) -> None:
        """Write model, sidecar and state; ConfigError if that fails, DivergenceError if a parameter
        is not finite.
        """
        self.phase_timer.stop()
        with self.workers.during("snapshot"):
            self._snapshot()

    def _snapshot(self) -> None:
        with self.device.scope():
            self._recover()
            self._collect_results(wait=True)
        self.workers.average_bn_stats()
        check_params(self.net, self.iter)
        param = self.param
        files = Files(
            param.snapshot_prefix, self.iter, param.snapshot_format == SolverParameter.HDF5
        )
        history = [
            part for flat in self.history for part in self.params.split(self.device.on_host(flat))
        ]
        state = State(self.iter, files.model, history, self.current_step)
        self._failed_at = self.iter
        write(
            files, self.net, state, self._progress(), param.snapshot_diff, self.reporter.snapshotted
        )
        self._failed_at, self._saved = -1, (self.iter, files.state)

    @property
    def saved_now(self) -> str | None:
        """The state file that this solver wrote at this iteration, if it did."""
        return self._saved[1] if self._saved and self._saved[0] == self.iter else None

    def _try_snapshot(self) -> None:
        """A snapshot that may fail: training goes on."""
        try:
            self.snapshot()
        except DivergenceError:
            raise
        except CaffeError as error:
            log.error("No snapshot of iteration %d: %s; training goes on", self.iter, error)

    @property
    def _nets(self) -> list[Net]:
        return [self.net, *self.test_nets]

    def _positions(self) -> dict[str, Any]:
        """Where the data and the random numbers stand, or stood before the test or iteration that
        is being done.
        """
        before = self._positions_before
        return completed(before, self._nets) if before else take_positions(self._nets, self.device)

    def _progress(self) -> dict[str, Any]:
        """What goes into the sidecar."""
        last, since = self._shown or (self.iter, time.monotonic())
        return {
            "type": self.param.type,
            "iteration": self.iter,
            "settings": format_text(self.param),
            "positions": {**self._positions(), "workers": self.workers.positions()},
            "control": self.update_state.state(),
            "window": self._window.state(),
            "displayed": [last, time.monotonic() - since],
        }

    def restore(self, path: str) -> None:
        """Go on from a snapshot: weights, history, iteration; exactly, where its sidecar lies
        beside it.
        """
        with self.workers.restoring():
            self._restore(path)

    def _restore(self, path: str) -> None:
        state = read_state(path)
        content = read_sidecar(path)
        if content:
            self._check_type(content, path)
        own = [part for flat in self.history for part in self.params.split(flat)]
        self._recover()
        check_histories(state, own, self.param.type, path)
        model = find_model(state.learned_net, path)
        if content:
            verify(content, path, model)
            self._take_up(content, sidecar_of(path))
        self.update_state.set_state((content or {}).get("control", {}))
        filled = load_weights(self.net, model)
        log.info("SGDSolver: restoring history")
        with self.device.scope():
            for mine, read in zip(own, state.history, strict=True):
                self.device.upload(np.asarray(read, mine.dtype).reshape(mine.shape), mine)
        self.iter = self._started_at = state.iteration
        self.current_step = state.current_step
        self._saved = self._positions_before = None
        self._restored_from = path
        missing = dict.fromkeys(self.net.nodes[param.layer].name for param in self.net.learnable)
        warn_of_layers(f"{model} has no weights for", missing.keys() - filled, "they start anew")
        if not content:
            self._window_restored, self._shown, self.workers_positions = False, None, []
            log.info(
                "No sidecar lies beside %s: data and random numbers start anew, as in Caffe", path
            )

    def _check_type(self, content: dict[str, Any], path: str) -> None:
        with taken_up(sidecar_of(path)):
            kind = str(content["type"])
        if kind != self.param.type:
            raise ConfigError(
                f"this state was written by a solver of type {kind}, but this one is {self.param.type}; set "
                f'type: "{kind}", or give the model as weights to start anew from it',
                path,
            )

    def _take_up(self, content: dict[str, Any], path: str) -> None:
        """Go on with the data and the random numbers where a sidecar says; one that is damaged
        changes nothing.
        """
        before = take_positions(self._nets, self.device)
        try:
            with taken_up(path):
                compare_layers(content["positions"], self._nets, path)
                set_positions(content["positions"], self._nets, self.device)
                window = LossWindow.of(self.param.average_loss, content["window"])
                self.workers_positions = content["positions"].get("workers", [])
                last, seconds = content["displayed"]
                self._shown = int(last), time.monotonic() - float(seconds)
        except CaffeError:
            set_positions(before, self._nets, self.device)
            raise
        self._window, self._window_restored = window, True
