"""Average precision of detections, and its mean over classes, as SSD's solver reckons them."""

import logging
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.core import coco

log = logging.getLogger(__name__)

COCO = "COCO"
VERSIONS = ("Integral", "MaxIntegral", "11point", "101point", COCO)
"""Integral: the sum of precision times step of recall. MaxIntegral: the area under the precision
made monotone (VOC 2012). 11point, 101point: the mean of the best precision at 11 and 101 recalls
(VOC 2007, and COCO for one overlap). COCO: as that, the mean over ten overlaps.
"""


def average_precision(scores: NDArray[Any], true: NDArray[Any], count: int, version: str) -> float:
    """Return the average precision, 0 to 1, of detections with scores (D,), of which `true` (D,)
    are, for `count` true boxes; 0 without any. For `version` see VERSIONS.
    """
    if not len(scores) or count <= 0:
        return 0.0
    order = np.argsort(-scores, kind="stable")
    hits = np.cumsum(true[order])
    precision, recall = hits / np.arange(1, len(hits) + 1), hits / count
    best = np.maximum.accumulate(precision[::-1])[::-1]  # at this recall or more
    if version.endswith("point"):
        levels = coco.RECALLS
        if version == "11point":  # SSD's recalls are single: 7 of 10 do not reach its 0.7
            levels = np.arange(11) / 10
            recall = (hits.astype(np.float32) / np.float32(count)).astype(np.float64)
        places = np.searchsorted(recall, levels)
        return float(np.sum(np.append(best, 0)[places]) / len(levels))
    steps = np.diff(recall, prepend=0)
    return float(np.sum(steps * (best if version == "MaxIntegral" else precision)))


def mean_average_precision(rows: NDArray[Any], version: str, show: bool = False) -> float:
    """Return the mean over classes of the average precision of rows (D, 5) of DetectionEvaluate, of
    any number of batches; with `show` log that of each class. For COCO rows are those of `coco`,
    all figures are logged, and without true boxes the mean is 0.
    """
    if version == COCO:
        figures = coco.summarize(rows)
        for name, value in figures.items():
            if value is not None:
                log.info("%s: %g", name, value)
        return figures["AP"] or 0.0
    table = rows.reshape(-1, 5)
    heads, found = table[table[:, 0] == -1], table[table[:, 0] != -1]
    found = found[(found[:, 3] != 0) | (found[:, 4] != 0)]  # others are of difficult boxes
    labels = np.unique(heads[:, 1])
    total = 0.0
    for label in labels:
        own = found[found[:, 1] == label]
        count = int(np.sum(heads[heads[:, 1] == label, 2]))
        if not len(own):
            log.warning("Nothing was found of class %d, which has %d true boxes", label, count)
        value = average_precision(own[:, 2], own[:, 3] > 0, count, version)
        if show:
            log.info("class%d: %g", label, value)
        total += value
    return total / len(labels) if len(labels) else 0.0
