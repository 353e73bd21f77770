"""Margins at labels, against a loop."""

import numpy as np
import pytest

from caffepy.core.errors import ConfigError, DataError
from caffepy.proto.caffe_pb2 import TEST

from .harness import Single, check_gradient, random
from .on_gpu import check_plain_on_gpu

SCORES = np.array([[0.9, 0.2, -1], [0.1, 0.6, 0.3], [0.5, 0.6, 0.2]])
LABELS = np.array([0.0, 1, 2])
FIXED = 'type: "LabelSpecificAdd" label_specific_add_param { bias: -0.35 }'
FALLING = (
    'type: "LabelSpecificAdd" top: "y" top: "bias" label_specific_add_param { iteration: 10 '
    "bias_base: 0.1 bias_gamma: -0.01 bias_power: 2 bias_min: -0.15 bias_max: 0 }"
)


def moved(bias):
    y = SCORES.copy()
    for row, label in zip(y, LABELS.astype(int), strict=True):
        if row[label] > -bias:
            row[label] += bias
    return y


def test_fixed_margin_against_a_loop():
    single = Single(FIXED, SCORES, LABELS)
    (y,) = single.forward()
    np.testing.assert_allclose(y, moved(-0.35), rtol=1e-6)
    assert (y != SCORES).sum() == 2
    check_gradient(FIXED, SCORES, LABELS, propagate_down=[True, False])


def test_falling_margin_against_a_loop():
    """Bounded, and counted on from `iteration`, also by a resumed run."""
    single = Single(FALLING, SCORES, LABELS, tops=2)
    for t in (10, 11, 12, 13):
        bias = min(max(0.1 + (1 - 0.01 * t) ** 2 - 1, -0.15), 0)
        y, told = single.forward()
        np.testing.assert_allclose(told, [bias], rtol=1e-5)
        np.testing.assert_allclose(y, moved(bias), rtol=1e-5)
    other = Single(FALLING, SCORES, LABELS, tops=2)
    other.layer.set_state(single.layer.state())
    np.testing.assert_array_equal(other.forward()[1], single.forward()[1])


def test_no_margin_in_test_phase():
    single = Single(FALLING, SCORES, LABELS, tops=2, phase=TEST)
    y, bias = single.forward()
    np.testing.assert_array_equal(y, SCORES)
    assert bias == 0


def test_wrong_labels_and_shapes():
    with pytest.raises(DataError, match="label 3 is not one of the 3 classes 0 to 2"):
        Single(FIXED, SCORES, np.array([0.0, 3, 1])).forward()
    with pytest.raises(ConfigError, match="2 labels do not fit 3 rows"):
        Single(FIXED, SCORES, np.zeros(2))


@pytest.mark.gpu
@pytest.mark.parametrize("param", ["bias: -0.35", "bias_base: -0.35 bias_min: -0.5"])
def test_on_gpu(param):
    """Also by a computed bias, the same in each pass."""
    text = f'type: "LabelSpecificAdd" label_specific_add_param {{ {param} }}'
    labels = np.array([0.0, 4, 2, 2])
    check_plain_on_gpu(text, random(4, 5), labels, tops=2, propagate_down=[True, False])


def test_nothing_to_move():
    assert Single(FIXED, np.zeros((0, 3)), np.zeros(0)).forward()[0].shape == (0, 3)
    assert Single(FIXED, np.zeros((2, 0)), np.zeros(2)).forward()[0].shape == (2, 0)
    with pytest.raises(ConfigError, match=r"needs \(N, C\), not \[3\]"):
        Single(FIXED, np.zeros(3), np.zeros(3))
