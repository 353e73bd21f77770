"""A convolution's passes, for arrays in any layout."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from math import prod
from typing import Any

from numpy.typing import DTypeLike

from caffepy.core.errors import DeviceError
from caffepy.device.blob import Layout
from caffepy.ops.cuda import (
    autotune,
    covariance,
    depthwise,
    pointwise,
    pooled_convolution,
    small_images,
    strided_images,
)
from caffepy.ops.cuda.autotune import Make, Run, run_kept
from caffepy.ops.cuda.bias_relu import relu_bias_backward
from caffepy.ops.cuda.compiler import looks_ahead
from caffepy.ops.cuda.context import prepare_handles
from caffepy.ops.cuda.convolution.arrangement import Arrangement
from caffepy.ops.cuda.convolution.passes import LAUNCHES, Passes, zeros_like
from caffepy.ops.cuda.convolution.plain import Plain
from caffepy.ops.cuda.covariance import Covariance
from caffepy.ops.cuda.graphs import Geometry
from caffepy.ops.cuda.launch import Array, channels_last, lies_channels_last
from caffepy.ops.cuda.normalization import (
    BY_Y,
    as_planes,
    batch_norm_prepare,
    finish_norm,
    gradient_sums,
    mask_kind,
    moments,
    prepare_from,
    what_follows,
)
from caffepy.ops.cuda.pointwise import Variant
from caffepy.ops.cuda.pooling import max_pool_backward, max_pool_forward
from caffepy.ops.objects import (
    Maxima,
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
        prepare_handles()

    def forward(self, x: Array, w: Array, b: Array | None, y: Array, relu: bool = False) -> None:
        if y.size:
            self._for(x, y).forward(x, w, b, self._shaped(y), relu)

    def forward_prepare(
        self, x: Array, w: Array, b: Array | None, y: Array, preparation: Preparation
    ) -> None:
        if not y.size:
            return
        made, flat = self._for(x, y), as_planes(y)
        partial = None
        if isinstance(made, _ChannelsLast):
            partial = made.forward_moments(x, w, b, self._shaped(y), flat)
        else:
            made.forward(x, w, b, self._shaped(y), False)
        if partial is None:
            batch_norm_prepare(flat, *preparation)
        else:
            prepare_from(partial, flat, preparation)

    def pools(self, layout: Layout, window: Windows) -> bool:
        last = layout.channels_last
        return last and strided_images.suits(self._geometry, layout.dtype, window)

    def forward_maxima(
        self, x: Array, w: Array, b: Array | None, output: Array, maxima: Maxima
    ) -> None:
        if not maxima.y.size:
            return
        made = self._for(x, output)
        if isinstance(made, _ChannelsLast):
            made.forward_maxima(x, w, b, output, maxima)
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
        return isinstance(made, _ChannelsLast) and made.sums_gradients(alike)

    def backward_data_norm(self, dy: Array, w: Array, norm: NormSums) -> None:
        made = self._for(norm.masked, dy)
        assert isinstance(made, _ChannelsLast)
        partial = made.backward_data_sums(dy, w, norm)
        finish_norm(partial, norm)

    def skips_gradient(self, layout: Layout) -> bool:
        return layout.channels_last and depthwise.suits_both(self._geometry, layout.dtype)

    def backward_norm_gradient(
        self, x: Array, w: Array, dy: NormGradient, dw: Array | None, to: NormSums | Array
    ) -> None:
        depthwise.backward_both(self._geometry, x, w, dy, dw, to)

    def skips_output(self, layout: Layout) -> bool:
        return layout.channels_last and covariance.suits(self._geometry, layout.dtype)

    def forward_normalized(self, x: Array, w: Array, norm: NormForward) -> None:
        made = self._for(x, norm.y)
        assert isinstance(made, _ChannelsLast)
        made.forward_normalized(x, w, norm)

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
        made.gradients_normalized(x, w, g, numbers, gradients)
        if isinstance(to, NormSums):
            finish_norm(made.joined_sums(x, g, to), to)
        elif to is not None:
            made.joined_data(x, g, to)

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
            made.backward_weight_maxima(x, output, maxima, dw, db)
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
        self._fused_runs: dict[Any, Run] = {}
        self._covariance: Covariance | None = None  # if there is no output

    def forward_maxima(
        self, x: Array, w: Array, b: Array | None, output: Array, maxima: Maxima
    ) -> None:
        """Compute the maxima of windows over y, which lies in `output` if it is written."""

        def apart(x: Array, w: Array, b: Array | None, output: Array, maxima: Maxima) -> None:
            self.forward(x, w, b, output, False)
            max_pool_forward(output, *maxima)

        def own() -> list[Make]:
            given = self.geometry, maxima, self.dtype
            return [
                *pooled_convolution.forward(*given),
                *small_images.forward_maxima(*given),
                *strided_images.forward(*given),
            ]

        name = f"forward maxima {maxima.window} {maxima.relu} {self.geometry}"
        key, arrays = ("maxima", b is not None, maxima.relu), (x, w, b, output, maxima)
        self.cudnn.begin_forward()
        self._apart_or_at_once(key, name, apart, own, arrays, lambda: arrays)

    def _apart_or_at_once(
        self,
        key: Any,
        name: str,
        apart: Run,
        own: Callable[[], list[Make]],
        arrays: Sequence[Any],
        scratch: Callable[[], Sequence[Any]],
    ) -> None:
        """Run the faster of `apart` and our own candidates, timed with arrays of `scratch`."""

        def make() -> Run | None:
            at_once, given = own(), scratch()
            if at_once or looks_ahead():
                apart(*given)  # chooses its plans before others are timed
            if not at_once:
                return apart
            candidates: list[Make] = [lambda: apart, *at_once]
            found = autotune.fastest(name, self.dtype, candidates, given, LAUNCHES)
            return found and found[1]

        run_kept(self._fused_runs, key, make, arrays)

    def forward_moments(
        self, x: Array, w: Array, b: Array | None, y: Array, planes: Array
    ) -> tuple[Array, int]:
        """Compute y, and return the partial sums of `planes`, which is y as (N, C, P)."""

        def apart(x: Array, w: Array, b: Array | None, y: Array, planes: Array) -> Any:
            self.forward(x, w, b, y, False)
            return moments(planes)

        candidates: list[Make] = [lambda: apart]
        what, choices = "forward moments", list[tuple[Arrangement, int]]()
        if b is None and depthwise.suits(self.geometry, self.dtype):
            candidates.append(self._depthwise_with_moments)
            what += " or depthwise"
        elif b is None:
            ways = [
                w
                for w in self.cudnn.arrangements
                if pointwise.suits_moments(w.geometry, self.dtype)
            ]
            choices = list(product(ways, pointwise.WIDTHS))
            candidates += [partial(self._with_moments, *choice) for choice in choices]

        def use(chosen: int) -> None:
            if chosen and choices:
                self.cudnn.use(choices[chosen - 1][0])

        key, arrays = ("moments", b is not None), (x, w, b, y, planes)
        name = f"{what} {self.geometry}"
        return self._with_sums(key, name, apart, candidates, arrays, use)

    def _with_sums(
        self,
        key: Any,
        name: str,
        apart: Run,
        candidates: Sequence[Make],
        arrays: Sequence[Any],
        use: Callable[[int], None] = lambda chosen: None,
    ) -> tuple[Array, int]:
        """Run the fastest candidate, the first of which is `apart`; return its partial sums. Which
        it is, `use` is told once.
        """
        if key not in self._fused_runs:
            sums: tuple[Array, int] = apart(*arrays)  # chooses its plans before others are timed
            found = autotune.fastest(name, self.dtype, candidates, arrays, LAUNCHES)
            if found is None:
                return sums
            use(found[0])
            self._fused_runs[key] = found[1]
        sums = self._fused_runs[key](*arrays)
        return sums

    def _depthwise_with_moments(self) -> Run:
        found = depthwise.moments(self.geometry, self.dtype)
        return lambda x, w, b, y, planes: found(x, w, y)

    def _with_moments(self, way: Arrangement, width: int) -> Run:
        """Return what runs a product with sums."""
        found = pointwise.moments(way.geometry, self.dtype, width)

        def run(x: Array, w: Array, b: None, y: Array, planes: Array) -> tuple[Array, int]:
            weights, _ = way.weights(w)
            self.cudnn.end_forward(way, x)
            return found(way.image(x), weights, y)

        return run

    def forward_normalized(self, x: Array, w: Array, norm: NormForward) -> None:
        way = self.cudnn.arrangements[0]
        weights, _ = way.weights(w)
        self.cudnn.end_forward(way, x)
        if self._covariance is None:
            self._covariance = Covariance(self.geometry, self.dtype)
            self.cudnn.use(way)
        if norm.preparation is not None:
            self._covariance.prepare(x, weights, norm.preparation)
        follows = what_follows(norm.ceiling)
        variant = int(norm.other is not None), follows, int(norm.bits is not None)
        make = partial(pointwise.normalized, self.geometry, self.dtype, variant=variant)
        what, narrow = f"forward normalized {variant}", []
        if pointwise.suits_narrow(self.geometry, norm):
            what += " or narrow"
            own = partial(pointwise.narrow_normalized, self.geometry, self.dtype, follows)
            narrow.append(own)
        self._of_widths(what, make, (x, weights, norm), narrow)

    def gradients_normalized(
        self, x: Array, w: Array, g: Array, numbers: Array, gradients: Sequence[Array | None]
    ) -> None:
        """Add to the gradients of w, scale and bias; prepare the calls below."""
        assert self._covariance is not None
        self._covariance.gradient(x, self.product_weights(w), g, numbers, *gradients)

    def joined_sums(self, x: Array, g: Array, norm: NormSums) -> tuple[Array, int]:
        """Compute norm.masked without the output, and return its partial sums."""
        assert self._covariance is not None
        weights, behind = self._covariance.joined, (x, self._covariance.base)
        variant = _variant(norm)
        make = partial(pointwise.gradient, self.geometry, self.dtype, variant=variant, joined=True)
        what, narrow = f"backward_data joined sums {variant}", []
        if pointwise.suits_narrow_gradient(self.geometry, norm):
            what += " or narrow"
            more = norm.more is not None
            narrow.append(partial(pointwise.narrow_gradient, self.geometry, self.dtype, more))
        given = g, weights, norm, behind
        sums: tuple[Array, int] | None = self._of_widths(what, make, given, narrow)
        return sums or (norm.line, 1)  # ahead there are none, and none are read

    def joined_data(self, x: Array, g: Array, dx: Array) -> None:
        """Write dx without the output."""
        assert self._covariance is not None
        weights, behind = self._covariance.joined, (x, self._covariance.base)
        make = partial(pointwise.spread, self.geometry, self.dtype, joined=True)
        self._of_widths("backward_data joined", make, (g, weights, dx, behind))

    def _of_widths(
        self,
        what: str,
        make: Callable[..., Run],
        arrays: Sequence[Any],
        others: Sequence[Make] = (),
    ) -> Any:
        """Run the fastest of kernels that are made for a width of their tiles, and of others."""

        def fastest() -> Run | None:
            widths = (partial(make, width=width) for width in pointwise.WIDTHS)
            candidates: list[Make] = [*widths, *others]
            name = f"{what} {self.geometry}"
            found = autotune.fastest(name, self.dtype, candidates, arrays)
            return found and found[1]

        return run_kept(self._fused_runs, what, fastest, arrays)

    def sums_gradients(self, alike: bool) -> bool:
        suits = pointwise.suits_gradients(self.geometry, self.dtype)
        return suits and (alike or prod(self.geometry.stride) == 1)

    def backward_data_sums(self, dy: Array, w: Array, norm: NormSums) -> tuple[Array, int]:
        """Compute norm.masked, and return its partial sums."""
        variant = _variant(norm)

        def apart(dy: Array, w: Array, norm: NormSums) -> Any:
            self.backward_data(dy, w, norm.masked)
            given = norm.masked, norm.more, norm.x, norm.y
            masked, more, x, y = (a if a is None else as_planes(a) for a in given)
            dys = [masked] if more is None else [masked, more]
            how = y, norm.bits, norm.ceiling
            return gradient_sums(x, norm.numbers, dys, *how, masked, None)

        candidates: list[Make] = [lambda: apart]
        if variant[0] != BY_Y:
            candidates += [partial(self._gradient, width, variant) for width in pointwise.WIDTHS]
        what = f"backward_data sums {variant}"
        if pointwise.suits_narrow_sums(self.geometry, variant):
            what += " or narrow"
            candidates.append(partial(self._narrow_sums, variant[1]))
        name = f"{what} {self.geometry}"
        return self._with_sums(("sums", *variant), name, apart, candidates, (dy, w, norm))

    def _gradient(self, width: int, variant: Variant) -> Run:
        found = pointwise.gradient(self.geometry, self.dtype, width, variant)
        return lambda dy, w, norm: found(dy, self.product_weights(w), norm)

    def _narrow_sums(self, after: int) -> Run:
        found = pointwise.narrow_sums(self.geometry, self.dtype, after)
        return lambda dy, w, norm: found(dy, self.product_weights(w), norm)

    def backward_weight_maxima(
        self, x: Array, output: Array, maxima: Maxima, dw: Array, db: Array | None
    ) -> None:
        def apart(x: Array, output: Array, maxima: Maxima, dw: Array, db: Array | None) -> None:
            max_pool_backward(maxima.y, maxima.where, output, maxima.window)
            self.backward_weight(x, output, dw, db)

        def own() -> list[Make]:
            given = self.geometry, maxima, self.dtype
            return [
                *pooled_convolution.backward_weight(*given),
                *strided_images.backward_weight(*given),
            ]

        name = f"backward_weight maxima {maxima.window} {self.geometry}"
        key, given = ("maxima gradient", db is not None), (x, output, maxima)

        def scratch() -> Sequence[Any]:
            return *given, *zeros_like(dw, db)

        self._apart_or_at_once(key, name, apart, own, (*given, dw, db), scratch)


def _variant(norm: NormSums) -> Variant:
    """Return which kernel computes it."""
    mask, after = mask_kind(norm.ceiling, norm.y, norm.bits), what_follows(norm.ceiling)
    return mask, after, int(norm.more is not None), int(norm.x is not None)
