import numpy as np
import pytest

from caffepy.device.threads import num_threads
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
    threads = num_threads()
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


def running(c):
    return [data(c, np.float64, 5), 1 + data(c, np.float64, 6) ** 2, np.array([3.0])]


def test_numbers_of_a_batch_and_of_the_running_sums():
    x, scale, bias, numbers = (
        data((4, 3, 5), np.float64, 0),
        *data((2, 3), np.float64, 1),
        np.empty((4, 3)),
    )
    means, variances, weight = before = running(3)
    sums = [a.copy() for a in before]
    cpu.batch_norm_prepare(x, sums, 0.9, 1e-3, (scale, bias), numbers)
    mean, variance = x.mean((0, 2)), x.var((0, 2))
    factor = scale / np.sqrt(variance + 1e-3)
    np.testing.assert_allclose(numbers, [mean, factor / scale, factor, bias - mean * factor])
    for got, old, new in zip(sums, before, (mean, variance * 20 / 19, 1), strict=True):
        np.testing.assert_allclose(got, 0.9 * old + new)
    cpu.batch_norm_stored(before, 1e-3, (None, None), numbers)
    inverse = 1 / np.sqrt(variances / weight + 1e-3)
    np.testing.assert_allclose(
        numbers, [means / weight, inverse, inverse, -means / weight * inverse]
    )
    cpu.batch_norm_stored([means, variances, np.zeros(1)], 1e-3, (scale, None), numbers)
    np.testing.assert_allclose(numbers[[0, 3]], 0)
    np.testing.assert_allclose(numbers[2], scale / np.sqrt(1e-3))


@pytest.mark.parametrize("ceiling", [None, np.inf, 1.5])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("addend", [False, True])
def test_norm_by_differences(addend, frozen, ceiling):
    x, other, dy, more = data((4, 3, 2, 5), np.float64, 0)
    scale, bias = data((2, 2), np.float64, 1)
    numbers, fixed = np.empty((4, 2)), np.empty((4, 2))
    cpu.batch_norm_prepare(x, running(2), 0.9, 1e-3, (scale, bias), fixed)

    def forward():
        y, sums = np.empty_like(x), running(2)
        if frozen:
            numbers[:2] = fixed[:2]
            numbers[2] = scale * numbers[1]
            numbers[3] = bias - numbers[0] * numbers[2]
        else:
            cpu.batch_norm_prepare(x, sums, 0.9, 1e-3, (scale, bias), numbers)
        cpu.norm_forward(x, numbers, other if addend else None, ceiling, y)
        return y

    y = forward()
    masked, dx, dscale, dbias = np.empty_like(x), np.empty_like(x), np.ones(2), np.ones(2)
    by_y = y if addend and ceiling else None
    grads = masked, dx, dscale, dbias
    cpu.norm_backward(x, numbers.copy(), [dy, more], by_y, ceiling, *grads, frozen)
    pairs = [(x, dx), (scale, dscale - 1), (bias, dbias - 1)] + [(other, masked)] * addend
    for array, gradient in pairs:
        for index in np.ndindex(array.shape):
            value = array[index]
            array[index] = value + 1e-6
            above = forward()
            array[index] = value - 1e-6
            below = forward()
            array[index] = value
            numeric = ((dy + more) * (above - below)).sum() / 2e-6
            assert gradient[index] == pytest.approx(numeric, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("ceiling", [None, np.inf, 0.5])
@pytest.mark.parametrize("several", [False, True])
def test_gradients_are_masked_as_by_norm_backward(several, ceiling):
    shape = 3, 4, 5
    x, dy, more, y, numbers = (data(shape, np.float64, seed) for seed in range(5))
    dys, of = [dy, more][: 1 + several], numbers[:, :, 0].repeat(2, 0)[:4]
    y = None if ceiling is None else y
    want, have = np.zeros(shape), dys[0].copy()
    cpu.norm_backward(x, of, dys, y, ceiling, want, None, None, None, False)
    cpu.norm_mask([have, *dys[1:]], y, ceiling, have)
    np.testing.assert_array_equal(have, want)
    cpu.norm_mask(dys, y, ceiling, have := np.zeros(shape))
    np.testing.assert_array_equal(have, want)
