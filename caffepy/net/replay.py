"""Passes of a net, and updates, on the CPU, recorded and replayed: the twin of CUDA graphs.

    1st run    layer by layer; memory is allocated
    2nd run    layer by layer, and each call of compiled code is recorded: `caffepy.ops.cpu.graph`
    from then  stretches of layers as one call each, the layers in between one by one

A layer in between is one that feeds data or whose class does not say `can_replay`. If a blob of the
process has got another array or shape (`Memory.version`) all begins anew. The numbers are the same
to the last bit.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import groupby
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from caffepy.device.blob import Memory
from caffepy.device.recording import recording
from caffepy.device.threads import num_ranges
from caffepy.net.fusion import Step
from caffepy.net.net import Net
from caffepy.ops.protocol import Ops

if TYPE_CHECKING:
    from caffepy.ops.cpu.graph import Graph

LONGEST = 0.05
"""Seconds of a pass up to which it is replayed: a longer one gains nothing, and signals are polled
and hangs found layer by layer.
"""

MAX_RECORDINGS = 20
MIN_REPLAYS = 4
"""After MAX_RECORDINGS recordings none is made unless each was replayed MIN_REPLAYS times on
average: shapes change too often.
"""


Part = tuple[bool, Callable[[], object]]


class Replay:
    """Does `work` by replay if that is possible. `parts` returns it in parts, each with whether all
    that it does can be replayed.
    """

    def __init__(
        self, ops: Ops, work: Callable[[], object], parts: Callable[[], Sequence[Part]]
    ) -> None:
        self._ops, self._work, self._divided = ops, work, parts
        # A graph, or None, for each part.
        self._parts: list[tuple[Graph | None, Callable[[], object]]] = []
        self._steady: Hashable = None  # the conditions after the last run
        self._recorded = self._replayed = 0
        self._never = False

    @property
    def replays(self) -> bool:
        """True if the next run replays what was recorded, if nothing changes."""
        return bool(self._parts)

    def run(self, *conditions: Hashable) -> None:
        """Do the work; `conditions` are further ones under which a recording holds."""
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
        from caffepy.ops.cpu.graph import Graph  # here, since it loads numba

        self._recorded += 1
        divided = self._divided()
        changes = self._recorded > MAX_RECORDINGS and self._replayed < MIN_REPLAYS * self._recorded
        if changes or not any(can_replay for can_replay, _ in divided):
            self._never = True
            self._work()
            return
        parts = list[tuple[Graph | None, Callable[[], object]]]()
        for can_replay, work in divided:
            graph, begun = Graph() if can_replay else None, perf_counter()
            with recording(graph):
                work()
            if graph is not None:
                graph.finish(perf_counter() - begun)
            parts.append((graph, work))
        self._parts = parts

    def _replay(self) -> None:
        version = Memory.version
        self._replayed += 1
        for graph, work in self._parts:
            if graph is None or Memory.version != version:  # a part in between reshaped a blob
                work()
            elif graph.is_one_call:
                with self._ops.blas_scope():
                    graph.replay()
            else:
                with self._ops.blas_scope(), np.errstate(all="ignore"):
                    graph.replay()


def replay_of_pass(
    net: Net, steps: Sequence[Step], run: Callable[[Sequence[Step]], object]
) -> Replay:
    """A Replay of steps of a net in one direction by `run`, which takes steps."""

    def parts() -> list[Part]:
        return [
            (can_replay, partial(run, list(some)))
            for can_replay, some in groupby(steps, partial(_can_replay, net))
        ]

    return Replay(net.ops, partial(run, steps), parts)


def _can_replay(net: Net, step: Step) -> bool:
    layers = [net.layers[i] for i in step.layers or (step.last,)]
    return all(layer.can_replay and not layer.share_in_parallel for layer in layers)
