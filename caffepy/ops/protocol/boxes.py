"""Boxes of SSD: xmin, ymin, xmax, ymax, in units of the image; locations (N, P, L, 4) for L
classes, or 1 for all; priors (2, P, 4), the boxes and their variances; truths (G, 8) = image,
class, instance, box, whether it is difficult; matches int32, row of truths, or below 0.
"""

from typing import Protocol

from caffepy.device.blob import Array
from caffepy.ops.boxes import BoxCode, LocationLoss, Matching, Mining, TruthCheck


class BoxesOps(Protocol):
    def decode_boxes(self, locations: Array, priors: Array, code: BoxCode, boxes: Array) -> None:
        """Write boxes (N, L, P, 4) from locations x times variances: CORNER: prior + x,
        CORNER_SIZE: prior + x * size of the prior, CENTER_SIZE: centre + x * size, size * exp(x).
        """

    def match_boxes(
        self,
        boxes: Array,
        truths: Array,
        label: int,
        rule: Matching,
        matches: Array,
        overlaps: Array,
        counts: Array,
    ) -> None:
        """Match boxes (N, P, 4), or (1, P, 4) for all images, with the true boxes of each image, of
        the class `label` unless that is -1.

        The pair that overlaps most, of those left, is matched, as long as there is one; then, with
        rule.every, each box left with the true box that it overlaps most, threshold or more. Of
        equal overlaps the earlier box comes first, then the earlier true box. Write matches (N, P),
        -1 for no match and -2 for a box that crosses the edge where the rule leaves it out;
        overlaps (N, P) with the match, or the largest; and counts (N, 2) int32: true boxes of any
        class, and matches.
        """

    def location_losses(
        self,
        locations: Array,
        priors: Array,
        truths: Array,
        matches: Array,
        rule: LocationLoss,
        losses: Array,
    ) -> None:
        """Write losses (N, L, P): sums of f(d) over the four locations of each box with a match, d
        the difference to what `decode_boxes` would make the true box of, over the variances if they
        are not scaled; 0 for other boxes. matches (N, L, P).
        """

    def location_gradients(
        self,
        locations: Array,
        priors: Array,
        truths: Array,
        matches: Array,
        rule: LocationLoss,
        factor: Array,
        gradients: Array,
    ) -> None:
        """Write gradients like the locations, factor () * f'(d)."""

    def choose_largest(self, values: Array, allowed: Array, numbers: Array, chosen: Array) -> None:
        """Write chosen (N, P) int32, 1 for the numbers[n] largest values of row n of those that are
        allowed (N, P) int32, of equal ones the first, else 0; numbers (N) int32.
        """

    def match_with_losses(
        self,
        scores: Array,
        locations: Array,
        priors: Array,
        truths: Array,
        matching: Matching,
        rule: LocationLoss,
        check: TruthCheck,
        matches: Array,
        overlaps: Array,
        counts: Array,
        labels: Array,
        of_location: Array,
        of_class: Array,
    ) -> None:
        """Do `check_truths`, `match_boxes` of the priors (2, P, 4) with true boxes of any class,
        and `box_losses`, but on the CPU only the first if a true box is wrong.
        """

    def check_truths(self, truths: Array, check: TruthCheck) -> None:
        """Set bad_label (2) = 1 and the largest class of true boxes of an image that is the
        background's or none, and bad_box (2) = 1 and the largest image of those that are not
        finite, float64, on the CPU unless bad_label is set; difficult ones count with `difficult`,
        all classes with `any_class`.
        """

    def label_matches(
        self, truths: Array, matches: Array, background: int, one_class: bool, labels: Array
    ) -> None:
        """Write labels (N, P) int32: the class of the true box of the last of L matches (N, L, P)
        that there is, with `one_class` background + 1, else the background.
        """

    def mine_negatives(
        self,
        losses: Array,
        matches: Array,
        overlaps: Array,
        counts: Array,
        ratio: float,
        most: float,
        labels: Array,
    ) -> None:
        """Write the label -1 for all boxes (N, P) without a match but those with the largest
        losses, ratio times as many as matches in an image that has true boxes, of those with the
        match -1 whose overlap is below `most`; counts (N, 2) as of `match_boxes`.
        """

    def multibox_loss(
        self,
        location: Array,
        matches: Array,
        of_class: Array,
        labels: Array,
        weights: tuple[float, float],
        divisor: float | None,
        mining: Mining | None,
        norm: Array,
        loss: Array,
    ) -> None:
        """loss = (weights[0] * sum of location losses (N, L, P) of matches + weights[1] * sum of
        class losses (N, P) of boxes whose label is 0 or more) / norm; norm = the divisor, or the
        number of matches, 1 or more. With `mining`, which needs L = 1 and labels of all matches,
        after `mine_negatives`.
        """

    def class_losses(self, x: Array, labels: Array, losses: Array) -> None:
        """Write losses (R) = -log(softmax(x)[label]) of rows x (R, K), at most that of the least
        normal float; 0 for a label below 0; labels (R) int32.
        """

    def class_gradients(self, x: Array, labels: Array, factor: Array, gradients: Array) -> None:
        """Write gradients (R, K) = factor () * (softmax(x) - 1 at the label), 0 for a label below
        0.
        """

    def box_losses(
        self,
        scores: Array,
        locations: Array,
        priors: Array,
        truths: Array,
        matches: Array,
        rule: LocationLoss,
        background: int,
        one_class: bool,
        labels: Array,
        of_location: Array,
        of_class: Array,
    ) -> None:
        """Write what `label_matches`, `location_losses` (N, 1, P) and `class_losses` (N, P) do, of
        scores (N, P, K) and matches (N, 1, P).
        """

    def box_gradients(
        self,
        scores: Array,
        locations: Array,
        priors: Array,
        truths: Array,
        matches: Array,
        labels: Array,
        rule: LocationLoss,
        weight: float,
        dloss: Array,
        norm: Array,
        dlocations: Array,
        dscores: Array,
    ) -> None:
        """Write what `class_gradients` and `location_gradients` do, of scores (N, P, K) and matches
        (N, 1, P), with the factors dloss () / norm () and weight times that.
        """

    def detect(
        self,
        boxes: Array,
        scores: Array,
        background: int,
        least: float,
        threshold: float,
        eta: float,
        found: Array,
        counts: Array,
    ) -> None:
        """Write found (N, K, M, 5) = score and box, and counts (N, K) int32: of the M boxes (N, L,
        P, 4) of each class but the background with the largest scores (N, P, K) above `least`, the
        best first, those whose overlap with each one before is threshold or less; with each of
        these the threshold is multiplied by eta while it is above 1/2, if eta is below 1.
        """
