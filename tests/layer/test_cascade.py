"""Boxes of MS-CNN and Cascade R-CNN against loops that follow their rules box by box."""

from math import exp, floor, log, sqrt

import numpy as np
import pytest

from caffepy.core.errors import ConfigError, DataError
from caffepy.layer.cascade import suppressed

from .harness import Single, check_gradient, random, seeded

UNITS = (
    "bbox_reg_param { bbox_mean: 0.1 bbox_mean: 0 bbox_mean: -0.1 bbox_mean: 0.05 "
    "bbox_std: 0.5 bbox_std: 0.4 bbox_std: 0.3 bbox_std: 0.2 }"
)
MEAN, STD = (0.1, 0, -0.1, 0.05), (0.5, 0.4, 0.3, 0.2)


def share(a, b, unit, mode):
    """Boxes x, y, w, h."""
    if min(a[2:]) < unit or min(b[2:]) < unit or min(*a[2:], *b[2:]) <= 0:
        return 0
    wide = min(a[0] + a[2], b[0] + b[2]) - max(a[0], b[0])
    high = min(a[1] + a[3], b[1] + b[3]) - max(a[1], b[1])
    if (wide < 1 or high <= 1) if unit else (wide <= 0 or high <= 0):
        return 0
    areas = a[2] * a[3], b[2] * b[3]
    whole = {"IOMU": min(areas), "IOFU": areas[0], "IOU": sum(areas) - wide * high}[mode]
    return wide * high / whole


def moved(deltas, field, place, stride, xyr, whr):
    d = [x * s + m for x, s, m in zip(deltas, STD, MEAN, strict=True)]
    d = [
        min(max(v, -most), most) for v, most in zip(d, [1 / xyr] * 2 + [log(whr)] * 2, strict=True)
    ]
    size = field[0] * exp(d[2]), field[1] * exp(d[3])
    return [
        *(d[k] * field[k] + (place[k] + 0.5) * stride - size[k] / 2 for k in (0, 1)),
        *size,
    ]


def proposed(found, unit, mode, most, before, after):
    """Rows x1, y1, x2, y2, score of what stays of boxes (score, x, y, w, h), which come sorted."""
    kept = []
    for row in found[: before or None]:
        if all(share(other[1:], row[1:], unit, mode) <= most for other in kept):
            kept.append(row)
    return [
        [x, y, x + w - unit, y + h - unit, score] for score, x, y, w, h in kept[: after or None]
    ]


