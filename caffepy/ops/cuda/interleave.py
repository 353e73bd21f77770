"""Channels of two arrays in turn, as ShuffleNet deals them out, and back: interleave.cu."""

from collections.abc import Sequence
from typing import Any

from caffepy.ops.cuda.channels import DEVICE
from caffepy.ops.cuda.compiler import kernel
from caffepy.ops.cuda.launch import (
    Array,
    c_type,
    channels_last,
    divisor,
    launch_expression,
    packs,
    scratch,
)
from caffepy.ops.cuda.normalization import finish_norm, norm_sums, what_follows
from caffepy.ops.objects import Normalized, NormSums

ROWS, HELD, WORTH = 8, 3, 8
"""Lines that a block of `separate` takes at a time, blocks on a multiprocessor, and lines for which
one more row of threads pays.
"""


def interleave(
    parts: Sequence[Array],
    wholes: Sequence[Array],
    given: Sequence[Normalized | None] = (None, None),
) -> None:
    like, (words, cut) = wholes[0], _words(parts, wholes)
    line = words if cut else 2 * words
    number, how = 0, list[Any]()
    for i, each in enumerate(given):
        number += int(each is not None) << i
        _, _, factor, shift = (None,) * 4 if each is None else each.numbers
        ceiling = None if each is None else each.ceiling
        how += [factor, shift, what_follows(ceiling), float(ceiling or 0)]
    sizes = like.size // 2, words, divisor(line)
    name = f"interleave_pairs<{c_type(like)}, {int(cut)}, {number}>"
    arrays = *parts, *[*wholes, None][:2]
    launch_expression("interleave", name, packs(like), *arrays, *sizes, *how)


def separate(
    wholes: Sequence[Array],
    parts: Sequence[Array | None],
    norms: Sequence[NormSums | None] = (None, None),
) -> None:
    like = next((a for a in parts if a is not None), None)
    if like is None or not like.size:
        return
    words, cut = _words([like], wholes)
    lines = like.size // (2 * words)
    groups = -(-words // 32)
    splits = max(1, min(-(-lines // (ROWS * WORTH)), HELD * DEVICE // groups))
    size = 2 * splits * 2 * words
    partial, number, how = scratch("channels", 2 * size), 0, list[Any]()
    at_once = [norm is not None and _gives(norm) for norm in norms]
    for i, norm in enumerate(norms):
        if norm is None or not at_once[i]:
            how += [None, None, None, None, 0, 0.0, None]
            continue
        number += 1 << i
        mean, _, factor, shift = norm.numbers
        follows = what_follows(norm.ceiling), float(norm.ceiling or 0)
        how += [norm.x, mean, factor, shift, *follows, partial[i * size :]]
    name = f"separate_pairs<{c_type(like)}, {int(cut)}, {number}>"
    arrays = *[*wholes, None][:2], *parts
    launch = kernel("interleave", name)
    launch((splits, groups), (32, ROWS), (*arrays, lines, words, *how))
    for i, norm in enumerate(norms):
        if norm is not None and at_once[i]:
            finish_norm((partial[i * size :], splits), norm)
    for i, norm in enumerate(norms):
        if norm is not None and not at_once[i]:
            norm_sums(norm)  # which may write over the partial sums


def _gives(norm: NormSums) -> bool:
    """Return True if the kernel of `separate` can compute it."""
    return norm.x is not None and norm.more is None and (norm.ceiling is None or norm.y is None)


def _words(parts: Sequence[Array], wholes: Sequence[Array]) -> tuple[int, bool]:
    """Return the pairs of channels of a part, and True if there are two wholes."""
    part = parts[0]
    assert part.itemsize == 2
    assert channels_last(*parts, *wholes) or not part.size
    return max(1, part.shape[1] // 2), len(wholes) > 1
