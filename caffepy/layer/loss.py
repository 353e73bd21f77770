"""Losses and softmax.

Predictions are seen as (outer, C, inner) around the axis of the classes, labels as (outer, inner).
A loss's backward finds its loss weight in the top's diff. On a GPU nothing is read back: loss,
divisor and the first invalid label stay in arrays of the device.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from caffepy.core.errors import ConfigError, DataError
from caffepy.core.files import locate
from caffepy.device.blob import Array, Blob
from caffepy.device.device import ErrorFlag
from caffepy.layer.base import Blobs, Layer, LossLayer, layer
from caffepy.layer.neuron import SameShape
from caffepy.proto import binary
from caffepy.proto.caffe_pb2 import FocalLossParameter, HingeLossParameter, LossParameter

log = logging.getLogger(__name__)


def around(blob: Blob, axis: int) -> tuple[int, int, int]:
    """(outer, C, inner): the sizes before, of and after the axis."""
    axis = blob.axis(axis)
    return prod(blob.shape[:axis]), blob.shape[axis], prod(blob.shape[axis + 1 :])


def items(blob: Blob) -> int:
    """The size of the first axis; ConfigError for a scalar."""
    return blob.shape[blob.axis(0)]


def check_labels(predictions: Blob, labels: Blob, view: tuple[int, int, int]) -> None:
    """ConfigError unless there is one label for each (outer, inner)."""
    outer, classes, inner = view
    if labels.count != outer * inner:
        raise ConfigError(
            f"predictions of shape {list(predictions.shape)} with {classes} classes need "
            f"{outer * inner} labels, not {labels.count} (shape {list(labels.shape)})"
        )


def bad_labels(layer: Layer, classes: Callable[[], int]) -> ErrorFlag:
    """Return a flag for labels that are no class; its error says where the layer is defined."""
    return layer.error_flag(
        lambda label: DataError(
            f"label {label:g} is not one of the {classes()} classes 0 to {classes() - 1}"
        )
    )


class ClassLoss(LossLayer):
    """A loss with `loss_param`: the label to ignore and the normalization."""

    normalization = LossParameter.VALID  # unless loss_param says otherwise

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.loss_param
        self.ignore = param.ignore_label if param.HasField("ignore_label") else None
        if param.HasField("normalize"):
            valid, batch_size = LossParameter.VALID, LossParameter.BATCH_SIZE
            self.normalization = valid if param.normalize else batch_size
        if param.HasField("normalization"):
            self.normalization = param.normalization
        while len(self.param.loss_weight) < len(top):
            self.param.loss_weight.append(0)

    def divisor(self, outer: int, inner: int) -> float | None:
        """The divisor of the sum, at least 1; FULL: outer * inner, VALID: None for the number of
        labels that are not ignored, BATCH_SIZE: outer, NONE: 1, PRE_FIXED (R-FCN's): as given.
        """
        if self.normalization == LossParameter.VALID:
            return None
        full, batch_size = LossParameter.FULL, LossParameter.BATCH_SIZE
        fixed = self.param.loss_param.pre_fixed_normalizer
        sizes: dict[int, float] = {full: outer * inner, batch_size: outer, LossParameter.NONE: 1}
        sizes[LossParameter.PRE_FIXED] = fixed
        return max(1, sizes[self.normalization])


@layer("Softmax")
class Softmax(SameShape):
    """y = exp(x) / sum of exp(x) along `axis` (1 by default)."""

    can_replay = True
    backward_reads_bottom = False

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        self.view = around(bottom[0], self.param.softmax_param.axis)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self.ops.softmax_forward(bottom[0].data.reshape(self.view), top[0].data.reshape(self.view))

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx = y * (dy - sum of dy * y)."""
        if propagate_down[0]:
            y, dy, dx = (a.reshape(self.view) for a in (top[0].data, top[0].diff, bottom[0].diff))
            self.ops.softmax_backward(y, dy, dx)


@layer("SoftmaxWithLoss")
class SoftmaxWithLoss(ClassLoss):
    """-sum of log p(label) / divisor, p = softmax along `axis`; scores (N, C, ...) labels (N, ...).

    p is no less than FLT_MIN, hence a loss of 87.3365 at most. An optional second top is p, a third
    one the loss of each label, without a gradient (R-FCN's first program, Cascade R-CNN). With
    SegNet's `weight_by_label_freqs` a label's loss counts times the class_weighting of its class;
    the divisor does not.
    """

    tops = (1, 3)
    weights: Blob | None = None  # (1, C, 1), of classes
    tells_each = False  # the third top is there

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        log.info("Creating layer %s", self.param.name)  # Caffe's softmax within
        if (kind := self.param.softmax_param.normalize_type) != "Softmax":
            raise ConfigError(f'normalize_type "{kind}" of happynear\'s fork is not supported')
        if self.param.loss_param.weight_by_label_freqs:
            if self.type != "SoftmaxWithLoss":
                raise ConfigError("weight_by_label_freqs is for SoftmaxWithLoss")
            weights = np.array(self.param.loss_param.class_weighting, self.dtype)
            self.weights = self.buffer((1, len(weights), 1))
            self.weights.host_data[0, :, 0] = weights
        self.tells_each = len(top) > 2
        self.wrong = bad_labels(self, lambda: self.view[1])
        self.given_axis = self.param.softmax_param.axis

    @property
    def only_launches(self) -> bool:
        return self.type == "SoftmaxWithLoss" and not self.weights and not self.tells_each

    @property
    def can_replay(self) -> bool:  # type: ignore[override]
        return self.only_launches

    def passes(self) -> tuple[Callable[..., None], Callable[..., None]]:
        """The forward and the backward function of the back end."""
        return self.ops.softmax_loss_forward, self.ops.softmax_loss_backward

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        self.view = around(bottom[0], self.given_axis)
        check_labels(bottom[0], bottom[1], self.view)
        if self.weights and self.weights.count != self.view[1]:
            count = self.weights.count
            raise ConfigError(f"{self.view[1]} classes need as many class_weighting, not {count}")
        self.prob, self.norm = self.buffer(self.view), self.buffer((), np.float64)
        if len(top) > 1:
            top[1].reshape_like(bottom[0])
        if self.tells_each:
            top[2].reshape_like(bottom[1])

    def given(self, bottom: Blobs) -> tuple[Any, ...]:
        """The labels as (outer, inner), the label to ignore."""
        return bottom[1].data.reshape(self.view[0], self.view[2]), self.ignore

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        outer, _, inner = self.view
        x, prob = bottom[0].data.reshape(self.view), self.prob.data
        *given, ignore = self.given(bottom)
        compute, _ = self.passes()
        outcome = top[0].data, self.norm.data, self.wrong.found
        compute(x, *given, (ignore, self.divisor(outer, inner)), prob, outcome)
        self.wrong.check()
        if self.weights:
            classes, counts, p = self.of_label(bottom)
            losses = self.weights_of(classes) * np.log(p) * counts
            top[0].data[...] = -np.sum(losses, dtype=np.float64) / self.norm.data
        if len(top) > 1:
            self.ops.copy(prob, top[1].data.reshape(self.view))
        if self.tells_each:
            _, counts, p = self.of_label(bottom)
            np.multiply(np.log(p), -1 * counts, out=top[2].data.reshape(p.shape))

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx = weight / divisor * (p - 1 at the label), 0 for ignored labels."""
        self.refuse_constants(propagate_down)
        if propagate_down[0]:
            dx, given = bottom[0].diff.reshape(self.view), self.given(bottom)
            _, differentiate = self.passes()
            differentiate(self.prob.data, *given, top[0].diff, self.norm.data, dx)
            if self.weights:
                np.multiply(dx, self.weights_of(self.of_label(bottom)[0]), out=dx)

    def weights_of(self, classes: Array) -> Array:
        """Return the weights of classes (outer, 1, inner), in that shape."""
        assert self.weights
        return self.weights.data[0, :, 0][classes]

    def of_label(self, bottom: Blobs) -> tuple[Array, Array, Array]:
        """Return, as (outer, 1, inner): the classes of the labels, what counts, p of the label."""
        labels, ignore = self.given(bottom)
        labels = labels[:, None]
        counts = labels == labels if ignore is None else labels != ignore
        classes = np.where(counts, labels, 0).astype(np.intp)
        p = np.take_along_axis(self.prob.data, classes, axis=1)
        return classes, counts, np.maximum(p, np.finfo(np.float32).tiny)


@layer("InfogainLoss")
class InfogainLoss(SoftmaxWithLoss):
    """-sum over classes of H[label] * log p / divisor, p = softmax of the scores along `axis`, at
    least 1e-20; dx = weight / divisor * (p * sum of H[label] - H[label]).

    H (C, C) is bottom 2 or the BlobProto file `source`. An optional second top is p.
    """

    tops = (1, 2)
    bottoms = (2, 3)
    constant_bottoms: Mapping[int, str] = {
        **LossLayer.constant_bottoms,
        2: "InfogainLoss cannot differentiate its matrix; give it propagate_down: false",
    }

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        if self.param.loss_param.HasField("normalize"):
            raise ConfigError(
                "InfogainLoss does not take the old loss_param normalize; give normalization"
            )
        param = self.param.infogain_loss_param
        self.given_axis = param.axis
        self.matrix: Array | None = None
        if len(bottom) < 3:
            if not param.source:
                raise ConfigError(
                    "infogain_loss_param: give source, or the matrix as a third bottom"
                )
            matrix = binary.read_array(locate(param.source, self.path))
            self.matrix = self.device.on_device(matrix.astype(self.dtype))

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        classes = self.view[1]
        count = bottom[2].count if self.matrix is None else self.matrix.size
        if count != classes * classes:
            raise ConfigError(
                f"{classes} classes need an infogain matrix of {classes * classes} elements, "
                f"not {count}"
            )

    def passes(self) -> tuple[Callable[..., None], Callable[..., None]]:
        return self.ops.infogain_loss_forward, self.ops.infogain_loss_backward

    def given(self, bottom: Blobs) -> tuple[Any, ...]:
        """The labels as (outer, inner), H as (C, C), the label to ignore."""
        labels, ignore = super().given(bottom)
        matrix = self.matrix if self.matrix is not None else bottom[2].data
        return labels, matrix.reshape(self.view[1], self.view[1]), ignore


LEAST = 1e-10
"""Of 1 - p, where FocalLoss divides by it."""


@layer("SoftmaxWithCrossEntropyLoss")
class SoftmaxWithCrossEntropyLoss(LossLayer):
    """Sum of q * (log q - log p) / divisor over scores and target scores of one shape, p and q
    their softmax along softmax_param's axis: what a net learns of another (tc3d, MRCNN for scenes).

    Logarithms are of FLT_MIN at least. The divisor is the size of the axes before theirs, with
    `normalize: true` the number of distributions. A second top is p.
    """

    tops = (1, 2)
    constant_bottoms: Mapping[int, str] = {1: "{type} cannot differentiate its target scores"}

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.param.loss_weight.extend([0] * (len(top) - len(self.param.loss_weight)))

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        if bottom[0].shape != bottom[1].shape:
            raise ConfigError(
                "scores and target scores must have one shape, not "
                f"{list(bottom[0].shape)} and {list(bottom[1].shape)}"
            )
        self.view = around(bottom[0], self.param.softmax_param.axis)
        self.p, self.q = self.buffer(self.view), self.buffer(self.view)
        outer, _, inner = self.view
        self.count = max(1, outer * inner if self.param.loss_param.normalize else outer)
        for told in top[1:]:
            told.reshape_like(bottom[0])

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        p, q = self.p.data, self.q.data
        for scores, prob in zip(bottom, (p, q), strict=True):
            self.ops.softmax_forward(scores.data.reshape(self.view), prob)
        least = np.finfo(np.float32).tiny
        apart = np.log(np.maximum(q, least)) - np.log(np.maximum(p, least))
        np.sum(q * apart, out=top[0].data)
        np.divide(top[0].data, self.count, out=top[0].data)
        for told in top[1:]:
            self.ops.copy(p, told.data.reshape(self.view))

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx = weight / divisor * (p - q)."""
        self.refuse_constants(propagate_down)
        if propagate_down[0]:
            factor, dx = top[0].diff / self.count, bottom[0].diff.reshape(self.view)
            np.multiply(self.p.data - self.q.data, factor, out=dx)


@layer("FocalLoss")
class FocalLoss(SoftmaxWithLoss):
    """-sum of (alpha - p)^gamma * log p(label) / divisor, p = softmax along `axis` (happynear's).
    An optional second top is p.

    Type ONEADDP has alpha + p. alpha is no weight of a class (Lin et al. 2017 have 1 - p). As in
    the fork, the gradient takes it for 1 but in that power.
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        param = self.param.focal_loss_param
        self.sign = 1 if param.type == FocalLossParameter.ONEADDP else -1
        self.alpha, self.gamma = param.alpha, param.gamma

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        self.places = self.buffer((1, self.view[1], 1))
        self.places.host_data[...] = np.arange(self.view[1])[:, None]

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        super().forward(bottom, top)  # finds the softmax, the divisor, and labels that are none
        _, counts, p = self.of_label(bottom)
        losses = (self.alpha + self.sign * p) ** self.gamma * np.log(p)
        loss = -np.sum(losses * counts, dtype=np.float64) / self.norm.data
        top[0].data[...] = loss

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx = weight / divisor * s * (p - 1 at the label), s = (alpha -+ p)^gamma -+ gamma *
        (alpha -+ p)^gamma / (1 -+ p) * p * log p.
        """
        self.refuse_constants(propagate_down)
        if not propagate_down[0]:
            return
        classes, counts, p = self.of_label(bottom)
        power = (self.alpha + self.sign * p) ** self.gamma
        s = self.gamma * power / np.maximum(1 + self.sign * p, LEAST) * p * np.log(p)
        s = (power + self.sign * s) * counts
        s *= top[0].diff / self.norm.data
        at_label = self.places.data == classes
        dx = bottom[0].diff.reshape(self.view)
        np.multiply(self.prob.data - at_label, s, out=dx)


@layer("EuclideanLoss")
class EuclideanLoss(LossLayer):
    """Sum of (a - b)^2 / 2N over two bottoms of one count; both can be differentiated."""

    constant_bottoms: Mapping[int, str] = {}

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        if bottom[0].count != bottom[1].count:
            raise ConfigError(
                "the bottoms must have the same count: "
                f"{bottom[0].count} of shape {list(bottom[0].shape)}, "
                f"{bottom[1].count} of shape {list(bottom[1].shape)}"
            )
        self.difference = self.buffer(bottom[0].shape)
        self.items = max((1, *bottom[0].shape[:1]))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        given = bottom[0].data, bottom[1].data, self.items
        self.ops.euclidean_loss_forward(*given, self.difference.data, top[0].data)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """da = weight / N * (a - b), db = -da."""
        for b, wanted, sign in zip(bottom, propagate_down, (1, -1), strict=True):
            if wanted:
                given = self.difference.data, top[0].diff, sign * self.items
                self.ops.euclidean_loss_backward(*given, b.diff)


@layer("SigmoidCrossEntropyLoss")
class SigmoidCrossEntropyLoss(ClassLoss):
    """Sum of max(x, 0) - x*t + log(1 + exp(-|x|)) / divisor: -t log s(x) - (1-t) log(1 - s(x)).

    s is the sigmoid, x and t have one count; the divisor is the batch size unless loss_param says
    otherwise.
    """

    normalization = LossParameter.BATCH_SIZE

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        self.items = items(bottom[0])
        if bottom[0].count != bottom[1].count:
            raise ConfigError(
                f"{bottom[0].count} predictions need as many targets, not {bottom[1].count}"
            )
        self.norm = self.buffer((), np.float64)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        divisor = self.divisor(self.items, bottom[0].count // max(self.items, 1))
        given = bottom[0].data, bottom[1].data, self.ignore, divisor
        self.ops.sigmoid_loss_forward(*given, top[0].data, self.norm.data)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx = weight / divisor * (s(x) - t), 0 for ignored targets."""
        self.refuse_constants(propagate_down)
        if propagate_down[0]:
            given = bottom[0].data, bottom[1].data, self.ignore
            self.ops.sigmoid_loss_backward(*given, top[0].diff, self.norm.data, bottom[0].diff)


@layer("SigmoidCrossEntropyBalanceLoss")
class SigmoidCrossEntropyBalanceLoss(LossLayer):
    """SigmoidCrossEntropyLoss / N with targets 1 of an item times its share of zeros, and targets 0
    times its share of ones (HED, OSVOS: Xie and Tu 2015).

    Other targets have no loss. They have a gradient, which is not weighed, as in the fork.
    """

    backward_reads_top = False

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        self.view = items(bottom[0]), bottom[0].count // max(items(bottom[0]), 1)
        if bottom[0].count != bottom[1].count:
            raise ConfigError(
                f"{bottom[0].count} predictions need as many targets, not {bottom[1].count}"
            )
        self.weight = self.buffer(self.view)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        x, t = (b.data.reshape(self.view) for b in bottom)
        ones, zeros, weight = t == 1, t == 0, self.weight.data
        positive, negative = (where.sum(axis=1, keepdims=True) for where in (ones, zeros))
        both = np.maximum(positive + negative, 1)
        np.multiply(ones, negative / both, out=weight, casting="unsafe")
        weight += zeros * (positive / both)
        losses = np.maximum(x, 0) - x * t + np.log1p(np.exp(-np.abs(x)))
        np.sum(np.where(ones | zeros, losses * weight, 0), out=top[0].data)
        np.multiply(top[0].data, 1 / max(self.view[0], 1), out=top[0].data)
        weight += ~(ones | zeros)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx = weight of the target * (s(x) - t) / N."""
        self.refuse_constants(propagate_down)
        if propagate_down[0]:
            x, t = (b.data.reshape(self.view) for b in bottom)
            factor = top[0].diff * (1 / max(self.view[0], 1))
            slope = (0.5 * np.tanh(0.5 * x) + 0.5 - t) * self.weight.data
            np.multiply(slope, factor, out=bottom[0].diff.reshape(self.view))


class ItemLoss(LossLayer):
    """A loss over items (N, C) with one label each."""

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.wrong = bad_labels(self, lambda: self.view[1])

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        n = items(bottom[0])
        self.view = (n, bottom[0].count // max(n, 1))
        self.items = max(1, n)
        check_labels(bottom[0], bottom[1], (*self.view, 1))

    def given(self, bottom: Blobs) -> tuple[Array, Array]:
        """Scores (N, C) and labels (N)."""
        return bottom[0].data.reshape(self.view), bottom[1].data.reshape(-1)


@layer("MultinomialLogisticLoss")
class MultinomialLogisticLoss(ItemLoss):
    """-sum of log(max(p(label), 1e-20)) / N; the bottom holds probabilities (N, C)."""

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        outcome = top[0].data, self.wrong.found
        self.ops.multinomial_loss_forward(*self.given(bottom), self.items, *outcome)
        self.wrong.check()

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx = -weight / N / max(p, 1e-20) at the label, else 0."""
        self.refuse_constants(propagate_down)
        if propagate_down[0]:
            dx = bottom[0].diff.reshape(self.view)
            self.ops.multinomial_loss_backward(*self.given(bottom), top[0].diff, self.items, dx)


@layer("HingeLoss")
class HingeLoss(ItemLoss):
    """Sum of m / N, or of m^2 / N with norm L2; m = max(0, 1 + x), at the label max(0, 1 - x);
    scores (N, C).
    """

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        self.slack = self.buffer(self.view)  # m, negative at the label
        self.squares = self.param.hinge_loss_param.norm == HingeLossParameter.L2

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        outcome = self.slack.data, top[0].data, self.wrong.found
        self.ops.hinge_loss_forward(*self.given(bottom), self.squares, self.items, *outcome)
        self.wrong.check()

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """dx = weight / N * sign(m), with norm L2 times 2m instead; negative at the label."""
        self.refuse_constants(propagate_down)
        if propagate_down[0]:
            given = self.slack.data, self.squares, top[0].diff, self.items
            self.ops.hinge_loss_backward(*given, bottom[0].diff.reshape(self.view))


@layer("ContrastiveLoss")
class ContrastiveLoss(LossLayer):
    """Sum of d^2 over similar pairs and max(margin - d, 0)^2 over the others / 2N, d = |a - b|.

    Bottoms a, b (N, C) and y (N), 1 for a similar pair (Hadsell et al. 2006). legacy_version takes
    max(margin - d^2, 0) instead.
    """

    bottoms = 3
    constant_bottoms: Mapping[int, str] = {
        2: "ContrastiveLoss cannot differentiate its labels; give them propagate_down: false"
    }

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        a, b, y = bottom
        if a.count != b.count:
            raise ConfigError(
                f"both bottoms must have the same count: {list(a.shape)} and {list(b.shape)}"
            )
        n = items(a)
        if y.count != n:
            raise ConfigError(f"{n} pairs need as many labels, not {y.count}")
        self.view = (n, a.count // max(n, 1))
        self.items = max(1, n)
        self.difference, self.factor = self.buffer(self.view), self.buffer((n,))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        param, view = self.param.contrastive_loss_param, self.view
        a, b, y = (blob.data for blob in bottom)
        given = a.reshape(view), b.reshape(view), y.reshape(-1)
        settings = param.margin, param.legacy_version, self.items
        outcome = self.difference.data, self.factor.data, top[0].data
        self.ops.contrastive_loss_forward(*given, *settings, *outcome)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """da = weight / N * (a - b) if similar, else times -(margin - d) / d, legacy -1, where
        margin is not reached.

        db = -da.
        """
        self.refuse_constants(propagate_down)
        for b, wanted, sign in zip(bottom[:2], propagate_down, (1, -1), strict=False):
            if wanted:
                given = self.difference.data, self.factor.data, top[0].diff, sign * self.items
                self.ops.contrastive_loss_backward(*given, b.diff.reshape(self.view))
