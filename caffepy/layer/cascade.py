"""Boxes of MS-CNN and Cascade R-CNN (Cai et al. 2016, Cai and Vasconcelos 2018) as they find them:
proposals of many sizes, boxes that are moved again, and those of some sizes.

Boxes are x1, y1, x2, y2 in pixels. All of it is computed on the host.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from caffepy.core.errors import ConfigError, DataError
from caffepy.device.blob import Array
from caffepy.layer.base import Blobs, Layer, layer
from caffepy.layer.detection_files import NOT_SAVED, ResultFiles, warn_of_unread
from caffepy.proto.caffe_pb2 import TRAIN, LayerParameter

NOTHING = [[0, 1, 1, 10, 10]]
"""The roi where nothing is proposed."""
DETECTION = 7
"""Columns of what FrcnnOutput finds."""


def units_of(param: LayerParameter) -> tuple[Array, Array]:
    """Return means (4,) and standard deviations (4,) of the deltas, float32; ConfigError unless
    bbox_reg_param has four of each or none, above 0.
    """
    mean, std = param.bbox_reg_param.bbox_mean, param.bbox_reg_param.bbox_std
    if not mean or not std:
        return np.zeros(4, np.float32), np.ones(4, np.float32)
    if len(mean) != 4 or len(std) != 4 or not min(std) > 0:
        raise ConfigError("bbox_reg_param needs four bbox_mean and four bbox_std above 0")
    return np.array(mean, np.float32), np.array(std, np.float32)


def bounded(deltas: Array, param: Any) -> Array:
    """Return deltas (..., 4) no larger than field_xyr and field_whr allow."""
    shift, grow = 1 / np.float32(param.field_xyr), np.log(np.float32(param.field_whr))
    most = np.array([shift, shift, grow, grow], deltas.dtype)
    return np.clip(deltas, -most, most)


def from_fields(deltas: Array, fields: Array, stride: int) -> tuple[Array, Array]:
    """Return corner and size (N, G, H, W, 2) of the boxes of deltas (N, G, 4, H, W), from fields
    (G, 2) = width, height around each place.
    """
    height, width = deltas.shape[3:]
    moved = np.moveaxis(deltas, 2, -1)
    places = np.stack(np.meshgrid(np.arange(width), np.arange(height)), axis=-1)  # (H, W, 2)
    centre = (places + deltas.dtype.type(0.5)) * deltas.dtype.type(stride)
    field = fields[:, None, None].astype(deltas.dtype)
    size = field * np.exp(moved[..., 2:])
    return moved[..., :2] * field + centre - size / 2, size


def suppressed(corner: Array, size: Array, unit: float, mode: str, most: float) -> Array:
    """Return the places of boxes (P, 2), (P, 2), best first, that overlap no kept one before them
    by more than `most`: intersection over union, over the smaller one (IOMU) or the one before
    (IOFU).
    """
    end, area = corner + size - unit, np.prod(size, axis=1)
    real: Array = np.all((size >= unit) & (size > 0), axis=1)
    left = np.arange(len(corner))
    kept = []
    while len(left):
        first, left = left[0], left[1:]
        kept.append(first)
        low, high = np.maximum(corner[first], corner[left]), np.minimum(end[first], end[left])
        sides = high - low + unit
        both = np.prod(sides, axis=1)
        # as in Cascade R-CNN boxes that share a column of pixels meet, of a row they do not
        meets = (high[:, 0] >= low[:, 0] if unit else high[:, 0] > low[:, 0]) & (
            high[:, 1] > low[:, 1]
        )
        both = np.where(meets & real[first] & real[left], both, 0)
        if mode == "IOMU":
            whole = np.minimum(area[first], area[left])
        else:
            whole = area[first] + (0 if mode == "IOFU" else area[left] - both)
        with np.errstate(divide="ignore", invalid="ignore"):
            left = left[~(both / whole > np.float32(most))]
    return np.array(kept, np.intp)


def moved(deltas: Array, boxes: Array) -> tuple[Array, Array]:
    """Return first and last pixels (..., 2) of boxes (..., 4) that deltas (..., 4) moved."""
    size = boxes[..., 2:] - boxes[..., :2] + 1
    corner = deltas[..., :2] * size + (boxes[..., 2:] + boxes[..., :2]) / 2
    size = size * np.exp(deltas[..., 2:])
    corner = corner - (size - 1) / 2
    return corner, corner + size - 1


Boxes = tuple[Array, Array, Array]
"""Corner (P, 2), size (P, 2) and score (P)."""


def by_image(maps: Sequence[Boxes]) -> list[Boxes]:
    """Return the boxes of each image, of maps whose boxes are (N, P, ...)."""
    joined = (np.concatenate(parts, axis=1) for parts in zip(*maps, strict=True))
    return list(zip(*joined, strict=True))


class Proposing(Layer):
    """Base: rois (R, 5, 1, 1) = image, x1, y1, x2, y2 and, with a second top, them with their score
    (R, 6, 1, 1), those of each image the best first.

    The max_nms_num best of a score of fg_thr and sides of min_size or more are taken in turn unless
    they overlap a better one by more than iou_thr; max_post_nms_num of an image stay. If there is
    none in a batch, one roi from 1 to 10 stands for it, with score 0.
    """

    always_reshape = stops_gradient = True
    tops = (1, 2)
    unit = 0.0  # sides are x2 - x1 + unit
    last_first = False  # of equal scores
    started = False
    settings: Any

    def check_settings(self) -> None:
        """ConfigError for an nms_type that is none, or bounds that are no factors."""
        param = self.settings
        if param.nms_type not in ("IOU", "IOMU", "IOFU"):
            raise ConfigError(f'nms_type is IOU, IOMU or IOFU, not "{param.nms_type}"')
        if not (param.field_whr > 0 and param.field_xyr > 0):
            raise ConfigError("field_whr and field_xyr must be above 0")
        self.mean, self.std = units_of(self.param)

    def shape_tops(self, top: Blobs, count: int) -> None:
        for blob, columns in zip(top, (5, 6), strict=False):
            blob.reshape((count, columns, 1, 1))

    def candidates(self, bottom: Blobs) -> list[Boxes]:
        """Return the boxes of each image."""
        raise NotImplementedError

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        param, rows = self.settings, [np.zeros((0, 6), self.dtype)]
        for image, (corner, size, score) in enumerate(self.candidates(bottom)):
            good = (score >= np.float32(param.fg_thr)) & (size >= param.min_size).all(axis=1)
            corner, size, score = corner[good], size[good], score[good]
            order = np.argsort(-score, kind="stable")
            if self.last_first:
                order = np.argsort(score, kind="stable")[::-1]
            order = order[: param.max_nms_num or None]
            corner, size, score = corner[order], size[order], score[order]
            kept = suppressed(corner, size, self.unit, param.nms_type, param.iou_thr)
            kept = kept[: param.max_post_nms_num or None]
            end = corner[kept] + size[kept] - self.unit
            rows.append(
                np.column_stack([np.full(len(kept), image), corner[kept], end, score[kept]])
            )
        found = np.concatenate(rows)
        self.started = True
        self.shape_tops(top, max(1, len(found)))
        top[0].data[..., 0, 0] = found[:, :5] if len(found) else NOTHING
        for blob in top[1:]:
            blob.data[..., 0, 0] = found if len(found) else 0


@layer("BoxOutput")
class BoxOutput(Proposing):
    """Proposals of maps (N, K + 4, H, W) = scores of K classes, the first of them the background,
    and deltas from boxes of field_w x field_h; each has a downsample_rate (MS-CNN).

    A score is the largest of a class less the background's, neither of them a probability.
    """

    bottoms = (1, None)
    last_first = True

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.settings = self.param.box_output_param
        for name in ("field_w", "field_h", "downsample_rate"):
            if len(getattr(param, name)) != len(bottom):
                raise ConfigError(
                    f"box_output_param needs a {name} for each of the {len(bottom)} bottoms, not "
                    f"{len(getattr(param, name))}"
                )
        self.check_settings()

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        for blob in bottom:
            first = bottom[0].shape
            if len(blob.shape) != 4 or blob.shape[:2] != first[:2] or first[1] < 6:
                raise ConfigError(
                    f"BoxOutput needs maps (N, K + 4, H, W) of 2 classes or more, not "
                    f"{list(blob.shape)}"
                )
        if not self.started:
            self.shape_tops(top, 1)

    def candidates(self, bottom: Blobs) -> list[Boxes]:
        param, parts = self.settings, []
        for k, blob in enumerate(bottom):
            maps, rate = blob.data, param.downsample_rate[k]
            score = np.max(maps[:, 1:-4], axis=1) - maps[:, 0]
            deltas = maps[:, -4:] * self.std[:, None, None] + self.mean[:, None, None]
            deltas = np.moveaxis(bounded(np.moveaxis(deltas, 1, -1), param), -1, 1)
            fields = np.array([[param.field_w[k], param.field_h[k]]])
            corner, size = from_fields(deltas[:, None], fields, rate)
            image = np.array([maps.shape[3] * rate, maps.shape[2] * rate], maps.dtype)
            corner = np.maximum(corner, 0)
            size = np.minimum(size, image - corner)
            n = len(maps)
            parts.append((corner.reshape(n, -1, 2), size.reshape(n, -1, 2), score.reshape(n, -1)))
        return by_image(parts)


@layer("BoxGroupOutput")
class BoxGroupOutput(Proposing):
    """Proposals of pairs of maps: probabilities (N * G, K, H, W), the first of the background, and
    deltas (N * G, 4, H, W) from the G field sizes of a box_group_param (Cascade R-CNN).

    A score is 1 less the probability of the background.
    """

    bottoms = (2, None)
    unit = 1.0

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.settings = self.param.box_group_output_param
        groups = param.box_group_param
        if len(bottom) != 2 * len(groups):
            raise ConfigError(
                f"{len(bottom)} bottoms are not the pairs of {len(groups)} box_group_param"
            )
        for group in groups:
            if not group.stride or not group.field_w or len(group.field_w) != len(group.field_h):
                raise ConfigError(
                    "box_group_param needs a stride, and as many field_w as field_h, one or more"
                )
        self.check_settings()

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        for k, group in enumerate(self.settings.box_group_param):
            (scores, deltas), count = bottom[2 * k : 2 * k + 2], len(group.field_w)
            shape = scores.shape
            if len(shape) != 4 or shape[0] % count or deltas.shape != (shape[0], 4, *shape[2:]):
                raise ConfigError(
                    f"{count} fields need probabilities (N * {count}, K, H, W) and deltas (N * "
                    f"{count}, 4, H, W), not {list(shape)} and {list(deltas.shape)}"
                )
            images = bottom[0].shape[0] // len(self.settings.box_group_param[0].field_w)
            if shape[0] // count != images:
                raise ConfigError(f"bottom {2 * k} is of {shape[0] // count} images, not {images}")
        if not self.started:
            self.shape_tops(top, 1)

    def candidates(self, bottom: Blobs) -> list[Boxes]:
        parts = []
        for k, group in enumerate(self.settings.box_group_param):
            scores, deltas = (blob.data for blob in bottom[2 * k : 2 * k + 2])
            score = 1 - scores[:, 0]
            deltas = deltas * self.std[:, None, None] + self.mean[:, None, None]
            deltas = np.moveaxis(bounded(np.moveaxis(deltas, 1, -1), self.settings), -1, 1)
            fields = np.stack([group.field_w, group.field_h], axis=1)
            n, (height, width) = len(scores) // len(fields), scores.shape[2:]
            by_field = deltas.reshape(n, len(fields), 4, height, width)
            corner, size = from_fields(by_field, fields, group.stride)
            image = np.array([width * group.stride, height * group.stride], scores.dtype)
            end = np.minimum(corner + size - 1, image)
            corner = np.maximum(corner, 0)
            size = end - corner + 1
            parts.append((corner.reshape(n, -1, 2), size.reshape(n, -1, 2), score.reshape(n, -1)))
        return by_image(parts)


@layer("DecodeBBox")
class DecodeBBox(Layer):
    """Rois (R', 5, 1, 1): the rois (R, 5) of bottom 1, moved by the last four of the deltas (R, 8)
    of bottom 0 (Cascade R-CNN).

    In TRAIN those whose ends are the wrong way round are left out, and with a bottom 2, whose last
    number in a row is an overlap, those that overlap a true box by gt_iou_thr.
    """

    always_reshape = stops_gradient = True
    bottoms = (2, 3)

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.mean, self.std = units_of(self.param)
        self.started = False

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        counts = [prod(blob.shape[1:]) if blob.count else 0 for blob in bottom[:2]]
        rows = {blob.shape[:1] for blob in bottom}
        if counts != [8, 5] or len(rows) > 1 or not bottom[-1].count:
            shapes = ", ".join(str(list(blob.shape)) for blob in bottom)
            raise ConfigError(
                "DecodeBBox needs deltas (R, 8), rois (R, 5) and true boxes (R, 1 or more), "
                f"not {shapes}"
            )
        if not self.started:
            top[0].reshape((bottom[1].shape[0], 5, 1, 1))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        deltas = bottom[0].data.reshape(-1, 8)[:, 4:] * self.std + self.mean
        rois = bottom[1].data.reshape(-1, 5)
        corner, end = moved(deltas, rois[:, 1:])
        good = np.ones(len(rois), bool)
        if self.phase == TRAIN:
            good &= (corner <= end).all(axis=1)
            for truths in bottom[2:]:
                overlap = truths.data.reshape(len(rois), -1)[:, -1]
                good &= overlap < np.float32(self.param.decode_bbox_param.gt_iou_thr)
        if not good.any():
            raise DataError(f"DecodeBBox: none of {len(rois)} boxes is left to learn from")
        self.started = True
        boxes = np.column_stack([rois[:, :1], corner, end])[good]
        top[0].reshape((len(boxes), 5, 1, 1))
        top[0].data[..., 0, 0] = boxes


@layer("ScaleRoute")
class ScaleRoute(Layer):
    """Items (R', ...) of each bottom whose roi, the first bottom (R, 5), has an area of low_scale^2
    to below high_scale^2; if there is none, the one nearest to their mean (Cascade R-CNN).
    """

    always_reshape = stops_gradient = True
    bottoms = tops = (1, None)
    same_count = True
    started = False

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.scale_route_param
        self.low = param.low_scale if param.HasField("low_scale") else 0.0
        self.high = param.high_scale if param.HasField("high_scale") else np.inf
        if not 0 <= self.low <= self.high or self.high <= 0:
            raise ConfigError(
                "scale_route_param: low_scale must be 0 or more, high_scale no less, not "
                f"{self.low:g} and {self.high:g}"
            )
        rows = bottom[0].shape[:1]
        if {blob.shape[:1] for blob in bottom} != {rows} or bottom[0].count != 5 * prod(rows):
            shapes = ", ".join(str(list(blob.shape)) for blob in bottom)
            raise ConfigError(f"ScaleRoute needs rois (R, 5) and bottoms (R, ...), not {shapes}")
        if not self.started:
            for blob, source in zip(top, bottom, strict=True):
                blob.reshape((1, *source.shape[1:]))

    def chosen(self, rois: Array) -> Sequence[int]:
        """Return the places of the rois (R, 5) that are of these sizes."""
        size = rois[:, 3:] - rois[:, 1:3]
        scale = np.sqrt(np.where((size >= 0).all(axis=1), np.prod(size + 1, axis=1), 0))
        places = np.flatnonzero((scale >= self.low) & (scale < self.high))
        if len(places) or not len(rois):
            return list(places)
        known = [bound for bound in (self.low, self.high) if 0 < bound < np.inf]
        middle = np.sqrt(np.prod(known)) if len(known) == 2 else known[0] if known else 256.0
        with np.errstate(divide="ignore"):
            return [int(np.argmin(np.abs(np.log2(scale / middle))))]

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        places = self.chosen(bottom[0].data.reshape(-1, 5))
        self.started = True
        for blob, source in zip(top, bottom, strict=True):
            blob.reshape((len(places), *source.shape[1:]))
            blob.data[...] = source.data[places]


@layer("FrcnnOutput")
class FrcnnOutput(Layer):
    """Rows (D, 7, 1, 1) = image, x1, y1, x2, y2, class, score, by classes, the best first; the
    first row is 0, -1, -1, ... (Cascade R-CNN).

    Bottoms: probabilities (R, K), deltas (R, 4K), or (R, 8) with cls_aware: false, rois (R, 5 or 6)
    of one image, and its height and width (1, 2). Of each class but the background the boxes of a
    probability of conf_thr or more are taken in turn, cut to the image, unless they overlap a
    better one by more than iou_thr; max_det_num stay. With save_output_param what is found is
    written to files as well, see `ResultFiles`.
    """

    always_reshape = stops_gradient = True
    bottoms = 4
    files: ResultFiles | None = None
    started = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.settings = self.param.frcnn_output_param
        if param.nms_type not in ("IOU", "IOMU", "IOFU"):
            raise ConfigError(f'nms_type is IOU, IOMU or IOFU, not "{param.nms_type}"')
        self.mean, self.std = units_of(self.param)
        saved = param.save_output_param
        if saved.output_directory and saved.label_map_file and saved.name_size_file:
            classes = prod(bottom[0].shape[1:])
            self.files = ResultFiles(saved, list(range(1, classes)), self.path)
        else:
            warn_of_unread(saved.label_map_file, self.path, NOT_SAVED)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        rows = {tuple(blob.shape[:1]) for blob in bottom[:3]}
        classes, deltas, numbers, sizes = (prod(blob.shape[1:]) for blob in bottom)
        wanted = 4 * classes if self.param.bbox_reg_param.cls_aware else 8
        if len(rows) > 1 or deltas != wanted or numbers not in (5, 6) or sizes != 2:
            shapes = ", ".join(str(list(blob.shape)) for blob in bottom)
            raise ConfigError(
                f"FrcnnOutput needs probabilities (R, K), deltas (R, {wanted}), rois (R, 5 or 6) "
                f"and a height and width (1, 2), not {shapes}"
            )
        if bottom[3].shape[0] != 1:
            raise ConfigError(f"FrcnnOutput takes one image, not {bottom[3].shape[0]}")
        self.classes = classes
        if not self.started:
            top[0].reshape((1, DETECTION, 1, 1))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        param, count = self.settings, bottom[0].shape[0]
        scores = bottom[0].data.reshape(count, self.classes)
        rois = bottom[2].data.reshape(count, prod(bottom[2].shape[1:]))
        if len(rois) and rois[:, 0].any():
            raise DataError(
                f"FrcnnOutput takes rois of one image, 0; one is of image {rois[:, 0].max():g}"
            )
        size = bottom[3].data.reshape(2)[::-1]  # width, height
        deltas = bottom[1].data.reshape(count, prod(bottom[1].shape[1:]) // 4, 4)
        low, high = moved(deltas * self.std + self.mean, rois[:, None, 1:5])
        low, high = np.maximum(low, 0), np.minimum(high, size)
        found = [np.zeros((0, DETECTION), self.dtype)]
        for c in range(1, self.classes):
            own = np.flatnonzero(scores[:, c] >= np.float32(param.conf_thr))
            own = own[np.argsort(-scores[own, c], kind="stable")]
            which = c if self.param.bbox_reg_param.cls_aware else 1
            corner, end = low[own, which], high[own, which]
            kept = suppressed(corner, end - corner + 1, 1.0, param.nms_type, param.iou_thr)
            label = np.full(len(kept), c)
            places = own[kept]
            columns = 0 * label, corner[kept], end[kept], label, scores[places, c]
            found.append(np.column_stack(columns))
        rows = np.concatenate(found)
        if 0 < param.max_det_num < len(rows):
            rows = rows[np.sort(np.argsort(-rows[:, 6], kind="stable")[: param.max_det_num])]
        self.started = True
        if self.files and self.device.writes_files:
            shares = rows[:, 1:5] / np.tile(size, 2)
            self.files.add([np.column_stack([rows[:, [0, 5, 6]], shares])])
        top[0].reshape((1 + len(rows), DETECTION, 1, 1))
        top[0].data.fill(-1)
        top[0].data[0, 0] = 0
        top[0].data[1:, :, 0, 0] = rows


@layer("HardMining")
class HardMining(Layer):
    """Items (B, ...) of the bottoms (R, ...) behind the first, which has a score for each (R): the
    num_roi_per_image hardest of each of num_image images, which the second bottom, rois (R, 5),
    names, in their order; others fill the batch (Cascade R-CNN).
    """

    stops_gradient = True
    bottoms = (2, None)
    tops = (1, None)

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.hard_mining_param
        if len(top) != len(bottom) - 1:
            raise ConfigError(f"{len(bottom)} bottoms need {len(bottom) - 1} tops, not {len(top)}")
        if not param.num_roi_per_image or not param.num_image:
            raise ConfigError("num_roi_per_image and num_image must be 1 or more")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        param, count = self.param.hard_mining_param, bottom[0].count
        if {blob.shape[:1] for blob in bottom} != {(count,)} or bottom[1].count != 5 * count:
            shapes = ", ".join(str(list(blob.shape)) for blob in bottom)
            raise ConfigError(
                f"HardMining needs scores (R), rois (R, 5) and (R, ...), not {shapes}"
            )
        self.size = min(param.num_image * param.num_roi_per_image, count)
        for blob, source in zip(top, bottom[1:], strict=True):
            blob.reshape((self.size, *source.shape[1:]))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        param, scores = self.param.hard_mining_param, bottom[0].data.reshape(-1)
        images = bottom[1].data.reshape(-1, 5)[:, 0].astype(np.int64)
        if len(images) and not 0 <= images.min() <= images.max() < param.num_image:
            raise DataError(
                f"HardMining has a num_image of {param.num_image}, so no roi of image "
                f"{images.max()}"
            )
        places = np.arange(len(scores))[::-1]  # of equal scores the last comes first
        order = places[np.argsort(-scores[places], kind="stable")]
        first = [
            order[images[order] == i][: param.num_roi_per_image] for i in range(param.num_image)
        ]
        chosen = np.concatenate(first)
        others = order[~np.isin(order, chosen)]
        chosen = np.sort(np.concatenate([chosen, others[: self.size - len(chosen)]]))
        for blob, source in zip(top, bottom[1:], strict=True):
            blob.data[...] = source.data[chosen]
