"""MS-CNN's losses, accuracies and choice of regions against loops that follow its rules."""

from math import exp, log, sqrt

import numpy as np
import pytest

from caffepy.core.errors import ConfigError, DataError

from .harness import Single, random, seeded

UNITS = (
    "bbox_reg_param { bbox_mean: 0.1 bbox_mean: 0 bbox_mean: -0.1 bbox_mean: 0.05 "
    "bbox_std: 0.5 bbox_std: 0.4 bbox_std: 0.3 bbox_std: 0.2 }"
)
MEAN, STD = (0.1, 0, -0.1, 0.05), (0.5, 0.4, 0.3, 0.2)
FIELD, RATE = (40, 32), 8
SIZES = "field_w: 40 field_h: 32 downsample_rate: 8"


def iou(a, b):
    """Boxes x, y, w, h."""
    wide = min(a[0] + a[2], b[0] + b[2]) - max(a[0], b[0])
    high = min(a[1] + a[3], b[1] + b[3]) - max(a[1], b[1])
    if min(*a[2:], *b[2:], wide, high) <= 0:
        return 0
    return wide * high / (a[2] * a[3] + b[2] * b[3] - wide * high)


def maps_and_labels(classes=3, ignored=None, n=2, height=4, width=5, seed=0):
    """Maps of scores and deltas, and labels with boxes at some places."""
    rng = seeded(seed)
    maps = 2 * random(n, classes + 4, height, width, seed=seed + 1)
    labels = np.zeros((n, 6, height, width))
    labels[:, 5] = rng.uniform(0, 0.8, (n, height, width))
    for i, y, x in np.ndindex(n, height, width):
        if rng.random() < 0.25:
            labels[i, 0, y, x] = rng.integers(1, classes)
            labels[i, 1:3, y, x] = (x + rng.random()) * RATE, (y + rng.random()) * RATE
            labels[i, 3:5, y, x] = rng.uniform(1, 60, 2)
    if ignored:
        labels[:, 0, 1, 1] = ignored
    return maps, labels


def target(labels, i, y, x):
    box = labels[i, 1:5, y, x]
    deltas = (
        (box[0] - (x + 0.5) * RATE) / FIELD[0],
        (box[1] - (y + 0.5) * RATE) / FIELD[1],
        log(max(box[2], 2) / FIELD[0]),
        log(max(box[3], 2) / FIELD[1]),
    )
    return [(d - m) / s for d, m, s in zip(deltas, MEAN, STD, strict=True)]


def hardest(maps, labels, classes, multiple, threshold, share, objectness=False):
    """The backgrounds most like each class, as (image, y, x)."""
    chosen = set()
    _, _, height, width = maps.shape
    for i in range(len(maps)):
        for k in range(1, classes):
            found, count = [], 0
            for y, x in np.ndindex(height, width):
                label = int(labels[i, 0, y, x])
                count += (min(label, 1) if objectness else label) == k
                if label == 0 and labels[i, 5, y, x] < threshold:
                    found.append((maps[i, k, y, x], y * width + x, (i, y, x)))
            most = max(4, int(count * multiple * share))
            chosen |= {place for *_, place in sorted(found, reverse=True)[:most]}
    return chosen


