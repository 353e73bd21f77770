"""A convolution beside a BatchNorm: a pass for the sums of each channel after it, or kernels of our
own that give them, pointwise, perhaps of folded pixels, or depthwise.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from math import prod
from typing import Any

from caffepy.ops.cuda import autotune, depthwise, pointwise, pointwise_few, rgb_images
from caffepy.ops.cuda.autotune import Make, Run, run_kept
from caffepy.ops.cuda.convolution.arrangement import Arrangement
from caffepy.ops.cuda.convolution.passes import LAUNCHES, Passes
from caffepy.ops.cuda.launch import Array
from caffepy.ops.cuda.normalization import (
    BY_X,
    BY_Y,
    NO_MASK,
    NO_RELU,
    Addition,
    as_planes,
    finish_norm,
    gradient_sums,
    mask_kind,
    moments,
    what_follows,
)
from caffepy.ops.cuda.pointwise import Variant
from caffepy.ops.objects import Normalized, NormGradient, NormSums


class Summed:
    """Passes that return partial sums of what they write, and into how many each is split."""

    def __init__(self, passes: Passes) -> None:
        self._passes, self._cudnn = passes, passes.cudnn
        self._geometry, self._dtype = passes.geometry, passes.dtype
        self._runs: dict[Any, Run] = {}
        if pointwise.suits_narrow_both(self._geometry, self._dtype):
            self._cudnn.use(self._cudnn.arrangements[0])

    def sums_gradients(self, alike: bool) -> bool:
        """Return True if `backward_data` may save a pass."""
        if self._passes.folding is not None:
            return True
        suits = pointwise.suits_gradients(self._geometry, self._dtype)
        return suits and (alike or prod(self._geometry.stride) == 1)

    def forward(
        self, x: Array, w: Array, b: Array | None, y: Array, planes: Array
    ) -> tuple[Array, int]:
        """Compute y, and return the partial sums of `planes`, which is y as (N, C, P)."""

        def apart(x: Array, w: Array, b: Array | None, y: Array, planes: Array) -> Any:
            self._passes.forward(x, w, b, y, False)
            return moments(planes)

        candidates: list[Make] = [lambda: apart]
        what, choices = "forward moments", list[tuple[Arrangement, int]]()
        if b is None and depthwise.suits(self._geometry, self._dtype):
            candidates.append(self._depthwise_moments)
            what += " or depthwise"
        elif b is None and self._passes.folding is not None:
            make = self._passes.folding.moments
            candidates += [partial(make, width) for width in pointwise.WIDTHS]
            what += " or folding"
            if pointwise_few.suits(self._geometry, self._dtype):
                candidates.append(lambda: self._few_moments)
                what += " or few"
        elif b is None:
            ways = self._cudnn.arrangements
            ways = [way for way in ways if pointwise.suits_moments(way.geometry, self._dtype)]
            widths = pointwise.widths(self._geometry)
            what += " narrow" * (widths != pointwise.WIDTHS)
            choices = list(product(ways, widths))
            candidates += [partial(self._product_moments, *choice) for choice in choices]
            if rgb_images.suits(self._geometry, self._dtype):
                candidates.append(self._rgb_moments)
                what += " or rgb"

        def use(chosen: int) -> None:
            if 0 < chosen <= len(choices):
                self._cudnn.use(choices[chosen - 1][0])

        key, arrays = ("moments", b is not None), (x, w, b, y, planes)
        name = f"{what} {self._geometry}"
        return self._run(key, name, apart, candidates, arrays, use)

    def forward_normalized(
        self, x: Array, w: Array, y: Array, given: Normalized
    ) -> tuple[Array, int]:
        """Compute y of what the normalization makes of x, and return its partial sums."""
        if depthwise.suits(self._geometry, self._dtype):
            return depthwise.moments(self._geometry, self._dtype, given)(x, w, y)
        if pointwise_few.suits(self._geometry, self._dtype):
            return self._few_moments(x, w, None, y, y, given)
        way = self._cudnn.arrangements[0]
        weights, _ = way.weights(w)
        self._cudnn.end_forward(way, x)
        return pointwise.narrow_moments(self._geometry, self._dtype, given)(x, weights, y)

    def _few_moments(
        self,
        x: Array,
        w: Array,
        b: None,
        y: Array,
        planes: Array,
        given: Normalized | None = None,
    ) -> tuple[Array, int]:
        assert self._passes.folding is not None
        self._passes.folding.begin_forward()
        return pointwise_few.moments(self._geometry, x, w, y, given)

    def _depthwise_moments(self) -> Run:
        found = depthwise.moments(self._geometry, self._dtype)
        return lambda x, w, b, y, planes: found(x, w, y)

    def _rgb_moments(self) -> Run:
        found = rgb_images.moments(self._geometry, self._dtype)

        def run(x: Array, w: Array, b: None, y: Array, planes: Array) -> tuple[Array, int]:
            self._cudnn.begin_forward()
            return found(x, w, y)

        return run

    def _product_moments(self, way: Arrangement, width: int) -> Run:
        """Return what runs a product with sums."""
        found = pointwise.moments(way.geometry, self._dtype, width)

        def run(x: Array, w: Array, b: None, y: Array, planes: Array) -> tuple[Array, int]:
            weights, _ = way.weights(w)
            self._cudnn.end_forward(way, x)
            return found(way.image(x), weights, y)

        return run

    def backward_data(self, dy: Array, w: Array, norm: NormSums) -> tuple[Array, int]:
        """Compute norm.masked, and return its partial sums."""
        variant = pointwise.variant_of(norm)

        def apart(dy: Array, w: Array, norm: NormSums) -> Any:
            self._passes.backward_data(dy, w, norm.masked)
            given = norm.masked, norm.more, norm.x, norm.y
            masked, more, x, y = (a if a is None else as_planes(a) for a in given)
            dys = [masked] if more is None else [masked, more]
            how = y, norm.bits, norm.ceiling
            return gradient_sums(x, norm.numbers, dys, *how, masked, None)

        candidates: list[Make] = [lambda: apart]
        if variant[0] != BY_Y:
            candidates += [partial(self._gradient, width, variant) for width in pointwise.WIDTHS]
        what = f"backward_data sums {variant}"
        if self._passes.folding is not None:
            what += " or folding"
        elif pointwise.suits_narrow_sums(self._geometry, variant):
            what += " or narrow"
            candidates.append(partial(self._narrow_sums, variant[1]))
        name = f"{what} {self._geometry}"
        return self._run(("sums", *variant), name, apart, candidates, (dy, w, norm))

    def suits_both(self, to: NormSums | Array) -> bool:
        """Return True if `backward_both` can compute what is wanted."""
        if not isinstance(to, NormSums):
            return pointwise_few.suits(self._geometry, self._dtype)
        mask = mask_kind(to.ceiling, to.y, to.bits)
        return to.x is not None and to.more is None and mask in (NO_MASK, BY_X)

    def backward_both(
        self, x: Array | None, w: Array, dy: NormGradient, dw: Array | None, to: NormSums | Array
    ) -> None:
        """Compute what the normalization wants past the gradient of y, or the gradient of x, and
        add to dw.
        """
        of, sums = (self._geometry, self._dtype), isinstance(to, NormSums)
        after = what_follows(to.ceiling) if isinstance(to, NormSums) else NO_RELU
        given = x, w, dy, to

        def fastest() -> Run | None:
            made = pointwise_few.both(*of) if pointwise_few.suits(*of) else []
            if sums and pointwise.suits_narrow_both(*of):
                made.append(partial(self._narrow_both, after))
            found = autotune.fastest(f"both {sums} {after} {self._geometry}", of[1], made, given)
            return found and found[1]

        found = run_kept(self._runs, ("both", sums, after), fastest, given)
        partial_sums, part = found or ((w, 1), w)  # ahead there are none, and none are read
        size = part[0].size
        if isinstance(to, NormSums):
            addition = Addition(part, dw, len(part), size, size, size, 1)
            finish_norm(partial_sums, to, None if dw is None else addition)
        elif dw is not None:
            pointwise_few.add(part, dw)

    def _narrow_both(self, after: int) -> Run:
        found = pointwise.narrow_both(self._geometry, self._dtype, after)
        return lambda x, w, dy, norm: found(dy, self._passes.product_weights(w), norm)

    def _gradient(self, width: int, variant: Variant) -> Run:
        if self._passes.folding is not None:
            return self._passes.folding.gradient(width, variant)
        found = pointwise.gradient(self._geometry, self._dtype, width, variant)
        return lambda dy, w, norm: found(dy, self._passes.product_weights(w), norm)

    def _narrow_sums(self, after: int) -> Run:
        found = pointwise.narrow_sums(self._geometry, self._dtype, after)
        return lambda dy, w, norm: found(dy, self._passes.product_weights(w), norm)

    def _run(
        self,
        key: Any,
        name: str,
        apart: Run,
        candidates: Sequence[Make],
        arrays: Sequence[Any],
        use: Callable[[int], None] = lambda chosen: None,
    ) -> tuple[Array, int]:
        """Run the fastest candidate, the first of which is `apart`; return its partial sums. `use`
        gets its number once.
        """
        if key not in self._runs:
            sums: tuple[Array, int] = apart(*arrays)  # chooses its plans before others are timed
            found = autotune.fastest(name, self._dtype, candidates, arrays, LAUNCHES)
            if found is None:
                return sums
            use(found[0])
            self._runs[key] = found[1]
        sums = self._runs[key](*arrays)
        return sums
