import numpy as np
import pytest

from caffepy.device.threads import num_threads
from caffepy.ops import cpu
from caffepy.ops.cpu.elementwise import DOT_BLOCK, GRAIN

DTYPES = [np.float32, np.float64]
SIZES = [0, 1, 7, 1000, 5 * GRAIN + 3]


def arrays(n, size, dtype):
    rng = np.random.default_rng(n)
    return [rng.standard_normal(size).astype(dtype) for _ in range(n)]


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_flat_functions(size, dtype):
    x, y, z = arrays(3, size, dtype)
    out = np.empty_like(x)
    cpu.scaled(0.5, x, out)
    close(out, 0.5 * x)
    cpu.axpy(-2, y, out)
    close(out, 0.5 * x - 2 * y)
    cpu.add(z, out)
    close(out, 0.5 * x - 2 * y + z)
    cpu.multiply(x, y, out)
    close(out, x * y)
    cpu.eltwise_sum((x, y, z), (1, -2, 3), out)
    close(out, x - 2 * y + 3 * z)
    index = np.empty(size, np.int32)
    cpu.eltwise_max((x, y, z), out, index)
    np.testing.assert_array_equal(out, np.maximum(np.maximum(x, y), z))
    np.testing.assert_array_equal(np.stack([x, y, z])[index, np.arange(size)], out)
    cpu.eltwise_select(index, 2, x, out)
    np.testing.assert_array_equal(out, np.where(index == 2, x, 0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0, 1, 1000, 3 * DOT_BLOCK + 5])
def test_dot_sums_in_double_precision(size, dtype):
    x, y = arrays(2, size, dtype)
    assert cpu.dot(x, y) == pytest.approx(float((x.astype(float) * y).sum()), rel=1e-10, abs=1e-10)


SHAPES = [(3, 4, 5), (6, 7, 1), (1, 5, 3), (1, 1, 4), (0, 3, 2), (0, 3, 1), (4, 300, 300)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_scale(shape, dtype):
    x, dy = (a.reshape(shape) for a in arrays(2, int(np.prod(shape)), dtype))
    scale, bias = arrays(2, shape[1], dtype)
    y = np.empty_like(x)
    cpu.scale_forward(x, scale, bias, y)
    close(y, x * scale[:, None] + bias[:, None])
    cpu.scale_forward(x, scale, None, y)
    close(y, x * scale[:, None])
    dx, dscale, dbias = np.empty_like(x), np.ones_like(scale), np.ones_like(bias)
    cpu.scale_backward(x, scale, dy, dx, dscale, dbias)
    close(dx, dy * scale[:, None])
    np.testing.assert_allclose(dscale, 1 + (dy * x).sum((0, 2)), rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(dbias, 1 + dy.sum((0, 2)), rtol=1e-3, atol=1e-3)
    before = dscale.copy()
    cpu.scale_backward(x, scale, dy, None, None, dbias)
    np.testing.assert_array_equal(dscale, before)
    cpu.scale_backward(x, scale, dy, dy, None, None)
    np.testing.assert_array_equal(dy, dx)


def test_results_do_not_depend_on_the_threads():
    x, y = arrays(2, 12 * GRAIN, np.float32)
    shape = (4, 3, GRAIN)
    scale = np.ones(3, np.float32)

    def results():
        dscale, dbias = np.zeros_like(scale), np.zeros_like(scale)
        cpu.scale_backward(x.reshape(shape), scale, y.reshape(shape), None, dscale, dbias)
        return [cpu.dot(x, y), *dscale, *dbias]

    threads = num_threads()
    try:
        answers = []
        for n in (1, 2, 3):
            cpu.set_num_threads(n)
            answers.append(results())
    finally:
        cpu.set_num_threads(threads)
    assert answers[0] == answers[1] == answers[2]
