"""Softmax and losses: x, prob (outer, C, inner), label (outer, inner); a label `ignore` does not
count and has gradient 0.
"""

from typing import Protocol

from caffepy.device.blob import Array
from caffepy.ops.protocol.types import Maybe

Counting = tuple[int | None, float | None]
"""The label to ignore, and the divisor of a loss."""
Outcome = tuple[Array, Array, Array]
"""loss, norm and wrong."""
Room = tuple[Array, Array]
"""hits and counts of an accuracy."""
Shares = tuple[Array, Maybe, Array]
"""share, shares and wrong."""


class LossOps(Protocol):
    def softmax_forward(self, x: Array, y: Array) -> None:
        """y = exp(x - max) / sum of that over the channels."""

    def softmax_backward(self, y: Array, dy: Array, dx: Array) -> None:
        """dx = y * (dy - sum of dy * y over the channels); dx may be dy."""

    def softmax_loss_forward(
        self, x: Array, label: Array, counting: Counting, prob: Array, outcome: Outcome
    ) -> None:
        """prob = softmax of x, loss = sum of -log(max(prob of the label, FLT_MIN)) / norm."""

    def softmax_loss_backward(
        self, prob: Array, label: Array, ignore: int | None, weight: Array, norm: Array, dx: Array
    ) -> None:
        """dx = weight / norm * (prob - 1 at the label)."""

    def infogain_loss_forward(
        self,
        x: Array,
        label: Array,
        matrix: Array,
        counting: Counting,
        prob: Array,
        outcome: Outcome,
    ) -> None:
        """prob = softmax of x, loss = -sum over classes of matrix[label] * log(max(prob, 1e-20)) /
        norm; matrix (C, C).
        """

    def infogain_loss_backward(
        self,
        prob: Array,
        label: Array,
        matrix: Array,
        ignore: int | None,
        weight: Array,
        norm: Array,
        dx: Array,
    ) -> None:
        """dx = weight / norm * (prob * sum of matrix[label] - matrix[label])."""

    def multinomial_loss_forward(
        self, prob: Array, label: Array, divisor: float, loss: Array, wrong: Array
    ) -> None:
        """loss = -sum of log(max(prob of the label, 1e-20)) / divisor; prob (N, C), label (N)."""

    def multinomial_loss_backward(
        self, prob: Array, label: Array, weight: Array, divisor: float, dx: Array
    ) -> None:
        """dx = -weight / divisor / max(prob, 1e-20) at the label, else 0."""

    def sigmoid_loss_forward(
        self,
        x: Array,
        target: Array,
        ignore: int | None,
        divisor: float | None,
        loss: Array,
        norm: Array,
    ) -> None:
        """loss = sum of max(x, 0) - x * target + log(1 + exp(-|x|)) / norm."""

    def sigmoid_loss_backward(
        self, x: Array, target: Array, ignore: int | None, weight: Array, norm: Array, dx: Array
    ) -> None:
        """dx = weight / norm * (sigmoid(x) - target)."""

    def euclidean_loss_forward(
        self, x: Array, target: Array, divisor: float, difference: Array, loss: Array
    ) -> None:
        """difference = x - target, loss = sum of its squares / 2 / divisor."""

    def euclidean_loss_backward(
        self, difference: Array, weight: Array, divisor: float, dx: Array
    ) -> None:
        """dx = weight / divisor * difference."""

    def hinge_loss_forward(
        self,
        x: Array,
        label: Array,
        squares: bool,
        divisor: float,
        slack: Array,
        loss: Array,
        wrong: Array,
    ) -> None:
        """slack = max(0, 1 + x), at the label -max(0, 1 - x); loss = sum of its absolute values, or
        with `squares` of its squares, / divisor; x and slack (N, C), label (N).
        """

    def hinge_loss_backward(
        self, slack: Array, squares: bool, weight: Array, divisor: float, dx: Array
    ) -> None:
        """dx = weight / divisor * sign(slack), or with `squares` times 2 * slack."""

    def contrastive_loss_forward(
        self,
        a: Array,
        b: Array,
        similar: Array,
        margin: float,
        legacy: bool,
        divisor: float,
        difference: Array,
        factor: Array,
        loss: Array,
    ) -> None:
        """difference = a - b (N, C), d its length; loss = sum / 2N of d^2 where similar (N), else
        of max(margin - d, 0)^2, with `legacy` of max(margin - d^2, 0) (Hadsell et al. 2006).

        The divisor is N; factor (N) is what backward multiplies the difference by.
        """

    def contrastive_loss_backward(
        self, difference: Array, factor: Array, weight: Array, divisor: float, dx: Array
    ) -> None:
        """dx = weight / divisor * factor * difference."""

    def accuracy(
        self, x: Array, label: Array, top_k: int, ignore: int | None, room: Room, outcome: Shares
    ) -> None:
        """share = fraction of the labels with fewer than top_k other scores >= theirs, shares (C) =
        that of each class.

        The room, hits and counts (C), is there to count in: zeros before and after.
        """
