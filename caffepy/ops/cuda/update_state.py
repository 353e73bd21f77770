"""What decides on an update of parameters, and the sums of what a test net gives: on the device,
without the host.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import cupy
import numpy as np

from caffepy.core.errors import DeviceError
from caffepy.device.blob import Array as HostArray
from caffepy.device.blob import Blob
from caffepy.device.device import CudaDevice
from caffepy.ops.cuda.blas import BLOCKS, THREADS
from caffepy.ops.cuda.compiler import kernel
from caffepy.ops.cuda.copies import copy
from caffepy.ops.cuda.launch import MOST, Array, launch_blocks, packs, scratch
from caffepy.ops.segments import Number
from caffepy.ops.update_state import (
    LEAST_SCALE,
    MOST_SCALE,
    PATIENCE,
    Limits,
    StepResult,
    StepStatus,
)

NUMBERS = (
    "rate",
    "decay",
    "correction",
    "scale",
    "go",
    "last",
    "total",
    "loss_scale",
    "good",
    "stopped",
    "judged",
)
ORDERS, REPORTS = 3, 5
"""As in kernels/update_state.cu."""

ROWS = 16
"""Iterations that the host may be ahead of the device."""
GROUP = 4
"""Iterations after which it can learn how far the device is."""

PENDING = -1.0
"""The status of an iteration whose step_result has not come."""

KINDS = {"float32": 1, "float64": 2, "float16": 5, "uint16": 6}


Row = tuple[int, int, int, int]


class _Table:
    """Addresses and sizes of arrays in device memory, for kernels that take any number of them."""

    def __init__(self) -> None:
        self._rows: list[Row] = []
        self._array: Array = 0

    def of(self, rows: list[Row]) -> tuple[Array, int]:
        """The table of these rows, and how many there are."""
        if rows != self._rows:
            if cupy.cuda.get_current_stream().is_capturing():
                raise DeviceError("a blob got other memory")
            self._rows, self._array = rows, cupy.asarray(np.array(rows, np.int64))
        return self._array, len(rows)


def _row(blob: Blob, other: int) -> Row:
    data: Array = blob.data
    return data.data.ptr, other, blob.count, KINDS[data.dtype.name]


def _losses(blobs: Sequence[Blob]) -> list[Row]:
    diffs: list[Array] = [blob.diff for blob in blobs]
    return [_row(blob, diff.data.ptr) for blob, diff in zip(blobs, diffs, strict=True)]


class UpdateState:
    """The numbers of an update: `rate`, `decay` and `correction` as said, `scale` of the gradients
    and `go` as judged, and `loss_scale`, by which the gradients are too large until they are
    judged.

    In an iteration `say` comes first, then `open`, `note` after each forward pass, `judge` after
    the last backward pass, then the update. All but `say`, `loss`, `mean`, `given` and `step_results`
    can be captured.
    """

    def __init__(self, limits: Limits, losses: Sequence[Blob], device: CudaDevice) -> None:
        self._limits = limits
        self._losses = losses
        self._weights = [blob.host_diff.copy() for blob in losses]
        self._device = device
        self._tick, self._problems = device.tick, device.problems
        self._table, self._keeping = _Table(), _Table()
        self._kept: list[Array] = []
        self._numbers = device.zeros(len(NUMBERS), np.dtype(np.float64))
        self._page = cupy.cuda.alloc_pinned_memory(8 * ROWS * (ORDERS + REPORTS))
        rows: HostArray = np.frombuffer(self._page, np.float64, ROWS * (ORDERS + REPORTS))
        self._orders = rows[: ROWS * ORDERS].reshape(ROWS, ORDERS)
        self._reports = rows[ROWS * ORDERS :].reshape(ROWS, REPORTS)
        self._given = self._known = self._told = (
            0  # iterations: given to the device, known to be done, told of
        )
        self._ends: deque[tuple[int, Any]] = deque()  # an event after so many
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

    def _set(self, name: str, value: float) -> None:
        self._device.upload(np.array(value, np.float64), self._number(name))

    def say(self, rate: float, decay: float, correction: float) -> None:
        """The learning rate, the weight decay and the rule's own number for the next update."""
        assert self._given - self._told < ROWS
        self._orders[self._given % ROWS] = rate, decay, correction
        self._reports[self._given % ROWS, -1] = PENDING

    def open(self, diffs: Sequence[Array]) -> None:
        """Begin to add up gradients, in these arrays, and losses."""
        for diff in diffs:
            diff.fill(0)
        if self._limits.passes > 1:
            self._number("total").fill(0)

    def keep(self, blobs: Sequence[Blob]) -> None:
        """Keep the values of these blobs of float32 for `restore_stats`; give back what is kept if one
        was STOPPED.
        """
        if not blobs:
            return
        if not self._kept:
            self._kept = [self._device.zeros(blob.count, np.dtype(np.float32)) for blob in blobs]
        kept: list[Array] = self._kept
        rows = [_row(blob, values.data.ptr) for blob, values in zip(blobs, kept, strict=True)]
        across = max(1, min(-(-max(blob.count for blob in blobs) // THREADS), MOST))
        kernel("update_state", "keep")(
            (across, len(rows)), (THREADS,), (self._keeping.of(rows)[0], self._numbers)
        )

    def restore_stats(self, blobs: Sequence[Blob]) -> None:
        """Give these blobs the values that were kept."""
        with self._device.scope():
            for blob, kept in zip(blobs, self._kept, strict=True):
                copy(kept, blob.data.reshape(-1))

    def note(self) -> None:
        """Add the loss of a forward pass: the sum of data times diff over the losses. Counts the
        device's `tick`.
        """
        table, count = self._table.of(_losses(self._losses))
        arguments = (table, count, int(self._limits.passes > 1), self._numbers, self._tick)
        kernel("update_state", "note")((1,), (THREADS,), arguments)

    def tell(self, notes: Array) -> None:
        """Put into the notes what is to be averaged over solvers: no number if something is wrong
        here.
        """
        arguments = (self._problems, self._device.problem_count, self._numbers, notes)
        kernel("update_state", "tell")((1,), (THREADS,), arguments)

    def hear(self, notes: Array, given_up: int = 0) -> None:
        """Go on with what came back, unless the int at this address of the host is not 0 by now."""
        kernel("update_state", "hear")((1,), (1,), (notes, given_up, self._numbers))

    def pack_scale(self, told: Array) -> None:
        """Put the loss scale into what goes with the parameters, if there is one."""
        if self._limits.loss_scale is not None:
            kernel("update_state", "pack_scale")((1,), (1,), (self._numbers, told))

    def unpack_scale(self, told: Array) -> None:
        """Go on with the loss scale that came with the parameters, if there is one."""
        if self._limits.loss_scale is not None:
            table, count = self._table.of(_losses(self._losses))
            kernel("update_state", "unpack_scale")(
                (1,), (THREADS,), (told, table, count, self._numbers)
            )

    def loss(self) -> float:
        """The loss of the last pass, when the device is done with it."""
        return float(self._device.on_host(self._number("last")))

    def mean(self) -> float:
        """The mean loss of the iteration's passes, over all solvers if it was heard of, when the
        device is done.
        """
        return float(self._device.on_host(self._number("total"))) / self._limits.passes

    @property
    def measures(self) -> bool:
        """Whether `judge` needs the gradients, and not the losses alone."""
        return self._limits.clip >= 0 or self._limits.loss_scale is not None

    def check_and_scale(self, diff: Array) -> None:
        """Decide what the gradients are multiplied by."""
        clip, passes, loss_scale = self._limits
        blocks, partial = 0, 0
        if self.measures:
            blocks = max(1, min(-(-packs(diff) // (4 * THREADS)), BLOCKS))
            partial = scratch("squares", blocks)
            launch_blocks("update_state", "squares", diff, blocks, diff, partial, diff.size)
        limits = float(clip), passes, int(loss_scale is not None), LEAST_SCALE, MOST_SCALE, PATIENCE
        problems = self._problems, self._device.problem_count
        page = self._page.ptr, self._page.ptr + self._orders.nbytes, ROWS
        table = self._table.of(_losses(self._losses))
        kernel("update_state", "judge")(
            (1,), (THREADS,), (partial, blocks, *limits, *problems, *table, self._numbers, *page)
        )

    def given(self) -> None:
        """The operations of an iteration, `judge` among them, were given to the device."""
        self._device.counted(self._limits.passes)
        self._given += 1
        if self._given % GROUP == 0:
            event = cupy.cuda.Event(block=True, disable_timing=True)
            event.record(self._device.stream)
            self._ends.append((self._given, event))

    def step_results(self, wait: bool) -> list[StepResult]:
        """The step_results that were not returned yet, in order: all, or without `wait` those known by
        now.

        Waits in any case for those of a few iterations if the host is too far ahead.
        """
        if wait and self._known < self._given:
            self._device.synchronize()
            self._known = self._given
        while self._given - self._known >= ROWS:
            end, event = self._ends.popleft()
            event.synchronize()
            self._known = end
        while self._ends and self._ends[0][0] <= self._known:
            self._ends.popleft()
        step_results = []
        for i in range(self._told, self._known):
            loss, norm, factor, loss_scale, status = self._reports[i % ROWS].tolist()
            step_results.append(StepResult(loss, norm, factor, loss_scale, StepStatus(int(status))))
        self._told = self._known
        return step_results

    @property
    def done(self) -> int:
        """How many iterations the device is done with by now; for a look from another thread."""
        first, given = self._told, self._given
        return next(
            (i for i in range(first, given) if self._reports[i % ROWS, -1] == PENDING), given
        )

    def resync(self) -> None:
        """Forget what was given before an interruption, which may have hit in between."""
        self._device.synchronize()
        self._given = self._known = self._told = int(self._device.on_host(self._number("judged")))
        self._ends.clear()

    def go_on(self) -> None:
        """Update again after an iteration that was STOPPED."""
        self._set("stopped", 0)

    def state(self) -> dict[str, float]:
        """What must be kept so that a resumed run goes on exactly."""
        if self._limits.loss_scale is None:
            return {}
        return {
            name: float(self._device.on_host(self._number(name))) for name in ("loss_scale", "good")
        }

    def set_state(self, state: dict[str, float]) -> None:
        """Take up a state that `state` gave."""
        scale = self._limits.loss_scale
        if scale is not None:
            scale = state.get("loss_scale", scale)
            for blob, weight in zip(self._losses, self._weights, strict=True):
                blob.host_diff[...] = scale * weight
        self._set("loss_scale", scale or 1.0)
        self._set("good", state.get("good", 0))


class Sums:
    """The sums of the data of blobs, and of a net's losses, over passes."""

    def __init__(self, blobs: Sequence[Blob], losses: Sequence[Blob], device: CudaDevice) -> None:
        self._blobs = blobs
        self._losses = losses
        self._device = device
        self._tables = _Table(), _Table()
        self._shapes: list[tuple[int, ...]] | None = None
        self._sums: Array = None
        self._numbers = device.zeros(len(NUMBERS), np.dtype(np.float64))
        self._passes = device.zeros(1, np.dtype(np.int64))
        self.clear()

    def clear(self) -> None:
        """Begin anew, for blobs of the shapes that they have now."""
        shapes = [blob.shape for blob in self._blobs]
        if shapes == self._shapes:
            with self._device.scope():
                self._sums.fill(0)
        else:
            self._shapes = shapes
            self._sums = self._device.zeros(
                sum(blob.count for blob in self._blobs), np.dtype(np.float64)
            )
            self._device.epoch += 1
        self._device.upload(
            np.array([name == "loss_scale" for name in NUMBERS], np.float64), self._numbers
        )

    def add(self) -> None:
        """Add the values of a pass."""
        rows: list[Row] = []
        at = self._sums.data.ptr
        for blob in self._blobs:
            rows.append(_row(blob, at))
            at += 8 * blob.count
        sums, losses = self._tables
        if rows:
            across = max(1, min(-(-max(blob.count for blob in self._blobs) // THREADS), MOST))
            kernel("update_state", "add_up")((across, len(rows)), (THREADS,), sums.of(rows)[:1])
        if self._losses:
            arguments = (*losses.of(_losses(self._losses)), 1, self._numbers, self._passes)
            kernel("update_state", "note")((1,), (THREADS,), arguments)

    def read(self) -> tuple[list[HostArray], float]:
        """The sums, in double precision, and that of the losses."""
        flat = self._device.on_host(self._sums)
        ends = np.cumsum([blob.count for blob in self._blobs])
        parts = np.split(flat, ends[:-1]) if self._blobs else []
        sums = [
            blob.layout.view(part, blob.shape)
            for blob, part in zip(self._blobs, parts, strict=True)
        ]
        return sums, float(self._device.on_host(self._numbers)[NUMBERS.index("total")])
