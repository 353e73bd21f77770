"""PriorBox against a loop of SSD's rules, and a GPU."""

from itertools import product
from math import sqrt

import numpy as np
import pytest

from caffepy.core.errors import ConfigError

from .harness import Single
from .on_gpu import check_plain_on_gpu

FEATURES, IMAGE = np.zeros((2, 4, 3, 5)), np.zeros((2, 3, 60, 80))
# settings; sides (width, height) of the boxes of a place, steps (down, right), image (h, w)
CASES = {
    "plain": ("min_size: 9.8", [(9, 9)], (20, 16), (60, 80)),
    "all": (
        "min_size: 10 min_size: 20 max_size: 15.9 max_size: 33 aspect_ratio: 2 clip: true "
        "variance: 0.1 variance: 0.2 variance: 0.3 variance: 0.4",
        [
            *[(10, 10), (sqrt(150), sqrt(150)), (10 * sqrt(2), 10 / sqrt(2))],
            *[(10 / sqrt(2), 10 * sqrt(2)), (20, 20), (sqrt(660), sqrt(660))],
            *[(20 * sqrt(2), 20 / sqrt(2)), (20 / sqrt(2), 20 * sqrt(2))],
        ],
        (20, 16),
        (60, 80),
    ),
    "ratios": (
        "min_size: 4 aspect_ratio: 1 aspect_ratio: 4 aspect_ratio: 0.25 offset: 0 step: 8 "
        "img_size: 100",
        [(4, 4), (8, 2), (2, 8)],
        (8, 8),
        (100, 100),
    ),
    "denser": (
        "min_size: 10 aspect_ratio: 4 denser_prior_boxes: true offset: 0.25 flip: false",
        [(10, 10)] * 2 + [(20, 5)] * 2,
        (20, 16),
        (60, 80),
    ),
    "clustered": (
        "height: 10.5 width: 4 height: 3 width: 20.25",
        [(4, 10.5), (20.25, 3)],
        (20, 16),
        (60, 80),
    ),
    "not flipped": (
        "min_size: 4 aspect_ratio: 4 flip: false step_h: 7 step_w: 9 img_h: 50 img_w: 70 "
        "variance: 0.2",
        [(4, 4), (8, 2)],
        (7, 9),
        (50, 70),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_against_a_loop(case):
    text, sides, steps, (h, w) = CASES[case]
    (y,) = Single(f'type: "PriorBox" prior_box_param {{ {text} }}', FEATURES, IMAGE).forward()
    assert y.shape == (1, 2, 3 * 5 * len(sides) * 4)
    offset, boxes = {"denser": 0.25, "ratios": 0}.get(case, 0.5), []
    for i, j in np.ndindex(3, 5):
        down, right = (i + offset) * steps[0], (j + offset) * steps[1]
        for k, (wide, high) in enumerate(sides):
            y0 = (i + 1) * steps[0] if case == "denser" and k % 2 else down
            box = [right - wide / 2, y0 - high / 2, right + wide / 2, y0 + high / 2]
            boxes.append(np.array(box) / [w, h, w, h])
    np.testing.assert_allclose(
        y[0, 0].reshape(-1, 4), np.clip(boxes, 0, 1) if "clip" in text else boxes, atol=1e-6
    )
    variance = {"all": [0.1, 0.2, 0.3, 0.4], "not flipped": [0.2] * 4}.get(case, [0.1] * 4)
    np.testing.assert_allclose(y[0, 1].reshape(-1, 4), [variance] * len(boxes), rtol=1e-6)


def test_boxes_of_faceboxes_against_a_loop():
    text = "min_size: 64 min_size: 32 min_size: 9 faceboxes: true step: 16"
    (y,) = Single(f'type: "PriorBox" prior_box_param {{ {text} }}', FEATURES, IMAGE).forward()
    boxes = []
    for i, j in np.ndindex(3, 5):
        for side, steps in ((64, (-16, 0)), (32, (-16, -8, 0, 8)), (9, (0,))):
            for down, right in product(steps, steps):
                y0, x0, half = (i + 0.5) * 16 + down, (j + 0.5) * 16 + right, (side - 1) / 2
                box = np.array([x0 - half, y0 - half, x0 + half, y0 + half])
                boxes.append(box / [80, 60, 80, 60])
    np.testing.assert_allclose(y[0, 0].reshape(-1, 4), boxes, atol=1e-6)


def test_boxes_without_squares():
    setting = "min_size: 4 min_size: 9 aspect_ratio: 2 aspect_ratio: 1 %s"
    both, alone = (
        Single(
            f'type: "PriorBox" prior_box_param {{ {setting % given} }}', FEATURES, IMAGE
        ).forward()[0]
        for given in ("", "use_default: false")
    )
    both = both.reshape(2, -1, 2, 3, 4)  # at each place, for each size: the square first
    np.testing.assert_array_equal(alone.reshape(2, -1, 2, 2, 4), both[:, :, :, 1:])


def test_clustered_boxes_under_their_own_name():
    text = f"prior_box_param {{ {CASES['clustered'][0]} }}"
    a, b = (
        Single(f'type: "{name}" {text}', FEATURES, IMAGE).forward()[0]
        for name in ("PriorBox", "PriorBoxClustered")
    )
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "needs min_size, above 0"),
        ("min_size: 1 min_size: 2 max_size: 3", "has 2 min_size and 1 max_size"),
        ("min_size: 4 max_size: 4", "max_size 4 must be above min_size 4"),
        ("min_size: 4 aspect_ratio: 0", "aspect_ratio must be above 0"),
        ("min_size: 4 use_default: false", "needs an aspect_ratio other than 1, and no max_size"),
        ("min_size: 4 max_size: 6 aspect_ratio: 2 use_default: false", "and no max_size"),
        ("min_size: 4 variance: 1 variance: 2", "one variance or four"),
        ("min_size: 4 step: 2 step_h: 2", "both step and step_h"),
        ("min_size: 4 img_w: 2", "has img_w alone; give both, or img_size"),
        ("min_size: 4 step: -1", "step must be above 0"),
        ("height: 4 width: 2 width: 1", "as many heights as widths, above 0"),
        ("min_size: 4 height: 4 width: 2", "needs min_size, or as many heights as widths"),
        ("min_size: 4 faceboxes: true denser_prior_boxes: true", "exclude each other"),
        ("min_size: nan", "not finite"),
        ("min_size: 4 max_size: inf", "not finite"),
    ],
)
def test_settings_that_make_no_boxes_are_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        Single(f'type: "PriorBox" prior_box_param {{ {text} }}', FEATURES, IMAGE)


def test_a_map_without_places_is_refused():
    with pytest.raises(ConfigError, match=r"bottom 0 of PriorBox has no places: \[2, 4, 0, 3\]"):
        Single('type: "PriorBox" prior_box_param { min_size: 4 }', np.zeros((2, 4, 0, 3)), IMAGE)


def test_bottoms_need_four_axes():
    with pytest.raises(ConfigError, match=r"not \[2, 4\], bottom 1"):
        Single('type: "PriorBox" prior_box_param { min_size: 4 }', FEATURES, np.zeros((2, 4)))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_on_gpu(case):
    text = f'type: "PriorBox" prior_box_param {{ {CASES[case][0]} }}'
    check_plain_on_gpu(text, FEATURES, IMAGE, propagate_down=[False, False])
