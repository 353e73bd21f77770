"""Probe of a solver's parameters while it trains, and of their gradients before the update."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from caffepy.device.blob import Array
from caffepy.layer.convolution import Convolution
from caffepy.solver.solver import Solver


class Seen(NamedTuple):
    """A parameter, named LAYER/INDEX, as numpy arrays; `gradient` is None if it is not kept."""

    name: str
    values: Array
    gradient: Array | None


class Watch:
    """A solver's parameters, and their gradients every `every` iterations, never if that is 0.

    Its callback copies the gradients when they are averaged over all solvers, before clipping,
    regularization and update; on a GPU in every iteration, so that the copy can be captured. Read
    it after an iteration, in the solver's thread.
    """

    capturable = adds_nothing = True

    def __init__(self, solver: Solver, every: int) -> None:
        self._solver = solver
        self._every = every
        self._kept: Array | None = None
        if every:
            with solver.device.scope():
                self._kept = solver.params.diff.copy()
                self._scale = solver.device.on_device(np.ones((), np.float64))
            solver.add_callback(self)

    def on_start(self) -> None:
        """Do nothing."""

    def on_gradients_ready(self) -> None:
        """Copy the gradients."""
        solver = self._solver
        if solver.device.is_cuda or solver.iter % self._every == 0:
            assert self._kept is not None
            solver.net.ops.copy(solver.params.diff, self._kept)
            if solver.device.is_cuda:
                scale: Any = solver.update_state.loss_scale  # an array on a GPU
                solver.net.ops.copy(scale, self._scale)

    def parameters(self) -> Iterator[Seen]:
        """Yield the parameters after the last iteration, and its gradients, the mean of passes."""
        solver, net = self._solver, self._solver.net
        split, on_host = solver.params.split, solver.device.on_host
        values = split(on_host(solver.params.data))
        gradients = [] if self._kept is None else split(on_host(self._kept))
        scale = 1.0 if self._kept is None else float(on_host(self._scale)) * solver.param.iter_size
        for i, param in enumerate(net.learnable):
            learns = gradients and param.spec.lr_mult
            gradient = gradients[i] / np.float32(scale) if learns else None
            yield Seen(f"{net.nodes[param.layer].name}/{param.index}", values[i], gradient)

    def filters(self) -> tuple[str, Array] | None:
        """Return name and weights (outputs, channels, height, width) of the first convolution."""
        net = self._solver.net
        for name, layer in zip(net.layer_names, net.layers, strict=True):
            if isinstance(layer, Convolution) and len(layer.blobs[0].shape) == 4:
                return name, self._solver.device.on_host(layer.blobs[0].data)
        return None
