"""Layers of YOLO against the fork's figures, against loops, and on a GPU."""

from math import exp, log

import numpy as np
import pytest

from caffepy.core.errors import ConfigError, DataError

from .harness import FORKS, Single, check_golden, check_gradient, random, seeded
from .on_gpu import check_plain_on_gpu

BIASES = "".join(f"biases: {v} " for v in (0.7, 0.9, 2.4, 2.6, 1.3, 2.0, 3.2, 1.6, 3.7, 3.9))
REGION = f'type: "RegionLoss" region_loss_param {{ num_class: 3 num: 2 {BIASES} %s }}'
YOLO3 = (
    'type: "Yolov3" yolov3_param {{ num_class: 3 num: 2 anchors_scale: 16 mask: 3 mask: 1 '
    "biases: 10 biases: 13 biases: 16 biases: 30 biases: 33 biases: 23 biases: 30 biases: 61 {} }}"
)
ALL_ANCHORS = [(10, 13), (16, 30), (33, 23), (30, 61)]
X, WIDE = random(2, 16, 4, 4), random(2, 16, 3, 5, seed=1)
TRUTHS = np.zeros((2, 1, 9, 5))
TRUTHS[0, 0, :4] = [
    [1, 0.3, 0.4, 0.5, 0.8],
    [0, 0.31, 0.42, 0.3, 0.2],
    [2, 0.3, 0.4, 0.6, 0.7],
    [2, 0.9, 0.1, 0.1, 0.2],
]
TRUTHS[1, 0, :2] = [[2, 0.6, 0.7, 0.55, 0.9], [0, 0.61, 0.72, 0.5, 0.8]]
LOSSES = {
    "region": (REGION % "thresh: 0.3 object_scale: 5", X),
    "region without rescore": (REGION % "thresh: 0.3 rescore: 0 bias_match: 0", X),
    **{
        f"Yolov3 {name}": (YOLO3.format(text + " thresh: 0.5"), WIDE)
        for name, text in {
            "MSE": "iou_thresh: 0.3",
            "MSE and logic": "use_logic_gradient: true object_scale: 3 iou_thresh: 1",
            "focal": "use_focal_loss: true label_smooth_eps: 0 class_scale: 2",
            "IOU": "iou_loss: IOU iou_normalizer: 2",
            "GIOU": "iou_loss: GIOU max_delta: 0.1 iou_thresh: 0.2",
            "DIOU": "iou_loss: DIOU accumulate: false iou_thresh: 0.2",
            "CIOU": "iou_loss: CIOU use_logic_gradient: true",
        }.items()
    },
}


@pytest.mark.parametrize(
    "case",
    sorted(p.stem for p in FORKS.glob("re[go]*.npz"))
    + sorted(p.stem for p in FORKS.glob("yolo*.npz")),
)
def test_what_the_fork_answered(case):
    check_golden(case, folder=FORKS)


PASS_THROUGH = 'type: "PassThrough" pass_through_param { block_height: 2 block_width: 3 }'


