"""What an iteration computes: passes over the train net that add up gradients, then an update of
the parameters.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Protocol

import numpy as np

from caffepy import ops
from caffepy.device.blob import Array, Blob
from caffepy.device.device import Device
from caffepy.net import Net
from caffepy.net.gradients import large_products
from caffepy.ops.segments import Segments
from caffepy.ops.update_state import Limits
from caffepy.proto.caffe_pb2 import SolverParameter
from caffepy.solver.capture import GraphRunner
from caffepy.solver.params import Params
from caffepy.solver.update import Update, rules

LOSS_SCALE = 2.0**16
"""What float16 gradients begin with."""


class Callback(Protocol):
    """Somebody who is called around the gradients of an iteration.

    One that says `capturable = True` does nothing but give work to the current stream: its calls
    can be recorded. One that says `adds_nothing = True` leaves gradients as they are. Callbacks of
    nets may say the same.
    """

    def on_start(self) -> object:
        """Before the forward pass: parameters are in step."""

    def on_gradients_ready(self) -> object:
        """After the backward pass, before the update."""


class Synchronizer(Callback, Protocol):
    """A callback that keeps solvers in step: it makes `Params.reduced_diff` the mean over all."""

    @property
    def updates(self) -> bool:
        """Whether this solver updates its parameters; else it gets the root's in `on_start`."""

    @property
    def abort_flag(self) -> int:
        """On a GPU the host's address of an int; if it is not 0 after the gradients, they may be no
        mean of all.
        """

    def after_backward(self, layer: int) -> object:
        """The gradients to which this layer adds may be final, in an iteration of one pass."""


def losses(net: Net) -> list[Blob]:
    """The tops with a loss weight, which is in their diff."""
    return [
        top
        for node in net.nodes
        for top, weight in zip(node.tops, node.layer.loss_weights, strict=True)
        if weight
    ]


def first_loss_scale(net: Net) -> float | None:
    """What losses are multiplied by so that small gradients do not vanish in float16; None in a net
    without any.
    """
    if all(blob.layout.dtype != np.float16 for blob in net.blobs.values()):
        return None
    return net.param.global_grad_scale if net.param.HasField("global_grad_scale") else LOSS_SCALE


