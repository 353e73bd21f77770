"""A convolution's passes, for arrays in any layout."""

from collections.abc import Sequence
from typing import Any

import cupy
from numpy.typing import DTypeLike

from caffepy.core.errors import DeviceError
from caffepy.device.blob import Layout
from caffepy.ops.cuda import covariance, depthwise, pointwise, pointwise_few, strided_images
from caffepy.ops.cuda.bias_relu import relu_bias_backward
from caffepy.ops.cuda.context import context, prepare_handles
from caffepy.ops.cuda.convolution.max_pooled import MaxPooled
from caffepy.ops.cuda.convolution.passes import Passes
from caffepy.ops.cuda.convolution.plain import Plain
from caffepy.ops.cuda.convolution.summed import Summed
from caffepy.ops.cuda.convolution.without_output import WithoutOutput
from caffepy.ops.cuda.graphs import Geometry
from caffepy.ops.cuda.launch import Array, channels_last, lies_channels_last
from caffepy.ops.cuda.normalization import (
    as_planes,
    batch_norm_prepare,
    finish_norm,
    norm_gradient,
    prepare_from,
)
from caffepy.ops.cuda.pooling import max_pool_backward, max_pool_forward
from caffepy.ops.objects import (
    Maxima,
    Normalized,
    NormForward,
    NormGradient,
    NormSums,
    Preparation,
    Windows,
)

Sizes = Sequence[int]


