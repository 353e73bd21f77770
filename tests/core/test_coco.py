"""COCO's figures against its rules followed one after the other, detection by detection."""

import numpy as np
import pytest

from caffepy.core import coco
from caffepy.core.average_precision import mean_average_precision

SIZES = {"all": (0, 1e10), "small": (0, 1024), "medium": (1024, 9216), "large": (9216, 1e10)}
LABELS = 1, 2, 3


def overlap(box, truth, crowd):
    width = min(box[2], truth[2]) - max(box[0], truth[0])
    height = min(box[3], truth[3]) - max(box[1], truth[1])
    both = max(width, 0) * max(height, 0)
    own = (box[2] - box[0]) * (box[3] - box[1])
    whole = own if crowd else own + (truth[2] - truth[0]) * (truth[3] - truth[1]) - both
    return both / whole if whole > 0 else 0.0


def judged(found, truths, size, limit, most):
    """(score, true, counted) of the detections of an image and class, and the truths that count."""
    low, high = SIZES[size]

    def outside(box):
        return not low <= (box[2] - box[0]) * (box[3] - box[1]) <= high

    ordered = sorted(truths, key=lambda t: t[4] or outside(t))
    ignored = [bool(t[4]) or outside(t) for t in ordered]
    taken, rows = [False] * len(ordered), []
    for score, *box in sorted(found, key=lambda f: -f[0])[:most]:
        best, match = min(limit, 1 - 1e-10), None
        for i, truth in enumerate(ordered):
            if taken[i] and not truth[4]:
                continue
            if match is not None and not ignored[match] and ignored[i]:
                break
            share = overlap(box, truth, truth[4])
            if share < best:
                continue
            best, match = share, i
        if match is None:
            rows.append((score, False, not outside(box)))
        else:
            taken[match] = True
            rows.append((score, not ignored[match], not ignored[match]))
    return rows, ignored.count(False)


def figures(images, size, limits, most):
    """Mean average precision and recall over classes and overlaps, or None."""
    precisions, recalls = [], []
    for label in LABELS:
        for limit in limits:
            rows, total = [], 0
            for found, truths in images:
                own = [f[1:] for f in found if f[0] == label]
                known = [t[1:] for t in truths if t[0] == label]
                more, count = judged(own, known, size, limit, most)
                rows, total = rows + more, total + count
            if not total:
                continue
            true = false = 0
            curve = []
            for _, hit, counted in sorted(rows, key=lambda row: -row[0]):
                true, false = true + (hit and counted), false + (counted and not hit)
                curve.append((true / total, true / max(true + false, 1)))
            recalls.append(true / total)
            levels = np.linspace(0, 1, 101)
            precisions.append(
                np.mean([max([p for r, p in curve if r >= level], default=0) for level in levels])
            )
    return (np.mean(precisions), np.mean(recalls)) if precisions else (None, None)


def some_images(seed, count=6, pixels=400):
    rng = np.random.default_rng(seed)

    def box():
        size = rng.choice([20, 60, 150]) * rng.uniform(0.7, 1.4, 2)
        corner = rng.uniform(0, pixels - size)
        return np.concatenate([corner, corner + size])

    images = []
    for _ in range(count):
        truths = [
            [int(rng.choice([1, 1, 2])), *box(), rng.random() < 0.2] for _ in range(rng.integers(9))
        ]
        near = [
            [t[0], round(rng.random(), 1), *(np.array(t[1:5]) + rng.normal(0, 6, 4))]
            for t in truths
            for _ in range(rng.integers(4))
        ]
        far = [[int(rng.choice(LABELS)), round(rng.random(), 1), *box()] for _ in range(12)]
        images.append((near + far, truths))
    return images


def rows_of(images, in_pixels=True):
    rows = []
    for found, truths in images:
        for label in LABELS:
            own = np.reshape([f[1:] for f in found if f[0] == label], (-1, 5))
            known = np.reshape([t[1:] for t in truths if t[0] == label], (-1, 5))
            crowd = known[:, 4] > 0
            rows.append(coco.match(label, own, known[:, :4], crowd, in_pixels))
    return np.concatenate(rows)


@pytest.mark.parametrize("seed", range(6))
def test_figures_are_those_of_the_rules(seed):
    images = some_images(seed)
    limits = list(np.linspace(0.5, 0.95, 10))
    got = coco.summarize(rows_of(images))
    want = {"AP": figures(images, "all", limits, 100)[0]}
    want["AP50"] = figures(images, "all", limits[:1], 100)[0]
    want["AP75"] = figures(images, "all", limits[5:6], 100)[0]
    for size in ("small", "medium", "large"):
        want[f"AP_{size}"], want[f"AR_{size}"] = figures(images, size, limits, 100)
    for most in (1, 10, 100):
        want[f"AR_{most}"] = figures(images, "all", limits, most)[1]
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name] == pytest.approx(value, abs=1e-12), name
    assert 0.01 < got["AP"] < 0.95


def test_a_hundred_detections_of_an_image_and_class_count():
    truth = [1, 0, 0, 100, 100, False]
    worse = [[1, 0.9 - k / 1000, 300, 300, 350, 350] for k in range(100)]
    images = [([*worse, [1, 0.1, 0, 0, 100, 100]], [truth])]
    assert coco.summarize(rows_of(images))["AP"] == 0
    images = [([*worse[:99], [1, 0.1, 0, 0, 100, 100]], [truth])]
    got = coco.summarize(rows_of(images))
    assert got["AP"] == pytest.approx(0.01)
    assert (got["AR_10"], got["AR_100"]) == (0, 1)


def test_without_sizes_and_without_boxes():
    images = some_images(1)
    known, unknown = (coco.summarize(rows_of(images, pixels)) for pixels in (True, False))
    for name, value in unknown.items():
        of_size = name.endswith(("small", "medium", "large"))
        assert value is None if of_size else value == known[name]
    assert set(coco.summarize(np.zeros((0, coco.COLUMNS))).values()) == {None}
    assert mean_average_precision(np.zeros((0, coco.COLUMNS)), "COCO") == 0
    assert mean_average_precision(rows_of(images), "COCO") == known["AP"]


@pytest.mark.parametrize(("side", "sizes"), [(32, [1, 1, 1, 0]), (96, [1, 0, 1, 1])])
def test_a_true_box_whose_area_is_an_edge_has_both_sizes(side, sizes):
    box = np.array([[0.0, 0, side, side]])
    found = np.array([[0.9, 0, 0, side, side]])
    head, _ = coco.match(1, found, box, np.zeros(1, bool), in_pixels=True)
    assert head[3:7].tolist() == sizes
