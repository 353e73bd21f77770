"""A convolution before MAX pooling: the pooling after it, or kernels that do both, and do not write
the output; the gradient has the same candidates.
"""

from collections.abc import Callable, Sequence
from typing import Any

from caffepy.ops.cuda import autotune, pooled_convolution, small_images, strided_images
from caffepy.ops.cuda.autotune import Make, Run, run_kept
from caffepy.ops.cuda.compiler import looks_ahead
from caffepy.ops.cuda.convolution.passes import LAUNCHES, Passes, zeros_like
from caffepy.ops.cuda.launch import Array
from caffepy.ops.cuda.pooling import max_pool_backward, max_pool_forward
from caffepy.ops.objects import Maxima


class MaxPooled:
    """Passes of a convolution that take maxima in place of the output."""

    def __init__(self, passes: Passes) -> None:
        self._passes = passes
        self._runs: dict[Any, Run] = {}

    def forward(self, x: Array, w: Array, b: Array | None, output: Array, maxima: Maxima) -> None:
        """Compute the maxima of windows over y, which lies in `output` if it is written."""
        geometry, dtype = self._passes.geometry, self._passes.dtype

        def apart(x: Array, w: Array, b: Array | None, output: Array, maxima: Maxima) -> None:
            self._passes.forward(x, w, b, output, False)
            max_pool_forward(output, *maxima)

        def own() -> list[Make]:
            given = geometry, maxima, dtype
            return [
                *pooled_convolution.forward(*given),
                *small_images.forward_maxima(*given),
                *strided_images.forward(*given),
            ]

        name = f"forward maxima {maxima.window} {maxima.relu} {geometry}"
        key, arrays = ("maxima", b is not None, maxima.relu), (x, w, b, output, maxima)
        self._passes.cudnn.begin_forward()
        self._apart_or_at_once(key, name, apart, own, arrays, lambda: arrays)

    def backward_weight(
        self, x: Array, output: Array, maxima: Maxima, dw: Array, db: Array | None
    ) -> None:
        """Add to dw and db, from the gradient of the maxima."""
        geometry, dtype = self._passes.geometry, self._passes.dtype

        def apart(x: Array, output: Array, maxima: Maxima, dw: Array, db: Array | None) -> None:
            max_pool_backward(maxima.y, maxima.where, output, maxima.window)
            self._passes.backward_weight(x, output, dw, db)

        def own() -> list[Make]:
            given = geometry, maxima, dtype
            return [
                *pooled_convolution.backward_weight(*given),
                *strided_images.backward_weight(*given),
            ]

        name = f"backward_weight maxima {maxima.window} {geometry}"
        key, given = ("maxima gradient", db is not None), (x, output, maxima)

        def scratch() -> Sequence[Any]:
            return *given, *zeros_like(dw, db)

        self._apart_or_at_once(key, name, apart, own, (*given, dw, db), scratch)

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
            found = autotune.fastest(name, self._passes.dtype, candidates, given, LAUNCHES)
            return found and found[1]

        run_kept(self._runs, key, make, arrays)
