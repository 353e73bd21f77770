"""Bilinear resizing with aligned corners, and its transpose."""

from functools import partial

import numpy as np

from caffepy.device.blob import Array
from caffepy.device.threads import parallel
from caffepy.ops.cpu.compiler import inlined, kernel
from caffepy.ops.cpu.elementwise import GRAIN

_exact = partial(kernel, fastmath=set())
"""Each operation is rounded separately: what an output reads must not depend on the processor."""


def _ratio(size: int, out: int) -> np.float32:
    """Return the step in the input for a step in the output."""
    return np.float32(size - 1) / np.float32(out - 1) if out > 1 else np.float32(0)


@partial(inlined, fastmath=set())
def _read(i: int, step: float, size: int) -> tuple[int, int, np.float32]:
    """Return the elements that output i reads along an axis, and the share of the second."""
    place = np.float32(step * np.float32(i))
    first = int(place)
    return first, first + 1 if first < size - 1 else first, np.float32(place - np.float32(first))


@_exact
def _interp(x: Array, y: Array, down: float, right: float, lo: int, hi: int) -> None:
    h, w = x.shape[1:]
    one = y.dtype.type(1)
    for p in range(lo, hi):
        u, v = x[p], y[p]
        for i in range(v.shape[0]):
            i0, i1, share = _read(i, down, h)
            below = y.dtype.type(share)
            for j in range(v.shape[1]):
                j0, j1, share = _read(j, right, w)
                behind = y.dtype.type(share)
                v[i, j] = (one - below) * ((one - behind) * u[i0, j0] + behind * u[i0, j1])
                v[i, j] += below * ((one - behind) * u[i1, j0] + behind * u[i1, j1])


@_exact
def _interp_transposed(dy: Array, dx: Array, down: float, right: float, lo: int, hi: int) -> None:
    h, w = dx.shape[1:]
    one = dx.dtype.type(1)
    for p in range(lo, hi):
        u, v = dx[p], dy[p]
        u[:] = 0
        for i in range(v.shape[0]):
            i0, i1, share = _read(i, down, h)
            below = dx.dtype.type(share)
            for j in range(v.shape[1]):
                j0, j1, share = _read(j, right, w)
                behind = dx.dtype.type(share)
                u[i0, j0] += (one - below) * (one - behind) * v[i, j]
                u[i0, j1] += (one - below) * behind * v[i, j]
                u[i1, j0] += below * (one - behind) * v[i, j]
                u[i1, j1] += below * behind * v[i, j]


def _each_plane(run: "partial[None]", x: Array, y: Array) -> None:
    largest = max(x.size, y.size)
    parallel(run, len(x), GRAIN * len(x) // (largest + 1) + 1)


def interp_forward(x: Array, y: Array) -> None:
    ratios = (_ratio(*sizes) for sizes in zip(x.shape[1:], y.shape[1:], strict=True))
    _each_plane(partial(_interp, x, y, *ratios), x, y)


def interp_backward(dy: Array, dx: Array) -> None:
    ratios = (_ratio(*sizes) for sizes in zip(dx.shape[1:], dy.shape[1:], strict=True))
    _each_plane(partial(_interp_transposed, dy, dx, *ratios), dx, dy)
