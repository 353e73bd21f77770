"""Layers that compare scores with labels and have no gradient: shares of right ones."""

from collections.abc import Mapping

import numpy as np

from caffepy.core.errors import ConfigError
from caffepy.device.blob import Array
from caffepy.device.recording import call
from caffepy.layer.base import Blobs, Layer, layer
from caffepy.layer.loss import around, bad_labels, check_labels


@layer("Accuracy")
class Accuracy(Layer):
    """The share of labels (N, ...) whose score of (N, C, ...) fewer than top_k other classes reach.

    Ties count against the label, and so does NaN. An optional second top (C): share of each class.
    With happynear's min_is_better lower scores are better.
    """

    on_gpu = True
    can_replay = True
    bottoms = 2
    tops = (1, 2)

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.wrong = bad_labels(self, lambda: self.view[1])

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.accuracy_param
        self.view = around(bottom[0], param.axis)
        check_labels(bottom[0], bottom[1], self.view)
        self.ignore = param.ignore_label if param.HasField("ignore_label") else None
        if not 1 <= param.top_k <= self.view[1]:
            raise ConfigError(
                f"accuracy_param: top_k {param.top_k} must lie between 1 and "
                f"the {self.view[1]} classes"
            )
        self.hits, self.counts = (self.buffer([self.view[1]], np.int64) for _ in range(2))
        self.turned = self.buffer(self.view) if param.min_is_better else None
        for t, shape in zip(top, ((), (self.view[1],)), strict=False):
            t.reshape(shape)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        scores = bottom[0].data.reshape(self.view)
        labels = bottom[1].data.reshape(self.view[0], self.view[2])
        if self.turned is not None:
            call(np.negative, scores, self.turned.data)
            scores = self.turned.data
        given = scores, labels, self.param.accuracy_param.top_k, self.ignore
        room = self.hits.data, self.counts.data
        shares = top[1].data if len(top) > 1 else None
        self.ops.accuracy(*given, room, (top[0].data, shares, self.wrong.found))
        self.wrong.check()


@layer("SegAccuracy")
class SegAccuracy(Layer):
    """(1, 1, 1, 3): the share of right pixels, the mean recall of classes that are there, and the
    mean IoU of all classes; scores (N, K, H, W), labels (N, 1, H, W) (PSPNet).

    Of equal scores the higher class counts. A class that neither labels nor predictions have has an
    IoU of 1. With reset: false the counts of all batches since the start are summed.
    """

    bottoms = 2
    constant_bottoms: Mapping[int, str] = dict.fromkeys(range(2), "SegAccuracy has no gradient")

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.wrong = bad_labels(self, lambda: bottom[0].shape[1])
        self.counts: Array | None = None

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        self.view = around(bottom[0], 1)
        check_labels(bottom[0], bottom[1], self.view)
        if not self.view[1]:
            raise ConfigError(f"scores of shape {list(bottom[0].shape)} have no classes")
        top[0].reshape((1, 1, 1, 3))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        param, (outer, classes, inner) = self.param.seg_accuracy_param, self.view
        scores, labels = bottom[0].data.reshape(self.view), bottom[1].data.reshape(outer, inner)
        predicted = classes - 1 - np.argmax(scores[:, ::-1], axis=1)
        heeded = ~np.isin(labels, list(param.ignore_label))
        truth = labels[heeded]
        if (bad := ~((truth >= 0) & (truth < classes))).any():
            self.wrong.found[:] = 1, truth[bad][0]
            self.wrong.check()
        pairs = truth.astype(np.intp) * classes + predicted[heeded]
        counts = np.bincount(pairs, minlength=classes**2).reshape(classes, classes)
        if not param.reset and self.counts is not None:
            counts = counts + self.counts
        self.counts = counts
        hits, of_truth, of_predictions = np.diag(counts), counts.sum(1), counts.sum(0)
        union = of_truth + of_predictions - hits
        there = of_truth > 0
        recall = (hits[there] / of_truth[there]).mean() if there.any() else 0
        iou = np.where(union > 0, hits / np.maximum(union, 1), 1).mean()
        top[0].data[...] = [hits.sum() / max(1, counts.sum()), recall, iou]
