"""Normalization by statistics of each channel, and scales and biases of each channel."""

from collections.abc import Sequence
from functools import cache
from math import inf, prod
from typing import Any, NamedTuple

import cupy

from caffepy.ops.cuda.channels import DEVICE, channel_pass, finish, lying, sums
from caffepy.ops.cuda.compiler import kernel, prefetch
from caffepy.ops.cuda.context import context
from caffepy.ops.cuda.launch import THREADS, Array, c_type, launch
from caffepy.ops.objects import NormSums, Preparation
from caffepy.ops.protocol.normalization import Affine
from caffepy.ops.protocol.types import Maybe

NO_MASK, BY_X, BY_Y, BY_BITS = range(4)
"""As in rectify.cuh: what shows where the gradient of a ReLU is 0."""

NO_RELU, RELU, CLIPPED = range(3)
"""As in rectify.cuh: what follows the normalization."""


class Addition(NamedTuple):
    """An addition of the shares of sums, as in normalization.cu: to (size) += the sums of `shares`
    of part, which lie `pitch` floats apart; number i goes to place i % across * down + i // across.
    """

    part: Array
    to: Array
    shares: int
    pitch: int
    size: int
    across: int
    down: int


def what_follows(ceiling: float | None) -> int:
    """Return the ReLU after a normalization."""
    return NO_RELU if ceiling is None else RELU if ceiling == inf else CLIPPED


@cache
def _prefetch_gradients(device: int, kind: str, addend: bool, after: int, keeps: bool) -> None:
    """Begin to compile what the gradient of `norm_forward` is likely to run."""
    mask = (BY_BITS if keeps else BY_Y if addend else BY_X) if after else NO_MASK
    sums = f"backward_sums<{kind}, {mask}, {after}, 0, {int(addend)}, 0>"
    last = f"backward<{kind}, {NO_RELU if addend else after}>"
    prefetch("normalization", [sums, last, f"backward_finish<{kind}>"])


def moments(x: Array) -> tuple[Array, int]:
    """Return (2, splits, C) partial sums of x and x^2, and splits."""
    return sums("normalization", "moments", x, lying(x), x)


def batch_norm_statistics(x: Array, mean: Array, variance: Array) -> None:
    partial, splits = moments(x)
    finish("normalization", "statistics_finish", x, partial, mean, variance, *lying(x), splits)


def batch_norm_prepare(
    x: Array, running: Sequence[Array], fraction: float, eps: float, affine: Affine, numbers: Array
) -> None:
    if x.size:
        prepare_from(moments(x), x, (running, fraction, eps, affine, numbers))


def prepare_from(partial: tuple[Array, int], x: Array, preparation: Preparation) -> None:
    """`batch_norm_prepare` with the partial sums of `moments`."""
    (parts, splits), (running, fraction, eps, affine, numbers) = partial, preparation
    arguments = (parts, *running, *affine, numbers, float(fraction), float(eps))
    finish("normalization", "prepare_finish", x, *arguments, *lying(x), splits)


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


def are_packs(*arrays: Any) -> bool:
    """Return True if 16 bytes of each array that there is can be read at once."""
    return all(a is None or a.data.ptr % 16 == 0 for a in arrays)


def norm_forward(
    x: Array,
    numbers: Array,
    other: Maybe,
    ceiling: float | None,
    y: Array,
    bits: Maybe = None,
) -> None:
    _, _, factor, shift = numbers
    shape = lying(x, y) if other is None else lying(x, other, y)
    addend, after, keeps = other is not None, what_follows(ceiling), bits is not None
    assert not keeps or are_packs(x, other, y)
    _prefetch_gradients(cupy.cuda.runtime.getDevice(), c_type(x), addend, after, keeps)
    variant = f", {int(addend)}, {after}, {int(keeps)}"
    arguments = x, factor, shift, ceiling or 0.0, other, y, bits
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
    bits: Maybe = None,
) -> None:
    assert masked is not None or (y is None and len(dys) == 1)
    if not x.size:
        return
    partial = gradient_sums(x, numbers, dys, y, bits, ceiling, masked, dx if frozen else None)
    later = dx is not None and not frozen
    line = context().array("line", (2, x.shape[1]), numbers[2].dtype) if later else None
    if later or dscale is not None or dbias is not None:
        finish_gradient(partial, x, numbers, dscale, dbias, line)
    if line is not None and dx is not None:
        g, after = (dys[0], what_follows(ceiling)) if masked is None else (masked, NO_RELU)
        _gradient(x, numbers, line, g, after, ceiling, dx)


def norm_mask(
    dys: Sequence[Array], y: Maybe, ceiling: float | None, masked: Array, bits: Maybe = None
) -> None:
    if masked.size:
        gradient_sums(None, (None, None, None, None), dys, y, bits, ceiling, masked, None)


def gradient_sums(
    x: Maybe,
    numbers: Array,
    dys: Sequence[Array],
    y: Maybe,
    bits: Maybe,
    ceiling: float | None,
    masked: Maybe,
    dx: Maybe,
) -> tuple[Array, int]:
    """Write masked and, with frozen numbers, dx; return (2, splits, C) partial sums of g and of g *
    (x - mean), and splits.
    """
    mean, _, factor, shift = numbers
    after, mask = what_follows(ceiling), mask_kind(ceiling, y, bits)
    dy, more = dys if len(dys) > 1 else (dys[0], None)
    if x is None:  # only masked is wanted
        x = dy
    assert mask != BY_BITS or are_packs(x, dy, more, masked, dx)
    shape = lying(x, *(a for a in (dy, more, y, masked, dx) if a is not None))
    masks = y if mask == BY_Y else None, bits if mask == BY_BITS else None
    arrays = (x, mean, factor, shift, ceiling or 0.0, dy, more, *masks, masked, dx)
    variant = "".join(f", {int(a is not None)}" for a in (more, masked, dx))
    variant = f", {mask}, {after}{variant}"
    return sums("normalization", "backward_sums", x, shape, *arrays, variant=variant)