@pytest.mark.parametrize(
    ("mode", "limits"), [("IOU", (0, 0)), ("IOMU", (12, 0)), ("IOFU", (20, 5)), ("IOU", (0, 3))]
)
def test_box_output(mode, limits):
    maps = [random(2, 3 + 4, 4, 5, seed=1), random(2, 3 + 4, 2, 3, seed=2)]
    maps[0][0, 0, 0, 0] = maps[0][0, 0, 1, 1] = -9  # equal scores, if the others are
    maps[0][0, 1:3, 0, 0] = maps[0][0, 1:3, 1, 1] = 1
    text = (
        f'type: "BoxOutput" {UNITS} box_output_param {{ fg_thr: 0.2 iou_thr: 0.4 nms_type: "{mode}" '
        "field_w: 12 field_h: 16 field_w: 30 field_h: 24 downsample_rate: 8 downsample_rate: 16 "
        f"field_whr: 1.5 field_xyr: 2 max_nms_num: {limits[0]} max_post_nms_num: {limits[1]} "
        "min_size: 7 }"
    )
    want = []
    for n in range(2):
        found = []
        for x, field, rate in ((maps[0], (12, 16), 8), (maps[1], (30, 24), 16)):
            _, _, height, width = x.shape
            for i, j in np.ndindex(height, width):
                score = max(x[n, 1:3, i, j]) - x[n, 0, i, j]
                left, up, w, h = moved(x[n, 3:, i, j], field, (j, i), rate, 2, 1.5)
                left, up = max(left, 0), max(up, 0)
                w, h = min(w, width * rate - left), min(h, height * rate - up)
                if score >= 0.2 and min(w, h) >= 7:
                    found.append((score, left, up, w, h))
        found = sorted(enumerate(found), key=lambda at: (-at[1][0], -at[0]))
        rows = proposed([row for _, row in found], 0, mode, 0.4, *limits)
        want += [[n, *row] for row in rows]
    rois, scored = Single(text, *maps, tops=2).forward()
    assert 4 < len(want) < 50
    np.testing.assert_allclose(scored[..., 0, 0], want, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(rois[..., 0, 0], scored[:, :5, 0, 0])


@pytest.mark.parametrize(
    ("mode", "limits"), [("IOU", (0, 0)), ("IOMU", (12, 0)), ("IOFU", (20, 5))]
)
def test_box_group_output(mode, limits):
    rng = seeded(4)
    scores = [rng.random((2 * 2, 2, 4, 5)), rng.random((2 * 1, 3, 2, 3))]
    deltas = [random(4, 4, 4, 5, seed=5), random(2, 4, 2, 3, seed=6)]
    fields = [[(12, 16), (20, 9)], [(30, 24)]]
    groups = " ".join(
        "box_group_param {"
        + "".join(f" field_w: {w} field_h: {h}" for w, h in group)
        + f" stride: {stride} }}"
        for group, stride in zip(fields, (8, 16), strict=True)
    )
    text = (
        f'type: "BoxGroupOutput" {UNITS} box_group_output_param {{ fg_thr: 0.3 iou_thr: 0.4 '
        f'nms_type: "{mode}" {groups} field_whr: 1.5 field_xyr: 2 max_nms_num: {limits[0]} '
        f"max_post_nms_num: {limits[1]} min_size: 7 }}"
    )
    want = []
    for n in range(2):
        found = []
        for p, d, group, stride in zip(scores, deltas, fields, (8, 16), strict=True):
            height, width = p.shape[2:]
            for g, i, j in np.ndindex(len(group), height, width):
                k, score = n * len(group) + g, 1 - p[n * len(group) + g, 0, i, j]
                x, y, w, h = moved(d[k, :, i, j], group[g], (j, i), stride, 2, 1.5)
                right, down = min(x + w - 1, width * stride), min(y + h - 1, height * stride)
                x, y = max(x, 0), max(y, 0)
                w, h = right - x + 1, down - y + 1
                if score >= 0.3 and min(w, h) >= 7:
                    found.append((score, x, y, w, h))
        found.sort(key=lambda row: -row[0])
        want += [[n, *row] for row in proposed(found, 1, mode, 0.4, *limits)]
    bottoms = [scores[0], deltas[0], scores[1], deltas[1]]
    rois, scored = Single(text, *bottoms, tops=2).forward()
    assert 4 < len(want) < 50
    np.testing.assert_allclose(scored[..., 0, 0], want, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(rois[..., 0, 0], scored[:, :5, 0, 0])


def test_boxes_that_share_a_row_of_pixels_do_not_meet():
    size = np.array([[2.0, 2], [2, 2]])
    for corner, meets in (([[0.0, 0], [1, 0]], True), ([[0.0, 0], [0, 1]], False)):
        kept = suppressed(np.array(corner), size, 1.0, "IOU", 0.2)
        assert len(kept) == (1 if meets else 2)


def test_nothing_is_proposed():
    text = (
        'type: "BoxOutput" box_output_param { fg_thr: 99 field_w: 9 field_h: 9 downsample_rate: 8 }'
    )
    rois, scored = Single(text, random(2, 6, 2, 2), tops=2).forward()
    np.testing.assert_array_equal(rois[..., 0, 0], [[0, 1, 1, 10, 10]])
    np.testing.assert_array_equal(scored[..., 0, 0], np.zeros((1, 6)))


ROIS = np.array([[0, 2, 3, 9, 8], [1, 0, 0, 4, 12], [0, 5, 5, 30, 31.0], [1, 2, 2, 2, 2]])


@pytest.mark.parametrize("phase", [0, 1])
@pytest.mark.parametrize("truths", [False, True])
def test_decode_bbox(phase, truths):
    deltas = random(4, 8, seed=3)
    deltas[1, 6] = -30  # of no width
    deltas[3, 6:] = 1
    overlaps = np.array([[0, 0.5], [0, 0.2], [0, 0.96], [0, 0.1]])
    text = f'type: "DecodeBBox" {UNITS} decode_bbox_param {{ gt_iou_thr: 0.9 }}'
    bottoms = [deltas, ROIS] + ([overlaps] if truths else [])
    (top,) = Single(text, *bottoms, phase=phase).forward()
    want = []
    for d, (image, x1, y1, x2, y2), (_, overlap) in zip(deltas, ROIS, overlaps, strict=True):
        d = [v * s + m for v, s, m in zip(d[4:], STD, MEAN, strict=True)]
        w, h = x2 - x1 + 1, y2 - y1 + 1
        centre = d[0] * w + (x1 + x2) / 2, d[1] * h + (y1 + y2) / 2
        w, h = w * exp(d[2]), h * exp(d[3])
        left, up = centre[0] - (w - 1) / 2, centre[1] - (h - 1) / 2
        box = [left, up, left + w - 1, up + h - 1]
        learns = box[0] <= box[2] and box[1] <= box[3] and not (truths and overlap >= 0.9)
        if phase == 1 or learns:
            want.append([image, *box])
    assert len(want) == (4 if phase == 1 else 2 if truths else 3)
    np.testing.assert_allclose(top[..., 0, 0], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("limits", "want"),
    [
        ("", [0, 1, 2, 3]),
        ("high_scale: 7", [0, 3]),
        ("low_scale: 7", [1, 2]),
        ("low_scale: 7 high_scale: 20", [1]),
        ("low_scale: 12 high_scale: 20", [2]),  # none; 26.5 is nearer to 15.5 than 8
        ("high_scale: 0.5", [3]),
    ],
)
def test_scale_route(limits, want):
    scales = [sqrt((r[3] - r[1] + 1) * (r[4] - r[2] + 1)) for r in ROIS]
    np.testing.assert_allclose(scales, [6.93, 8.06, 26.5, 1], atol=0.01)
    others = random(4, 3, 2)
    text = f'type: "ScaleRoute" scale_route_param {{ {limits} }}'
    rois, rest = Single(text, ROIS, others, tops=2).forward()
    np.testing.assert_array_equal(rois, ROIS[want])
    np.testing.assert_array_equal(rest, others[want])


X = random(2, 3, 5, 6, seed=8)
PARTS = np.array([[0, 2, 3, 9, 8], [1, 0, 0, 4, 12], [0, 7, 9, 30, 31.0], [1, 5, 5, 3, 3]])


@pytest.mark.parametrize("pad", [0, 0.25])
def test_values_at_the_corners_of_parts(pad):
    text = (
        'type: "ROIAlign" roi_pooling_param { pooled_h: 2 pooled_w: 3 spatial_scale: 0.25 '
        f"pad_ratio: {pad} }}"
    )
    (y,) = Single(text, X, PARTS).forward()
    assert y.shape == (4, 3, 3, 4)
    for r, (image, x1, y1, x2, y2) in enumerate(PARTS):
        across, down = (x2 - x1 + 1) * pad, (y2 - y1 + 1) * pad
        left, right = (x1 - across) / 4 - 0.5, (x2 + across) / 4 - 0.5
        top, bottom = (y1 - down) / 4 - 0.5, (y2 + down) / 4 - 0.5
        for i, j in np.ndindex(3, 4):
            v, u = top + i * (bottom - top) / 2, left + j * (right - left) / 3
            want = np.zeros(3)
            if right > left and bottom > top and -0.5 <= v <= 4.5 and -0.5 <= u <= 5.5:
                for a in (floor(v), floor(v) + 1):
                    for b in (floor(u), floor(u) + 1):
                        near = max(0, 1 - abs(v - a)) * max(0, 1 - abs(u - b))
                        want += near * X[int(image), :, min(max(a, 0), 4), min(max(b, 0), 5)]
            np.testing.assert_allclose(y[r, :, i, j], want, atol=1e-6)
    check_gradient(text, X, PARTS, propagate_down=[True, False])


def test_padded_boxes_of_roi_pooling():
    text = 'type: "ROIPooling" roi_pooling_param {{ pooled_h: 2 pooled_w: 2 {} }}'
    (got,) = Single(text.format("pad_ratio: 0.5"), X, PARTS / 2).forward()
    rois = PARTS / 2
    pad = (rois[:, 3:] - rois[:, 1:3] + 1) / 2
    rois = np.hstack([rois[:, :1], rois[:, 1:3] - pad, rois[:, 3:] + pad])
    (want,) = Single(text.format(""), X, rois).forward()
    np.testing.assert_array_equal(got, want)


REFUSED = {
    "fields": ("BoxOutput", "box_output_param { field_w: 1 }", [(1, 6, 2, 2)], "needs a field_h"),
    "mode": (
        "BoxOutput",
        'box_output_param { field_w: 1 field_h: 1 downsample_rate: 1 nms_type: "no" }',
        [(1, 6, 2, 2)],
        'IOFU, not "no"',
    ),
    "one class": (
        "BoxOutput",
        "box_output_param { field_w: 1 field_h: 1 downsample_rate: 1 }",
        [(1, 5, 2, 2)],
        "of 2 classes or more",
    ),
    "pairs": ("BoxGroupOutput", "", [(1, 2, 2, 2), (1, 4, 2, 2)], "not the pairs of 0"),
    "groups": (
        "BoxGroupOutput",
        "box_group_output_param { box_group_param { field_w: 1 field_w: 2 field_h: 1 field_h: 1 "
        "stride: 8 } }",
        [(3, 2, 2, 2), (3, 4, 2, 2)],
        r"2 fields need probabilities \(N \* 2",
    ),
    "deltas": ("DecodeBBox", "", [(2, 4), (2, 5)], r"needs deltas \(R, 8\)"),
    "units": (
        "DecodeBBox",
        "bbox_reg_param { bbox_mean: 0 bbox_std: 1 }",
        [(2, 8), (2, 5)],
        "four",
    ),
    "scales": (
        "ScaleRoute",
        "scale_route_param { low_scale: 3 high_scale: 2 }",
        [(2, 5)],
        "3 and 2",
    ),
    "rois": ("ScaleRoute", "", [(2, 4)], "needs rois"),
    "both": (
        "ROIAlign",
        "roi_pooling_param { pooled_h: 1 pooled_w: 1 } roi_align_param { pooled_h: 1 }",
        [(1, 1, 2, 2), (1, 5)],
        "needs a roi_align_param, or a roi_pooling_param",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    type_, text, shapes, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        Single(f'type: "{type_}" {text}', *(random(*shape) for shape in shapes))


def test_no_box_is_left_to_learn_from():
    deltas = np.full((2, 8), -40.0)
    with pytest.raises(DataError, match="none of 2 boxes is left"):
        Single('type: "DecodeBBox"', deltas, ROIS[:2], phase=0).forward()


def frcnn_output(settings, more=""):
    return f'type: "FrcnnOutput" {UNITS.replace(" }", more + " }")} frcnn_output_param {{ {settings} }}'


def detections(count=30, classes=4):
    """Probabilities, deltas, rois of an image and its size."""
    rng = seeded(3)
    scores = rng.random((count, classes)) ** 2
    corner = rng.uniform(0, 80, (count, 2))
    rois = np.column_stack([np.zeros(count), corner, corner + rng.uniform(5, 60, (count, 2))])
    return scores, random(count, 4 * classes, seed=4) / 2, rois, np.array([[90.0, 110]])


def taken(scores, deltas, rois, size, *, mode, least, most, limit):
    """Rows by classes, as the fork makes them."""
    found = []
    for c in range(1, scores.shape[1]):
        boxes = []
        for score, own, roi in zip(scores[:, c], deltas[:, 4 * c :], rois, strict=True):
            if score < least:
                continue
            x1, y1, x2, y2 = roi[1:5]
            w, h = x2 - x1 + 1, y2 - y1 + 1
            d = own[:4] * STD + MEAN
            x, y = d[0] * w + (x1 + x2) / 2, d[1] * h + (y1 + y2) / 2
            w, h = w * exp(d[2]), h * exp(d[3])
            x, y = x - (w - 1) / 2, y - (h - 1) / 2
            left, up = max(x, 0), max(y, 0)
            right, down = min(x + w - 1, size[0, 1]), min(y + h - 1, size[0, 0])
            boxes.append((score, left, up, right - left + 1, down - up + 1))
        boxes.sort(key=lambda box: -box[0])
        kept = proposed(boxes, 1, mode, most, 0, 0)
        found += [[0, *row[:4], c, row[4]] for row in kept]
    if limit and len(found) > limit:
        worst = sorted((row[6] for row in found), reverse=True)[limit]
        found = [row for row in found if row[6] > worst]
    return [[0, *[-1] * 6], *found]


@pytest.mark.parametrize(("mode", "limit"), [("IOU", 0), ("IOMU", 9), ("IOFU", 500)])
def test_frcnn_output(mode, limit):
    bottoms = detections()
    text = frcnn_output(f'conf_thr: 0.3 iou_thr: 0.4 nms_type: "{mode}" max_det_num: {limit}')
    (top,) = Single(text, *bottoms).forward()
    want = taken(*bottoms, mode=mode, least=0.3, most=0.4, limit=limit)
    assert len(want) > 5
    np.testing.assert_allclose(top[..., 0, 0], want, rtol=1e-5, atol=1e-4)


def test_frcnn_output_of_any_class():
    scores, deltas, rois, size = detections()
    scored = np.column_stack([rois, scores[:, 1]])  # a sixth column is not read
    text = frcnn_output("conf_thr: 0.3 iou_thr: 0.4", " cls_aware: false")
    (top,) = Single(text, scores, deltas[:, :8], scored, size).forward()
    deltas = np.tile(deltas[:, 4:8], 4)
    want = taken(scores, deltas, rois, size, mode="IOU", least=0.3, most=0.4, limit=0)
    np.testing.assert_allclose(top[..., 0, 0], want, rtol=1e-5, atol=1e-4)
    nothing = frcnn_output("conf_thr: 2", " cls_aware: false")
    (top,) = Single(nothing, scores, deltas[:, :8], rois, size).forward()
    assert top.ravel().tolist() == [0, *[-1] * 6]


def test_frcnn_output_writes_files(tmp_path):
    scores, deltas, rois, size = detections()
    (tmp_path / "names.txt").write_text("street 180 330\n")
    items = "".join(f'item {{ name: "c{i}" label: {i} }} ' for i in range(4))
    (tmp_path / "map.prototxt").write_text(items)
    saved = (
        f'save_output_param {{ output_directory: "{tmp_path}" output_name_prefix: "d_" '
        f'output_format: "VOC" label_map_file: "{tmp_path}/map.prototxt" '
        f'name_size_file: "{tmp_path}/names.txt" }}'
    )
    (top,) = Single(frcnn_output(f"conf_thr: 0.5 {saved}"), scores, deltas, rois, size).forward()
    rows = top[1:, :, 0, 0]
    lines = (tmp_path / "d_c2.txt").read_text().splitlines()
    assert len(lines) == (rows[:, 5] == 2).sum() > 0
    name, score, *box = lines[0].split()
    first = rows[rows[:, 5] == 2][0]
    assert (name, float(score)) == ("street", pytest.approx(first[6], rel=1e-4))
    np.testing.assert_array_equal([*map(int, box)], np.trunc(first[1:5] * [3, 2, 3, 2]))


@pytest.mark.parametrize(
    ("settings", "shapes", "message"),
    [
        ("", [(3, 4), (3, 8), (3, 5), (1, 2)], r"deltas \(R, 16\)"),
        ("", [(3, 4), (3, 16), (2, 5), (1, 2)], "needs probabilities"),
        ("", [(3, 4), (3, 16), (3, 5), (2, 2)], "takes one image, not 2"),
        ('nms_type: "X"', [(3, 4), (3, 16), (3, 5), (1, 2)], "IOU, IOMU or IOFU"),
    ],
)
def test_frcnn_output_refused(settings, shapes, message):
    with pytest.raises(ConfigError, match=message):
        Single(frcnn_output(settings), *(random(*shape) for shape in shapes))


@pytest.mark.parametrize("shape", [(), (2,), (0, 8)])
def test_decoded_boxes_of_other_shapes(shape):
    with pytest.raises(ConfigError, match=r"DecodeBBox needs deltas \(R, 8\)"):
        Single('type: "DecodeBBox"', np.zeros(shape), np.zeros((2, 5)))
    with pytest.raises(ConfigError, match=r"true boxes .*, not \[2, 8\], \[2, 5\], \[2, 0\]"):
        Single('type: "DecodeBBox"', np.zeros((2, 8)), np.zeros((2, 5)), np.zeros((2, 0)))


def test_frcnn_output_of_no_proposals():
    bottoms = (np.zeros((0, 2)), np.zeros((0, 8)), np.zeros((0, 5)), np.full((1, 2), 9.0))
    (found,) = Single(frcnn_output("conf_thr: 0.1 iou_thr: 0.5"), *bottoms).forward()
    np.testing.assert_array_equal(found.reshape(-1), [0, *[-1] * 6])


def test_frcnn_output_is_of_one_image():
    scores, deltas, rois, size = detections()
    rois[3, 0] = 1
    with pytest.raises(DataError, match="takes rois of one image, 0; one is of image 1"):
        Single(frcnn_output(""), scores, deltas, rois, size).forward()


@pytest.mark.parametrize("each", [2, 4, 9])
def test_hard_mining(each):
    """Items of the hardest rois of each image; then the hardest of the others."""
    rng = seeded(5)
    scores = rng.integers(0, 6, 14).astype(float)
    rois = np.column_stack([np.sort(rng.integers(0, 3, 14)), rng.random((14, 4))])
    values = random(14, 2, 3)
    text = f'type: "HardMining" hard_mining_param {{ num_roi_per_image: {each} num_image: 3 }}'
    tops = Single(text, scores, rois, values, tops=2).forward()
    order = sorted(range(14), key=lambda i: (-scores[i], -i))
    chosen = [i for k in range(3) for i in [i for i in order if rois[i, 0] == k][:each]]
    chosen += [i for i in order if i not in chosen][: max(0, min(3 * each, 14) - len(chosen))]
    for top, source in zip(tops, (rois, values), strict=True):
        np.testing.assert_array_equal(top, source[sorted(chosen)])


def test_hard_mining_refused():
    text = 'type: "HardMining" hard_mining_param { num_image: 1 }'
    with pytest.raises(ConfigError, match="2 bottoms need 1 tops, not 2"):
        Single(text, random(3), random(3, 5), tops=2)
    with pytest.raises(ConfigError, match=r"needs scores \(R\), rois \(R, 5\)"):
        Single(text, random(3), random(3, 4))
    with pytest.raises(ConfigError, match=r"needs scores \(R\), rois \(R, 5\)"):
        Single(text, np.zeros(()), np.zeros(()))
    with pytest.raises(ConfigError, match="must be 1 or more"):
        Single(text.replace("1", "0"), random(3), random(3, 5))
    with pytest.raises(DataError, match="num_image of 1, so no roi of image 2"):
        Single(text, random(3), np.full((3, 5), 2.0)).forward()


def test_scale_route_of_no_rois():
    boxes, maps = Single('type: "ScaleRoute"', np.zeros((0, 5)), np.ones((0, 2)), tops=2).forward()
    assert (boxes.shape, maps.shape) == ((0, 5), (0, 2))
    with pytest.raises(ConfigError, match=r"rois \(R, 5\) and bottoms \(R, ...\), not \[\]"):
        Single('type: "ScaleRoute"', np.zeros(()))
