"""Average precision of detections as COCO reckons it: the mean over overlaps of 0.5 to 0.95, of all
boxes and of those of three sizes.

`match` gives rows of an image and class, which may follow each other in any number; `summarize`
makes COCO's twelve figures of them. Rows are those of classes, 0 = class, 1 = 0, 2 = -1, then the
numbers of true boxes of each size; and those of detections, 0 = class, 1 = score, 2 = rank in its
image, then for each size and overlap whether it is true: 1, 0, or -1 if it does not count.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

OVERLAPS = np.linspace(0.5, 0.95, 10)
RECALLS = np.linspace(0, 1, 101)
SIZES: Mapping[str, tuple[float, float]] = {
    "all": (0, 1e10),
    "small": (0, 32**2),
    "medium": (32**2, 96**2),
    "large": (96**2, 1e10),
}
"""Areas in pixels, both ends counted."""

MOST = 100
"""Detections of an image and class that count."""

COLUMNS = 3 + len(SIZES) * len(OVERLAPS)
"""Of a row."""

_EDGES = np.array(list(SIZES.values()))


def match(
    label: int, found: Array, truths: Array, crowd: NDArray[np.bool_], in_pixels: bool
) -> Array:
    """Return the rows of an image and class: of the class, then of its detections.

    found: (D, 5) = score and corners; truths: (T, 4) corners; crowd: (T,) those that are crowds,
    which match any number of detections, and whose matches do not count. Unless corners are
    `in_pixels` there is one size.
    """
    found = found[np.argsort(-found[:, 0], kind="stable")][:MOST]
    sizes = len(SIZES) if in_pixels else 1
    ignored = _outside(truths, sizes) | crowd  # (sizes, T)
    head = np.zeros((1, COLUMNS))
    head[0, :3] = label, 0, -1
    head[0, 3 : 3 + len(SIZES)] = -1  # not known
    head[0, 3 : 3 + sizes] = np.sum(~ignored, axis=1)
    rows = np.zeros((len(found), COLUMNS))
    rows[:, 0], rows[:, 1], rows[:, 2] = label, found[:, 0], np.arange(len(found))
    states = rows[:, 3:].reshape(len(found), len(SIZES), len(OVERLAPS))
    states[:, :sizes] = np.where(_outside(found[:, 1:], sizes).T, -1, 0)[..., None]
    states[:, sizes:] = -1
    free = np.ones((sizes, len(OVERLAPS), len(truths)), bool)
    counts = ~ignored[:, None]
    least = np.minimum(OVERLAPS, 1 - 1e-10)[:, None]
    for state, shares in zip(states, _shares(found[:, 1:], truths, crowd), strict=True):
        if not np.any(shares >= least[0]):
            continue
        fitting = np.where(free & (shares >= least), shares, -1)
        # a true box that counts comes before any that does not; of equal ones the last
        first = np.where(counts, fitting, -1)
        best = np.where(np.any(first >= 0, axis=2, keepdims=True), first, fitting)
        place = best.shape[2] - 1 - np.argmax(best[..., ::-1], axis=2)
        hit = np.take_along_axis(best, place[..., None], axis=2)[..., 0] >= 0
        size, overlap = np.nonzero(hit)
        taken = place[size, overlap]
        state[size, overlap] = np.where(ignored[size, taken], -1, 1)
        free[size, overlap, taken] = crowd[taken]
    return np.concatenate([head, rows])


def _outside(boxes: Array, sizes: int) -> NDArray[np.bool_]:
    """Return for each of the first sizes the boxes (R, 4) that do not have it."""
    area, edges = _areas(boxes), _EDGES[:sizes]
    return (area < edges[:, :1]) | (area > edges[:, 1:])


def _areas(boxes: Array) -> Array:
    sides = np.maximum(boxes[:, 2:] - boxes[:, :2], 0)
    product: Array = np.prod(sides, axis=1)
    return product


def _shares(boxes: Array, truths: Array, crowd: NDArray[np.bool_]) -> Array:
    """Return (D, T) the intersection over the union, of a crowd over the box alone."""
    low = np.maximum(boxes[:, None, :2], truths[None, :, :2])
    both = np.prod(np.maximum(np.minimum(boxes[:, None, 2:], truths[None, :, 2:]) - low, 0), axis=2)
    own, theirs = _areas(boxes), _areas(truths)
    whole = np.where(crowd, own[:, None], own[:, None] + theirs - both)
    shares: Array = np.divide(both, whole, out=np.zeros_like(both), where=whole > 0)
    return shares


def summarize(rows: Array) -> dict[str, float | None]:
    """Return COCO's figures of rows (R, COLUMNS), None for one without true boxes or sizes: AP, the
    mean over overlaps and classes, at overlaps 0.5 and 0.75, and of small, medium and large boxes;
    AR, the largest recall with 1, 10 and 100 detections of an image, and of the three sizes.
    """
    heads, found = rows[rows[:, 2] < 0], rows[rows[:, 2] >= 0]
    precisions: dict[str, list[Array]] = {size: [] for size in SIZES}
    recalls: dict[tuple[str, int], list[Array]] = {}
    for label in np.unique(heads[:, 0]):
        own = found[found[:, 0] == label]
        own = own[np.argsort(-own[:, 1], kind="stable")]
        states = own[:, 3:].reshape(len(own), len(SIZES), len(OVERLAPS))
        for k, size in enumerate(SIZES):
            count = np.sum(heads[heads[:, 0] == label, 3 + k])
            if count <= 0:
                continue
            precisions[size].append(_precision(states[:, k], count))
            for most in (1, 10, MOST) if size == "all" else (MOST,):
                hits = np.sum(states[own[:, 2] < most, k] == 1, axis=0)
                recalls.setdefault((size, most), []).append(hits / count)

    def mean(values: list[Array] | None, overlap: int | None = None) -> float | None:
        if not values:
            return None
        array = np.array(values) if overlap is None else np.array(values)[:, overlap]
        return float(np.mean(array))

    every = precisions["all"]
    return {
        "AP": mean(every),
        "AP50": mean(every, 0),
        "AP75": mean(every, 5),
        **{f"AP_{size}": mean(precisions[size]) for size in list(SIZES)[1:]},
        **{f"AR_{most}": mean(recalls.get(("all", most))) for most in (1, 10, MOST)},
        **{f"AR_{size}": mean(recalls.get((size, MOST))) for size in list(SIZES)[1:]},
    }


def _precision(states: Array, count: float) -> Array:
    """Return (overlaps, recalls) the best precision at each recall or more."""
    result = np.zeros((len(OVERLAPS), len(RECALLS)))
    for k in range(len(OVERLAPS) if len(states) else 0):
        counted = states[states[:, k] >= 0, k]
        hits = np.cumsum(counted)
        precision = hits / np.arange(1, len(hits) + 1)
        best = np.maximum.accumulate(precision[::-1])[::-1]
        places = np.searchsorted(hits / count, RECALLS, side="left")
        result[k] = np.append(best, 0)[places]
    return result
