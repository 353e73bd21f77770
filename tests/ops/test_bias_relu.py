"""The gradients of a bias and a ReLU at once."""

import numpy as np
import pytest

from caffepy.ops import cpu


@pytest.mark.parametrize("shape", [(5, 7), (3, 4, 6), (2, 3, 4, 5), (0, 3, 2), (2, 3, 0)])
def test_relu_bias_backward(shape):
    rng = np.random.default_rng(0)
    y, dy = rng.standard_normal((2, *shape))
    db, axes = rng.standard_normal(shape[1]), (0, *range(2, len(shape)))
    kept, masked, sums = dy.copy(), np.where(y > 0, dy, 0), db.copy()
    cpu.relu_bias_backward(None, dy, sums)
    np.testing.assert_array_equal(dy, kept)
    np.testing.assert_allclose(sums, db + dy.sum(axis=axes))
    cpu.relu_bias_backward(y, dy, sums)
    np.testing.assert_array_equal(dy, masked)
    np.testing.assert_allclose(sums, db + kept.sum(axis=axes) + masked.sum(axis=axes))
    cpu.relu_bias_backward(y, kept, None)
    np.testing.assert_array_equal(kept, masked)
