"""Loss and accuracy of the proposals of Cascade R-CNN (Cai and Vasconcelos 2018): of maps of
several fields.

Scores (N * G, K, H, W) and deltas (N * G, 4, H, W) are of G fields around each place, the labels (N
* G, 6, H, W) as those of MS-CNN. All of it is computed on the host.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from caffepy.core.errors import ConfigError
from caffepy.data.overlap import overlaps
from caffepy.device.blob import Array
from caffepy.layer.base import Blobs, LossLayer, layer
from caffepy.layer.cascade import bounded, from_fields
from caffepy.layer.field_loss import DELTAS, LEAST_SIDE, ROWS, OfLabels


class OfGroups(OfLabels):
    """Base: layers of maps of G fields, and their settings."""

    def read_settings(self, settings: Any) -> None:
        """Keep the settings; ConfigError for sizes that are lacking."""
        fields = list(zip(settings.field_w, settings.field_h, strict=False))
        if (
            not fields
            or len(settings.field_w) != len(settings.field_h)
            or min(map(min, fields)) < 1
        ):
            raise ConfigError(f"{self.type} needs as many field_w as field_h, one or more, above 0")
        if not settings.cls_num or not settings.stride:
            raise ConfigError(f"{self.type} needs a cls_num and a stride of 1 or more")
        super().read_settings(settings)
        self.fields = np.array(fields, np.float32)  # (G, 2)

    def check_maps(self, bottom: Blobs) -> None:
        """ConfigError unless the bottoms are scores, deltas and labels of G fields."""
        scores, count = bottom[0].shape, len(self.fields)
        shapes = [
            (*scores[:1], rows, *scores[2:]) for rows in (self.settings.cls_num, DELTAS, ROWS)
        ]
        given = [blob.shape for blob in bottom]
        if len(scores) != 4 or scores[0] % count or given != shapes or 0 in scores:
            listed = ", ".join(str(list(shape)) for shape in given)
            raise ConfigError(
                f"{self.type} needs scores (N * {count}, {self.settings.cls_num}, H, W), deltas (N "
                f"* {count}, {DELTAS}, H, W) and labels (N * {count}, {ROWS}, H, W), not {listed}"
            )

    def backgrounds(self, labels: Array) -> Array:
        """Return True at places (N * G, H, W) that no true box comes near."""
        near = labels[:, 5] >= np.float32(self.settings.bg_threshold)
        result: Array = (labels[:, 0].astype(np.int64) == 0) & ~near
        return result


@layer("DetectionGroupLoss")
class DetectionGroupLoss(LossLayer, OfGroups):
    """Class loss + lambda * box loss, and lambda * box loss: the top has 2 elements, of which the
    net's loss is the sum, as in the fork.

    The class loss is the mean of -w log(softmax) over the true boxes and backgrounds that are
    sampled of each image: batch_size of them, 1 / (1 + bg_multiple) of them true boxes, or with -1
    all true boxes and bg_multiple times as many backgrounds, min_num_neg at least. Backgrounds are
    those whose overlap is below bg_threshold: `random` ones, the worst (`bootstrap`), or half each
    (`mixture`). The box loss is smooth L1 or half of the square of the deltas' errors of the true
    boxes that are sampled, over their number. Deltas beyond field_xyr and field_whr, if both are
    given, are cut to them, and their gradient is that of the cut ones, as there.
    """

    on_gpu = False
    bottoms = 3
    constant_bottoms: Mapping[int, str] = {
        2: "{type} cannot differentiate its labels; the layer that makes them needs no gradient"
    }

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.detection_group_loss_param
        self.read_settings(param)
        for name, known in (
            ("neg_mining_type", ("random", "bootstrap", "mixture")),
            ("neg_ranking_type", ("conf_loss", "conf_prob")),
            ("bbox_loss_type", ("Smooth_L1", "Euclidean_L2")),
        ):
            if getattr(param, name) not in known:
                raise ConfigError(f'{name} is {" or ".join(known)}, not "{getattr(param, name)}"')
        if param.batch_size < 1 and param.batch_size != -1:
            raise ConfigError(f"batch_size must be 1 or more, or -1, not {param.batch_size}")
        self.is_bounded = param.HasField("field_xyr") and param.HasField("field_whr")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        self.check_maps(bottom)
        top[0].reshape((1, 1, 1, 2))

    def counts(self, true: int, others: int) -> tuple[int, int]:
        """Return how many of `true` boxes and `others`, backgrounds, of an image to learn from."""
        param = self.settings
        if param.batch_size == -1:
            return true, min(max(true * param.bg_multiple, param.min_num_neg), others)
        chosen = min(int(param.batch_size / (1 + param.bg_multiple) + 0.5), true)
        return chosen, min(param.batch_size - chosen, others)

    def sampled(self, true: Array, background: Array, hardness: Array) -> Array:
        """Return True at the places to learn from, of places (N, P) of true boxes and of
        backgrounds that are so hard.
        """
        mode = self.settings.neg_mining_type
        chosen = np.zeros(true.shape, bool)
        rng = np.random.default_rng(self.device.draw_seed())
        for own, boxes, others, hard in zip(chosen, true, background, hardness, strict=True):
            places, left = np.flatnonzero(boxes), np.flatnonzero(others)
            count, rest = self.counts(len(places), len(left))
            if count < len(places):
                places = rng.permutation(places)[:count]
            own[places] = True
            worst = {"random": 0, "bootstrap": rest, "mixture": int(rest * 0.5 + 0.5)}[mode]
            if rest < len(left) and worst:
                # of equal ones the last comes first
                left = left[::-1][np.argsort(-hard[left[::-1]], kind="stable")]
            own[left[:worst]] = True
            left, rest = left[worst:], rest - worst
            own[rng.permutation(left)[:rest] if rest < len(left) else left] = True
        return chosen

    def weights(self, true: Array, kept: Array) -> Array:
        """Return the weight of each place (N * G, H, W)."""
        weights, param = np.ones(true.shape), self.settings
        if param.pos_neg_weighted:
            share = 1 / (1 + param.bg_multiple)
            for places, part in ((true, share), (~true, 1 - share)):
                if count := int((places & kept).sum()):
                    weights[places] = part * int(kept.sum()) / count
        return weights

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        param, (scores, deltas, labels) = self.settings, (blob.data for blob in bottom)
        found, heeded = self.classes(labels)
        true = found > 0
        images = len(scores) // len(self.fields)
        prob = np.exp(scores - scores.max(axis=1, keepdims=True))
        prob /= prob.sum(axis=1, keepdims=True)
        own = np.where(heeded, found, 0)[:, None]
        tiny = np.finfo(np.float32).tiny
        losses = -np.log(np.maximum(np.take_along_axis(prob, own, axis=1)[:, 0], tiny))
        hardness = losses if param.neg_ranking_type == "conf_loss" else 1 - prob[:, 0]
        given = (true, self.backgrounds(labels), hardness)
        kept = self.sampled(*(places.reshape(images, -1) for places in given)).reshape(found.shape)
        weights = self.weights(true, kept)
        kept &= heeded
        weights = np.where(kept, weights, 0)
        count = max(1, int(kept.sum()))
        np.put_along_axis(prob, own, np.take_along_axis(prob, own, axis=1) - 1, axis=1)
        self.of_scores = prob * (weights / count)[:, None]

        boxes = kept & true
        error = np.clip(deltas, *self.bounds()) if self.is_bounded else deltas
        error = np.where(boxes[:, None], error - self.targets(labels), 0)
        if param.bbox_loss_type == "Smooth_L1":
            size = np.abs(error)
            loss = np.where(size < 1, error * error / 2, size - 0.5).sum()
            error = np.clip(error, -1, 1)
        else:
            loss = (error * error).sum() / 2
        share = getattr(param, "lambda") / max(1, DELTAS * int(boxes.sum()))
        self.of_deltas = error * share
        top[0].data[...] = (losses * weights).sum() / count + share * loss, share * loss

    def targets(self, labels: Array) -> Array:
        """Return the deltas (N * G, 4, H, W) of true boxes."""
        height, width = labels.shape[2:]
        fields = np.tile(self.fields, (len(labels) // len(self.fields), 1))[..., None, None]
        places = np.stack(np.meshgrid(np.arange(width), np.arange(height)))  # (2, H, W)
        shift = (labels[:, 1:3] - (places + np.float32(0.5)) * self.settings.stride) / fields
        grow = np.log(np.maximum(labels[:, 3:5], LEAST_SIDE) / fields)
        deltas = np.concatenate([shift, grow], axis=1)
        return (deltas - self.mean[:, None, None]) / self.std[:, None, None]

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        self.refuse_constants(propagate_down)
        weight = top[0].diff.reshape(-1)[0]
        for blob, gradient, wanted in zip(
            bottom, (self.of_scores, self.of_deltas), propagate_down, strict=False
        ):
            if wanted:
                np.multiply(gradient, weight, out=blob.diff)


@layer("DetectionGroupAccuracy")
class DetectionGroupAccuracy(OfGroups):
    """Share of places whose class has the largest score, (1, 1, 1, 2): of all but backgrounds whose
    overlap is bg_threshold or more, and of true boxes; as an optional top 1 the mean overlap of
    predicted and true boxes. -1 where there are none.
    """

    bottoms = 3
    tops = (1, 2)

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.read_settings(self.param.detection_group_accuracy_param)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        self.check_maps(bottom)
        for blob, count in zip(top, (2, 1), strict=False):
            blob.reshape((1, 1, 1, count))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        scores, deltas, labels = (blob.data for blob in bottom)
        found, heeded = self.classes(labels)
        counted = heeded & ((found != 0) | self.backgrounds(labels))
        hit = scores.argmax(axis=1) == found
        for i, places in enumerate((counted, counted & (found != 0))):
            top[0].data[..., i] = hit[places].mean() if places.any() else -1
        if len(top) > 1:
            true = heeded & (found != 0)
            top[1].data[...] = self.overlaps(deltas, labels)[true].mean() if true.any() else -1

    def overlaps(self, deltas: Array, labels: Array) -> Array:
        """Return the overlap (N * G, H, W) of predicted and true boxes."""
        deltas = deltas * self.std[:, None, None] + self.mean[:, None, None]
        deltas = np.moveaxis(bounded(np.moveaxis(deltas, 1, -1), self.settings), -1, 1)
        by_field = deltas.reshape(-1, len(self.fields), *deltas.shape[1:])
        corner, size = from_fields(by_field, self.fields, self.settings.stride)
        boxes = np.concatenate([corner, size], axis=-1).reshape(*labels[:, 0].shape, DELTAS)
        true = np.moveaxis(labels[:, 1:5], 1, -1)
        true = np.concatenate([true[..., :2] - true[..., 2:] / 2, true[..., 2:]], axis=-1)
        return overlaps(boxes, true, least=1)
