"""The Python layers of py-faster-rcnn and py-R-FCN that propose boxes and choose what a detector
learns from, for prototxts that name their modules (`OWN`) where these cannot be imported.

Boxes are x1, y1, x2, y2 in pixels, both ends inside; a batch is one image. What those programs read
from cfg.TRAIN and cfg.TEST stands in param_str, by the same names in small letters or large ones;
defaults are those of faster_rcnn_end2end.yml.
"""

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from caffepy import ops
from caffepy.core.errors import ConfigError
from caffepy.core.names import nearest
from caffepy.device.blob import Array
from caffepy.device.device import Device
from caffepy.layer.proposal import make_anchors
from caffepy.layer.python_blob import Blob
from caffepy.proto.caffe_pb2 import TRAIN

OWN = {
    "rpn.anchor_target_layer": "caffepy.layer.rpn",
    "rpn.proposal_layer": "caffepy.layer.rpn",
    "rpn.proposal_target_layer": "caffepy.layer.rpn",
    "roi_data_layer.layer": "caffepy.layer.roi_data",
    "pylayer.proposal_layer": "caffepy.layer.mnc",
    "pylayer.mask_layer": "caffepy.layer.mnc",
    "pylayer.stage_bridge_layer": "caffepy.layer.mnc",
    "layers.text_proposal_layer": "caffepy.layer.text_proposal",
    "caffe.layers.detectnet.clustering": "caffepy.layer.detectnet_boxes",
    "caffe.layers.detectnet.mean_ap": "caffepy.layer.detectnet_boxes",
}
"""Modules of py-faster-rcnn, MNC, CTPN and DetectNet, and ours with classes of the same names."""

OTHERS = "; a program's own layer of this name is taken if its folder of modules is on PYTHONPATH"

Blobs = Sequence[Blob]


def read_settings(text: str) -> dict[str, Any]:
    """Return the keys, in small letters, and values of a param_str: a dictionary as Python or YAML
    write one, on one line or with a line for each key; ConfigError for any other.
    """
    plain = re.sub(r"!!python/\w+", "", text).strip()
    if not plain.startswith("{"):
        plain = "{" + ",".join(line for line in plain.splitlines() if line.strip()) + "}"
    plain = re.sub(r"([{,]\s*)([A-Za-z_]\w*)\s*:", r"\1'\2':", plain)  # YAML needs no quotes
    plain = re.sub(r"(:\s*)(true|false)\b", lambda m: m[1] + m[2].capitalize(), plain)
    try:
        found = ast.literal_eval(plain)
    except (SyntaxError, ValueError):
        found = None
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ConfigError(
            f"param_str is not a dictionary such as 'feat_stride': 16, but {text!r}{OTHERS}"
        )
    return {key.lower(): value for key, value in found.items()}


class Normalized(NamedTuple):
    """A top whose deltas are less `means`, divided by `stds`: four numbers each, for each box."""

    top: int
    means: Sequence[float]
    stds: Sequence[float]


