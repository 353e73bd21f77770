"""Average precision against sums by hand."""

import logging

import numpy as np
import pytest

from caffepy.core.average_precision import average_precision, mean_average_precision

SCORES, TRUE = np.array([0.5, 0.9, 0.7, 0.8, 0.6]), np.array([1, 1, 1, 0, 0])
# by scores: true, false, true, false, true; precisions 1, 1/2, 2/3, 1/2, 3/5 at recalls 1/4 .. 3/4
WANT = {
    "Integral": (1 + 2 / 3 + 3 / 5) / 4,
    "MaxIntegral": (1 + 2 / 3 + 3 / 5) / 4,
    "11point": (3 * 1 + 3 * 2 / 3 + 2 * 3 / 5) / 11,
    "101point": (26 * 1 + 25 * 2 / 3 + 25 * 3 / 5) / 101,
}


@pytest.mark.parametrize("version", WANT)
def test_average_precision(version: str) -> None:
    assert average_precision(SCORES, TRUE, 4, version) == pytest.approx(WANT[version])
    assert average_precision(SCORES[:0], TRUE[:0], 4, version) == 0
    assert average_precision(SCORES, TRUE, 0, version) == 0


def test_recalls_that_lie_on_a_level() -> None:
    """SSD counts them in single precision: of 10 true boxes the seventh and ninth fall short; COCO
    in double: of 100 the 35th.
    """
    scores, true = np.arange(20, 0, -1) / 20, np.arange(20) % 2  # every second one, to 10 of 10
    precision = 1 / 2  # at each true one, and at best from there on
    assert average_precision(scores, true, 10, "11point") == pytest.approx(precision)
    found = np.ones(7)
    assert average_precision(found, found, 10, "11point") == pytest.approx(7 / 11)
    assert average_precision(found[:6], found[:6], 10, "11point") == pytest.approx(7 / 11)
    assert average_precision(np.ones(8), np.ones(8), 10, "11point") == pytest.approx(9 / 11)
    for count in (28, 35):
        every = np.ones(count)
        reached = np.sum(np.linspace(0, 1, 101) <= count / 100)
        assert average_precision(every, every, 100, "101point") == pytest.approx(reached / 101)


def test_the_area_under_the_monotone_precision_is_larger() -> None:
    scores, true = np.array([0.9, 0.8, 0.7]), np.array([0, 1, 1])
    assert average_precision(scores, true, 2, "Integral") == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert average_precision(scores, true, 2, "MaxIntegral") == pytest.approx(2 / 3)


def test_the_mean_is_over_classes_with_a_number_of_true_boxes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    rows = [[-1, 1, 1, -1, -1], [-1, 2, 2, -1, -1], [-1, 3, 1, -1, -1]]
    rows += [[0, 1, 0.8, 1, 0], [0, 1, 0.9, 0, 1], [0, 2, 0.9, 0, 0], [0, 2, 0.8, 1, 0]]
    rows += [[-1, 2, 2, -1, -1], [0, 2, 0.7, 1, 0]]  # of another batch
    mean = mean_average_precision(np.array(rows), "Integral", show=True)
    assert mean == pytest.approx((1 / 2 + 2 / 4 + 0) / 3)
    assert "class2: 0.5" in caplog.messages
    assert "Nothing was found of class 3, which has 1 true boxes" in caplog.messages
    assert mean_average_precision(np.zeros((0, 5)), "Integral") == 0
