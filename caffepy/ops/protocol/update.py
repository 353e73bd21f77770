"""Updates of parameters, and their state."""

from collections.abc import Sequence
from typing import Any, Protocol

from numpy.typing import DTypeLike

from caffepy.device.blob import Array, Blob
from caffepy.ops import objects
from caffepy.ops.update_state import Limits, Number, Segments


class UpdateOps(Protocol):
    def UpdateState(
        self, limits: Limits, losses: Sequence[Blob], device: Any
    ) -> objects.UpdateState:
        """Make the device-side state of a solver's updates; `losses` are the tops with a weight."""

    def Sums(self, blobs: Sequence[Blob], losses: Sequence[Blob], device: Any) -> objects.Sums:
        """Make the sums of a test pass."""

    def update_params(
        self, rule: str, arrays: Sequence[Array], segments: Segments, numbers: Sequence[Number]
    ) -> None:
        """Update flat arrays in place: w, g and the rule's history, with the rate and decay of each
        of the segments; g becomes what was subtracted from w.

        sgd (momentum): h = momentum*h + rate*g; w -= h.
        nesterov (momentum): h' = momentum*h + rate*g; w -= (1 + momentum)*h' - momentum*h; h = h'.
        rms (keep, take, delta): h = keep*h + take*g^2; w -= rate*g/(sqrt(h) + delta).
        adadelta (momentum, delta): h, u are means of g^2, of v^2 with v = g*sqrt((u + delta)/(h +
        delta)); w -= rate*v.
        adam (beta1, beta2, delta, correction): m, v = means of g, g^2 by beta1, beta2; w -=
        rate*correction*m/(sqrt(v) + delta).
        """

    def fuses_update(self, depth: int, shape: Sequence[int], dtype: DTypeLike) -> bool:
        """Return True if `product_update` saves passes, for factors (depth, R) and (depth, C) of
        this type and a parameter of this shape, (R, C).
        """

    def product_update(
        self,
        rule: str,
        a: Array,
        b: Array,
        arrays: Sequence[Array],
        segments: Segments,
        numbers: Sequence[Number],
    ) -> None:
        """Update arrays (R, C) in place, w and the rule's history, as `update_params` does with the
        gradient a.T @ b of a (M, R) and b (M, C), which is not kept; there is one segment.
        """