def losses(maps, labels, chosen, classes, *, weight=1.0, smooth=True, iou_weighted=False,
           multiple=None, ignored=None, objectness=False):  # fmt: skip
    """Class and box loss; `multiple` is bg_multiple of weighted classes."""
    n, _, height, width = maps.shape
    weights = {}
    places = list(np.ndindex(n, height, width))
    for i, y, x in places:
        weights[i, y, x] = labels[i, 5, y, x] if iou_weighted and labels[i, 0, y, x] else 1
    if multiple is not None:
        boxes = [p for p in places if labels[p[0], 0, p[1], p[2]]]
        total, count = sum(weights[p] for p in boxes), len(boxes) + len(chosen)
        others = sum(weights[p] for p in chosen)
        for p in places:
            share = 1 / (1 + multiple)
            if p in boxes:
                weights[p] *= share * count / total
            elif p in chosen:
                weights[p] *= (1 - share) * count / others
    low = [(-1 / 3 - 0.05) / sqrt(0.5 * 0.4)] * 2 + [(-log(2) + 0.025) / sqrt(0.3 * 0.2)] * 2
    high = [(1 / 3 - 0.05) / sqrt(0.5 * 0.4)] * 2 + [(log(2) + 0.025) / sqrt(0.3 * 0.2)] * 2
    of_class, of_box, count, deltas = 0, 0, 0, 0
    for i, y, x in places:
        raw = int(labels[i, 0, y, x])
        label = min(raw, 1) if objectness else raw
        if label != ignored and (label or (i, y, x) in chosen):
            scores = maps[i, :classes, y, x]
            p = exp(scores[label]) / sum(exp(s) for s in scores)
            of_class -= log(p) * weights[i, y, x]
            count += 1
        if raw in (0, ignored):
            continue
        deltas += 4
        for k, wanted in enumerate(target(labels, i, y, x)):
            d = min(max(maps[i, classes + k, y, x], low[k]), high[k]) - wanted
            of_box += d * d / 2 if abs(d) < 1 or not smooth else abs(d) - 0.5
    of_box = weight * of_box / max(1, deltas)
    return [of_class / max(1, count) + of_box, of_box]


MODES = {
    "bootstrap": ('sample_mode: "bootstrap"', {}, 1.0),
    "all": ('sample_mode: "all" lambda: 0.5 bb_smooth: false', {"weight": 0.5, "smooth": False}, 0),
    "overlaps": ('sample_mode: "bootstrap" iou_weighted: true', {"iou_weighted": True}, 1.0),
    "weighted": (
        'sample_mode: "bootstrap" iou_weighted: true pos_neg_weighted: true',
        {"iou_weighted": True, "multiple": 2},
        1.0,
    ),
    "ignored": ('sample_mode: "bootstrap"', {"ignored": 7}, 1.0),
}


def detection_loss(settings, classes=3, loss=""):
    return (
        f'type: "DetectionLoss" {UNITS} {loss} detection_loss_param {{ cls_num: {classes} {SIZES} '
        f"field_xyr: 3 field_whr: 2 bg_threshold: 0.4 bg_multiple: 2 {settings} }}"
    )


@pytest.mark.parametrize("mode", MODES)
def test_detection_loss(mode):
    settings, known, share = MODES[mode]
    maps, labels = maps_and_labels(ignored=known.get("ignored"))
    loss = "loss_param { ignore_label: 7 }" if "ignored" in known else ""
    chosen = (
        hardest(maps, labels, 3, 2, 0.4, share)
        if share
        else {
            (i, y, x)
            for i, y, x in np.ndindex(2, 4, 5)
            if not labels[i, 0, y, x] and labels[i, 5, y, x] < 0.4
        }
    )
    single = Single(detection_loss(settings, loss=loss), maps, labels)
    (found,) = single.forward()
    assert found.shape == (1, 1, 1, 2)
    np.testing.assert_allclose(found.ravel(), losses(maps, labels, chosen, 3, **known), rtol=2e-6)


def test_objectness_takes_all_classes_as_one():
    maps, labels = maps_and_labels(classes=2)
    labels[:, 0][labels[:, 0] == 1] = 3
    chosen = hardest(maps, labels, 2, 2, 0.4, 1.0, objectness=True)
    text = detection_loss('sample_mode: "bootstrap" objectness: true', classes=2)
    (found,) = Single(text, maps, labels).forward()
    wanted = losses(maps, labels, chosen, 2, objectness=True)
    np.testing.assert_allclose(found.ravel(), wanted, rtol=2e-6)


