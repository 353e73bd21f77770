"""Loop: iterations on the CPU between which nothing is due, as one call of compiled code.

    before        batches of each data layer lie in its ring (`Feed.several`), rates in a table
    each time     rate | clear gradients | take batches | forward | check the loss | backward |
                  update | keep the loss
    after         `Iterations` counts, smooths losses, reports; `Solver` polls signals

One iteration is recorded while it runs in Python, as `net.replay` records a pass, and repeated from
then on. It runs on one thread: numbers do not depend on that, and small nets gain little from a
second one. If single iterations turn out to be faster, they are used instead.
"""

from collections.abc import Callable, Hashable, Sequence
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

from caffepy.device.blob import Memory
from caffepy.device.recording import recording
from caffepy.device.threads import alone
from caffepy.layer.feed import Feed
from caffepy.net.fusion import Step
from caffepy.net.replay import can_replay, can_replay_step, changes_too_often
from caffepy.solver.step import TrainingStep

if TYPE_CHECKING:
    from caffepy.ops.cpu.graph import Graph
    from caffepy.ops.cpu.update_state import Series, UpdateState

LONGEST = 0.005
"""Seconds that a call may take: between calls signals are polled."""

MOST = 128
"""Iterations of a call."""

SLOWER, CALLS = 1.05, 8
"""A loop is abandoned if the fastest of CALLS calls takes more than SLOWER times as long as its
iterations take one by one.
"""


class Loop:
    """Repeats the iterations of a step."""

    def __init__(self, step: TrainingStep) -> None:
        self._step = step
        self._graph: Graph | None = None
        self._series: Series | None = None
        self._steady: Hashable = None  # the conditions of the recording
        self._steps: list[Step] = []  # all but those that feed
        self._feeds: list[tuple[int, Feed]] = []  # with their places in the net
        self._recorded = self._replayed = self._refused = 0
        self._seconds = inf  # of an iteration, the least of all calls
        self._calls = 0
        self._first = self._count = 0  # number of the first iteration of a call, and how many
        self._random: dict[str, Any] = {}  # state of random numbers before it
        self._never = False

    def prepare(self, most: int, seconds: float) -> int:
        """Read batches; return the number of iterations, up to `most`, that `run` can do, 0 if
        none. A single iteration takes `seconds`.
        """
        step, passes = self._step, self._step.param.iter_size
        if self._never or step.update_state.needs_norm or not step.graphs.replays_pass:
            return 0
        if not can_replay(step.net, step.graphs.net_callbacks) or not self._hold():
            return 0
        most = min(most, MOST, int(LONGEST / min(seconds, self._seconds)))
        most = min(most, self._graph.most) if self._graph else most
        self._never = self._calls >= CALLS and self._seconds > SLOWER * seconds
        if self._never or most < 1:
            return 0
        batches = most * passes
        for place, feed in self._feeds:
            for callback in step.net.before_forward:
                callback(place)
            ring = feed.several(step.net.nodes[place].layer_tops)
            batches = min(batches, ring.left if ring else 0)
        self._refused += not batches
        self._never = changes_too_often(self._refused, self._replayed)
        return batches // passes if self._graph else min(1, batches // passes)

    def _hold(self) -> bool:
        """Keep the recording if it is still valid; return False if nothing can be recorded."""
        step = self._step
        numbers = step.optimizer.rule.numbers(step.param)
        steady = Memory.version, id(step.graphs), step.param.iter_size, numbers
        if steady != self._steady:
            self._graph, self._steady = None, steady
            self._seconds, self._calls = inf, 0
            self._never = not self._find_steps()
        return not self._never

    def _find_steps(self) -> bool:
        """Part the steps into those that feed and those that compute; False if one can do neither
        in a loop.
        """
        net = self._step.net
        self._steps, self._feeds = [], []
        for step in self._step.graphs.steps:
            layer = net.layers[step.last]
            if isinstance(layer, Feed) and layer.reads_files:
                self._feeds.append((step.last, layer))
            elif all(can_replay_step(net, backward, step) for backward in (False, True)):
                self._steps.append(step)
            else:
                return False
        return not changes_too_often(self._recorded, self._replayed)

    def run(self, first: int, numbers: Sequence[tuple[float, float]]) -> None:
        """Run iterations from number `first` on, with these rates and corrections; an error ends
        them where it would end single iterations. `finish` must follow.
        """
        from caffepy.ops.cpu.update_state import Series  # here, since it loads the CPU's kernels

        step, count = self._step, len(numbers)
        if self._series is None or self._graph is None:
            state = cast("UpdateState", step.update_state)
            self._series = Series(state, MOST, len(self._feeds))
        series, rings = self._series, [feed.ring for _, feed in self._feeds]
        series.begin(numbers, [ring.used for ring in rings if ring])
        self._random = step.device.random.state
        self._first, self._count = first, count
        with alone(), step.overwrite_gradients():
            if self._graph is None:
                self._record(series)
            else:
                begun, step.whole = perf_counter(), False
                self._replayed += count
                try:
                    self._graph.replay(count)
                except Exception:
                    step.begun = True  # its statistics are to be restored
                    raise
                finally:
                    step.whole = True  # compiled code ends between updates
                self._seconds = min(self._seconds, (perf_counter() - begun) / count)
                self._calls += 1

    def finish(self, hold: Callable[[], object]) -> list[float]:
        """Move the layers past the batches that `run` used; return the losses of complete
        iterations. `hold` is called while the layers stand before an iteration that was not
        completed.
        """
        count, self._count = self._count, 0
        if not count:
            return []  # interrupted before it began
        step, series = self._step, self._series
        passes, device = step.param.iter_size, step.device
        assert series
        done = int(series.places[0])
        step.begun = step.begun and done < count
        if done < count:
            random = device.random.state
            for place, (_, feed) in zip(series.begun, self._feeds, strict=True):
                assert feed.ring
                feed.ring.used = int(place) + done * passes
            device.random.state = self._random
            for _ in range(done * len(self._graph.seeds) if self._graph else 0):
                device.draw_seed()
            hold()
            device.random.state = random
        for place, (_, feed) in zip(series.places[1:], self._feeds, strict=True):
            assert feed.ring
            feed.ring.used = int(place)
        losses: list[float] = series.losses[:done].tolist()
        return losses

    def _record(self, series: "Series") -> None:
        """Run an iteration and record it."""
        from caffepy.ops.cpu.graph import Graph  # here, since it loads the CPU's kernels

        self._recorded += 1
        graph, version = Graph(self._step.net.temporaries), Memory.version
        with recording(graph):
            self._iteration(series)
        graph.finish(inf)
        self._never = not graph.is_one_call
        if graph.is_one_call and Memory.version == version:
            self._graph = graph

    def _iteration(self, series: "Series") -> None:
        step, net = self._step, self._step.net
        series.begin_iteration(step.cleared)
        step.save_stats()
        step.begun = True
        for _ in range(step.param.iter_size):
            for i, (place, feed) in enumerate(self._feeds):
                assert feed.ring
                series.take(i, feed.ring.arrays, [t.data for t in net.nodes[place].layer_tops])
            net.forward(steps=self._steps)
            step.accumulate_loss()
            step.update_state.check_loss(self._check_loss)
            net.backward(steps=self._steps)
        step.whole = False
        step.optimizer.apply()
        step.whole = True
        series.end_iteration()

    def _check_loss(self) -> None:
        assert self._series
        self._step.check_loss(self._first + int(self._series.places[0]))
