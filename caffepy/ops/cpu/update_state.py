"""What decides on an update of parameters, and the sums of what a test net gives."""

from collections.abc import Sequence
from math import sqrt

import numpy as np

from caffepy.device.blob import Array, Blob
from caffepy.device.device import Device
from caffepy.ops.cpu.elementwise import dot
from caffepy.ops.segments import Number
from caffepy.ops.update_state import Limits, StepResult, StepStatus


class UpdateState:
    """The numbers of an update: `rate`, `decay` and `correction` as said, `scale` of the gradients
    and `go` as judged, and `loss_scale`, by which the gradients are too large until they are
    judged.

    In an iteration `say` comes first, then `open`, `note` after each forward pass, `judge` after
    the last backward pass, then the update.
    """

    def __init__(self, limits: Limits, losses: Sequence[Blob], device: Device) -> None:
        self._limits = limits
        self._losses = losses
        self.rate: Number = 0.0
        self.decay: Number = 0.0
        self.correction: Number = 0.0
        self.scale: Number = 1.0
        self.go: Number = 1.0
        self.loss_scale: Number = 1.0
        self._total = self._last = 0.0
        self._verdicts: list[StepResult] = []
        self._kept: list[Array] = []

    def say(self, rate: float, decay: float, correction: float) -> None:
        """The learning rate, the weight decay and the rule's own number for the next update."""
        self.rate, self.decay, self.correction = rate, decay, correction

    def open(self, diffs: Sequence[Array]) -> None:
        """Begin to add up gradients, in these arrays, and losses."""
        for diff in diffs:
            diff.fill(0)
        self._total = 0.0

    def keep(self, blobs: Sequence[Blob]) -> None:
        """Keep the values of these blobs for `restore_stats`."""
        self._kept = [blob.data.copy() for blob in blobs]

    def restore_stats(self, blobs: Sequence[Blob]) -> None:
        """Give these blobs the values that were kept."""
        for blob, kept in zip(blobs, self._kept, strict=True):
            blob.data[...] = kept

    def note(self) -> None:
        """Add the loss of a forward pass: the sum of data times diff over the losses."""
        self._last = float(
            sum(np.dot(blob.data.reshape(-1), blob.diff.reshape(-1)) for blob in self._losses)
        )
        self._total += self._last

    def tell(self, notes: Array) -> None:
        """Put into the notes what is to be averaged over solvers."""
        notes[0] = self._total

    def hear(self, notes: Array, given_up: int = 0) -> None:
        """Go on with what came back."""
        self._total = float(notes[0])

    def pack_scale(self, told: Array) -> None:
        """Nothing: float32 needs no loss scale."""

    def unpack_scale(self, told: Array) -> None:
        """Nothing: float32 needs no loss scale."""

    def loss(self) -> float:
        """The loss of the last pass."""
        return self._last

    def mean(self) -> float:
        """The mean loss of the iteration's passes, over all solvers if it was heard of."""
        return self._total / self._limits.passes

    def check_and_scale(self, diff: Array) -> None:
        """Decide what the gradients are multiplied by."""
        norm, factor = 0.0, 1.0
        if self._limits.clip >= 0:
            norm = sqrt(dot(diff, diff))
            factor = 1.0 if norm <= self._limits.clip else self._limits.clip / norm
        self.scale = factor / self._limits.passes
        self._verdicts.append(
            StepResult(self._total / self._limits.passes, norm, factor, 1.0, StepStatus.DONE)
        )

    def given(self) -> None:
        """The operations of an iteration, `judge` among them, were given to the device."""

    def step_results(self, wait: bool) -> list[StepResult]:
        """The step_results that were not returned yet, in order: all, or without `wait` those known by
        now.
        """
        step_results, self._verdicts = self._verdicts, []
        return step_results

    def resync(self) -> None:
        """Forget what was given before an interruption, which may have hit in between."""
        self._verdicts.clear()

    def go_on(self) -> None:
        """Update again after an iteration that was STOPPED."""

    def state(self) -> dict[str, float]:
        """What must be kept so that a resumed run goes on exactly."""
        return {}

    def set_state(self, state: dict[str, float]) -> None:
        """Take up a state that `state` gave."""


class Sums:
    """The sums of the data of blobs, and of a net's losses, over passes."""

    def __init__(self, blobs: Sequence[Blob], losses: Sequence[Blob], device: Device) -> None:
        self._blobs = blobs
        self._losses = losses
        self.clear()

    def clear(self) -> None:
        """Begin anew, for blobs of the shapes that they have now."""
        self._sums = [np.zeros(blob.shape) for blob in self._blobs]
        self._loss = 0.0

    def add(self) -> None:
        """Add the values of a pass."""
        for total, blob in zip(self._sums, self._blobs, strict=True):
            total += blob.data
        self._loss += float(
            sum(np.dot(blob.data.reshape(-1), blob.diff.reshape(-1)) for blob in self._losses)
        )

    def read(self) -> tuple[list[Array], float]:
        """The sums, in double precision, and that of the losses."""
        return self._sums, self._loss
