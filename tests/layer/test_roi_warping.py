"""MNC's layers of boxes and masks against loops, numerical gradients, and a GPU."""

from math import ceil, floor

import numpy as np
import pytest

from caffepy.core.errors import ConfigError, DataError

from .harness import Single, check_gradient, random, seeded
from .on_gpu import check_plain_on_gpu

X = seeded().permutation(2 * 3 * 8 * 9).reshape(2, 3, 8, 9) / 100
ROIS = np.array(
    [
        [0, 10.0, 20, 100, 110],
        [1, 0, 0, 143, 127],
        [1, 37.5, 40.4, 37.5, 40.4],  # one place
        [0, 90, 90, 30, 30],  # inverted
        [0, -60, -60, 40, 300],  # partly outside
        [1, 200, 200, 300, 300],  # outside
        [0, 60, 20, 135, 125],  # up to the last row and column
    ]
)
SIZES = [(1, 1), (2, 3), (7, 7), (20, 12)]


def warping(size):
    numbers = "pooled_h: {} pooled_w: {} spatial_scale: 0.0625".format(*size)
    return f'type: "ROIWarping" roi_warping_param {{ {numbers} }}'


def rounded(x):
    return floor(abs(x) + 0.5) * (1 if x >= 0 else -1)


def corners(box, size, axis):
    """Start and end of a box, and of each corner its place, cut to the map, or None outside it."""
    start, end = (rounded(box[k] * 0.0625) for k in (2 - axis, 4 - axis))
    most = X.shape[2 + axis]
    places = [start + k * max(end - start, 0) / size[axis] for k in range(size[axis])]
    return (
        start,
        end,
        [min(max(p, 0), most - 1) if -0.5 <= p <= most - 0.5 else None for p in places],
    )


def shares(place, most):
    low = int(place)
    return {low: 1 - (place - low), **({low + 1: place - low} if low + 1 < most else {})}