class Step:
    """The flat parameters of a net, their history, and the operations of an iteration.

    One that is looked at goes `say`, `open`, forward, `note`, backward, `gradients_ready`,
    `update`; `perform` does all of that without looking, by replay where it can.
    """

    def __init__(
        self, param: SolverParameter, net: Net, device: Device, callbacks: Sequence[Callback]
    ) -> None:
        self.param = param
        self.net = net
        self.device = device
        self.callbacks = callbacks
        self.whole = True  # no update is under way
        self.begun = False  # an iteration is under way
        self._statistics = [blob for layer in net.layers for blob in layer.statistics]
        self.synchronizer: Synchronizer | None = None  # one of the callbacks
        self.pulls = False  # it brings parameters in `on_start`
        self.ops = ops.backend(device)
        self.rule = rules[param.type]
        with device.scope():
            self.params = Params(net.learnable_params)
            self.history: list[Array] = [
                np.zeros_like(self.params.data) for _ in range(self.rule.histories)
            ]
            limits = Limits(param.clip_gradients, param.iter_size, first_loss_scale(net))
            self.update_state = self.ops.UpdateState(limits, losses(net), device)
            self.phase_timer = self.ops.PhaseTimer(device)
        self._ends = device.on_device(self.params.ends)
        still = [0.0]  # of the one element that `params` has if the net learns nothing
        self._rates = device.on_device(
            np.array([param.spec.lr_mult for param in net.learnable] or still, np.float32)
        )
        self._decays = device.on_device(
            np.array([param.spec.decay_mult for param in net.learnable] or still, np.float32)
        )
        self._large = large_products(net)
        self._added_to = self.params.without(self._large)
        self._layers_keep_gradients = not any(layer.may_modify_gradients for layer in net.layers)
        self.run = self._new_pass(True)

    def fuse(self, fuse: bool) -> None:
        """Let a GPU compute layers together where it can, or not; recordings go."""
        self.run.forget()
        self.run = self._new_pass(fuse)

    def _new_pass(self, fuse: bool) -> GraphRunner:
        return GraphRunner(
            self.net,
            fuse and self.device.is_cuda,
            "The training step runs",
            self.callbacks,
        )

    @property
    def gradients_untouched(self) -> bool:
        """Whether nobody is called within iterations who may add to gradients."""
        called = [
            *(one for one in self.callbacks if one is not self.synchronizer),
            *self.run.net_callbacks,
        ]
        return self._layers_keep_gradients and all(
            getattr(callback, "adds_nothing", False) for callback in called
        )

    @contextmanager
    def overwriting(self) -> Iterator[None]:
        """A block for an iteration: in one of one pass large gradients need not be cleared and
        added to.
        """
        try:
            self._set_overwriting(self.param.iter_size == 1 and self.gradients_untouched)
            yield
        except BaseException:
            with suppress(Exception):  # of a device that failed, say
                self._clear_what_is_written()
            raise
        finally:
            self._set_overwriting(False)

    def _clear_what_is_written(self) -> None:
        """Let no update stand where others that look after an error expect a gradient."""
        if self._overwrites:
            for layer in self._large.values():
                layer.blobs[0].diff.fill(0)

    @property
    def _overwrites(self) -> bool:
        return any(layer.overwrites for layer in self._large.values())

    def _set_overwriting(self, yes: bool) -> None:
        for layer in self._large.values():
            layer.overwrites = yes

    def set_hyperparams(self, learning_rate: float, iteration: int) -> None:
        """What the next update needs to know."""
        self.update_state.set_hyperparams(
            learning_rate, self.param.weight_decay, self.rule.correction(self.param, iteration)
        )

    def begin(self) -> None:
        """Begin to add up gradients and losses."""
        self.begun = True
        self.update_state.begin(self._added_to if self._overwrites else [self.params.diff])
        self.update_state.save_stats(self._statistics)
        if self.pulls:
            self.phase_timer.mark("update")
            if self._updates:
                self.update_state.pack_scale(self.params.scale_slot)
        for callback in self.callbacks:
            callback.on_start()
        if self.pulls:
            if not self._updates:
                self.update_state.unpack_scale(self.params.scale_slot)
            self.phase_timer.mark("synchronization")

    def accumulate_loss(self) -> None:
        """Take in the loss of a forward pass."""
        self.update_state.accumulate_loss()
        if self.synchronizer:
            self.update_state.pack_metrics(self.params.metrics)

    def gradients_ready(self) -> None:
        """Let callbacks have the gradients."""
        for callback in self.callbacks:
            callback.on_gradients_ready()
        if self._updates and self.synchronizer:
            self.update_state.unpack_metrics(self.params.metrics, self.synchronizer.abort_flag)
        self.phase_timer.mark("synchronization")

    @property
    def _updates(self) -> bool:
        return self.synchronizer is None or self.synchronizer.updates

    def update(self) -> None:
        """Clip, normalise, regularise and update with the gradients at hand."""
        self.update_state.check_and_scale(self.params.diff)
        if self._updates:
            self.whole = False
            self._apply()
            self.whole = True
        self.begun = False
        self.phase_timer.mark("update")

    def restore_stats(self) -> None:
        """Undo what an iteration that came to nothing did to the statistics of layers."""
        if self._statistics:
            self.update_state.restore_stats(self._statistics)
        self.begun = False

    def _apply(self) -> None:
        update_state, param = self.update_state, self.param
        segments = Segments(
            self._ends,
            self._rates,
            self._decays,
            update_state.scale,
            param.regularization_type == "L1",
            update_state.rate,
            update_state.decay,
            update_state.go,
        )
        update = Update(
            param,
            self.params.data,
            self.params.diff,
            self.history,
            segments,
            update_state.correction,
        )
        self.rule.apply(self.ops, update)

    def perform(self) -> None:
        """A whole iteration; its parts are recorded when they can be, then replayed."""
        if self.param.iter_size == 1:
            self._feed()
            self._perform("iteration", self._iteration)
        else:
            self.begun = True
            self._perform("open", self._open)
            for _ in range(self.param.iter_size):
                self._feed()
                self._perform("pass", self._fed_pass)
            self._perform("close", self._close)
        self.begun = False

    def _feed(self) -> None:
        with self.phase_timer.fetching():
            self.run.feed()

    def _perform(self, name: str, work: Callable[[], None]) -> None:
        with self.phase_timer.issuing():
            self.run.perform(name, work)

    def _iteration(self) -> None:
        with self.overwriting():
            self._open()
            self._pass()
            self._close()

    def _open(self) -> None:
        self.phase_timer.begin()
        self.begin()

    def _fed_pass(self) -> None:
        self.phase_timer.begin()
        self._pass()

    def _pass(self) -> None:
        self.net.forward(steps=self.run.computing)
        with nullcontext() if self.synchronizer else self.device.side_stream("control"):
            self.accumulate_loss()
            if self._checks_early:
                self.update_state.check_and_scale(self.params.diff)
        self.phase_timer.mark("forward")
        self.net.backward(steps=self.run.computing)
        self.phase_timer.mark("backward")

    @property
    def _checks_early(self) -> bool:
        """Whether an iteration can be judged beside its backward pass."""
        return self.param.iter_size == 1 and not self.update_state.needs_norm and not self.callbacks

    def _close(self) -> None:
        self.gradients_ready()
        self.device.wait_stream("control")
        if self._checks_early:
            self._apply()
        else:
            self.update()
