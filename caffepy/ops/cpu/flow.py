"""Optical flow: correlation of two maps, warping by a flow, resampling with few weights."""

from functools import partial
from math import isnan, nan

from caffepy.device.blob import Array
from caffepy.device.threads import parallel
from caffepy.ops.cpu.compiler import kernel
from caffepy.ops.protocol.flow import Displacements


@kernel
def _correlate(
    a: Array, b: Array, y: Array, how: Displacements, differ: bool, lo: int, hi: int
) -> None:
    channels, most, stride = a.shape[1], how.rows * how.columns, how.stride
    share = y.dtype.type(1) / y.dtype.type(how.size * how.size * channels)
    for k in range(lo, hi):
        n, move = k // most, k % most
        down = (move // how.columns + how.top) * how.step + how.row
        right = (move % how.columns + how.left) * how.step + how.column
        out = y[n, move]
        out[:] = 0
        for c in range(channels):
            for i in range(how.size):
                for j in range(how.size):
                    for r in range(out.shape[0]):
                        u, w = a[n, c, r * stride + how.row + i, how.column + j :], out[r]
                        v = b[n, c, r * stride + down + i, right + j :]
                        if differ:
                            for q in range(w.size):
                                w[q] += abs(u[q * stride] - v[q * stride])
                        elif stride == 1:  # by itself, for the processor's vectors
                            for q in range(w.size):
                                w[q] += u[q] * v[q]
                        else:
                            for q in range(w.size):
                                w[q] += u[q * stride] * v[q * stride]
        for r in range(out.shape[0]):
            for q in range(out.shape[1]):
                out[r, q] *= share


@kernel
def _correlate_back(
    a: Array,
    b: Array,
    dy: Array,
    da: Array,
    db: Array,
    how: Displacements,
    differ: bool,
    lo: int,
    hi: int,
) -> None:
    channels, stride = a.shape[1], how.stride
    share = dy.dtype.type(1) / dy.dtype.type(how.size * how.size * channels)
    for k in range(lo, hi):
        n, c = k // channels, k % channels
        da[n, c] = 0
        db[n, c] = 0
        for move in range(dy.shape[1]):
            down = (move // how.columns + how.top) * how.step + how.row
            right = (move % how.columns + how.left) * how.step + how.column
            for i in range(how.size):
                for j in range(how.size):
                    for r in range(dy.shape[2]):
                        high, low = r * stride + how.row + i, r * stride + down + i
                        w = dy[n, move, r]
                        u = a[n, c, high, how.column + j :]
                        du = da[n, c, high, how.column + j :]
                        v, dv = b[n, c, low, right + j :], db[n, c, low, right + j :]
                        if differ:
                            for q in range(w.size):
                                s = q * stride
                                d = w[q] if u[s] >= v[s] else -w[q]
                                du[s] += d
                                dv[s] -= d
                        elif stride == 1:
                            for q in range(w.size):
                                du[q] += w[q] * v[q]
                            for q in range(w.size):
                                dv[q] += w[q] * u[q]
                        else:
                            for q in range(w.size):
                                du[q * stride] += w[q] * v[q * stride]
                                dv[q * stride] += w[q] * u[q * stride]
        for plane in (da[n, c], db[n, c]):
            for r in range(plane.shape[0]):
                for q in range(plane.shape[1]):
                    plane[r, q] *= share


def correlation_forward(a: Array, b: Array, y: Array, how: Displacements, differ: bool) -> None:
    parallel(partial(_correlate, a, b, y, how, differ), y.shape[0] * y.shape[1])


def correlation_backward(
    a: Array, b: Array, dy: Array, da: Array, db: Array, how: Displacements, differ: bool
) -> None:
    parallel(partial(_correlate_back, a, b, dy, da, db, how, differ), a.shape[0] * a.shape[1])


@partial(kernel, fastmath=set())
def _warp(x: Array, flow: Array, y: Array, fill: float, lo: int, hi: int) -> None:
    h, w = x.shape[2:]
    one = y.dtype.type(1)
    for n in range(lo, hi):
        for i in range(h):
            for j in range(w):
                across, down = flow[n, 0, i, j] + j, flow[n, 1, i, j] + i
                if not (across >= 0 and down >= 0 and across < w and down < h):
                    y[n, :, i, j] = fill
                    continue
                left, top = int(across), int(down)
                right, bottom = min(left + 1, w - 1), min(top + 1, h - 1)
                s, t = y.dtype.type(across - left), y.dtype.type(down - top)
                for c in range(x.shape[1]):
                    u = x[n, c]
                    y[n, c, i, j] = (one - t) * (
                        (one - s) * u[top, left] + s * u[top, right]
                    ) + t * ((one - s) * u[bottom, left] + s * u[bottom, right])


@partial(kernel, fastmath=set())
def _warp_back(x: Array, flow: Array, dy: Array, dx: Array, dflow: Array, lo: int, hi: int) -> None:
    h, w = x.shape[2:]
    one = dy.dtype.type(1)
    for n in range(lo, hi):
        dx[n] = 0
        for i in range(h):
            for j in range(w):
                across, down = flow[n, 0, i, j] + j, flow[n, 1, i, j] + i
                dflow[n, :, i, j] = 0
                if not (across >= 0 and down >= 0 and across < w and down < h):
                    continue
                left, top = int(across), int(down)
                right, bottom = min(left + 1, w - 1), min(top + 1, h - 1)
                s, t = dy.dtype.type(across - left), dy.dtype.type(down - top)
                for c in range(x.shape[1]):
                    u, v, d = x[n, c], dx[n, c], dy[n, c, i, j]
                    v[top, left] += d * (one - s) * (one - t)
                    v[top, right] += d * s * (one - t)
                    v[bottom, left] += d * (one - s) * t
                    v[bottom, right] += d * s * t
                    dflow[n, 0, i, j] += d * (
                        (one - t) * (u[top, right] - u[top, left])
                        + t * (u[bottom, right] - u[bottom, left])
                    )
                    dflow[n, 1, i, j] += d * (
                        (one - s) * (u[bottom, left] - u[top, left])
                        + s * (u[bottom, right] - u[top, right])
                    )


def flow_warp_forward(x: Array, flow: Array, y: Array, fill: float) -> None:
    parallel(partial(_warp, x, flow, y, y.dtype.type(fill)), len(x))


def flow_warp_backward(x: Array, flow: Array, dy: Array, dx: Array, dflow: Array) -> None:
    parallel(partial(_warp_back, x, flow, dy, dx, dflow), len(x))


@partial(kernel, fastmath=set())
def _resample(
    x: Array,
    y: Array,
    rows: Array,
    down: Array,
    columns: Array,
    across: Array,
    skip: bool,
    lo: int,
    hi: int,
) -> None:
    none = y.dtype.type(0)
    for p in range(lo, hi):
        for i in range(y.shape[1]):
            for j in range(y.shape[2]):
                total, weight, missing = none, none, none
                for a in range(down.shape[1]):
                    for b in range(across.shape[1]):
                        value = x[p, rows[i] + a, columns[j] + b]
                        w = down[i, a] * across[j, b]
                        if skip and isnan(value):
                            missing += w
                        else:
                            total += w * value
                            weight += w
                if skip and missing > weight / 2:
                    y[p, i, j] = nan
                else:
                    y[p, i, j] = total / weight if weight else none


def resample(
    x: Array, y: Array, rows: Array, down: Array, columns: Array, across: Array, skip: bool
) -> None:
    parallel(partial(_resample, x, y, rows, down, columns, across, skip), len(x))
