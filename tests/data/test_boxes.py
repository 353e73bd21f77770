"""Boxes: windows that samplers accept, held to a loop; boxes that follow their image."""

import numpy as np
import pytest
from google.protobuf import text_format

from caffepy.data import boxes
from caffepy.proto.caffe_pb2 import BatchSampler, EmitConstraint, ResizeParameter

OBJECTS = np.array(
    [[1, 0, 0.1, 0.2, 0.45, 0.7, 0], [2, 0, 0.5, 0.3, 0.9, 0.65, 0], [1, 1, 0.2, 0.2, 0.2, 0.4, 1]],
    np.float32,
)
SAMPLER = "sampler { min_scale: 0.3 max_scale: 1 min_aspect_ratio: 0.5 max_aspect_ratio: 2 }"
CONSTRAINTS = {
    "none": "",
    "overlap": "min_jaccard_overlap: 0.4",
    "little overlap": "max_jaccard_overlap: 0.05",
    "of the sample": "min_sample_coverage: 0.3 max_sample_coverage: 0.5",
    "of the object": "min_object_coverage: 0.9",
    "the first counts": "min_object_coverage: 0.9 min_jaccard_overlap: 0.2",
}


def common(a, b):
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    return width * height if width > 0 and height > 0 else 0


def area(box):
    return (box[2] - box[0]) * (box[3] - box[1])


def satisfies(window, objects, constraint):
    """As the fork does it: an object that passed one test stays found."""
    tests = [
        ("jaccard_overlap", lambda i, o: i / (area(window) + area(o) - i) if i else 0),
        ("sample_coverage", lambda i, o: i / area(window)),
        ("object_coverage", lambda i, o: i / area(o) if i else 0),
    ]
    given = [
        (name, value)
        for name, value in tests
        if constraint.HasField(f"min_{name}") or constraint.HasField(f"max_{name}")
    ]
    found = not given
    for o in objects:
        for name, value in given:
            part = value(common(window, o), o)
            least, most = (
                getattr(constraint, f"{side}_{name}")
                if constraint.HasField(f"{side}_{name}")
                else d
                for side, d in (("min", -1), ("max", 2))
            )
            if part < least or part > most:
                break
            found = True
    return found


@pytest.mark.parametrize("case", CONSTRAINTS)
def test_samples_against_a_loop(case):
    text = f"{SAMPLER} sample_constraint {{ {CONSTRAINTS[case]} }} max_sample: 3 max_trials: 40"
    sampler = text_format.Parse(text, BatchSampler())
    draws = np.random.default_rng(1).random((1, 40, 4))
    expected = []
    for a, b, c, d in draws[0]:
        scale, aspect = 0.3 + a * 0.7, 0.5 + b * 1.5
        aspect = min(max(aspect, scale**2), 1 / scale**2)
        width, height = scale * aspect**0.5, scale / aspect**0.5
        x, y = c * max(1 - width, 0), d * max(1 - height, 0)
        window = x, y, x + width, y + height
        if len(expected) < 3 and satisfies(
            window, OBJECTS[:, boxes.BOX].tolist(), sampler.sample_constraint
        ):
            expected.append(window)
    assert len(expected) == 3
    settings = boxes.Samplers([sampler])._settings
    windows = np.zeros((40, 4))
    found = boxes._sample(draws, settings, OBJECTS[:, boxes.BOX].astype(np.float64), windows)
    assert found == 3
    np.testing.assert_allclose(windows[:3], expected, rtol=1e-6)


def test_nothing_is_drawn_without_an_object_that_fits():
    rng = np.random.default_rng(0)
    needs = text_format.Parse(
        "sample_constraint { min_jaccard_overlap: 0.1 } max_trials: 5", BatchSampler()
    )
    assert boxes.Samplers([needs]).draw(OBJECTS[:0], rng) is None
    needs.use_original_image = False
    assert boxes.Samplers([needs]).draw(OBJECTS, rng) is None


def test_objects_seen_from_a_window():
    window = np.array([0.3, 0.4, 0.8, 0.9], np.float32)
    seen = boxes.project(OBJECTS, window, None)
    np.testing.assert_allclose(seen[:, boxes.BOX], [[0, 0, 0.3, 0.6], [0.4, 0, 1, 0.5]], atol=1e-6)
    centred = boxes.project(OBJECTS, window, EmitConstraint())
    np.testing.assert_array_equal(centred, seen[1:])  # the first one's centre is at 0.275
    half = EmitConstraint(emit_type=EmitConstraint.MIN_OVERLAP, emit_overlap=0.5)
    np.testing.assert_array_equal(boxes.project(OBJECTS, window, half), seen[1:])


@pytest.mark.parametrize("size", [(20, 40), (40, 20)])
def test_boxes_follow_an_image_with_bars(size):
    text = "resize_mode: FIT_LARGE_SIZE_AND_PAD height: 30 width: 30"
    param = text_format.Parse(text, ResizeParameter())
    (after,) = boxes.follow_resize(OBJECTS[:1], size, param)[:, boxes.BOX]
    x0, y0, x1, y1 = OBJECTS[0, boxes.BOX]
    half = [x0, 0.25 + y0 / 2, x1, 0.25 + y1 / 2]
    if size[0] > size[1]:
        half = [0.25 + x0 / 2, y0, 0.25 + x1 / 2, y1]
    np.testing.assert_allclose(after, half, rtol=1e-6)


@pytest.mark.parametrize(
    "text",
    [
        "resize_mode: WARP height: 16 width: 16",
        "resize_mode: FIT_LARGE_SIZE_AND_PAD height: 30 width: 20",
    ],
)
def test_boxes_follow_a_resize_with_the_fork_s_roundings(text):
    """To the last bit, since a constraint may ask whether a centre lies at an edge."""
    param = text_format.Parse(text, ResizeParameter())
    objects = np.zeros((400, boxes.COLUMNS), np.float32)
    objects[:, boxes.BOX] = np.sort(np.random.default_rng(0).random((400, 2, 2)), 1).reshape(-1, 4)
    objects[:, boxes.BOX] = objects[:, boxes.BOX].round(2)
    width, height, new, tall = map(np.float32, (52, 36, param.width, param.height))
    after = boxes.follow_resize(objects, (36, 52), param)
    for column in (2, 4):
        expected = objects[:, column] * width * new / width / new
        np.testing.assert_array_equal(after[:, column], np.minimum(expected, 1))
    bar = np.float32(0)
    if param.resize_mode == ResizeParameter.FIT_LARGE_SIZE_AND_PAD:
        bar = (tall - new / (width / height)) / 2
    for column in (3, 5):
        expected = (objects[:, column] * height * (tall - 2 * bar) / height + bar) / tall
        np.testing.assert_array_equal(after[:, column], expected)


def test_a_part_is_compared_with_emit_overlap_after_a_division():
    """0.8 of this box lies in the window, by a division in float32 a little more."""
    objects = np.array([[1, 0, 0.1, 0.4, 0.6, 0.8, 0]], np.float32)
    emit = EmitConstraint(emit_type=EmitConstraint.MIN_OVERLAP, emit_overlap=0.8)
    window = np.array([0, 0, 0.5, 1], np.float32)
    assert len(boxes.project(objects, window, emit)) == 1
    lower = objects + np.array([0, 0, 0, 0, 0.1, 0, 0], np.float32)
    assert len(boxes.project(lower, window, emit)) == 0
