"""Layers of YOLO for Caffe that learn and measure labels of pixels beside boxes."""

import logging
from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from caffepy.core.errors import ConfigError
from caffepy.layer.base import Blobs, Layer, LossLayer, layer

log = logging.getLogger(__name__)


@layer("YoloSeg")
class YoloSeg(LossLayer):
    """The sum of d^2 / N, d = scale * (sigmoid(x) - t), with scores x and labels t (N, K, H, W)
    (MobileNet-YOLO).

    The scale is object_scale. With a third bottom, how many pixels m each item has of each class
    (N, K), it is object_scale * (2 - m_k / (pixels - m_k)) where t is above 0.5, both summed over
    the items. d / N is taken for the gradient, as in the fork.
    """

    bottoms = (2, 3)
    backward_reads_bottom = backward_reads_top = False
    constant_bottoms: Mapping[int, str] = {
        1: "{type} cannot differentiate its labels; the layer that makes them needs no gradient",
        2: "{type} cannot differentiate its numbers of pixels",
    }

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        log.info(
            "%s: its gradient is not that of the loss it shows, as in its fork", self.param.name
        )

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        x, labels = bottom[0].shape, bottom[1].shape
        if len(x) != 4 or len(labels) != 4 or x[0] != labels[0] or prod(x) != prod(labels):
            raise ConfigError(
                f"YoloSeg needs scores (N, K, H, W) and as many labels, not {list(x)} and "
                f"{list(labels)}"
            )
        if len(bottom) > 2 and bottom[2].count != prod(x[:2]):
            raise ConfigError(
                f"bottom 2 must have a number of pixels for each of {x[1]} classes of {x[0]} "
                f"items, not {list(bottom[2].shape)}"
            )
        top[0].reshape(())
        self.delta = self.buffer(x)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        delta, param = self.delta.data, self.param.yolo_seg_param
        n, k = delta.shape[:2]
        labels = bottom[1].data.reshape(delta.shape)
        np.multiply(
            0.5 * np.tanh(0.5 * bottom[0].data) + 0.5 - labels, param.object_scale, out=delta
        )
        if len(bottom) > 2:
            pixels = bottom[2].data.reshape(n, k).sum(axis=0)
            total = prod(delta.shape[2:]) * n
            factor = (2 - pixels / (total - pixels)).reshape(1, k, 1, 1)
            np.multiply(delta, np.where(labels > 0.5, factor, 1), out=delta)
        np.sum(delta * delta, out=top[0].data)
        np.multiply(top[0].data, 1 / n, out=top[0].data)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        self.refuse_constants(propagate_down)
        if propagate_down[0]:
            factor = top[0].diff * (1 / len(self.delta.data))
            np.multiply(self.delta.data, factor, out=bottom[0].diff)


@layer("SegmentationEvaluate")
class SegmentationEvaluate(Layer):
    """(1, 1, 1, K): of the first item the pixels above `threshold` in both, over those in either of
    scores and labels (N, K, H, W), 0 for none (MobileNet-YOLO).
    """

    on_gpu = stops_gradient = True
    bottoms = 2
    constant_bottoms: Mapping[int, str] = dict.fromkeys(
        range(2), "SegmentationEvaluate has no gradient"
    )

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shapes = [b.shape for b in bottom]
        if len(shapes[0]) != 4 or shapes[0][1:] != shapes[1][1:]:
            raise ConfigError(
                "SegmentationEvaluate needs scores and labels (N, K, H, W) of one size, not "
                f"{list(shapes[0])} and {list(shapes[1])}"
            )
        top[0].reshape((1, 1, 1, shapes[0][1]))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        least = self.param.segmentation_evaluate_param.threshold
        found, true = (b.data[0] > least for b in bottom)
        both = np.sum(found & true, axis=(1, 2))
        either = np.sum(found | true, axis=(1, 2))
        top[0].data[0, 0, 0] = both / np.maximum(either, 1)
