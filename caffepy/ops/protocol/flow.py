"""Optical flow."""

from typing import NamedTuple, Protocol

from caffepy.device.blob import Array


class Displacements(NamedTuple):
    """The windows of a correlation, and where they are compared: displacement (p, o) is
    ((p + top) * step, (o + left) * step), of `rows` times `columns`; the first window of the first
    map begins at (row, column).
    """

    size: int
    stride: int
    step: int
    rows: int
    columns: int
    top: int
    left: int
    row: int
    column: int


class FlowOps(Protocol):
    def correlation_forward(
        self, a: Array, b: Array, y: Array, how: Displacements, differ: bool
    ) -> None:
        """Write y (N, rows * columns, Ho, Wo), the means over channels and windows of a * b, or
        with `differ` of |a - b|; a, b (N, C, H, W) with their padding.
        """

    def correlation_backward(
        self,
        a: Array,
        b: Array,
        dy: Array,
        da: Array,
        db: Array,
        how: Displacements,
        differ: bool,
    ) -> None:
        """Write da and db."""

    def flow_warp_forward(self, x: Array, flow: Array, y: Array, fill: float) -> None:
        """Write y, x (N, C, H, W) where flow (N, 2, H, W) leads, bilinear; `fill` outside."""

    def flow_warp_backward(self, x: Array, flow: Array, dy: Array, dx: Array, dflow: Array) -> None:
        """Write dx, the transpose of `flow_warp_forward`, and dflow."""

    def resample(
        self,
        x: Array,
        y: Array,
        rows: Array,
        down: Array,
        columns: Array,
        across: Array,
        skip: bool,
    ) -> None:
        """Write y (P, Ho, Wo), means of x (P, H, W) with weights down (Ho, K) of the rows from rows
        (Ho), int32, on, and `across` of the columns in the same way; 0 where they sum to 0. With
        `skip` NaNs do not count, and y is NaN where they weigh more than half of the others.
        """
