import numpy as np
import pytest

from caffepy.ops import cpu

SHAPES = [(3, 4, 5), (6, 7, 1), (1, 5, 3), (4, 2, 20000)]


def data(shape, dtype, seed):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_against_numpy(shape, dtype):
    x, dy = data(shape, dtype, 0), data(shape, dtype, 1)
    mean, variance = np.empty((2, shape[1]), dtype)
    cpu.batch_norm_statistics(x, mean, variance)
    np.testing.assert_allclose(mean, x.mean((0, 2)), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(variance, x.var((0, 2)), rtol=1e-4, atol=1e-6)
    inverse = (1 / np.sqrt(variance + 1e-5)).astype(dtype)
    y, dx = np.empty_like(x), np.empty_like(x)
    cpu.batch_norm_forward(x, mean, inverse, y)
    np.testing.assert_allclose(y, (x - mean[:, None]) * inverse[:, None], rtol=1e-5, atol=1e-6)
    cpu.batch_norm_backward(x, mean, inverse, dy, dx)
    mean_dy, mean_product = dy.mean((0, 2)), (dy * y).mean((0, 2))
    expected = (dy - mean_dy[:, None] - y * mean_product[:, None]) * inverse[:, None]
    np.testing.assert_allclose(dx, expected, rtol=1e-3, atol=1e-4)
    cpu.batch_norm_backward(x, mean, inverse, dy, dy)
    np.testing.assert_array_equal(dy, dx)


def test_results_do_not_depend_on_the_threads():
    x = data((4, 5, 20000), np.float32, 0)
    threads = cpu.num_threads()
    try:
        answers = []
        for n in (1, 2, 3):
            cpu.set_num_threads(n)
            mean, variance = np.empty((2, 5), np.float32)
            cpu.batch_norm_statistics(x, mean, variance)
            answers.append((mean.tolist(), variance.tolist()))
    finally:
        cpu.set_num_threads(threads)
    assert answers[0] == answers[1] == answers[2]
