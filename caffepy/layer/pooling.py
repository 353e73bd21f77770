"""Pooling over windows of height and width."""

from collections.abc import Sequence
from math import ceil, floor, prod
from operator import ge
from typing import Any

import numpy as np

from caffepy.core.errors import ConfigError
from caffepy.device.blob import MAX_COUNT, Array, Blob
from caffepy.layer.base import Blobs, Drawing, Layer, layer
from caffepy.ops.objects import Maxima, Windows
from caffepy.proto.caffe_pb2 import (
    ConvolutionParameter,
    LayerParameter,
    Pooling3DParameter,
    PoolingParameter,
)

Pair = tuple[int, int]


def read_pair(param: PoolingParameter | Pooling3DParameter, name: str, pair: str) -> Pair:
    """Height and width of `name`: one number for both, or `pair`_h and `pair`_w.

    ConfigError if one of the pair is missing, or both ways are given.
    """
    h, w = (param.HasField(f"{pair}_{side}") for side in "hw")
    if h != w:
        raise ConfigError(f"{pair}_h and {pair}_w must be given together, or {name} alone")
    if h and param.HasField(name):
        raise ConfigError(f"{name} and {pair}_h/{pair}_w exclude each other")
    h_name, w_name = (f"{pair}_h", f"{pair}_w") if h else (name, name)
    return getattr(param, h_name), getattr(param, w_name)


def read_sides(param: ConvolutionParameter | PoolingParameter) -> tuple[Pair, Pair] | None:
    """Zeros before and behind along height and along width, as pad_t, pad_b, pad_l and pad_r say
    (Synopsys); None if they say none. ConfigError for one below 0, or a pad given otherwise, too.
    """
    names = ("pad_t", "pad_b", "pad_l", "pad_r")
    top, bottom, left, right = (getattr(param, name) for name in names)
    if not any((top, bottom, left, right)):
        return None
    for name in ("pad", "pad_h", "pad_w", "pad_type"):
        if getattr(param, name):
            raise ConfigError(f"{name} and pad_t, pad_b, pad_l, pad_r exclude each other")
    if min(top, bottom, left, right) < 0:
        raise ConfigError("pad_t, pad_b, pad_l and pad_r must be 0 or more")
    return (top, bottom), (left, right)


def reads_same(param: ConvolutionParameter | PoolingParameter) -> bool:
    """True for pad_type 1 (Synopsys), by which there are ceil(size / stride) windows.

    ConfigError for other types, or a pad beside it.
    """
    if param.pad_type > 1:
        raise ConfigError(f"pad_type must be 0 or 1, not {param.pad_type}")
    if param.pad_type and any((param.pad, param.pad_h, param.pad_w)):
        raise ConfigError("pad_type 1 and a pad exclude each other")
    return param.pad_type == 1


