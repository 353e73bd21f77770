"""Gaussian filters of many dimensions, by a lattice (Adams, Baek and Davis 2010).

Points are spread over the corners of the simplices of the lattice that hold them (splat), the
corners are blurred along each of its d + 1 axes with 1/2, 1, 1/2, and points read them (slice):

    points (P) --weights (P, d + 1)--> corners (M) --d + 1 blurs--> corners --weights--> points

Corners that no point has do not exist: they blur nothing. What lies where is reckoned in float32,
as CRF-as-RNN's code does, four points at a time: of a number that four does not divide the rest is
filled with points at the origin, whose corners exist, though nothing is spread over them.
"""

from functools import partial
from typing import Any

import numpy as np

from caffepy.device.blob import Array
from caffepy.device.threads import parallel
from caffepy.ops.cpu.compiler import EXACT, inlined, kernel

AT_ONCE = 4


def _exact(function: Any) -> Any:
    return kernel(function, EXACT)


@_exact
def _locate(features: Array, scales: Array, keys: Array, weights: Array, lo: int, hi: int) -> None:
    """Write the corners (P, d + 1, d) around each point, and the share of each (P, d + 1)."""
    d = features.shape[1]
    one = np.float32(1)
    raised, base = np.empty(d + 1, np.float32), np.empty(d + 1, np.float32)
    rank, shares = np.empty(d + 1, np.int32), np.empty(d + 2, np.float32)
    up = np.float32(d + 1)
    down = one / up
    for p in range(lo, hi):
        total = np.float32(0)
        for j in range(d, 0, -1):
            part = features[p, j - 1] * scales[j - 1]
            raised[j] = total - np.float32(j) * part
            total += part
        raised[0] = total
        # the nearest corner of remainder 0, if the sum of its parts is 0
        off = 0
        for i in range(d + 1):
            whole = np.rint(down * raised[i])
            base[i] = whole * up
            off += int(whole)
            rank[i] = 0
        for i in range(d):
            for j in range(i + 1, d + 1):
                if raised[i] - base[i] < raised[j] - base[j]:
                    rank[i] += 1
                else:
                    rank[j] += 1
        for i in range(d + 1):
            rank[i] += off
            if rank[i] < 0:
                rank[i] += d + 1
                base[i] += up
            elif rank[i] > d:
                rank[i] -= d + 1
                base[i] -= up
        shares[:] = 0
        for i in range(d + 1):
            share = (raised[i] - base[i]) * down
            shares[d - rank[i]] += share
            shares[d - rank[i] + 1] -= share
        shares[0] += one + shares[d + 1]
        for r in range(d + 1):
            weights[p, r] = shares[r]
            for i in range(d):
                step = r if rank[i] <= d - r else r - (d + 1)
                keys[p, r, i] = int(base[i]) + step


@inlined
def _find(key: Array, corners: Array, table: Array) -> int:
    """The place in `table` of the number of a corner, or the free one where it would be."""
    mask = len(table) - 1
    hashed = np.uint64(0)
    for k in range(len(key)):
        hashed = (hashed + np.uint64(key[k])) * np.uint64(0x9E3779B97F4A7C15)
    at = int(hashed >> np.uint64(24)) & mask
    while table[at] >= 0:
        same = True
        for k in range(len(key)):
            same = same and corners[table[at], k] == key[k]
        if same:
            return at
        at = (at + 1) & mask
    return at


@kernel
def _number(keys: Array, corners: Array, table: Array, numbers: Array) -> int:
    """Number the different ones of keys (K, d) as they come, into `corners`; return how many."""
    count = 0
    for k in range(len(keys)):
        at = _find(keys[k], corners, table)
        if table[at] < 0:
            table[at] = count
            corners[count] = keys[k]
            count += 1
        numbers[k] = table[at]
    return count


@kernel
def _neighbours(corners: Array, table: Array, count: int, found: Array, lo: int, hi: int) -> None:
    """Write the two neighbours (d + 1, M, 2) of corners along each axis, -1 for none."""
    d = corners.shape[1]
    key = np.empty(d, corners.dtype)
    for m in range(lo, hi):
        for axis in range(d + 1):
            for side in range(2):
                sign = 1 - 2 * side
                for k in range(d):
                    key[k] = corners[m, k] - sign
                if axis < d:
                    key[axis] = corners[m, axis] + sign * d
                found[axis, m, side] = table[_find(key, corners, table)]


@kernel
def _filter(
    x: Array,
    y: Array,
    corners: Array,
    weights: Array,
    neighbours: Array,
    values: Array,
    transposed: bool,
    lo: int,
    hi: int,
) -> None:
    points, ends = weights.shape
    axes, count, _ = neighbours.shape
    scale = 1 / (1 + 2.0 ** (1 - axes))
    for c in range(lo, hi):
        old, new = values[c, 0], values[c, 1]
        old[:] = 0
        for p in range(points):
            for j in range(ends):
                old[corners[p, j]] += weights[p, j] * x[c, p]
        for k in range(axes):
            axis = axes - 1 - k if transposed else k
            for m in range(count):
                a, b = neighbours[axis, m, 0], neighbours[axis, m, 1]
                sides = (old[a] if a >= 0 else 0) + (old[b] if b >= 0 else 0)
                new[m] = old[m] + sides / 2
            old, new = new, old
        for p in range(points):
            total = y[c, p] if transposed else 0 * x[c, p]
            for j in range(ends):
                total += weights[p, j] * scale * old[corners[p, j]]
            y[c, p] = total


def lattice_of(features: Array) -> tuple[Array, Array, Array]:
    """Return for points (P, d) on the host their corners (P, d + 1), shares of these, and the
    neighbours (d + 1, M, 2) of corners.
    """
    points, d = features.shape
    lacking = -points % AT_ONCE
    padded = np.concatenate([features, np.zeros((lacking, d))]).astype(np.float32)
    axes = np.arange(1, d + 1)
    scales = (np.sqrt(2 / 3) * (d + 1) / np.sqrt((axes + 1) * axes)).astype(np.float32)
    keys = np.empty((len(padded), d + 1, d), np.int32)
    weights = np.empty((len(padded), d + 1), np.float32)
    parallel(partial(_locate, padded, scales, keys, weights), len(padded))
    keys = keys.reshape(-1, d)
    corners, numbers = np.empty_like(keys), np.empty(len(keys), np.int32)
    table = np.full(1 << int(2 * len(keys)).bit_length(), -1, np.int32)
    count = _number(keys, corners, table, numbers)
    neighbours = np.empty((d + 1, count, 2), np.int32)
    parallel(partial(_neighbours, corners, table, count, neighbours), count)
    return numbers.reshape(-1, d + 1)[:points], weights[:points], neighbours


class Lattice:
    def __init__(self, features: Array, device: object) -> None:
        self._corners, self._weights, self._neighbours = lattice_of(features)

    def filter(self, x: Array, y: Array, transposed: bool = False) -> None:
        values = np.empty((len(x), 2, self._neighbours.shape[1]), x.dtype)
        given = x, y, self._corners, self._weights, self._neighbours, values, transposed
        parallel(partial(_filter, *given), len(x))
