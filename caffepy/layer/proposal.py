"""Boxes that a region proposal network proposes (Ren et al. 2015), and the anchors it moves.

Boxes are x1, y1, x2, y2 in pixels, both ends inside.
"""

import logging
from collections.abc import Callable, Sequence

import numpy as np

from caffepy.core.errors import ConfigError
from caffepy.device.blob import Array
from caffepy.layer.base import Blobs, Layer, layer
from caffepy.proto.caffe_pb2 import TRAIN, ProposalParameter

log = logging.getLogger(__name__)


def centred(widths: Array, heights: Array, base: float) -> Array:
    """Return boxes (A, 4) of these sizes around the centre of a box of base x base at 0, 0."""
    middle, x, y = 0.5 * (base - 1), 0.5 * (widths - 1), 0.5 * (heights - 1)
    return np.stack([middle - x, middle - y, middle + x, middle + y], axis=-1).reshape(-1, 4)


def make_anchors(
    ratios: Sequence[float],
    scales: Sequence[float],
    base: float,
    rounded: Callable[[Array], Array],
) -> Array:
    """Return boxes (A, 4), ratios outer, scales inner: a box of base x base with each ratio of
    height to width, its sides rounded, times each scale.
    """
    ratio = np.array(ratios, np.float64)
    widths = rounded(np.sqrt(base * base / ratio))
    heights = rounded(widths * ratio)
    return centred(np.outer(widths, scales), np.outer(heights, scales), base)


def make_anchors_of_sizes(ratios: Sequence[float], sizes: Sequence[float], base: float) -> Array:
    """Return boxes (A, 4), ratios outer, sizes inner: of each ratio with an area of about size^2
    (happynear's).
    """
    ratio = np.array(ratios, np.float64)
    widths = np.outer(np.sqrt(base * base / ratio), sizes) / base
    heights = np.outer(np.sqrt(base * base * ratio), sizes) / base
    return centred(half_up(widths - 1) + 1, half_up(heights - 1) + 1, base)


def half_up(x: Array) -> Array:
    """Return the nearest whole numbers, of two the larger."""
    return np.floor(x + 0.5)


