"""Local response normalization against its formula."""

import numpy as np
import pytest

from caffepy.ops import cpu

CASES = {
    "5": ((2, 7, 3, 5), 5, 1e-1, 0.75, 1.0),
    "3 of 2 channels": ((2, 2, 4, 4), 3, 0.5, 0.75, 2.0),
    "beta": ((2, 6, 3, 3), 3, 0.5, 0.6, 1.0),
    "1 channel": ((3, 1, 4, 4), 5, 0.5, 0.75, 1.0),
    "wide plane": ((1, 8, 40, 37), 5, 1e-4, 0.75, 1.0),
}


def formula(x, dy, size, alpha, beta, k):
    half, channels = size // 2, x.shape[1]

    def window_sum(a):
        return np.stack([a[:, max(0, c - half) : c + half + 1].sum(1) for c in range(channels)], 1)

    s = k + alpha / size * window_sum(x * x)
    y = x * s**-beta
    return y, s, dy * s**-beta - 2 * alpha * beta / size * x * window_sum(dy * y / s)


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 2e-6), (np.float64, 1e-13)])
@pytest.mark.parametrize("case", CASES)
def test_as_the_formula(case, dtype, tolerance):
    shape, size, alpha, beta, k = CASES[case]
    rng = np.random.default_rng(0)
    x, dy = 3 * rng.standard_normal(shape), rng.standard_normal(shape)
    want = formula(x, dy, size, alpha, beta, k)
    x, dy = x.astype(dtype), dy.astype(dtype)
    y, s, dx = (np.full(shape, np.nan, dtype) for _ in range(3))
    cpu.lrn_forward(x, y, s, (size, alpha, beta, k))
    cpu.lrn_backward(x, y, s, dy, dx, (size, alpha, beta, k))
    for have, w in zip((y, s, dx), want, strict=True):
        np.testing.assert_allclose(have, w, rtol=tolerance, atol=tolerance * np.abs(w).max())


def test_maxima_of_it():
    (kernel, stride), shape = (3, 2), (2, 6, 7, 9)
    terms, window = (3, 0.5, 0.75, 2.0), ((kernel, kernel), (stride, stride), (0, 0))
    rng = np.random.default_rng(0)
    x = np.maximum(rng.standard_normal(shape), 0)
    dy, g = rng.standard_normal((2, 6, 3, 4)), np.zeros(shape)
    normalized = formula(x, x, *terms)[0]
    want = np.empty_like(dy)
    for n, c, i, j in np.ndindex(*dy.shape):
        rows, columns = (slice(stride * at, stride * at + kernel) for at in (i, j))
        part = normalized[n, c, rows, columns]
        want[n, c, i, j] = part.max()
        g[n, c, rows, columns].flat[part.argmax()] += dy[n, c, i, j]
    y, index, dx, db = np.empty_like(dy), np.empty(dy.shape, np.int32), x.copy(), np.ones(6)
    cpu.lrn_max_pool_forward(x, y, index, terms, window)
    np.testing.assert_allclose(y, want, rtol=1e-13)
    cpu.lrn_max_pool_backward(dx, dy, index, dx, terms, window, db)
    gradient = np.where(x > 0, formula(x, g, *terms)[2], 0)
    np.testing.assert_allclose(dx, gradient, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(db, 1 + gradient.sum(axis=(0, 2, 3)), rtol=1e-12)
