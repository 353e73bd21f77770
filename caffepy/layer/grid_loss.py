"""The first YOLO's loss of a grid of cells, as YOLO for Caffe has it (Redmon et al. 2016)."""

import logging
from collections.abc import Sequence
from math import prod

import numpy as np

from caffepy.core.errors import ConfigError, DataError
from caffepy.device.blob import Array
from caffepy.layer.base import Blobs, LossLayer

log = logging.getLogger(__name__)

FAR = 20.0
"""Distance from which a box that does not meet the true one is no nearer than the first."""


class GridLoss(LossLayer):
    """Squared errors of classes, objectness and boxes over side x side cells, each summed with its
    scale and divided by the number of true boxes, or of boxes without one.

    Predictions (N, side^2 * (K + 5B)): planes of the K classes, of B objectnesses, of B times x, y,
    w, h. Labels (N, 7 * side^2): planes of difficulty, of whether a box is there, of its class;
    then its x, y, w, h cell by cell, in parts of the image. Of the B boxes of a cell that with the
    largest overlap learns, or the nearest if none meets the true one. With `sqrt` the predictions
    are roots of w and h, with `constriant` x and y are within the cell.

    The gradient is the fork's: half of the derivative of the sums, over N, with the overlap for 1
    as the objectness of the box that learns. The host computes.
    """

    on_gpu = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.detection_loss_param
        if min(param.side, param.num_class, param.num_object) < 1:
            raise ConfigError(
                "detection_loss_param: side, num_class and num_object must be 1 or more"
            )
        log.info("DetectionLoss: its gradient is half of the derivative, as in YOLO for Caffe")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        param = self.param.detection_loss_param
        places, n = param.side**2, prod(bottom[0].shape[:1])
        for blob, each, what in zip(
            bottom,
            (param.num_class + 5 * param.num_object, 7),
            ("predictions", "labels"),
            strict=True,
        ):
            if blob.count != n * places * each:
                raise ConfigError(
                    f"{param.side} x {param.side} cells need {places * each} {what} an item, not "
                    f"{blob.count // max(n, 1)}"
                )
        self.gradient = self.buffer(bottom[0].shape)

    def boxes(self, maps: Array) -> Array:
        """Return the predicted boxes (N, B, 4, cells), in parts of the image."""
        param, boxes = self.param.detection_loss_param, maps.astype(np.float64)
        if param.constriant:
            cells = np.arange(param.side**2)
            boxes[:, :, 0] = (boxes[:, :, 0] + cells % param.side) / param.side
            boxes[:, :, 1] = (boxes[:, :, 1] + cells // param.side) / param.side
        if param.sqrt:
            boxes[:, :, 2:] **= 2
        return boxes

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        param, (n, *_) = self.param.detection_loss_param, bottom[0].shape
        k, b, cells = param.num_class, param.num_object, param.side**2
        x = bottom[0].data.reshape(n, k + 5 * b, cells)
        labels = bottom[1].data.reshape(n, 7 * cells)
        item, cell = np.nonzero(labels[:, cells : 2 * cells])
        classes = labels[:, 2 * cells : 3 * cells][item, cell].astype(np.intp)
        if (wrong := (classes < 0) | (classes >= k)).any():
            raise DataError(f"label {classes[wrong][0]} is not one of the {k} classes 0 to {k - 1}")
        truth = labels[:, 3 * cells :].reshape(n, cells, 4)[item, cell].astype(np.float64)
        at = self.boxes(x[:, k + b :].reshape(n, b, 4, cells))[item, :, :, cell]  # (T, B, 4)
        best, overlap = _best(at, truth)
        count, others = max(1, len(item)), max(1, cells * b * n - len(item))

        gradient = self.gradient.data.reshape(x.shape)
        gradient.fill(0)
        gradient[:, k : k + b] = param.noobject_scale * x[:, k : k + b]
        error = x[item, :k, cell].astype(np.float64)  # (T, K)
        error[np.arange(len(item)), classes] -= 1
        gradient[item, :k, cell] = param.class_scale * error
        objects = x[item, k + best, cell].astype(np.float64)
        gradient[item, k + best, cell] = param.object_scale * (objects - overlap)
        if param.constriant:
            truth[:, 0] = truth[:, 0] * param.side - cell % param.side
            truth[:, 1] = truth[:, 1] * param.side - cell // param.side
        if param.sqrt:
            truth[:, 2:] = np.sqrt(truth[:, 2:])
        channels = k + b + 4 * best[:, None] + np.arange(4)
        apart = x[item[:, None], channels, cell[:, None]] - truth
        gradient[item[:, None], channels, cell[:, None]] = param.coord_scale * apart

        absent = (x[:, k : k + b].astype(np.float64) ** 2).sum() - (objects**2).sum()
        there = param.class_scale * (error**2).sum() + param.coord_scale * (apart**2).sum()
        there += param.object_scale * ((objects - 1) ** 2).sum()
        top[0].data[...] = there / count + param.noobject_scale * absent / others

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        self.refuse_constants(propagate_down)
        if propagate_down[0]:
            factor = float(top[0].diff) / max(1, bottom[0].shape[0])
            np.multiply(self.gradient.data, factor, out=bottom[0].diff)


def _best(boxes: Array, truth: Array) -> tuple[Array, Array]:
    """Return which of the boxes (T, B, 4) is best for each true one (T, 4), and its overlap."""
    truth = truth[:, None]
    low = np.maximum(*(a[..., :2] - a[..., 2:] / 2 for a in (boxes, truth)))
    high = np.minimum(*(a[..., :2] + a[..., 2:] / 2 for a in (boxes, truth)))
    shared = np.where((high < low).any(axis=-1), 0, (high - low).prod(axis=-1))
    union = boxes[..., 2:].prod(axis=-1) + truth[..., 2:].prod(axis=-1) - shared
    overlap = np.where(shared != 0, shared / np.where(union == 0, 1, union), 0)
    distance = np.sqrt(((boxes - truth) ** 2).sum(axis=-1))
    nearest = np.where(distance.min(axis=1) < FAR, distance.argmin(axis=1), 0)
    best = np.where(overlap.max(axis=1) > 0, overlap.argmax(axis=1), nearest)
    return best, overlap[np.arange(len(best)), best]
