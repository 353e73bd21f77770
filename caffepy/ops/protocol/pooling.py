"""Pooling of maps and of volumes."""

from typing import Any, Protocol

import numpy as np

from caffepy.device.blob import Array
from caffepy.ops.objects import Windows
from caffepy.ops.protocol.types import Maybe, Pair, Seed

Three = tuple[int, int, int]
Volume = tuple[Three, Three, Three]
"""kernel, stride and pad, each (length, height, width)."""


class PoolingOps(Protocol):
    # Pooling: x, dx (N, C, H, W), y, dy, index (N, C, Ho, Wo)

    def pool_index_type(self, kernel: Pair) -> "np.dtype[Any]":
        """Return the element type of an index: int32, on a GPU uint8 if windows are small."""

    def max_pool_forward(
        self, x: Array, y: Array, index: Array, window: Windows, relu: bool = False
    ) -> None:
        """Write the maximum of each window, clipped to the plane, and the index of the first
        element that has it.

        An index of int32 is h*W + w; one of uint8 counts within the window, in the order of y's
        memory. A window of NaN only keeps its first element. With `relu` a maximum <= 0 becomes 0
        and its index -1 (255).
        """

    def max_pool_backward(
        self, dy: Array, index: Array, dx: Array, window: Windows, db: Maybe = None
    ) -> None:
        """dx = 0, then dx[index] += dy for every index but -1. db[c] += sum of dx[n, c, ...] unless
        db is None; dy may then become 0 where the index is -1.
        """

    def norm_max_pool_forward(
        self, x: Array, numbers: Array, y: Array, index: Array, window: Windows
    ) -> None:
        """Maxima of x * factor + shift: `norm_forward`, then `max_pool_forward` with `relu`."""

    def norm_max_pool_backward(
        self,
        x: Array,
        numbers: Array,
        dy: Array,
        index: Array,
        window: Windows,
        dx: Maybe,
        dscale: Maybe,
        dbias: Maybe,
        frozen: bool,
    ) -> None:
        """Compute the gradient of `norm_max_pool_forward`: `max_pool_backward`, then
        `norm_backward`.
        """

    def ave_pool_forward(self, x: Array, y: Array, window: Windows, relu: bool = False) -> None:
        """Write the mean of each window, at least 0 with `relu`.

        The divisor counts elements of the padding, but none beyond it.
        """

    def ave_pool_backward(
        self, dy: Array, dx: Array, window: Windows, y: Maybe = None, x: Maybe = None
    ) -> None:
        """Write dx: each dy divided evenly over its window; with y, only dy whose y > 0, or with x
        only for elements whose x > 0.
        """

    def stochastic_pool_forward(
        self,
        x: Array,
        y: Array,
        index: Array,
        window: Windows,
        seed: Seed,
        step_counter: Maybe = None,
    ) -> None:
        """Write a random element of each window, with probability in proportion to its value, and
        its index as `max_pool_forward` does (Zeiler and Fergus 2013).

        Its gradient is `max_pool_backward`. Seed and step_counter are those of `dropout_forward`.
        """

    def stochastic_pool_mean(self, x: Array, y: Array, window: Windows) -> None:
        """Write the mean of `stochastic_pool_forward`: sum of squares / sum, 0 if that is <= 0."""

    # Pooling of volumes: x, dx (P, L, H, W), y, dy (P, Lo, Ho, Wo), window of three axes

    def max_pool_volumes_forward(self, x: Array, y: Array, least: float, window: Volume) -> None:
        """Write the maximum of each window, `least` for one without elements."""

    def max_pool_volumes_backward(
        self, x: Array, y: Array, dy: Array, dx: Array, window: Volume
    ) -> None:
        """Write dx: each dy goes to every element of its window that equals y."""

    def ave_pool_volumes_forward(self, x: Array, y: Array, window: Volume) -> None:
        """Write the mean of each window; the divisor counts padding, but nothing beyond it."""

    def ave_pool_volumes_backward(self, dy: Array, dx: Array, window: Volume) -> None:
        """Write dx: each dy divided evenly over its window."""
