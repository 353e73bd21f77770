import numpy as np
import pytest

from tests.ops.cuda.compare import agree, data

pytestmark = pytest.mark.gpu

DTYPES = [np.float32, np.float64]
SHAPES = [
    (4, 3, 8),
    (2, 5, 49),
    (64, 33, 1),
    (3, 2, 3025),
    (1, 1, 1),
    (700, 40, 1),
    (16, 64, 784),
    (5, 2000, 3),
    (3, 4, 2),
]
SUMS = (1e-4, 1e-4)  # of up to 12,544 products of float32 numbers, which the CPU adds up in float32 within a plane


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_batch_norm(shape, dtype):
    x, dy, c = 2 * data(shape, dtype) + 3, data(shape, dtype, 1), shape[1]
    agree("batch_norm_statistics", x, np.empty(c, dtype), np.empty(c, dtype), tolerance=(1e-5, 1e-5))
    mean = x.mean((0, 2))
    inverse = (1 / np.sqrt(x.var((0, 2)) + 1e-3)).astype(dtype)
    agree("batch_norm_forward", x, mean, inverse, np.empty_like(x))
    agree("batch_norm_forward", x, mean, inverse, x)
    agree("batch_norm_backward", x, mean, inverse, dy, np.empty_like(x), tolerance=SUMS)
    agree("batch_norm_backward", x, mean, inverse, dy, dy, tolerance=SUMS)


def test_statistics_of_large_means():
    x = data((8, 4, 100)) + np.float32(1e4)
    agree("batch_norm_statistics", x, np.empty(4, "f"), np.empty(4, "f"), tolerance=(1e-3, 0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (0, 3, 4)])
def test_scale(shape, dtype):
    x, dy, c = data(shape, dtype), data(shape, dtype, 1), shape[1]
    scale, bias, dscale, dbias = (data(c, dtype, seed) for seed in range(2, 6))
    agree("scale_forward", x, scale, bias, np.empty_like(x))
    agree("scale_forward", x, scale, None, np.empty_like(x))
    agree("scale_forward", x, scale, bias, x)
    agree("scale_backward", x, scale, dy, np.empty_like(x), dscale, dbias, tolerance=SUMS)
    agree("scale_backward", x, scale, dy, dy, dscale, None, tolerance=SUMS)
    agree("scale_backward", x, scale, dy, None, None, dbias, tolerance=SUMS)
    agree("scale_backward", x, scale, dy, dy, None, None)
