"""Local response normalization across channels; formulas in `Ops.lrn_forward`.

With the usual beta of 0.75, s^-beta is 1/sqrt(s) times its own square root: vector code, and as
exact as a power.
"""

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from caffepy.device.blob import Array
from caffepy.device.threads import parallel
from caffepy.ops.cpu.compiler import kernel
from caffepy.ops.cpu.neuron import relu_bias_backward
from caffepy.ops.cpu.pooling import max_pool_backward, max_pool_forward
from caffepy.ops.objects import Windows
from caffepy.ops.protocol.normalization import Terms
from caffepy.ops.protocol.types import Maybe

PIXELS = 256  # computed at a time, for all channels, so that they stay in cache


class _Numbers(NamedTuple):
    """Numbers of a layer, in the type of its elements."""

    half: int  # channels on each side of one
    alpha: Any  # alpha / size
    beta: Any
    k: Any
    factor: Any  # 2 * alpha * beta / size
    fast: bool  # beta is 0.75


@kernel
def _forward(x: Array, y: Array, scale: Array, numbers: _Numbers, lo: int, hi: int) -> None:
    half, alpha, beta, k, _, fast = numbers
    channels, pixels = x.shape[1:]
    total = np.empty(PIXELS, x.dtype)
    for n in range(lo, hi):
        for a in range(0, pixels, PIXELS):
            b = min(a + PIXELS, pixels)
            for c in range(channels):
                total[:] = 0
                for d in range(max(0, c - half), min(channels, c + half + 1)):
                    v = x[n, d, a:b]
                    for p in range(v.size):
                        total[p] += v[p] * v[p]
                s = scale[n, c, a:b]
                for p in range(s.size):
                    s[p] = k + alpha * total[p]
            for c in range(channels):
                s, v, u = scale[n, c, a:b], x[n, c, a:b], y[n, c, a:b]
                if fast:
                    for p in range(s.size):
                        root = 1 / np.sqrt(s[p])
                        u[p] = v[p] * root * np.sqrt(root)
                else:
                    for p in range(s.size):
                        u[p] = v[p] * s[p] ** -beta


@kernel
def _backward(
    x: Array, y: Array, scale: Array, dy: Array, dx: Array, numbers: _Numbers, lo: int, hi: int
) -> None:
    half, _, beta, _, factor, fast = numbers
    channels, pixels = x.shape[1:]
    total = np.empty(PIXELS, x.dtype)
    ratio = np.empty((channels, PIXELS), x.dtype)
    for n in range(lo, hi):
        for a in range(0, pixels, PIXELS):
            b = min(a + PIXELS, pixels)
            for c in range(channels):
                r, v, u, s = ratio[c], dy[n, c, a:b], y[n, c, a:b], scale[n, c, a:b]
                for p in range(s.size):
                    r[p] = v[p] * u[p] / s[p]
            for c in range(channels):
                total[:] = 0
                for d in range(max(0, c - half), min(channels, c + half + 1)):
                    r = ratio[d]
                    for p in range(b - a):
                        total[p] += r[p]
                s, v, u, w = scale[n, c, a:b], dy[n, c, a:b], x[n, c, a:b], dx[n, c, a:b]
                if fast:
                    for p in range(s.size):
                        root = 1 / np.sqrt(s[p])
                        w[p] = v[p] * root * np.sqrt(root) - factor * u[p] * total[p]
                else:
                    for p in range(s.size):
                        w[p] = v[p] * s[p] ** -beta - factor * u[p] * total[p]


def _run(loop: Any, arrays: Sequence[Maybe], terms: Terms) -> None:
    size, alpha, beta, k = terms
    planes = [a.reshape(*a.shape[:2], prod(a.shape[2:])) for a in arrays if a is not None]
    assert len(planes) == len(arrays)
    t = planes[0].dtype.type
    factor = t(2 * alpha * beta / size)
    numbers = _Numbers(size // 2, t(alpha / size), t(beta), t(k), factor, beta == 0.75)
    parallel(partial(loop, *planes, numbers), len(planes[0]))


def lrn_forward(x: Array, y: Array, scale: Maybe, terms: Terms) -> None:
    _run(_forward, (x, y, scale), terms)


def lrn_backward(
    x: Array,
    y: Array,
    scale: Maybe,
    dy: Array,
    dx: Array,
    terms: Terms,
    relu: bool = False,
    db: Maybe = None,
) -> None:
    _run(_backward, (x, y, scale, dy, dx), terms)
    if relu:
        relu_bias_backward(x, dx, db)


def lrn_max_pool_forward(x: Array, y: Array, index: Array, terms: Terms, window: Windows) -> None:
    normalized = np.empty_like(x)
    lrn_forward(x, normalized, np.empty_like(x), terms)
    max_pool_forward(normalized, y, index, window)


def lrn_max_pool_backward(
    x: Array, dy: Array, index: Array, dx: Array, terms: Terms, window: Windows, db: Maybe
) -> None:
    normalized, scale, g = (np.empty_like(x) for _ in range(3))
    lrn_forward(x, normalized, scale, terms)
    max_pool_backward(dy, index, g, window)
    lrn_backward(x, normalized, scale, g, g, terms, True, db)
    dx[...] = g
