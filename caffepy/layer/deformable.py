"""Convolutions whose kernels read their input where another layer says (Dai et al. 2017)."""

from collections.abc import Sequence
from math import prod

from caffepy.core.errors import ConfigError
from caffepy.layer.base import Blobs, Weighted, layer
from caffepy.layer.convolution import read_window


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
    bottoms = 2
    backward_reads_top = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param, shape = self.param.deformable_convolution_param, bottom[0].shape
        if len(shape) != 4 or bottom[0].axis(param.axis) != 1:
            raise ConfigError(f"DeformableConvolution needs (N, C, H, W) and axis 1, not {shape}")
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

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        weights, columns, tops = self.products
        w, y = self.blobs[0].data.reshape(weights), top[0].data
        offsets = bottom[1].data.reshape(self.moves)
        for x, moves, out in zip(bottom[0].data, offsets, y.reshape(tops), strict=True):
            self.ops.deformable_columns(x, moves, self.columns.data, self.window)
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
        w, read = self.blobs[0].data.reshape(weights), self.columns.data
        taken = read.reshape(columns)
        offsets = bottom[1].data.reshape(self.moves)
        for n, (x, moves, given) in enumerate(
            zip(bottom[0].data, offsets, dy.reshape(tops), strict=True)
        ):
            if dw is not None:
                self.ops.deformable_columns(x, moves, read, self.window)
                for g, change in enumerate(dw.reshape(weights)):
                    self.ops.matmul(given[g], taken[g].T, change, True)  # (O/g, P) @ (P, K)
            if not any(propagate_down):
                continue
            for g in range(self.group):
                self.ops.matmul(w[g].T, given[g], taken[g])  # (K, O/g) @ (O/g, P)
            dx = bottom[0].diff[n] if propagate_down[0] else None
            doffsets = bottom[1].diff.reshape(self.moves)[n] if propagate_down[1] else None
            self.ops.deformable_backward(read, x, moves, dx, doffsets, self.window)

    def macs(self, bottoms: Sequence[int], tops: Sequence[int]) -> int:
        return self.channels // self.group * self.taps * tops[0]
