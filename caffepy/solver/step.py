"""TrainingStep: what one iteration computes, in parts that a runner calls in order.

`begin`, then for each pass forward, `accumulate_loss` and backward, then `gradients_ready` (which
averages gradients over solvers) and `update`. `runners.py` has the two ways to do so.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from math import isfinite
from typing import Protocol

import numpy as np

from caffepy import ops
from caffepy.device.blob import Array, Blob
from caffepy.device.device import Device
from caffepy.layer.convolution import Convolution
from caffepy.net import Net
from caffepy.net.gradients import large_products
from caffepy.net.replay import Part, Replay
from caffepy.ops.update_state import Limits
from caffepy.proto.caffe_pb2 import SolverParameter
from caffepy.solver.capture import GraphRunner
from caffepy.solver.divergence import diverged
from caffepy.solver.optimizer import Optimizer
from caffepy.solver.params import Params

WEIGHTS = "weights"
"""The side stream on which large weights are converted."""

LOSS_SCALE = 2.0**16
"""Initial loss scale of nets with float16 blobs."""


class Callback(Protocol):
    """An object called around the gradients of an iteration.

    With `capturable = True` it only enqueues work on the current stream, so that its calls can be
    captured. With `adds_nothing = True` it does not modify gradients. Callbacks of nets may have
    the same attributes.
    """

    def on_start(self) -> object:
        """Called before the forward pass, when the parameters are final."""

    def on_gradients_ready(self) -> object:
        """Called after the backward pass, before the update."""


class SyncCallback(Callback, Protocol):
    """The callback that averages `Params.reduced_diff` over all solvers: a `Synchronizer` of
    `collectives`, which knows no solver, or what `parallel` puts around one.

    `updates` is True if this solver updates its parameters. With `root_updates` that is the root
    alone, and the others get its parameters in `on_start`.
    Without `reduces_early` nothing calls `after_backward`. `abort_flag` is the host address of the
    abort flag, for a GPU; nonzero after the all-reduce means that the averaged gradient is invalid.
    With `has_factors` large weights may be updated by the factors of all solvers, of which there
    are `size`: `update_by_factors` calls the layers' `update`.
    """

    updates: bool
    root_updates: bool
    reduces_early: bool
    has_factors: bool
    abort_flag: int
    size: int

    def after_backward(self, layer: int) -> object:
        """Called after each layer's backward pass, with iter_size 1: reduce what is complete."""

    def update_by_factors(self) -> object:
        """Update the weights of layers that have an `update`, with the sum of all gradients."""


class _LayerHook:
    """The net's callback that tells a synchronizer which layers are done in an iteration."""

    capturable = adds_nothing = touches_nothing = True

    def __init__(self, step: "TrainingStep", synchronizer: SyncCallback) -> None:
        self._step, self._synchronizer = step, synchronizer

    def __call__(self, layer: int) -> None:
        if self._step.begun:  # a script may run the net backward, too
            self._synchronizer.after_backward(layer)


def _touches(callback: object) -> bool:
    """True unless a callback says `touches_nothing = True`: it neither reads nor writes blobs."""
    return not getattr(callback, "touches_nothing", False)


def losses(net: Net) -> list[Blob]:
    """Return the tops with a loss weight, which is in their diff."""
    return [top for node in net.nodes for top in node.losses]


def first_loss_scale(net: Net) -> float | None:
    """Initial loss scale against underflow of float16 gradients; None in a net without float16."""
    if all(blob.layout.dtype != np.float16 for blob in net.blobs.values()):
        return None
    return net.param.global_grad_scale if net.param.HasField("global_grad_scale") else LOSS_SCALE


