"""Display: the smoothed loss and the speed that a solver displays every `display` iterations."""

import logging
import time
from math import isclose
from typing import Any

from caffepy.core.events import Displayed, Output, Reporter
from caffepy.net import Net
from caffepy.ops.update_state import StepResult, StepStatus
from caffepy.proto.caffe_pb2 import SolverParameter
from caffepy.solver.divergence import HINT

log = logging.getLogger(__name__)

SATURATED = 87.3365
"""-log of the smallest float32, the largest loss that SoftmaxWithLoss computes."""


class LossWindow:
    """Caffe's mean of the last `size` losses; `start` is the iteration of the first."""

    def __init__(self, size: int, start: int) -> None:
        self.size = size
        self.start = start
        self.losses: list[float] = []
        self.smoothed = 0.0

    def add(self, iteration: int, loss: float) -> None:
        """Add the loss of an iteration; it replaces the oldest of `size`."""
        count = len(self.losses) + 1
        if count <= self.size:
            self.losses.append(loss)
            self.smoothed = (self.smoothed * (count - 1) + loss) / count
        else:
            slot = (iteration - self.start) % self.size
            self.smoothed += (loss - self.losses[slot]) / self.size
            self.losses[slot] = loss

    def state(self) -> dict[str, Any]:
        """Return what `of` needs to rebuild this window."""
        return {"start": self.start, "losses": list(self.losses), "smoothed": self.smoothed}

    @classmethod
    def of(cls, size: int, state: dict[str, Any]) -> "LossWindow":
        """Return the window of this state; an empty one if its size was another."""
        window = cls(size, int(state["start"]))
        if len(state["losses"]) <= size:
            window.losses = [float(loss) for loss in state["losses"]]
            window.smoothed = float(state["smoothed"])
        return window


class Display:
    """The loss window of a run, and when it was displayed last."""

    def __init__(self, param: SolverParameter, net: Net) -> None:
        self._param = param
        self._net = net
        self._weights = net.blob_loss_weights
        self.window = LossWindow(param.average_loss, 0)
        self._restored = False  # the next step continues the window
        self._last: tuple[int, float] | None = None  # iteration and time of the last display
        self._outputs: list[Output] | None = None  # copied before the update of this iteration
        self._explained = False

    def begin(self, iteration: int) -> None:
        """Start a new loss window, unless it was restored from a snapshot."""
        if not self._restored:
            self.window = LossWindow(self._param.average_loss, iteration)
        self._restored, self._outputs = False, None
        self._last = self._last or (iteration, time.monotonic())

    @property
    def loss(self) -> float | None:
        """The smoothed loss; None while none is known."""
        return self.window.smoothed if self.window.losses else None

    def copy_outputs(self) -> None:
        """Copy the outputs for `show`; a top may be a parameter, which the update changes."""
        net, weights = self._net, self._weights
        self._outputs = [(o, net.blobs[o].host_data.copy(), weights[o]) for o in net.outputs]

    def show(self, iteration: int, reporter: Reporter) -> None:
        """Report loss, outputs and speed."""
        assert self._last
        (last, since), now = self._last, time.monotonic()
        self._last = iteration, now
        if self._outputs is None:
            self.copy_outputs()
        outputs, self._outputs, loss = self._outputs or [], None, self.window.smoothed
        seconds = now - since
        speed = (iteration - last) / max(seconds, 1e-9)
        every = self._param.display
        reporter.displayed(Displayed(iteration, loss, outputs, speed, seconds, every))
        if isclose(loss, SATURATED, abs_tol=1e-3) and not self._explained:
            self._explained = True
            log.warning(
                "A loss of 87.3365 means probability 0 for every label: the scores overflowed; %s",
                HINT,
            )

    def log_clipping(self, result: StepResult) -> None:
        """Log Caffe's line if the gradients were clipped."""
        if result.factor != 1.0:
            log.info(
                "Gradient clipping: scaling down gradients (L2 norm %.6g > %.6g) by scale factor "
                "%.6g",
                *(result.norm, self._param.clip_gradients, result.factor),
            )

    @staticmethod
    def log_overflow(iteration: int, result: StepResult) -> None:
        """Log a skipped update."""
        if result.status is StepStatus.SKIPPED:
            text = "Iteration %d: gradients overflow, no update; loss scale = %g"
            log.info(text, iteration, result.loss_scale)

    def state(self, iteration: int) -> dict[str, Any]:
        """Return what a sidecar keeps."""
        last, since = self._last or (iteration, time.monotonic())
        return {"window": self.window.state(), "displayed": [last, time.monotonic() - since]}

    def restore(self, content: dict[str, Any]) -> None:
        """Continue from a sidecar, or change nothing if it is damaged."""
        window = LossWindow.of(self._param.average_loss, content["window"])
        last, seconds = content["displayed"]
        self._last = int(last), time.monotonic() - float(seconds)
        self.window, self._restored = window, True

    def reset(self) -> None:
        """Start anew, as for a snapshot without a sidecar."""
        self._last, self._restored = None, False
