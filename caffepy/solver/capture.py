"""GraphRunner: how the steps of a net run, so that the host has little to do: on a GPU captured as
CUDA graphs and replayed, on the CPU replayed by `net.replay`.

`GraphRunner.reasons_not_capturable` has every reason why a GPU captures nothing. Then layers run
one by one, each launched by the host.
"""

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import cast

from caffepy.core.errors import DeviceError
from caffepy.device.cuda import CudaDevice, CudaGraph
from caffepy.net import Net
from caffepy.net.fusion import Step
from caffepy.net.replay import (
    Part,
    Replay,
    can_replay,
    changes_too_often,
    feeding_parts,
    parts_of_pass,
)

log = logging.getLogger(__name__)


def layer_reasons(net: Net) -> list[str]:
    """Return the reasons that layers give; data layers run before the graph."""
    reasons = []
    for layer in net.layers:
        name = f'layer "{layer.param.name}" ({layer.type})'
        if layer.on_host and not layer.is_data:
            reasons.append(f"{name} computes on the host")
        elif layer.always_reshape and not layer.is_data:
            reasons.append(f"the shapes of {name} depend on its data")
    return reasons


def is_capturable(callback: object) -> bool:
    """True if a callback says `capturable = True`: it only enqueues work on the current stream."""
    return bool(getattr(callback, "capturable", False))


@dataclass
class _Part:
    """A part of a pass: the conditions of its last run that changed none, and its graph."""

    steady: Hashable = None
    graph: CudaGraph | None = None