class TrainingStep:
    """The flat parameters of a net, their history, and the operations of an iteration."""

    def __init__(self, param: SolverParameter, net: Net, device: Device) -> None:
        self.param = param
        self.net = net
        self.device = device
        self.callbacks: list[Callback] = []
        self.synchronizer: SyncCallback | None = None  # one of the callbacks
        self.scripts_look = True  # at blobs and gradients, between iterations
        self.whole = True  # no update is under way
        self.begun = False  # an iteration is under way
        self.capture = True  # a GPU captures iterations; the CPU replays short passes
        self._statistics = [blob for layer in net.layers for blob in layer.statistics]
        with device.scope():
            self.params = Params(net.learnable_params)
            limits = Limits(param.clip_gradients, param.iter_size, first_loss_scale(net))
            self.update_state = ops.backend(device).UpdateState(limits, losses(net), device)
            self.phase_timer = ops.backend(device).PhaseTimer(device)
        self.optimizer = Optimizer(param, self.params, net.learnable, self.update_state, device)
        self._large = large_products(net)
        self._convolutions = [layer for layer in net.layers if isinstance(layer, Convolution)]
        self._added_to = self.params.without(self._large)
        self.fused = device.is_cuda  # on the CPU a command asks for it
        self.graphs = self._new_graphs()
        update = self.optimizer.apply
        self._update_replay = Replay(net, update, lambda: [Part(update, True)])
        self._looked_ahead = False

    def fuse(self, fuse: bool) -> None:
        """Run layers in fused groups, or each by itself; captured graphs are dropped."""
        self.graphs.forget()
        self.fused = fuse
        self.graphs = self._new_graphs()

    def _new_graphs(self) -> GraphRunner:
        return GraphRunner(self.net, self.fused, "The training step runs", self.callbacks)

    def synchronize(self, synchronizer: SyncCallback | None) -> None:
        """Average gradients by this callback from now on; None: no more."""
        before, self.synchronizer = self.synchronizer, synchronizer
        self.phase_timer.running = synchronizer is not None
        if before:
            self.callbacks[:] = [callback for callback in self.callbacks if callback is not before]
            self.fuse(self.fused)  # to drop graphs that captured its calls
        hooks = self.net.after_backward
        hooks[:] = [hook for hook in hooks if not isinstance(hook, _LayerHook)]
        if synchronizer:
            self.callbacks.append(synchronizer)
            if self.param.iter_size == 1 and synchronizer.reduces_early:
                hooks.append(_LayerHook(self, synchronizer))

    def compile_ahead(self) -> None:
        """Begin to read data and to compile kernels, many at a time, on a GPU before the first
        iteration.
        """
        if self.device.is_cuda and not self._looked_ahead:
            self._looked_ahead = True
            for node in self.net.own_nodes.values():
                node.layer.read_ahead()
            with self.overwrite_gradients(update=self.lets_layers_update):
                self.net.compile_ahead(self.graphs.eager_steps)
            with self.device.scope(), ops.backend(self.device).compile_ahead():
                self.optimizer.apply()

    @property
    def _others(self) -> list[Callback]:
        """The callbacks but the synchronizer."""
        return [callback for callback in self.callbacks if callback is not self.synchronizer]

    @property
    def gradients_untouched(self) -> bool:
        """True if no callback or Python layer can modify gradients during a step."""
        others = self._others
        called = (*others, *self.graphs.net_callbacks)
        return not any(layer.may_modify_gradients for layer in self.net.layers) and all(
            getattr(callback, "adds_nothing", False) for callback in called
        )

    @property
    def checks_early(self) -> bool:
        """True if the loss check can overlap backward: no clipping, no loss scale, no callbacks."""
        return self.param.iter_size == 1 and not (self.update_state.needs_norm or self.callbacks)

    @property
    def updates_by_factors(self) -> bool:
        """True if layers can update their weights by the factors of all solvers, after the loss
        check and the all-reduce: no clipping, no loss scale, no other callbacks.
        """
        if self.synchronizer is None or not self.synchronizer.has_factors:
            return False
        return self.param.iter_size == 1 and not (self.update_state.needs_norm or self._others)

    @property
    def lets_layers_update(self) -> bool:
        """True if layers can update large weights in a captured iteration."""
        return self.checks_early or self.updates_by_factors

    def overwrite_gradients(self, update: bool = False) -> AbstractContextManager[None]:
        """Make layers overwrite (beta = 0) large gradients instead of adding, with iter_size 1.

        With `update`, those that can update their weights at once, so that `Optimizer.apply` leaves
        them out, if nobody can look at gradients: `check_and_scale` must come before backward, or
        with a synchronizer before it updates by factors.
        """
        return self._overwriting(update) if self._large else nullcontext()

    @contextmanager
    def _overwriting(self, update: bool) -> Iterator[None]:
        try:
            self._set_overwrites(self.param.iter_size == 1 and self.gradients_untouched)
            touched = any(map(_touches, self.graphs.net_callbacks))
            seen = touched or self.param.snapshot_diff or self.scripts_look
            if update and self.overwrites and not seen:
                self._let_layers_update()
            yield
            self.whole = self.whole or bool(self.optimizer.updated)
        except BaseException:
            with suppress(Exception):  # of a device that failed, say
                for layer in self._large.values():
                    if layer.overwrites:  # the diff may hold an update: no gradient
                        layer.blobs[0].diff.fill(0)
            raise
        finally:
            self._set_overwrites(False)
            for number in self.optimizer.updated:
                self._large[number].update = None
            self.optimizer.updated = []

    @contextmanager
    def narrowed_ahead(self) -> Iterator[None]:
        """Context of a forward pass beside which large weights and those of convolutions are
        converted to the type in which they are multiplied.
        """
        arranged = []
        try:
            with self.device.side_stream(WEIGHTS):
                touched = any(map(_touches, self.net.before_forward))
                for convolution in () if touched else self._convolutions:
                    if convolution.conv.arrange_ahead(convolution.blobs[0].data):
                        arranged.append(convolution)
                for layer in self._large.values():
                    layer.narrow_ahead(WEIGHTS)
            yield
            if arranged:
                self.device.wait_stream(WEIGHTS)
        finally:
            for convolution in arranged:
                convolution.conv.end_ahead()
            for layer in self._large.values():
                layer.narrowed_on = ""

    def _let_layers_update(self) -> None:
        size = self.synchronizer.size if self.synchronizer else 1
        for number, layer in sorted(self._large.items()):
            with_others = layer.factors is not None
            if with_others == (size > 1) and layer.fuses_update(size * layer.rows):
                layer.update = partial(self._update_with_product, number)
                self.optimizer.updated.append(number)
        self.whole = self.synchronizer is not None or not self.optimizer.updated

    def _update_with_product(self, number: int, a: Array, b: Array) -> None:
        """Update the parameter of this number, (R, C), with the gradient a.T @ b; with a
        synchronizer that is the sum over all solvers.
        """
        self.device.wait_stream("control")
        summed = self.synchronizer is not None and self.synchronizer.size > 1
        self.optimizer.apply_with_product(number, a, b, summed)

    @property
    def overwrites(self) -> bool:
        """True if layers overwrite large gradients now."""
        return any(layer.overwrites for layer in self._large.values())

    def _set_overwrites(self, overwrites: bool) -> None:
        for layer in self._large.values():
            layer.overwrites = overwrites

    def set_hyperparams(self, learning_rate: float, iteration: int, ahead: int = 0) -> None:
        """Upload learning rate, weight decay and bias correction for the next update, or on a GPU
        for the one `ahead` updates after it.
        """
        correction = self.optimizer.rule.correction(self.param, iteration)
        decay = self.param.weight_decay
        self.update_state.set_hyperparams(learning_rate, decay, correction, ahead)

    def begin(self) -> None:
        """Zero gradients and loss; save the layers' running statistics; call `on_start`."""
        self.begun = True
        self.update_state.begin(self.cleared)
        self.save_stats()
        pulls = self.pulls
        if pulls:
            self.phase_timer.mark("update")
            if self._updates:
                self.update_state.pack_scale(self.params.scale_slot)
        for callback in self.callbacks:
            callback.on_start()
        if pulls:
            if not self._updates:
                self.update_state.unpack_scale(self.params.scale_slot)
                # The root's came with its parameters.
                self.update_state.restore_stats(self._statistics)
            self.phase_timer.mark("synchronization")

    @property
    def cleared(self) -> Sequence[Array]:
        """The gradients that are zeroed before a pass adds to them."""
        return self._added_to if self.overwrites else [self.params.diff]

    def save_stats(self) -> None:
        """Save the layers' running statistics for `restore_stats`."""
        self.update_state.save_stats(self._statistics)

    def pull(self) -> None:
        """Get parameters by the synchronizer; the running statistics stay this solver's own."""
        if self.synchronizer:
            self.update_state.save_stats(self._statistics)
            self.synchronizer.on_start()
            self.update_state.restore_stats(self._statistics)

    def accumulate_loss(self) -> None:
        """Add the loss of a forward pass."""
        self.update_state.accumulate_loss()
        if self.synchronizer:
            self.update_state.pack_metrics(self.params.metrics)

    def check_loss(self, iteration: int) -> float:
        """Return the loss of the last pass; DivergenceError if it is not finite."""
        loss = self.update_state.loss()
        if not isfinite(loss):
            raise diverged(self.net, self.graphs.eager_steps, iteration, loss)
        return loss

    def gradients_ready(self) -> None:
        """Call `on_gradients_ready`, in which the synchronizer averages gradients and loss."""
        self.device.wait_stream("control")
        for callback in self.callbacks:
            callback.on_gradients_ready()
        self.phase_timer.mark("synchronization")

    @property
    def pulls(self) -> bool:
        """True if parameters come from the root in `on_start`, or go from here."""
        return self.synchronizer is not None and self.synchronizer.root_updates

    @property
    def _updates(self) -> bool:
        return self.synchronizer is None or self.synchronizer.updates

    def update(self, averaged: bool = False) -> None:
        """Clip, normalize, regularize and update with the current gradients; `averaged` after
        `gradients_ready`.
        """
        if averaged and self.synchronizer and self._updates:
            averages = self.params.metrics, self.synchronizer.abort_flag
            self.update_state.check_and_scale(self.params.diff, *averages)
        else:
            self.update_state.check_and_scale(self.params.diff)
        if self._updates:
            self.whole = False
            by_factors = self.synchronizer if self.optimizer.updated else None
            with self.device.side_stream() if by_factors else nullcontext():
                if self.capture and not self.device.is_cuda:
                    self._update_replay.run(self.optimizer.rule.numbers(self.param))
                else:
                    self.optimizer.apply()
            if by_factors:
                self.optimizer.divide_sums(by_factors.size)
                by_factors.update_by_factors()
                self.device.wait_stream()
            self.whole = True
        self.begun = False
        self.phase_timer.mark("update")

    def restore_stats(self) -> None:
        """Restore the running statistics saved before a failed iteration."""
        if self._statistics:
            self.update_state.restore_stats(self._statistics)
        self.begun = False
