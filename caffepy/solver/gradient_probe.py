"""A look at the parameters of a solver while it trains, and at their gradients as they were before
an update.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from caffepy.device.blob import Array
from caffepy.layer.convolution import Convolution
from caffepy.solver.solver import Solver


class Seen(NamedTuple):
    """A parameter, called LAYER/INDEX, as numpy's arrays; without `gradient` if it learns nothing
    or none is kept.
    """

    name: str
    values: Array
    gradient: Array | None


class Watch:
    """A solver's parameters, and the gradients of its iterations that are multiples of `every`,
    none if that is 0.

    Its callback copies the gradients when those of all solvers are averaged, before they are
    clipped, regularized and turned into an update. On a GPU it does so in each iteration, so that
    this can be recorded. Ask after an iteration, in the solver's thread.
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
        """Nothing."""

    def on_gradients_ready(self) -> None:
        """Keep the gradients."""
        solver = self._solver
        if solver.device.is_cuda or solver.iter % self._every == 0:
            assert self._kept is not None
            solver.ops.copy(solver.params.diff, self._kept)
            if solver.device.is_cuda:
                scale: Any = solver.update_state.loss_scale  # an array on a GPU
                solver.ops.copy(scale, self._scale)

    def parameters(self) -> Iterator[Seen]:
        """The parameters as the last iteration left them, with the gradients that it had: the mean
        of its passes.
        """
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
        """The name of the first convolution of images, and its weights (outputs, channels, height,
        width).
        """
        net = self._solver.net
        for name, layer in zip(net.layer_names, net.layers, strict=True):
            if isinstance(layer, Convolution) and len(layer.blobs[0].shape) == 4:
                return name, self._solver.device.on_host(layer.blobs[0].data)
        return None
