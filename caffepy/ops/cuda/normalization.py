"""Normalization by statistics of each channel, and scales and biases of each channel."""

from collections.abc import Sequence
from functools import cache
from math import inf
from typing import Any

import cupy

from caffepy.ops.cuda.channels import channel_pass, finish, lying, sums
from caffepy.ops.cuda.compiler import prefetch
from caffepy.ops.cuda.context import context
from caffepy.ops.cuda.launch import Array, c_type, launch
from caffepy.ops.protocol import Affine, Maybe

NO_MASK, BY_X, BY_Y = range(3)
"""As in normalization.cu: what tells where the gradient of a ReLU is 0."""

NO_RELU, RELU, CLIPPED = range(3)
"""As in normalization.cu: what follows the normalization."""


def _after(ceiling: float | None) -> int:
    return NO_RELU if ceiling is None else RELU if ceiling == inf else CLIPPED


@cache
def _prefetch_gradients(device: int, kind: str, addend: bool, after: int) -> None:
    """Begin to compile what the gradient of `norm_forward` is likely to run."""
    mask = (BY_Y if addend else BY_X) if after else NO_MASK
    sums = f"backward_sums<{kind}, {mask}, {after}, 0, {int(addend)}, 0>"
    last = f"backward<{kind}, {NO_RELU if addend else after}>"
    prefetch("normalization", [sums, last, f"backward_finish<{kind}>"])


def _moments(x: Array, finisher: str, *arguments: Any) -> None:
    """Sum x and x^2 over each channel, and finish with a kernel."""
    shape = lying(x)
    partial, splits = sums("normalization", "moments", x, shape, x)
    finish("normalization", finisher, x, partial, *arguments, *shape, splits)


def batch_norm_statistics(x: Array, mean: Array, variance: Array) -> None:
    _moments(x, "statistics_finish", mean, variance)


def batch_norm_prepare(
    x: Array, running: Sequence[Array], fraction: float, eps: float, affine: Affine, numbers: Array
) -> None:
    if x.size:
        arguments = (*running, *affine, numbers, float(fraction), float(eps))
        _moments(x, "prepare_finish", *arguments)


def batch_norm_stored(running: Sequence[Array], eps: float, affine: Affine, numbers: Array) -> None:
    channels = numbers.shape[1]
    arguments = (*running, *affine, numbers, channels, float(eps))
    launch("normalization", "stored", numbers, channels, *arguments)


def batch_norm_forward(x: Array, mean: Array, inverse: Array, y: Array) -> None:
    channel_pass("normalization", "normalize", x, lying(x, y), x, mean, inverse, y)


def batch_norm_backward(x: Array, mean: Array, inverse: Array, dy: Array, dx: Array) -> None:
    numbers = (mean, inverse, inverse, None)
    norm_backward(x, numbers, [dy], None, None, None, dx, None, None, False)


def scale_forward(x: Array, scale: Array, bias: Maybe, y: Array) -> None:
    norm_forward(x, (None, None, scale, bias), None, None, y)


def scale_backward(
    x: Array, scale: Array, dy: Array, dx: Maybe, dscale: Maybe, dbias: Maybe
) -> None:
    if dscale is not None or dbias is not None:
        numbers = (None, None, scale, None)
        norm_backward(x, numbers, [dy], None, None, None, dx, dscale, dbias, True)
    elif dx is not None:
        scale_forward(dy, scale, None, dx)


# Numbers may also be a tuple of the four, without those that are not needed.


def norm_forward(x: Array, numbers: Array, other: Maybe, ceiling: float | None, y: Array) -> None:
    _, _, factor, shift = numbers
    shape = lying(x, y) if other is None else lying(x, other, y)
    addend, after = other is not None, _after(ceiling)
    _prefetch_gradients(cupy.cuda.runtime.getDevice(), c_type(x), addend, after)
    variant = f", {int(addend)}, {after}"
    arguments = x, factor, shift, ceiling or 0.0, other, y
    channel_pass("normalization", "forward", x, shape, *arguments, variant=variant)


def norm_backward(
    x: Array,
    numbers: Array,
    dys: Sequence[Array],
    y: Maybe,
    ceiling: float | None,
    masked: Maybe,
    dx: Maybe,
    dscale: Maybe,
    dbias: Maybe,
    frozen: bool,
) -> None:
    assert masked is not None or (y is None and len(dys) == 1)
    if not x.size:
        return
    mean, inverse, factor, shift = numbers
    after, most = _after(ceiling), ceiling or 0.0
    mask = NO_MASK if not after else BY_X if y is None else BY_Y
    dy, more = dys if len(dys) > 1 else (dys[0], None)
    shape = lying(x, *(a for a in (dy, more, y, masked, dx) if a is not None))
    optional = (more, y if mask == BY_Y else None, masked, dx if frozen else None)
    has_more, _, has_masked, has_dx = (int(a is not None) for a in optional)
    arrays = (x, mean, factor, shift, most, dy, *optional)
    variant = f", {mask}, {after}, {has_more}, {has_masked}, {has_dx}"
    partial, splits = sums("normalization", "backward_sums", x, shape, *arrays, variant=variant)
    later = dx is not None and not frozen
    line = context().array("line", (2, x.shape[1]), factor.dtype) if later else None
    if later or dscale is not None or dbias is not None:
        arguments = (mean, inverse, factor, dscale, dbias, line, *shape, splits)
        finish("normalization", "backward_finish", x, partial, *arguments)
    if later:
        g, after = (dy, after) if masked is None else (masked, NO_RELU)
        affine, variant = (x, factor, shift, line, most, g, dx), f", {after}"
        channel_pass("normalization", "backward", x, shape, *affine, variant=variant, held=3)