@layer("Proposal")
class Proposal(Layer):
    """Rois (R, 5) = image, x1, y1, x2, y2 and, with a second top, their scores (R), best first.

    Bottoms: probabilities (N, 2A, H, W), the second half of an object; deltas (N, 4A, H, W); and
    height, width and scale (or a scale for each of the two) of the images. Boxes with a side under
    min_size have score 0; the pre_nms_topn best are taken in turn unless they overlap a better one
    by more than nms_thresh, post_nms_topn of each image at most; no gradient (PVANet: Kim et al.
    2016).

    Before the first forward the tops have shapes for post_nms_topn boxes of each image.
    """

    on_gpu = True
    always_reshape = True
    stops_gradient = True
    bottoms = 3
    tops = (1, 2)
    started = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.settings = self.stated()
        if not param.ratio or not param.scale:
            raise ConfigError("proposal_param needs ratio and scale, one of each or more")
        numbers = (*param.ratio, *param.scale, param.base_size, param.feat_stride)
        if min(*numbers, param.pre_nms_topn, param.post_nms_topn) <= 0:
            raise ConfigError("all numbers of proposal_param but min_size must be above 0")
        base = param.base_size
        # A scale multiplies base_size in PVANet and is a size in pixels for happynear, whose file
        # says nothing else; no net has only anchors of base_size^2 pixels and more.
        if min(param.scale) >= base:
            log.info(
                "%s: its scales are %d and more, so they are sizes in pixels, as in happynear's "
                "Caffe; those of PVANet are times base_size",
                self.param.name,
                base,
            )
            anchors = make_anchors_of_sizes(param.ratio, param.scale, base)
        else:
            anchors = make_anchors(param.ratio, param.scale, base, half_up)
        self.anchors = self.buffer(anchors.shape, np.float32)
        self.anchors.host_data[...] = anchors

    def stated(self) -> ProposalParameter:
        """Return the layer's settings."""
        return self.param.proposal_param

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        scores, deltas, info = bottom
        param, count = self.settings, self.anchors.shape[0]
        n, places = scores.shape[:1], scores.shape[2:]
        if len(places) != 2 or scores.shape[1] != 2 * count:
            raise ConfigError(
                f"{count} anchors (ratios times scales) need probabilities (N, {2 * count}, H, W), "
                f"not {list(scores.shape)}"
            )
        if deltas.shape != (*n, 4 * count, *places):
            raise ConfigError(
                f"probabilities of shape {list(scores.shape)} need deltas of shape "
                f"{[*n, 4 * count, *places]}, not {list(deltas.shape)}"
            )
        row = info.count // info.shape[0] if info.shape and info.count else 0
        if row < 3:
            raise ConfigError(
                "the last bottom needs height, width and scale of the images, not shape "
                f"{list(info.shape)}"
            )
        self.row = min(row, 4)
        self.boxes = self.buffer((*n, count * places[0] * places[1], 4))
        self.objects = self.buffer(self.boxes.shape[:2])
        self.kept = self.buffer((*n, param.post_nms_topn), np.int32)
        self.counts = self.buffer(n, np.int32)
        if not self.started:
            self.shape_tops(top, self.kept.count)

    def shape_tops(self, top: Blobs, boxes: int) -> None:
        for t, shape in zip(top, [(boxes, 5), (boxes,)], strict=False):
            t.reshape(shape)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        scores, deltas = (b.data for b in bottom[:2])
        info = bottom[2].data.reshape(-1)[: self.row]
        param, boxes, objects = self.settings, self.boxes.data, self.objects.data
        given = self.anchors.data, info, param.feat_stride, param.min_size
        self.ops.decode_proposals(scores, deltas, *given, boxes, objects)
        order = np.argsort(-objects, axis=1, kind="stable")[:, : param.pre_nms_topn]
        best = np.take_along_axis(boxes, order[:, :, None], axis=1)
        self.ops.suppress_overlaps(best, param.nms_thresh, 1.0, self.kept.data, self.counts.data)
        # The host must know how many there are, for the shapes of what follows.
        counts = self.count(np.take_along_axis(objects, order, axis=1))
        self.started = True
        self.shape_tops(top, sum(counts))
        start = 0
        for n, count in enumerate(counts):
            kept, rows = self.kept.data[n, :count], slice(start, start + count)
            top[0].data[rows, 0] = n
            top[0].data[rows, 1:] = best[n][kept]
            if len(top) > 1:
                top[1].data[rows] = objects[n][order[n][kept]]
            start += count

    def count(self, objects: Array) -> list[int]:
        """Return on the host how many boxes of each image stay, of the scores in their order."""
        return [int(count) for count in self.counts.host_data]


@layer("FrcnnProposal")
class FrcnnProposal(Proposal):
    """Proposal with the numbers of voc_config.json and no boxes with a side under min_size (Faster
    R-CNN in C++).

    Nine anchors; 6000 boxes and 300 of them, in TRAIN 12000 and 2000.
    """

    def stated(self) -> ProposalParameter:
        """Return the settings; proposal_param may say others."""
        learns = self.phase == TRAIN
        numbers = ProposalParameter(
            ratio=[0.5, 1, 2],
            scale=[8, 16, 32],
            pre_nms_topn=12000 if learns else 6000,
            post_nms_topn=2000 if learns else 300,
        )
        given = self.param.proposal_param
        for name in ("ratio", "scale"):
            if getattr(given, name):
                numbers.ClearField(name)
        numbers.MergeFrom(given)
        return numbers

    def count(self, objects: Array) -> list[int]:
        """Leave out those of score 0, which come last."""
        scores, kept, counts = (
            self.device.on_host(objects),
            self.kept.host_data,
            super().count(objects),
        )
        stay = (scores[n, kept[n, :count]] > 0 for n, count in enumerate(counts))
        return [int(np.count_nonzero(each)) for each in stay]
