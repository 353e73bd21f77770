"""MultiBoxLoss: what a single-shot detector learns from (Liu et al. 2016, SSD)."""

import logging
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from caffepy.core.errors import ConfigError, DataError
from caffepy.device.blob import Array
from caffepy.layer.base import Blobs, layer
from caffepy.layer.detection import check_refinement, count_priors, no_class
from caffepy.layer.loss import ClassLoss
from caffepy.ops.boxes import (
    NOWHERE,
    PREDICTIONS,
    PRIORS,
    BoxCode,
    LocationLoss,
    Matching,
    Mining,
    TruthCheck,
)
from caffepy.proto.caffe_pb2 import MultiBoxLossParameter

log = logging.getLogger(__name__)

NONE, MAX_NEGATIVE, HARD_EXAMPLE = (
    MultiBoxLossParameter.NONE,
    MultiBoxLossParameter.MAX_NEGATIVE,
    MultiBoxLossParameter.HARD_EXAMPLE,
)
SMALL = 1e-5
"""The area below which a box that may be negative is dropped before others are by overlap."""


def entropies(x: Array, target: Array) -> Array:
    """Return -target * log(p) - (1 - target) * log(1 - p), p the sigmoid of x."""
    entropy: Array = np.maximum(x, 0) - x * target + np.log1p(np.exp(-np.abs(x)))
    return entropy


