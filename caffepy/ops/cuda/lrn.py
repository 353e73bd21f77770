"""Local response normalization across channels; formulas in `Ops.lrn_forward`."""

from math import prod

import cupy

from caffepy.ops.cuda.bias_relu import add_shares, relu_bias_backward
from caffepy.ops.cuda.compiler import kernel
from caffepy.ops.cuda.context import context
from caffepy.ops.cuda.copies import copy
from caffepy.ops.cuda.launch import (
    BLOCKS,
    THREADS,
    Array,
    c_type,
    channels_last,
    launch,
    launch_expression,
    packs,
)
from caffepy.ops.protocol.normalization import Terms

RUN = 16
"""Channels of a thread, as in lrn.cu."""

WIDEST = 4
"""Most channels on each side in a window that has a kernel of its own with the channels last."""


def lrn_forward(x: Array, y: Array, scale: Array | None, terms: Terms) -> None:
    size, alpha, beta, k = terms
    numbers = float(alpha / size), float(beta), float(k)
    if scale is None:
        _lines("lrn_forward", (x, y), packs(x), size // 2, *numbers)
    else:
        _planes("lrn_forward", (x, y, scale), size // 2, *numbers)


def lrn_backward(
    x: Array,
    y: Array,
    scale: Array | None,
    dy: Array,
    dx: Array,
    terms: Terms,
    relu: bool = False,
    db: Array | None = None,
) -> None:
    if not x.size:
        return
    size, alpha, beta, k = terms
    factor, half = float(2 * alpha * beta / size), size // 2
    at_once = 0 if scale is not None or half > WIDEST else _lines_at_once(x, dy, dx)
    if dx is dy and not at_once:  # neighbours read a channel's dy
        dy = cupy.empty_like(dx)
        copy(dx, dy)
    if scale is None:
        numbers = float(alpha / size), factor, float(beta), float(k)
        threads = -(-x.size // (x.shape[1] * max(1, at_once))) * THREADS
        if relu and db is not None and half <= WIDEST and (across := _packs(half, x, dy, dx)):
            _with_sums((x, dy, dx), across, half, numbers, db)
            return
        _lines("lrn_backward", (x, dy, dx), threads, half, *numbers, relu=relu)
    else:
        _planes("lrn_backward", (x, y, scale, dy, dx), half, factor, float(beta))
    if relu:
        masked = scale is None and half <= WIDEST
        relu_bias_backward(None if masked else x, dx, db)


def _with_sums(
    arrays: tuple[Array, ...], across: int, half: int, numbers: tuple[float, ...], db: Array
) -> None:
    """The gradient by warps, with ReLU's mask and the sums of each channel."""
    x, channels = arrays[0], arrays[0].shape[1]
    lines, *_, beta, _ = x.size // channels, *numbers
    blocks = max(1, min(BLOCKS, -(-lines // (32 // across * (THREADS // 32)))))
    part = context().array("shares", (channels, blocks), db.dtype)
    name = f"lrn_backward_warps<{c_type(x)}, {half}, {int(beta == 0.75)}, 2>"
    given = (*arrays, lines, channels, *numbers, part)
    kernel("lrn", name)((blocks,), (THREADS,), given)
    add_shares(part, db, x)


def _lines_at_once(*arrays: Array) -> int:
    """Return how many whole lines of channels the threads of a block take, as in lrn.cu."""
    channels, pack = arrays[0].shape[1], 16 // arrays[0].itemsize
    if channels % pack or any(a.data.ptr % 16 for a in arrays):
        pack = 1
    return THREADS // int(channels // pack)


def _packs(half: int, *arrays: Array) -> int:
    """Return how many packs of 16 bytes a line of channels has, if a warp can take it; else 0."""
    channels, pack = arrays[0].shape[1], 16 // arrays[0].itemsize
    suits = channels % pack == 0 and channels <= 32 * pack and half <= pack
    return channels // pack if suits and not any(a.data.ptr % 16 for a in arrays) else 0


def _planes(name: str, arrays: tuple[Array, ...], half: int, *numbers: float) -> None:
    x = arrays[0]
    assert not channels_last(*arrays)
    n, channels, pixels = x.shape[0], x.shape[1], prod(x.shape[2:])
    threads = n * -(-channels // RUN) * pixels
    launch("lrn", name, x, threads, *arrays, n, channels, pixels, half, *numbers)


def _lines(
    name: str,
    arrays: tuple[Array, ...],
    threads: int,
    half: int,
    *numbers: float,
    relu: bool | None = None,
) -> None:
    """Call a kernel, which has a variant for each value of `relu` unless that is None; those that
    have one, of the gradient, are computed by warps where that is possible.
    """
    x = arrays[0]
    if not x.size:
        return
    lines, channels = x.size // x.shape[1], x.shape[1]
    assert channels_last(*arrays) or channels == 1 or lines == x.shape[0]
    *_, beta, _ = numbers
    if half > WIDEST:
        launch("lrn", f"{name}_wide", x, x.size, *arrays, lines, channels, half, *numbers)
        return
    variant = [half, int(beta == 0.75), *([] if relu is None else [int(relu)])]
    kind, packs_of_line = "lines", 0 if relu is None else _packs(half, *arrays)
    if packs_of_line:
        kind, threads = "warps", -(-lines // (32 // packs_of_line)) * 32
    more = [None] if kind == "warps" else []  # no sums
    instance = f"{name}_{kind}<{', '.join([c_type(x), *map(str, variant)])}>"
    launch_expression("lrn", instance, threads, *arrays, lines, channels, *numbers, *more)
