"""Copies of blobs for a layer that takes them in another layout than they lie in."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from caffepy.device.blob import Blob, Layout

Convert = Callable[[Any, Any], None]
"""ops.convert: copies an array into one of another layout."""


class LayoutCasts:
    """Copies, in the layout that a layer takes, of its blobs in another layout; converted before
    and after its passes.
    """

    def __init__(
        self, bottoms: Sequence[Blob], tops: Sequence[Blob], layouts: Sequence[Layout]
    ) -> None:
        self._of: dict[int, tuple[Blob, Blob]] = {}  # id of the blob -> (blob, copy)
        for blob, layout in zip(bottoms, layouts, strict=True):
            if blob.layout != layout and id(blob) not in self._of:
                copy = Blob(blob.shape, blob.dtype, blob.gpu)
                copy.set_layout(layout)
                self._of[id(blob)] = blob, copy
        self.bottoms = [self._seen(b) for b in bottoms]
        self.tops = [self._seen(t) for t in tops]
        self._in_place = [self._of[id(t)] for t in tops if id(t) in self._of]

    def __bool__(self) -> bool:
        return bool(self._of)

    def __iter__(self) -> Iterator[Blob]:
        return (copy for _, copy in self._of.values())

    def _seen(self, blob: Blob) -> Blob:
        return self._of[id(blob)][1] if id(blob) in self._of else blob

    def reshape(self) -> None:
        """Reshape the copies like the blobs."""
        for blob, copy in self._of.values():
            copy.reshape_like(blob)

    def before_forward(self, convert: Convert) -> None:
        """Convert what the layer reads."""
        for blob, copy in self._of.values():
            convert(blob.data, copy.data)

    def after_forward(self, convert: Convert) -> None:
        """Convert back what the layer wrote in place."""
        for blob, copy in self._in_place:
            blob.reshape_like(copy)
            convert(copy.data, blob.data)

    def before_backward(self, convert: Convert) -> None:
        """Convert the gradients of in-place tops."""
        for blob, copy in self._in_place:
            convert(blob.diff, copy.diff)

    def after_backward(
        self, convert: Convert, bottoms: Sequence[Blob], propagate_down: Sequence[bool]
    ) -> None:
        """Convert back the gradients that the layer wrote."""
        for blob, down in zip(bottoms, propagate_down, strict=True):
            if down and id(blob) in self._of:
                convert(self._of[id(blob)][1].diff, blob.diff)
