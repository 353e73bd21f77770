"""UpdateState: loss, clipping and hyperparameters of an update. Sums: totals of a test."""

from collections.abc import Callable, Sequence
from functools import partial
from math import sqrt

import numpy as np

from caffepy.device.blob import Array, Blob
from caffepy.device.device import Device
from caffepy.device.recording import call, recorder
from caffepy.ops import objects
from caffepy.ops.cpu.compiler import EXACT, kernel
from caffepy.ops.cpu.copies import copy
from caffepy.ops.cpu.elementwise import dot
from caffepy.ops.update_state import Limits, StepResult, StepStatus


@partial(kernel, fastmath=EXACT)
def _add_loss(data: Array, weight: Array, is_first: bool, sums: Array) -> None:
    """sums (4) are `UpdateState._sums`, of which a pass is `is_first` to write the last loss."""
    product = data[()] * weight[()]
    sums[0] = product if is_first else data.dtype.type(sums[0]) + product


@kernel
def _add_pass(sums: Array) -> None:
    sums[1] += sums[0]
    sums[2] = 0 if np.isfinite(sums[0]) else 1


@kernel
def _begin(numbers: Array, places: Array, rate: Array, correction: Array, sums: Array) -> None:
    rate[()], correction[()] = numbers[places[0], 0], numbers[places[0], 1]
    sums[1] = 0


@kernel
def _clear(array: Array) -> None:
    for i in range(array.size):
        array[i] = 0


@kernel
def _take(batches: Array, place: Array, out: Array, step: int) -> None:
    batch = batches[place[0]]
    for i in range(out.size):
        out[i] = batch[i]
    place[0] += step


@partial(kernel, fastmath=EXACT)
def _end(sums: Array, passes: float, losses: Array, places: Array) -> None:
    losses[places[0]] = sums[1] / passes
    places[0] += 1


def _loss(losses: Sequence[Blob]) -> float:
    return float(sum(np.dot(b.data.reshape(-1), b.diff.reshape(-1)) for b in losses))


class UpdateState(objects.UpdateState):
    def __init__(self, limits: Limits, losses: Sequence[Blob], device: Device) -> None:
        self._limits, self._losses = limits, losses
        self.rate, self.decay, self.correction, self.scale = (np.zeros(()) for _ in range(4))
        self.go = self.loss_scale = 1.0
        # The loss of the last pass, that of all passes, 1 where the former is not finite.
        self._sums = np.zeros(3)
        self._single = all(loss.count == 1 for loss in losses)
        self._results: list[StepResult] = []
        self._saved: list[Array] = []

    def set_hyperparams(self, rate: float, decay: float, correction: float, ahead: int = 0) -> None:
        self.rate[()], self.decay[()], self.correction[()] = rate, decay, correction

    def begin(self, diffs: Sequence[Array]) -> None:
        for diff in diffs:
            diff.fill(0)
        self._sums[1] = 0

    def save_stats(self, blobs: Sequence[Blob]) -> None:
        if [array.shape for array in self._saved] != [blob.shape for blob in blobs]:
            self._saved = [np.empty_like(blob.data) for blob in blobs]
        for array, blob in zip(self._saved, blobs, strict=True):
            copy(blob.data, array)

    def restore_stats(self, blobs: Sequence[Blob]) -> None:
        for blob, kept in zip(blobs, self._saved, strict=True):
            blob.data[...] = kept

    def accumulate_loss(self) -> None:
        if self._single and self._losses:
            for i, b in enumerate(self._losses):
                call(_add_loss, b.data.reshape(()), b.diff.reshape(()), i == 0, self._sums)
        else:
            call(self._sum_up)
        call(_add_pass, self._sums)

    def _sum_up(self) -> None:
        self._sums[0] = _loss(self._losses)

    def check_loss(self, check: Callable[[], object]) -> None:
        if keeps := recorder():
            keeps.check(self._sums[2:], check)
        else:
            check()

    def pack_metrics(self, metrics: Array) -> None:
        metrics[0] = self._sums[1]

    def loss(self) -> float:
        return float(self._sums[0])

    @property
    def needs_norm(self) -> bool:
        return self._limits.clip >= 0

    def check_and_scale(
        self, diff: Array, metrics: Array | None = None, abort_flag: int = 0
    ) -> None:
        loss = float(self._sums[1] if metrics is None else metrics[0]) / self._limits.passes
        norm, factor = 0.0, 1.0
        if self.needs_norm:
            norm = sqrt(dot(diff, diff))
            factor = 1.0 if norm <= self._limits.clip else self._limits.clip / norm
        self.scale[()] = factor / self._limits.passes
        self._results.append(StepResult(loss, norm, factor, 1.0, StepStatus.DONE))

    def step_results(self, wait: bool, room: int = 1) -> list[StepResult]:
        step_results, self._results = self._results, []
        return step_results

    @property
    def done(self) -> int:
        return 0

    def resync(self) -> None:
        self._results.clear()

    def state(self) -> dict[str, float]:
        return {}


class Series:
    """Up to `most` iterations of a `state` that follow each other as one call of compiled code.

    `numbers` (most, 2) are rate and correction of each, `losses` (most,) their results. `places`
    (1 + feeds,) are the place of the next iteration in these, and that of the next batch of each
    feed, which were `begun` (feeds,) before the first.
    """

    def __init__(self, state: UpdateState, most: int, feeds: int) -> None:
        self._state = state
        self.numbers, self.losses = np.zeros((most, 2)), np.zeros(most)
        self.places, self.begun = np.zeros(1 + feeds, np.int64), np.zeros(feeds, np.int64)

    def begin(self, numbers: Sequence[tuple[float, float]], places: Sequence[int]) -> None:
        """Begin anew: with these numbers, and with these places of the next batches."""
        self.numbers[: len(numbers)] = numbers
        self.places[0], self.places[1:], self.begun[:] = 0, places, places

    def take(self, feed: int, arrays: Sequence[Array], outs: Sequence[Array]) -> None:
        """Copy the next batch of a feed from arrays (count, N, ...)."""
        place, last = self.places[1 + feed : 2 + feed], len(outs) - 1
        for i, (array, out) in enumerate(zip(arrays, outs, strict=True)):
            call(_take, array.reshape(len(array), -1), place, out.reshape(-1), int(i == last))

    def begin_iteration(self, diffs: Sequence[Array]) -> None:
        """Record `set_hyperparams` and `begin` of the next iteration."""
        state = self._state
        call(_begin, self.numbers, self.places, state.rate, state.correction, state._sums)
        for diff in diffs:
            call(_clear, diff)

    def end_iteration(self) -> None:
        """Keep its mean loss, in what is recorded."""
        state = self._state
        call(_end, state._sums, float(state._limits.passes), self.losses, self.places)


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
