"""The learning-rate policy "plateau" of SSD, NVCaffe and Intel Caffe: a step when the loss has not
fallen for a while.
"""

import logging
from math import inf
from typing import Any, NamedTuple

from caffepy.proto.caffe_pb2 import SolverParameter
from caffepy.solver.display import LossWindow

log = logging.getLogger(__name__)


class Event(NamedTuple):
    """The smallest smoothed loss so far, and the iteration of the last event: of such a loss, or of
    a step.
    """

    minimum: float = inf
    iteration: int = 0


class Plateau:
    """The smoothed loss (of average_loss iterations) of a solver, and the last event.

    An update knows the losses of the iterations before it, where the forks know that of its own,
    too; it makes a difference only if a new minimum comes in the very iteration of a step.
    """

    def __init__(self, param: SolverParameter) -> None:
        self._param = param
        self._window = LossWindow(param.average_loss, 0)
        self._last = -1
        self.event = Event()

    @property
    def used(self) -> bool:
        """True if the solver has this policy."""
        return self._param.lr_policy == "plateau"

    def add(self, iteration: int, loss: float) -> None:
        """Add the loss of an iteration."""
        self._window.add(iteration, loss)
        self._last = iteration

    def step(self, iteration: int, step: int) -> int:
        """Return the step of an iteration, which plateau_winsize[step] iterations after the last
        event is the next one.
        """
        if self._window.losses and self._window.smoothed < self.event.minimum:
            self.event = Event(self._window.smoothed, self._last)
        sizes = self._param.plateau_winsize
        if step < len(sizes) and iteration >= self.event.iteration + sizes[step]:
            step += 1
            self.event = self.event._replace(iteration=iteration)
            log.info("Plateau Status: Iteration %d, step = %d", iteration, step)
        return step

    def state(self) -> dict[str, Any]:
        """Return what a sidecar keeps."""
        return {"window": self._window.state(), "last": self._last, "event": list(self.event)}

    def restore(self, state: dict[str, Any], iteration: int) -> None:
        """Continue from a sidecar's state; from an empty one as if the present loss were the
        smallest.
        """
        self._window = LossWindow(self._param.average_loss, 0)
        self._last, self.event = iteration - 1, Event(inf, iteration)
        if state:
            minimum, at = state["event"]
            self._window = LossWindow.of(self._param.average_loss, state["window"])
            self._last, self.event = int(state["last"]), Event(float(minimum), int(at))
