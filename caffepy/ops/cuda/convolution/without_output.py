"""A 1x1 convolution before a BatchNorm, of which only the normalized output is written, by products
of our own; covariance.cu has the algebra.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from caffepy.ops.cuda import autotune, pointwise
from caffepy.ops.cuda.autotune import Make, Run, run_kept
from caffepy.ops.cuda.convolution.passes import Passes
from caffepy.ops.cuda.covariance import Covariance
from caffepy.ops.cuda.launch import Array
from caffepy.ops.cuda.normalization import what_follows
from caffepy.ops.objects import NormForward, NormSums


class WithoutOutput:
    """Passes in their order: the gradients of the parameters prepare that of the data."""

    def __init__(self, passes: Passes) -> None:
        self._passes, self._cudnn = passes, passes.cudnn
        self._geometry, self._dtype = passes.geometry, passes.dtype
        self._covariance: Covariance | None = None
        self._runs: dict[Any, Run] = {}

    def forward(self, x: Array, w: Array, norm: NormForward) -> None:
        """Write norm.y."""
        way = self._cudnn.arrangements[0]
        weights, _ = way.weights(w)
        self._cudnn.end_forward(way, x)
        if self._covariance is None:
            self._covariance = Covariance(self._geometry, self._dtype)
            self._cudnn.use(way)
        if norm.preparation is not None:
            self._covariance.prepare(x, weights, norm.preparation)
        follows = what_follows(norm.ceiling)
        variant = int(norm.other is not None), follows, int(norm.bits is not None)
        make = partial(pointwise.normalized, self._geometry, self._dtype, variant=variant)
        what, narrow = f"forward normalized {variant}", []
        if pointwise.suits_narrow(self._geometry, norm):
            what += " or narrow"
            own = partial(pointwise.narrow_normalized, self._geometry, self._dtype, follows)
            narrow.append(own)
        self._run(what, make, (x, weights, norm), narrow)

    def backward_params(
        self, x: Array, w: Array, g: Array, numbers: Array, gradients: Sequence[Array | None]
    ) -> None:
        """Add to the gradients of w, scale and bias; prepare the methods below."""
        assert self._covariance is not None
        weights = self._passes.product_weights(w)
        self._covariance.gradient(x, weights, g, numbers, *gradients)

    def backward_data_sums(self, x: Array, g: Array, norm: NormSums) -> tuple[Array, int]:
        """Compute norm.masked, and return its partial sums."""
        assert self._covariance is not None
        weights, behind = self._covariance.joined, (x, self._covariance.base)
        variant = pointwise.variant_of(norm)
        given = self._geometry, self._dtype
        make = partial(pointwise.gradient, *given, variant=variant, joined=True)
        what, narrow = f"backward_data joined sums {variant}", []
        if pointwise.suits_narrow_gradient(self._geometry, norm):
            what += " or narrow"
            more = norm.more is not None
            narrow.append(partial(pointwise.narrow_gradient, *given, more))
        arrays = g, weights, norm, behind
        sums: tuple[Array, int] | None = self._run(what, make, arrays, narrow)
        return sums or (norm.line, 1)  # ahead there are none, and none are read

    def backward_data(self, x: Array, g: Array, dx: Array) -> None:
        """Write dx."""
        assert self._covariance is not None
        weights, behind = self._covariance.joined, (x, self._covariance.base)
        make = partial(pointwise.spread, self._geometry, self._dtype, joined=True)
        self._run("backward_data joined", make, (g, weights, dx, behind))

    def _run(
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
            name = f"{what} {self._geometry}"
            found = autotune.fastest(name, self._dtype, candidates, arrays)
            return found and found[1]

        return run_kept(self._runs, what, fastest, arrays)
