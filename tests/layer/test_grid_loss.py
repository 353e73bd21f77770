"""The loss of the first YOLO, a DetectionLoss with the settings of YOLO for Caffe."""

import logging
from math import sqrt

import numpy as np
import pytest

from caffepy.core.errors import ConfigError, DataError

from .harness import Single, random, seeded

SETTINGS = {
    "plain": {"sqrt": "false", "constriant": "false"},
    "roots": {"sqrt": "true", "constriant": "false"},
    "in cells": {"sqrt": "true", "constriant": "true"},
}
SIDE, CLASSES, BOXES = 3, 4, 2
SCALES = {"object": 1.5, "noobject": 0.25, "class": 2, "coord": 3}
CELLS = SIDE * SIDE


def text(case):
    scales = " ".join(f"{name}_scale: {value}" for name, value in SCALES.items())
    flags = " ".join(f"{name}: {value}" for name, value in SETTINGS[case].items())
    sizes = f"side: {SIDE} num_class: {CLASSES} num_object: {BOXES}"
    return f'type: "DetectionLoss" detection_loss_param {{ {sizes} {scales} {flags} }}'


def data():
    """Predictions around true boxes; of the last one no box is near, nor of the one before."""
    rng = seeded(3)
    x = rng.uniform(0.1, 0.9, (2, CLASSES + 5 * BOXES, CELLS))
    labels = np.zeros((2, 7 * CELLS))
    for n, cell, k in ((0, 0, 1), (0, 5, 3), (1, 8, 0), (1, 2, 2)):
        labels[n, CELLS + cell] = 1
        labels[n, 2 * CELLS + cell] = k
        labels[n, 3 * CELLS + 4 * cell : 3 * CELLS + 4 * cell + 4] = rng.uniform(0.2, 0.6, 4)
    x[1, CLASSES + BOXES :: 4, 2] = 5, 4  # x of the boxes: far to the right
    return x, labels


def loop(x, labels, case):
    """Return the loss and the gradient, cell by cell and box by box."""
    roots, inside = (SETTINGS[case][name] == "true" for name in ("sqrt", "constriant"))
    loss = {"class": 0.0, "object": 0.0, "coord": 0.0, "noobject": 0.0}
    gradient, found = np.zeros_like(x), 0
    for n, cell in np.ndindex(len(x), CELLS):
        learns = None
        if labels[n, CELLS + cell]:
            found += 1
            row, column = divmod(cell, SIDE)
            truth = labels[n, 3 * CELLS + 4 * cell :][:4]
            rated = []
            for b in range(BOXES):
                cx, cy, w, h = x[n, CLASSES + BOXES + 4 * b :, cell][:4]
                if inside:
                    cx, cy = (column + cx) / SIDE, (row + cy) / SIDE
                if roots:
                    w, h = w * w, h * h
                box, common = (cx, cy, w, h), 1.0
                for at, size in ((0, 2), (1, 3)):
                    right = min(a[at] + a[size] / 2 for a in (box, truth))
                    left = max(a[at] - a[size] / 2 for a in (box, truth))
                    common *= max(0.0, right - left)
                overlap = common / (w * h + truth[2] * truth[3] - common)
                distance = sqrt(sum((p - q) ** 2 for p, q in zip(box, truth, strict=True)))
                rated.append((overlap, -distance, -b))
            overlap, _, learns = max(rated)
            learns = -learns
            k = int(labels[n, 2 * CELLS + cell])
            for c in range(CLASSES):
                error = x[n, c, cell] - (c == k)
                loss["class"] += error**2
                gradient[n, c, cell] = SCALES["class"] * error
            own = x[n, CLASSES + learns, cell]
            loss["object"] += (own - 1) ** 2
            gradient[n, CLASSES + learns, cell] = SCALES["object"] * (own - overlap)
            wanted = list(truth)
            if inside:
                wanted[:2] = truth[0] * SIDE - column, truth[1] * SIDE - row
            if roots:
                wanted[2:] = sqrt(truth[2]), sqrt(truth[3])
            for i in range(4):
                channel = CLASSES + BOXES + 4 * learns + i
                error = x[n, channel, cell] - wanted[i]
                loss["coord"] += error**2
                gradient[n, channel, cell] = SCALES["coord"] * error
        for b in range(BOXES):
            if b != learns:
                loss["noobject"] += x[n, CLASSES + b, cell] ** 2
                gradient[n, CLASSES + b, cell] = SCALES["noobject"] * x[n, CLASSES + b, cell]
    counts = dict.fromkeys(loss, found) | {"noobject": len(x) * CELLS * BOXES - found}
    return sum(SCALES[name] * loss[name] / counts[name] for name in loss), gradient / len(x)


@pytest.mark.parametrize("case", SETTINGS)
def test_against_a_loop(case):
    x, labels = data()
    single = Single(text(case), x.reshape(2, -1), labels)
    loss, gradient = loop(x, labels, case)
    np.testing.assert_allclose(single.forward()[0], loss, rtol=1e-12)
    ((dx, _), _) = single.backward([0.5], [True, False])
    np.testing.assert_allclose(dx.reshape(x.shape), gradient / 2, rtol=1e-9, atol=1e-12)


def test_images_without_boxes():
    x = random(2, (CLASSES + 5 * BOXES) * CELLS)
    single = Single(text("plain"), x, np.zeros((2, 7 * CELLS)))
    objects = x.reshape(2, -1, CELLS)[:, CLASSES : CLASSES + BOXES]
    np.testing.assert_allclose(single.forward()[0], SCALES["noobject"] * (objects**2).mean())


def test_the_log_tells_of_the_gradient(caplog):
    caplog.set_level(logging.INFO, "caffepy")
    x, labels = data()
    Single(text("plain"), x.reshape(2, -1), labels)
    assert "its gradient is half of the derivative" in caplog.text


def test_no_images():
    single = Single(text("in cells"), random(0, (CLASSES + 5 * BOXES) * CELLS), random(0, 63))
    assert single.forward()[0] == 0
    ((dx, _), _) = single.backward([1.0], [True, False])
    assert dx.shape == (0, 126)


def test_what_does_not_fit():
    with pytest.raises(ConfigError, match="need 126 predictions an item, not 1"):
        Single(text("plain"), np.zeros(()), np.zeros(()))
    x, labels = data()
    with pytest.raises(ConfigError, match="3 x 3 cells need 126 predictions an item, not 108"):
        Single(text("plain"), x[:, 2:].reshape(2, -1), labels)
    with pytest.raises(ConfigError, match="need 63 labels an item, not 62"):
        Single(text("plain"), x.reshape(2, -1), labels[:, 1:])
    with pytest.raises(ConfigError, match="num_class and num_object must be 1 or more"):
        Single(text("plain").replace("side: 3", "side: 0"), x.reshape(2, -1), labels)
    labels[0, 2 * CELLS] = CLASSES
    with pytest.raises(DataError, match="label 4 is not one of the 4 classes 0 to 3"):
        Single(text("plain"), x.reshape(2, -1), labels).forward()