def same_sides(size: int, extent: int, stride: int) -> Pair:
    """Zeros before and behind an axis that give a kernel of this extent ceil(size / stride) places,
    one more behind if their number is odd.
    """
    lacking = max((-(-size // stride) - 1) * stride + extent - size, 0)
    return lacking // 2, lacking - lacking // 2


def pooled_size(
    size: int,
    kernel: int,
    stride: int,
    pad: int,
    any_pad: bool,
    up: bool,
    behind: int | None = None,
) -> int:
    """Number of windows along an axis with `pad` zeros before it, and `behind` after it if that
    differs; the last one must begin inside the input or the padding before it.

    The quotient is a 32-bit float, as in Caffe.
    """
    padded = size + pad + (pad if behind is None else behind)
    steps = np.float32(padded - kernel) / np.float32(stride)
    out = (ceil(steps) if up else floor(steps)) + 1
    return out - 1 if any_pad and (out - 1) * stride >= size + pad else out


def check_sides(size: Sequence[int]) -> None:
    """ConfigError for a plane, or a volume, without elements."""
    if min(size) < 1:
        raise ConfigError(f"there is nothing to pool in a {_by(size)} input")


def check_padded(size: Sequence[int], pad: Sequence[int], what: str = "inputs") -> None:
    """ConfigError for a plane, or a volume, that is too large with its padding."""
    padded = [s + 2 * p for s, p in zip(size, pad, strict=True)]
    if prod(padded) > MAX_COUNT:
        raise ConfigError(
            f"{_by(size)} {what} padded to {_by(padded)} have more than 2^31 elements"
        )


_MEANS = (PoolingParameter.AVE, PoolingParameter.AVE_EXC_PAD, PoolingParameter.SUM)


@layer("Pooling")
class Pooling(Drawing):
    """(N, C, H, W) -> (N, C, Ho, Wo); a second top of MAX is the index h*W + w of each maximum.

    Ho = ceil((H + 2*pad - kernel) / stride) + 1, or floor by round_mode, or by ceil_mode: false,
    its name in forks. AVE counts padding in its divisor, AVE_EXC_PAD (Synopsys; AVE_TF is its old
    name) does not; SUM (hierarchical bilinear pooling) has none. pad_t, pad_b, pad_l and pad_r are
    pads that differ, pad_type 1 those that give H / stride windows, rounded up. STOCHASTIC takes an
    element by its share of the sum, at TEST the mean with these shares (Zeiler and Fergus 2013).
    """

    on_gpu = True
    can_recompute = True
    tops = (1, 2)
    backward_reads_bottom = backward_reads_top = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.pooling_param
        self.method = param.pool
        self.whole = param.global_pooling
        self.tells_where = len(top) > 1  # within the plane
        if self.tells_where and self.method != PoolingParameter.MAX:
            raise ConfigError("only MAX pooling has a second top")
        if param.HasField("kernel_depth"):
            raise ConfigError("kernel_depth is for Pooling3D, a layer of C3D")
        has_kernel = any(param.HasField(name) for name in ("kernel_size", "kernel_h", "kernel_w"))
        if self.whole and has_kernel:
            raise ConfigError(
                "global_pooling takes the whole image as its kernel; give no kernel size"
            )
        if not self.whole and not has_kernel:
            raise ConfigError("kernel_size, or kernel_h and kernel_w, is needed")
        self.kernel = read_pair(param, "kernel_size", "kernel")
        self.stride = read_pair(param, "stride", "stride")
        self.pad = read_pair(param, "pad", "pad")
        self.same = reads_same(param)
        self.sides = read_sides(param) or tuple((p, p) for p in self.pad)
        self.pad = self.sides[0][0], self.sides[1][0]
        padded = self.same or any(any(side) for side in self.sides)
        self.sums = self.method == PoolingParameter.SUM
        self.excludes = self.method == PoolingParameter.AVE_EXC_PAD and padded
        self.scales = self.sums or self.excludes
        self.uneven = self.same or any(before != behind for before, behind in self.sides)
        self.mean = self.method in _MEANS
        stochastic = self.method == PoolingParameter.STOCHASTIC
        self.can_fuse = not (stochastic or self.uneven or self.scales)
        self.takes_preferred_layout = not (self.tells_where or self.uneven or self.scales)
        if not self.whole and min(self.kernel) < 1:
            raise ConfigError("kernel sizes must be 1 or more")
        if min(self.stride) < 1:
            raise ConfigError("strides must be 1 or more")
        if self.whole and (padded or self.stride != (1, 1)):
            raise ConfigError("global_pooling needs pad 0 and stride 1")
        if stochastic and padded:
            raise ConfigError("STOCHASTIC pooling takes no pad; MAX and AVE do")
        self.given_stride = self.stride
        if not self.whole and any(p >= k for p, k in zip(self.pad, self.kernel, strict=True)):
            raise ConfigError(
                f"pad {_by(self.pad)} must be smaller than the kernel {_by(self.kernel)}"
            )

    @property
    def only_launches(self) -> bool:
        return self.method != PoolingParameter.STOCHASTIC

    @property
    def can_replay(self) -> bool:  # type: ignore[override]
        return self.only_launches and self.takes_preferred_layout

    @property
    def draws(self) -> bool:
        return super().draws and self.method == PoolingParameter.STOCHASTIC

    @property
    def rounds_up(self) -> bool:
        param = self.param.pooling_param
        return param.ceil_mode and param.round_mode == PoolingParameter.CEIL

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        if len(bottom[0].shape) != 4:
            raise ConfigError(
                f"pooling needs an input with 4 axes (N, C, H, W), not {len(bottom[0].shape)}"
                + "; volumes have Pooling3D or PoolingND" * (len(bottom[0].shape) == 5)
            )
        n, c, *size = bottom[0].shape
        check_sides(size)
        if self.whole:
            self.kernel = size[0], size[1]
        if self.same:
            axes = zip(size, self.kernel, self.given_stride, strict=True)
            self.sides = tuple(same_sides(*axis) for axis in axes)
            self.pad = self.sides[0][0], self.sides[1][0]
        # A larger stride steps over the whole image, too.
        h, w = (n + sum(s) + k for n, s, k in zip(size, self.sides, self.kernel, strict=True))
        self.stride = min(self.given_stride[0], h), min(self.given_stride[1], w)
        any_pad, up = any(any(side) for side in self.sides), self.rounds_up
        out = [
            -(-n // s) if self.same else pooled_size(n, k, s, before, any_pad, up, behind)
            for n, k, s, (before, behind) in zip(
                size, self.kernel, self.stride, self.sides, strict=True
            )
        ]
        if min(out) < 1:
            raise ConfigError(
                f"kernel {_by(self.kernel)} does not fit its {_by(size)} input "
                f"(pad {_by(self.pad)})"
            )
        check_padded(size, [max(side) for side in self.sides])
        for t in top:
            t.reshape((n, c, *out))
        self.padded: Blob | None = None  # the bottom within zeros, for means whose pads differ
        if self.mean and self.uneven:
            shape = [n + sum(side) for n, side in zip(size, self.sides, strict=True)]
            self.padded = self.buffer((n, c, *shape))
            starts = zip(size, self.pad, strict=True)
            self.inside: tuple[Any, ...] = (
                ...,
                *(slice(before, before + n) for n, before in starts),
            )
        if self.scales:
            windows = zip(size, out, self.kernel, self.stride, self.sides, strict=True)
            shares = [np.array(_counted(*window, self.sums)) for window in windows]
            self.share = self.buffer(out)  # elements of each window over its divisor
            self.share.host_data[...] = np.outer(shares[0], shares[1])
            self.scaled = self.buffer(top[0].shape)
        if not self.mean:
            kind = np.dtype(np.int32) if self.tells_where else self.ops.pool_index_type(self.kernel)
            self.index = self.buffer(top[0].shape, kind)

    @property
    def window(self) -> Windows:
        """The kernel, the stride and the pad, each (h, w)."""
        return self.kernel, self.stride, self.pad

    def maxima(self, y: Array, relu: bool) -> Maxima:
        """Return the maxima y, or those with the gradient y, for a convolution below."""
        return Maxima(y, self.index.data, self.window, relu)

    @property
    def takes_maxima(self) -> bool:
        """True for MAX."""
        return bool(self.method == PoolingParameter.MAX)

    @property
    def buffers(self) -> Blobs:
        return [self.index] if self.method == PoolingParameter.MAX or self.draws else []

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        x, y, window = bottom[0].data, top[0].data, self.window
        if self.method == PoolingParameter.MAX:
            self.ops.max_pool_forward(x, y, self.index.data, window)
            if self.tells_where:
                top[1].data[...] = self.index.data
        elif self.mean:
            if self.padded is not None:
                self.ops.copy(x, self.padded.data[self.inside])
                x, window = self.padded.data, (self.kernel, self.stride, (0, 0))
            self.ops.ave_pool_forward(x, y, window)
            if self.scales:
                np.multiply(y, self.share.data, out=y)
        elif self.draws:
            self.ops.stochastic_pool_forward(x, y, self.index.data, window, *self.draw())
        else:
            self.ops.stochastic_pool_mean(x, y, window)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx is dy at the element that forward took, or dy shared evenly."""
        if not propagate_down[0]:
            return
        dy, dx, window = top[0].diff, bottom[0].diff, self.window
        if self.mean:
            if self.scales:
                np.multiply(dy, self.share.data, out=self.scaled.data)
                dy = self.scaled.data
            if self.padded is None:
                self.ops.ave_pool_backward(dy, dx, window)
            else:
                no_pad = self.kernel, self.stride, (0, 0)
                self.ops.ave_pool_backward(dy, self.padded.diff, no_pad)
                self.ops.copy(self.padded.diff[self.inside], dx)
        elif self.method == PoolingParameter.STOCHASTIC and not self.draws:
            raise ConfigError("STOCHASTIC pooling has a gradient in the TRAIN phase only")
        else:
            self.ops.max_pool_backward(dy, self.index.data, dx, window)


@layer("Pooling3D")
class Pooling3D(Layer):
    """(N, C, L, H, W) -> (N, C, Lo, Ho, Wo): C3D's pooling over three axes (Tran et al. 2015).

    Ho = ceil((H + 2*pad - kernel_size) / stride) + 1; Lo in the same way, of kernel_depth and
    temporal_stride, without padding. AVE counts padding in its divisor. The gradient of MAX goes to
    every element that equals the maximum, as C3D's.

    With kernel_l, or global_pooling, it is P3D's (Qiu et al. 2017): kernel_l, stride_l and pad_l
    are those of L, kernel_h and its like those of one axis, and the last windows begin inside.
    """

    on_gpu = True
    can_recompute = True

    def settings(self, bottom: Blobs) -> Pooling3DParameter:
        """The layer's settings."""
        return self.param.pooling3d_param

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.settings(bottom)
        self.mean = param.pool == Pooling3DParameter.AVE
        self.backward_reads_bottom = self.backward_reads_top = not self.mean
        if param.pool == Pooling3DParameter.STOCHASTIC:
            raise ConfigError("there is no STOCHASTIC pooling of volumes")
        self.whole = param.global_pooling
        self.by_length = self.whole or param.HasField("kernel_l")
        if self.by_length:
            pairs = (("kernel_size", "kernel"), ("stride", "stride"), ("pad", "pad"))
            kernel, steps, pad = (
                (getattr(param, f"{pair}_l"), *read_pair(param, name, pair)) for name, pair in pairs
            )
            sized = any(name.name.startswith("kernel") for name, _ in param.ListFields())
            if self.whole and (sized or any(pad) or set(steps) != {1}):
                raise ConfigError("global_pooling needs no kernel, pad 0 and stride 1")
        else:
            side, stride = param.kernel_size, param.stride
            kernel, steps = (
                (param.kernel_depth, side, side),
                (param.temporal_stride, stride, stride),
            )
            pad = 0, param.pad, param.pad
            if any(pad) and not self.mean:
                raise ConfigError("pooling3d_param: only AVE pooling can have a pad")
        if not self.whole and (min(kernel) < 1 or min(steps) < 1):
            raise ConfigError(
                "pooling3d_param: kernel_depth (P3D's kernel_l), kernel_size and strides must be 1 "
                "or more"
            )
        if self.by_length and not self.whole and any(map(ge, pad, kernel)):
            raise ConfigError(f"pad {_by(pad)} must be smaller than the kernel {_by(kernel)}")
        self.window = kernel, steps, pad

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shape = bottom[0].shape
        if len(shape) != 5:
            raise ConfigError(f"{self.type} needs (N, C, L, H, W), not {list(shape)}")
        n, c, *size = shape
        check_sides(size)
        if self.whole:
            self.window = (size[0], size[1], size[2]), (1, 1, 1), (0, 0, 0)
        clips = self.by_length and any(self.window[2])
        axes = zip(size, *self.window, strict=True)
        out = [pooled_size(*axis, any_pad=clips, up=True) for axis in axes]
        if min(out) < 1:
            raise ConfigError(f"kernel {_by(self.window[0])} does not fit its {_by(size)} input")
        top[0].reshape((n, c, *out))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        x, y = self.volumes(bottom[0].data), self.volumes(top[0].data)
        if self.mean:
            self.ops.ave_pool_volumes_forward(x, y, self.window)
        else:
            least = float(np.finfo(np.float32).min)
            self.ops.max_pool_volumes_forward(x, y, least, self.window)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx is dy shared evenly, or dy at each element that equals the maximum."""
        if not propagate_down[0]:
            return
        dy, dx = self.volumes(top[0].diff), self.volumes(bottom[0].diff)
        if self.mean:
            self.ops.ave_pool_volumes_backward(dy, dx, self.window)
        else:
            x, y = self.volumes(bottom[0].data), self.volumes(top[0].data)
            self.ops.max_pool_volumes_backward(x, y, dy, dx, self.window)

    @staticmethod
    def volumes(x: Array) -> Array:
        return x.reshape(-1, *x.shape[2:])


@layer("PoolingND")
class PoolingND(Pooling3D):
    """(N, C, L, H, W) -> (N, C, Lo, Ho, Wo): 3D-Caffe's pooling, as P3D's, with a number for all
    axes or one for each.
    """

    def settings(self, bottom: Blobs) -> Pooling3DParameter:
        param, shape = self.param.pooling_nd_param, bottom[0].shape
        if len(shape) != 5 or bottom[0].axis(param.axis) != 1:
            raise ConfigError(
                f"PoolingND needs (N, C, L, H, W) and axis 1, not {list(shape)}; for images write "
                "Pooling"
            )
        volumes = Pooling3DParameter(pool=param.pool, global_pooling=param.global_pooling)
        for name, values, ours in (
            ("kernel_size", param.kernel_size, "kernel"),
            ("stride", param.stride, "stride"),
            ("pad", param.pad, "pad"),
        ):
            if len(values) not in (0, 1, 3) or (name, len(values), param.global_pooling) == (
                "kernel_size",
                0,
                False,
            ):
                raise ConfigError(f"{name} needs a number, or 3, not {len(values)}")
            for side, value in zip("lhw", list(values) * (3 // max(len(values), 1)), strict=False):
                setattr(volumes, f"{ours}_{side}", value)
        return volumes


@layer("SPP")
class SPP(Layer):
    """(N, C, H, W) -> (N, C * (4^0 + 4^1 + ... + 4^(pyramid_height - 1))): spatial pyramid pooling
    (He et al. 2014).

    Level i has 2^i x 2^i bins. A single level keeps its four axes.
    """

    on_gpu = True
    backward_reads_bottom = backward_reads_top = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.height = self.param.spp_param.pyramid_height
        if self.height < 1:
            raise ConfigError("pyramid_height must be 1 or more")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        n, _, h, w = bottom[0].legacy_shape()
        self.levels: list[tuple[Pooling, Blob]] = []
        method = PoolingParameter.PoolMethod.Name(self.param.spp_param.pool)
        for bins in (1 << level for level in range(self.height)):
            kernel = -(-h // bins), -(-w // bins)
            pad = [(k * bins - size + 1) // 2 for k, size in zip(kernel, (h, w), strict=True)]
            param = PoolingParameter(pool=method)
            param.kernel_h, param.kernel_w = param.stride_h, param.stride_w = kernel
            param.pad_h, param.pad_w = pad
            layer_param = LayerParameter(type="Pooling", pooling_param=param)
            pooling = Pooling(layer_param, self.phase, self.device, self.dtype)
            out = self.buffer()
            pooling.setup(bottom, [out])
            pooling.reshape(bottom, [out])
            self.levels.append((pooling, out))
        self.sum = self.buffer(bottom[0].shape)
        outs = [out for _, out in self.levels]
        self.widths = [prod(out.shape[1:]) for out in outs]
        joined = (n, sum(self.widths))
        top[0].reshape(outs[0].shape if self.height == 1 else joined)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        y, at = top[0].data.reshape(-1, sum(self.widths)), 0
        for (pooling, out), width in zip(self.levels, self.widths, strict=True):
            pooling.forward(bottom, [out])
            y[:, at : at + width] = out.data.reshape(-1, width)
            at += width

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx is the sum over the levels."""
        if not propagate_down[0]:
            return
        dy, at = top[0].diff.reshape(-1, sum(self.widths)), 0
        self.sum.data[...] = 0
        for (pooling, out), width in zip(self.levels, self.widths, strict=True):
            out.diff[...] = dy[:, at : at + width].reshape(out.shape)
            pooling.backward([out], [True], bottom)
            self.sum.data[...] += bottom[0].diff
            at += width
        bottom[0].diff[...] = self.sum.data


def _counted(size: int, out: int, kernel: int, stride: int, side: Pair, sums: bool) -> list[float]:
    """Elements of each window along an axis with its padding, over those in the image, or over 1
    for sums.
    """
    starts = [i * stride - side[0] for i in range(out)]
    return [
        (min(start + kernel, size + side[1]) - start)
        / (1 if sums else min(start + kernel, size) - max(start, 0))
        for start in starts
    ]


def _by(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))
