"""Iterations: the one place that knows which iterations are done, pending or undone.

A runner (layer by layer, or CUDA graphs) enqueues an iteration. It is pending until its result is
collected, at once or some iterations later:

    enqueue --> pending --collect--> DONE      updated
                   |             |-> SKIPPED   float16 gradients overflowed, nothing updated
                   |             `-> STOPPED   rolled back, with all that came after it
                   `--any exception--> interrupted --recover--> nothing is pending

STOPPED: a loss is not finite, data are bad, or another solver failed. From that iteration on the
device updates nothing, so counters, policy step, positions and running statistics go back to where
they stood before it, and its error is raised. Interrupted: an exception hit the host between any
two operations; the device's own counter tells later which iterations it has done.

Who owns what:
    Iterations    counters (iter, current_step), pending steps, positions before the one in progress
    TrainingStep  parameters, gradients, the saved running statistics
    Optimizer     the update rule and its history
    UpdateState   the numbers of an update on the device; the results of pending iterations
    GraphRunner   the CUDA graphs, and the reasons why there are none

The order in an iteration is the same for both runners: learning rate; gradients and update; its
result, if that is waited for; display; step of the policy; rate and clipping in the log; counter.
Layer by layer, the displayed outputs are copied before the update, since Caffe displays there.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from math import inf
from time import perf_counter
from typing import Any, NamedTuple, Protocol

from caffepy.core.errors import CaffeError
from caffepy.core.events import Reporter
from caffepy.net import Net
from caffepy.ops.update_state import StepResult, StepStatus
from caffepy.solver.display import Display
from caffepy.solver.divergence import diverged_before
from caffepy.solver.loop import Loop
from caffepy.solver.plateau import Event, Plateau
from caffepy.solver.policy import advance, next_step, rate
from caffepy.solver.positions import completed, take_positions
from caffepy.solver.runners import CapturedRunner, EagerRunner, Runner
from caffepy.solver.statistics import Statistics
from caffepy.solver.step import TrainingStep
from caffepy.solver.worker_group import WorkerGroup

MOST, LONGEST = 8, 0.02
"""Iterations that a GPU gets as one graph, unless as many take more seconds one by one: between
graphs signals are polled. Four GPUs that wait for the host take 1 ms for an iteration.
"""

TIMED = 32
"""Iterations over which their time is measured: more than the host may be ahead of a GPU."""


class PendingStep(NamedTuple):
    """Solver state before an enqueued iteration, for rollback."""

    iteration: int
    current_step: int
    event: Event
    positions: dict[str, Any]


Iterated = tuple[int, float | None, float]
"""Number, smoothed loss as far as it is known, and learning rate of an iteration: what
`Reporter.iterated` is told.
"""


class Trainer(Protocol):
    """The solver, as its iterations and snapshots see it; `join` and `leave` change both."""

    reporter: Reporter
    workers: WorkerGroup

    @property
    def images(self) -> int:
        """Images in an iteration of all solvers, 0 if unknown."""


def due(iteration: int, interval: int) -> bool:
    """True if something is to be done every `interval` iterations, 0 for never, and now."""
    return interval > 0 and iteration % interval == 0


class Iterations:
    """Enqueues iterations, collects their results, rolls back the ones that were stopped.

    `nets` are the train net and the test nets. A worker leaves it to the root to raise
    DivergenceError, since the loss is the mean of all solvers.
    """

    def __init__(
        self, step: TrainingStep, nets: Sequence[Net], trainer: Trainer, is_worker: bool
    ) -> None:
        self.step = step
        self.nets = nets
        self.trainer = trainer
        self.interrupted = False  # an exception ended a step; what the device did is not known yet
        self.iter = 0
        self.current_step = 0
        self.rate_factor = 1.0  # of the learning rate, after divergences
        self.plateau = Plateau(step.param)
        self.display = Display(step.param, step.net)
        self.statistics = Statistics(step.net)
        self.eager = EagerRunner(step, nets, self._before_update)
        self.captured = CapturedRunner(step, nets)
        self.loop = Loop(step)
        self._seconds = inf  # the least of an iteration
        self._mean = inf  # seconds of an iteration, of the last TIMED ones
        self._timed = 0, -inf  # when these began: iteration and time
        self._is_worker = is_worker
        self._pending: deque[PendingStep] = deque()
        self._held: dict[str, Any] | None = None  # positions before the test or iteration at work
        self._result = StepResult(0.0, 0.0, 1.0, 1.0, StepStatus.DONE)  # the last one

    def run(self, show: bool) -> float:
        """Run or enqueue an iteration; return its learning rate. `show`: wait for its result."""
        step = self.step
        step.compile_ahead()
        step.phase_timer.start()
        captured = step.capture and step.graphs.can_capture()
        runner: Runner = self.captured if captured else self.eager
        self.collect(wait=runner.waits or self.plateau.used)
        pending = PendingStep(self.iter, self.current_step, self.plateau.event, runner.positions())
        self._held = pending.positions
        self.statistics.release()
        learning_rate = self._next_rate()
        step.set_hyperparams(learning_rate, self.iter)
        begun = perf_counter()
        runner.enqueue(self.iter)
        self._seconds = min(self._seconds, perf_counter() - begun)
        step.update_state.mark_enqueued()
        self._pending.append(pending)
        if show or runner.waits:
            self.collect(wait=True)
        displays = due(self.iter, step.param.display)
        if displays:
            self.display.show(self.iter, self.trainer.reporter)
        self._finish(learning_rate, log_clipping=displays or runner.waits)
        return learning_rate

    def prepare(self, most: int) -> int:
        """Return the number of iterations, up to `most`, that can be done as one call; 0: none."""
        step, number, (first, since) = self.step, self.iter, self._timed
        if not 0 <= number - first < TIMED:
            now = perf_counter()
            self._mean = (now - since) / (number - first) if number > first else inf
            self._timed = number, now
        if self.plateau.used:
            return 0
        if step.graphs.can_capture():
            fits = most >= MOST and MOST * self._mean <= LONGEST
            return MOST if fits and self.captured.can_repeat() else 0
        alone = type(self.trainer.workers) is WorkerGroup and not step.callbacks
        return self.loop.prepare(most, self._seconds) if alone else 0

    def run_several(self, count: int) -> Iterable[Iterated]:
        """Run `count` iterations, see `prepare`, as one call, or enqueue them as one graph."""
        if self.step.graphs.can_capture():
            return self.enqueue_several(count)
        return self._run_loop(count)

    def enqueue_several(self, count: int) -> Sequence[Iterated]:
        """Enqueue `count` iterations of a net whose data stay as one graph."""
        step, current_step = self.step, self.current_step
        step.phase_timer.start()
        self.collect(wait=False, room=count)
        self._held = positions = self.captured.positions()
        self.statistics.release()
        pending, rates = list[PendingStep](), list[float]()
        for ahead, iteration in enumerate(range(self.iter, self.iter + count)):
            before = {**positions, "tick": positions["tick"] + ahead}  # a pass each
            pending.append(PendingStep(iteration, current_step, self.plateau.event, before))
            current_step = advance(step.param, iteration, current_step)
            rates.append(rate(step.param, iteration, current_step, self.rate_factor))
            step.set_hyperparams(rates[-1], iteration, ahead)
        self.captured.enqueue_several(count)
        step.update_state.mark_enqueued(count)
        self._pending += pending
        first, self.iter, self.current_step = self.iter, self.iter + count, current_step
        self.release_positions()
        return [(number, self.display.loss, rate) for number, rate in enumerate(rates, first)]

    def _run_loop(self, count: int) -> Iterator[Iterated]:
        """Run `count` iterations as one call of `Loop`."""
        step, rule, policy_step = self.step, self.step.optimizer.rule, self.current_step
        self.release_positions()
        numbers = list[tuple[float, float]]()
        for iteration in range(self.iter, self.iter + count):
            policy_step = next_step(step.param, iteration, policy_step)
            learning_rate = rate(step.param, iteration, policy_step, self.rate_factor)
            numbers.append((learning_rate, rule.correction(step.param, iteration)))
        step.set_hyperparams(numbers[0][0], self.iter)
        failure, done = None, list[tuple[int, float, float]]()
        try:
            self.loop.run(self.iter, numbers)
        except CaffeError as error:
            failure = error
        finally:
            losses = self.loop.finish(self.hold_positions)
            for loss, (learning_rate, _) in zip(losses, numbers, strict=False):
                self.display.window.add(self.iter, loss)
                self.plateau.add(self.iter, loss)
                self.current_step = advance(step.param, self.iter, self.current_step)
                done.append((self.iter, self.display.window.smoothed, learning_rate))
                self.iter += 1
        yield from done
        if failure is not None:
            raise failure

    def _before_update(self, iteration: int) -> None:
        self.trainer.workers.check()
        if due(iteration, self.step.param.display):
            self.display.copy_outputs()

    def collect(self, wait: bool, room: int = 1) -> None:
        """Collect results of enqueued iterations: all (`wait`), or those already finished, and so
        many that there is room for as many more.

        After a stopped one, rolls back and raises its error.
        """
        if self.interrupted or not self._pending:
            return
        for result in self.step.update_state.step_results(wait, room):
            pending = self._pending.popleft()
            if result.status is StepStatus.STOPPED:
                self._roll_back(pending, result)
                return
            self.display.window.add(pending.iteration, result.loss)
            self.plateau.add(pending.iteration, result.loss)
            self.display.log_overflow(pending.iteration, result)
            self._result = result

    def apply_update(self) -> None:
        """Update with the gradients at hand and count an iteration."""
        step = self.step
        with step.device.scope():
            self.recover()
            step.device.flush()
            learning_rate = self._next_rate()
            step.set_hyperparams(learning_rate, self.iter)
            step.update()
            step.update_state.mark_enqueued()
            (result,) = step.update_state.step_results(wait=True)
        if result.status is StepStatus.STOPPED:
            pending = PendingStep(
                self.iter, self.current_step, self.plateau.event, self._held or {}
            )
            self._roll_back(pending, result)
        self.display.log_overflow(self.iter, result)
        self._result = result
        self._finish(learning_rate, log_clipping=True)

    def _next_rate(self) -> float:
        param = self.step.param
        if self.plateau.used:
            self.current_step = self.plateau.step(self.iter, self.current_step)
        step = next_step(param, self.iter, self.current_step)
        return rate(param, self.iter, step, self.rate_factor)

    def rate(self) -> float:
        """Return the learning rate of the next iteration; moves the step of the policy."""
        learning_rate = self._next_rate()
        self.current_step = advance(self.step.param, self.iter, self.current_step)
        return learning_rate

    def _finish(self, learning_rate: float, log_clipping: bool) -> None:
        """Log rate and clipping as Caffe does, and count the iteration."""
        param = self.step.param
        self.current_step = advance(param, self.iter, self.current_step)
        if due(self.iter, param.display):
            self.trainer.reporter.lr(self.iter, learning_rate)
        if log_clipping:
            self.display.log_clipping(self._result)
        self.iter += 1
        self.release_positions()

    def _roll_back(self, pending: PendingStep, result: StepResult) -> None:
        """Go back to before a stopped iteration and raise what stopped it."""
        step, workers = self.step, self.trainer.workers
        self._pending.clear()
        self.iter, self.current_step, self.plateau.event, positions = pending
        self._held = positions or None
        step.restore_stats()
        step.update_state.resume()
        workers.check()
        step.device.check_errors()
        workers.raise_worker_error()
        if not self._is_worker:
            raise diverged_before(step.net, self.iter, result.loss)

    def recover(self) -> None:
        """After an interruption, count on from where the device stands."""
        if self.interrupted:
            self.step.update_state.resync()
            self._pending.clear()
            device = self.step.device
            device.step_count = device.step_count  # uploads the host's count, which holds
            self.interrupted = False

    def move_to(
        self, iteration: int, current_step: int, plateau: dict[str, Any] | None = None
    ) -> None:
        """Continue with this iteration, step of the policy, and state of the plateau."""
        self.iter, self.current_step = iteration, current_step
        self.plateau.restore(plateau or {}, iteration)
        self.release_positions()

    # positions of data layers and random numbers

    def hold_positions(self, anew: bool = True) -> None:
        """Hold the present positions for snapshots; unless `anew`, those already held stay."""
        if anew or self._held is None:
            self._held = take_positions(self.nets, self.step.device)

    def release_positions(self) -> None:
        """Let snapshots have the positions and running statistics of their own time again."""
        self._held = None
        self.statistics.release()

    def positions(self) -> dict[str, Any]:
        """Return the positions now, or before the test or iteration in progress."""
        if self._held:
            return completed(self._held, self.nets)
        return take_positions(self.nets, self.step.device)