@pytest.mark.parametrize("size", SIZES)
def test_against_a_loop(size):
    single = Single(warping(size), X, ROIS)
    (y,) = single.forward()
    dy = random(*y.shape, seed=3)
    (dx, drois), _ = single.backward([dy])
    want, want_dx, want_drois = np.zeros_like(y), np.zeros_like(X), np.zeros_like(ROIS)
    h, w = X.shape[2:]
    for r, box in enumerate(ROIS):
        n = int(box[0])
        (top, bottom, rows), (left, right, columns) = (corners(box, size, k) for k in (0, 1))
        lengths = max(bottom - top + 1, 1), max(right - left + 1, 1)
        for c, i, j in np.ndindex(y.shape[1:]):
            if rows[i] is None or columns[j] is None:
                continue
            d = dy[r, c, i, j]
            for a, s in shares(rows[i], h).items():
                for b, t in shares(columns[j], w).items():
                    want[r, c, i, j] += s * t * X[n, c, a, b]
                    seen = True
                    for k, pixel, start, length, parts in (
                        (i, a, top, lengths[0], size[0]),
                        (j, b, left, lengths[1], size[1]),
                    ):
                        step = length / parts
                        first = floor((pixel - start - 1) / step - 1)
                        seen &= first <= k < ceil((pixel - start + 1) / step)
                    if seen and top <= a <= bottom and left <= b <= right:
                        want_dx[n, c, a, b] += s * t * d
            a, b = int(rows[i]), int(columns[j])
            if a + 1 > h - 1 or b + 1 > w - 1:
                continue
            s, t = rows[i] - a, columns[j] - b
            corner = X[n, c, a : a + 2, b : b + 2]
            across = np.array([1 - s, s]) @ (corner[:, 1] - corner[:, 0]) * d * 0.0625
            down = (corner[1] - corner[0]) @ np.array([1 - t, t]) * d * 0.0625
            p, q = (columns[j] - left) / lengths[1], (rows[i] - top) / lengths[0]
            want_drois[r, 1:] += (1 - p) * across, (1 - q) * down, p * across, q * down
    np.testing.assert_allclose(y, want, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(dx, want_dx, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(drois, want_drois, rtol=1e-9, atol=1e-12)


def test_gradient_of_the_map():
    """At corners on whole pixels MNC leaves out none, and the gradient is the derivative."""
    rois = np.array([[0, 16.0, 16, 112, 112], [1, 0, 32, 144, 96], [0, 16, 16, 16, 48]])
    check_gradient(warping((2, 3)), X, rois, propagate_down=[True, False])


def test_gradient_of_boxes_is_the_slope_but_for_the_length():
    """Along a plane x = column the box's ends move the corners by 1 - p / (l + 1) and p / (l + 1)."""
    x = np.broadcast_to(np.arange(9.0), (1, 1, 8, 9)).copy()
    single = Single(warping((2, 4)), x, np.array([[0, 16.0, 16, 80, 80]]))
    (y,) = single.forward()
    np.testing.assert_allclose(y[0, 0, 0], [1, 2, 3, 4])
    (_, drois), _ = single.backward([np.ones_like(y)])
    p = np.arange(4) / 5
    want = [0, 2 * 0.0625 * (1 - p).sum(), 0, 2 * 0.0625 * p.sum(), 0]
    np.testing.assert_allclose(drois[0], want, atol=1e-12)


def test_refused():
    with pytest.raises(ConfigError, match="pooled_h and pooled_w must be 1 or more"):
        Single(warping((0, 2)), X, ROIS)
    with pytest.raises(ConfigError, match=r"needs boxes \(R, 5\)"):
        Single(warping((2, 2)), X, ROIS[:, :4])
    with pytest.raises(DataError, match="a box is of image 3, but there are 2"):
        Single(warping((2, 2)), X, ROIS + np.eye(1, 5) * 2).forward()


MASKED = random(3, 4, 5, 6), random(3, 1, 5, 6, seed=1)


def test_mask_pooling():
    """x times the mask."""
    (y,) = Single('type: "MaskPooling"', *MASKED).forward()
    for n, c, i, j in np.ndindex(y.shape):
        assert y[n, c, i, j] == MASKED[0][n, c, i, j] * MASKED[1][n, 0, i, j]
    check_gradient('type: "MaskPooling"', *MASKED)
    with pytest.raises(ConfigError, match=r"masks \[3, 1, 5, 6\], not \[3, 1, 5, 5\]"):
        Single('type: "MaskPooling"', MASKED[0], MASKED[1][..., :5])


RESIZES = {
    "smaller": ("output_height: 3 output_width: 4", (3, 4)),
    "larger": ("output_height: 11 output_width: 9", (11, 9)),
    "factor": ("output_height: 1 output_width: 1 factor_height: 0.5 factor_width: 0.7", (3, 5)),
}


@pytest.mark.parametrize("case", RESIZES)
def test_mask_resize(case):
    """Bilinear, output i at i * H / Ho."""
    numbers, (rows, columns) = RESIZES[case]
    text = f'type: "MaskResize" mask_resize_param {{ {numbers} }}'
    x = random(2, 2, 6, 8)
    (y,) = Single(text, x).forward()
    assert y.shape == (2, 2, rows, columns)
    for n, c, i, j in np.ndindex(y.shape):
        places = (min(i * 6 / rows, 5), 6), (min(j * 8 / columns, 7), 8)
        down, across = (shares(*place) for place in places)
        want = sum(s * t * x[n, c, a, b] for a, s in down.items() for b, t in across.items())
        np.testing.assert_allclose(y[n, c, i, j], want, rtol=1e-5, atol=1e-6)
    check_gradient(text, x)


@pytest.mark.gpu
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("size", SIZES)
def test_on_gpu(size):
    """ROIWarping, with and without one of the gradients."""
    for down in ((True, True), (True, False), (False, True)):
        check_plain_on_gpu(warping(size), X, ROIS, propagate_down=down)


@pytest.mark.gpu
@pytest.mark.usefixtures("exact")
def test_masks_on_gpu():
    """MaskPooling, MaskResize."""
    for down in ((True, True), (True, False), (False, True)):
        check_plain_on_gpu('type: "MaskPooling"', *MASKED, propagate_down=down)
    for numbers, _ in RESIZES.values():
        text = f'type: "MaskResize" mask_resize_param {{ {numbers} }}'
        check_plain_on_gpu(text, random(2, 2, 6, 8), propagate_down=[True])