class RcnnLayer:
    """Base: settings from param_str, tops that are shaped in forward, no gradient."""

    param_str: str
    phase: int
    device: Device
    defaults: Mapping[str, Any] = {}
    """The settings and their values; None for one that must be given."""

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        """Read param_str; ConfigError for a setting that is not known, or lacking."""
        given = read_settings(self.param_str)
        for key in given:
            if key not in self.defaults:
                hint = nearest(key, self.defaults)
                raise ConfigError(
                    f'param_str: no setting "{key}" of {type(self).__name__}{hint}{OTHERS}'
                )
        self.settings = {**self.defaults, **given}
        for key, value in self.settings.items():
            if value is None:
                raise ConfigError(f"param_str of {type(self).__name__} needs '{key}'")
        self.started = False

    def normalized(self) -> "Normalized | None":
        """Return which top has normalized deltas, if any."""
        return None

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        """Give the tops their shapes up to the first forward, which knows the number of boxes."""
        if not self.started:
            for blob, shape in zip(top, self.first_shapes(bottom), strict=False):
                blob.reshape(*shape)
        self.started = True

    def first_shapes(self, bottom: Blobs) -> Sequence[tuple[int, ...]]:
        """Shapes of the tops, maybe of one more, before the first forward."""
        raise NotImplementedError

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """The bottoms' gradients are 0."""
        for blob, wanted in zip(bottom, propagate_down, strict=True):
            if wanted:
                blob.diff[...] = 0

    def write_tops(self, top: Blobs, arrays: Sequence[Array]) -> None:
        """Shape the tops as the arrays, of which there may be more, and copy these."""
        for blob, array in zip(top, arrays, strict=False):
            blob.reshape(*array.shape)
            blob.data[...] = array

    def choose(self, places: Array, count: float) -> Array:
        """Return `count` of the places (n,) at random, all of them if there are no more."""
        if len(places) <= count:
            return places
        return self.device.rng.choice(places, size=int(count), replace=False)


ANCHORS: Mapping[str, Any] = {
    "feat_stride": None,
    "scales": (8, 16, 32),
    "ratios": (0.5, 1, 2),
    "rpn_normalize_targets": False,
    "rpn_normalize_means": (0.0, 0.0, 0.0, 0.0),
    "rpn_normalize_stds": (0.1, 0.1, 0.2, 0.2),
}


def anchors_of(settings: Mapping[str, Any]) -> Array:
    """Return the anchors (A, 4); ConfigError unless scales and ratios are numbers above 0."""
    for key in ("scales", "ratios"):
        values = np.asarray(settings[key])
        if values.ndim != 1 or not len(values) or values.dtype.kind not in "if" or min(values) <= 0:
            raise ConfigError(f"param_str: {key} must be numbers above 0, not {settings[key]!r}")
    return make_anchors(settings["ratios"], settings["scales"], 16, np.round)


def check_one_image(scores: Blob, count: int) -> None:
    """ConfigError unless these are the scores (1, 2A, H, W) of `count` anchors and one image."""
    if len(scores.shape) != 4 or scores.shape[0] != 1 or scores.shape[1] != 2 * count:
        raise ConfigError(
            f"{count} anchors (scales times ratios) and one image need scores of shape "
            f"[1, {2 * count}, H, W], not {list(scores.shape)}"
        )


def overlaps(boxes: Array, others: Array) -> Array:
    """Return intersection over union of each of (P, 4) with each of (G, 4): (P, G), float64."""
    a, b = boxes[:, None].astype(np.float64), others[None].astype(np.float64)
    sides = np.minimum(a[..., 2:], b[..., 2:]) - np.maximum(a[..., :2], b[..., :2]) + 1
    both = np.prod(np.maximum(sides, 0), axis=-1)
    first, second = (np.prod(box[..., 2:] - box[..., :2] + 1, axis=-1) for box in (a, b))
    shares: Array = both / (first + second - both)
    return shares


def deltas_to(boxes: Array, targets: Array) -> Array:
    """Return what moves boxes (P, 4) to targets (P, 4): shifts of the centre in units of the box,
    logarithms of the ratios of widths and heights; float32.
    """
    size, goal = (box[:, 2:] - box[:, :2] + 1.0 for box in (boxes, targets))
    shift = (targets[:, :2] + 0.5 * goal - boxes[:, :2] - 0.5 * size) / size
    return np.hstack([shift, np.log(goal / size)]).astype(np.float32)


def moved(boxes: Array, deltas: Array) -> Array:
    """Return the boxes (P, 4) after these deltas (P, 4) as py-faster-rcnn moves them: the inverse
    of `deltas_to`, except that x2 and y2 lie half a width and height from the centre, so a pixel
    further.
    """
    size = boxes[:, 2:] - boxes[:, :2] + 1
    centre = boxes[:, :2] + 0.5 * size + deltas[:, :2] * size
    reach = 0.5 * np.exp(deltas[:, 2:]) * size
    return np.hstack([centre - reach, centre + reach])


