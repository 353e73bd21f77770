"""Solver: the training loop, in the order of Caffe's Solver::Step, Solve, Test and ApplyUpdate."""

import logging
import time
from collections.abc import Callable
from math import isclose, isfinite, sqrt
from typing import Any, Protocol

import numpy as np

from caffepy import ops
from caffepy.blob import Array, shape_string
from caffepy.device import Device
from caffepy.errors import CaffeError, ConfigError, DataError, DivergenceError
from caffepy.files import remove_stale
from caffepy.net import Net
from caffepy.net.weights import MAX_BINARY, check_names, load_weights
from caffepy.ops.segments import Segments
from caffepy.paths import locate
from caffepy.proto.caffe_pb2 import SolverParameter
from caffepy.proto.text import format as format_text
from caffepy.reporter import Output, Reporter
from caffepy.solver.check import at_field, check_param
from caffepy.solver.divergence import HINT, check_params, diverged
from caffepy.solver.nets import Source, net_sources
from caffepy.solver.params import Params
from caffepy.solver.policy import advance, rate
from caffepy.solver.positions import compare_layers, set_positions, take_positions, warn_of_layers
from caffepy.solver.sidecar import taken_up
from caffepy.solver.signals import Action
from caffepy.solver.snapshot import (
    Files,
    State,
    check_folder,
    check_histories,
    find_model,
    read_sidecar,
    read_state,
    sidecar_of,
    verify,
    write,
)
from caffepy.solver.update import Update, rules
from caffepy.solver.window import LossWindow

log = logging.getLogger(__name__)

SATURATED = 87.3365  # -log of the smallest float32, the most that SoftmaxWithLoss gives
SNAPSHOT_SLACK = 4 << 20  # bytes of a snapshot that are neither weights nor history


class Callback(Protocol):
    """What a synchronizer does around the gradients of an iteration."""

    def on_start(self) -> object:
        """Before the forward pass: parameters are in step."""

    def on_gradients_ready(self) -> object:
        """After the backward pass, before the update."""


