import numpy as np
import pytest

from tests.ops.cuda.compare import EXACT, agree
from tests.ops.cuda.test_boxes import seeded, some_boxes

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("most", [1, 30, 5000])
@pytest.mark.parametrize("count", [1, 64, 127, 128, 129, 1000, 4500])
def test_suppressed_overlaps(count, most):
    boxes = np.round(some_boxes(2, count, seed=count) * 500)
    kept, counts = np.zeros((2, most), np.int32), np.zeros(2, np.int32)
    agree("suppress_overlaps", boxes, 0.5, 1.0, kept, counts, tolerance=EXACT)


@pytest.mark.parametrize("unit", [0.0, 1.0])
@pytest.mark.parametrize("threshold", [0.0, 0.3, 1.0])
def test_boxes_without_an_area_and_those_that_overlap_just_so_much(threshold, unit):
    """Boxes that are points, turned around, far away or without an end, too."""
    boxes = np.round(some_boxes(1, 1500, seed=3, size=0.2) * 20)
    boxes[0, ::9, 2:] = boxes[0, ::9, :2]
    boxes[0, 4::31] = boxes[0, 4::31, ::-1]
    boxes[0, 5::97] *= 1e18
    boxes[0, 8::301, 2] = np.inf
    kept, counts = np.zeros((1, 1500), np.int32), np.zeros(1, np.int32)
    agree("suppress_overlaps", boxes, threshold, unit, kept, counts, tolerance=EXACT)


def test_boxes_behind_the_first_columns():
    """Many that overlap each other come first."""
    boxes = np.concatenate([np.tile([[0, 0, 9, 9.0]], (1300, 1)), some_boxes(800, seed=5) * 500])
    boxes = np.round(boxes).astype(np.float32)[None]
    kept, counts = np.zeros((1, 700), np.int32), np.zeros(1, np.int32)
    agree("suppress_overlaps", boxes, 0.7, 1.0, kept, counts, tolerance=EXACT)


def test_a_crowd_of_boxes():
    """Many around each object, more than are looked at in two launches."""
    draw = seeded(7)
    objects = np.round(some_boxes(150, seed=8, size=0.3) * 800)
    boxes = objects[draw.integers(0, len(objects), 12000)] + draw.normal(0, 5, (12000, 4))
    kept, counts = np.zeros((1, 1500), np.int32), np.zeros(1, np.int32)
    for most in (1500, 300):
        given = boxes.astype(np.float32)[None], 0.7, 1.0, kept[:, :most].copy(), counts
        agree("suppress_overlaps", *given, tolerance=EXACT)
