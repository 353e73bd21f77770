"""Pooling of boxes against loops, numerical gradients, and a GPU."""

from math import ceil, floor

import numpy as np
import pytest

from caffepy.core.errors import ConfigError, DataError

from .harness import Single, check_gradient, seeded
from .on_gpu import check_plain_on_gpu

X = seeded().permutation(2 * 18 * 8 * 9).reshape(2, 18, 8, 9) / 100
ROIS = np.array(
    [
        [0, 10.0, 20, 100, 110],
        [1, 0, 0, 143, 127],
        [1, 37.5, 40.4, 37.5, 40.4],  # one cell
        [0, 90, 90, 30, 30],  # inverted
        [0, -60, -60, 40, 300],  # partly outside
        [1, 200, 200, 300, 300],  # outside
    ]
)
SIZES = [(1, 1), (2, 3), (7, 7)]


def roi(size):
    numbers = "pooled_h: {} pooled_w: {} spatial_scale: 0.0625".format(*size)
    return f'type: "ROIPooling" roi_pooling_param {{ {numbers} }}'


def psroi(group):
    numbers = f"output_dim: {18 // group**2} group_size: {group} spatial_scale: 0.0625"
    return f'type: "PSROIPooling" psroi_pooling_param {{ {numbers} }}'


def align(size, more=""):
    numbers = "pooled_h: {} pooled_w: {} spatial_scale: 0.0625".format(*size)
    return f'type: "ROIAlign" roi_align_param {{ {numbers} {more} }}'


def psalign(group, samples):
    numbers = f"output_dim: {18 // group**2} group_size: {group} sample_num: {samples}"
    return f'type: "PSROIAlign" psroi_align_param {{ {numbers} spatial_scale: 0.0625 }}'


ALIGNED = [align((2, 3)), align((7, 7), "sampling_ratio: 2"), psalign(1, 3), psalign(3, 2)]


def rounded(x):
    return floor(abs(x) + 0.5) * (1 if x >= 0 else -1)


def cells(at, size):
    return range(min(max(floor(at[0]), 0), size), min(max(ceil(at[1]), 0), size))


@pytest.mark.parametrize("size", SIZES)
def test_roi_pooling_against_a_loop(size):
    (y,) = Single(roi(size), X, ROIS, dtype=np.float32).forward()
    for r, c, i, j in np.ndindex(y.shape):
        n, *corners = ROIS[r]
        x1, y1, x2, y2 = (rounded(v / 16) for v in corners)
        high = np.float32(max(y2 - y1 + 1, 1)) / np.float32(size[0])
        wide = np.float32(max(x2 - x1 + 1, 1)) / np.float32(size[1])
        rows = cells((floor(np.float32(i) * high) + y1, ceil(np.float32(i + 1) * high) + y1), 8)
        columns = cells((floor(np.float32(j) * wide) + x1, ceil(np.float32(j + 1) * wide) + x1), 9)
        values = [X[int(n), c, a, b] for a in rows for b in columns]
        assert y[r, c, i, j] == np.float32(max(values, default=0))


@pytest.mark.parametrize("group", [1, 3])
def test_psroi_pooling_against_a_loop(group):
    (y,) = Single(psroi(group), X, ROIS).forward()
    for r, k, i, j in np.ndindex(y.shape):
        n, *corners = ROIS[r]
        x1, y1, x2, y2 = (rounded(v) for v in corners)
        high = np.float32(max((y2 + 1 - y1) / 16, np.float32(0.1))) / np.float32(group)
        wide = np.float32(max((x2 + 1 - x1) / 16, np.float32(0.1))) / np.float32(group)
        top, left = np.float32(y1 / 16), np.float32(x1 / 16)
        rows = cells((np.float32(i) * high + top, np.float32(i + 1) * high + top), 8)
        columns = cells((np.float32(j) * wide + left, np.float32(j + 1) * wide + left), 9)
        channel = (k * group + i) * group + j
        values = [X[int(n), channel, a, b] for a in rows for b in columns]
        assert y[r, k, i, j] == pytest.approx(np.mean(values) if values else 0)


def between(at, size):
    """The pixels on both sides of a place with their shares."""
    low = min(int(at), size - 1)
    return [(low, 1.0)] if low == size - 1 else [(low, low + 1 - at), (low + 1, at - low)]


def aligned(begin, end, part, parts, samples, beyond, size):
    """Where the samples of a part lie along an axis, None for those outside."""
    begin, end = begin / 16, (end + beyond) / 16
    length = max(end - begin, 1) / parts
    n = samples if samples > 0 else ceil(length)
    places = [begin + (part + (i + 0.5) / n) * length for i in range(n)]
    return [max(at, 0) if -1 <= at <= size else None for at in places]


def sensitive(begin, end, part, parts, samples, beyond, size):
    """The same of PSROIAlign."""
    begin, end = begin / 16, (end + beyond) / 16
    length = max(end - begin, 0.1) / parts
    first, last = (min(max(begin + (part + k) * length, 0), size - 1) for k in (0, 1))
    places = [first + (i + 1) * length / (samples + 1) for i in range(samples)]
    return [at if at < last else None for at in places]


def shares(roi, part, parts, samples, beyond, places):
    """Yield each pixel that a part reads, with its share."""
    x1, y1, x2, y2 = roi
    rows = places(y1, y2, part[0], parts[0], samples, beyond, 8)
    columns = places(x1, x2, part[1], parts[1], samples, beyond, 9)
    for v in rows:
        for u in columns:
            for a, p in between(v, 8) if v is not None and u is not None else ():
                for b, q in between(u, 9):
                    yield a, b, p * q / len(rows) / len(columns)


