"""Layers that slide a kernel over any number of spatial axes, those after the channel axis."""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, ClassVar, NamedTuple

import numpy as np

from caffepy.core.errors import ConfigError
from caffepy.device.blob import Array, Blob, Layout
from caffepy.layer.base import Blobs, Layer, Weighted, layer
from caffepy.layer.pooling import check_padded, read_sides, reads_same, same_sides
from caffepy.ops.objects import Normalized, NormSums, Preparation, Windows
from caffepy.proto.caffe_pb2 import ConvolutionParameter, DeformableConvolutionParameter


class Window(NamedTuple):
    """Kernel size, stride, padding and dilation along each spatial axis."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    pad: tuple[int, ...]
    dilation: tuple[int, ...]

    def grown(self, size: Sequence[int]) -> tuple[int, ...]:
        """Return the size of an input with the zeros that the kernel reads behind it.

        There are none unless the kernel is larger than the padded input by less than the stride:
        then Caffe's division, which truncates, finds one place for it. ConfigError if it is larger.
        """
        least = [
            d * (k - 1) + 1 - 2 * p
            for k, p, d in zip(self.kernel, self.pad, self.dilation, strict=True)
        ]
        if any(m >= n + s for m, n, s in zip(least, size, self.stride, strict=True)):
            dilated = f", dilation {by(self.dilation)}" if max(self.dilation) > 1 else ""
            raise ConfigError(
                f"kernel {by(self.kernel, False)} does not fit its {by(size, False)} input "
                f"(pad {by(self.pad)}{dilated})"
            )
        return tuple(map(max, size, least))


def by(sizes: Sequence[int], brief: bool = True) -> str:
    """Return `5x3`, or one number if all sizes are equal and `brief` is set."""
    return str(sizes[0]) if brief and len(set(sizes)) == 1 else "x".join(map(str, sizes))


def read_window(
    param: ConvolutionParameter | DeformableConvolutionParameter, axes: int, uneven: bool = False
) -> Window:
    """Read the sizes for these spatial axes: one for all, one for each, or (2 axes) _h and _w.

    ConfigError for pads that differ unless they may be `uneven`.
    """
    if isinstance(param, ConvolutionParameter) and param.HasField("kernel_depth"):
        raise ConfigError("kernel_depth is for layers of C3D, such as Convolution3D")

    def sizes(name: str, pair: str, least: int, default: tuple[int, ...] = ()) -> tuple[int, ...]:
        h, w, values = f"{pair}_h", f"{pair}_w", getattr(param, name)
        if pair and (param.HasField(h) or param.HasField(w)):
            if axes != 2:
                raise ConfigError(
                    f"{h} and {w} are for inputs with 2 spatial axes, not {axes}; give {name}"
                )
            if values:
                raise ConfigError(f"{name} and {h}/{w} exclude each other")
            found: tuple[int, ...] = (getattr(param, h), getattr(param, w))
        else:
            found = tuple(values) or default
        if len(found) == 1:
            found *= axes
        if len(found) != axes:
            raise ConfigError(
                f"{name} must be given once or once for each of {axes} spatial axes, "
                f"not {len(values)} times"
            )
        if any(v < least for v in found):
            raise ConfigError(
                f"{name} must be {least} or more along every axis, not {by(found, False)}"
            )
        return found

    pad = sizes("pad", "pad", 0, (0,))
    if isinstance(param, ConvolutionParameter):
        differ = reads_same(param)
        if given := read_sides(param):
            if axes != 2:
                raise ConfigError("pad_t, pad_b, pad_l, pad_r are for inputs with 2 spatial axes")
            pad = tuple(map(min, given))
            differ = any(before != behind for before, behind in given)
        if differ and not uneven:
            raise ConfigError("pads that differ, and pad_type 1, are for Convolution alone")
    return Window(
        sizes("kernel_size", "kernel", 1),
        sizes("stride", "stride", 1, (1,)),
        pad,
        sizes("dilation", "", 1, (1,)),
    )


class _Filtering(Weighted):
    """Base of Convolution and its transpose: window, weight and bias, checks of shapes.

    Top i is computed from bottom i; all share the weights.
    """

    on_gpu = only_launches = True
    can_recompute = True
    bottoms = (1, None)
    tops = (1, None)
    same_count = True
    backward_reads_top = False
    pads_may_differ: ClassVar[bool] = False

    def weight_shape(self) -> tuple[int, ...]:
        raise NotImplementedError

    def settings(self, bottom: Blobs) -> ConvolutionParameter:
        """Return the layer's settings; ConfigError if the first bottom does not fit them."""
        return self.param.convolution_param

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.settings(bottom)
        self.axis = bottom[0].axis(param.axis)
        axes = len(bottom[0].shape) - self.axis - 1
        self.window = read_window(param, axes, self.pads_may_differ)
        channels, outputs, group = self.sizes(bottom, param)
        if outputs < 1:
            raise ConfigError("num_output must be 1 or more")
        if group < 1 or channels % group or outputs % group:
            outputs_fail = group and channels % group == 0
            what = f"{outputs} outputs" if outputs_fail else f"{channels} input channels"
            raise ConfigError(f"{what} cannot be split into {group} groups")
        self.channels, self.outputs, self.group = channels, outputs, group
        self.make_weight(self.weight_shape(), outputs, param)

    def sizes(self, bottom: Blobs, param: ConvolutionParameter) -> tuple[int, int, int]:
        """Return the numbers of input channels, of outputs, and of groups."""
        return bottom[0].shape[self.axis], param.num_output, param.group

    def check_bottoms(self, bottom: Blobs) -> tuple[int, ...]:
        """Check that all bottoms have the shape that the weights need; return the spatial sizes."""
        shape = bottom[0].shape
        for b in bottom[1:]:
            if b.shape != shape:
                raise ConfigError(
                    f"all inputs must have one shape, not {list(shape)} and {list(b.shape)}"
                )
        spatial = shape[self.axis + 1 :]
        if len(spatial) != len(self.window.kernel):
            raise ConfigError(
                f"{len(self.window.kernel)} spatial axes are needed, not {len(spatial)}"
            )
        if shape[self.axis] != self.channels:
            raise ConfigError(
                f"the weights are for {self.channels} input channels, not {shape[self.axis]}"
            )
        return spatial

    def plan(self, images: int, channels: int, spatial: tuple[int, ...]) -> None:
        """Plan for an input of this many channels; without spatial axes images are points."""
        point = () if spatial else (1,)
        kernel, stride, pad, dilation = self.window if spatial else ((1,), (1,), (0,), (1,))
        # A larger stride steps over the whole input, too.
        axes = zip(spatial or point, kernel, stride, pad, dilation, strict=True)
        stride = tuple(min(s, n + 2 * p + d * (k - 1) + 1) for n, k, s, p, d in axes)
        window = stride, pad, dilation
        x_shape, w_shape = (images, channels, *spatial, *point), (*self.weight_shape(), *point)
        self.conv = self.ops.Convolution(x_shape, w_shape, window, self.group, self.dtype)


