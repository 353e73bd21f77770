"""Pooling over windows of height and width."""

from collections.abc import Sequence
from math import ceil, floor, prod

import numpy as np

from caffepy.core.errors import ConfigError
from caffepy.device.blob import MAX_COUNT, Array, Blob
from caffepy.layer.base import Blobs, Drawing, Layer, layer
from caffepy.ops.objects import Maxima, Windows
from caffepy.proto.caffe_pb2 import LayerParameter, Pooling3DParameter, PoolingParameter

Pair = tuple[int, int]


def read_pair(param: PoolingParameter, name: str, pair: str) -> Pair:
    """Height and width of `name`: one number for both, or `pair`_h and `pair`_w."""
    h, w = (param.HasField(f"{pair}_{side}") for side in "hw")
    if h != w:
        raise ConfigError(f"{pair}_h and {pair}_w must be given together, or {name} alone")
    if h and param.HasField(name):
        raise ConfigError(f"{name} and {pair}_h/{pair}_w exclude each other")
    h_name, w_name = (f"{pair}_h", f"{pair}_w") if h else (name, name)
    return getattr(param, h_name), getattr(param, w_name)


def pooled_size(size: int, kernel: int, stride: int, pad: int, any_pad: bool, up: bool) -> int:
    """Number of windows along an axis; the last one must begin inside the input or the padding
    before it.

    The quotient is a 32-bit float, as in Caffe.
    """
    steps = np.float32(size + 2 * pad - kernel) / np.float32(stride)
    out = (ceil(steps) if up else floor(steps)) + 1
    return out - 1 if any_pad and (out - 1) * stride >= size + pad else out


def check_padded(size: Sequence[int], pad: Sequence[int], what: str = "inputs") -> None:
    """ConfigError for a plane, or a volume, that is too large with its padding."""
    padded = [s + 2 * p for s, p in zip(size, pad, strict=True)]
    if prod(padded) > MAX_COUNT:
        raise ConfigError(
            f"{_by(size)} {what} padded to {_by(padded)} have more than 2^31 elements"
        )


@layer("Pooling")
class Pooling(Drawing):
    """(N, C, H, W) -> (N, C, Ho, Wo); a second top of MAX is the index h*W + w of each maximum.

    Ho = ceil((H + 2*pad - kernel) / stride) + 1, or floor by round_mode, or by ceil_mode: false,
    its name in forks. AVE counts padding in its divisor. STOCHASTIC takes an element by its share
    of the sum, at TEST the mean with these shares (Zeiler and Fergus 2013).
    """

    on_gpu = True
    can_recompute = True
    tops = (1, 2)
    backward_reads_bottom = backward_reads_top = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.pooling_param
        self.method = param.pool
        self.can_fuse = self.method != PoolingParameter.STOCHASTIC
        self.whole = param.global_pooling
        self.tells_where = len(top) > 1  # within the plane
        self.takes_preferred_layout = not self.tells_where
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
        if not self.whole and min(self.kernel) < 1:
            raise ConfigError("kernel sizes must be 1 or more")
        if min(self.stride) < 1:
            raise ConfigError("strides must be 1 or more")
        if self.whole and (self.pad != (0, 0) or self.stride != (1, 1)):
            raise ConfigError("global_pooling needs pad 0 and stride 1")
        if self.method == PoolingParameter.STOCHASTIC and self.pad != (0, 0):
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
        return self.only_launches and not self.tells_where

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
            )
        n, c, *size = bottom[0].shape
        if self.whole:
            self.kernel = size[0], size[1]
        # A larger stride steps over the whole image, too.
        h, w = (n + 2 * p + k for n, p, k in zip(size, self.pad, self.kernel, strict=True))
        self.stride = min(self.given_stride[0], h), min(self.given_stride[1], w)
        up = self.rounds_up
        axes = zip(size, self.kernel, self.stride, self.pad, strict=True)
        out = [pooled_size(*axis, any_pad=any(self.pad), up=up) for axis in axes]
        if min(out) < 1:
            raise ConfigError(
                f"kernel {_by(self.kernel)} does not fit its {_by(size)} input "
                f"(pad {_by(self.pad)})"
            )
        check_padded(size, self.pad)
        for t in top:
            t.reshape((n, c, *out))
        if self.method != PoolingParameter.AVE:
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
        elif self.method == PoolingParameter.AVE:
            self.ops.ave_pool_forward(x, y, window)
        elif self.draws:
            self.ops.stochastic_pool_forward(x, y, self.index.data, window, *self.draw())
        else:
            self.ops.stochastic_pool_mean(x, y, window)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx is dy at the element that forward took, or dy shared evenly."""
        if not propagate_down[0]:
            return
        dy, dx, window = top[0].diff, bottom[0].diff, self.window
        if self.method == PoolingParameter.AVE:
            self.ops.ave_pool_backward(dy, dx, window)
        elif self.method == PoolingParameter.STOCHASTIC and not self.draws:
            raise ConfigError("STOCHASTIC pooling has a gradient in the TRAIN phase only")
        else:
            self.ops.max_pool_backward(dy, self.index.data, dx, window)


@layer("Pooling3D")
class Pooling3D(Layer):
    """(N, C, L, H, W) -> (N, C, Lo, Ho, Wo): C3D's pooling over three axes (Tran et al. 2015).

    Ho = ceil((H + 2*pad - kernel_size) / stride) + 1; Lo likewise, of kernel_depth and
    temporal_stride, without padding. AVE counts padding in its divisor. The gradient of MAX goes to
    every element that equals the maximum, as C3D's.
    """

    on_gpu = True
    can_recompute = True

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.pooling3d_param
        self.mean = param.pool == Pooling3DParameter.AVE
        self.backward_reads_bottom = self.backward_reads_top = not self.mean
        if param.pool == Pooling3DParameter.STOCHASTIC:
            raise ConfigError("pooling3d_param: there is no STOCHASTIC pooling of volumes")
        if param.pad and not self.mean:
            raise ConfigError("pooling3d_param: only AVE pooling can have a pad")
        side, stride, pad = param.kernel_size, param.stride, param.pad
        kernel, steps = (param.kernel_depth, side, side), (param.temporal_stride, stride, stride)
        if min(kernel) < 1 or min(steps) < 1:
            raise ConfigError(
                "pooling3d_param: kernel_depth, kernel_size and strides must be 1 or more"
            )
        self.window = kernel, steps, (0, pad, pad)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shape = bottom[0].shape
        if len(shape) != 5:
            raise ConfigError(f"Pooling3D needs (N, C, L, H, W), not {list(shape)}")
        n, c, *size = shape
        axes = zip(size, *self.window, strict=True)
        out = [pooled_size(*axis, any_pad=False, up=True) for axis in axes]
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


def _by(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))
