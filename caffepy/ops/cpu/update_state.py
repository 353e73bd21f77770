"""UpdateState: loss, clipping and hyperparameters of an update. Sums: totals of a test."""

from collections.abc import Sequence
from math import sqrt

import numpy as np

from caffepy.device.blob import Array, Blob
from caffepy.device.device import Device
from caffepy.ops import objects
from caffepy.ops.cpu.elementwise import dot
from caffepy.ops.update_state import Limits, StepResult, StepStatus


def _loss(losses: Sequence[Blob]) -> float:
    if len(losses) == 1 and losses[0].count == 1 and losses[0].diff.item() == 1:
        return float(losses[0].data.item())
    return float(sum(np.dot(b.data.reshape(-1), b.diff.reshape(-1)) for b in losses))


class UpdateState(objects.UpdateState):
    def __init__(self, limits: Limits, losses: Sequence[Blob], device: Device) -> None:
        self._limits, self._losses = limits, losses
        self.rate, self.decay, self.correction, self.scale = (np.zeros(()) for _ in range(4))
        self.go = self.loss_scale = 1.0
        self._total = self._last = 0.0
        self._results: list[StepResult] = []
        self._saved: list[Array] = []

    def set_hyperparams(self, rate: float, decay: float, correction: float) -> None:
        self.rate[()], self.decay[()], self.correction[()] = rate, decay, correction

    def begin(self, diffs: Sequence[Array]) -> None:
        for diff in diffs:
            diff.fill(0)
        self._total = 0.0

    def save_stats(self, blobs: Sequence[Blob]) -> None:
        self._saved = [blob.data.copy() for blob in blobs]

    def restore_stats(self, blobs: Sequence[Blob]) -> None:
        for blob, kept in zip(blobs, self._saved, strict=True):
            blob.data[...] = kept

    def accumulate_loss(self) -> None:
        self._last = _loss(self._losses)
        self._total += self._last

    def pack_metrics(self, metrics: Array) -> None:
        metrics[0] = self._total

    def unpack_metrics(self, metrics: Array, abort_flag: int = 0) -> None:
        self._total = float(metrics[0])

    def loss(self) -> float:
        return self._last

    def mean(self) -> float:
        return self._total / self._limits.passes

    @property
    def needs_norm(self) -> bool:
        return self._limits.clip >= 0

    def check_and_scale(self, diff: Array) -> None:
        norm, factor = 0.0, 1.0
        if self.needs_norm:
            norm = sqrt(dot(diff, diff))
            factor = 1.0 if norm <= self._limits.clip else self._limits.clip / norm
        self.scale[()] = factor / self._limits.passes
        self._results.append(
            StepResult(self._total / self._limits.passes, norm, factor, 1.0, StepStatus.DONE)
        )

    def step_results(self, wait: bool) -> list[StepResult]:
        step_results, self._results = self._results, []
        return step_results

    @property
    def done(self) -> int:
        return 0

    def resync(self) -> None:
        self._results.clear()

    def state(self) -> dict[str, float]:
        return {}


class Sums:
    def __init__(self, blobs: Sequence[Blob], losses: Sequence[Blob], device: Device) -> None:
        self._blobs, self._losses = blobs, losses
        self.clear()

    def clear(self) -> None:
        self._sums = [np.zeros(blob.shape) for blob in self._blobs]
        self._loss = 0.0

    def add(self) -> None:
        for total, blob in zip(self._sums, self._blobs, strict=True):
            total += blob.data
        self._loss += _loss(self._losses)

    def read(self) -> tuple[list[Array], float]:
        return self._sums, self._loss
