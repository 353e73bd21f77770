"""Arrays of one shape."""

from collections.abc import Sequence
from typing import Protocol

from caffepy.device.blob import Array
from caffepy.ops.update_state import Number


class ElementwiseOps(Protocol):
    def scaled(self, alpha: float, x: Array, out: Array) -> None:
        """out = alpha * x."""

    def axpy(self, alpha: float, x: Array, out: Array) -> None:
        """out += alpha * x."""

    def add(self, x: Array, out: Array) -> None:
        """out += x."""

    def multiply(self, x: Array, y: Array, out: Array) -> None:
        """out = x * y."""

    def dot(self, x: Array, y: Array) -> Number:
        """Return the sum of x * y in float64: a float, on a GPU an array without axes."""

    def eltwise_sum(self, xs: Sequence[Array], coefficients: Sequence[float], out: Array) -> None:
        """out = sum of coefficient * x over at least two arrays."""

    def eltwise_max(self, xs: Sequence[Array], out: Array, index: Array) -> None:
        """out = the largest x, index = its number.

        A tie of the first two goes to the second; later ones must be larger.
        """

    def eltwise_select(self, index: Array, rank: int, dy: Array, dx: Array) -> None:
        """dx = dy where index is rank, else 0."""
