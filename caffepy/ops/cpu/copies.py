"""Copies of arrays and views, concatenation and splitting."""

from collections.abc import Iterator, Sequence
from math import prod

import numpy as np

from caffepy.device.blob import Array
from caffepy.device.threads import parallel

GRAIN = 1 << 15  # elements for which a second thread pays


def copy(src: Array, dst: Array) -> None:
    if src.size < 2 * GRAIN:
        np.copyto(dst, src)
    elif src.shape[0] > 1:
        grain = GRAIN * src.shape[0] // src.size + 1
        parallel(lambda lo, hi: np.copyto(dst[lo:hi], src[lo:hi]), src.shape[0], grain)
    else:
        copy(src[0], dst[0])


def convert(x: Array, out: Array) -> None:
    copy(x, out)


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