@pytest.mark.parametrize("mode", ["random", "mixture"])
def test_backgrounds_are_drawn(mode):
    maps, labels = maps_and_labels(height=20, width=20)
    layer = Single(detection_loss(f'sample_mode: "{mode}"'), maps, labels).layer
    found, background = labels[:, 0].astype(int).reshape(2, -1), labels[:, 0] == 0
    may = (background & (labels[:, 5] < 0.4)).reshape(2, -1)
    scores = maps[:, :3].reshape(2, 3, -1)
    chosen = [layer.sampled(scores, found, may) for _ in range(20)]
    assert all((one <= may).all() for one in chosen)
    assert (chosen[0] != chosen[1]).any()
    share = 0.5 if mode == "mixture" else 1.0
    hard = np.zeros(may.shape, bool)
    if mode == "mixture":
        for i, y, x in hardest(maps, labels, 3, 2, 0.4, share):
            hard[i, y * 20 + x] = True
        assert all((hard <= one).all() for one in chosen)
    for i in range(2):
        draws = int((found[i] > 0).sum() * 2 * share)
        # each place that may be is missed by all draws with this chance
        missed = (1 - 1 / 400) ** draws
        wanted = hard[i].sum() + (may[i] & ~hard[i]).sum() * (1 - missed)
        assert abs(np.mean([one[i].sum() for one in chosen]) - wanted) < 5


@pytest.mark.parametrize("settings", ['sample_mode: "all"', 'sample_mode: "all" bb_smooth: false'])
def test_detection_loss_gradient(settings):
    maps, labels = maps_and_labels()
    maps[:, 3:] = 0.3 * maps[:, 3:]  # within the bounds, beyond which the gradient is no derivative
    text = detection_loss(settings)
    single = Single(text, maps, labels)
    single.forward()
    (ours, _), _ = single.backward([np.array([2.0, 5.0]).reshape(1, 1, 1, 2)], [True, False])
    step = 1e-6
    for place in [(0, 0, 1, 2), (1, 2, 0, 3), (0, 4, 2, 2), (1, 6, 3, 4), *np.ndindex(1, 7, 2, 2)]:
        values = []
        for sign in (-1, 1):
            moved = maps.copy()
            moved[place] += sign * step
            values.append(Single(text, moved, labels).forward()[0].ravel()[0])
        assert abs(ours[place] - 2 * (values[1] - values[0]) / (2 * step)) < 1e-5


def test_predictions_beyond_the_bounds_have_the_gradient_of_the_bounds():
    maps, labels = maps_and_labels()
    maps[:, 3:] = 50
    single = Single(detection_loss('sample_mode: "all" bb_smooth: false'), maps, labels)
    single.forward()
    (ours, _), _ = single.backward(None, [True, False])
    count = 4 * (labels[:, 0] > 0).sum()
    high = (log(2) + 0.025) / sqrt(0.3 * 0.2)
    for i, y, x in zip(*np.nonzero(labels[:, 0]), strict=True):
        wanted = (high - target(labels, i, y, x)[3]) / count
        np.testing.assert_allclose(ours[i, 6, y, x], wanted, rtol=1e-5)


