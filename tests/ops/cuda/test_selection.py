import numpy as np
import pytest

from tests.ops.cuda.compare import EXACT, agree, data

pytestmark = pytest.mark.gpu

DTYPES = [np.float32, np.float64]


def numbers(count, rows, dtype=np.float32, seed=1):
    return np.random.default_rng(seed).integers(0, rows, count).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "count", "columns"), [(5, 7, 3), (1, 1, 1), (4, 0, 3), (40, 1000, 130), (3, 2, 9000)]
)
def test_rows(rows, count, columns, dtype):
    x, index = data((rows, columns), dtype), numbers(count, rows, dtype)
    for cut in (False, True):
        agree(
            "take_rows",
            x,
            index,
            cut,
            np.empty((count, columns), dtype),
            np.zeros(2),
            tolerance=EXACT,
        )
    agree("add_rows", data((count, columns), dtype, 1), index, x, tolerance=EXACT)


@pytest.mark.parametrize("count", [4, 3000])
@pytest.mark.parametrize("bad", [3, -1, np.nan, np.inf, -np.inf])
def test_the_first_wrong_index_is_put_down(bad, count):
    import cupy

    from caffepy.ops import cuda

    index = numbers(count, 3)
    index[count - 2 :] = bad, 7
    x, dy = data((3, 50)), data((count, 50), seed=2)
    y, wrong = cupy.empty((count, 50), "f"), cupy.zeros(2)
    cuda.take_rows(cupy.asarray(x), cupy.asarray(index), True, y, wrong)
    np.testing.assert_array_equal(wrong.get(), [1, bad])
    np.testing.assert_array_equal(y.get(), [*x[index[:-2].astype(int)], *np.zeros((2, 50))])
    agree("add_rows", dy, index, x, tolerance=EXACT)


def test_what_is_not_whole_is_cut_off():
    x, index, y = data((3, 4)), np.array([-0.5, 1.9], "f"), np.empty((2, 4), "f")
    agree("take_rows", x, index, True, y, np.zeros(2), tolerance=EXACT)
    agree("add_rows", y[::-1].copy(), index, x, tolerance=EXACT)
    import cupy

    from caffepy.ops import cuda

    wrong = cupy.zeros(2)
    cuda.take_rows(cupy.asarray(x), cupy.asarray(index), False, cupy.empty((2, 4), "f"), wrong)
    np.testing.assert_array_equal(wrong.get(), [1, -0.5])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(4, 7, 1), (1, 1, 1), (0, 3, 1), (2, 3000, 1), (3, 5, 6), (1, 40, 300)]
)
def test_top_values(shape, dtype):
    x = np.round(data(shape, dtype), 1)
    x[:, 1::4], x[:, 2::5] = np.nan, -0.0
    for top_k in {1, min(3, shape[1])}:
        for places, values in ((True, False), (False, True), (True, True)):
            y = np.empty((shape[0], top_k * (places + values), shape[2]), dtype)
            agree("top_values", x, top_k, places, values, y, tolerance=EXACT)


def test_all_values_in_order():
    x = np.round(data((2, 40, 1)), 1)
    agree("top_values", x, 40, True, True, np.empty((2, 80, 1), "f"), tolerance=EXACT)
