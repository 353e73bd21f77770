"""Runs of layers that are computed together, so that what lies between them need not go through
memory.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from caffepy.device.blob import Blob
from caffepy.layer.base import Layer


class Member(NamedTuple):
    """A layer of a run with its blobs as it takes them, and which bottoms want their gradient."""

    layer: Layer
    bottoms: Sequence[Blob]
    tops: Sequence[Blob]
    propagate_down: Sequence[bool]


class FusedRun(Protocol):
    """Several layers at once, with the numbers that they give one after the other.

    Only the tops of the last member are written; the blobs between members are left as they are.
    """

    def forward(self) -> None:
        """Write the data of the last top."""

    def backward(self) -> None:
        """Write the diffs of the first member's bottoms, and of others that come in, add to those
        of parameters.
        """
