"""Copies of arrays and views, concatenation and splitting."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from math import prod

import numpy as np

from caffepy.device.blob import Array
from caffepy.device.recording import call
from caffepy.device.threads import parallel
from caffepy.ops.cpu.compiler import kernel
from caffepy.ops.cpu.elementwise import flatwise
from caffepy.ops.cpu.normalization import norm_sums, normalized
from caffepy.ops.objects import Normalized, NormSums

GRAIN = 1 << 15  # elements for which a second thread pays


def copy(src: Array, dst: Array) -> None:
    if src.size < 2 * GRAIN:
        plain = src.dtype == dst.dtype and src.dtype.kind == "f"
        if plain and src.flags.c_contiguous and dst.flags.c_contiguous:
            call(np.positive, src.reshape(-1), dst.reshape(-1))  # a copy that can be replayed
        else:
            call(np.copyto, dst, src)
    elif src.shape[0] > 1:
        grain = GRAIN * src.shape[0] // src.size + 1
        parallel(lambda lo, hi: np.copyto(dst[lo:hi], src[lo:hi]), src.shape[0], grain)
    else:
        copy(src[0], dst[0])


BFLOAT16 = np.dtype(np.uint16)  # which stands for it


def convert(x: Array, out: Array) -> None:
    if x.dtype == np.float32 and out.dtype == BFLOAT16:
        flatwise(_to_bfloat16, (x.view(np.uint32),), out)
    elif x.dtype == BFLOAT16 and out.dtype == np.float32:
        flatwise(_from_bfloat16, (x,), out.view(np.uint32))
    else:
        copy(x, out)


@kernel
def _to_bfloat16(x: Array, out: Array) -> None:
    """Round to the nearest, of two the even one; NaN stays NaN."""
    one, half, infinity = np.uint32(1), np.uint32(0x7FFF), np.uint32(0x7F800000)
    sixteen, magnitude, nan = np.uint32(16), np.uint32(0x7FFFFFFF), np.uint32(0x7FC0)
    for i in range(x.size):
        rounded = (x[i] + (half + ((x[i] >> sixteen) & one))) >> sixteen
        out[i] = nan if (x[i] & magnitude) > infinity else rounded


@kernel
def _from_bfloat16(x: Array, out: Array) -> None:
    sixteen = np.uint32(16)
    for i in range(x.size):
        out[i] = np.uint32(x[i]) << sixteen


def _columns(whole: Array, sizes: Sequence[int], axis: int) -> Iterator[Array]:
    """Yield views (outer, size * inner) of the parts of `whole` with these sizes along the axis."""
    outer, inner = prod(whole.shape[:axis]), prod(whole.shape[axis + 1 :])
    lines, start = whole.reshape(outer, whole.shape[axis] * inner), 0
    for size in sizes:
        yield lines[:, start : start + size * inner]
        start += size * inner


def join(parts: Sequence[Array], whole: Array, axis: int) -> None:
    for part, columns in zip(
        parts, _columns(whole, [a.shape[axis] for a in parts], axis), strict=True
    ):
        copy(part.reshape(columns.shape), columns)


def cut(whole: Array, sizes: Sequence[int], parts: Sequence[Array | None], axis: int) -> None:
    for part, columns in zip(parts, _columns(whole, sizes, axis), strict=True):
        if part is not None:
            copy(columns, part.reshape(columns.shape))


def deal_channels(x: Array, y: Array, parts: int) -> None:
    n, c, *rest = x.shape
    dealt = x.reshape(n, parts, c // parts, *rest).swapaxes(1, 2)
    copy(dealt, y.reshape(n, c // parts, parts, *rest))


def interleave(
    parts: Sequence[Array],
    wholes: Sequence[Array],
    given: Sequence[Normalized | None] = (None, None),
) -> None:
    pairs = zip_longest(parts, given[: len(parts)])
    made = [part if norm is None else normalized(part, norm) for part, norm in pairs]
    for part, channels, of_whole in _dealt(made, wholes):
        copy(part[:, channels], of_whole)


def separate(
    wholes: Sequence[Array],
    parts: Sequence[Array | None],
    norms: Sequence[NormSums | None] = (None, None),
) -> None:
    for part, channels, of_whole in _dealt(parts, wholes):
        copy(of_whole, part[:, channels])
    for norm in norms:
        if norm is not None:
            norm_sums(norm)


def _dealt(
    parts: Sequence[Array | None], wholes: Sequence[Array]
) -> Iterator[tuple[Array, slice, Array]]:
    """Yield the parts that there are, some of their channels, and where they lie in a whole."""
    first = 0
    for whole in wholes:
        share = whole.shape[1] // len(parts)
        for p, part in enumerate(parts):
            if part is not None:
                yield part, slice(first, first + share), whole[:, p :: len(parts)]
        first += share
