"""Matrix products and biases against numpy."""

import numpy as np
import pytest

from caffepy.ops import cpu

SHAPES = [
    (1500, 3, 900),
    (1, 1, 1),
    (3, 5, 4),
    (64, 500, 10),
    (10, 64, 500),
    (300, 70, 200),
    (2, 3000, 2),
    (5, 0, 4),
    (0, 3, 4),
]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("transposed", ["", "a", "b", "ab"])
@pytest.mark.parametrize("shape", SHAPES)
def test_matmul(shape, transposed, dtype):
    m, k, n = shape
    rng = np.random.default_rng(0)
    a, b, start = (rng.standard_normal(s).astype(dtype) for s in ((m, k), (k, n), (m, n)))
    want = a.astype(np.float64) @ b.astype(np.float64)
    if "a" in transposed:
        a = a.T.copy().T
    if "b" in transposed:
        b = b.T.copy().T
    out = np.full((m, n), np.nan, dtype)
    cpu.matmul(a, b, out)
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-3)
    out[...] = start
    cpu.matmul(a, b, out, accumulate=True)
    np.testing.assert_allclose(out, want + start, rtol=1e-4, atol=1e-3)
    cpu.matmul(a, b, out, scale=-0.3)
    np.testing.assert_allclose(out, -0.3 * want, rtol=1e-4, atol=1e-3)
    out[...] = start
    cpu.matmul(a, b, out, accumulate=True, scale=-0.3)
    np.testing.assert_allclose(out, start - 0.3 * want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(3, 5, 4), (64, 500, 10), (0, 3, 4)])
def test_inner_product(shape, bias, relu):
    m, k, n = shape
    rng = np.random.default_rng(0)
    x, w, b = rng.standard_normal((m, k)), rng.standard_normal((n, k)), rng.standard_normal(n)
    want = np.einsum("mk,nk->mn", x, w) + (b if bias else 0)
    y = np.full((m, n), np.nan)
    cpu.inner_product(x, w.T, None, b if bias else None, relu, y)
    np.testing.assert_allclose(y, np.maximum(want, 0) if relu else want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    "shape", [(4, 3), (4, 3, 1), (2, 5, 7), (64, 32, 100), (0, 3, 4), (500, 7)]
)
def test_bias(shape, dtype):
    rng = np.random.default_rng(0)
    y, b = rng.standard_normal(shape).astype(dtype), rng.standard_normal(shape[1]).astype(dtype)
    want_y = y + b.reshape(-1, *[1] * (y.ndim - 2))
    want_db = b + y.sum(axis=(0, *range(2, y.ndim)), dtype=np.float64)
    db = b.copy()
    cpu.bias_gradient(y, db)
    cpu.add_bias(y, b)
    np.testing.assert_array_equal(y, want_y)
    np.testing.assert_allclose(db, want_db, rtol=1e-4, atol=1e-4)


def test_a_bias_gradient_that_copies():
    rng = np.random.default_rng(0)
    dy, db, copy = (
        rng.standard_normal((5, 3)).astype(np.float32),
        np.ones(3, np.float32),
        np.empty((5, 3), np.float16),
    )
    cpu.bias_gradient(dy, db, copy)
    np.testing.assert_allclose(db, 1 + dy.sum(0), rtol=1e-5)
    np.testing.assert_array_equal(copy, dy.astype(np.float16))
