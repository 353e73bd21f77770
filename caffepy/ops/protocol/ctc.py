"""Connectionist temporal classification: scores x (T, N, C), of which an item has steps (N,) after
the first `delay`; labels (N, L), -1 for none; kept for backward: path (N, 2L + 1), the labels
with blanks around them, sizes (N,) of it, 0 for labels that need more steps, normalizers (T, N),
states (N, T + 2, 2L + 1).
"""

from typing import Protocol

from caffepy.device.blob import Array


class CTCOps(Protocol):
    def ctc_forward(
        self,
        x: Array,
        steps: Array,
        labels: Array,
        blank: int,
        merge: bool,
        delay: int,
        path: Array,
        sizes: Array,
        normalizers: Array,
        states: Array,
        losses: Array,
    ) -> None:
        """Write losses (N,), -log of the probability of all ways through the path, and states, the
        probability that a way has state u at time t. With `merge` a label may last several steps.
        """

    def ctc_backward(
        self,
        x: Array,
        steps: Array,
        delay: int,
        path: Array,
        sizes: Array,
        normalizers: Array,
        states: Array,
        scale: Array,
        dx: Array,
    ) -> None:
        """Write dx = scale * (softmax of x - probability that a way has the class)."""