def test_pass_through_against_a_loop():
    x = random(2, 3, 4, 6)
    (y,) = Single(PASS_THROUGH, x).forward()
    assert y.shape == (2, 18, 2, 2)
    for n, c, h, w in np.ndindex(x.shape):
        assert y[n, (c * 2 + h % 2) * 3 + w % 3, h // 2, w // 3] == x[n, c, h, w]
    check_gradient(PASS_THROUGH, x)


@pytest.mark.gpu
def test_pass_through_on_gpu():
    check_plain_on_gpu(PASS_THROUGH, random(2, 3, 4, 6), propagate_down=[True])


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_reorg_against_darknets_loop(stride, reverse):
    s, (c, h, w) = stride, (2 * stride**2, 6, 12)
    text = f'type: "Reorg" reorg_param {{ stride: {s} reverse: {str(reverse).lower()} }}'
    x = random(2, c, h, w)
    (y,) = Single(text, x).forward()
    shape = (2, c // s**2, h * s, w * s) if reverse else (2, c * s**2, h // s, w // s)
    assert y.shape == shape
    want, flat, part = np.zeros(x.size), x.ravel(), c // s**2
    for b, k, j, i in np.ndindex(2, c, h, w):
        one = i + w * (j + h * (k + c * b))
        row, column = j * s + k // part // s, i * s + k // part % s
        other = column + w * s * (row + h * s * (k % part + part * b))
        if reverse:
            want[other] = flat[one]
        else:
            want[one] = flat[other]
    np.testing.assert_array_equal(y.ravel(), want)
    check_gradient(text, random(1, s**2, 6, 6) if s > 1 else random(1, 1, 2, 2))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def share(a, b):
    sides = [min(a[k] + a[k + 2] / 2, b[k] + b[k + 2] / 2) for k in (0, 1)]
    sides = [v - max(a[k] - a[k + 2] / 2, b[k] - b[k + 2] / 2) for k, v in enumerate(sides)]
    both = max(sides[0], 0) * max(sides[1], 0)
    return both / (a[2] * a[3] + b[2] * b[3] - both)


def box_of(v, i, j, h, w, size):
    return (
        (j + sigmoid(v[0])) / w,
        (i + sigmoid(v[1])) / h,
        exp(v[2]) * size[0],
        exp(v[3]) * size[1],
    )


def known(n):
    return [row for row in TRUTHS[n, 0] if row[3]]


def of_no_objects(x):
    """Return the gradient of RegionLoss at boxes near no true one, zeros elsewhere, and the sizes
    of anchors.
    """
    delta, sizes = np.zeros(x.shape), np.array([[0.7, 0.9], [2.4, 2.6]]) / 4
    for n, a, i, j in np.ndindex(2, 2, 4, 4):
        v, o = x[n, a, :, i, j], sigmoid(x[n, a, 4, i, j])
        box = box_of(v, i, j, 4, 4, sizes[a])
        if max(share(box, row[1:]) for row in known(n)) <= 0.3:
            delta[n, a, 4, i, j] = 0.5 * o * o * (1 - o)
    return delta, sizes


@pytest.mark.parametrize("rescore", [True, False])
def test_region_loss_against_a_loop(rescore):
    text = REGION % f"thresh: 0.3 object_scale: 5 rescore: {int(rescore)} coord_scale: 2"
    single = Single(text + " loss_weight: 3", X, TRUTHS)
    x = X.reshape(2, 2, 8, 4, 4)
    delta, sizes = of_no_objects(x)
    for n in range(2):
        for label, *truth in known(n):
            i, j = int(truth[1] * 4), int(truth[0] * 4)
            a = int(np.argmax([share((0, 0, *s), (0, 0, *truth[2:])) for s in sizes]))
            v, d, size = x[n, a, :, i, j], delta[n, a, :, i, j], sizes[a]
            scale = 2 if rescore else 2 * (2 - truth[2] * truth[3])
            sx, sy, o = sigmoid(v[[0, 1, 4]])
            d[0] = -scale * (truth[0] * 4 - j - sx) * sx * (1 - sx)
            d[1] = -scale * (truth[1] * 4 - i - sy) * sy * (1 - sy)
            d[2:4] = -scale * (np.log(truth[2:] / size) - v[2:4])
            goal = share(box_of(v, i, j, 4, 4, size), truth) if rescore else 1
            d[4] = -5 * (goal - o) * o * (1 - o)
            p = np.exp(v[5:]) / np.exp(v[5:]).sum()
            d[5:] = p - (np.arange(3) == label)
    (loss,) = single.forward()
    assert loss == pytest.approx((delta**2).sum() / 2, rel=1e-6)
    (dx, _), _ = single.backward(propagate_down=[True, False])
    np.testing.assert_allclose(dx.reshape(x.shape), delta * 3 / 2, 1e-6, 1e-8)


def ssds_rows():
    """SSD's true boxes (1, 1, G, 8) of TRUTHS: those of the images mixed, one row of none, those of
    an image in their order.
    """
    rows = [
        [n, label + 1, 0, x - w / 2, y - h / 2, x + w / 2, y + h / 2, 0]
        for n in range(2)
        for label, x, y, w, h in known(n)
    ]
    mixed = [rows[0], rows[4], [-1] * 8, rows[1], rows[2], rows[5], rows[3]]
    return np.array(mixed, float)[None, None]


def test_intels_region_loss_against_a_loop():
    """Objects learn by 2 (1 - o)^3 o (1 - o), boxes by moves of 1 at most; the loss is no mean."""
    text = REGION % "thresh: 0.3 object_scale: 5 rescore: 0 coord_scale: 2 noobject_scale: 0.5"
    wide = X * 3
    single = Single(text + " loss_weight: 3", wide, ssds_rows())
    x = wide.reshape(2, 2, 8, 4, 4)
    delta, sizes = of_no_objects(x)
    far = 0
    for n in range(2):
        for label, *truth in known(n):
            i, j = int(truth[1] * 4), int(truth[0] * 4)
            a = int(np.argmax([share((0, 0, *s), (0, 0, *truth[2:])) for s in sizes]))
            v, d, size = x[n, a, :, i, j], delta[n, a, :, i, j], sizes[a]
            sx, sy, o = sigmoid(v[[0, 1, 4]])
            moves = np.array([truth[0] * 4 - j - sx, truth[1] * 4 - i - sy, 0, 0])
            moves[2:] = np.log(truth[2:] / size) - v[2:4]
            far += np.sum(np.abs(moves) > 1)
            d[:4] = -2 * np.clip(moves, -1, 1) * [sx * (1 - sx), sy * (1 - sy), 1, 1]
            d[4] = -5 * 2 * (1 - o) ** 3 * o * (1 - o)
            p = np.exp(v[5:]) / np.exp(v[5:]).sum()
            d[5:] = p - (np.arange(3) == label)
    assert far > 2
    (loss,) = single.forward()
    assert loss == pytest.approx((delta**2).sum(), rel=1e-5)
    (dx, _), _ = single.backward(propagate_down=[True, False])
    np.testing.assert_allclose(dx.reshape(x.shape), delta * 3 / 2, 1e-5, 1e-6)
    wrong = ssds_rows()
    wrong[0, 0, 1, 1] = 4
    with pytest.raises(DataError, match="class 4, which is not one of 1 to 3"):
        Single(text, wide, wrong).forward()


@pytest.mark.parametrize("smooth", [0.1, 0])
def test_yolov3_against_a_loop(smooth):
    text = YOLO3.format(f"thresh: 0.5 iou_thresh: 0.4 label_smooth_eps: {smooth} coord_scale: 2")
    single = Single(text, WIDE, TRUTHS)
    x = WIDE.reshape(2, 2, 8, 3, 5)
    p, delta = sigmoid(x), np.zeros(x.shape)
    every = np.array(ALL_ANCHORS) / (5 * 16, 3 * 16)
    mask, trained = [3, 1], 0
    for n, a, i, j in np.ndindex(2, 2, 3, 5):
        box = box_of(x[n, a, :, i, j], i, j, 3, 5, every[mask[a]])
        if max(share(box, row[1:]) for row in known(n)) <= 0.5:
            delta[n, a, 4, i, j] = p[n, a, 4, i, j]
    for n in range(2):
        for label, *truth in known(n):
            i, j = int(truth[1] * 3), int(truth[0] * 5)
            shares = [share((0, 0, *size), (0, 0, *truth[2:])) for size in every]
            best = int(np.argmax(shares))
            left_out = mask.index(best) if best in mask else best
            chosen = [best] + [a for a in range(4) if a != left_out and shares[a] > 0.4]
            for a in chosen:
                if a not in mask:
                    continue
                trained += 1
                at = n, mask.index(a), slice(None), i, j
                scale = 2 * (2 - truth[2] * truth[3])
                d, q = delta[at], p[at]
                d[0], d[1] = scale * (q[0] - truth[0] * 5 + j), scale * (q[1] - truth[1] * 3 + i)
                d[2:4] = scale * (x[at][2:4] - [log(truth[k + 2] / every[a][k]) for k in (0, 1)])
                d[4] = q[4] - 1
                goals = np.where(np.arange(3) == label, 1 - smooth / 2, smooth / 2)
                if d[5 + int(label)]:
                    d[5 + int(label)] = (q[5:] - goals)[int(label)]
                else:
                    d[5:] = q[5:] - goals
    assert trained > 4
    (loss,) = single.forward()
    assert loss == pytest.approx((delta**2).sum() / 2, rel=1e-6)
    (dx, _), _ = single.backward(propagate_down=[True, False])
    np.testing.assert_allclose(dx.reshape(x.shape), delta / 2, 1e-6, 1e-8)


@pytest.mark.parametrize("kind", ["GIOU", "DIOU", "CIOU"])
def test_boxes_move_along_the_slope_of_their_overlap(kind):
    """By x and y that is the derivative; by w and h of GIoU darknet takes twice that, and all but
    the factors of the sigmoid, the cell and the anchor.
    """
    truth = np.array([[[[2, 0.62, 0.7, 0.5, 1.2]]]])  # partly beside each box
    text = YOLO3.format(f"iou_loss: {kind} iou_normalizer: 1 iou_thresh: 1 thresh: 0.99")

    def overlap_of(x):
        single = Single(text, x, truth)
        single.forward()
        return 1 - single.layer.stats.data[0, 0], single.layer.delta.data[0, 0, :4, 2, 3].copy()

    x = WIDE[1:] / 2
    _, moves = overlap_of(x)
    assert (abs(moves) > 1e-4).sum() >= 3
    for c, factor in enumerate((1, 1, 2 * 80 / 30, 2 * 48 / 61)):
        above, below = x.copy(), x.copy()
        above[0, c, 2, 3] += 1e-5
        below[0, c, 2, 3] -= 1e-5
        slope = (overlap_of(above)[0] - overlap_of(below)[0]) / 2e-5
        q = sigmoid(x[0, c, 2, 3])
        if c < 2:
            slope /= q * (1 - q) / (5, 3)[c]
        if kind == "GIOU":
            assert -moves[c] == pytest.approx(factor * slope, rel=1e-4, abs=1e-6)
        else:  # the power of DIoU and the weight of CIoU's ratio have no share in it
            assert -moves[c] * slope > 0


def test_classes_of_true_boxes_are_checked():
    wrong = TRUTHS.copy()
    wrong[1, 0, 1, 0] = 3
    for text, x in (LOSSES["region"], LOSSES["Yolov3 MSE"]):
        with pytest.raises(DataError, match="a true box has class 3, which is not one of 0 to 2"):
            Single(text, x, wrong).forward()


def yolo2(threshold):
    return (
        f'type: "YoloDetectionOutput" yolo_detection_output_param {{ num_classes: 3 num_box: 2 '
        f"{BIASES} confidence_threshold: {threshold} }}"
    )


def yolo3(threshold, more=""):
    return (
        'type: "Yolov3DetectionOutput" yolov3_detection_output_param { num_classes: 3 num_box: 2 '
        "mask: 0 mask: 2 mask: 1 mask: 3 anchors_scale: 8 anchors_scale: 16 biases: 10 biases: 13 "
        "biases: 16 biases: 30 biases: 33 biases: 23 biases: 30 biases: 61 "
        f"confidence_threshold: {threshold} {more} }}"
    )


@pytest.mark.parametrize("case", ["2", "3", "gaussian"])
def test_detections_against_a_loop(case):
    head = 9 if case == "gaussian" else 5
    maps = [random(2, 2 * (head + 3), 4, 4), random(2, 2 * (head + 3), 3, 3, seed=1)]
    text = yolo2(0.4) if case == "2" else yolo3(0.3, "gaussian_box: true" * (head == 9))
    (y,) = Single(text, *maps).forward()
    found = []
    for k, x in enumerate(maps):
        h, w = x.shape[2:]
        for n, i, j, a in np.ndindex(2, h, w, 2):
            v = x[n].reshape(2, -1, h, w)[a, :, i, j]
            size = [(0.7, 0.9), (2.4, 2.6)][a]
            if case != "2":
                size = np.array(ALL_ANCHORS)[[(0, 2), (1, 3)][k][a]] / (8, 16)[k]
            place = v[:8:2] if head == 9 else v
            box = box_of(place, i, j, h, w, (size[0] / w, size[1] / h))
            score = sigmoid(v[head - 1])
            if head == 9:
                score *= 1 - sigmoid(v[1:8:2]).mean()
            if case == "2":
                p = np.exp(v[5:]) / np.exp(v[5:]).sum()
                if score * p.max() >= 0.4:
                    found.append((score * p.max(), int(p.argmax()), box))
            else:
                found += [
                    (score * sigmoid(v[head + c]), c, box)
                    for c in range(3)
                    if score * sigmoid(v[head + c]) > 0.3
                ]
    found.sort(key=lambda each: -each[0])
    kept = []
    for one in found:
        if all(share(one[2], other[2]) < 0.45 for other in kept):
            kept.append(one)
    assert 2 < len(kept) < len(found)
    want = [
        (0, c + 1, s, b[0] - b[2] / 2, b[1] - b[3] / 2, b[0] + b[2] / 2, b[1] + b[3] / 2)
        for s, c, b in kept
    ]
    np.testing.assert_allclose(y[0, 0], want, 1e-5, 1e-6)
    (nothing,) = Single(text.replace("old: 0", "old: 1"), *maps).forward()
    np.testing.assert_array_equal(nothing[0, 0], [[0] + [-1] * 6, [1] + [-1] * 6])


def evaluation(more=""):
    return (
        f'type: "EvalDetection" eval_detection_param {{ num_class: 3 num_object: 2 side: 4 {BIASES} '
        f"nms: 0.45 threshold: 0.2 {more} }}"
    )


@pytest.mark.parametrize("kind", ["OBJ", "PROB", "MULTIPLY"])
def test_what_is_found_is_judged(kind):
    """As the fork's loop does it; its figures are unknown."""
    (y,) = Single(evaluation(f"score_type: {kind}"), X, TRUTHS).forward()
    assert y.shape == (2, 3 + 4 * 2 * 16)
    for n in range(2):
        found = []
        for i, j, a in np.ndindex(4, 4, 2):
            v = X[n].reshape(2, 8, 4, 4)[a, :, i, j]
            p = np.exp(v[5:]) / np.exp(v[5:]).sum()
            score = {"OBJ": sigmoid(v[4]), "PROB": p.max()}.get(kind, sigmoid(v[4]) * p.max())
            size = np.array([(0.7, 0.9), (2.4, 2.6)][a]) / 4
            found.append((score, int(p.argmax()), box_of(v, i, j, 4, 4, size)))
        kept = []
        for one in sorted(found, key=lambda each: -each[0]):
            if all(share(one[2], other[2]) < 0.45 for other in kept):
                kept.append(one)
        want, taken = [], set()
        for score, label, box in kept:
            shares = [share(box, t[1:]) if t[0] == label else -1 for t in known(n)]
            best = int(np.argmax(shares))
            true = shares[best] >= 0.2 and best not in taken
            want.append((label, score, true, shares[best] == -1 or (shares[best] >= 0.2) > true))
            taken |= {best} if true else set()
        assert any(row[2] for row in want)
        want.sort(key=lambda row: (row[0], -row[1]))
        counts = [sum(t[0] == c for t in known(n)) for c in range(3)]
        np.testing.assert_array_equal(y[n, :3], counts)
        np.testing.assert_allclose(y[n, 3 : 3 + 4 * len(want)], np.ravel(want), 1e-5)
        assert not y[n, 3 + 4 * len(want) :].any()


def test_true_boxes_of_ssd_are_judged_as_those_of_yolo():
    rows = [
        [n, t[0] + 1, 0, t[1] - t[3] / 2, t[2] - t[4] / 2, t[1] + t[3] / 2, t[2] + t[4] / 2, 0]
        for n in range(2)
        for t in known(n)
    ]
    (y,) = Single(evaluation(), X, TRUTHS).forward()
    (of_ssd,) = Single(evaluation(), X, np.array([*rows, [-1] * 8])[None, None]).forward()
    np.testing.assert_array_equal(of_ssd, y)
    (nothing,) = Single(evaluation().replace("0.45", "-1"), X, TRUTHS).forward()
    assert nothing[:, :3].any()
    assert not nothing[:, 3:].any()
    with pytest.raises(DataError, match="class 4, which is not one of 0 to 2"):
        Single(evaluation(), X, np.where(TRUTHS == 2, 4, TRUTHS)).forward()


@pytest.mark.parametrize(("text", "bottoms"), [(yolo2(0.1), 1), (yolo3(0.1), 2)])
def test_nothing_is_found_in_no_images(text, bottoms):
    (top,) = Single(text, *[np.zeros((0, 16, 2, 2))] * bottoms).forward()
    assert top.shape == (1, 1, 0, 7)


def test_a_number_behind_the_anchors_is_not_read():
    maps = [seeded(k).normal(0, 1, (1, 16, 2, 2)) for k in range(2)]
    both = [Single(yolo3(0.1, more), *maps).forward()[0] for more in ("", "biases: 9")]
    assert both[0].shape[2] > 1
    np.testing.assert_array_equal(*both)


@pytest.mark.parametrize(
    ("text", "shapes", "message"),
    [
        ('type: "PassThrough"', [(1, 4, 2, 2)], "needs block_height and block_width"),
        (PASS_THROUGH, [(1, 4, 2, 4)], "by 2 x 3 needs"),
        (PASS_THROUGH.replace("{", "{ num_output: 5"), [(1, 1, 2, 3)], "num_output is 6"),
        ('type: "Reorg" reorg_param { stride: 0 }', [(1, 4, 2, 2)], "needs a stride"),
        ('type: "Reorg" reorg_param { stride: 2 }', [(1, 6, 2, 2)], "C a multiple of 4"),
        ('type: "Reorg" reorg_param { stride: 2 }', [(1, 4, 3, 2)], "3 x 2 cannot be divided"),
        ('type: "RegionLoss"', [(1, 125, 2, 2), (1, 1, 3, 5)], "ten or more, not 0"),
        (REGION % "", [(1, 15, 2, 2), (1, 1, 3, 5)], r"3 classes need \(N, 16, H, W\)"),
        (REGION % "", [(1, 16, 2, 3), (1, 1, 3, 5)], "as many rows as columns"),
        (REGION % 'class_map: "map"', [(1, 16, 2, 2), (1, 1, 3, 5)], "class_map of YOLO 9000"),
        (YOLO3.format(""), [(1, 16, 3, 2), (1, 1, 3, 8)], "with yolo_data_type: 1"),
        (YOLO3.format(""), [(1, 16, 0, 2), (1, 1, 3, 5)], r"3 classes need \(N, 16, H, W\)"),
        (REGION % "", [(2, 16, 2, 2), (1, 1, 3, 5)], r"shape \(2, ..., 5\) or \(1, 1, G, 8\), not"),
        (YOLO3.format("").replace("mask: 1", ""), [(1, 16, 2, 2), (1, 1, 3, 5)], "mask must name"),
        (YOLO3.format("biases: 1"), [(1, 16, 2, 2), (1, 1, 3, 5)], "two for each anchor"),
        (yolo2(0.1), [(1, 15, 2, 2)], r"needs \(N, 16, H, W\)"),
        (yolo2(0.1), [(1, 16, 0, 2)], r"needs \(N, 16, H, W\)"),
        (yolo3(0.1), [(1, 16, 2, 2)], "mask_group_num 2 needs as many bottoms"),
        (yolo3(0.1, "mask: 4"), [(1, 16, 2, 2)] * 2, "one of 4 anchors"),
        ('type: "EvalDetection"', [(1, 16, 4, 4), (1, 1, 3, 5)], "two biases for each"),
        (evaluation(), [(1, 16, 3, 3), (1, 1, 3, 5)], r"needs \(N, 16, 4, 4\)"),
        (evaluation(), [(1, 16, 4, 4), (1, 1, 3, 6)], r"\(1, ..., 5\) or \(1, 1, G, 8\)"),
    ],
)
def test_what_does_not_fit_is_refused(text, shapes, message):
    with pytest.raises(ConfigError, match=message):
        Single(text, *(seeded().random(shape) for shape in shapes))


@pytest.mark.gpu
@pytest.mark.parametrize("case", LOSSES)
def test_losses_on_gpu(case):
    text, x = LOSSES[case]
    check_plain_on_gpu(text, x, TRUTHS, propagate_down=[True, False])


@pytest.mark.gpu
@pytest.mark.parametrize("images", [2, 1])
def test_intels_region_loss_on_gpu(images):
    """Also with more rows than a warp has lanes."""
    few = ssds_rows()
    many = np.concatenate([few] * 11, axis=2)
    for rows in (few, many):
        rows = np.where(rows[..., :1] < images, rows, -1)
        text = REGION % "thresh: 0.3 object_scale: 5 coord_scale: 2"
        check_plain_on_gpu(text, X[:images] * 3, rows, propagate_down=[True, False])


@pytest.mark.gpu
@pytest.mark.parametrize("reverse", ["false", "true"])
def test_reorg_on_gpu(reverse):
    text = f'type: "Reorg" reorg_param {{ stride: 2 reverse: {reverse} }}'
    check_plain_on_gpu(text, random(2, 8, 4, 6), propagate_down=[True])


def test_reorg_without_a_stride_is_by_2():
    x = random(1, 4, 4, 2)
    (given,), (other,) = (
        Single(f'type: "Reorg" {text}', x).forward() for text in ("", "reorg_param { stride: 2 }")
    )
    np.testing.assert_array_equal(given, other)
