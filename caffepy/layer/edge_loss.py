"""Sigmoid losses of edges and of classes of edges (CASENet: Yu et al. 2017; SEAL: Yu et al. 2018).

Labels are not numbers: their bits count. The highest, a float's sign, says that a place has no
label.
"""

from collections.abc import Sequence

import numpy as np

from caffepy.core.errors import ConfigError
from caffepy.device.blob import Array
from caffepy.layer.base import Blobs, LossLayer, layer
from caffepy.layer.loss import items


class _EdgeLoss(LossLayer):
    """Base: sum of w * (log(1 + exp(x)) - x * t) / N over x (N, K, ...) and its targets t."""

    backward_reads_bottom = False  # only w * (s(x) - t), which forward leaves
    backward_reads_top = False

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        n = items(bottom[0])
        classes = bottom[0].shape[1] if len(bottom[0].shape) > 1 else 1
        self.places = bottom[0].count // max(n * classes, 1)
        self.view = n, classes, self.places
        self.items = max(n, 1)
        self.slope = self.buffer(self.view)

    def targets(self, labels: Array) -> tuple[Array, Array, Array]:
        """t (N, K or 1, P), places without a label and places of an edge, (N, 1, P) or as t."""
        raise NotImplementedError

    def balance(self, targets: Array, ignored: Array, edges: Array) -> Array:
        """The weights of t: the share of the other kind of place, 0 where there is no label."""
        others = ~(edges | ignored)
        axes = tuple(range(1, edges.ndim))
        count = (edges & ~ignored).sum(axis=axes, keepdims=True)
        rest = others.sum(axis=axes, keepdims=True)
        share = np.where(targets, rest, count) / np.maximum(count + rest, 1)
        return np.where(ignored, 0, share)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        x = bottom[0].data.reshape(self.view)
        targets, ignored, edges = self.targets(bottom[1].data)
        weights = self.balance(targets, ignored, edges)
        losses = np.maximum(x, 0) - np.where(targets, x, 0) + np.log1p(np.exp(-np.abs(x)))
        np.sum(losses * weights, out=top[0].data)
        np.multiply(top[0].data, 1 / self.items, out=top[0].data)
        np.multiply(0.5 * np.tanh(0.5 * x) + 0.5 - targets, weights, out=self.slope.data)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx = weight * w * (s(x) - t) / N."""
        self.refuse_constants(propagate_down)
        if propagate_down[0]:
            factor = top[0].diff * (1 / self.items)
            np.multiply(self.slope.data, factor, out=bottom[0].diff.reshape(self.view))


@layer("ReweightedSigmoidCrossEntropyLoss")
class ReweightedSigmoidCrossEntropyLoss(_EdgeLoss):
    """x and labels of one count: t is 1 where the label is not 0, w the item's share of the other
    kind of place; labels below 0 do not count (CASENet). The loss is 0 where the fork stops: no
    place has a label.
    """

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        if bottom[0].count != bottom[1].count:
            raise ConfigError(
                f"{bottom[0].count} predictions need as many labels, not {bottom[1].count}"
            )

    def targets(self, labels: Array) -> tuple[Array, Array, Array]:
        labels = labels.reshape(self.view)
        edges = labels > 0
        return edges, np.signbit(labels), edges


class _BitLoss(_EdgeLoss):
    """Base: t of class k is bit k % 32 of channel k // 32 of labels (N, L, ...), K < 32 L; the
    highest bit of the last channel says that the place has no label. The labels' memory is float32
    that a program filled with numbers of 32 bits.
    """

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        n, classes, places = self.view
        self.channels = bottom[1].count // max(n * places, 1)
        if bottom[1].count != n * self.channels * places or not 0 < classes < 32 * self.channels:
            raise ConfigError(
                f"{self.type} needs labels (N, L, H, W) with more than K / 32 channels for x (N, "
                f"K, H, W), not {list(bottom[1].shape)} for {list(bottom[0].shape)}"
            )
        self.used = classes // 32 + 1
        self.number, self.shift = self.buffer([classes], np.int64), self.buffer([classes], np.int32)
        self.number.host_data[...], self.shift.host_data[...] = np.divmod(np.arange(classes), 32)

    def targets(self, labels: Array) -> tuple[Array, Array, Array]:
        n, _, places = self.view
        bits = labels.astype(np.float32).view(np.int32).reshape(n, self.channels, places)
        taken = np.take(bits, self.number.data, axis=1)  # (N, K, P)
        targets = (taken >> self.shift.data[:, None]) & 1
        edges = (bits[:, : self.used] != 0).any(axis=1, keepdims=True)
        return targets != 0, bits[:, -1:] < 0, edges


@layer("MultiChannelReweightedSigmoidCrossEntropyLoss")
class MultiChannelReweightedSigmoidCrossEntropyLoss(_BitLoss):
    """x (N, K, ...), labels (N, L, ...) whose bits are classes: w is the item's share of places
    without an edge where t is 1, of places with any edge where t is 0 (CASENet).
    """


@layer("MultiChannelSigmoidCrossEntropyLoss")
class MultiChannelSigmoidCrossEntropyLoss(_BitLoss):
    """x (N, K, ...), labels (N, 1, ...) whose bits are classes, K < 32; w is 1 (SEAL)."""

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        if self.channels != 1:
            raise ConfigError(f"{self.type} needs labels of one channel, not {self.channels}")

    def balance(self, targets: Array, ignored: Array, edges: Array) -> Array:
        return np.where(ignored, 0, np.ones_like(self.slope.data))
