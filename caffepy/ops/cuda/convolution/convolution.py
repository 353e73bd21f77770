"""A convolution's passes, for arrays in any layout."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from math import prod
from types import ModuleType
from typing import Any

import cupy
import numpy as np
from numpy.typing import DTypeLike

from caffepy.core.errors import DeviceError
from caffepy.device.blob import Layout
from caffepy.ops.cuda import (
    autotune,
    compiler,
    covariance,
    depthwise,
    few_channels,
    pointwise,
    pooled_convolution,
    small_convolution,
    small_images,
    strided_images,
)
from caffepy.ops.cuda.autotune import Make, Run, run_kept
from caffepy.ops.cuda.bias_relu import relu_bias_backward
from caffepy.ops.cuda.compiler import looks_ahead
from caffepy.ops.cuda.context import context, prepare_handles
from caffepy.ops.cuda.convolution.arrangement import Arrangement, arrangements, with_bias
from caffepy.ops.cuda.convolution.plain import Plain
from caffepy.ops.cuda.copies import convert
from caffepy.ops.cuda.covariance import Covariance
from caffepy.ops.cuda.graphs import Geometry
from caffepy.ops.cuda.launch import TYPES, Array, channels_last, lies_channels_last
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

log = logging.getLogger(__name__)

Sizes = Sequence[int]

LAUNCHES = 10
"""The host takes as long for a convolution and a pass after it as for so many kernels, while others
are compiled.
"""

DENSE = 4
"""Up to this many groups may be computed as one, with zeros between them."""


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


class _ChannelsLast:
    """A convolution with the channels last, in any element type.

    Forward leaves weights and image as it arranged them; a backward whose arrangement is the same
    reuses them.
    """

    def __init__(self, geometry: Geometry, dtype: DTypeLike) -> None:
        self.geometry, self.dtype = geometry, np.dtype(dtype)
        self._ways = arrangements(geometry, dtype)
        own = (
            (small_convolution, "small"),
            (few_channels, "few channels"),
            (depthwise, "depthwise"),
            (pointwise, "pointwise"),
        )
        suiting = (each for each in own if each[0].suits(geometry, dtype))
        self._own: list[ModuleType]
        self._own, self._kind = next((([module], kind) for module, kind in suiting), ([], "small"))
        if small_images.suits(geometry, dtype):
            self._own.append(small_images)
        self._begin_to_compile()
        self._used: list[Arrangement] = []
        self._runs: dict[Any, Run] = {}
        self._last_forward: Arrangement | None = None  # whose weights are those of the last one
        self._last_image = 0  # address of the x that its blocks were made of
        self._covariance: Covariance | None = None  # if there is no output
        self._plain = Plain(geometry, np.float32)

    def _begin_to_compile(self) -> None:
        """Compile the kernels that candidates of cuDNN need."""
        kind = TYPES[self.dtype.name]
        names = "bias_relu", "relu_bias_rows", "add_shares"
        compiler.prefetch("bias_relu", [f"{name}<{kind}>" for name in names])

    def forward(self, x: Array, w: Array, b: Array | None, y: Array, relu: bool) -> None:
        arrays = x, w, b, y

        def make() -> Run | None:
            what = with_bias(relu) if b is not None else "forward"
            own = self._own_way("forward")
            cudnn = partial(self._cudnn_forward, *arrays, relu)
            return self._cudnn_or_own(what, cudnn, own and partial(own, relu=relu), arrays)

        self._last_forward = None
        run_kept(self._runs, ("forward", b is not None, relu), make, arrays)

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
        self._last_forward = None
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

        run_kept(self._runs, key, make, arrays)

    def forward_moments(
        self, x: Array, w: Array, b: Array | None, y: Array, planes: Array
    ) -> tuple[Array, int]:
        """Compute y, and return the partial sums of `planes`, which is y as (N, C, P)."""

        def apart(x: Array, w: Array, b: Array | None, y: Array, planes: Array) -> Any:
            self.forward(x, w, b, y, False)
            return moments(planes)

        candidates: list[Make] = [lambda: apart]
        what, choices = "forward moments", list[tuple[Arrangement, int]]()
        if b is None and depthwise in self._own:
            candidates.append(self._depthwise_with_moments)
            what += " or depthwise"
        elif b is None:
            ways = [w for w in self._ways if pointwise.suits_moments(w.geometry, self.dtype)]
            choices = list(product(ways, pointwise.WIDTHS))
            candidates += [partial(self._with_moments, *choice) for choice in choices]

        def use(chosen: int) -> None:
            if chosen and choices:
                self._used.append(choices[chosen - 1][0])

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
        if key not in self._runs:
            sums: tuple[Array, int] = apart(*arrays)  # chooses its plans before others are timed
            found = autotune.fastest(name, self.dtype, candidates, arrays, LAUNCHES)
            if found is None:
                return sums
            use(found[0])
            self._runs[key] = found[1]
        sums = self._runs[key](*arrays)
        return sums

    def _depthwise_with_moments(self) -> Run:
        found = depthwise.moments(self.geometry, self.dtype)
        return lambda x, w, b, y, planes: found(x, w, y)

    def _with_moments(self, way: Arrangement, width: int) -> Run:
        """Return what runs a product with sums."""
        found = pointwise.moments(way.geometry, self.dtype, width)

        def run(x: Array, w: Array, b: None, y: Array, planes: Array) -> tuple[Array, int]:
            weights, _ = way.weights(w)
            self._last_forward, self._last_image = way, x.data.ptr
            return found(way.image(x), weights, y)

        return run

    def forward_normalized(self, x: Array, w: Array, norm: NormForward) -> None:
        way = self._ways[0]
        weights, _ = way.weights(w)
        self._last_forward, self._last_image = way, x.data.ptr
        if self._covariance is None:
            self._covariance = Covariance(self.geometry, self.dtype)
            self._used.append(way)
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
        self._covariance.gradient(x, self._kept_weights(w), g, numbers, *gradients)

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

        return run_kept(self._runs, what, fastest, arrays)

    def backward_data(self, dy: Array, w: Array, dx: Array) -> None:
        what, arrays = "backward_data", (dy, w, dx)

        def make() -> Run | None:
            cudnn = partial(self._cudnn_backward_data, *arrays)
            own = self._own_way(what)
            if own is None and pointwise.suits_gradients(self.geometry, self.dtype):
                own = self._spreads
            return self._cudnn_or_own(what, cudnn, own, arrays)

        run_kept(self._runs, what, make, arrays)

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
        return lambda dy, w, norm: found(dy, self._kept_weights(w), norm)

    def _narrow_sums(self, after: int) -> Run:
        found = pointwise.narrow_sums(self.geometry, self.dtype, after)
        return lambda dy, w, norm: found(dy, self._kept_weights(w), norm)

    def _spreads(self, *_: Any) -> list[Make]:
        """Return candidates that run with dy, w, dx, with a stride."""
        strided = prod(self.geometry.stride) > 1
        return [partial(self._spread, width) for width in pointwise.WIDTHS if strided]

    def _spread(self, width: int) -> Run:
        found = pointwise.spread(self.geometry, self.dtype, width)
        return lambda dy, w, dx: found(dy, self._kept_weights(w), dx)

    def _kept_weights(self, w: Array) -> Array:
        """Return the weights of the first arrangement, made by forward if it was that."""
        way = self._ways[0]
        kept: Array = way.filters.kept(w) if way is self._last_forward else way.weights(w)[0]
        return kept

    def backward_weight(self, x: Array, dy: Array, dw: Array, db: Array | None) -> None:
        what = "backward_weight bias" if db is not None else "backward_weight"

        def make() -> Run | None:
            own = self._own_way("backward_weight")
            cudnn = partial(self._cudnn_backward_weight, x, dy)
            return self._cudnn_or_own(what, cudnn, own, (x, dy, *_scratch(dw, db)))

        run_kept(self._runs, what, make, (x, dy, dw, db))

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
            return *given, *_scratch(dw, db)

        self._apart_or_at_once(key, name, apart, own, (*given, dw, db), scratch)

    def backward_weight_relu(
        self, x: Array, y: Array, dy: Array, dw: Array, db: Array | None
    ) -> None:
        """The same with the mask of y, which dy may get."""

        def apart(x: Array, y: Array, dy: Array, dw: Array, db: Array | None) -> None:
            relu_bias_backward(y, dy, db)
            self.backward_weight(x, dy, dw, None)

        def make() -> Run | None:
            if not few_channels.suits(self.geometry, self.dtype):
                return apart
            own = partial(few_channels.backward_weight_relu, self.geometry, self.dtype)
            candidates: list[Make] = [lambda: apart, own]
            name, arrays = f"backward_weight relu {self.geometry}", (x, y, dy, *_scratch(dw, db))
            found = autotune.fastest(name, self.dtype, candidates, arrays, LAUNCHES)
            return found and found[1]

        run_kept(self._runs, ("relu", db is not None), make, (x, y, dy, dw, db))

    def _own_way(self, what: str) -> Callable[..., list[Make]] | None:
        """Return what lists our own candidates for a pass; None without any."""
        listed = [getattr(module, what) for module in self._own if hasattr(module, what)]

        def all_of(*given: Any, **how: Any) -> list[Make]:
            return [make for each in listed for make in each(*given, **how)]

        return all_of if listed else None

    def _cudnn_or_own(
        self,
        what: str,
        cudnn: Make,
        own: Callable[..., list[Make]] | None,
        arguments: Sequence[Any],
    ) -> Run | None:
        """Return the fastest of cuDNN and the kernels of our own, if they suit; None ahead."""
        candidates = [cudnn, *(own(self.geometry, self.dtype) if own else [])]
        name = f"{what} {self._kind} {self.geometry}"
        found = autotune.fastest(name, self.dtype, candidates, arguments)
        return found and found[1]

    def _fastest(
        self,
        what: str,
        ways: Sequence[Arrangement],
        plan: Callable[[Arrangement], Run | None],
        arguments: Sequence[Any],
    ) -> tuple[Arrangement, Run] | None:
        """Return the fastest arrangement and what runs it; the others free their memory."""
        name, plans = f"{what} ways {self.geometry}", [partial(plan, way) for way in ways]
        found = autotune.fastest(name, self.dtype, plans, arguments)
        if found is None:
            if not looks_ahead():
                missing = "cuDNN has no plan for %s of %s with the channels last, but by conversion"
                log.debug(missing, what, self.geometry)
            return None
        self._used.append(ways[found[0]])
        for way in self._ways:
            if way not in self._used:
                for rearranged in (way.filters, way.blocks):
                    if rearranged is not None:
                        rearranged.forget()
        return self._used[-1], found[1]

    # Without a plan of cuDNN, arrays are converted to float32 in Caffe's layout and back.

    def _cudnn_forward(self, x: Array, w: Array, b: Array | None, y: Array, relu: bool) -> Run:
        what, arrays = f"forward{' bias' * (b is not None)}{' relu' * relu}", (x, w, b, y)

        def plain(x: Array, w: Array, b: Array | None, y: Array) -> None:
            to = _moved("y", y, read=False)
            self._plain.forward(_moved("x", x), w, b, to, relu)
            convert(to, y)

        found = self._fastest(what, self._ways, lambda way: way.plan_forward(*arrays, relu), arrays)
        way, plan = found or (None, plain)

        def run(x: Array, w: Array, b: Array | None, y: Array) -> None:
            plan(x, w, b, y)
            self._last_forward, self._last_image = way, x.data.ptr

        return run

    def _cudnn_backward_data(self, dy: Array, w: Array, dx: Array) -> Run:
        def plan(way: Arrangement) -> Run | None:
            found = way.plan("backward_data", (dy, way.weights(w)[0], dx))

            def weights(w: Array) -> Array:
                return way.filters.kept(w) if way is self._last_forward else way.weights(w)[0]

            return found and (lambda dy, w, dx: found(dy, weights(w), dx))

        def plain(dy: Array, w: Array, dx: Array) -> None:
            to = _moved("x", dx, read=False)
            self._plain.backward_data(_moved("y", dy), w, to)
            convert(to, dx)

        ways = [way for way in self._ways if way.blocks is None]
        best = self._fastest("backward_data", ways, plan, (dy, w, dx))
        return best[1] if best else plain

    def _cudnn_backward_weight(self, x: Array, dy: Array) -> Run:
        def plan(way: Arrangement) -> Run | None:
            def part() -> Array:
                return context().array("gradient", way.filters.shape, self.dtype)

            def image(x: Array) -> Array:
                if way.blocks is None:
                    return x
                if way is self._last_forward and x.data.ptr == self._last_image:
                    return way.blocks.kept
                self._last_image = 0
                return way.blocks.take(x)

            found = way.plan("backward_weight", (image(x), dy, part()))
            if found is None:
                return None

            def gradient(x: Array, dy: Array) -> Array:
                to = part()
                found(image(x), dy, to)
                return to

            return gradient

        best = self._fastest("backward_weight", self._ways, plan, (x, dy))

        def run(x: Array, dy: Array, dw: Array, db: Array | None) -> None:
            if best is None:
                self._plain.backward_weight(_moved("x", x), _moved("y", dy), dw, None)
            else:
                way, gradient = best
                way.filters.add(gradient(x, dy), dw)
            if db is not None:
                relu_bias_backward(None, dy, db)

        return run


def _scratch(*gradients: Array | None) -> list[Array | None]:
    """Return arrays like these, to be added to while candidates are timed; ahead these."""
    return [a if a is None or looks_ahead() else cupy.zeros_like(a) for a in gradients]


def _variant(norm: NormSums) -> Variant:
    """Return which kernel computes it."""
    mask, after = mask_kind(norm.ceiling, norm.y, norm.bits), what_follows(norm.ceiling)
    return mask, after, int(norm.more is not None), int(norm.x is not None)


def _moved(purpose: str, array: Array, read: bool = True) -> Array:
    to = context().array(f"moved {purpose}", array.shape, np.float32)
    if read:
        convert(array, to)
    return to