def mask_kind(ceiling: float | None, y: Maybe, bits: Maybe) -> int:
    """Return what shows where the gradient of the ReLU behind the normalization is 0."""
    if ceiling is None:
        return NO_MASK
    return BY_X if y is None else BY_Y if bits is None else BY_BITS


def finish_gradient(
    partial: tuple[Array, int],
    x: Array,
    numbers: Array,
    dscale: Maybe,
    dbias: Maybe,
    line: Maybe,
    addition: Addition | None = None,
) -> None:
    """Add to dscale and dbias, write the line (2, C), with partial sums of `gradient_sums`; beside
    them make the addition.
    """
    (parts, splits), (mean, inverse, factor, _) = partial, numbers
    arguments = (parts, mean, inverse, factor, dscale, dbias, line, *lying(x), splits)
    beside = addition or Addition(None, None, 0, 0, 0, 1, 1)
    blocks = -(-beside.size // 32)
    finish("normalization", "backward_finish", x, *arguments, *beside, more=blocks)


def norm_sums(norm: NormSums) -> None:
    if not norm.masked.size:
        return
    given = norm.masked, norm.more, norm.x, norm.y
    masked, more, x, y = (None if a is None else as_planes(a) for a in given)
    dys = [masked] if more is None else [masked, more]
    changes = masked if norm.ceiling is not None or more is not None else None
    partial = gradient_sums(x, norm.numbers, dys, y, norm.bits, norm.ceiling, changes, None)
    finish_norm(partial, norm)


def finish_norm(
    partial: tuple[Array, int], norm: NormSums, addition: Addition | None = None
) -> None:
    """Make of partial sums what is wanted of them, if they are; then there may be an addition."""
    assert norm.x is not None or addition is None
    if norm.x is not None:
        to = norm.dscale, norm.dbias, norm.line
        finish_gradient(partial, as_planes(norm.x), norm.numbers, *to, addition)


def as_planes(x: Array) -> Array:
    """Return x (N, C, ...) as (N, C, P)."""
    return x.reshape(*x.shape[:2], prod(x.shape[2:]))


def norm_gradient(x: Array, numbers: Array, line: Array, g: Array, dx: Array) -> None:
    if x.size:
        _gradient(x, numbers, line, g, NO_RELU, None, dx)


def _gradient(
    x: Array,
    numbers: Array,
    line: Array,
    g: Array,
    after: int,
    ceiling: float | None,
    dx: Array,
) -> None:
    _, _, factor, shift = numbers
    arguments = (x, factor, shift, line, ceiling or 0.0, g, dx)
    variant, shape = f", {after}", lying(x, g, dx)
    channel_pass("normalization", "backward", x, shape, *arguments, variant=variant, held=3)


def maxima_gradient(
    x: Array,
    numbers: Array,
    maxima: tuple[Array, Array],
    dx: Array,
    dscale: Maybe,
    dbias: Maybe,
    frozen: bool,
    windows: Sequence[int],
    of_maxima: Sequence[int],
    across: int,
    fours: Sequence[int] | None = None,
) -> None:
    """Compute `norm_backward` for dy and index of maxima of x * factor + shift, without a ReLU.

    The numbers of `windows` and `of_maxima` are those of windows.cuh, for passes over x and over
    dy; over an element are at most `across` windows in a row; see OfMaxima for how arrays lie.
    `fours` are the sizes of maxima_fours, if it can do it.
    """
    (mean, _, factor, _), shape, (dy, index) = numbers, lying(x), maxima
    if frozen:
        arrays, variant = (x, mean, factor, *maxima, dx, *windows), f", {across}"
        partial = sums("normalization", "maxima_frozen", x, shape, *arrays, variant=variant)
    else:
        images, channels, *out = dy.shape
        pooled, arrays = (images * prod(out), channels, 1), (x, mean, dy, index, *of_maxima)
        partial = sums("normalization", "maxima_sums", x, pooled, *arrays)
    line = None if frozen else context().array("line", (2, x.shape[1]), factor.dtype)
    if line is not None or dscale is not None or dbias is not None:
        finish_gradient(partial, x, numbers, dscale, dbias, line)
    if line is not None and fours is not None:
        images, packs, height, width = fours[:4]
        threads = THREADS // packs * packs
        blocks = -(-images * packs * -(-height // 2) * -(-width // 2) // threads)
        of_fours = kernel("normalization", f"maxima_fours<{c_type(x)}>")
        given = x, factor, line, *maxima, dx, *fours
        of_fours((max(1, min(blocks, 8 * DEVICE)),), (threads,), given)
    elif line is not None:
        arrays = (x, factor, line, *maxima, dx, *windows)
        held, variant = 3, f", {across}"
        channel_pass(
            "normalization", "maxima_backward", x, shape, *arrays, variant=variant, held=held
        )
