"""Batches of images."""

from collections.abc import Sequence
from typing import Protocol

from caffepy.device.blob import Array
from caffepy.ops import objects
from caffepy.ops.protocol.types import Maybe

Crops = Sequence[Array]
"""Start rows and columns of crops, and which are mirrored."""


class TransformOps(Protocol):
    def Staging(self) -> objects.Staging:
        """Make buffers for batches on their way to the device."""

    def transform_batch(
        self, records: Array, out: Array, crops: Crops, mean: Maybe, scale: float
    ) -> None:
        """out (N, C, h, w) = (records - mean) * scale, cropped at the offsets and mirrored; records
        (N, C, H, W) of uint8 or float32.

        crops are h_off, w_off and mirror, of one value an image; mean is None or (C, H, W), where C
        as well as H and W may be 1. On a GPU all but out may lie on the host; a mean is best kept
        on the device.
        """
