"""The contract of fused groups."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from caffepy.device.blob import Blob
from caffepy.layer.base import Layer


class Member(NamedTuple):
    """A layer of a fused group, its blobs in the layout that it takes, and which of its bottoms get
    a gradient.
    """

    layer: Layer
    bottoms: Sequence[Blob]
    tops: Sequence[Blob]
    propagate_down: Sequence[bool]


class FusedGroup(Protocol):
    """Several layers computed at once, with the numbers of running them one after the other.

    Only the tops of the last member are written; blobs between members are left as they are.
    """

    def forward(self) -> None:
        """Write the data of the last member's tops."""

    def backward(self) -> None:
        """Write the diffs of the bottoms that come from outside the group, add to the diffs of the
        parameters.
        """
