"""Boxes of SSD on a GPU beside the CPU's, with sizes that fill warps, blocks and shared memory, and
more.
"""

import numpy as np
import pytest

from caffepy.ops.boxes import (
    CENTER_SIZE,
    NOWHERE,
    PRIORS,
    BoxCode,
    LocationLoss,
    Matching,
    Mining,
    TruthCheck,
)
from tests.ops.cuda.compare import EXACT, agree, data

pytestmark = pytest.mark.gpu


def seeded(seed=0):
    return np.random.default_rng(seed)


def some_boxes(*shape, seed=0, size=0.3):
    draw = seeded(seed)
    low = draw.uniform(-0.1, 0.9, (*shape, 2))
    high = low + draw.uniform(0.02, size, (*shape, 2))
    # on a grid, so that many overlaps are equal
    return np.round(np.concatenate([low, high], axis=-1) * 32).astype(np.float32) / 32


def some_truths(count, images, seed=1):
    draw = seeded(seed)
    image = draw.integers(-1, images, count)
    label, difficult = draw.integers(1, 4, count), draw.integers(0, 2, count)
    found = np.column_stack([image, label, image * 0, some_boxes(count, seed=seed), difficult])
    return found.astype(np.float32)


def contiguous(value):
    return np.ascontiguousarray(value) if isinstance(value, np.ndarray) and value.ndim else value


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("label", [-1, 2])
@pytest.mark.parametrize(
    ("images", "count", "known"),
    [(3, 700, 20), (1, 1, 1), (2, 257, 0), (2, 40, 300), (2, 3000, 2500), (5, 64, 1)],
)
def test_matching(images, count, known, label, own):
    boxes = some_boxes(images if own else 1, count)
    truths = some_truths(known, images)
    for switches in ((True, False, True), (False, True, True), (True, True, False)):
        rule = Matching(0.4, *switches)
        results = (
            np.full((images, count), 7, np.int32),
            np.full((images, count), 7, np.float32),
            np.full((images, 2), 7, np.int32),
        )
        agree("match_boxes", boxes, truths, label, rule, *results, tolerance=EXACT)


@pytest.mark.parametrize(("count", "known"), [(600, 90), (9000, 300), (40, 90), (20000, 40)])
def test_boxes_that_are_all_alike_are_matched_in_their_order(count, known):
    boxes = np.broadcast_to(np.array([0.25, 0.25, 0.5, 0.5], np.float32), (1, count, 4)).copy()
    truths = np.zeros((known, 8), np.float32)
    truths[:, 1], truths[:, 3:7] = 1, boxes[0, 0]
    results = np.empty((1, count), "i"), np.empty((1, count), "f"), np.empty((1, 2), "i")
    agree("match_boxes", boxes, truths, -1, Matching(0.5, True, False, True), *results)


