"""Optical flow: correlation of two maps, warping by a flow, resampling with few weights."""

import cupy
import numpy as np

from caffepy.ops.cuda.launch import Array, launch, scratch
from caffepy.ops.protocol.flow import Displacements

CHUNK = 7
"""Displacements that a thread of the correlation takes, as in flow.cu."""


def correlation_forward(a: Array, b: Array, y: Array, how: Displacements, differ: bool) -> None:
    threads = y.size // how.columns * -(-how.columns // CHUNK)
    launch("flow", "correlate", y, threads, a, b, y, *a.shape, *y.shape[2:], *how, int(differ))


def correlation_backward(
    a: Array, b: Array, dy: Array, da: Array, db: Array, how: Displacements, differ: bool
) -> None:
    shape = *a.shape, *dy.shape[2:], *how, int(differ)
    launch("flow", "correlate_back", a, a.size, a, b, dy, da, *shape, 1)
    launch("flow", "correlate_back", a, a.size, b, a, dy, db, *shape, -1)


def flow_warp_forward(x: Array, flow: Array, y: Array, fill: float) -> None:
    launch("flow", "warp", x, x.size // x.shape[1], x, flow, y, *x.shape, float(fill))


def flow_warp_backward(x: Array, flow: Array, dy: Array, dx: Array, dflow: Array) -> None:
    if not x.size:
        return
    largest = cupy.max(cupy.abs(dy)).astype(np.float64)
    sums = scratch("flow", x.size)
    sums.fill(0)
    given = x, flow, dy, dflow, sums, largest, *x.shape
    launch("flow", "warp_back", x, x.size // x.shape[1], *given)
    launch("flow", "take_sums", x, x.size, sums, largest, dx, x.size)


def resample(
    x: Array, y: Array, rows: Array, down: Array, columns: Array, across: Array, skip: bool
) -> None:
    sizes = *x.shape[1:], *y.shape, down.shape[1], across.shape[1], int(skip)
    launch("flow", "resample", y, y.size, x, y, rows, down, columns, across, *sizes)
