"""Settings of operations on boxes of detectors (SSD), for both back ends."""

from typing import NamedTuple

from caffepy.device.blob import Array

CORNER, CENTER_SIZE, CORNER_SIZE = 1, 2, 3
"""Codes of boxes as locations, PriorBoxParameter.CodeType: see `Ops.decode_boxes`."""


class BoxCode(NamedTuple):
    """The code of boxes as locations. Without `scaled` the variances are left out: the targets that
    a net learned had them in them.
    """

    kind: int
    scaled: bool = True


class Matching(NamedTuple):
    """Rules by which boxes are matched to true boxes.

    threshold: the least overlap of a match of `every` box, after each true box has got its best.
    inside: boxes that cross the edge of the image are not matched.
    difficult: true boxes that are difficult count.
    """

    threshold: float
    every: bool
    inside: bool
    difficult: bool


class TruthCheck(NamedTuple):
    """Rules by which true boxes are wrong, and flags that note them: see `Ops.check_truths`."""

    classes: int
    background: int
    any_class: bool
    difficult: bool
    bad_label: Array
    bad_box: Array


class LocationLoss(NamedTuple):
    """The loss of locations: |d| smoothed below 1, or with `square` d^2 / 2.

    crossing: coordinates of boxes that lie outside the image cost nothing: of no box, of the priors
        or of the predictions (NOWHERE, PRIORS, PREDICTIONS).
    """

    code: BoxCode
    square: bool
    crossing: int


class Mining(NamedTuple):
    """Rules by which unmatched boxes learn that they are background: see `Ops.mine_negatives`."""

    overlaps: Array
    counts: Array
    ratio: float
    most: float


class Rois(NamedTuple):
    """Boxes (R, 5) of maps: as they are given, and where those that are taken are written, larger
    on all sides by `pad` of their width + 1 and height + 1; and what notes an image that there is
    not: see `Ops.take_rois`.
    """

    given: Array
    taken: Array
    pad: float
    bad_image: Array


NOWHERE, PRIORS, PREDICTIONS = range(3)
