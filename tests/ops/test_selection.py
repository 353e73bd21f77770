import numpy as np
import pytest

from caffepy.ops import cpu

X = np.arange(12.0).reshape(4, 3)


def test_rows_are_taken_and_added():
    index, y, wrong = np.array([3, 0.9, 3]), np.empty((3, 3)), np.zeros(2)
    cpu.take_rows(X, index, False, y, wrong)
    np.testing.assert_array_equal(y, X[[3, 0, 3]])
    assert not wrong.any()
    dx = np.ones((4, 3))
    cpu.add_rows(y, index, dx)
    np.testing.assert_array_equal(dx, 1 + np.array([X[0], 0 * X[0], 0 * X[0], 2 * X[3]]))


@pytest.mark.parametrize(
    ("bad", "cut"), [(4, True), (-1, True), (np.nan, True), (np.inf, False), (-0.5, False)]
)
def test_the_first_wrong_index_is_put_down(bad, cut):
    wrong = np.zeros(2)
    cpu.take_rows(X, np.array([0, bad, 9]), cut, np.empty((3, 3)), wrong)
    np.testing.assert_array_equal(wrong, [1, bad])


def test_wrong_indices_are_passed_over():
    dx = np.zeros((4, 3))
    cpu.add_rows(X, np.array([np.nan, -0.5, 4, -1]), dx)
    np.testing.assert_array_equal(dx, [X[1], *np.zeros((3, 3))])


def test_top_values():
    x, y = np.array([1.0, 3, np.nan, 3])[None, :, None], np.empty((1, 6, 1))
    cpu.top_values(x, 3, True, True, y)
    np.testing.assert_array_equal(y[0, :, 0], [2, 3, 1, np.nan, 3, 3])
