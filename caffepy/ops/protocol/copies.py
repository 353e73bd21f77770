"""Copies."""

from collections.abc import Sequence
from typing import Protocol

from caffepy.device.blob import Array
from caffepy.ops.objects import Normalized, NormSums
from caffepy.ops.protocol.types import Maybe, Sizes


class CopiesOps(Protocol):
    def copy(self, src: Array, dst: Array) -> None:
        """dst = src, at full speed if rows are contiguous; on a GPU src may lie on the host."""

    def convert(self, x: Array, out: Array) -> None:
        """out = x in its own element type and order of axes."""

    def join(self, parts: Sequence[Array], whole: Array, axis: int) -> None:
        """whole = the parts side by side along the axis (1 if the channels lie last); parts of one
        other element type must be C-contiguous, and the whole.
        """

    def cut(self, whole: Array, sizes: Sizes, parts: Sequence[Maybe], axis: int) -> None:
        """Write the parts, of these sizes along the axis, that are not None: undo `join`, also to
        another element type.
        """

    def deal_channels(self, x: Array, y: Array, parts: int) -> None:
        """Write channel p * (C / parts) + k of x (N, C, ...) as channel k * parts + p of y."""

    def interleave(
        self,
        parts: Sequence[Array],
        wholes: Sequence[Array],
        given: Sequence[Normalized | None] = (None, None),
    ) -> None:
        """Write channel k of part p of P parts (N, C, ...) as channel k * P + p of the wholes side
        by side: `join`, `deal_channels` and `cut` into equal wholes, with a multiple of P channels;
        of what a normalization makes of a part, where it is `given`. On a GPU two parts of an even
        C and one or two wholes, of 16 bits with the channels last.
        """

    def separate(
        self,
        wholes: Sequence[Array],
        parts: Sequence[Maybe],
        norms: Sequence[NormSums | None] = (None, None),
    ) -> None:
        """Write the parts that are not None: undo `interleave`; then `norm_sums` of each norm
        that is not None, whose `masked` is one of the parts.
        """
