"""Solver: the training loop, in the order of Caffe's Solver::Step, Solve and Test.

Read `step` first; then `iteration` for one iteration, `runners` for how a device computes it.
`faults` is only about errors.
"""

import logging
from collections.abc import Callable
from functools import cached_property

from caffepy import ops
from caffepy.core.abandoned import abandon
from caffepy.core.errors import ConfigError
from caffepy.core.events import Output, Reporter
from caffepy.core.files import working_directory
from caffepy.device.blob import Array
from caffepy.device.device import Device
from caffepy.net import Net, memory
from caffepy.net.recompute import AUTO, Recompute, choose, overhead
from caffepy.ops.objects import PhaseTimer
from caffepy.proto.caffe_pb2 import SolverParameter
from caffepy.proto.nvcaffe import choose_precision
from caffepy.proto.text import format as format_text
from caffepy.solver.check import (
    check_layers,
    check_param,
    check_prefix,
    check_snapshots,
    check_specs,
    warn_without_loss,
)
from caffepy.solver.faults import saving_what_was_learned, stopping_workers
from caffepy.solver.identity import identity
from caffepy.solver.iteration import Iterations, due
from caffepy.solver.nets import (
    build_test_net,
    build_train_net,
    check_shared,
    finetune,
    net_sources,
    weight_files,
)
from caffepy.solver.resume_state import ResumeState
from caffepy.solver.signals import Action
from caffepy.solver.snapshot import warn_of_earlier
from caffepy.solver.step import Callback, SyncCallback, TrainingStep
from caffepy.solver.test_pass import TestPass
from caffepy.solver.worker_group import EndedGroup, WorkerGroup

log = logging.getLogger(__name__)


def _no_action() -> Action:
    return Action.NONE


_no_action.takes_several = True  # type: ignore[attr-defined]


