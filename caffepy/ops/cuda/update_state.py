"""UpdateState: loss, clipping and hyperparameters of an update. Sums: totals of a test.

The numbers live on the device. Host and device exchange rows of two rings in pinned memory, one row
an iteration: the host writes hyperparameters before it enqueues the step, the kernel
`check_and_scale` reads them and writes the result.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

import cupy
import numpy as np

from caffepy.core.errors import DeviceError
from caffepy.device.blob import Array as HostArray
from caffepy.device.blob import Blob
from caffepy.device.cuda import CudaDevice
from caffepy.ops.cuda.compiler import kernel, prefetch
from caffepy.ops.cuda.copies import copy
from caffepy.ops.cuda.launch import BLOCKS, MOST, THREADS, Array, launch_blocks, packs, scratch
from caffepy.ops.update_state import (
    LEAST_SCALE,
    MOST_SCALE,
    PATIENCE,
    Limits,
    Number,
    StepResult,
    StepStatus,
)

HYPERPARAM_NAMES = ("rate", "decay", "correction")
STATE_NAMES = ("scale", "go", "last", "total", "loss_scale", "good", "stopped", "checked")
NUMBERS = (*HYPERPARAM_NAMES, *STATE_NAMES)
HYPERPARAMS, RESULTS = len(HYPERPARAM_NAMES), 5
"""As in kernels/update_state.cu."""

ROWS = 16
"""Most iterations that the host may be ahead of the device."""
GROUP = 4
"""Iterations from one event to the next, by which the host waits for the device, or as many more as
it enqueues at once."""

PENDING = -1.0
"""Status in a row whose result has not been written yet."""

KINDS = {"float32": 1, "float64": 2, "float16": 5, "uint16": 6}


class _Table:
    """Addresses and sizes of blobs in device memory, for kernels that take any number of them."""

    def __init__(self, blobs: Sequence[Blob]) -> None:
        self.blobs = blobs
        self._rows: list[tuple[int, int, int, int]] = []
        self._array: Array = None

    def of(self, others: Iterable[int]) -> tuple[Array, int]:
        """Return the table of the blobs, each with another address, and their number."""
        rows = []
        for blob, other in zip(self.blobs, others, strict=True):
            data: Array = blob.data
            rows.append((data.data.ptr, other, blob.count, KINDS[data.dtype.name]))
        if rows != self._rows:
            if cupy.cuda.get_current_stream().is_capturing():
                raise DeviceError("a blob got other memory")
            self._rows, self._array = rows, cupy.asarray(np.array(rows, np.int64))
        return self._array, len(rows)

    def with_diffs(self) -> tuple[Array, int]:
        diffs: list[Array] = [blob.diff for blob in self.blobs]
        return self.of(diff.data.ptr for diff in diffs)

    def launch(self, name: str, others: Iterable[int], *arguments: Any) -> None:
        """Launch a kernel with one column of blocks for each blob."""
        across = max(1, min(-(-max(blob.count for blob in self.blobs) // THREADS), MOST))
        table, count = self.of(others)
        kernel("update_state", name)((across, count), (THREADS,), (table, *arguments))


def _launch(name: str, *arguments: Any, threads: int = 1) -> None:
    kernel("update_state", name)((1,), (threads,), arguments)


class UpdateState:
    """More than 20 attributes: each is an array on the device that captured kernels refer to, or
    the host's view of one.
    """

    def __init__(self, limits: Limits, losses: Sequence[Blob], device: CudaDevice) -> None:
        prefetch("update_state", ["accumulate_loss", "check_and_scale", "save_stats"])
        self._limits, self._device = limits, device
        self._losses = _Table(losses)
        self._weights = [blob.host_diff.copy() for blob in losses]
        self._step_counter, self._error_flags = device.step_counter, device.error_flags
        self._stats = _Table(())
        self._saved: list[Array] = []
        self._numbers = device.zeros(len(NUMBERS), np.dtype(np.float64))
        self._page = cupy.cuda.alloc_pinned_memory(8 * ROWS * (HYPERPARAMS + RESULTS))
        rows: HostArray = np.frombuffer(self._page, np.float64, ROWS * (HYPERPARAMS + RESULTS))
        self._hyperparams = rows[: ROWS * HYPERPARAMS].reshape(ROWS, HYPERPARAMS)
        self._results = rows[ROWS * HYPERPARAMS :].reshape(ROWS, RESULTS)
        # Counts of iterations: enqueued, known to be finished, returned.
        self._enqueued = self._finished = self._returned = 0
        self._ends: deque[tuple[int, Any]] = deque()  # (number of iterations, event after them)
        self.rate: Number = self._number("rate")
        self.decay: Number = self._number("decay")
        self.correction: Number = self._number("correction")
        self.scale: Number = self._number("scale")
        self.go: Number = self._number("go")
        self.loss_scale: Number = self._number("loss_scale")
        self.set_state({})

    def _number(self, name: str) -> Array:
        at = NUMBERS.index(name)
        return self._numbers[at : at + 1].reshape(())

    def _read(self, name: str) -> float:
        return float(self._device.on_host(self._number(name)))

    def _set(self, name: str, value: float) -> None:
        self._device.upload(np.array(value, np.float64), self._number(name))

    def set_hyperparams(self, rate: float, decay: float, correction: float, ahead: int = 0) -> None:
        number = self._enqueued + ahead
        assert number - self._returned < ROWS
        self._hyperparams[number % ROWS] = rate, decay, correction
        self._results[number % ROWS, -1] = PENDING

    def begin(self, diffs: Sequence[Array]) -> None:
        for diff in diffs:
            diff.fill(0)
        if self._limits.passes > 1:
            self._number("total").fill(0)

    def save_stats(self, blobs: Sequence[Blob]) -> None:
        if not blobs:
            return
        if not self._saved:
            self._saved = [self._device.zeros(blob.count, np.dtype(np.float32)) for blob in blobs]
        self._stats.blobs = blobs
        self._stats.launch("save_stats", (kept.data.ptr for kept in self._saved), self._numbers)

    def restore_stats(self, blobs: Sequence[Blob]) -> None:
        with self._device.scope():
            for blob, kept in zip(blobs, self._saved, strict=True):
                copy(kept, blob.data.reshape(-1))

    def accumulate_loss(self) -> None:
        arguments = (int(self._limits.passes > 1), self._numbers, self._step_counter)
        _launch("accumulate_loss", *self._losses.with_diffs(), *arguments, threads=THREADS)

    def pack_metrics(self, metrics: Array) -> None:
        flags = self._error_flags, self._device.error_flag_count
        _launch("pack_metrics", *flags, self._numbers, metrics, threads=THREADS)

    def pack_scale(self, spare: Array) -> None:
        if self._limits.loss_scale is not None:
            _launch("pack_scale", self._numbers, spare)

    def unpack_scale(self, spare: Array) -> None:
        if self._limits.loss_scale is not None:
            arguments = (spare, *self._losses.with_diffs(), self._numbers)
            _launch("unpack_scale", *arguments, threads=THREADS)

    def loss(self) -> float:
        return self._read("last")

    def check_loss(self, check: Callable[[], object]) -> None:
        check()

    @property
    def needs_norm(self) -> bool:
        return self._limits.clip >= 0 or self._limits.loss_scale is not None

    def check_and_scale(
        self, diff: Array, metrics: Array | None = None, abort_flag: int = 0
    ) -> None:
        clip, passes, loss_scale = self._limits
        blocks, partial = 0, None
        if self.needs_norm:
            blocks = max(1, min(-(-packs(diff) // (4 * THREADS)), BLOCKS))
            partial = scratch("squares", blocks)
            launch_blocks("update_state", "squares", diff, blocks, diff, partial, diff.size)
        limits = float(clip), passes, int(loss_scale is not None), LEAST_SCALE, MOST_SCALE, PATIENCE
        flags = self._error_flags, self._device.error_flag_count
        page = self._page.ptr, self._page.ptr + self._hyperparams.nbytes, ROWS
        state = (*flags, *self._losses.with_diffs(), self._numbers, *page)
        averaged = metrics, abort_flag
        _launch("check_and_scale", partial, blocks, *averaged, *limits, *state, threads=THREADS)

    def mark_enqueued(self, count: int = 1) -> None:
        self._device.add_enqueued_steps(count * self._limits.passes)
        before, self._enqueued = self._enqueued, self._enqueued + count
        if self._enqueued // GROUP > before // GROUP:
            event = cupy.cuda.Event(block=True, disable_timing=True)
            event.record(self._device.stream)
            self._ends.append((self._enqueued, event))

    def step_results(self, wait: bool, room: int = 1) -> list[StepResult]:
        if wait and self._finished < self._enqueued:
            self._device.synchronize()
            self._finished = self._enqueued
        while self._enqueued - self._finished > ROWS - room:
            end, event = self._ends.popleft()
            event.synchronize()
            self._finished = end
        while self._ends and self._ends[0][0] <= self._finished:
            self._ends.popleft()
        step_results = []
        for i in range(self._returned, self._finished):
            loss, norm, factor, loss_scale, status = self._results[i % ROWS].tolist()
            step_results.append(StepResult(loss, norm, factor, loss_scale, StepStatus(int(status))))
        self._returned = self._finished
        return step_results

    @property
    def done(self) -> int:
        for i in range(self._returned, self._enqueued):
            if self._results[i % ROWS, -1] == PENDING:
                return i
        return self._enqueued

    def resync(self) -> None:
        self._device.synchronize()
        self._enqueued = self._finished = self._returned = int(self._read("checked"))
        self._ends.clear()

    def resume(self) -> None:
        self._set("stopped", 0)

    def state(self) -> dict[str, float]:
        if self._limits.loss_scale is None:
            return {}
        return {name: self._read(name) for name in ("loss_scale", "good")}

    def set_state(self, state: dict[str, float]) -> None:
        scale = self._limits.loss_scale
        if scale is not None:
            scale = state.get("loss_scale", scale)
            for blob, weight in zip(self._losses.blobs, self._weights, strict=True):
                blob.host_diff[...] = scale * weight
        self._set("loss_scale", scale or 1.0)
        self._set("good", state.get("good", 0))


class Sums:
    def __init__(self, blobs: Sequence[Blob], losses: Sequence[Blob], device: CudaDevice) -> None:
        self._blobs, self._device = blobs, device
        self._table, self._losses = _Table(blobs), _Table(losses)
        self._shapes: list[tuple[int, ...]] | None = None
        self._sums: Array = None
        self._numbers = device.zeros(len(NUMBERS), np.dtype(np.float64))
        self._passes = device.zeros(1, np.dtype(np.int64))
        self.clear()

    def clear(self) -> None:
        shapes = [blob.shape for blob in self._blobs]
        if shapes == self._shapes:
            with self._device.scope():
                self._sums.fill(0)
        else:
            self._shapes = shapes
            total = sum(blob.count for blob in self._blobs)
            self._sums = self._device.zeros(total, np.dtype(np.float64))
            self._device.allocation_version += 1
        first = np.array([name == "loss_scale" for name in NUMBERS], np.float64)
        self._device.upload(first, self._numbers)

    def add(self) -> None:
        if self._blobs:
            counts = [blob.count for blob in self._blobs]
            starts = accumulate((8 * count for count in counts[:-1]), initial=self._sums.data.ptr)
            self._table.launch("add_up", starts)
        if self._losses.blobs:
            arguments = (*self._losses.with_diffs(), 1, self._numbers, self._passes)
            _launch("accumulate_loss", *arguments, threads=THREADS)

    def read(self) -> tuple[list[HostArray], float]:
        flat = self._device.on_host(self._sums)
        ends = np.cumsum([blob.count for blob in self._blobs])
        parts = zip(self._blobs, np.split(flat, ends[:-1]) if self._blobs else [], strict=True)
        sums = [blob.layout.view(part, blob.shape) for blob, part in parts]
        return sums, float(self._device.on_host(self._numbers)[NUMBERS.index("total")])