class ProposalLayer(RcnnLayer):
    """Rois (R, 5) = 0, x1, y1, x2, y2 and, with a second top, their scores (R, 1), best first.

    Bottoms: probabilities (1, 2A, H, W), the second half of an object; deltas (1, 4A, H, W); and
    height, width and scale of the image. Boxes with a side under rpn_min_size times the scale are
    removed.
    """

    defaults: Mapping[str, Any] = {
        **ANCHORS,
        "rpn_nms_thresh": 0.7,
        "rpn_pre_nms_top_n": 0,  # 0: 12000 in TRAIN, 6000 in TEST
        "rpn_post_nms_top_n": 0,  # 0: 2000 in TRAIN, 300 in TEST
        "rpn_min_size": 16,
    }

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        self.anchors = anchors_of(self.settings)
        for key, train, test in (
            ("rpn_pre_nms_top_n", 12000, 6000),
            ("rpn_post_nms_top_n", 2000, 300),
        ):
            self.settings[key] = self.settings[key] or (train if self.phase == TRAIN else test)

    def first_shapes(self, bottom: Blobs) -> Sequence[tuple[int, ...]]:
        check_one_image(bottom[0], len(self.anchors))
        return [(1, 5), (1, 1)]

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        check_one_image(bottom[0], len(self.anchors))
        scores, deltas, info = (blob.data for blob in bottom)
        settings, count = self.settings, scores[0, 0].size * len(self.anchors)
        if settings["rpn_normalize_targets"] and self.phase == TRAIN:
            means, stds = (
                np.reshape(settings[f"rpn_normalize_{key}"], (4, 1, 1)) for key in ("means", "stds")
            )
            shape = (len(self.anchors), 4, *deltas.shape[2:])
            deltas = (deltas.reshape(shape) * stds + means).reshape(deltas.shape)
        boxes, objects = np.empty((1, count, 4), np.float32), np.empty((1, count), np.float32)
        given = scores, deltas.astype(np.float32), self.anchors.astype(np.float32), info.ravel()[:3]
        host = ops.backend(self.device)
        host.decode_proposals(*given, settings["feat_stride"], 0, boxes, objects)
        large = np.min(boxes[0, :, 2:] - boxes[0, :, :2] + 1, axis=1)
        places = np.flatnonzero(large >= settings["rpn_min_size"] * info.flat[2])
        order = places[np.argsort(objects[0, places], kind="stable")[::-1]]
        order = order[: settings["rpn_pre_nms_top_n"]]
        kept = np.empty((1, settings["rpn_post_nms_top_n"]), np.int32)
        counts = np.empty(1, np.int32)
        host.suppress_overlaps(boxes[:, order], settings["rpn_nms_thresh"], 1.0, kept, counts)
        best = order[kept[0, : counts[0]]]
        rois = np.hstack([np.zeros((len(best), 1), np.float32), boxes[0, best]])
        self.write_tops(top, [rois, objects[0, best, None]])