@layer("MultiBoxLoss")
class MultiBoxLoss(ClassLoss):
    """loc_weight * loss of locations / n + loss of classes / n, n the number of matches.

    Bottoms: locations (N, P * L * 4), L = 1 or with share_location false the number of classes K;
    scores (N, P * K); P priors (1, 2, P * 4), their boxes and variances; true boxes (1, 1, G, 8) =
    image, class, instance, xmin, ymin, xmax, ymax, difficult, where an image below 0 says that
    there is none.

    Priors (or with use_prior_for_matching false the predicted boxes) are matched to true boxes, see
    `Ops.match_boxes`. A match learns the location and the class of its true box; of the others the
    neg_pos_ratio * matches with the largest loss, in each image that has true boxes, learn that
    they are background (MAX_NEGATIVE), or all do (NONE), or only the sample_size boxes with the
    largest loss learn at all (HARD_EXAMPLE).

    RefineDet has two bottoms more (Zhang et al. 2018): scores (N, P * 2) of priors, whose second
    one must be objectness_score or more for a negative to be mined by MAX_NEGATIVE or HARD_EXAMPLE,
    and locations (N, P * 4), which move the priors of each image first.

    As in SSD, targets that have the variances in them lack their factor in the gradient, and
    LOGISTIC without mining takes the targets of a later image for rows of an earlier one.
    """

    bottoms = (4, 6)
    constant_bottoms: Mapping[int, str] = {
        2: "{type} cannot differentiate its priors; give propagate_down: false",
        3: "{type} cannot differentiate its true boxes; give propagate_down: false",
        4: "{type} cannot differentiate the scores of priors; give propagate_down: false",
        5: "{type} cannot differentiate the locations of priors; give propagate_down: false",
    }

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        param = self.settings = self.param.multibox_loss_param
        self.classes, self.background = param.num_classes, param.background_label_id
        if self.classes < 1:
            raise ConfigError("multibox_loss_param needs num_classes, the background included")
        mining = self.mining = param.mining_type
        if param.HasField("do_neg_mining") and param.do_neg_mining != (mining != NONE):
            raise ConfigError(
                "multibox_loss_param: do_neg_mining and mining_type say different things; give "
                "mining_type alone"
            )
        if mining != NONE and not param.share_location:
            raise ConfigError("multibox_loss_param: share_location false needs mining_type: NONE")
        if mining == MAX_NEGATIVE and param.neg_pos_ratio < 0:
            raise ConfigError("multibox_loss_param: neg_pos_ratio must not be below 0")
        if mining == HARD_EXAMPLE and param.sample_size < 1:
            raise ConfigError("multibox_loss_param: sample_size must be above 0")
        self.agnostic = param.map_object_to_agnostic
        if self.agnostic and self.classes != (2 if self.background < self.classes else 1):
            raise ConfigError(
                "multibox_loss_param: map_object_to_agnostic needs num_classes 2, the background "
                "and all else"
            )
        self.logistic = param.conf_loss_type == MultiBoxLossParameter.LOGISTIC
        if not self.logistic and self.background >= self.classes:
            raise ConfigError(
                f"multibox_loss_param: background_label_id {self.background} is none of the "
                f"{self.classes} classes; that needs conf_loss_type: LOGISTIC"
            )
        self.code = BoxCode(param.code_type, not param.encode_variance_in_target)
        self.rule = Matching(
            param.overlap_threshold,
            param.match_type == MultiBoxLossParameter.PER_PREDICTION,
            param.ignore_cross_boundary_bbox,
            param.use_difficult_gt,
        )
        crossing = PRIORS if param.use_prior_for_matching else PREDICTIONS
        square = param.loc_loss_type == MultiBoxLossParameter.L2
        self.location = LocationLoss(self.code, square, crossing if param.bp_inside else NOWHERE)
        if not self.code.scaled:
            log.info(
                "Layer %s: with encode_variance_in_target the gradient of SSD's MultiBoxLoss lacks "
                "the factor 1 / variance; it is used as SSD's nets were trained with it",
                self.param.name,
            )
        parts = list(self.param.propagate_down) or [True, True]
        self.parts = parts[:2]  # of the loss: locations, classes
        self.bad_box = self.error_flag(
            lambda item: DataError(f"a true box of image {item:g} of the batch is not finite")
        )
        self.bad_label = self.error_flag(
            lambda label: no_class(label, self.classes, self.background)
        )

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        top[0].reshape(())
        groups = 1 if self.settings.share_location else self.classes
        truths = bottom[3]
        count, n = count_priors(bottom, self.classes, groups), bottom[0].shape[0]
        if truths.count % 8 or truths.shape[-1:] != (8,):
            raise ConfigError(
                "bottom 3 must be true boxes (1, 1, G, 8), as AnnotatedData's second top of "
                f"records with boxes, not {list(truths.shape)}"
            )
        self.view = (n, count, groups, 4)
        check_refinement(bottom, 4, n, count)
        self.own_priors = self.buffer((n, 2, count, 4)) if len(bottom) > 5 else None
        maps = (n, groups, count)
        self.matches, self.labels = self.buffer(maps, np.int32), self.buffer((n, count), np.int32)
        self.overlaps, self.counts = self.buffer((n, count)), self.buffer((n, 2), np.int32)
        self.location_loss, self.class_loss = self.buffer(maps), self.buffer((n, count))
        self.normalizer, self.factor = self.buffer(()), self.buffer(())
        if not self.settings.use_prior_for_matching or self.suppresses:
            self.boxes = self.buffer((*maps, 4))
        if self.mining != NONE:
            self.chosen = self.buffer((n, count), np.int32)
        if self.logistic:
            self.targets = self.buffer((n, count, self.classes))
        if self.logistic or self.suppresses:
            self.places = self.buffer((count,), np.int32)
            self.places.host_data[...] = np.arange(count)
            self.items = self.buffer((n, 1), np.int32)
            self.items.host_data[...] = np.arange(n)[:, None]

    @property
    def suppresses(self) -> bool:
        """True if boxes that overlap ones with a larger loss are no negatives."""
        param = self.settings
        return (
            self.mining != NONE
            and param.HasField("nms_param")
            and param.nms_param.nms_threshold > 0
        )

    def given(self, bottom: Blobs) -> tuple[Array, Array, Array, Array]:
        """Return locations (N, P, L, 4), scores (N, P, K), priors (2, P, 4) and truths (G, 8)."""
        n, count, *_ = self.view
        locations, scores, priors, truths = (blob.data for blob in bottom[:4])
        return (
            locations.reshape(self.view),
            scores.reshape(n, count, self.classes),
            priors.reshape(2, count, 4),
            truths.reshape(-1, 8),
        )

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        locations, scores, priors, truths = self.given(bottom)
        matches, labels = self.matches.data, self.labels.data
        if self.own_priors:
            self.move_priors(bottom[5].data, priors)
        if self.whole and self.settings.use_prior_for_matching and not self.suppresses:
            self.match_with_losses(locations, scores, priors, truths)
        else:
            self.match(locations, priors, truths)
            self.set_losses(locations, scores, priors, truths)
        mining = self.mining_by_overlap if len(bottom) == 4 and self.sums_as_it_mines else None
        if self.mining != NONE and not mining:
            sure = bottom[4].data.reshape(*scores.shape[:2], 2)[..., 1] if bottom[4:] else None
            self.mine(scores, priors, sure)
        if self.logistic:
            self.set_logistic_losses(scores, self.background)
        self.weigh_losses()
        weights = self.settings.loc_weight * self.parts[0], float(self.parts[1])
        given = self.location_loss.data, matches, self.class_loss.data, labels, weights
        divisor = self.divisor(*matches.shape[::2])
        self.ops.multibox_loss(*given, divisor, mining, self.normalizer.data, top[0].data)

    @property
    def sums_as_it_mines(self) -> bool:
        """True if negatives are mined by the losses of classes that are summed."""
        return not self.logistic

    def weigh_losses(self) -> None:
        """Weigh the losses (N, P) of classes of the boxes that learn."""

    @property
    def check(self) -> TruthCheck:
        """Rules by which true boxes are wrong, and the flags that note it."""
        param, flags = self.settings, (self.bad_label.found, self.bad_box.found)
        rules = self.classes, self.background, self.agnostic, param.use_difficult_gt
        return TruthCheck(*rules, *flags)

    def match_with_losses(
        self, locations: Array, scores: Array, priors: Array, truths: Array
    ) -> None:
        """Check the true boxes, find the matches, and write the labels and losses of all boxes.

        Shapes are those of `Ops.match_with_losses`.
        """
        matches, overlaps = self.matches.data, self.overlaps.data
        given = scores, locations, priors, truths, self.rule, self.location, self.check
        found = matches.reshape(overlaps.shape), overlaps, self.counts.data, self.labels.data
        self.ops.match_with_losses(*given, *found, self.location_loss.data, self.class_loss.data)
        self.bad_label.check()
        self.bad_box.check()

    def set_losses(self, locations: Array, scores: Array, priors: Array, truths: Array) -> None:
        """Write the labels of all boxes and their losses, but for those of LOGISTIC's classes."""
        matches, labels, classes = self.matches.data, self.labels.data, self.class_loss.data
        of_location, rule = self.location_loss.data, self.location
        if self.whole:
            given = scores, locations, priors, truths, matches, rule
            kinds = self.background, self.agnostic
            self.ops.box_losses(*given, *kinds, labels, of_location, classes)
            return
        for part, own in self.parts_with_priors(priors):
            parts = locations[part], own, truths, matches[part]
            self.ops.location_losses(*parts, rule, of_location[part])
        self.ops.label_matches(truths, matches, self.background, self.agnostic, labels)
        if not self.logistic:
            self.ops.class_losses(*self.rows(scores), classes.reshape(-1))

    @property
    def whole(self) -> bool:
        """True if one operation takes both the locations and the classes of all boxes."""
        return not self.logistic and self.view[2] == 1 and self.own_priors is None

    @property
    def mining_by_overlap(self) -> Mining | None:
        """MAX_NEGATIVE without suppression."""
        param = self.settings
        if self.mining != MAX_NEGATIVE or self.suppresses:
            return None
        rule = param.neg_pos_ratio, param.neg_overlap
        return Mining(self.overlaps.data, self.counts.data, *rule)

    def move_priors(self, moves: Array, priors: Array) -> None:
        """Write the priors of each image, moved by its moves (N, P * 4), and their variances."""
        assert self.own_priors is not None, "RefineDet's layer"
        n, _, count, _ = self.own_priors.shape
        boxes = np.empty_like(self.own_priors.data, shape=(n, 1, count, 4))
        self.ops.decode_boxes(moves.reshape(n, count, 1, 4), priors, self.code, boxes)
        self.own_priors.data[:, 0] = boxes[:, 0]
        self.own_priors.data[:, 1] = priors[1]

    def parts_with_priors(self, priors: Array) -> Iterator[tuple[slice, Array]]:
        """Yield parts of a batch and their priors (2, P, 4): all, or RefineDet's image by image."""
        if self.own_priors is None:
            yield slice(None), priors
            return
        for i in range(self.view[0]):
            yield slice(i, i + 1), self.own_priors.data[i]

    def match(self, locations: Array, priors: Array, truths: Array) -> None:
        """Check the true boxes, and find the matches for each class that has its own locations."""
        self.ops.check_truths(truths, self.check)
        self.bad_label.check()
        self.bad_box.check()
        param, counts, overlaps = self.settings, self.counts.data, self.overlaps.data
        matches, by_class = self.matches.data, not param.share_location
        if not param.use_prior_for_matching or self.suppresses:
            self.ops.decode_boxes(locations, priors, self.code, self.boxes.data)
        if param.use_prior_for_matching:
            boxes = priors[:1] if self.own_priors is None else self.own_priors.data[:, 0].copy()
            first = matches[:, 0] if by_class else matches.reshape(overlaps.shape)
            own = np.empty_like(self.labels.data) if by_class else first
            self.ops.match_boxes(boxes, truths, -1, self.rule, own, overlaps, counts)
            if by_class:
                of = np.where(own >= 0, truths[:, 1][np.maximum(own, 0)], -1)
                for c in range(self.classes):
                    known = (of == c) & (c != self.background)
                    matches[:, c] = np.where(known, own, -1)
            return
        for c in range(matches.shape[1]):
            if by_class and c == self.background:
                matches[:, c] = -1
                continue
            boxes, own = (
                self.boxes.data[:, c].copy(),
                np.empty_like(self.labels.data),
            )
            label = c if by_class else -1
            self.ops.match_boxes(boxes, truths, label, self.rule, own, overlaps, counts)
            matches[:, c] = own

    def mine(self, scores: Array, priors: Array, sure: Array | None) -> None:
        """Choose the boxes that learn, by RefineDet of those whose priors are `sure` (N, P) enough:
        others get the label -1, and lose their match.
        """
        param, matches = self.settings, self.matches.data[:, 0]
        labels, losses, chosen = self.labels.data, self.class_loss.data, self.chosen.data
        if self.logistic:
            self.set_logistic_losses(scores, 0)
        counts, overlaps = self.counts.data, self.overlaps.data
        by_overlap = self.mining_by_overlap
        if by_overlap and sure is None:
            self.ops.mine_negatives(losses, matches, *by_overlap, labels)
            return
        if self.mining == HARD_EXAMPLE:
            losses = losses + self.location_loss.data[:, 0]
            allowed = np.ones_like(matches)
            numbers = np.full_like(counts[:, 0], param.sample_size)
        else:
            free = (matches == -1) & (overlaps < param.neg_overlap)
            allowed = free.astype(np.int32)
            ratio = np.float32(param.neg_pos_ratio)
            numbers = (counts[:, 1] * ratio).astype(np.int32)
        if sure is not None:
            allowed = allowed * (sure >= np.float32(param.objectness_score)).astype(np.int32)
        numbers = np.where(counts[:, 0] > 0, numbers, 0).astype(np.int32)
        if self.suppresses:
            self.choose_apart(losses, allowed, numbers, priors)
        else:
            self.ops.choose_largest(losses, allowed, numbers, chosen)
        if self.mining == HARD_EXAMPLE:
            negative = (matches == -1) & (chosen > 0)
            matches[...] = np.where((matches >= 0) & (chosen == 0), -1, matches)
        else:
            negative = chosen > 0
        labels[...] = np.where((matches >= 0) | negative, labels, -1)

    def choose_apart(self, losses: Array, allowed: Array, numbers: Array, priors: Array) -> None:
        """Choose the boxes with the largest losses that do not overlap each other, of the top_k."""
        param, (n, count, *_) = self.settings.nms_param, self.view
        boxes = priors[:1] if self.settings.use_prior_for_nms else self.boxes.data[:, 0]
        boxes = np.broadcast_to(boxes, (n, count, 4))
        most = count if param.top_k < 0 else min(param.top_k, count)
        self.chosen.data.fill(0)
        if most == 0:
            return
        order = np.argsort(np.where(allowed > 0, -losses, np.inf), axis=1, kind="stable")[:, :most]
        sides = np.maximum(boxes[:, :, 2:] - boxes[:, :, :2], 0)
        known = (allowed > 0) & (sides[:, :, 0] * sides[:, :, 1] >= SMALL)
        last = np.argsort(~np.take_along_axis(known, order, axis=1), axis=1, kind="stable")
        order = np.take_along_axis(order, last, axis=1)
        best = np.take_along_axis(boxes, order[:, :, None], axis=1)
        usable = np.sum(np.take_along_axis(known, order, axis=1), axis=1)
        kept, counts = np.zeros_like(order, np.int32), np.zeros_like(numbers)
        self.ops.suppress_overlaps(best, param.nms_threshold, 0.0, kept, counts)
        taken = self.places.data[:most] < np.minimum(counts, numbers)[:, None]
        taken &= kept < usable[:, None]
        # What is not taken is written to one more column.
        columns = np.where(taken, np.take_along_axis(order, kept, axis=1), count)
        wide = np.zeros_like(self.chosen.data, shape=(n, count + 1))
        wide[self.items.data, columns] = 1
        self.chosen.data[...] = wide[:, :count]

    def rows(self, scores: Array) -> tuple[Array, Array]:
        """Return the scores (N * P, K) and their labels (N * P)."""
        return scores.reshape(-1, self.classes), self.labels.data.reshape(-1)

    def set_logistic_losses(self, scores: Array, others: float) -> None:
        """Write LOGISTIC's losses (N, P) of classes, see `set_targets`."""
        self.set_targets(others)
        self.class_loss.data[...] = np.sum(entropies(scores, self.targets.data), axis=2)

    def set_targets(self, others: float) -> None:
        """Write the targets (N, P, K) of LOGISTIC: 1 for the label, `others` for other classes; as
        in SSD, which without mining begins the targets of image n at element n * P.
        """
        (n, count, k), labels = self.targets.shape, self.labels.data
        self.targets.data.fill(others)
        wide = np.full_like(self.targets.data, others, shape=n * count * k + 1)
        start = self.places.data[:count] * k
        start = start + self.items.data * (count if self.mining == NONE else count * k)
        for own in self.targeted(labels):
            inside = (own >= 0) & (own < k)
            wide[np.where(inside, start + own, n * count * k)] = 1
        self.targets.data.reshape(-1)[...] = wide[:-1]

    def targeted(self, labels: Array) -> Iterator[Array]:
        """Yield labels (N, P) whose targets are 1: those of all boxes that learn, or without mining
        of the matches of each class that has locations of its own.
        """
        if self.mining != NONE:
            yield labels
            return
        of_each = self.view[2] > 1 and not self.agnostic
        for c in range(self.view[2]):
            own = np.full_like(labels, c) if of_each else labels
            yield np.where(self.matches.data[:, c] >= 0, own, -1)

    def backward(self, top: Blobs, propagate_down: Sequence[bool], bottom: Blobs) -> None:
        """The gradient of each part, but for the factor of `encode_variance_in_target`."""
        self.refuse_constants(propagate_down)
        locations, scores, priors, truths = self.given(bottom)
        labels, matches, norm = self.labels.data, self.matches.data, self.normalizer.data
        weight, dloss = self.settings.loc_weight, top[0].diff
        if self.whole and self.sums_as_it_mines and all(propagate_down[:2]):
            given = scores, locations, priors, truths, matches, labels, self.location
            diffs = bottom[0].diff.reshape(self.view), bottom[1].diff.reshape(scores.shape)
            self.ops.box_gradients(*given, weight, dloss, norm, *diffs)
            return
        np.divide(dloss, norm, out=self.factor.data)
        if propagate_down[1]:
            dscores, factor = bottom[1].diff.reshape(scores.shape), self.factor.data
            if self.logistic:
                slope = 0.5 * np.tanh(0.5 * scores) + 0.5 - self.targets.data
                slope = np.where((labels >= 0)[:, :, None], slope, 0)
                np.multiply(slope, factor, out=dscores)
            else:
                flat = dscores.reshape(-1, self.classes)
                self.ops.class_gradients(*self.rows(scores), factor, flat)
                self.weigh_gradients(dscores)
        if propagate_down[0]:
            self.factor.data[...] *= weight
            gradients = bottom[0].diff.reshape(self.view)
            for part, own in self.parts_with_priors(priors):
                parts = locations[part], own, truths, matches[part], self.location
                self.ops.location_gradients(*parts, self.factor.data, gradients[part])

    def weigh_gradients(self, dscores: Array) -> None:
        """Weigh the gradients (N, P, K) of scores."""


