"""The two ways to run an iteration: layer by layer, or by replaying CUDA graphs.

    EagerRunner      the host calls each layer and reads the loss of each pass before it goes on; on
                     the CPU a short pass is replayed as one call, which checks its loss
    CapturedRunner   the host runs the data layers and launches a graph; results come later

`positions` returns those of data layers and random numbers, for rollback; `enqueue` runs an
iteration up to its update. `waits`: its result is known when `enqueue` returns.

With iter_size 1 a captured iteration is one graph; else there are three: `begin`, `pass` (launched
iter_size times) and `close`. Several iterations, of a net whose data stay, are one graph, too.
Where `begin` brings the root's parameters, it is a graph of its own and comes before the data
layers, as layer by layer. In the first iteration solvers wait for each other there, and they take
turns at the data layers: if some of them came to the data first, each would wait for the other.

    device's stream    data | forward | backward             | all-reduce | check_and_scale, update
    stream "layer"                      weight gradients
    stream "weights"    large ones in 16 bits
    stream "control"                  | accumulate_loss, and check_and_scale if that needs no
                                        gradients: one solver, no callbacks, clipping or loss scale;
                                        then large weights are updated beside, too
    stream "sync"                       all-reduce of gradients that are final, NCCL
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from caffepy.net import Net
from caffepy.solver.positions import data_layers, take_data_positions, take_positions
from caffepy.solver.step import TrainingStep


class EagerRunner:
    """Runs an iteration layer by layer.

    `before_update` is called with the gradients at hand: it raises an error of other solvers, and
    copies what is displayed.
    """

    waits = True

    def __init__(
        self, step: TrainingStep, nets: Sequence[Net], before_update: Callable[[int], object]
    ) -> None:
        self._step = step
        self._nets = nets
        self._before_update = before_update
        self._iteration = 0  # the number of the one at work, for its error

    def positions(self) -> dict[str, Any]:
        """Return the positions of all layers and random numbers, for rollback."""
        return take_positions(self._nets, self._step.device)

    def enqueue(self, iteration: int) -> None:
        """Run an iteration; raises before the update if a loss is not finite."""
        step, timer = self._step, self._step.phase_timer
        timer.begin()
        with step.overwrite_gradients():
            step.begin()
            self._iteration, alone = iteration, step.synchronizer is None
            for _ in range(step.param.iter_size):
                step.graphs.run_pass(step.capture, self._check_pass, alone, step.overwrites)
                timer.mark("backward")
            step.gradients_ready()
        step.device.synchronize()  # waits for the all-reduce
        self._before_update(iteration)
        step.device.flush()
        step.update(averaged=True)

    def _check_pass(self) -> None:
        """Add the loss of a forward pass; DivergenceError if it is not finite."""
        self._step.accumulate_loss()
        self._step.update_state.check_loss(self._check_loss)
        self._step.phase_timer.mark("forward")

    def _check_loss(self) -> None:
        self._step.check_loss(self._iteration)

    def forward(self, iteration: int) -> float:
        """Run a forward pass and return its loss; DivergenceError if that is not finite."""
        self._step.graphs.run_forward(self._step.capture)
        self._step.accumulate_loss()
        return self._step.check_loss(iteration)


class CapturedRunner:
    """Enqueues an iteration as CUDA graphs, capturing each the second time."""

    waits = False

    def __init__(self, step: TrainingStep, nets: Sequence[Net]) -> None:
        self._step = step
        self._data_layers = [data_layers(net) for net in nets]

    def positions(self) -> dict[str, Any]:
        """Return positions for rollback, without those of other layers: they are on the device."""
        return take_data_positions(self._data_layers, self._step.device)

    def enqueue(self, iteration: int) -> None:
        """Enqueue an iteration."""
        step = self._step
        if step.param.iter_size > 1:
            self._run_begin(self._begin)
            for _ in range(step.param.iter_size):
                self._run_data_layers()
                self._run("pass", self._timed_pass)
            self._run("close", self._close)
        elif step.pulls:
            self._run_begin(self._begin_once)
            self._run_data_layers()
            self._run("iteration", self._pass_and_close)
        else:
            self._run_data_layers()
            self._run("iteration", self._iteration)
        step.begun = False

    def can_repeat(self) -> bool:
        """True if iterations can follow each other as one graph: one has been captured, and the
        data layers would do nothing.
        """
        graphs, rule = self._step.graphs, self._step.optimizer.rule
        return graphs.data_stay and graphs.has_captured("iteration", rule.numbers(self._step.param))

    def enqueue_several(self, count: int) -> None:
        """Enqueue iterations as one graph, which the host launches once."""
        self._step.device.flush()
        self._run(f"{count} iterations", partial(self._iterations, count))
        self._step.begun = False

    def _run_data_layers(self) -> None:
        with self._step.phase_timer.fetching():
            self._step.graphs.run_data_layers()

    def _run_begin(self, work: Callable[[], None]) -> None:
        self._step.begun = True
        self._step.device.flush()  # running statistics, which it saves
        self._run("begin", work)

    def _run(self, name: str, work: Callable[[], None]) -> None:
        step = self._step
        with step.phase_timer.issuing():
            step.graphs.run(name, work, step.optimizer.rule.numbers(step.param))

    # what is captured

    def _iteration(self) -> None:
        with self._overwriting():
            self._begin()
            self._pass()
            self._close()

    def _begin_once(self) -> None:
        with self._overwriting():
            self._begin()

    def _pass_and_close(self) -> None:
        with self._overwriting():
            self._timed_pass()
            self._close()

    def _overwriting(self) -> AbstractContextManager[None]:
        return self._step.overwrite_gradients(update=self._step.lets_layers_update)

    def _iterations(self, count: int) -> None:
        timer, device = self._step.phase_timer, self._step.device
        try:
            for number in range(count):
                timer.sample(number, count)
                with device.overlapping():
                    self._iteration()
        finally:
            timer.sample(0, 1)

    def _begin(self) -> None:
        self._step.phase_timer.begin()
        self._step.begin()

    def _timed_pass(self) -> None:
        self._step.phase_timer.begin()
        self._pass()

    def _pass(self) -> None:
        step = self._step
        net, steps = step.net, step.graphs.computing
        with step.narrowed_ahead():
            net.forward(steps=steps)
        with step.device.side_stream("control"):
            step.accumulate_loss()
            if step.checks_early:
                step.update_state.check_and_scale(step.params.diff)
        step.phase_timer.mark("forward")
        net.backward(steps=steps)
        step.phase_timer.mark("backward")

    def _close(self) -> None:
        step = self._step
        step.gradients_ready()
        step.device.wait_stream("control")
        if step.checks_early:
            step.optimizer.apply()
        else:
            step.update(averaged=True)


Runner = EagerRunner | CapturedRunner
