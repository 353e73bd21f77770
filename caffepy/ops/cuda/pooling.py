"""Max, average and stochastic pooling."""

from math import prod
from typing import Any

import numpy as np

from caffepy.ops.cuda.launch import Array, c_type, channels_last, divisor, launch_expression
from caffepy.ops.protocol import Pair, Window

WIDE = 32
"""A warp sums a window of this many elements or more, if planes are contiguous."""
AHEAD = 4
"""Most elements of a row that a thread loads at a time."""
BUSY = 1 << 16
"""A large device needs this many threads; packs of channels get narrower for them."""

_INDEX = {"uint8": "unsigned char", "int32": "int"}


def pool_index_type(kernel: Pair) -> "np.dtype[Any]":
    return np.dtype(np.uint8 if prod(kernel) < 256 else np.int32)


def _pool(
    name: str,
    over: Array,
    large: Array,
    small: Array,
    arrays: tuple[Array, ...],
    window: Window,
    *others: Any,
    relu: bool | None = None,
) -> None:
    """Call a kernel with a thread for each part of `over`: the large (N, C, H, W) or the small (N,
    C, Ho, Wo) array.

    It has a variant for each value of `relu`, unless that is None.
    """
    if not over.size:
        return
    n, c = large.shape[:2]
    kernel, stride, _ = window
    images, channels = (n, c) if channels_last(large, small) else (n * c, 1)
    v = 16 // large.itemsize
    while v > 1 and (
        channels % v or over.size < v * BUSY or any(a.data.ptr % (v * a.itemsize) for a in arrays)
    ):
        v //= 2
    types = [c_type(large), *(_INDEX[a.dtype.name] for a in arrays if a.dtype.name in _INDEX)]
    numbers, threads = [v], over.size // v
    if name == "ave_pool_forward" and channels == 1 and prod(kernel) >= WIDE:
        name, numbers, threads = "ave_pool_forward_wide", [], over.size * 32
    elif not name.startswith("stochastic"):
        numbers.append(min(kernel[1] if over is small else -(-kernel[1] // stride[1]), AHEAD))
    planes = (*large.shape[2:], *small.shape[2:])
    sizes = (images, channels // v, *planes, *(int(side) for pair in window for side in pair))
    divisors = (divisor(int(d)) for d in (channels // v, *over.shape[:1:-1], *stride))
    if relu is not None:
        numbers.append(int(relu))
    expression = f"{name}<{', '.join([*types, *map(str, numbers)])}>"
    launch_expression("pooling", expression, threads, *arrays, *sizes, *divisors, *others)


def max_pool_forward(x: Array, y: Array, index: Array, window: Window, relu: bool = False) -> None:
    _pool("max_pool_forward", y, x, y, (x, y, index), window, relu=relu)


def max_pool_backward(dy: Array, index: Array, dx: Array, window: Window) -> None:
    _pool("max_pool_backward", dx, dx, dy, (dy, index, dx), window)


def ave_pool_forward(x: Array, y: Array, window: Window, relu: bool = False) -> None:
    _pool("ave_pool_forward", y, x, y, (x, y), window, relu=relu)


def ave_pool_backward(dy: Array, dx: Array, window: Window, y: Array | None = None) -> None:
    if y is not None:
        channels_last(dy, y)  # raises if their layouts differ
    arrays = (dy, dx, dy if y is None else y)
    _pool("ave_pool_backward", dx, dx, dy, arrays, window, relu=y is not None)


def stochastic_pool_forward(
    x: Array, y: Array, index: Array, window: Window, seed: int, step_counter: Array | None = None
) -> None:
    numbers = seed, step_counter
    _pool("stochastic_pool_forward", y, x, y, (x, y, index), window, *numbers)


def stochastic_pool_mean(x: Array, y: Array, window: Window) -> None:
    _pool("stochastic_pool_mean", y, x, y, (x, y), window)