class Solver:
    """Trains the net of a SolverParameter, with any of the update rules that `type` names.

    `path` is the solver file: messages name places in it, and nets and weights may lie beside it.
    `action` is polled once an iteration and once a test batch. If it and the reporter have
    `takes_several = True`, it is polled once every few milliseconds of short iterations on the CPU.
    `rank` is added to random_seed. `precision` overrides the number format that the train net asks
    for. With a `root`, layers that are shared in parallel are the root's; every rank but 0 needs
    one. The batch size of the train net is divided by `batch_parts`. ConfigError and DataError name
    what is wrong and where.

    On a GPU an iteration is captured as CUDA graphs and replayed, unless `capture` is set to False.
    Its loss or error is then known some iterations later: at the latest at a display, test or
    snapshot, and when `step` ends. No iteration updates anything after one that failed.
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
        folder = working_directory()
        self.param = param
        self.path = path
        self.precision = precision
        self.batch_parts = batch_parts
        self.device = device or Device()
        self.reporter = reporter or Reporter()
        self._own_reporter: Reporter | None = None  # from before `join`
        self.workers = WorkerGroup(not self.device.follows)
        self.action: Callable[[], Action] = _no_action
        self.saves_memory = False  # blobs share memory: a pass leaves no activations behind
        self.recompute: tuple[Recompute, int | None] = 1, None  # what `save_memory` was given
        self.stopped = False  # the last step or solve ended early because `action` asked for it
        if log.isEnabledFor(logging.INFO):
            log.info("Initializing solver from parameters: \n%s", format_text(param).rstrip("\n"))
        check_param(param, path)
        if param.snapshot > 0 and not self.device.follows:
            check_prefix(param, path)
        files = weight_files(param.weights, path)
        if param.random_seed >= 0:
            self.device.seed(param.random_seed + rank)
        source, test_sources = net_sources(param, path)
        ops.set_precision(self.device, choose_precision(source.param, precision))
        net = build_train_net(source, self.device, root.net if root else None, batch_parts)
        self.net: Net = finetune(net, files)
        check_specs(param, net)
        warn_without_loss(net)
        if rank > 0 and not self.device.follows:
            check_shared(net, root is not None)
        self.test_nets: list[Net] = []
        for k, test_source in enumerate(test_sources):
            root_net = root.test_nets[k] if root else None
            test_net = build_test_net(k, test_source, self.device, root_net, param.debug_info)
            self.test_nets.append(finetune(test_net, files))
        layers = (layer for test_net in self.test_nets for layer in test_net.layers)
        if root is None and any(layer.type == "DetectionEvaluate" for layer in layers):
            log.info("Average precision: %s (ap_version)", param.ap_version)
        self._step = TrainingStep(param, self.net, self.device)
        self.params = self._step.params
        self.update_state = self._step.update_state
        self.phase_timer: PhaseTimer = self._step.phase_timer  # while there is a synchronizer
        nets = [self.net, *self.test_nets]
        self.iterations = Iterations(self._step, nets, self, is_worker=root is not None)
        self.resume_state = ResumeState(self.iterations, identity(param, source.param), folder)
        if param.snapshot > 0:
            check_layers(param, self.net)
        log.info("Solver scaffolding done.")

    # settings

    @property
    def iter(self) -> int:
        """Number of iterations done or enqueued."""
        return self.iterations.iter

    @property
    def history(self) -> list[Array]:
        """Arrays that the update rule keeps, each as long as those of `params`."""
        return self._step.optimizer.history

    @property
    def batch(self) -> int:
        """Images in a pass, 0 if unknown."""
        for node in self.net.nodes:
            if node.tops and not node.bottoms:
                return node.tops[0].shape[0] if node.tops[0].shape else 0
        return 0

    @property
    def images(self) -> int:
        """Images in an iteration of all solvers that train as one, 0 if unknown."""
        return self.batch * self.param.iter_size * self.workers.size

    @property
    def capture(self) -> bool:
        """True, as by default, if a GPU captures iterations and replays them, and the CPU replays
        short ones.
        """
        return self._step.capture

    @capture.setter
    def capture(self, capture: bool) -> None:
        self._step.capture = capture

    @property
    def fuse(self) -> bool:
        """True if groups of layers are computed together: blobs between them are not stored.

        By default on a GPU only.
        """
        return self._step.fused

    @fuse.setter
    def fuse(self, fuse: bool) -> None:
        if fuse != self.fuse:
            self._step.fuse(fuse)
            self.__dict__.pop("_test_passes", None)

    @cached_property
    def _test_passes(self) -> list[TestPass]:
        with_loss, version = self.param.test_compute_loss, self.param.ap_version
        show = self.param.show_per_class_result
        return [
            TestPass(net, f"Test net #{k} runs", self.fuse, with_loss, version, show)
            for k, net in enumerate(self.test_nets)
        ]

    @property
    def last_outputs(self) -> list[list[Output]]:
        """Mean outputs of each test net in its last test."""
        return [test_pass.last_outputs for test_pass in self._test_passes]

    def save_memory(
        self, recompute: Recompute = 1, room: int | None = None, solvers: int = 1
    ) -> None:
        """Make the blobs of all nets share memory, if that saves enough or `recompute` is given.

        The train net is cut into `recompute` segments; all but the last compute their data again
        before backward (`caffepy.net.recompute`). "auto" recomputes as few layers as possible, none
        if it can, for the net to fit into `room` bytes: by default this solver's part of the
        device's free memory, which `solvers` solvers share, minus what is needed beside blobs.

        For commands only: blobs and gradients must not be read afterwards, even if none are shared.
        """
        train = memory.Usage(self.net, self._step.graphs.steps, True)
        tests = [memory.Usage(p.net, p.graphs.steps, False) for p in self._test_passes]
        if recompute == AUTO and room is None:
            # On the host, pages of gradients and history are taken when they are first written.
            arrays = 0 if self.device.is_cuda else 1 + len(self.history) + (solvers > 1)
            later = overhead(self.net) + arrays * self.params.diff.nbytes
            room = max(0, self.device.free_memory // solvers - later)
        self.recompute = recompute, room
        least = memory.WORTH if recompute == 1 else 0
        usages = [choose(train, tests, recompute, room or 0), *tests]
        self.saves_memory = memory.save_memory(usages, least) > 0
        self._step.scripts_look = False

    def run_eagerly(self, reason: str) -> None:
        """Run layer by layer from now on, neither captured nor fused; the log says why."""
        log.info("Layer by layer: %s", reason)
        self.capture = self.fuse = False

    def add_callback(self, callback: Callback) -> None:
        """Call its `on_start` and `on_gradients_ready` around the passes of each iteration."""
        self._step.callbacks.append(callback)

    # other solvers

    @property
    def arrays(self) -> list[Array]:
        """Flat arrays that another solver of these nets needs to continue from here: parameters,
        history, and the parameters of layers that only test nets have.
        """
        tests = (blob for net in self.test_nets for blob in net.params_beyond(self.net))
        return [self.params.data, *self.history, *(blob.data_memory.array for blob in tests)]

    def synchronize(self, synchronizer: SyncCallback | None) -> None:
        """Average gradients with other solvers by this callback from now on; None: no more."""
        self._step.synchronize(synchronizer)

    def join(self, workers: WorkerGroup, reporter: Reporter) -> None:
        """Train with these workers from now on, and report to `reporter`."""
        self._own_reporter = self._own_reporter or self.reporter
        self.workers, self.reporter = workers, reporter

    def leave(self, failed: bool = False) -> None:
        """Train alone again, with the reporter from before `join`.

        After an error (`failed`) the last iteration may have ended on some ranks only: a snapshot
        can still be written; everything else raises SyncError.
        """
        group = EndedGroup if failed else WorkerGroup
        self.workers = group(self.workers.writes_files)
        self.reporter, self._own_reporter = self._own_reporter or self.reporter, None

    def close(self) -> None:
        """Stop the threads of data layers and release files."""
        for net in self.iterations.nets:
            net.close()
        if self.device.lost:
            abandon(self)
        else:
            with self.device.scope():
                self.device.synchronize()

    # the loop

    def step(self, n: int) -> None:
        """Do n iterations, or fewer if `action` asks to stop."""
        self.iterations.display.begin(self.iter)
        self.stopped = False
        end = self.iter + n
        with self.workers.during("step"), self.device.scope(), self.net.ops.blas_scope():
            self.iterations.recover()
            with stopping_workers(self.iterations):
                while self.iter < end and not self.stopped:
                    if not self._iterate_several(end):
                        self._iterate()
                self.iterations.collect(wait=True)

    def _iterate(self) -> None:
        """Do an iteration, with the test, display and snapshot that are due."""
        param, iterations, number = self.param, self.iterations, self.iter
        self.device.flush()
        initial = number == 0 and not param.test_initialization
        tests = due(number - param.test_offset, param.test_interval) and not initial
        if tests:
            iterations.collect(wait=True)
            self.update_state.begin([self.params.diff])
            self.test_all()
            if self.stopped:
                return
        displays = due(number, param.display)
        self.net.debug_info = displays and param.debug_info
        self.workers.iterate()
        rate = iterations.run(show=tests or displays)
        self.workers.iterated()
        self.reporter.iterated(number, iterations.display.loss, rate, self.images)
        self._poll(due(self.iter, param.snapshot))

    def _iterate_several(self, end: int) -> bool:
        """Do iterations as one call where nothing is due within them; False if none were done."""
        number, most = self.iter, self._most_per_call(end)
        count = self.iterations.prepare(most) if most else 0
        if not count:
            return False
        self.workers.iterate(count)
        for iterated in self.iterations.run_several(count):
            self.reporter.iterated(*iterated, self.images)
        if self.iter == number:
            return False
        self._poll(due(self.iter, self.param.snapshot))
        return True

    def _most_per_call(self, end: int) -> int:
        """Return the number of iterations that one call may do: up to the one after which a
        display, test or snapshot is due; 1 if the reporter or `action` wants to know of each at
        once; 0 if something is due within the next one.
        """
        param, number = self.param, self.iter
        if not (self.capture and self.workers.takes_several) or param.debug_info:
            return 0
        several = self.reporter.takes_several and getattr(self.action, "takes_several", False)
        most = end - number if several else 1
        if param.display > 0:
            most = min(most, -number % param.display)
        if param.test_interval > 0:
            most = min(most, (param.test_offset - number) % param.test_interval)
        if param.snapshot > 0:
            most = min(most, param.snapshot - number % param.snapshot)
        return most

    def _poll(self, snapshot_is_due: bool = False) -> None:
        """Poll `action` and do what it asks for: a snapshot first, then a stop."""
        action = self.workers.vote(self.action())
        if Action.SNAPSHOT in action or snapshot_is_due:
            self.iterations.collect(wait=True)
            if saved := self.resume_state.saved_now:  # a test after the last iteration goes on
                log.info("%s holds this iteration", saved)
            else:
                self.resume_state.try_to_save()
        self.stopped = Action.STOP in action

    def apply_update(self) -> None:
        """Clip, normalize, regularize and update with the present gradients; count an iteration.

        ConfigError where several solvers train together.
        """
        if self.workers.size > 1:
            raise ConfigError(
                "apply_update updates one solver; while several train together, call step"
            )
        self.iterations.apply_update()

    def solve(self, state_file: str | None = None, goes_on: bool = False) -> None:
        """Train up to max_iter, from a snapshot if given, with all tests and snapshots due.

        First check that snapshots can be written, unless the run `goes_on` after such a check.
        """
        param, state = self.param, self.resume_state
        writes = param.snapshot > 0 or param.snapshot_after_train
        writes = writes and self.workers.writes_files
        if writes and not goes_on:
            model = self.params.data.nbytes * (2 if param.snapshot_diff else 1)
            history = sum(flat.nbytes for flat in self.history)
            check_snapshots(param, self.path, self.net, model, history)
        self.reporter.solving(self.net.name, param.lr_policy)
        if state_file is not None:
            log.info("Restoring previous solver status from %s", state_file)
            self.restore(state_file)
        elif writes and not state.last_file and not goes_on and not self.iter:
            warn_of_earlier(param.snapshot_prefix)
        with saving_what_was_learned(state):
            self.step(param.max_iter - self.iter)
        saved = due(self.iter, param.snapshot) and not state.rescued_now
        unsaved = param.snapshot_after_train and not saved
        if not state.saved_now and (unsaved or state.failed_now):
            state.save(last=True)
        if not self.stopped:
            self._finish()
        self.reporter.done(self.stopped)

    def _finish(self) -> None:
        """Display and test after the last iteration, as Caffe does."""
        self.phase_timer.stop()
        self.iterations.hold_positions()
        self.iterations.statistics.hold()
        loss = None
        if due(self.iter, self.param.display):
            with self.workers.during("step"), self.device.scope(), self.net.ops.blas_scope():
                self.workers.forward()
                losses = self.workers.losses(self.iterations.eager.forward(self.iter))
            self.device.step_count += 1
            self.device.check_errors()
            window = self.iterations.display.window
            window.add(self.iter, sum(losses) / len(losses))
            loss = window.smoothed
        self.reporter.finished(self.iter, loss)
        if due(self.iter - self.param.test_offset, self.param.test_interval):
            self.test_all(anew=False)
        if not self.stopped:
            self.iterations.release_positions()

    # tests

    def test_all(self, anew: bool = True) -> None:
        """Test all test nets, unless `action` asks to stop; a resumed run repeats the whole test.

        Unless `anew`, a snapshot during the test has the positions and statistics already held.
        """
        self.iterations.hold_positions(anew)
        with self.workers.statistics.averaged():
            for k in range(len(self.test_nets)):
                if not self.stopped:
                    self.test(k)
        if not self.stopped:
            self.iterations.release_positions()

    def test(self, k: int) -> None:
        """Run test net k on test_iter batches with the train net's weights; report the means."""
        self.phase_timer.stop()
        test_pass, workers, batches = self._test_passes[k], self.workers, self.param.test_iter[k]
        self.reporter.test_started(self.iter, k)
        with workers.during("test"), self.device.scope(), self.net.ops.blas_scope():
            workers.begin_test(k)
            test_pass.begin(self.net)
            for done in range(0, batches, workers.size):
                self._poll()
                if self.stopped:
                    log.info("Test interrupted.")
                    return
                if workers.test(k, min(workers.size, batches - done)):
                    test_pass.batch(self.capture)
            loss = test_pass.average(workers.totals(k, test_pass.totals()))
        self.reporter.test_done(self.iter, k, test_pass.last_outputs, loss)

    # snapshots

    def snapshot(self) -> None:
        """Write model, sidecar and state; ConfigError if that fails, DivergenceError if a parameter
        is not finite.
        """
        self.resume_state.save()

    def restore(self, path: str) -> None:
        """Continue from a snapshot; exactly, if its sidecar lies beside it."""
        self.resume_state.restore(path)