class Solver:
    """Trains the net of a SolverParameter, with any of the update rules that `type` names.

    `path` is the solver file: messages name places in it, and nets and weights may lie beside it. `action` is polled
    once an iteration and once a test batch. `rank` is added to random_seed. ConfigError and DataError say what does not
    fit.
    """

    def __init__(
        self,
        param: SolverParameter,
        *,
        device: Device | None = None,
        path: str | None = None,
        reporter: Reporter | None = None,
        rank: int = 0,
    ) -> None:
        self.param = param
        self.path = path
        self.device = device or Device()
        self.ops = ops.backend(self.device)
        self.reporter = reporter or Reporter()
        self.action: Callable[[], Action] = lambda: Action.NONE
        self.callbacks: list[Callback] = []
        if log.isEnabledFor(logging.INFO):
            log.info("Initializing solver from parameters: \n%s", format_text(param).rstrip("\n"))
        check_param(param, path)
        if param.snapshot > 0:
            self._check_prefix()
        if param.random_seed >= 0:
            self.device.seed(param.random_seed + rank)
        self.rule = rules[param.type]
        source, test_sources = net_sources(param, path)
        self.net = self._build_train_net(source)
        self.test_nets = [self._build_test_net(i, test_source) for i, test_source in enumerate(test_sources)]
        self.iter = 0
        self.current_step = 0
        self._started_at = 0  # the iteration of the state that was restored
        self.stopped = False  # the last step or solve ended early because `action` asked for it
        self.last_outputs: list[list[Output]] = [[] for _ in self.test_nets]  # what each test net gave last

        with self.device.scope():
            self.params = Params(self.net.learnable_params)
            self.history: list[Array] = [np.zeros_like(self.params.data) for _ in range(self.rule.histories)]
        self._ends = self.params.ends
        self._lr_mult = np.array(self.net.params_lr, np.float32)
        self._decay_mult = np.array(self.net.params_weight_decay, np.float32)
        self._loss_weights = self.net.blob_loss_weights
        fed = [tops[0] for tops, bottoms in zip(self.net.tops, self.net.bottoms, strict=True) if tops and not bottoms]
        self._batch = fed[0] if fed else None
        self._window = LossWindow(param.average_loss, 0)
        self._window_restored = False  # the next step goes on with it
        self._shown: tuple[int, float] | None = None  # iteration and time of the last display
        self._saved: tuple[int, str] | None = None  # iteration and state file of the last snapshot
        self._failed_at = -1
        self._saturation_explained = False
        self._positions_before: dict[str, Any] | None = None  # before the test or iteration that is being done
        if param.snapshot > 0:
            self._check_names()
        log.info("Solver scaffolding done.")

    # construction

    def _build_train_net(self, source: Source) -> Net:
        by_file = source.origin.partition(": ")
        log.info("Creating training net %s %s", "from" if by_file[1] else "specified in", source.origin)
        net = Net(source.param, device=self.device, path=source.path)
        self._load_weights(net)
        return net

    def _build_test_net(self, k: int, source: Source) -> Net:
        log.info("Creating test net (#%d) specified by %s", k, source.origin)
        net = Net(source.param, device=self.device, path=source.path)
        self._load_weights(net)
        net.debug_info = self.param.debug_info
        return net

    def _load_weights(self, net: Net) -> None:
        for entry in self.param.weights:
            for name in entry.split(","):
                file = locate(name.strip(), self.path)
                log.info("Finetuning from %s", file)
                load_weights(net, file)

    def add_callback(self, callback: Callback) -> None:
        """Call its `on_start` before, and its `on_gradients_ready` after, the gradients of each iteration."""
        self.callbacks.append(callback)

    def close(self) -> None:
        """Stop the threads of data layers and release files."""
        for net in self._nets:
            net.close()

    # the loop

    def step(self, n: int) -> None:
        """Do n iterations, or fewer if `action` asks to stop."""
        if not self._window_restored:
            self._window = LossWindow(self.param.average_loss, self.iter)
        self._window_restored = False
        self.stopped = False
        self._shown = self._shown or (self.iter, time.monotonic())
        end = self.iter + n
        with self.device.scope(), self.ops.blas_scope():
            while self.iter < end and not self.stopped:
                self._iterate()

    def _iterate(self) -> None:
        param, iteration, window = self.param, self.iter, self._window
        self.params.diff.fill(0)
        if self._test_is_due() and (iteration > 0 or param.test_initialization):
            self.test_all()
            if self.stopped:
                return
        self._positions_before = self._positions()
        for callback in self.callbacks:
            callback.on_start()
        display = param.display > 0 and iteration % param.display == 0
        self.net.debug_info = display and param.debug_info
        window.add(iteration, self._forward_backward())
        if display:
            self._display(window.smoothed)
        for callback in self.callbacks:
            callback.on_gradients_ready()
        learning_rate = self.apply_update()
        self._positions_before = None
        images = self._batch.shape[0] * param.iter_size if self._batch and self._batch.shape else 0
        self.reporter.iterated(iteration, window.smoothed, learning_rate, images)
        action = self.action()
        if Action.SNAPSHOT in action or (param.snapshot > 0 and self.iter % param.snapshot == 0):
            self._try_snapshot()
        self.stopped = Action.STOP in action

    def _test_is_due(self) -> bool:
        return self.param.test_interval > 0 and self.iter % self.param.test_interval == 0

    def _forward_backward(self) -> float:
        """The mean loss of iter_size passes."""
        total = 0.0
        for _ in range(self.param.iter_size):
            total += self._forward()
            self.net.backward()
        return total / self.param.iter_size

    def _forward(self) -> float:
        """The loss of one batch; DivergenceError before one that is not finite can do harm."""
        self.net.forward()
        loss = self.net.loss()
        if not isfinite(loss):
            raise diverged(self.net, self.iter, loss)
        return loss

    def _display(self, loss: float) -> None:
        assert self._shown
        last, since = self._shown
        now = time.monotonic()
        self._shown = self.iter, now
        outputs = [(name, self.net.blobs[name].host_data.copy(), self._loss_weights[name]) for name in self.net.outputs]
        speed = (self.iter - last) / max(now - since, 1e-9)
        self.reporter.displayed(self.iter, loss, outputs, speed, now - since, self.param.display)
        if isclose(loss, SATURATED, abs_tol=1e-3) and not self._saturation_explained:
            self._saturation_explained = True
            log.warning("A loss of 87.3365 means probability 0 for every label: the scores overflowed; %s", HINT)

    def rate(self) -> float:
        """The learning rate of this iteration; moves the step counter of policies that have one."""
        self.current_step = advance(self.param, self.iter, self.current_step)
        return rate(self.param, self.iter, self.current_step)

    def apply_update(self) -> float:
        """Clip, normalise, regularise and update with the gradients at hand, count the iteration; returns the rate."""
        param = self.param
        learning_rate = self.rate()
        if param.display > 0 and self.iter % param.display == 0:
            self.reporter.lr(self.iter, learning_rate)
        segments = Segments(
            self._ends,
            np.float32(learning_rate) * self._lr_mult,
            np.float32(param.weight_decay) * self._decay_mult,
            self._clip_factor() / param.iter_size,
            param.regularization_type == "L1",
        )
        with self.device.scope():
            update = Update(param, self.iter, self.params.data, self.params.diff, self.history, segments)
            self.rule.apply(self.ops, update)
        self.iter += 1
        return learning_rate

    def _clip_factor(self) -> float:
        limit = self.param.clip_gradients
        if limit < 0:
            return 1.0
        with self.device.scope():
            norm = sqrt(self.ops.dot(self.params.diff, self.params.diff))
        if norm <= limit:
            return 1.0
        factor = limit / norm
        log.info(
            "Gradient clipping: scaling down gradients (L2 norm %.6g > %.6g) by scale factor %.6g", norm, limit, factor
        )
        return factor

    def solve(self, state_file: str | None = None) -> None:
        """Train up to max_iter, from a snapshot if one is given, with all tests and snapshots that are asked for."""
        param = self.param
        if param.snapshot > 0 or param.snapshot_after_train:
            self._check_snapshots()
        self.reporter.solving(self.net.name, param.lr_policy)
        if state_file is not None:
            log.info("Restoring previous solver status from %s", state_file)
            self.restore(state_file)
        try:
            self.step(param.max_iter - self.iter)
        except DataError:
            self._save_before_failing()
            raise
        unsaved = param.snapshot_after_train and not (param.snapshot > 0 and self.iter % param.snapshot == 0)
        if not self.saved_now and (unsaved or self._failed_at == self.iter):
            self.snapshot()
        if not self.stopped:
            self._finish()
        self.reporter.done(self.stopped)

    def _save_before_failing(self) -> None:
        """The snapshot that the run owes, of its last whole iteration."""
        wanted = self.param.snapshot > 0 or self.param.snapshot_after_train
        if not wanted or self.saved_now or self.iter == self._started_at:
            return
        log.warning("The data failed; what was learned up to iteration %d is saved before the run ends", self.iter)
        try:
            self.snapshot()
        except CaffeError as error:
            log.error("No snapshot of iteration %d: %s", self.iter, error)

    def _finish(self) -> None:
        loss = None
        if self.param.display > 0 and self.iter % self.param.display == 0:
            self._window.add(self.iter, self._forward())
            loss = self._window.smoothed
        self.reporter.finished(self.iter, loss)
        if self._test_is_due():
            self.test_all()

    # tests

    def test_all(self) -> None:
        """Test all test nets, unless `action` asks to stop; a snapshot in between has the positions from before."""
        self._positions_before = self._positions()
        for k in range(len(self.test_nets)):
            if not self.stopped:
                self.test(k)
        self._positions_before = None

    def test(self, k: int) -> None:
        """Run test net k on its test_iter batches with the train net's weights and report the mean outputs."""
        net, batches = self.test_nets[k], self.param.test_iter[k]
        self.reporter.test_started(self.iter, k)
        net.share_trained_layers_with(self.net)
        sums: list[Array] = []
        loss = 0.0
        for _ in range(batches):
            self._poll_in_test()
            if self.stopped:
                log.info("Test interrupted.")
                return
            net.forward()
            loss += net.loss() if self.param.test_compute_loss else 0.0
            self._add_outputs(net, sums)
        weights = net.blob_loss_weights
        outputs = [
            (name, (total / batches).astype(np.float32), weights[name])
            for name, total in zip(net.outputs, sums, strict=True)
        ]
        self.last_outputs[k] = outputs
        self.reporter.test_done(self.iter, k, outputs, loss / batches if self.param.test_compute_loss else None)

    def _poll_in_test(self) -> None:
        action = self.action()
        if Action.SNAPSHOT in action:
            self._try_snapshot()
        self.stopped = Action.STOP in action

    @staticmethod
    def _add_outputs(net: Net, sums: list[Array]) -> None:
        if not sums:
            sums += [np.zeros(net.blobs[name].shape) for name in net.outputs]
        for name, total in zip(net.outputs, sums, strict=True):
            values = net.blobs[name].host_data
            if values.shape != total.shape:
                raise DataError(
                    f'output "{name}" of a test net changed its shape between batches, from '
                    f"{shape_string(total.shape)} to {shape_string(values.shape)}, so there is no mean"
                )
            total += values

    # snapshots

    def snapshot(self) -> None:
        """Write model, sidecar and state; ConfigError if that fails, DivergenceError if a parameter is not finite."""
        check_params(self.net, self.iter)
        param = self.param
        files = Files(param.snapshot_prefix, self.iter, param.snapshot_format == SolverParameter.HDF5)
        history = [part for flat in self.history for part in self.params.split(self.device.on_host(flat))]
        state = State(self.iter, files.model, history, self.current_step)
        self._failed_at = self.iter
        write(files, self.net, state, self._progress(), param.snapshot_diff, self.reporter.snapshotted)
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
        return take_positions(self._nets, self.device)

    def _progress(self) -> dict[str, Any]:
        """What goes into the sidecar."""
        last, since = self._shown or (self.iter, time.monotonic())
        return {
            "type": self.param.type,
            "iteration": self.iter,
            "settings": format_text(self.param),
            "positions": self._positions_before or self._positions(),
            "window": self._window.state(),
            "displayed": [last, time.monotonic() - since],
        }

    def restore(self, path: str) -> None:
        """Go on from a snapshot: weights, history, iteration; exactly, where its sidecar lies beside it."""
        state = read_state(path)
        content = read_sidecar(path)
        if content:
            self._check_type(content, path)
        own = [part for flat in self.history for part in self.params.split(flat)]
        check_histories(state, own, self.param.type, path)
        model = find_model(state.learned_net, path)
        if content:
            verify(content, path, model)
            self._take_up(content, sidecar_of(path))
        filled = load_weights(self.net, model)
        log.info("SGDSolver: restoring history")
        with self.device.scope():
            for mine, read in zip(own, state.history, strict=True):
                self.device.upload(np.asarray(read, mine.dtype).reshape(mine.shape), mine)
        self.iter = self._started_at = state.iteration
        self.current_step = state.current_step
        self._saved = self._positions_before = None
        missing = dict.fromkeys(self.net.layer_names[i] for i, _ in self.net.learnable_owner)
        warn_of_layers(f"{model} has no weights for", missing.keys() - filled, "they start anew")
        if not content:
            self._window_restored, self._shown = False, None
            log.info("No sidecar lies beside %s: data and random numbers start anew, as in Caffe", path)

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
        """Go on with the data and the random numbers where a sidecar says; one that is damaged changes nothing."""
        before = self._positions()
        try:
            with taken_up(path):
                compare_layers(content["positions"], self._nets, path)
                set_positions(content["positions"], self._nets, self.device)
                window = LossWindow.of(self.param.average_loss, content["window"])
                last, seconds = content["displayed"]
                self._shown = int(last), time.monotonic() - float(seconds)
        except CaffeError:
            set_positions(before, self._nets, self.device)
            raise
        self._window, self._window_restored = window, True

    def _check_snapshots(self) -> None:
        """ConfigError now rather than after training if the last snapshot could not be written; clean up its folder."""
        param = self.param
        hdf5 = param.snapshot_format == SolverParameter.HDF5
        model = self.params.data.nbytes * (2 if param.snapshot_diff else 1)
        state = sum(flat.nbytes for flat in self.history)
        if not hdf5 and max(model, state) >= MAX_BINARY:
            raise ConfigError(
                "a snapshot of this net has a file above 2 GiB, which the binary format cannot hold; set "
                "snapshot_format: HDF5",
                at_field(self.path, "snapshot_format"),
            )
        self._check_names()
        last = Files(param.snapshot_prefix, max(param.max_iter, 0), hdf5)
        self._check_prefix(max(model, state), model + state + SNAPSHOT_SLACK, last)
        for name in remove_stale(f"{param.snapshot_prefix}_"):
            log.info("Removed %s, which a killed run had left unfinished", name)

    def _check_names(self) -> None:
        try:
            check_names(self.net, self.param.snapshot_format == SolverParameter.HDF5)
        except ConfigError as error:
            raise (error.at(self.net.path) if self.net.path else error) from None

    def _check_prefix(self, largest: int = 0, total: int = 0, last: Files | None = None) -> None:
        try:
            check_folder(self.param.snapshot_prefix, largest, total, last)
        except ConfigError as error:
            raise error.at(at_field(self.path, "snapshot_prefix") or "snapshot_prefix") from None
