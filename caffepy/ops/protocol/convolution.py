"""Convolution, local connections and deformable convolution."""

from collections.abc import Sequence
from typing import Protocol

from numpy.typing import DTypeLike

from caffepy.device.blob import Array
from caffepy.ops import objects
from caffepy.ops.protocol.types import Maybe, Sizes


class ConvolutionOps(Protocol):
    def Convolution(
        self, x_shape: Sizes, w_shape: Sizes, window: Sequence[Sizes], group: int, dtype: DTypeLike
    ) -> objects.Convolution:
        """Make a convolution of these shapes, in any number of spatial axes.

        window = stride, pad, dilation, each with a number for each axis.
        """

    # Local connections: x, dx (N, C, H, W), y, dy (N, O, h, w), w, dw (O, C side side, h w)

    def local_forward(self, x: Array, w: Array, y: Array, side: int, stride: int, pad: int) -> None:
        """y = convolution of x with separate weights at each position."""

    def local_backward_data(
        self, dy: Array, w: Array, dx: Array, side: int, stride: int, pad: int
    ) -> None:
        """Write dx, the transpose of `local_forward`."""

    def local_backward_weight(
        self, dy: Array, x: Array, dw: Array, side: int, stride: int, pad: int
    ) -> None:
        """dw += products of dy and the elements of x that the weights were multiplied by."""

    # Deformable convolution of an image: x, dx (C, H, W), offsets, doffsets (G, kh kw, 2, Ho, Wo) =
    # down, right, of G groups of channels, columns (C, kh kw, Ho, Wo); window = kernel, stride,
    # pad, dilation, each (height, width)

    def deformable_columns(
        self, x: Array, offsets: Array, columns: Array, window: Sequence[Sizes]
    ) -> None:
        """Write columns: x where the offsets move each tap of the kernel, bilinear; 0 outside."""

    def deformable_backward(
        self,
        dcolumns: Array,
        x: Array,
        offsets: Array,
        dx: Maybe,
        doffsets: Maybe,
        window: Sequence[Sizes],
    ) -> None:
        """Write dx, the transpose of `deformable_columns`, and doffsets."""
