"""Bits that a GPU keeps of the output of a normalization, instead of the output."""

from collections.abc import Sequence
from math import prod

from caffepy.device.blob import Layout


def mask_size(shape: Sequence[int], layout: Layout) -> int:
    """Return the bytes: one for each 16 bytes, where the channels lie last in whole packs of 16
    bytes; else 0, backward looks at the output.
    """
    pack = 16 // layout.dtype.itemsize
    whole = layout.channels_last and shape[1] % pack == 0
    return prod(shape) // pack if whole else 0
