"""Losses and accuracies of MS-CNN (Cai et al. 2016), some also of Cascade R-CNN: of maps of
classes and deltas, and of regions of interest with their targets.

Maps (N, K + 4, H, W) have the scores of K classes, the first of them the background, and deltas
from a field around each place; their labels (N, 6, H, W) are class, centre x, y, width, height and
overlap of the best true box. Overlaps are of boxes without a last pixel. All of it is computed on
the host.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from caffepy.core.errors import ConfigError, DataError
from caffepy.data.overlap import overlaps
from caffepy.device.blob import Array
from caffepy.layer.base import Blobs, Layer, LossLayer, layer
from caffepy.layer.cascade import from_fields, units_of
from caffepy.layer.grid_loss import GridLoss
from caffepy.proto.caffe_pb2 import DetectionLossParameter

DELTAS = 4
ROWS = 6  # of labels
LEAST_SIDE = 2  # of a true box, before its logarithm
LEAST_NEGATIVES = 4  # in an image, for each class
SURE = 0.975  # overlap above which a region is the true box itself


class OfLabels(Layer):
    """Base: what layers have in common that compare maps with labels of 6 rows."""

    settings: Any

    def read_settings(self, settings: Any) -> None:
        """Keep the settings; ConfigError for impossible ones."""
        self.settings = settings
        if not (settings.field_whr > 0 and settings.field_xyr > 0):
            raise ConfigError("field_whr and field_xyr must be above 0")
        if settings.objectness and settings.cls_num != 2:
            raise ConfigError(f"objectness is of 2 classes, not {settings.cls_num}")
        loss = self.param.loss_param
        self.ignored = loss.ignore_label if loss.HasField("ignore_label") else None
        self.mean, self.std = units_of(self.param)

    def bounds(self) -> tuple[Array, Array]:
        """Return the least and the largest deltas (4, 1, 1), in units of the means and deviations
        that two of them have together.
        """
        most = np.array([1 / self.settings.field_xyr, np.log(self.settings.field_whr)], np.float32)
        mean = (self.mean[::2] + self.mean[1::2]) / 2
        std = np.sqrt(self.std[::2] * self.std[1::2])
        low, high = (np.repeat((sign * most - mean) / std, 2) for sign in (-1, 1))
        return low[:, None, None], high[:, None, None]

    def classes(self, labels: Array) -> tuple[Array, Array]:
        """Return the class of each place (M, H, W), and True where it is not ignored.

        DataError for a label, not ignored, that is no class.
        """
        found = labels[:, 0].astype(np.int64)
        if self.settings.objectness:
            found = np.minimum(found, 1)
        heeded = np.ones(found.shape, bool) if self.ignored is None else found != self.ignored
        wrong = heeded & ((found < 0) | (found >= self.settings.cls_num))
        if wrong.any():
            raise DataError(
                f"{self.type}: label {found[wrong][0]} is none of {self.settings.cls_num} classes"
            )
        return found, heeded


class OfFields(OfLabels):
    """Base: layers of maps of one field, and their settings."""

    def read_settings(self, settings: Any) -> None:
        """Keep the settings; ConfigError for sizes that are lacking."""
        for name in ("cls_num", "field_w", "field_h", "downsample_rate"):
            if not getattr(settings, name):
                raise ConfigError(f"{self.type} needs a {name} of 1 or more")
        if settings.coord_num != DELTAS:
            raise ConfigError(f"coord_num is 4, not {settings.coord_num}")
        super().read_settings(settings)
        self.field = np.array([settings.field_w, settings.field_h], np.float32)

    def check_maps(self, bottom: Blobs) -> None:
        """ConfigError unless the bottoms are maps and their labels."""
        maps, labels = (list(blob.shape) for blob in bottom)
        wanted = self.settings.cls_num + DELTAS
        if len(maps) != 4 or maps[1] != wanted or labels != [maps[0], ROWS, *maps[2:]] or 0 in maps:
            raise ConfigError(
                f"{self.type} needs maps (N, {wanted}, H, W) and labels (N, {ROWS}, H, W), not "
                f"{maps} and {labels}"
            )

    def boxes(self, labels: Array) -> tuple[Array, Array]:
        """Return True at true boxes (N, H, W), and at those that are ignored, too."""
        number = labels[:, 0].astype(np.int64)
        return (number != 0) & (number != (self.ignored or 0)), number != 0


def _is_of_grid(param: DetectionLossParameter) -> bool:
    """True for the settings of YOLO for Caffe."""
    return any(param.HasField(name) for name in ("side", "num_class", "num_object"))


@layer("DetectionLoss")
class DetectionLoss(LossLayer, OfFields):
    """Class loss + lambda * box loss, and lambda * box loss: the top has 2 elements, of which the
    net's loss is the sum, as in the fork.

    The class loss is the mean of -w log(softmax) over true boxes and the backgrounds that are
    sampled: `random` ones, those most like a class (`bootstrap`), half each (`mixture`) or all,
    if their overlap is below bg_threshold. The box loss is smooth L1 (bb_smooth) or half of the
    square of the deltas' errors, over the number of deltas of true boxes. Deltas beyond field_xyr
    and field_whr are cut to them, and their gradient is that of the cut ones, as there.

    With a side, num_class or num_object it is that of YOLO for Caffe: see GridLoss.
    """

    on_gpu = False
    of_grid: GridLoss | None = None

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        if _is_of_grid(self.param.detection_loss_param):
            self.of_grid = GridLoss(self.param, self.phase, self.device, self.dtype, self.path)
            self.of_grid.setup(bottom, top)
        else:
            self.read_settings(self.param.detection_loss_param)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        if self.of_grid:
            self.of_grid.reshape(bottom, top)
            return
        self.check_maps(bottom)
        top[0].reshape((1, 1, 1, 2))

    def sampled(self, scores: Array, found: Array, background: Array) -> Array:
        """Return True at the backgrounds (N, H * W) to learn from, of places (N, H * W) that may
        be; `scores` are (N, K, H * W), `found` the classes.
        """
        param = self.settings
        chosen = np.zeros(background.shape, bool)
        share = 0.5 if param.sample_mode == "mixture" else 1.0
        if param.sample_mode not in ("random", "bootstrap", "mixture"):
            return background.copy()
        rng = np.random.default_rng(self.device.draw_seed())
        for own, own_scores, own_found, may in zip(chosen, scores, found, background, strict=True):
            counts = np.bincount(own_found[own_found >= 0], minlength=param.cls_num)
            if param.sample_mode != "bootstrap":
                count = int(counts[1:].sum() * param.bg_multiple * share)
                count = max(count, LEAST_NEGATIVES * (param.cls_num - 1))
                places = rng.integers(0, len(may), count)
                own[places[may[places]]] = True
            if param.sample_mode != "random":
                places = np.flatnonzero(may)[::-1]  # of equal scores the last comes first
                for k in range(1, param.cls_num):
                    count = max(LEAST_NEGATIVES, int(counts[k] * param.bg_multiple * share))
                    order = np.argsort(-own_scores[k, places], kind="stable")
                    own[places[order[:count]]] = True
        return chosen

    def weights(self, labels: Array, positive: Array, negative: Array) -> Array:
        """Return the weight of each place (N, H, W)."""
        param = self.settings
        weights = np.where(positive & param.iou_weighted, labels[:, 5], 1)
        total = weights[positive].sum()
        if param.pos_neg_weighted and total:
            count = positive.sum() + negative.sum()
            share = 1 / (1 + param.bg_multiple)
            weights[positive] *= share * count / total
            weights[negative] *= (1 - share) * count / max(1, negative.sum())
        return weights

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        if self.of_grid:
            self.of_grid.forward(bottom, top)
            return
        param, (maps, labels) = self.settings, (blob.data for blob in bottom)
        found, heeded = self.classes(labels)
        n, k = len(maps), param.cls_num
        true, any_box = self.boxes(labels)
        background = (found == 0) & (labels[:, 5] < np.float32(param.bg_threshold))
        counted = np.where(heeded, found, -1).reshape(n, -1)
        negative = self.sampled(
            maps[:, :k].reshape(n, k, -1), counted, background.reshape(n, -1)
        ).reshape(found.shape)
        kept = heeded & ((found != 0) | negative)
        weights = self.weights(labels, any_box, negative)

        scores = maps[:, :k] - maps[:, :k].max(axis=1, keepdims=True)
        self.gradient = np.zeros_like(maps)
        part = self.gradient[:, :k]
        np.exp(scores, out=part)
        part /= part.sum(axis=1, keepdims=True)
        own = np.where(kept, found, 0)[:, None]
        likely = np.take_along_axis(part, own, axis=1)[:, 0]
        tiny = np.finfo(np.float32).tiny
        losses = -np.log(np.maximum(likely, tiny)) * np.where(kept, weights, 0)
        count = max(1, int(kept.sum()))
        np.put_along_axis(part, own, np.take_along_axis(part, own, axis=1) - 1, axis=1)
        part *= (np.where(kept, weights, 0) / count)[:, None]

        low, high = self.bounds()
        error = np.clip(maps[:, k:], low, high) - self.targets(labels)
        error = np.where(true[:, None], error, 0)
        count_deltas = max(1, DELTAS * int(true.sum()))
        if param.bb_smooth:
            size = np.abs(error)
            box = np.where(size < 1, error * error / 2, size - 0.5).sum()
            error = np.clip(error, -1, 1)
        else:
            box = (error * error).sum() / 2
        weight = getattr(param, "lambda")
        self.gradient[:, k:] = error * (weight / count_deltas)
        box = weight * box / count_deltas
        top[0].data[...] = losses.sum() / count + box, box

    def targets(self, labels: Array) -> Array:
        """Return the deltas (N, 4, H, W) of true boxes."""
        rate = self.settings.downsample_rate
        height, width = labels.shape[2:]
        places = np.stack(np.meshgrid(np.arange(width), np.arange(height)))  # (2, H, W)
        field = self.field[:, None, None]
        shift = (labels[:, 1:3] - (places + np.float32(0.5)) * rate) / field
        grow = np.log(np.maximum(labels[:, 3:5], LEAST_SIDE) / field)
        deltas = np.concatenate([shift, grow], axis=1)
        return (deltas - self.mean[:, None, None]) / self.std[:, None, None]

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        if self.of_grid:
            self.of_grid.backward(top, propagate_down, bottom)
            return
        self.refuse_constants(propagate_down)
        if propagate_down[0]:
            np.multiply(self.gradient, top[0].diff.reshape(-1)[0], out=bottom[0].diff)


@layer("DetectionAccuracy")
class DetectionAccuracy(OfFields):
    """Share of places whose class is among the top_k largest scores, (1, 1, 1, 2): of all but
    backgrounds whose overlap is bg_threshold or more, and of true boxes; as an optional top 1 the
    mean overlap of predicted and true boxes. -1 where there are none (MS-CNN).
    """

    bottoms = 2
    tops = (1, 2)

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.read_settings(self.param.detection_accuracy_param)
        if not 1 <= self.settings.top_k <= self.settings.cls_num:
            raise ConfigError(f"top_k must lie between 1 and {self.settings.cls_num}")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        self.check_maps(bottom)
        for blob, count in zip(top, (2, 1), strict=False):
            blob.reshape((1, 1, 1, count))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        param, (maps, labels) = self.settings, (blob.data for blob in bottom)
        found, heeded = self.classes(labels)
        counted = heeded & ((found != 0) | (labels[:, 5] < np.float32(param.bg_threshold)))
        scores = maps[:, : param.cls_num]
        own = np.take_along_axis(scores, np.where(counted, found, 0)[:, None], axis=1)
        number = np.arange(param.cls_num)[:, None, None]
        better = (scores > own) | ((scores == own) & (number > found[:, None]))
        hit = better.sum(axis=1) < param.top_k
        for i, places in enumerate((counted, counted & (found != 0))):
            top[0].data[..., i] = hit[places].mean() if places.any() else -1
        if len(top) > 1:
            true, _ = self.boxes(labels)
            found_overlaps = self.overlaps(maps[:, param.cls_num :], labels)[true]
            top[1].data[...] = found_overlaps.mean() if true.any() else -1

    def overlaps(self, deltas: Array, labels: Array) -> Array:
        """Return the overlap (N, H, W) of predicted and true boxes."""
        param = self.settings
        deltas = deltas * self.std[:, None, None] + self.mean[:, None, None]
        most = np.array([1 / param.field_xyr] * 2 + [np.log(param.field_whr)] * 2, np.float32)
        deltas = np.clip(deltas, -most[:, None, None], most[:, None, None])
        corner, size = from_fields(deltas[:, None], self.field[None], param.downsample_rate)
        true = np.moveaxis(labels[:, 1:5], 1, -1)
        true = np.concatenate([true[..., :2] - true[..., 2:] / 2, true[..., 2:]], axis=-1)
        return overlaps(np.concatenate([corner[:, 0], size[:, 0]], axis=-1), true)


@layer("BboxAccuracy")
class BboxAccuracy(Layer):
    """Mean overlap with their true box, (1, 1, 1, 1), of regions moved by the deltas of their
    class; as an optional top 1 of the regions themselves. -1 if there are none.

    Bottoms: deltas (R, 4K), rois (R, 5), true boxes (R, 6) = class (0: none), x1, y1, x2, y2,
    overlap. Regions of an overlap above 0.975 do not count (MS-CNN).
    """

    bottoms = 3
    tops = (1, 2)

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.mean, self.std = units_of(self.param)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        counts = [prod(blob.shape[1:]) for blob in bottom]
        rows = {tuple(blob.shape[:1]) for blob in bottom}
        if len(rows) > 1 or counts[0] % DELTAS or counts[1:] != [5, 6]:
            shapes = ", ".join(str(list(blob.shape)) for blob in bottom)
            raise ConfigError(
                f"BboxAccuracy needs deltas (R, 4K), rois (R, 5) and boxes (R, 6), not {shapes}"
            )
        for blob in top:
            blob.reshape((1, 1, 1, 1))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        count = bottom[0].shape[0]
        deltas = bottom[0].data.reshape(count, prod(bottom[0].shape[1:]) // DELTAS, DELTAS)
        rois, true = bottom[1].data.reshape(-1, 5), bottom[2].data.reshape(-1, 6)
        own = true[:, 0].astype(np.int64)
        if not self.param.bbox_reg_param.cls_aware:
            own = np.minimum(own, 1)
        if count and own.max() >= deltas.shape[1]:
            raise DataError(f"BboxAccuracy: class {own.max()} of {deltas.shape[1]} classes")
        chosen = (own > 0) & ~(true[:, 5] > SURE)
        for blob in top:
            blob.data.fill(-1)
        if not chosen.any():
            return
        roi, box = (with_sides(rows[chosen, 1:5]) for rows in (rois, true))
        moved = deltas[chosen, own[chosen]] * self.std + self.mean
        size = roi[:, 2:] * np.exp(moved[:, 2:])
        corner = moved[:, :2] * roi[:, 2:] + roi[:, :2] + roi[:, 2:] / 2 - size / 2
        after = overlaps(np.concatenate([corner, size], axis=1), box)
        for blob, found in zip(top, (after, overlaps(roi, box)), strict=False):
            blob.data.fill(found.mean())


def with_sides(boxes: Array) -> Array:
    """Return x, y, width, height of boxes (R, 4) whose ends are their last pixels."""
    return np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2] + 1], axis=1)


@layer("ProposalTarget")
class ProposalTarget(Layer):
    """Regions to learn from, of rois (R, 5) and true boxes (G, 7) = image, x1, y1, x2, y2, class,
    ignored, which count as rois, too, unless append_gtbox is false (MS-CNN).

    Tops: rois (B, 5, 1, 1), classes (B, 1, 1, 1), deltas, inside and outside weights (B, 4K, 1, 1),
    or (B, 8, 1, 1) with cls_aware: false, true boxes (B, 6, 1, 1) = class, x1, y1, x2, y2, overlap,
    and as an optional top 6 weights of the rois. A share fg_fraction of batch_size has an overlap
    of fg_thr or more, the others one of bg_thr_lw to bg_thr_hg; others fill the batch, unless
    pickup_discard is false, and boxes drawn in the image if there are too few. batch_size -1 takes
    all. Deltas of an overlap outside bbox_thr_lw to bbox_thr_hg have no weight. Of true boxes (G,
    8), the last column not read, those of image -1 do not count, and one box is drawn only where
    none is left (Cascade R-CNN).
    """

    always_reshape = stops_gradient = True
    bottoms = 2
    tops = (6, 7)
    started = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.proposal_target_param
        if param.cls_num < 2:
            raise ConfigError("proposal_target_param needs a cls_num of 2 or more")
        if param.batch_size < 1 and param.batch_size != -1:
            raise ConfigError(f"batch_size must be 1 or more, or -1, not {param.batch_size}")
        if not 0 < param.fg_thr >= param.bg_thr_hg:
            raise ConfigError("fg_thr must be above 0, and bg_thr_hg or more")
        if not 0 <= param.fg_fraction <= 1:
            raise ConfigError(f"fg_fraction must lie between 0 and 1, not {param.fg_fraction:g}")
        if not param.num_img_per_batch:
            raise ConfigError("proposal_target_param needs a num_img_per_batch of 1 or more")
        self.mean, self.std = units_of(self.param)
        self.columns = DELTAS * (param.cls_num if self.param.bbox_reg_param.cls_aware else 2)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        counts = [prod(blob.shape[1:]) for blob in bottom]
        if counts[0] != 5 or counts[1] not in (7, 8):
            raise ConfigError(
                f"ProposalTarget needs rois (R, 5) and true boxes (G, 7) or (G, 8), not "
                f"{list(bottom[0].shape)} and {list(bottom[1].shape)}"
            )
        if not self.started:
            size = self.param.proposal_target_param.batch_size
            self.shape_tops(top, size if size > 0 else max(1, bottom[0].shape[0]))

    def shape_tops(self, top: Blobs, count: int) -> None:
        sizes = 5, 1, self.columns, self.columns, self.columns, 6, 1
        for blob, size in zip(top, sizes, strict=False):
            blob.reshape((count, size, 1, 1))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.proposal_target_param
        rng = np.random.default_rng(self.device.draw_seed())
        truths = bottom[1].data.reshape(-1, prod(bottom[1].shape[1:]))
        of_cascade = truths.shape[1] > 7
        if of_cascade:
            truths = truths[truths[:, 0] != -1]
        rois = bottom[0].data.reshape(-1, 5)
        if param.append_gtbox:
            rois = np.concatenate([rois, truths[:, :5]])
        if len(rois) and not (rois[:, 0].min() >= 0 and rois[:, 0].max() < param.num_img_per_batch):
            raise DataError(
                f"ProposalTarget: a box of image {rois[:, 0].max():g}, but num_img_per_batch is "
                f"{param.num_img_per_batch}"
            )
        match, best = self.matched(rois, truths)
        places = self.chosen(best, truths[match, 6] if len(truths) else best, rng)
        labels = np.zeros(len(places))
        true = np.zeros((len(places), 6), rois.dtype)
        foreground = best[places] >= np.float32(param.fg_thr)
        if foreground.any():
            found = truths[match[places[foreground]]]
            labels[foreground] = found[:, 5]
            if not (found[:, 5].min() >= 1 and found[:, 5].max() < param.cls_num):
                raise DataError(
                    f"ProposalTarget: true boxes of classes {found[:, 5].min():g} to "
                    f"{found[:, 5].max():g}, not 1 to {param.cls_num - 1}"
                )
            overlap = best[places[foreground]]
            true[foreground] = np.column_stack([found[:, 5], found[:, 1:5], overlap])
        rows = rois[places]
        lacking = int(not len(rows)) if of_cascade else param.batch_size - len(rows)
        if lacking > 0:
            drawn = self.drawn(lacking, truths, rng)
            rows = np.concatenate([rows, drawn])
            true = np.concatenate([true, np.zeros((len(drawn), 6), true.dtype)])
            labels = np.concatenate([labels, np.zeros(len(drawn))])
        if not len(rows):
            raise DataError(f"ProposalTarget: none of {len(rois)} boxes is left to learn from")
        self.write_tops(top, rows, labels, true)

    def matched(self, rois: Array, truths: Array) -> tuple[Array, Array]:
        """Return the number of the true box (of T, 7 or more columns) that each of rois (R, 5)
        overlaps most, and how much, both (R,): 0 where its image has none.
        """
        if not len(truths):
            return np.zeros(len(rois), np.intp), np.zeros(len(rois), np.float32)
        found = overlaps(with_sides(rois[:, 1:])[:, None], with_sides(truths[:, 1:5])[None])
        found = np.where(rois[:, :1] == truths[:, 0], found, -1).astype(np.float32)
        match = found.argmax(axis=1)
        return match, np.maximum(found[np.arange(len(rois)), match], 0)

    def chosen(self, best: Array, ignored: Array, rng: np.random.Generator) -> Array:
        """Return the numbers of the rois to learn from, the foreground first; `best` (R,) are their
        overlaps, `ignored` (R,) those with boxes that do not count.
        """
        param = self.param.proposal_target_param
        is_foreground = best >= np.float32(param.fg_thr)
        foreground = np.flatnonzero(is_foreground & (ignored == 0))
        is_background = (best >= np.float32(param.bg_thr_lw)) & (best < np.float32(param.bg_thr_hg))
        background = np.flatnonzero(~is_foreground & is_background)
        others = np.flatnonzero(~is_foreground & ~is_background & param.pickup_discard)
        if param.batch_size == -1:
            size, most = len(foreground) + len(background), len(foreground)
        else:
            size, most = param.batch_size, int(param.fg_fraction * param.batch_size + 0.5)
        if len(foreground) > most:
            foreground = rng.permutation(foreground)[:most]
        left = size - len(foreground)
        if len(background) > left:
            background = rng.permutation(background)[:left]
        return np.concatenate([foreground, background, others[: left - len(background)]])

    def drawn(self, count: int, truths: Array, rng: np.random.Generator) -> Array:
        """Return rois (count, 5) at random places that overlap no true box by fg_thr.

        ConfigError for images of 32 pixels or less, DataError if there is no such place.
        """
        param = self.param.proposal_target_param
        width, height = param.img_width, param.img_height
        least = 32
        if min(width, height) <= least:
            raise ConfigError(f"img_width and img_height must be above {least} to draw boxes")
        rows: list[Array] = []
        for _ in range(1000 * count):
            image = rng.integers(param.num_img_per_batch)
            x, y = rng.integers(width - least), rng.integers(height - least)
            w, h = (max(int(rng.integers(n)), least) for n in (width - x, height - y))
            row = np.array([[image, x, y, x + w - 1, y + h - 1]], truths.dtype)
            if self.matched(row, truths)[1][0] < np.float32(param.fg_thr):
                rows.append(row)
            if len(rows) == count:
                return np.concatenate(rows)
        raise DataError(f"ProposalTarget: no room for {count} boxes of the background")

    def write_tops(self, top: Blobs, rows: Array, labels: Array, true: Array) -> None:
        """Write rois (R, 5), labels (R,) and true boxes (R, 6) to the tops."""
        self.started = True
        self.shape_tops(top, len(rows))
        for blob in top:
            blob.data.fill(0)
        top[0].data[..., 0, 0] = rows
        top[1].data[:, 0, 0, 0] = labels
        top[5].data[..., 0, 0] = true
        places = np.flatnonzero(labels)
        roi, box = with_sides(rows[places, 1:]), with_sides(true[places, 1:5])
        shift = (box[:, :2] + box[:, 2:] / 2 - roi[:, :2] - roi[:, 2:] / 2) / roi[:, 2:]
        deltas = np.concatenate([shift, np.log(box[:, 2:] / roi[:, 2:])], axis=1)
        deltas = (deltas - self.mean) / self.std
        own = labels[places].astype(np.int64)
        if not self.param.bbox_reg_param.cls_aware:
            own = np.minimum(own, 1)
        param, overlap = self.param.proposal_target_param, true[places, 5]
        weighs = overlap >= np.float32(param.bbox_thr_lw)
        weighs &= overlap <= np.float32(param.bbox_thr_hg)
        weight = weighs[:, None]
        for blob, values in zip(top[2:5], (deltas, weight, weight), strict=True):
            blob.data.reshape(len(rows), -1, DELTAS)[places, own] = values
        for blob in top[6:]:
            blob.data[:, 0, 0, 0] = self.weights(labels > 0, true[:, 5])

    def weights(self, is_true: Array, overlap: Array) -> Array:
        """Return the weight of each roi (B): those of true boxes have fg_fraction of all."""
        param = self.param.proposal_target_param
        weights = np.ones(len(is_true))
        if param.iou_weighted:
            weights[is_true] = overlap[is_true]
        if is_true.any():
            for places, share in ((is_true, param.fg_fraction), (~is_true, 1 - param.fg_fraction)):
                if places.any():
                    weights[places] *= share * len(weights) / weights[places].sum()
        return weights
