"""Convolutions whose kernels read their input where another layer says (Dai et al. 2017)."""

from collections.abc import Sequence
from math import prod
from typing import ClassVar

import numpy as np

from caffepy.core.errors import ConfigError
from caffepy.device.blob import Array
from caffepy.layer.base import Blobs, Weighted, layer
from caffepy.layer.convolution import read_window
from caffepy.proto.caffe_pb2 import DeformableConvolutionParameter


@layer("DeformableConvolution")
class DeformableConvolution(Weighted):
    """x (N, C, H, W), offsets (N, G * kh * kw * 2, Ho, Wo) -> (N, O, Ho, Wo); weight (O, C/group,
    kh, kw), bias (O,) (Deformable ConvNets).

    A convolution of which tap (i, j) at output (p, q) reads the channels of deformable group g,
    bilinearly, so far down and right from its place as offsets g, i, j, 0 and 1 at (p, q) say; 0
    outside the input, and the last row or column up to its end.
    """

    on_gpu = True
    can_recompute = True
    bottoms: ClassVar[int] = 2
    backward_reads_top = False

    @property
    def settings(self) -> DeformableConvolutionParameter:
        """The layer's message."""
        return self.param.deformable_convolution_param

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param, shape = self.settings, bottom[0].shape
        if len(shape) != 4 or bottom[0].axis(param.axis) != 1:
            raise ConfigError(f"{self.type} needs (N, C, H, W) and axis 1, not {list(shape)}")
        self.window = read_window(param, 2)
        self.channels, self.outputs, self.group = shape[1], param.num_output, param.group
        self.parts = param.deformable_group
        if self.outputs < 1:
            raise ConfigError("num_output must be 1 or more")
        for what, count, groups in (
            ("input channels", self.channels, self.group),
            ("outputs", self.outputs, self.group),
            ("input channels", self.channels, self.parts),
        ):
            if groups < 1 or count % groups:
                raise ConfigError(f"{count} {what} cannot be split into {groups} groups")
        weight = (self.outputs, self.channels // self.group, *self.window.kernel)
        self.make_weight(weight, self.outputs, param)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        n, channels, *size = bottom[0].shape
        if channels != self.channels:
            raise ConfigError(f"the weights are for {self.channels} input channels, not {channels}")
        out = [
            (length + 2 * p - d * (k - 1) - 1) // s + 1
            for length, k, s, p, d in zip(size, *self.window, strict=True)
        ]
        if min(out) < 1:
            raise ConfigError(f"the kernel does not fit its input of {size[0]}x{size[1]}")
        self.taps = prod(self.window.kernel)
        wanted = (n, self.parts * self.taps * 2, *out)
        if bottom[1].shape != wanted:
            raise ConfigError(
                f"the offsets need shape {list(wanted)}, two for each tap of the kernel in each of "
                f"{self.parts} deformable groups, not {list(bottom[1].shape)}"
            )
        top[0].reshape((n, self.outputs, *out))
        self.positions = prod(out)
        self.columns = self.buffer((channels, self.taps, *out))
        self.products = (
            (self.group, self.outputs // self.group, -1),  # weight
            (self.group, channels // self.group * self.taps, self.positions),  # columns
            (n, self.group, self.outputs // self.group, self.positions),  # top
        )
        self.moves = (n, self.parts, self.taps, 2, *out)

    def take_columns(self, bottom: Blobs, n: int) -> None:
        """Write the columns of image n."""
        moves = bottom[1].data.reshape(self.moves)[n]
        self.ops.deformable_columns(bottom[0].data[n], moves, self.columns.data, self.window)

    def give_columns(self, bottom: Blobs, n: int, propagate_down: Sequence[bool]) -> None:
        """Write the gradients of the wanted bottoms of image n, of those of its columns."""
        dx = bottom[0].diff[n] if propagate_down[0] else None
        doffsets = bottom[1].diff.reshape(self.moves)[n] if propagate_down[1] else None
        moves = bottom[1].data.reshape(self.moves)[n]
        given = self.columns.data, bottom[0].data[n], moves
        self.ops.deformable_backward(*given, dx, doffsets, self.window)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        weights, columns, tops = self.products
        w, y = self.blobs[0].data.reshape(weights), top[0].data
        for n, out in enumerate(y.reshape(tops)):
            self.take_columns(bottom, n)
            for g, read in enumerate(self.columns.data.reshape(columns)):
                self.ops.matmul(w[g], read, out[g])  # (O/g, K) @ (K, P)
        if self.bias is not None:
            self.ops.add_bias(y.reshape(len(y), self.outputs, self.positions), self.bias)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dw += dy @ columns.T, db += sums of dy; of dcolumns = w.T @ dy, dx is the transpose of
        reading, doffsets the slope of x at the places.
        """
        weights, columns, tops = self.products
        dy, dw, db = top[0].diff, self.weight_diff, self.bias_diff
        if db is not None:
            self.ops.bias_gradient(dy.reshape(len(dy), self.outputs, self.positions), db)
        w, taken = self.blobs[0].data.reshape(weights), self.columns.data.reshape(columns)
        for n, given in enumerate(dy.reshape(tops)):
            if dw is not None:
                self.take_columns(bottom, n)
                for g, change in enumerate(dw.reshape(weights)):
                    self.ops.matmul(given[g], taken[g].T, change, True)  # (O/g, P) @ (P, K)
            if any(propagate_down):
                for g in range(self.group):
                    self.ops.matmul(w[g].T, given[g], taken[g])  # (K, O/g) @ (O/g, P)
                self.give_columns(bottom, n, propagate_down)

    def macs(self, bottoms: Sequence[int], tops: Sequence[int]) -> int:
        return self.channels // self.group * self.taps * tops[0]


@layer("ModulatedDeformableConvolution")
class ModulatedDeformableConvolution(DeformableConvolution):
    """A DeformableConvolution whose taps are multiplied by the third bottom, masks (N, G * kh * kw,
    Ho, Wo) (Deformable ConvNets v2: Zhu et al. 2019).

    What is read between the last row or column and zeros outside is interpolated, on all sides.
    """

    bottoms: ClassVar[int] = 3

    @property
    def settings(self) -> DeformableConvolutionParameter:
        return self.param.modulated_deformable_convolution_param

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        n, channels, height, width = bottom[0].shape
        wanted = (n, self.parts * self.taps, *top[0].shape[2:])
        if bottom[2].shape != wanted:
            raise ConfigError(
                f"the masks need shape {list(wanted)}, one for each tap of the kernel in each of "
                f"{self.parts} deformable groups, not {list(bottom[2].shape)}"
            )
        # Zeros around the image: then no tap ends at its border.
        self.framed, self.change = (
            self.buffer((channels, height + 2, width + 2)) for _ in range(2)
        )
        self.framed_window = self.window._replace(pad=tuple(pad - 1 for pad in self.window.pad))
        self.plain_columns = self.buffer(self.columns.shape)
        self.masks = (n, self.parts, 1, self.taps, self.positions)
        self.of_parts = (self.parts, channels // self.parts, self.taps, self.positions)

    def read(self, bottom: Blobs, n: int) -> Array:
        """Return the columns of image n without masks, by parts."""
        self.framed.data[:, 1:-1, 1:-1] = bottom[0].data[n]
        moves, columns = bottom[1].data.reshape(self.moves)[n], self.plain_columns.data
        self.ops.deformable_columns(self.framed.data, moves, columns, self.framed_window)
        return columns.reshape(self.of_parts)

    def take_columns(self, bottom: Blobs, n: int) -> None:
        masks, columns = bottom[2].data.reshape(self.masks)[n], self.columns.data
        np.multiply(self.read(bottom, n), masks, out=columns.reshape(self.of_parts))

    def give_columns(self, bottom: Blobs, n: int, propagate_down: Sequence[bool]) -> None:
        """dmasks = sum over the channels of a part of columns * dcolumns."""
        columns = self.columns.data.reshape(self.of_parts)
        plain = self.read(bottom, n)
        if propagate_down[2]:
            dmasks = bottom[2].diff.reshape(self.masks)[n]
            np.sum(plain * columns, axis=1, keepdims=True, out=dmasks)
        np.multiply(columns, bottom[2].data.reshape(self.masks)[n], out=columns)
        dx = self.change.data if propagate_down[0] else None
        doffsets = bottom[1].diff.reshape(self.moves)[n] if propagate_down[1] else None
        given = self.columns.data, self.framed.data, bottom[1].data.reshape(self.moves)[n]
        self.ops.deformable_backward(*given, dx, doffsets, self.framed_window)
        if dx is not None:
            bottom[0].diff[n] = dx[:, 1:-1, 1:-1]
