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