class AnchorTargetLayer(RcnnLayer):
    """Labels (1, 1, A H, W) of the anchors, 1 object, 0 background, -1 neither; targets, inside and
    outside weights (1, 4A, H, W) of their deltas.

    Bottoms: the scores (1, 2A, H, W), whose values do not count, true boxes (G, 5) with their
    class, height, width and scale of the image, and maybe the image. Of the anchors inside the
    image those that overlap a truth by rpn_positive_overlap, or most of all, are objects, those
    that overlap none by rpn_negative_overlap background; rpn_batchsize of them are drawn, at most
    rpn_fg_fraction of these objects.
    """

    defaults: Mapping[str, Any] = {
        **ANCHORS,
        "allowed_border": 0,
        "rpn_positive_overlap": 0.7,
        "rpn_negative_overlap": 0.3,
        "rpn_clobber_positives": False,
        "rpn_fg_fraction": 0.5,
        "rpn_batchsize": 256,
        "rpn_bbox_inside_weights": (1.0, 1.0, 1.0, 1.0),
        "rpn_positive_weight": -1.0,
    }

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        self.anchors = anchors_of(self.settings)
        weight = self.settings["rpn_positive_weight"]
        if weight >= 1:
            raise ConfigError(f"param_str: rpn_positive_weight must be under 1, not {weight}")

    def normalized(self) -> Normalized | None:
        settings = self.settings
        if not settings["rpn_normalize_targets"]:
            return None
        return Normalized(1, settings["rpn_normalize_means"], settings["rpn_normalize_stds"])

    def first_shapes(self, bottom: Blobs) -> Sequence[tuple[int, ...]]:
        check_one_image(bottom[0], len(self.anchors))
        (h, w), count = bottom[0].shape[2:], len(self.anchors)
        return [(1, 1, count * h, w), *[(1, 4 * count, h, w)] * 3]

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        check_one_image(bottom[0], len(self.anchors))
        h, w = bottom[0].shape[2:]
        truths = bottom[1].data.reshape(-1, 5)
        height, width = bottom[2].data.flat[:2]
        steps, border = self.settings["feat_stride"], self.settings["allowed_border"]
        y, x = (axis.reshape(-1, 1) * steps for axis in np.indices((h, w)))
        every = (self.anchors + np.hstack([x, y, x, y])[:, None]).reshape(-1, 4)
        inside = np.flatnonzero(
            (every[:, :2] >= -border).all(axis=1)
            & (every[:, 2] < width + border)
            & (every[:, 3] < height + border)
        )
        anchors = every[inside]
        shares = overlaps(anchors, truths[:, :4])
        labels = np.full(len(every), -1, np.float32)
        labels[inside] = self.label(shares)
        targets, inner, outer = np.zeros((3, len(every), 4), np.float32)
        if len(truths) and len(inside):
            targets[inside] = deltas_to(anchors, truths[shares.argmax(axis=1), :4])
            if self.settings["rpn_normalize_targets"]:
                targets[inside] -= self.settings["rpn_normalize_means"]
                targets[inside] /= self.settings["rpn_normalize_stds"]
        objects, others = labels == 1, labels == 0
        inner[objects] = self.settings["rpn_bbox_inside_weights"]
        weight = self.settings["rpn_positive_weight"]
        if weight < 0:
            outer[objects | others] = 1 / max(np.sum(objects | others), 1)
        else:
            outer[objects] = weight / max(np.sum(objects), 1)
            outer[others] = (1 - weight) / max(np.sum(others), 1)
        lying = [
            array.reshape(1, h, w, -1).transpose(0, 3, 1, 2)  # (1, A or 4A, H, W)
            for array in (labels, targets, inner, outer)
        ]
        self.write_tops(top, [lying[0].reshape(1, 1, -1, w), *lying[1:]])

    def label(self, shares: Array) -> Array:
        """Return the labels of anchors that overlap the truths by `shares` (P, G), as drawn."""
        settings = self.settings
        labels = np.full(len(shares), -1, np.float32)
        if not shares.size:
            labels[:] = 0  # an image without an object
            most = np.zeros(len(shares))
        else:
            most = shares.max(axis=1)
            far = most < settings["rpn_negative_overlap"]
            labels[far] = 0
            labels[(shares == shares.max(axis=0)).any(axis=1)] = 1
            labels[most >= settings["rpn_positive_overlap"]] = 1
            if settings["rpn_clobber_positives"]:
                labels[far] = 0
        objects, batch = np.flatnonzero(labels == 1), settings["rpn_batchsize"]
        chosen = self.choose(objects, int(settings["rpn_fg_fraction"] * batch))
        others = self.choose(np.flatnonzero(labels == 0), batch - len(chosen))
        drawn = np.full(len(labels), -1, np.float32)
        drawn[others], drawn[chosen] = 0, 1
        return drawn