@layer("Convolution")
class Convolution(_Filtering):
    """(..., C, *in) -> (..., O, *out); weight (O, C/group, *kernel), bias (O,).

    out = (in + 2*pad - (dilation*(kernel - 1) + 1)) / stride + 1, truncated towards 0. pad_t,
    pad_b, pad_l and pad_r are pads of an image that differ, pad_type 1 those that give in / stride
    outputs, rounded up (Synopsys).
    """

    pads_may_differ = True
    seeks_preferred_layout = True
    can_fuse = True

    @property
    def can_replay(self) -> bool:  # type: ignore[override]
        return self.conv.can_replay

    @property
    def weight(self) -> Array:
        """w, as forward multiplies by it."""
        return self.blobs[0].data

    def weight_shape(self) -> tuple[int, ...]:
        return (self.outputs, self.channels // self.group, *self.window.kernel)

    def margins(self, spatial: Sequence[int]) -> list[tuple[int, int]]:
        """Return the zeros before and behind each axis, but those of the window's pad."""
        param = self.param.convolution_param
        kernel, stride, pad, dilation = self.window
        if reads_same(param):
            extents = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
            return [same_sides(*axis) for axis in zip(spatial, extents, stride, strict=True)]
        sides = read_sides(param) or [(p, p) for p in pad]
        return [(before - p, behind - p) for (before, behind), p in zip(sides, pad, strict=True)]

    def borders(self, spatial: Sequence[int]) -> list[tuple[int, int]]:
        """Return the zeros before and behind each axis that forward copies the bottoms between."""
        margins = self.margins(spatial)
        padded = [n + sum(margin) for n, margin in zip(spatial, margins, strict=True)]
        more = zip(margins, padded, self.window.grown(padded), strict=True)
        return [(before, behind + grown - n) for (before, behind), n, grown in more]

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        spatial = self.check_bottoms(bottom)
        borders = self.borders(spatial)
        grown = tuple(n + sum(border) for n, border in zip(spatial, borders, strict=True))
        check_padded(grown, self.window.pad)
        outer = bottom[0].shape[: self.axis]
        self.plan(prod(outer), self.channels, grown)
        inside = (
            slice(before, before + n) for n, (before, _) in zip(spatial, borders, strict=True)
        )
        self.inside: tuple[Any, ...] = (..., *inside)
        self.copies: list[Blob] = []  # of the bottoms within zeros, if they must be grown
        for b in bottom if grown != spatial else ():
            self.copies.append(self.buffer((*outer, self.channels, *grown)))
            if b.layout != self.copies[-1].layout:
                self.copies[-1].set_layout(b.layout)
        for t in top:
            t.reshape((*outer, self.outputs, *(self.conv.y_shape[2:] if spatial else ())))
        self.takes_preferred_layout = self.axis == 1 and 1 <= len(spatial) <= 3 and not self.copies

    def whole(self, bottom: Blobs) -> Blobs:
        """Return what the kernel reads: the bottoms, or their copies within zeros."""
        for x, b in zip(self.copies, bottom, strict=False):
            self.ops.copy(b.data, x.data[self.inside])
        return self.copies or bottom

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        for x, y in zip(self.whole(bottom), top, strict=True):
            self.conv.forward(x.data, self.weight, self.bias, y.data)

    def takes_normalized(self, layout: Layout) -> bool:
        """True if `forward_prepare` with `given` saves passes, for a bottom of this layout."""
        return not self.copies and len(self.blobs) == 1 and self.conv.takes_normalized(layout)

    def forward_prepare(
        self, bottom: Blob, top: Blob, preparation: Preparation, given: Normalized | None = None
    ) -> None:
        """Forward of one bottom, and the numbers of a BatchNorm of its top; of what a normalization
        makes of the bottom, if it is `given`.
        """
        (x,) = self.whole([bottom])
        arrays = x.data, self.blobs[0].data, self.bias, top.data
        self.conv.forward_prepare(*arrays, preparation, given)

    def gradients(
        self, dy: Array, db: Array | None, x: Blob, copy: Blob, propagate_down: bool
    ) -> None:
        """Add to dw, and to db unless it is None; write the diff of a bottom with `propagate_down`,
        by way of its copy if there is one.
        """
        dw = self.weight_diff
        beside = self.side_stream(propagate_down)
        if propagate_down:  # enqueued first, since others wait for it
            self.conv.backward_data(dy, self.weight, copy.diff)
            if copy is not x:
                self.ops.copy(copy.diff[self.inside], x.diff)
        if dw is not None or db is not None:
            with beside:
                self.conv.backward_weight(copy.data, dy, dw, db)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        for y, down, x, copy in zip(
            top, propagate_down, bottom, self.copies or bottom, strict=True
        ):
            self.gradients(y.diff, self.bias_diff, x, copy, down)

    def sums_gradients(self, dy: Array, bottom: Blob, alike: bool) -> bool:
        """True if `backward_norm` may save passes; `alike` if what is added to the bottom's diff
        comes from convolutions with the same window.
        """
        return not self.copies and self.conv.sums_gradients(dy, bottom.data, alike)

    def backward_norm(self, top: Blob, bottom: Blob, norm: NormSums) -> None:
        """Backward of one bottom, and in place of its diff half the gradient of what made it."""
        dw, db = self.weight_diff, self.bias_diff
        if dw is not None or db is not None:
            with self.side_stream(True):
                self.conv.backward_weight(bottom.data, top.diff, dw, db)
        self.conv.backward_data_norm(top.diff, self.blobs[0].data, norm)

    def pools(self, layout: Layout, window: Windows) -> bool:
        """True if `forward_maxima` with a ReLU, and its gradient, may save passes for a layout."""
        return not self.copies and self.axis == 1 and self.conv.pools(layout, window)

    def skips_gradient(self, layout: Layout) -> bool:
        """True if `backward_norm_gradient` of the kernel saves passes, for this layout."""
        return not self.copies and len(self.blobs) == 1 and self.conv.skips_gradient(layout)

    def skips_output(self, layout: Layout) -> bool:
        """True if `forward_normalized` and `backward_normalized` save passes, for this layout."""
        return not self.copies and len(self.blobs) == 1 and self.conv.skips_output(layout)

    def macs(self, bottoms: Sequence[int], tops: Sequence[int]) -> int:
        """Each output is a sum over one filter."""
        weight = self.blobs[0]
        return weight.count * (sum(tops) // weight.shape[0])


@layer("DepthwiseConvolution", "DepthwiseConv")
class DepthwiseConvolution(Convolution):
    """Convolution under the names of MobileNet's forks, which give `group` as it needs it."""


@layer("ConvolutionDepthwise")
class ConvolutionDepthwise(Convolution):
    """(..., C, *in) -> (..., C, *out), each channel by its own filter; weight (C, 1, *kernel).

    num_output and group are not read.
    """

    def sizes(self, bottom: Blobs, param: ConvolutionParameter) -> tuple[int, int, int]:
        channels = bottom[0].shape[self.axis]
        return channels, channels, channels


@layer("Deconvolution")
class Deconvolution(_Filtering):
    """(..., C, *in) -> (..., O, *out), the transpose of Convolution; weight (C, O/group, *kernel),
    bias (O,).

    out = stride*(in - 1) + dilation*(kernel - 1) + 1 - 2*pad.
    """

    def weight_shape(self) -> tuple[int, ...]:
        return (self.channels, self.outputs // self.group, *self.window.kernel)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        spatial = self.check_bottoms(bottom)
        out = tuple(
            s * (n - 1) + d * (k - 1) + 1 - 2 * p
            for n, k, s, p, d in zip(spatial, *self.window, strict=True)
        )
        if min(out, default=1) < 1:
            raise ConfigError(
                f"pad {by(self.window.pad)} leaves nothing of the {by(spatial, False)} input's "
                "output"
            )
        check_padded(out, self.window.pad, "outputs")
        outer = bottom[0].shape[: self.axis]
        self.plan(prod(outer), self.outputs, out)
        self.rows = prod(outer), self.outputs, prod(out)
        for t in top:
            t.reshape((*outer, self.outputs, *out))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        """Every input element spreads its kernel over the output; then the bias."""
        for x, y in zip(bottom, top, strict=True):
            self.conv.backward_data(x.data, self.blobs[0].data, y.data)
            if self.bias is not None:
                self.ops.add_bias(y.data.reshape(self.rows), self.bias)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        dw, db = self.weight_diff, self.bias_diff
        for y, down, x in zip(top, propagate_down, bottom, strict=True):
            if db is not None:
                self.ops.bias_gradient(y.diff.reshape(self.rows), db)
            if dw is not None:
                self.conv.backward_weight(y.diff, x.data, dw, None)
            if down:
                self.conv.forward(y.diff, self.blobs[0].data, None, x.diff)

    def macs(self, bottoms: Sequence[int], tops: Sequence[int]) -> int:
        """Each input is multiplied by one filter."""
        weight = self.blobs[0]
        return weight.count * (sum(bottoms) // weight.shape[0])


class _OverVolumes(_Filtering):
    """Base of C3D's layers, which have settings of their own and a bias (1, 1, 1, 1, O)."""

    def settings(self, bottom: Blobs) -> ConvolutionParameter:
        """The settings as those of Convolution: sizes along time first, then along both axes."""
        given = self.param.convolution3d_param
        if len(bottom[0].shape) != 5:
            raise ConfigError(f"{self.type} needs (N, C, L, H, W), not {list(bottom[0].shape)}")
        if given.filter_group < 1 or given.num_output % given.filter_group:
            raise ConfigError(
                f"{given.num_output} outputs cannot be split into {given.filter_group} "
                "filter_groups"
            )
        names = ("num_output", "bias_term", "weight_filler", "bias_filler")
        param = ConvolutionParameter(**{name: getattr(given, name) for name in names})
        for over_time, within, target in (
            (given.kernel_depth, given.kernel_size, param.kernel_size),
            (given.temporal_stride, given.stride, param.stride),
            (given.temporal_pad, given.pad, param.pad),
        ):
            target.extend([over_time, within, within])
        return param

    def make_weight(self, shape: Sequence[int], outputs: int, param: Any) -> None:
        shapes = {"weight": shape} | ({"bias": (1, 1, 1, 1, outputs)} if param.bias_term else {})
        self.make_params(shapes, (param.weight_filler, param.bias_filler))

    @property
    def bias(self) -> Array | None:
        bias = super().bias
        return None if bias is None else bias.reshape(-1)

    @property
    def bias_diff(self) -> Array | None:
        db = super().bias_diff
        return None if db is None else db.reshape(-1)


@layer("Convolution3D")
class Convolution3D(_OverVolumes, Convolution):
    """(N, C, L, H, W) -> (N, O, Lo, Ho, Wo); weight (O, C, depth, k, k), bias (1, 1, 1, 1, O).

    C3D's Convolution over three axes (Tran et al. 2015). temporal_stride, temporal_pad and
    kernel_depth are those of L. `group` is not read, filter_group changes no result.
    """


@layer("Deconvolution3D")
class Deconvolution3D(_OverVolumes, Deconvolution):
    """(N, C, L, H, W) -> (N, O, Lo, Ho, Wo), the transpose of Convolution3D; weight (C, O, depth,
    k, k), bias (1, 1, 1, 1, O).
    """


@layer("Local")
class Local(Weighted):
    """(N, C, H, W) -> (N, O, Ho, Wo), a convolution with weights of its own at each position.

    Weight (O, 1, C * k * k, Ho * Wo), bias (1, 1, O, Ho * Wo) (happynear).
    Ho = (H + 2*pad - kernel_size) // stride + 1.
    """

    on_gpu = True
    can_recompute = True
    backward_reads_top = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param, shape = self.param.local_param, bottom[0].shape
        if len(shape) != 4:
            raise ConfigError(f"Local needs (N, C, H, W), not {list(shape)}")
        if min(param.num_output, param.kernel_size, param.stride) < 1:
            raise ConfigError("local_param: num_output, kernel_size and stride must be 1 or more")
        self.item = shape[1:]
        self.window = param.kernel_size, param.stride, param.pad
        side, stride, pad = self.window
        if min(self.item[1:]) < side:
            raise ConfigError(f"kernel {side} does not fit its {by(self.item[1:], False)} input")
        self.out = [(n + 2 * pad - side) // stride + 1 for n in self.item[1:]]
        inputs, positions = self.item[0] * side * side, prod(self.out)
        shapes: dict[str, Sequence[int]] = {"weight": (param.num_output, 1, inputs, positions)}
        if param.bias_term:
            shapes["bias"] = (1, 1, param.num_output, positions)
        self.make_params(shapes, (param.weight_filler, param.bias_filler))
        self.view = param.num_output, inputs, positions

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        if bottom[0].shape[1:] != self.item:
            raise ConfigError(
                f"the weights are for {list(self.item)}, not {list(bottom[0].shape[1:])}"
            )
        top[0].reshape((bottom[0].shape[0], self.view[0], *self.out))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        y, w = top[0].data, self.blobs[0].data.reshape(self.view)
        self.ops.local_forward(bottom[0].data, w, y, *self.window)
        if self.bias is not None:
            y += self.bias.reshape(y.shape[1:])

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        dy, dw, db = top[0].diff, self.weight_diff, self.bias_diff
        if db is not None:
            db += dy.sum(axis=0).reshape(db.shape)
        if dw is not None:
            self.ops.local_backward_weight(dy, bottom[0].data, dw.reshape(self.view), *self.window)
        if propagate_down[0]:
            w = self.blobs[0].data.reshape(self.view)
            self.ops.local_backward_data(dy, w, bottom[0].diff, *self.window)

    def macs(self, bottoms: Sequence[int], tops: Sequence[int]) -> int:
        return self.view[1] * tops[0]


@layer("Im2col")
class Im2col(Layer):
    """(..., C, *in) -> (..., C * prod(kernel), *out): the window of each output position as a
    column.

    Rows are ordered by channel, then by position in the kernel.
    """

    on_gpu = True
    can_recompute = True
    backward_reads_bottom = backward_reads_top = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.convolution_param
        self.axis = bottom[0].axis(param.axis)
        self.window = read_window(param, len(bottom[0].shape) - self.axis - 1)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shape, axis = bottom[0].shape, self.axis
        outer, channels, spatial = shape[:axis], shape[axis], shape[axis + 1 :]
        grown = self.window.grown(spatial)
        check_padded(grown, self.window.pad)
        kernel, _, pad, _ = self.window
        self.out = tuple(
            (n + 2 * p - (d * (k - 1) + 1)) // s + 1
            for n, k, s, p, d in zip(grown, *self.window, strict=True)
        )
        padded = [n + 2 * p for n, p in zip(grown, pad, strict=True)]
        self.pad_buffer = self.buffer((prod(outer), channels, *padded))
        inside = [slice(p, p + n) for n, p in zip(spatial, pad, strict=True)]
        self.within: tuple[Any, ...] = (..., *inside)
        self.columns = (prod(outer), channels, *kernel, *self.out)
        top[0].reshape((*outer, channels * prod(kernel), *self.out))

    def windows(self) -> Iterator[tuple[tuple[Any, ...], Array]]:
        """Yield the index in the columns of each kernel position, and its elements of the input."""
        _, stride, _, dilation = self.window
        for at in np.ndindex(*self.window.kernel):
            where: list[Any] = [
                slice(a * d, a * d + (n - 1) * s + 1, s)
                for a, d, n, s in zip(at, dilation, self.out, stride, strict=True)
            ]
            yield (slice(None), slice(None), *at), self.pad_buffer.data[(..., *where)]

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        padded = self.pad_buffer.data
        padded[...] = 0
        inside = padded[self.within]
        inside[...] = bottom[0].data.reshape(inside.shape)
        columns = top[0].data.reshape(self.columns)
        for at, window in self.windows():
            columns[at] = window

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """Add each column to the elements that it was copied from."""
        if propagate_down[0]:
            columns, padded = top[0].diff.reshape(self.columns), self.pad_buffer.data
            padded[...] = 0
            for at, window in self.windows():
                window += columns[at]
            bottom[0].diff[...] = padded[self.within].reshape(bottom[0].shape)
