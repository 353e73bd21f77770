import numpy as np
import pytest

from tests.ops.cuda.compare import agree, data

pytestmark = pytest.mark.gpu

SHAPES = [(2, 96, 55, 55), (3, 1, 5, 5), (1, 17, 3, 1), (4, 16, 7, 7), (0, 8, 4, 4), (2, 5, 6)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [1, 3, 5, 7, 9, 15])
@pytest.mark.parametrize("beta", [0.75, 0.6])
@pytest.mark.parametrize("shape", SHAPES)
def test_both_ways(shape, size, beta, dtype):
    from caffepy.ops import cpu

    x, dy = 3 * data(shape, dtype), data(shape, dtype, 1)
    y, scale = np.empty_like(x), np.empty_like(x)
    agree("lrn_forward", x, y, scale, size, 0.5, beta, 1.5)
    if x.size:
        cpu.lrn_forward(x, y, scale, size, 0.5, beta, 1.5)
    agree("lrn_backward", x, y, scale, dy, np.empty_like(x), size, 0.5, beta)