@pytest.mark.parametrize("more", ["", "sampling_ratio: 2", "sampling_ratio: 1 roi_end_mode: 1"])
def test_roi_align_against_a_loop(more):
    (y,) = Single(align((2, 3), more), X, ROIS).forward()
    samples = int(more.split()[1]) if more else -1
    for r, c, i, j in np.ndindex(y.shape):
        n, *box = ROIS[r]
        found = shares(box, (i, j), (2, 3), samples, "end" in more, aligned)
        want = sum(share * X[int(n), c, a, b] for a, b, share in found)
        assert y[r, c, i, j] == pytest.approx(want, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(("group", "samples"), [(1, 3), (3, 1), (3, 2)])
def test_psroi_align_against_a_loop(group, samples):
    single = Single(psalign(group, samples), X, ROIS)
    (y,) = single.forward()
    dy = seeded(1).standard_normal(y.shape)
    dx = np.zeros(X.shape)
    for r, k, i, j in np.ndindex(y.shape):
        n, *box = ROIS[r]
        channel = (k * group + i) * group + j
        found = [*shares(box, (i, j), (group, group), samples, 1, sensitive)]
        want = sum(share * X[int(n), channel, a, b] for a, b, share in found)
        assert y[r, k, i, j] == pytest.approx(want, rel=1e-5, abs=1e-5)
        x1, y1, x2, y2 = box
        down, right = (max((e + 1 - b) / 16, 0.1) / group for b, e in ((y1, y2), (x1, x2)))
        behind = ceil(y1 / 16 + (i + 1) * down), ceil(x1 / 16 + (j + 1) * right)
        for a, b, share in found:
            if a < behind[0] and b < behind[1]:  # others get none, as in the fork
                dx[int(n), channel, a, b] += share * dy[r, k, i, j]
    (got, drois), _ = single.backward([dy])
    np.testing.assert_allclose(got, dx, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(drois, 0)


@pytest.mark.parametrize(
    "text", [roi((2, 3)), psroi(3), align((2, 3))], ids=["ROIPooling", "PSROIPooling", "ROIAlign"]
)
def test_gradient(text):
    x = seeded().permutation(2 * 9 * 8 * 3).reshape(2, 9, 8, 3) / 10
    text = text.replace("output_dim: 2", "output_dim: 1")
    check_gradient(text, x, ROIS[[0, 1, 4]], propagate_down=[True, False])


@pytest.mark.parametrize("text", [roi((2, 2)), psroi(3)], ids=["ROIPooling", "PSROIPooling"])
@pytest.mark.parametrize("image", [2, -1])
def test_a_box_of_no_image_is_named(text, image):
    rois = np.array([[0, 1, 1, 20, 20], [image, 1, 1, 20, 20.0]])
    with pytest.raises(DataError, match=f"a box is of image {image}, but there are 2"):
        Single(text, X, rois).forward()


def test_boxes_have_no_gradient():
    single = Single(psroi(3), X, ROIS)
    (_, gradient), _ = single.backward([single.forward()[0]])
    assert not gradient.any()


def test_no_boxes_give_no_top():
    (y,) = Single(roi((2, 2)), X, np.zeros((0, 5))).forward()
    assert y.shape == (0, 18, 2, 2)


@pytest.mark.parametrize(
    ("text", "shapes", "message"),
    [
        ('type: "ROIPooling"', [(1, 2, 3, 3), (1, 5)], "pooled_h and pooled_w must be 1 or more"),
        (roi((1, 1)), [(1, 2, 3), (1, 5)], "ROIPooling needs features"),
        (roi((1, 1)), [(1, 2, 3, 3), (1, 4)], r"needs boxes \(R, 5\), not \[1, 4\]"),
        (psroi(3), [(1, 17, 3, 3), (1, 5)], r"needs 18 channels \(output_dim 2 times 3 x 3\)"),
        ('type: "ROIAlign"', [(1, 2, 3, 3), (1, 5)], "pooled_w must be 1 or more"),
        (align((1, 1), "roi_end_mode: 2"), [(1, 2, 3, 3), (1, 5)], "is 0 or 1, not 2"),
        (psalign(3, 0), [(1, 18, 3, 3), (1, 5)], "sample_num above 0"),
        (psalign(3, 1), [(1, 17, 3, 3), (1, 5)], "psroi_align_param needs 18 channels"),
        ('type: "PSROIPooling"', [(1, 2, 3, 3), (1, 5)], "group_size above 0"),
    ],
)
def test_what_does_not_fit_is_refused(text, shapes, message):
    with pytest.raises(ConfigError, match=message):
        Single(text, *(np.zeros(shape) for shape in shapes))


@pytest.mark.gpu
@pytest.mark.parametrize("text", [*map(roi, SIZES), psroi(1), psroi(3), *ALIGNED])
def test_on_gpu(text):
    check_plain_on_gpu(text, X, ROIS, propagate_down=[True, False])


def test_samples_of_a_huge_box_have_an_end():
    """Parts of a box beyond all maps are as large as they may be, and what lies outside is 0."""
    x, box = X[:1, :2, :6, :6], np.array([[0, -1e9, -1e9, 1e9, 1e9]])
    single = Single(align((2, 2)), x, box)
    (y,) = single.forward()
    assert np.isfinite(y).all()
    (dx, _), _ = single.backward([np.ones(y.shape)], [True, False])
    assert np.isfinite(dx).all()
