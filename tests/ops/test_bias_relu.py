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


@pytest.mark.parametrize("many", [1, 3])
def test_cut_relu_backward(many):
    rng = np.random.default_rng(0)
    widths = 2, 5, 1
    dys = [rng.standard_normal((3, sum(widths), 4, 2)) for _ in range(many)]
    ys = [rng.standard_normal((3, width, 4, 2)) for width in widths]
    dxs, dbs = [np.full(y.shape, 9.0) for y in ys], [rng.standard_normal(2), None, np.ones(1)]
    parts = np.split(sum(dys), np.cumsum(widths)[:-1], axis=1)
    want = [np.where(y > 0, part, 0) for y, part in zip(ys, parts, strict=True)]
    sums = [None if b is None else b + w.sum((0, 2, 3)) for b, w in zip(dbs, want, strict=True)]
    cpu.cut_relu_backward(dys, ys, dxs, dbs)
    for dx, db, masked, total in zip(dxs, dbs, want, sums, strict=True):
        np.testing.assert_allclose(dx, masked)
        assert db is None or np.allclose(db, total)