@pytest.mark.parametrize("count", [1, 31, 1000, 1025, 5000, 40000, 70000])
def test_choice_of_the_largest(count):
    draw = seeded(count)
    values = np.round(draw.standard_normal((6, count)), 1).astype(np.float32)
    values[5] = np.where(np.arange(count) % 2, 0.0, -0.0)  # of equal ones the first
    allowed = (draw.uniform(size=values.shape) < 0.7).astype(np.int32)
    allowed[2] = 0
    numbers = np.array([0, 1, 5, count // 2, count + 7, count // 3], np.int32)
    agree("choose_largest", values, allowed, numbers, np.full_like(allowed, 7), tolerance=EXACT)


@pytest.mark.parametrize("least", [-3, -30])
def test_choice_among_values_of_many_sizes(least):
    """Those wanted are far below the largest, near each other and apart."""
    values = 10 ** seeded(1).uniform(least, 2, (4, 9000)).astype(np.float32)
    values[1], values[1, ::900], values[2] = 1e-9, values[0, :10], -values[2]
    numbers = np.array([60, 3000, 5000, 8999], np.int32)
    chosen = np.full(values.shape, 7, np.int32)
    agree("choose_largest", values, np.ones_like(chosen), numbers, chosen, tolerance=EXACT)


@pytest.mark.parametrize("rows", [1, 300])
@pytest.mark.parametrize("classes", [1, 2, 21, 32, 81, 190, 700])
def test_losses_and_gradients_of_classes(classes, rows):
    x = data((rows, classes)) * 3
    labels = seeded().integers(-1, classes, rows).astype(np.int32)
    agree("class_losses", x, labels, np.empty(rows, np.float32), tolerance=(1e-5, 1e-5))
    factor = np.array(0.3, np.float32)
    agree("class_gradients", x, labels, factor, np.empty_like(x), tolerance=(1e-5, 1e-6))


@pytest.mark.parametrize("learns", [0.0, 0.04, 0.3])
@pytest.mark.parametrize("classes", [1, 2, 3, 21, 33, 190])
def test_gradients_of_the_classes_that_few_rows_learn(classes, learns):
    rows = 1031
    x = data((rows, classes)) * 3
    labels = seeded().integers(0, classes, rows).astype(np.int32)
    labels[seeded(1).uniform(size=rows) >= learns] = -1
    factor = np.array(0.3, np.float32)
    agree("class_gradients", x, labels, factor, np.empty_like(x), tolerance=(1e-5, 1e-6))


@pytest.mark.parametrize("classes", [4, 21, 700])
@pytest.mark.parametrize("count", [1, 300, 1031])
def test_losses_and_gradients_of_boxes(count, classes):
    scores, locations = data((3, count, classes)) * 3, data((3, count, 1, 4), seed=1)
    priors = np.stack([some_boxes(count), np.full((count, 4), 0.1, "f")])
    truths = some_truths(30, 3)
    truths[:, 5:7] = truths[:, 3:5] + 0.1  # sizes above 0
    matches = seeded().integers(-2, 30, (3, 1, count)).astype(np.int32)
    matches[seeded(1).uniform(size=matches.shape) < 0.9] = -1
    rule = LocationLoss(BoxCode(CENTER_SIZE), False, PRIORS)
    given = scores, locations, priors, truths, matches
    labels = np.full((3, count), 7, np.int32)
    for one_class in (False, True):
        losses = np.empty(matches.shape, "f"), np.empty(labels.shape, "f")
        agree("box_losses", *given, rule, 0, one_class, labels, *losses, tolerance=(1e-4, 1e-5))
    labels = np.where(matches[:, 0] >= 0, 2, seeded(2).integers(-9, 1, labels.shape))
    factors = 1.5, np.array(0.7, "f"), np.array(3, "f")
    diffs = np.empty_like(locations), np.empty_like(scores)
    labels = labels.astype(np.int32)
    agree("box_gradients", *given, labels, rule, *factors, *diffs, tolerance=(1e-4, 1e-6))


@pytest.mark.parametrize("classes", [2, 20, 21, 40, 81, 90])
@pytest.mark.parametrize(("count", "known"), [(1, 1), (300, 0), (1000, 40), (517, 400)])
def test_matching_with_losses(count, known, classes):
    """Also of images with more true boxes than a block has threads, and of wrong true boxes."""
    scores, locations = data((2, count, classes)) * 3, data((2, count, 1, 4), seed=1)
    priors = np.stack([some_boxes(count), np.full((count, 4), 0.1, "f")])
    truths = some_truths(known, 2)
    truths[:, 1], truths[:, 5:7] = 1, truths[:, 3:5] + 0.1
    rule = LocationLoss(BoxCode(CENTER_SIZE), False, PRIORS)
    shape = (2, count)
    ints = [np.full(s, 7, np.int32) for s in (shape, (2, 2), shape)]
    floats = [np.full(s, 7, np.float32) for s in (shape, (2, 1, count), shape)]
    found = ints[0], floats[0], ints[1], ints[2], *floats[1:]
    for inside, difficult in ((False, True), (True, False)):
        matching = Matching(0.4, True, inside, difficult)
        check = TruthCheck(classes, 0, difficult, difficult, np.zeros(2), np.zeros(2))
        given = scores, locations, priors, truths, matching, rule, check
        agree("match_with_losses", *given, *found, tolerance=(1e-4, 1e-5))


@pytest.mark.parametrize("eta", [1.0, 0.9])
@pytest.mark.parametrize(
    ("count", "most"), [(1, 1), (50, 50), (900, 40), (3000, 400), (1500, 1500), (40000, 33)]
)
def test_detections(count, most, eta):
    draw = seeded(count)
    scores = np.round(draw.uniform(size=(2, count, 3)), 3).astype(np.float32)
    for groups, background in ((1, 0), (3, -1)):
        boxes = some_boxes(2, groups, count, seed=count)
        found, counts = np.zeros((2, 3, most, 5), np.float32), np.zeros((2, 3), np.int32)
        given = boxes, scores, background, 0.25, 0.6, eta, found, counts
        agree("detect", *given, tolerance=EXACT)


@pytest.mark.parametrize("count", [1, 33, 1024, 9000])
def test_mining_and_what_is_lost(count):
    draw = seeded(count)
    losses = np.round(draw.standard_normal((4, count)), 1).astype(np.float32)
    overlaps = draw.uniform(size=losses.shape).astype(np.float32)
    truths, counts = some_truths(50, 4), np.array([[0, 9], [1, 0], [2, 7], [1, count]], np.int32)
    for groups, one_class in ((1, False), (3, False), (1, True)):
        matches = draw.integers(-2, 50, (4, groups, count)).astype(np.int32)
        matches[draw.uniform(size=matches.shape) < 0.8] = -1
        labels = np.full((4, count), 7, np.int32)
        agree("label_matches", truths, matches, 0, one_class, labels, tolerance=EXACT)
        own = matches[:, 0].copy()
        labels = np.maximum(own, 0)
        given = losses, own, overlaps, counts, 1.7, 0.4
        agree("mine_negatives", *given, labels.copy(), tolerance=EXACT)
        location, either = data(matches.shape, seed=2), draw.integers(-1, 3, own.shape, np.int32)
        norm, loss = np.empty((), np.float32), np.empty((), np.float32)
        for divisor in (None, 12.5):
            given = location, matches, losses, either, (0.7, 1.0), divisor, None, norm, loss
            agree("multibox_loss", *given, tolerance=(1e-4, 1e-4))
        mining = Mining(overlaps, counts, 1.7, 0.4)
        given = location[:, :1], own[:, None], losses, labels, (0.7, 1.0), None, mining, norm, loss
        agree("multibox_loss", *map(contiguous, given), tolerance=(1e-4, 1e-4))


@pytest.mark.parametrize("count", [0, 3, 2000])
@pytest.mark.parametrize("wrong", [None, 0, 5, -2, np.nan, np.inf])
def test_the_largest_wrong_class_is_put_down(wrong, count):
    truths = some_truths(count, 3)
    truths[:, 3:7] = np.abs(truths[:, 3:7])
    if count and wrong is not None:
        truths[-2:, :2], truths[-2:, 7] = [[1, wrong], [2, 4]], 0
    for any_class, difficult in ((False, True), (True, False)):
        check = TruthCheck(4, 0, any_class, difficult, np.zeros(2), np.zeros(2))
        agree("check_truths", truths, check, tolerance=EXACT)


def test_losses_and_gradients_of_locations():
    x, priors = data((2, 500, 1, 4)), np.stack([some_boxes(500), np.full((500, 4), 0.1, "f")])
    truths = some_truths(20, 2)
    matches = seeded().integers(-2, 20, (2, 1, 500)).astype(np.int32)
    rule = LocationLoss(BoxCode(CENTER_SIZE), False, NOWHERE)
    given = x, priors, truths, matches, rule
    agree("location_losses", *given, np.empty(matches.shape, np.float32))
    one = np.ones((), np.float32)
    agree("location_gradients", *given, one, np.empty_like(x))