class ProposalTargetLayer(RcnnLayer):
    """Rois (R, 5), labels (R, 1, 1, 1), and for each class targets, inside and outside weights
    (R, 4K) of the deltas; objects come first.

    Bottoms: proposed rois (P, 5) of one image, true boxes (G, 5) with their class, which are rois,
    too. Rois that overlap a truth by fg_thresh are objects, those from bg_thresh_lo up to
    bg_thresh_hi background; batch_size are drawn (-1: all), fg_fraction objects at most. With two
    num_classes the deltas do not depend on the class (R-FCN's AGNOSTIC).
    """

    defaults: Mapping[str, Any] = {
        "num_classes": None,
        "batch_size": 128,
        "fg_fraction": 0.25,
        "fg_thresh": 0.5,
        "bg_thresh_hi": 0.5,
        "bg_thresh_lo": 0.0,
        "bbox_inside_weights": (1.0, 1.0, 1.0, 1.0),
        "bbox_normalize_targets_precomputed": True,
        "bbox_normalize_means": (0.0, 0.0, 0.0, 0.0),
        "bbox_normalize_stds": (0.1, 0.1, 0.2, 0.2),
    }

    def normalized(self) -> Normalized | None:
        settings = self.settings
        if not settings["bbox_normalize_targets_precomputed"]:
            return None
        return Normalized(2, settings["bbox_normalize_means"], settings["bbox_normalize_stds"])

    def first_shapes(self, bottom: Blobs) -> Sequence[tuple[int, ...]]:
        boxes = 4 * self.settings["num_classes"]
        return [(1, 5), (1, 1, 1, 1), (1, boxes), (1, boxes), (1, boxes)]

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        settings = self.settings
        truths = bottom[1].data.reshape(-1, 5)
        rois = bottom[0].data.reshape(-1, 5)
        if rois[:, 0].any():
            raise ConfigError("ProposalTargetLayer takes the rois of one image, which is image 0")
        rois = np.vstack([rois, np.hstack([np.zeros((len(truths), 1)), truths[:, :4]])])
        shares = overlaps(rois[:, 1:], truths[:, :4])
        most = shares.max(axis=1, initial=0)
        batch = settings["batch_size"] if settings["batch_size"] > 0 else len(rois)
        fraction = settings["fg_fraction"] * batch if settings["batch_size"] > 0 else len(rois)
        objects = self.choose(np.flatnonzero(most >= settings["fg_thresh"]), round(fraction))
        low, high = settings["bg_thresh_lo"], settings["bg_thresh_hi"]
        others = np.flatnonzero((most < high) & (most >= low))
        others = self.choose(others, batch - len(objects))
        rois = rois[np.append(objects, others)].astype(np.float32)
        labels = np.zeros(len(rois), np.float32)
        targets, inner = np.zeros((2, len(rois), settings["num_classes"], 4), np.float32)
        if len(objects):
            of = truths[shares[objects].argmax(axis=1)]
            deltas = deltas_to(rois[: len(objects), 1:], of[:, :4])
            if settings["bbox_normalize_targets_precomputed"]:
                deltas -= settings["bbox_normalize_means"]
                deltas /= settings["bbox_normalize_stds"]
            labels[: len(objects)] = of[:, 4]
            classes = of[:, 4].astype(int) if settings["num_classes"] != 2 else 1
            if np.max(classes) >= settings["num_classes"] or np.min(classes) < 0:
                raise ConfigError(
                    f"a true box has class {np.max(classes)}; num_classes is "
                    f"{settings['num_classes']}, with the background, class 0"
                )
            targets[np.arange(len(objects)), classes] = deltas
            inner[np.arange(len(objects)), classes] = settings["bbox_inside_weights"]
        flat = (len(rois), 4 * settings["num_classes"])
        inner = inner.reshape(flat)
        column = labels.reshape(-1, 1, 1, 1)
        self.write_tops(top, [rois, column, targets.reshape(flat), inner, inner > 0])