@pytest.mark.parametrize("top_k", [1, 2])
def test_detection_accuracy(top_k):
    maps, labels = maps_and_labels(height=6, width=6, ignored=7)
    maps[0, :3, 0, 0] = 1  # equal scores
    right = every = right_boxes = boxes = 0
    shared = []
    for i, y, x in np.ndindex(2, 6, 6):
        label = int(labels[i, 0, y, x])
        if label == 7:
            continue
        if label:
            deltas = [d * s + m for d, s, m in zip(maps[i, 3:, y, x], STD, MEAN, strict=True)]
            dx, dy = (min(max(d, -1 / 4), 1 / 4) for d in deltas[:2])
            w, h = (
                side * exp(min(max(d, -log(2)), log(2)))
                for d, side in zip(deltas[2:], FIELD, strict=True)
            )
            cx, cy = dx * FIELD[0] + (x + 0.5) * RATE, dy * FIELD[1] + (y + 0.5) * RATE
            gx, gy, gw, gh = labels[i, 1:5, y, x]
            shared.append(iou((cx - w / 2, cy - h / 2, w, h), (gx - gw / 2, gy - gh / 2, gw, gh)))
        elif labels[i, 5, y, x] >= 0.5:
            continue
        best = sorted(((maps[i, k, y, x], k) for k in range(3)), reverse=True)[:top_k]
        hit = label in [k for _, k in best]
        every, right = every + 1, right + hit
        boxes, right_boxes = boxes + (label > 0), right_boxes + (hit and label > 0)
    text = (
        f'type: "DetectionAccuracy" {UNITS} loss_param {{ ignore_label: 7 }} '
        f"detection_accuracy_param {{ cls_num: 3 {SIZES} top_k: {top_k} }}"
    )
    accuracy, shares = Single(text, maps, labels, tops=2).forward()
    np.testing.assert_allclose(accuracy.ravel(), [right / every, right_boxes / boxes])
    np.testing.assert_allclose(shares.ravel(), [sum(shared) / len(shared)], rtol=1e-6)
    labels[:, 0], labels[:, 5] = 0, 0.9
    nothing = Single(text, maps, labels, tops=2).forward()
    assert [list(top.ravel()) for top in nothing] == [[-1, -1], [-1]]


def test_bbox_accuracy():
    rng = seeded(3)
    deltas = 0.3 * random(7, 12, seed=4)
    rois = np.zeros((7, 5))
    rois[:, 1:3], rois[:, 3:] = rng.uniform(0, 20, (7, 2)), rng.uniform(30, 60, (7, 2))
    true = np.zeros((7, 6))
    true[:, 0] = 0, 1, 2, 1, 2, 0, 1
    true[:, 1:3], true[:, 3:5] = rng.uniform(0, 20, (7, 2)), rng.uniform(30, 60, (7, 2))
    true[:, 5] = 0.98, 0.6, 0.99, 0.7, 0.97, 0.5, 0.5
    after, before = [], []
    for d, roi, box in zip(deltas, rois, true, strict=True):
        if box[0] == 0 or box[5] > 0.975:
            continue
        k = int(box[0])
        moved = [v * s + m for v, s, m in zip(d[4 * k : 4 * k + 4], STD, MEAN, strict=True)]
        x, y, w, h = roi[1], roi[2], roi[3] - roi[1] + 1, roi[4] - roi[2] + 1
        b = box[1], box[2], box[3] - box[1] + 1, box[4] - box[2] + 1
        nw, nh = w * exp(moved[2]), h * exp(moved[3])
        cx, cy = moved[0] * w + x + w / 2, moved[1] * h + y + h / 2
        after.append(iou((cx - nw / 2, cy - nh / 2, nw, nh), b))
        before.append(iou((x, y, w, h), b))
    text = f'type: "BboxAccuracy" {UNITS}'
    found = Single(text, deltas, rois, true, tops=2).forward()
    np.testing.assert_allclose(
        [top.item() for top in found], [np.mean(after), np.mean(before)], rtol=1e-6
    )
    true[:, 0] = 0
    assert [t.item() for t in Single(text, deltas, rois, true, tops=2).forward()] == [-1, -1]
    nothing = Single(text, deltas[:0], rois[:0], true[:0], tops=2).forward()
    assert [top.item() for top in nothing] == [-1, -1]
    true[0, 0] = 3
    with pytest.raises(DataError, match="class 3 of 3 classes"):
        Single(text, deltas, rois, true).forward()


def regions(count=40, seed=0):
    """Rois of two images and true boxes, one of them ignored."""
    rng = seeded(seed)
    truths = np.array(
        [
            [0, 10, 12, 50, 60, 2, 0],
            [0, 70, 20, 120, 90, 1, 0],
            [1, 30, 30, 90, 80, 3, 0],
            [1, 5, 5, 40, 30, 1, 1],
        ],
        float,
    )
    rois = np.zeros((count, 5))
    near = truths[rng.integers(0, 4, count)]
    rois[:, 0] = near[:, 0]
    rois[:, 1:] = near[:, 1:5] + rng.integers(-20, 20, (count, 4))
    rois[:, 3:] = np.maximum(rois[:, 3:], rois[:, 1:3])
    return rois, truths


