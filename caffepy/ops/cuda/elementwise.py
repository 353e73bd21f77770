"""Sums and products of arrays of one shape and layout; an index is flat.

The factor of `scaled` and `axpy` may be an array without axes, read when the kernel runs.
"""

from collections.abc import Sequence
from typing import Any

import cupy
import numpy as np

from caffepy.ops.cuda.launch import (
    BLOCKS,
    THREADS,
    Array,
    alike,
    c_type,
    launch_blocks,
    launch_each,
    launch_expression,
    number,
    packs,
    scratch,
)


def scaled(alpha: float, x: Array, out: Array) -> None:
    launch_each("elementwise", "scaled", (x, out), *number(alpha))


def axpy(alpha: float, x: Array, out: Array) -> None:
    launch_each("elementwise", "axpy", (x, out), *number(alpha))


def add(x: Array, out: Array) -> None:
    axpy(1.0, x, out)


def multiply(x: Array, y: Array, out: Array) -> None:
    launch_each("elementwise", "multiply", (x, y, out))


def dot(x: Array, y: Array) -> Any:
    blocks = max(1, min(-(-packs(alike(x, y)) // (4 * THREADS)), BLOCKS))
    partial, total = scratch("dot", blocks), cupy.empty((), np.float64)
    launch_blocks("elementwise", "dot", x, blocks, x, y, partial, x.size)
    launch_blocks("elementwise", "dot_finish", x, 1, partial, total, blocks)
    return total


TERMS = 8
"""Most arrays of a launch of eltwise_sum."""


def eltwise_sum(xs: Sequence[Array], coefficients: Sequence[float], out: Array) -> None:
    terms = [(x, float(a)) for x, a in zip(xs, coefficients, strict=True)]
    while len(terms) > 1:
        group, terms = terms[:TERMS], terms[TERMS:]
        arrays, factors = zip(*group, strict=True)
        missing = TERMS - len(group)
        arguments = (out, out.size, *arrays, *[0] * missing, *factors, *[0.0] * missing)
        name = f"eltwise_sum<{c_type(out)}, {len(group)}>"
        launch_expression("elementwise", name, packs(alike(out, *arrays)), *arguments)
        terms = [(out, 1.0), *terms]


def eltwise_max(xs: Sequence[Array], out: Array, index: Array) -> None:
    x, y, *rest = xs
    launch_each("elementwise", "first_max", (x, y, out), index)
    for rank, z in enumerate(rest, 2):
        launch_each("elementwise", "next_max", (z, out), index, rank)


def eltwise_select(index: Array, rank: int, dy: Array, dx: Array) -> None:
    launch_each("elementwise", "select", (dy, dx), index, rank)
