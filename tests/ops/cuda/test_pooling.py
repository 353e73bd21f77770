import numpy as np
import pytest

from tests.ops.cuda.compare import CLOSE, EXACT, agree, data

pytestmark = pytest.mark.gpu

CASES = {  # (N, C, H, W), kernel, stride, pad
    "lenet": ((4, 20, 24, 24), (2, 2), (2, 2), (0, 0)),
    "caffenet": ((8, 96, 55, 55), (3, 3), (2, 2), (0, 0)),
    "googlenet": ((2, 64, 112, 112), (3, 3), (2, 2), (0, 0)),
    "padded": ((2, 5, 14, 14), (3, 3), (1, 1), (1, 1)),
    "oblong": ((3, 2, 7, 11), (3, 2), (2, 1), (1, 0)),
    "one": ((1, 1, 1, 1), (1, 1), (1, 1), (0, 0)),
    "global": ((3, 70, 7, 7), (7, 7), (1, 1), (0, 0)),
    "gaps": ((2, 3, 9, 9), (2, 2), (3, 3), (0, 0)),
    "large": ((1, 2, 200, 300), (5, 5), (2, 2), (2, 2)),
    "wide": ((2, 3, 40, 40), (9, 9), (4, 4), (3, 3)),
    "empty": ((0, 3, 8, 8), (2, 2), (2, 2), (0, 0)),
}


def top(size, kernel, stride, pad):
    n = -(-(size + 2 * pad - kernel) // stride) + 1
    return n - 1 if pad and (n - 1) * stride >= size + pad else n


def top_shape(shape, kernel, stride, pad):
    return (*shape[:2], *(top(*sizes) for sizes in zip(shape[2:], kernel, stride, pad, strict=True)))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("case", CASES)
def test_max(case, dtype):
    from caffepy.ops import cpu

    shape, *how = CASES[case]
    x = np.round(data(shape, dtype), 1)  # so that windows have several largest elements
    y = np.empty(top_shape(shape, *how), dtype)
    index = np.empty(y.shape, np.int32)
    agree("max_pool_forward", x, y, index, *how, tolerance=EXACT)
    if x.size:
        cpu.max_pool_forward(x, y, index, *how)
    agree("max_pool_backward", data(y.shape, dtype, 1), index, np.empty_like(x), *how, tolerance=EXACT)


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_max_of_planes_without_numbers(value):
    x = np.full((1, 2, 6, 6), value, np.float32)
    x[0, 1, 2, 3] = 5
    y = np.empty((1, 2, 4, 4), np.float32)
    agree("max_pool_forward", x, y, np.empty(y.shape, np.int32), (3, 3), (2, 2), (1, 1), tolerance=EXACT)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("case", CASES)
def test_average(case, dtype):
    shape, *how = CASES[case]
    x = data(shape, dtype)
    y = np.empty(top_shape(shape, *how), dtype)
    agree("ave_pool_forward", x, y, *how, tolerance=CLOSE)
    agree("ave_pool_backward", data(y.shape, dtype, 1), np.empty_like(x), *how, tolerance=CLOSE)
