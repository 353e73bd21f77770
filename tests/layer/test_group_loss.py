"""Cascade R-CNN's loss and accuracy of proposals against loops that follow its rules."""

from math import exp, log, sqrt

import numpy as np
import pytest

from caffepy.core.errors import ConfigError, DataError

from .harness import Single, random, seeded
from .test_field_loss import MEAN, STD, UNITS, iou

FIELDS = [(40, 32), (20, 24)]
STRIDE = 8
SIZES = "field_w: 40 field_h: 32 field_w: 20 field_h: 24 stride: 8"
N, H, W = 2, 4, 5


def given(classes=3, ignored=None, seed=0):
    """Scores, deltas and labels, with boxes at some places."""
    rng = seeded(seed)
    scores, deltas = random(N * 2, classes, H, W, seed=1), 0.4 * random(N * 2, 4, H, W, seed=2)
    labels = np.zeros((N * 2, 6, H, W))
    labels[:, 5] = rng.uniform(0, 0.8, (N * 2, H, W))
    for i, y, x in np.ndindex(N * 2, H, W):
        if rng.random() < 0.2:
            labels[i, 0, y, x] = rng.integers(1, classes)
            labels[i, 1:3, y, x] = (x + rng.random()) * STRIDE, (y + rng.random()) * STRIDE
            labels[i, 3:5, y, x] = rng.uniform(1, 60, 2)
    if ignored:
        labels[:, 0, 1, 1] = ignored
    return scores, deltas, labels


def group_loss(settings, classes=3, units=UNITS):
    return (
        f'type: "DetectionGroupLoss" {units} detection_group_loss_param {{ cls_num: {classes} '
        f"{SIZES} bg_threshold: 0.45 {settings} }}"
    )


def target(labels, i, y, x):
    width, height = FIELDS[i % 2]
    box = labels[i, 1:5, y, x]
    deltas = (
        (box[0] - (x + 0.5) * STRIDE) / width,
        (box[1] - (y + 0.5) * STRIDE) / height,
        log(max(box[2], 2) / width),
        log(max(box[3], 2) / height),
    )
    return [(d - m) / s for d, m, s in zip(deltas, MEAN, STD, strict=True)]


def probability(scores, label, i, y, x):
    own = [exp(s) for s in scores[i, :, y, x]]
    return own[label] / sum(own)