LEAST = 1e-10
"""Of 1 - p, of which MultiBoxFocalLoss has a power that may be below 0."""


@layer("MultiBoxFocalLoss")
class MultiBoxFocalLoss(MultiBoxLoss):
    """MultiBoxLoss whose losses of classes are -alpha * (1 - p)^gamma * log(p), p the softmax at
    the label (Lin et al. 2017, SSD with focal loss).

    Negatives are mined by -log(p); with LOGISTIC it is MultiBoxLoss.
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        param = self.param.focal_loss_param
        self.alpha = param.alpha if param.HasField("alpha") else 0.25
        self.gamma = param.gamma
        if not self.gamma >= 0:
            raise ConfigError(f"focal_loss_param: gamma must be 0 or more, not {self.gamma:g}")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        self.slopes = self.buffer(self.class_loss.shape)

    @property
    def sums_as_it_mines(self) -> bool:
        return False

    def weigh_losses(self) -> None:
        """Write the losses, and their slopes over that of -log(p)."""
        if self.logistic:
            return
        losses = self.class_loss.data
        p = np.exp(-losses)
        rest = np.maximum(1 - p, LEAST)
        power = self.alpha * rest**self.gamma
        np.multiply(power, 1 + self.gamma * p * losses / rest, out=self.slopes.data)
        losses *= power

    def weigh_gradients(self, dscores: Array) -> None:
        dscores *= self.slopes.data[:, :, None]
