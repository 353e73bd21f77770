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
    c_type,
    channels_last,
    launch,
    launch_blocks,
    launch_expression,
    number,
    packs,
    scratch,
)


def _each(name: str, arrays: tuple[Array, ...], *arguments: Any) -> None:
    """Run a kernel over the elements of arrays with one layout."""
    launch(
        "elementwise", name, arrays[0], packs(_alike(*arrays)), *arrays, arrays[0].size, *arguments
    )


def _alike(x: Array, *others: Array) -> Array:
    """Return x after checking type, shape and layout of the others."""
    assert all(a.dtype == x.dtype and a.size == x.size for a in others)
    channels_last(x, *others)
    return x


def scaled(alpha: float, x: Array, out: Array) -> None:
    _each("scaled", (x, out), *number(alpha))


def axpy(alpha: float, x: Array, out: Array) -> None:
    _each("axpy", (x, out), *number(alpha))


def add(x: Array, out: Array) -> None:
    axpy(1.0, x, out)


def multiply(x: Array, y: Array, out: Array) -> None:
    _each("multiply", (x, y, out))


def dot(x: Array, y: Array) -> Any:
    blocks = max(1, min(-(-packs(_alike(x, y)) // (4 * THREADS)), BLOCKS))
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
        launch_expression("elementwise", name, packs(_alike(out, *arrays)), *arguments)
        terms = [(out, 1.0), *terms]


def eltwise_max(xs: Sequence[Array], out: Array, index: Array) -> None:
    x, y, *rest = xs
    _each("first_max", (x, y, out), index)
    for rank, z in enumerate(rest, 2):
        _each("next_max", (z, out), index, rank)


def eltwise_select(index: Array, rank: int, dy: Array, dx: Array) -> None:
    _each("select", (dy, dx), index, rank)
