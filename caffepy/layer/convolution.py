"""Layers that slide a kernel over any number of spatial axes, those after the channel axis."""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from caffepy.blob import Blob, shape_string
from caffepy.errors import ConfigError
from caffepy.filler import fill
from caffepy.layer.base import Blobs, Layer, layer
from caffepy.proto.caffe_pb2 import ConvolutionParameter


class Window(NamedTuple):
    """Kernel size, stride, padding and dilation along each spatial axis."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    pad: tuple[int, ...]
    dilation: tuple[int, ...]

    def check_fits(self, size: Sequence[int]) -> None:
        """ConfigError if the kernel is larger than the padded input of this size."""
        if any(
            d * (k - 1) + 1 > n + 2 * p for n, k, p, d in zip(size, self.kernel, self.pad, self.dilation, strict=True)
        ):
            dilation = f", dilation {by(self.dilation)}" if any(d > 1 for d in self.dilation) else ""
            raise ConfigError(
                f"kernel {by(self.kernel, False)} does not fit its {by(size, False)} input "
                f"(pad {by(self.pad)}{dilation})"
            )


def by(sizes: Sequence[int], brief: bool = True) -> str:
    """`5x3`; one number if all sizes are equal and it may be brief."""
    return str(sizes[0]) if brief and len(set(sizes)) == 1 else "x".join(map(str, sizes))


def read_window(param: ConvolutionParameter, axes: int) -> Window:
    """The sizes that a layer with this many spatial axes gives: one for all, one for each, or (2 axes) _h and _w."""

    def sizes(name: str, values: Sequence[int], default: int | None, least: int, pair: str | None) -> tuple[int, ...]:
        h, w = f"{pair}_h", f"{pair}_w"
        if pair and (param.HasField(h) or param.HasField(w)):
            if axes != 2:
                raise ConfigError(f"{h} and {w} are for inputs with 2 spatial axes, not {axes}; give {name}")
            if values:
                raise ConfigError(f"{name} and {h}/{w} exclude each other")
            found: tuple[int, ...] = (getattr(param, h), getattr(param, w))
        elif len(values) == axes:
            found = tuple(values)
        elif len(values) == 1:
            found = (values[0],) * axes
        elif not values and default is not None:
            found = (default,) * axes
        else:
            raise ConfigError(
                f"{name} must be given once or once for each of {axes} spatial axes, not {len(values)} times"
            )
        if any(v < least for v in found):
            raise ConfigError(f"{name} must be {least} or more along every axis, not {by(found, False)}")
        return found

    return Window(
        sizes("kernel_size", param.kernel_size, None, 1, "kernel"),
        sizes("stride", param.stride, 1, 1, "stride"),
        sizes("pad", param.pad, 0, 0, "pad"),
        sizes("dilation", param.dilation, 1, 1, None),
    )


def check_shape(what: str, blob: Blob, shape: Sequence[int]) -> None:
    """ConfigError unless a parameter that the prototxt brought has the shape that the layer needs."""
    if blob.shape != tuple(shape):
        raise ConfigError(
            f"incorrect {what} shape: expected shape {shape_string(shape)}; "
            f"instead, shape was {shape_string(blob.shape)}"
        )


@layer("Convolution")
class Convolution(Layer):
    """(..., C, *in) -> (..., O, *out); weight (O, C/group, *kernel), bias (O,).

    Bottom i gives top i; all share the weights. out = (in + 2*pad - (dilation*(kernel - 1) + 1)) // stride + 1.
    """

    bottoms = (1, None)
    tops = (1, None)
    same_count = True
    in_place = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        """Read the window, fill weight and bias."""
        param = self.param.convolution_param
        self.axis = bottom[0].axis(param.axis)
        self.window = read_window(param, len(bottom[0].shape) - self.axis - 1)
        channels, outputs, group = bottom[0].shape[self.axis], param.num_output, param.group
        if outputs < 1:
            raise ConfigError("num_output must be 1 or more")
        if group < 1 or channels % group or outputs % group:
            what = f"{outputs} outputs" if group and channels % group == 0 else f"{channels} input channels"
            raise ConfigError(f"{what} cannot be split into {group} groups")
        self.channels, self.outputs, self.group = channels, outputs, group
        shapes = [(outputs, channels // group, *self.window.kernel)] + [(outputs,)] * param.bias_term
        if not self.blobs:
            fillers = param.weight_filler, param.bias_filler
            for shape, filler in zip(shapes, fillers, strict=False):
                fill(self.add_blob(shape), filler, self.device.rng)
        if len(self.blobs) != len(shapes):
            raise ConfigError(f"incorrect number of weight blobs: {len(self.blobs)}, not {len(shapes)}")
        for what, blob, shape in zip(("weight", "bias"), self.blobs, shapes, strict=False):
            check_shape(what, blob, shape)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        """Plan the convolution for these shapes."""
        shape, axis = bottom[0].shape, self.axis
        for b in bottom[1:]:
            if b.shape != shape:
                raise ConfigError(f"all inputs must have one shape, not {list(shape)} and {list(b.shape)}")
        spatial = shape[axis + 1 :]
        if len(spatial) != len(self.window.kernel):
            raise ConfigError(f"{len(self.window.kernel)} spatial axes are needed, not {len(spatial)}")
        if shape[axis] != self.channels:
            raise ConfigError(f"the weights are for {self.channels} input channels, not {shape[axis]}")
        self.window.check_fits(spatial)
        images, weight, point = prod(shape[:axis]), self.blobs[0].shape, () if spatial else (1,)
        window: Any = self.window if spatial else ((1,), (0,), (1,))
        window = window[-3:]  # stride, pad, dilation
        self.conv = self.ops.Convolution(
            (images, self.channels, *spatial, *point), (*weight, *point), *window, self.group, self.dtype
        )
        for t in top:
            t.reshape((*shape[:axis], self.outputs, *(self.conv.y_shape[2:] if spatial else ())))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        """Cross-correlation and bias."""
        w = self.blobs[0].data
        b = self.blobs[1].data if len(self.blobs) > 1 else None
        for x, y in zip(bottom, top, strict=True):
            self.conv.forward(x.data, w, b, y.data)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """Gradients of the parameters that want theirs, then of the bottoms."""
        wanted = self.param_propagate_down
        dw = self.blobs[0].diff if wanted[0] else None
        db = self.blobs[1].diff if len(self.blobs) > 1 and wanted[1] else None
        for y, down, x in zip(top, propagate_down, bottom, strict=True):
            if dw is not None or db is not None:
                self.conv.backward_weight(x.data, y.diff, dw, db)
            if down:
                self.conv.backward_data(y.diff, self.blobs[0].data, x.diff)