class Convolution:
    """A convolution; its arrays may have any layout in any call.

    In a block of `compile_ahead` a call begins to compile kernels and to build cuDNN's plans.
    """

    can_replay = False

    def __init__(
        self, x_shape: Sizes, w_shape: Sizes, window: Sequence[Sizes], group: int, dtype: DTypeLike
    ) -> None:
        x_shape, w_shape, stride, pad, dilation = (
            tuple(int(n) for n in sizes) for sizes in (x_shape, w_shape, *window)
        )
        axes = list(zip(x_shape[2:], w_shape[2:], stride, pad, dilation, strict=True))
        out = tuple((n + 2 * p - (d * (k - 1) + 1)) // s + 1 for n, k, s, p, d in axes)
        self.y_shape = (x_shape[0], w_shape[0], *out)
        assert x_shape[1] == group * w_shape[1]
        missing = (1,) * (2 - len(axes))  # cuDNN knows no convolution over one axis
        self._geometry = Geometry(
            (*x_shape[:2], *missing, *x_shape[2:]),
            (*w_shape[:2], *missing, *w_shape[2:]),
            (*self.y_shape[:2], *missing, *out),
            missing + stride,
            (0,) * len(missing) + pad,
            missing + dilation,
        )
        self._made: dict[Any, Plain | _ChannelsLast] = {}
        self._arranged: Any = None  # the event when the weights are, for the next forward passes
        self._ahead = False
        prepare_handles()

    def arrange_ahead(self, w: Array) -> bool:
        made = [made for made in self._made.values() if isinstance(made, _ChannelsLast)]
        self._ahead = True in {each.arrange_ahead(w) for each in made}
        if self._ahead:
            self._arranged = self._arranged or cupy.cuda.Event(disable_timing=True)
            self._arranged.record(cupy.cuda.get_current_stream())
        return self._ahead

    def end_ahead(self) -> None:
        self._ahead = False
        for made in self._made.values():
            if isinstance(made, _ChannelsLast):
                made.end_ahead()

    def _begin_forward(self) -> None:
        """Wait for the weights, if they are arranged ahead."""
        if self._ahead:
            cupy.cuda.get_current_stream().wait_event(self._arranged)

    def forward(self, x: Array, w: Array, b: Array | None, y: Array, relu: bool = False) -> None:
        if y.size:
            self._begin_forward()
            self._for(x, y).forward(x, w, b, self._shaped(y), relu)

    def takes_normalized(self, layout: Layout) -> bool:
        return self.skips_gradient(layout)

    def forward_prepare(
        self,
        x: Array,
        w: Array,
        b: Array | None,
        y: Array,
        preparation: Preparation,
        given: Normalized | None = None,
    ) -> None:
        if not y.size:
            return
        self._begin_forward()
        made, flat = self._for(x, y), as_planes(y)
        if given is not None:
            assert isinstance(made, _ChannelsLast)
            assert b is None
            prepare_from(made.summed.forward_normalized(x, w, y, given), flat, preparation)
        elif isinstance(made, _ChannelsLast):
            partial = made.summed.forward(x, w, b, self._shaped(y), flat)
            prepare_from(partial, flat, preparation)
        else:
            made.forward(x, w, b, self._shaped(y), False)
            batch_norm_prepare(flat, *preparation)

    def pools(self, layout: Layout, window: Windows) -> bool:
        last = layout.channels_last
        return last and strided_images.suits(self._geometry, layout.dtype, window)

    def forward_maxima(
        self, x: Array, w: Array, b: Array | None, output: Array, maxima: Maxima
    ) -> None:
        if not maxima.y.size:
            return
        self._begin_forward()
        made = self._for(x, output)
        if isinstance(made, _ChannelsLast):
            made.max_pooled.forward(x, w, b, output, maxima)
        else:
            made.forward(x, w, b, output, False)
            max_pool_forward(output, *maxima)

    def backward_data(self, dy: Array, w: Array, dx: Array) -> None:
        if not dx.size:
            return
        if dy.size:
            self._for(dx, dy).backward_data(dy, w, dx)
        else:
            dx.fill(0)

    def sums_gradients(self, dy: Array, dx: Array, alike: bool) -> bool:
        if not dy.size or dx.shape != self._geometry.x:
            return False
        made = self._for(dx, dy)
        return isinstance(made, _ChannelsLast) and made.summed.sums_gradients(alike)

    def backward_data_norm(self, dy: Array, w: Array, norm: NormSums) -> None:
        made = self._for(norm.masked, dy)
        assert isinstance(made, _ChannelsLast)
        finish_norm(made.summed.backward_data(dy, w, norm), norm)

    def skips_gradient(self, layout: Layout) -> bool:
        of = self._geometry, layout.dtype
        kernels = depthwise.suits_both, pointwise.suits_narrow_both, pointwise_few.suits
        return layout.channels_last and any(suits(*of) for suits in kernels)

    def backward_norm_gradient(
        self, x: Array | None, w: Array, dy: NormGradient, dw: Array | None, to: NormSums | Array
    ) -> None:
        if depthwise.suits_both(self._geometry, dy.g.dtype):
            depthwise.backward_both(self._geometry, x, w, dy, dw, to)
            return
        made = self._for(to.masked if isinstance(to, NormSums) else to, dy.g)
        assert isinstance(made, _ChannelsLast)
        if made.summed.suits_both(to):
            made.summed.backward_both(x, w, dy, dw, to)
            return
        assert x is not None
        n, c, *size = dy.g.shape
        of = context().array("past gradient", (n, *size, c), dy.g.dtype).transpose(0, 3, 1, 2)
        given = as_planes(dy.x), dy.numbers, dy.line, as_planes(dy.g)
        norm_gradient(*given, as_planes(of))
        self.backward_weight(x, of, dw, None)
        if isinstance(to, NormSums):
            self.backward_data_norm(of, w, to)
        else:
            self.backward_data(of, w, to)

    def skips_output(self, layout: Layout) -> bool:
        return layout.channels_last and covariance.suits(self._geometry, layout.dtype)

    def forward_normalized(self, x: Array, w: Array, norm: NormForward) -> None:
        self._begin_forward()
        made = self._for(x, norm.y)
        assert isinstance(made, _ChannelsLast)
        made.without_output.forward(x, w, norm)

    def backward_normalized(
        self,
        x: Array,
        w: Array,
        g: Array,
        numbers: Array,
        gradients: Sequence[Array | None],
        to: NormSums | Array | None,
    ) -> None:
        made = self._for(x, g)
        assert isinstance(made, _ChannelsLast)
        passes = made.without_output
        passes.backward_params(x, w, g, numbers, gradients)
        if isinstance(to, NormSums):
            finish_norm(passes.backward_data_sums(x, g, to), to)
        elif to is not None:
            passes.backward_data(x, g, to)

    def backward_weight(self, x: Array, dy: Array, dw: Array | None, db: Array | None) -> None:
        if not dy.size:
            return
        dy = self._shaped(dy)
        if dw is not None:
            self._for(x, dy).backward_weight(x, dy, dw, db)
        elif db is not None:
            relu_bias_backward(None, dy, db)

    def backward_weight_maxima(
        self, x: Array, output: Array, maxima: Maxima, dw: Array | None, db: Array | None
    ) -> None:
        if not maxima.y.size:
            return
        made = self._for(x, output)
        if dw is not None and isinstance(made, _ChannelsLast):
            made.max_pooled.backward_weight(x, output, maxima, dw, db)
        else:
            max_pool_backward(maxima.y, maxima.where, output, maxima.window)
            self.backward_weight(x, output, dw, db)

    def backward_weight_relu(
        self, x: Array, y: Array, dy: Array, dw: Array | None, db: Array | None
    ) -> None:
        y, dy = self._shaped(y), self._shaped(dy)
        made = self._for(x, dy) if dy.size else None
        if dw is not None and isinstance(made, _ChannelsLast):
            made.backward_weight_relu(x, y, dy, dw, db)
            return
        relu_bias_backward(y, dy, db)
        if dw is not None:
            self.backward_weight(x, dy, dw, None)

    def _shaped(self, y: Array) -> Array:
        """Return y in its usual shape: its first axes may be several in place of N, and the last
        one may be missing.
        """
        return y if y.shape == self.y_shape else y.reshape(self.y_shape)

    def _for(self, x: Array, y: Array) -> "Plain | _ChannelsLast":
        key = x.dtype, x.strides, y.strides
        if key not in self._made:
            narrow = x.dtype.itemsize == 2
            if narrow and not (lies_channels_last(x) and lies_channels_last(y)):
                where = f"{x.shape} by {x.strides}"
                raise DeviceError(
                    f"numbers of 16 bits must lie with the channels last, not {where}"
                )
            kind = _ChannelsLast if narrow or channels_last(x, y) else Plain
            self._made[key] = kind(self._geometry, x.dtype)
        return self._made[key]


class _ChannelsLast(Passes):
    """The passes with the channels last, by themselves and fused with what is beside them."""

    def __init__(self, geometry: Geometry, dtype: DTypeLike) -> None:
        super().__init__(geometry, dtype)
        self.max_pooled = MaxPooled(self)
        self.summed = Summed(self)
        self.without_output = WithoutOutput(self)
