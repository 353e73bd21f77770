"""The members of groups of layers that are computed together, see `fused`."""

from collections.abc import Sequence
from typing import NamedTuple

from caffepy.device.blob import Blob
from caffepy.layer.base import Layer
from caffepy.layer.convolution import Convolution


class Member(NamedTuple):
    """A layer of a fused group, its blobs in its layout, and which bottoms get a gradient."""

    layer: Layer
    bottoms: Sequence[Blob]
    tops: Sequence[Blob]
    propagate_down: Sequence[bool]


def kind_of(layer: Layer) -> type[Layer]:
    """Return the type by which patterns know a layer."""
    return Convolution if isinstance(layer, Convolution) else type(layer)