class GraphRunner:
    """Runs the steps of a net: layer by layer, by `run_forward` and `run_pass`, or on a GPU, if
    `can_capture`, as graphs, by `run_data_layers`, then `run` for each part.

    A part runs the first time, is captured the second time, and replayed from then on, as long as
    no memory, shape or callback of the net or of `callbacks` changes. `what` is how the log calls
    the pass.
    """

    def __init__(self, net: Net, fuse: bool, what: str, callbacks: Sequence[object] = ()) -> None:
        self.net = net
        self.what = what
        self._callbacks = callbacks
        self._single = [Step(i) for i in range(len(net.layers))]
        self.steps = steps = net.steps if fuse else self._single
        self._feeding = [step for step in steps if net.layers[step.last].is_data]
        self.computing = [step for step in steps if not net.layers[step.last].is_data]
        self._inputs = [top for node in net.nodes if not node.bottoms for top in node.tops]
        self._layer_reasons = layer_reasons(net)
        self._failure: str | None = None
        self._logged: set[str] = set()
        self._parts: dict[str, _Part] = {}
        self._captured = self._replayed = 0
        self._gpu = cast(CudaDevice, net.device)  # as far as anything is captured
        # On the CPU: a forward pass alone, and both directions with what is done in between.
        self._forward = Replay(net, lambda: self._run_steps(steps), self._forward_parts)
        self._pass: Replay | None = None
        self._alone = True  # as in the last pass

    @property
    def net_callbacks(self) -> tuple[object, ...]:
        """The callbacks of the net, which are called around its layers."""
        net = self.net
        return (*net.before_forward, *net.after_forward, *net.before_backward, *net.after_backward)

    @property
    def eager_steps(self) -> Sequence[Step]:
        """Fused steps; one layer a step if a callback or debug_info must see every layer."""
        watched = self.net.debug_info or not all(map(is_capturable, self.net_callbacks))
        return self._single if watched else self.steps

    def forward(self, capture: bool = True) -> None:
        """Run a forward pass, captured as the part "forward" if that is possible."""
        if capture and self.can_capture():
            self.run_data_layers()
            self.run("forward", lambda: self.net.forward(steps=self.computing))
        else:
            self.run_forward(capture)

    # layer by layer; the CPU replays what it can

    def run_forward(self, capture: bool = True) -> None:
        """Run a forward pass layer by layer; with `capture` the CPU replays it if it can."""
        net = self.net
        if capture and can_replay(net, (*net.before_forward, *net.after_forward)):
            self._forward.run()
        else:
            net.forward(steps=self.eager_steps)

    def run_pass(
        self, capture: bool, between: Callable[[], None], alone: bool, overwrites: bool
    ) -> None:
        """Run a forward pass, what is `between`, the same each time, and a backward pass, which
        overwrites large gradients if `overwrites`. With `capture` the CPU replays what it can, also
        what is between in a solver that trains `alone`.
        """
        net = self.net
        if capture and can_replay(net, self.net_callbacks):
            self._pass, self._alone = self._pass or self._replay_of_pass(between), alone
            self._pass.run(overwrites, alone)
        else:
            self.run_forward(capture)
            between()
            net.backward(steps=self.eager_steps)

    @property
    def replays_pass(self) -> bool:
        """True if the CPU has replayed the last pass in both directions and nothing changed."""
        return self._pass is not None and self._pass.has_replayed

    def _replay_of_pass(self, between: Callable[[], None]) -> Replay:
        steps, back = self.steps, self.steps[::-1]

        def work() -> None:
            self._run_steps(steps)
            between()
            self._run_back(back)

        def parts() -> list[Part]:
            return [
                *self._forward_parts(),
                Part(between, can_replay=self._alone),
                *parts_of_pass(self.net, back, self._run_back, backward=True),
            ]

        return Replay(self.net, work, parts)

    def _forward_parts(self) -> list[Part]:
        feeding = feeding_parts(self.net, self.steps)
        return [*feeding, *parts_of_pass(self.net, self.steps[len(feeding) :], self._run_steps)]

    def _run_steps(self, steps: Sequence[Step]) -> None:
        self.net.forward(steps=steps)

    def _run_back(self, steps: Sequence[Step]) -> None:
        self.net.backward(steps=steps[::-1])

    # CUDA graphs

    def can_capture(self) -> bool:
        """True on a GPU if there is no reason against it; the log has each reason once."""
        if not self.net.device.is_cuda:
            return False
        reasons = self.reasons_not_capturable()
        new = [reason for reason in reasons if reason not in self._logged]
        if new:
            self._logged.update(new)
            log.info("%s layer by layer: %s", self.what, "; ".join(new))
        return not reasons

    def reasons_not_capturable(self, capture: bool = True) -> list[str]:
        """Return every reason why this pass runs layer by layer on a GPU; none: it is captured.

        `capture` is what the user chose (--no-capture; --bn-stats sync chooses it, too).
        """
        reasons = [] if capture else ["capture is off"]
        if self.net.debug_info:
            reasons.append("debug_info shows each layer")
        reasons += self._layer_reasons
        if not all(map(is_capturable, (*self.net_callbacks, *self._callbacks))):
            reasons.append("a callback does not say that it can be captured")
        return [*reasons, self._failure] if self._failure else reasons

    def run_data_layers(self) -> None:
        """Run the data layers, and upload what a user wrote on the host."""
        if self._feeding:
            self.net.forward(steps=self._feeding)
        self.net.device.flush()

    @property
    def data_stay(self) -> bool:
        """True if the data layers, once they have run, leave their tops as they are."""
        return all(self.net.layers[step.last].data_stay for step in self._feeding)

    def has_captured(self, name: str, *conditions: Hashable) -> bool:
        """True if a part's next run replays it, under these further conditions."""
        part = self._parts.get(name)
        if part is None or part.graph is None:
            return False
        return part.steady == self._conditions(conditions)

    def run(self, name: str, work: Callable[[], None], *conditions: Hashable) -> None:
        """Run a part, by replay if possible; needs the device's scope. `conditions` are further
        ones under which a capture holds.
        """
        part = self._parts.setdefault(name, _Part())
        now = self._conditions(conditions)
        if part.steady != now or (
            part.graph is None and not self._capture(part, work, conditions, now)
        ):
            if part.graph is not None:
                self._gpu.synchronize()  # it may still run
                part.graph = None
            with self._gpu.overlapping():
                work()
            part.steady = now if self._conditions(conditions) == now else None
            return
        assert part.graph is not None
        self._replayed += 1
        part.graph.replay()

    def _conditions(self, others: Sequence[Hashable]) -> Hashable:
        shapes = (top.shape for top in self._inputs)
        callbacks = map(id, (*self.net_callbacks, *self._callbacks))
        return (self._gpu.allocation_version, *shapes, *callbacks, *others)

    def _capture(
        self, part: _Part, work: Callable[[], None], others: Sequence[Hashable], now: Hashable
    ) -> bool:
        if changes_too_often(self._captured, self._replayed):
            self._failure = "shapes or memory change too often"
            return False
        self._captured += 1
        try:
            part.graph = self._gpu.capture(work)
        except DeviceError as error:
            log.warning("%s layer by layer: %s", self.what, error.message)
            self._failure = error.message
            self._logged.add(error.message)
            return False
        return self._conditions(others) == now

    def forget(self) -> None:
        """Destroy all graphs, even if something else refers to this object."""
        for part in self._parts.values():
            if part.graph is not None:
                part.graph.close()
        self._parts.clear()
