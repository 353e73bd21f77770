"""Passes of a net, and updates, on the CPU, recorded and replayed: what CUDA graphs are for GPUs.

    1st run    layer by layer; memory is allocated
    2nd run    layer by layer, and each call of compiled code is recorded: `caffepy.ops.cpu.graph`
    from then  stretches of layers as one call each, the layers in between one by one

A layer in between is one that feeds data or whose class does not say `can_replay`. If a blob of the
process has got another array or shape (`Memory.version`) all begins anew. The numbers are the same
to the last bit.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import groupby, takewhile
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from caffepy.device.blob import Memory
from caffepy.device.recording import recording
from caffepy.device.threads import num_ranges
from caffepy.net.fusion import Step
from caffepy.net.net import Net

if TYPE_CHECKING:
    from caffepy.ops.cpu.graph import Graph

LONGEST = 0.05
"""Seconds of a pass up to which it is replayed: a longer one gains nothing, and signals are polled
and hangs found layer by layer.
"""

MAX_RECORDINGS, MIN_REPLAYS = 20, 4


def changes_too_often(recorded: int, replayed: int) -> bool:
    """True if no more is to be recorded: there were more than MAX_RECORDINGS, and each was replayed
    fewer than MIN_REPLAYS times on average. CUDA graphs keep to it, too.
    """
    return recorded > MAX_RECORDINGS and replayed < MIN_REPLAYS * recorded


class Part(NamedTuple):
    """A part of some work. `can_replay`: a replay can do all of it; `is_plain`: it runs outside of
    `Net.running`.
    """

    work: Callable[[], object]
    can_replay: bool
    is_plain: bool = False


class Replay:
    """A runner of `work`, by replay if that is possible. `parts` returns it in parts."""

    def __init__(
        self, net: Net, work: Callable[[], object], parts: Callable[[], Sequence[Part]]
    ) -> None:
        self._net, self._work, self._divided = net, work, parts
        # A graph, or None, for each part.
        self._parts: list[tuple[Graph | None, Callable[[], object]]] = []
        self._steady: Hashable = None  # the conditions after the last run
        self._recorded = self._replayed = 0
        self._version = -1  # of Memory, when it replayed last
        self._never = self._is_plain = False

    @property
    def replays(self) -> bool:
        """True if the next run replays what was recorded, if nothing changes."""
        return bool(self._parts)

    @property
    def has_replayed(self) -> bool:
        """True if it has replayed what was recorded, and no blob has changed since then."""
        return self.replays and self._replayed > 0 and self._version == Memory.version

    def run(self, *conditions: Hashable) -> None:
        """Do the work; a recording is valid for equal `conditions` only."""
        if self._never:
            self._work()
            return
        now = (Memory.version, num_ranges(), *conditions)
        if now != self._steady:
            self._parts, begun = [], perf_counter()
            self._work()
            is_short = perf_counter() - begun < LONGEST
            self._steady = (Memory.version, *now[1:]) if is_short else None
        elif self._parts:
            self._replay()
        else:
            self._record()
            if Memory.version != now[0]:
                self._parts, self._steady = [], None

    def _record(self) -> None:
        from caffepy.ops.cpu.graph import Graph  # here, since it loads the CPU's kernels

        self._recorded += 1
        divided = self._divided()
        changes = changes_too_often(self._recorded, self._replayed)
        if changes or not any(part.can_replay for part in divided):
            self._never = True
            self._work()
            return
        parts, is_plain = list[tuple[Graph | None, Callable[[], object]]](), True
        for (can_replay, plain), some in groupby(divided, lambda part: part[1:]):
            work = _in_turn([part.work for part in some])
            graph, begun = Graph(self._net.temporaries) if can_replay else None, perf_counter()
            with recording(graph):
                work()
            if graph is not None:
                graph.finish(perf_counter() - begun)
            is_plain = is_plain and (graph.is_one_call if graph else plain)
            parts.append((graph, work))
        self._parts, self._is_plain = parts, is_plain

    def _replay(self) -> None:
        version = self._version = Memory.version
        self._replayed += 1
        with self._net.ops.blas_scope() if self._is_plain else self._net.running():
            for graph, work in self._parts:
                if graph is not None and Memory.version == version:
                    graph.replay()
                else:  # after a part in between that reshaped a blob
                    work()


def _in_turn(works: Sequence[Callable[[], object]]) -> Callable[[], object]:
    def run() -> None:
        for work in works:
            work()

    return works[0] if len(works) == 1 else run


def parts_of_pass(
    net: Net,
    steps: Sequence[Step],
    run: Callable[[Sequence[Step]], object],
    backward: bool = False,
) -> list[Part]:
    """The parts of a pass of steps of a net by `run`, which takes steps in the order given."""
    return [
        Part(partial(run, list(some)), can_replay)
        for can_replay, some in groupby(steps, partial(can_replay_step, net, backward))
    ]


def feeding_parts(net: Net, steps: Sequence[Step]) -> list[Part]:
    """The parts of a forward pass that are the first steps, as long as these are layers that read
    files.
    """
    nodes = [net.nodes[step.last] for step in steps]
    read = takewhile(lambda i: nodes[i].layer.reads_files and not nodes[i].casts, range(len(steps)))
    return [
        Part(partial(net.run_data_layer, steps[i].last), can_replay=False, is_plain=True)
        for i in read
    ]


def can_replay(net: Net, callbacks: Sequence[object]) -> bool:
    """True if passes of a net with these callbacks can be replayed: on the CPU, if all say
    `replayable = True`. Then a replay, which may be of many iterations, calls them only before it
    reads batches from files: enough for signals and for a watch over waits, as `Heartbeat` needs.
    Callbacks of scripts do not say so, and are called for each layer in each iteration.
    """
    if net.device.is_cuda or net.debug_info or net.recompute:
        return False
    return not callbacks or all(getattr(callback, "replayable", False) for callback in callbacks)


class Passes:
    """Passes of a net over ranges of layers, as scripts run them; the CPU replays short ones."""

    def __init__(self, net: Net) -> None:
        self._net = net
        self._replays: dict[tuple[int, int, bool], Replay] = {}

    def forward(self, start: int, end: int) -> None:
        """`Net.forward`, of layers `start` to `end`."""
        net = self._net
        if can_replay(net, (*net.before_forward, *net.after_forward)):
            self._replay(start, end, backward=False).run()
        else:
            net.forward(start, end)

    def backward(self, start: int, end: int) -> None:
        """`Net.backward`, of layers `start` down to `end`."""
        net = self._net
        if can_replay(net, (*net.before_backward, *net.after_backward)):
            self._replay(start, end, backward=True).run()
        else:
            net.backward(start, end)

    def _replay(self, start: int, end: int, backward: bool) -> Replay:
        net, key = self._net, (start, end, backward)
        if key not in self._replays:
            one_way = net.backward if backward else net.forward

            def run(some: Sequence[Step]) -> None:
                if some:
                    one_way(some[0].last, some[-1].last)

            step = -1 if backward else 1
            steps = [Step(i) for i in range(start, end + step, step)]
            self._replays[key] = Replay(
                net, partial(run, steps), lambda: parts_of_pass(net, steps, run, backward)
            )
        return self._replays[key]


def can_replay_step(net: Net, backward: bool, step: Step) -> bool:
    """True if all that a step does in this direction can be replayed."""
    if backward and not net.nodes[step.last].need_backward:
        return True  # nothing is done
    layers = [net.layers[i] for i in step.indices]
    return all(layer.can_replay and not layer.share_in_parallel for layer in layers)