def loss(bottoms, chosen, *, weight=1.0, smooth=True, multiple=None, bounds=None, ignored=None):
    """Class and box loss of the chosen places; `multiple` is bg_multiple of weighted classes."""
    scores, deltas, labels = bottoms
    true = [p for p in chosen if labels[p[0], 0, p[1], p[2]] > 0]
    of_class, of_box, count, numbers = 0, 0, 0, 0
    for i, y, x in chosen:
        label = int(labels[i, 0, y, x])
        if label == ignored:
            continue
        share = 1.0
        if multiple is not None:
            part, own = (1 / (1 + multiple), len(true)) if label else (
                1 - 1 / (1 + multiple), len(chosen) - len(true))  # fmt: skip
            share = part * len(chosen) / own
        of_class -= share * log(probability(scores, label, i, y, x))
        count += 1
        if not label:
            continue
        for k, wanted in enumerate(target(labels, i, y, x)):
            numbers += 1
            delta = deltas[i, k, y, x]
            if bounds:
                most = [1 / bounds[0], log(bounds[1])][k // 2]
                mean = sum(MEAN[k // 2 * 2 :][:2]) / 2
                std = sqrt(np.prod(STD[k // 2 * 2 :][:2]))
                delta = min(max(delta, (-most - mean) / std), (most - mean) / std)
            d = delta - wanted
            of_box += d * d / 2 if abs(d) < 1 or not smooth else abs(d) - 0.5
    of_box = weight * of_box / max(1, numbers)
    return [of_class / max(1, count) + of_box, of_box]


def places(labels, image):
    """The true boxes and the backgrounds of an image, field by field."""
    true, others = [], []
    for g, y, x in np.ndindex(2, H, W):
        i = image * 2 + g
        if labels[i, 0, y, x] > 0:
            true.append((i, y, x))
        elif labels[i, 5, y, x] < 0.45:
            others.append((i, y, x))
    return true, others


def hardest(bottoms, count, by_label=True):
    """True boxes and the backgrounds that are most wrong."""
    scores, _, labels = bottoms
    chosen = []
    for image in range(N):
        true, others = places(labels, image)
        worst = sorted(others, key=lambda p: probability(scores, 0, *p))
        chosen += true + worst[: min(count(len(true)), len(others))]
    return chosen


CASES = {
    "by boxes": (
        "bg_multiple: 1 min_num_neg: 5",
        {},
        lambda true: max(true, 5),
    ),
    "few": ("bg_multiple: 0 min_num_neg: 3 lambda: 0.5", {"weight": 0.5}, lambda true: 3),
    "squares": (
        'bbox_loss_type: "Euclidean_L2" neg_ranking_type: "conf_prob" bg_multiple: 2',
        {"smooth": False},
        lambda true: max(2 * true, 5),
    ),
    "weighted": (
        "pos_neg_weighted: true bg_multiple: 1",
        {"multiple": 1},
        lambda true: max(true, 5),
    ),
    "bounded": (
        "field_xyr: 3 field_whr: 2 bg_multiple: 1",
        {"bounds": (3, 2)},
        lambda true: max(true, 5),
    ),
    "all": ("bg_multiple: 99", {}, lambda true: 99),
}


@pytest.mark.parametrize("case", CASES)
def test_detection_group_loss(case):
    settings, known, count = CASES[case]
    bottoms = given()
    single = Single(group_loss(f'neg_mining_type: "bootstrap" {settings}'), *bottoms)
    (top,) = single.forward()
    want = loss(bottoms, hardest(bottoms, count), **known)
    np.testing.assert_allclose(top.ravel(), want, rtol=1e-6)


def test_an_ignored_class_is_not_learned():
    bottoms = given(ignored=2)
    text = "loss_param { ignore_label: 2 } " + group_loss('neg_mining_type: "bootstrap"')
    (top,) = Single(text, *bottoms).forward()
    chosen = hardest(bottoms, lambda true: max(4 * true, 5))
    np.testing.assert_allclose(top.ravel(), loss(bottoms, chosen, ignored=2), rtol=1e-6)


@pytest.mark.parametrize("mode", ["random", "bootstrap", "mixture"])
@pytest.mark.parametrize("size", [4, 12])
def test_samples_of_a_batch(mode, size):
    """A gradient tells what was chosen; half of a mixture are the hardest."""
    bottoms = given()
    settings = f'neg_mining_type: "{mode}" batch_size: {size} bg_multiple: 1'
    single = Single(group_loss(settings), *bottoms)
    (top,) = single.forward()
    (of_scores, of_deltas, _), _ = single.backward([1], [True, True, False])
    chosen = [tuple(map(int, p)) for p in np.argwhere(np.abs(of_scores).sum(axis=1) > 0)]
    np.testing.assert_allclose(top.ravel(), loss(bottoms, chosen), rtol=1e-6)
    assert np.argwhere(np.abs(of_deltas).sum(axis=1) > 0).tolist() == [
        list(p) for p in chosen if bottoms[2][p[0], 0, p[1], p[2]] > 0
    ]
    hard = {"random": 0, "bootstrap": 1, "mixture": 0.5}[mode]
    for image in range(N):
        true, others = places(bottoms[2], image)
        own = [p for p in chosen if p[0] // 2 == image]
        taken = min(size // 2, len(true))
        assert sum(p in true for p in own) == taken
        left = min(size - taken, len(others))
        assert sum(p in others for p in own) == left
        worst = sorted(others, key=lambda p: probability(bottoms[0], 0, *p))
        assert set(worst[: int(hard * left + 0.5)]) <= set(own)


@pytest.mark.parametrize("case", ["by boxes", "squares", "weighted"])
def test_gradient(case):
    """DetectionGroupLoss, within its bounds, of the first element of its top."""
    text = group_loss(f'neg_mining_type: "bootstrap" {CASES[case][0]}')
    bottoms = given()
    single = Single(text, *bottoms)
    single.forward()
    (of_scores, of_deltas, _), _ = single.backward([np.array([[[[1.5, 9]]]])], [True, True, False])
    step = 1e-6
    for k, gradient in ((0, of_scores), (1, of_deltas)):
        for index in [(0, 0, 0, 0), *map(tuple, np.argwhere(gradient)[::7])]:
            found = []
            for sign in (1, -1):
                single.inputs[k][index] += sign * step
                found.append(single.forward()[0].ravel()[0])
                single.inputs[k][index] -= sign * step
            numeric = 1.5 * (found[0] - found[1]) / (2 * step)
            np.testing.assert_allclose(gradient[index], numeric, atol=1e-6)


def test_the_gradient_of_a_bounded_delta_is_that_of_the_bound():
    bottoms = given()
    bottoms[1][:] = 9  # DetectionGroupLoss: as in the fork, though the loss does not move
    text = group_loss("field_xyr: 3 field_whr: 2 bg_multiple: 0")
    single = Single(text, *bottoms)
    before = single.forward()[0].ravel()[1]
    (_, of_deltas, _), _ = single.backward([1], [True, True, False])
    assert np.abs(of_deltas).max() > 0
    single.inputs[1][:] = 8
    assert single.forward()[0].ravel()[1] == before


def test_detection_group_accuracy():
    scores, deltas, labels = given(ignored=2)
    for ignored in (None, 2):
        loss_param = "" if ignored is None else f"loss_param {{ ignore_label: {ignored} }}"
        text = (
            f'type: "DetectionGroupAccuracy" {loss_param} {UNITS} detection_group_accuracy_param '
            f"{{ cls_num: 3 {SIZES} bg_threshold: 0.45 field_xyr: 3 field_whr: 2 }}"
        )
        shares, mean = Single(text, scores, deltas, labels, tops=2).forward()
        hits, boxes, overlaps = [], [], []
        for i, y, x in np.ndindex(N * 2, H, W):
            label = int(labels[i, 0, y, x])
            if label == ignored or (label == 0 and labels[i, 5, y, x] >= 0.45):
                continue
            hits.append(scores[i, :, y, x].argmax() == label)
            if not label:
                continue
            boxes.append(hits[-1])
            width, height = FIELDS[i % 2]
            d = deltas[i, :, y, x] * STD + MEAN
            d = np.clip(d, [-1 / 3] * 2 + [-log(2)] * 2, [1 / 3] * 2 + [log(2)] * 2)
            w, h = width * exp(d[2]), height * exp(d[3])
            left, up = d[0] * width + (x + 0.5) * STRIDE - w / 2, d[1] * height + (y + 0.5) * STRIDE - h / 2  # fmt: skip
            tx, ty, tw, th = labels[i, 1:5, y, x]
            overlaps.append(iou((left, up, w, h), (tx - tw / 2, ty - th / 2, tw, th)))
        np.testing.assert_allclose(shares.ravel(), [np.mean(hits), np.mean(boxes)])
        np.testing.assert_allclose(mean.ravel(), [np.mean(overlaps)], rtol=1e-5)


def test_nothing_to_learn_from():
    scores, deltas, labels = given()
    labels[:, 0], labels[:, 5] = 0, 1
    text = 'type: "DetectionGroupAccuracy" detection_group_accuracy_param { cls_num: 3 ' + SIZES
    shares, mean = Single(text + " }", scores, deltas, labels, tops=2).forward()
    assert [*shares.ravel(), *mean.ravel()] == [-1, -1, -1]
    single = Single(group_loss(""), scores, deltas, labels)
    assert (single.forward()[0] == 0).all()
    (of_scores, of_deltas, _), _ = single.backward([1], [True, True, False])
    assert not of_scores.any()
    assert not of_deltas.any()


REFUSED = {
    "as many field_w as field_h": group_loss("field_w: 3"),
    "a cls_num and a stride": group_loss("").replace("stride: 8", ""),
    "field_whr and field_xyr": group_loss("field_xyr: -1"),
    "objectness is of 2 classes": group_loss("objectness: true"),
    'neg_mining_type is random or bootstrap or mixture, not "all"': group_loss('neg_mining_type: "all"'),
    "batch_size must be 1 or more, or -1": group_loss("batch_size: 0"),
    "needs scores (N * 2, 4, H, W)": group_loss("", classes=4),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message):
    with pytest.raises(ConfigError) as error:
        Single(REFUSED[message], *given())
    assert message in str(error.value)


def test_a_label_of_no_class():
    scores, deltas, labels = given()
    labels[0, 0, 0, 0] = 3
    with pytest.raises(DataError, match="label 3 is none of 3 classes"):
        Single(group_loss(""), scores, deltas, labels).forward()