def proposal_target(settings, units=UNITS):
    return (
        f'type: "ProposalTarget" {units} proposal_target_param {{ cls_num: 4 fg_thr: 0.5 '
        f"bg_thr_hg: 0.45 bg_thr_lw: 0.1 num_img_per_batch: 2 img_width: 160 img_height: 120 "
        f"{settings} }}"
    )


def sides(box):
    return box[0], box[1], box[2] - box[0] + 1, box[3] - box[1] + 1


def best_of(roi, truths):
    """The true box that a roi overlaps most, and how much."""
    found = [
        (iou(sides(roi[1:]), sides(t[1:5])) if t[0] == roi[0] else -1, -i)
        for i, t in enumerate(truths)
    ]
    overlap, i = max(found)
    return truths[-i], max(overlap, 0)


def check_regions(tops, truths, classes, *, aware=True):
    """AssertionError unless targets, weights and boxes are those of the rois."""
    rois, labels, targets, inside, outside, boxes = (top[..., 0, 0] for top in tops[:6])
    for roi, (label,), target_, one, other, box in zip(
        rois, labels, targets, inside, outside, boxes, strict=True
    ):
        truth, overlap = best_of(roi, truths)
        deltas, weights = np.zeros(4 * classes), np.zeros(4 * classes)
        if overlap >= 0.5:
            assert label == truth[5]
            x, y, w, h = sides(roi[1:])
            tx, ty, tw, th = sides(truth[1:5])
            wanted = (
                (tx + tw / 2 - x - w / 2) / w,
                (ty + th / 2 - y - h / 2) / h,
                log(tw / w),
                log(th / h),
            )
            place = 4 * (int(label) if aware else 1)
            deltas[place : place + 4] = [
                (d - m) / s for d, m, s in zip(wanted, MEAN, STD, strict=True)
            ]
            weights[place : place + 4] = 1
            np.testing.assert_allclose(box, [label, *truth[1:5], overlap], rtol=1e-6)
        else:
            assert label == 0
            assert not box.any()
        np.testing.assert_allclose(target_, deltas, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(one, weights)
        np.testing.assert_array_equal(other, weights)


def kinds(rois, truths):
    """How many rois are foreground, background, ignored, others."""
    counts = dict.fromkeys(("true", "background", "ignored", "other"), 0)
    for roi in rois:
        truth, overlap = best_of(roi, truths)
        if overlap >= 0.5:
            counts["ignored" if truth[6] else "true"] += 1
        else:
            counts["background" if 0.1 <= overlap < 0.45 else "other"] += 1
    return counts


def test_proposal_target_takes_all():
    rois, truths = regions()
    known = kinds(np.concatenate([rois, truths[:, :5]]), truths)
    assert min(known.values()) > 0
    tops = Single(proposal_target("batch_size: -1"), rois, truths, tops=6).forward()
    found = kinds(tops[0][..., 0, 0], truths)
    assert found == {**known, "ignored": 0, "other": 0}
    check_regions(tops, truths, 4)


@pytest.mark.parametrize(("size", "share"), [(16, 0.25), (16, 0.9), (30, 0.25)])
def test_proposal_target_draws(size, share):
    rois, truths = regions()
    known = kinds(np.concatenate([rois, truths[:, :5]]), truths)
    units = UNITS.removesuffix("}") + "cls_aware: false }"
    text = proposal_target(f"batch_size: {size} fg_fraction: {share}", units)
    tops = Single(text, rois, truths, tops=6).forward()
    assert tops[0].shape == (size, 5, 1, 1)
    found = kinds(tops[0][..., 0, 0], truths)
    wanted = min(int(size * share + 0.5), known["true"])
    assert found["true"] == wanted
    assert found["background"] == min(size - wanted, known["background"])
    check_regions(tops, truths, 2, aware=False)
    labels = tops[1].ravel()
    assert (labels[:wanted] > 0).all()


def test_proposal_target_fills_a_batch_with_boxes_of_its_own():
    rois, truths = regions(count=3)
    text = proposal_target("batch_size: 64 fg_fraction: 0.25 iou_weighted: true")
    tops = Single(text, rois, truths, tops=7).forward()
    boxes, labels = tops[0][..., 0, 0], tops[1].ravel()
    assert boxes.shape == (64, 5)
    made = boxes[7:]
    assert {0.0, 1.0} == set(made[:, 0])
    assert ((made[:, 3:] - made[:, 1:3]) >= 31).all()
    check_regions(tops, truths, 4)
    weights, overlap = tops[6].ravel(), tops[5][:, 5].ravel()
    np.testing.assert_allclose(weights[labels > 0].sum(), 16)
    np.testing.assert_allclose(weights[labels == 0], 48 / (labels == 0).sum())
    true = weights[labels > 0]
    np.testing.assert_allclose(true / true.sum(), overlap[labels > 0] / overlap.sum())


def test_true_boxes_alone_are_regions():
    rois, truths = regions(count=5)
    tops = Single(proposal_target("batch_size: 8"), rois[:0], truths, tops=6).forward()
    boxes, labels = tops[0][..., 0, 0], tops[1].ravel()
    assert sorted(labels[labels > 0])[0] >= 1
    for box in boxes[labels > 0]:
        assert box.tolist() in truths[:, :5].tolist()


def test_an_image_without_boxes_has_background_alone():
    rois, _ = regions(count=5)
    truths = np.array([[0, 1, 1, 2, 2, 1, 1.0]])  # what ImageGtData gives where there is none
    tops = Single(proposal_target("batch_size: 8"), rois, truths, tops=6).forward()
    assert not tops[1].any()


def of_cascade(truths):
    """Cascade R-CNN's true boxes: with `difficult`, and one that stands for none."""
    rows = np.column_stack([truths, np.zeros(len(truths))])
    return np.concatenate([rows, np.full((1, 8), -1.0)])


def test_proposal_target_of_cascade_does_not_fill_a_batch():
    rois, truths = regions(count=3)
    tops = Single(proposal_target("batch_size: 64"), rois, of_cascade(truths), tops=6).forward()
    found = kinds(tops[0][..., 0, 0], truths)
    known = kinds(np.concatenate([rois, truths[:, :5]]), truths)
    assert found == {**known, "ignored": 0}
    check_regions(tops, truths, 4)
    text = proposal_target("batch_size: 64 pickup_discard: false append_gtbox: false")
    rois, truths = regions()
    tops = Single(text, rois, of_cascade(truths), tops=6).forward()
    known = kinds(rois, truths)
    assert known["other"] > 0
    wanted = min(known["true"], 16)
    assert kinds(tops[0][..., 0, 0], truths) == {
        "true": wanted,
        "background": min(known["background"], 64 - wanted),
        "ignored": 0,
        "other": 0,
    }


def test_proposal_target_of_cascade_draws_a_box_where_none_is_left():
    rois, truths = regions(count=3)
    rois[:, 1:] = 0, 0, 1, 1
    text = proposal_target("batch_size: -1 append_gtbox: false")
    (top, labels, *_) = Single(text, rois, of_cascade(truths), tops=6).forward()
    assert (top.shape, labels.ravel().tolist()) == ((1, 5, 1, 1), [0])
    assert ((top[0, 3:] - top[0, 1:3]) >= 31).all()


@pytest.mark.parametrize("columns", [7, 8])
def test_proposal_target_without_true_boxes(columns):
    rois, _ = regions(count=3)
    text = proposal_target("batch_size: 2")
    boxes, *others = Single(text, rois, np.zeros((0, columns)), tops=6).forward()
    assert boxes.shape == (2, 5, 1, 1)
    assert not any(top.any() for top in others)


def test_deltas_of_some_overlaps_have_no_weight():
    rois, truths = regions()
    text = proposal_target("batch_size: -1 bbox_thr_lw: 0.6 bbox_thr_hg: 0.9")
    tops = Single(text, rois, of_cascade(truths), tops=6).forward()
    _, labels, targets, inside, outside, boxes = (top[..., 0, 0] for top in tops)
    overlap = boxes[:, 5]
    weighs = (labels[:, 0] > 0) & (overlap >= 0.6) & (overlap <= 0.9)
    assert 0 < weighs.sum() < (labels > 0).sum()
    np.testing.assert_array_equal(inside.sum(axis=1), 4 * weighs)
    np.testing.assert_array_equal(outside, inside)
    assert targets[labels[:, 0] > 0].any(axis=1).all()


REFUSED = {
    "DetectionLoss needs maps": (detection_loss(""), [(2, 8, 4, 5), (2, 6, 4, 5)]),
    "not [2, 7, 4, 0]": (detection_loss(""), [(2, 7, 4, 0), (2, 6, 4, 0)]),
    "labels (N, 6, H, W)": (detection_loss(""), [(2, 7, 4, 5), (2, 6, 4, 4)]),
    "cls_num of 1 or more": ('type: "DetectionAccuracy"', [(2, 7, 4, 5), (2, 6, 4, 5)]),
    "coord_num is 4": (detection_loss("coord_num: 3"), [(2, 7, 4, 5), (2, 6, 4, 5)]),
    "objectness is of 2 classes": (
        detection_loss("objectness: true"),
        [(2, 7, 4, 5), (2, 6, 4, 5)],
    ),
    "above 0": (detection_loss("").replace("xyr: 3", "xyr: 0"), [(2, 7, 4, 5), (2, 6, 4, 5)]),
    "rois (R, 5) and true boxes (G, 7)": (proposal_target(""), [(3, 5), (2, 9)]),
    "cls_num of 2": (proposal_target("").replace("cls_num: 4", "cls_num: 1"), [(3, 5), (2, 7)]),
    "batch_size must be": (proposal_target("batch_size: 0"), [(3, 5), (2, 7)]),
    "fg_thr must be": (proposal_target("").replace("hg: 0.45", "hg: 0.6"), [(3, 5), (2, 7)]),
    "above 0, and": (
        proposal_target("").replace("0.5 bg_thr_hg: 0.45", "0 bg_thr_hg: 0"),
        [(3, 5), (2, 7)],
    ),
    "fg_fraction must": (proposal_target("fg_fraction: nan"), [(3, 5), (2, 7)]),
    "num_img_per_batch of": (proposal_target("").replace("batch: 2", "batch: 0"), [(3, 5), (2, 7)]),
    "not [] and": (proposal_target(""), [(), (2, 7)]),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message):
    text, shapes = REFUSED[message]
    tops = 6 if "ProposalTarget" in text else 1
    with pytest.raises(ConfigError) as error:
        Single(text, *(np.zeros(shape) for shape in shapes), tops=tops)
    assert message in str(error.value)


def test_labels_of_no_class_are_told():
    maps, labels = maps_and_labels()
    labels[1, 0, 2, 2] = 5
    with pytest.raises(DataError, match="label 5 is none of 3 classes"):
        Single(detection_loss(""), maps, labels).forward()
    rois, truths = regions()
    truths[0, 5] = 9
    with pytest.raises(DataError, match="classes 1 to 9, not 1 to 3"):
        Single(proposal_target("batch_size: -1"), rois, truths, tops=6).forward()
    truths[0, 0] = 2
    with pytest.raises(DataError, match="image 2, but num_img_per_batch is 2"):
        Single(proposal_target("batch_size: -1"), rois, truths, tops=6).forward()
