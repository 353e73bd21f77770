import numpy as np
import pytest

from tests.ops.cuda.compare import EXACT, agree, data

pytestmark = pytest.mark.gpu

SIZES = [0, 1, 5, 1023, 70_001, 3_000_004]
DTYPES = [np.float32, np.float64]

VIEWS = {  # shape, index of the source, index of the target
    "whole": ((5, 7), np.s_[:], np.s_[:]),
    "concat": ((8, 3000), np.s_[:, 500:1000], np.s_[:, 2000:2500]),
    "odd columns": ((8, 301), np.s_[:, 51:100], np.s_[:, 7:56]),
    "window": ((3, 4, 20, 24), np.s_[1:3, :, 2:12, 3:9], np.s_[:2, :, 5:15, 4:10]),
    "five axes": ((3, 4, 5, 6, 7), np.s_[:2, :3, :4, :5, :6], np.s_[1:, 1:, 1:, 1:, 1:]),
    "stride": ((40, 40), np.s_[::2, ::2], np.s_[:20, 20:]),
    "one": ((4, 4), np.s_[2:3, 1:2], np.s_[3:, 3:]),
    "none": ((4, 4), np.s_[2:2], np.s_[3:3]),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint8, np.int64])
@pytest.mark.parametrize("case", VIEWS)
def test_copy(case, dtype):
    import cupy

    from caffepy.ops import cuda

    shape, source, target = VIEWS[case]
    x, y = (data(shape, seed=0) * 50).astype(dtype), np.zeros(shape, dtype)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        u, v = cupy.asarray(x), cupy.asarray(y)
        y[target] = x[source]
        cuda.copy(u[source], v[target])
        np.testing.assert_array_equal(v.get(), y)
        v.fill(0)
        stream.begin_capture()
        cuda.copy(u[source], v[target])
        stream.end_capture().launch(stream)
        np.testing.assert_array_equal(v.get(), y)
        v.fill(0)
        cuda.copy(x[source], v[target])
        np.testing.assert_array_equal(v.get(), y)


def test_copy_to_another_type():
    agree("copy", data((3, 4), np.float64), np.empty((3, 4), np.float32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_products_and_sums(size, dtype):
    xs = [data(size, dtype, seed) for seed in range(8)]
    out = np.empty_like(xs[0])
    agree("scaled", 0.3, xs[0], out)
    agree("scaled", -2.0, xs[0], xs[0])
    agree("axpy", 0.3, xs[0], xs[1])
    agree("add", xs[0], xs[1])
    agree("multiply", xs[0], xs[1], out)
    for n in (2, 3, 4, 5, 8):
        agree("eltwise_sum", xs[:n], [0.5, -1.0, 2.0, 1.0, 0.1, 3.0, 1.0, -4.0][:n], out, tolerance=(1e-5, 1e-5))
    agree("eltwise_sum", xs[:3], [1.0, 1.0, 1.0], xs[0])
    agree("dot", xs[0], xs[1], tolerance=(1e-9, 1e-7))


@pytest.mark.parametrize("size", SIZES)
def test_max(size):
    xs = [np.round(data(size, seed=seed)) for seed in range(4)]
    index = np.empty(size, np.int32)
    for n in (2, 3, 4):
        agree("eltwise_max", xs[:n], np.empty_like(xs[0]), index, tolerance=EXACT)
    chosen = np.abs(xs[0]).astype(np.int32)
    agree("eltwise_select", chosen, 1, xs[1], np.empty_like(xs[1]), tolerance=EXACT)


@pytest.mark.parametrize("kind", ["float32", "float64", "int64"])
def test_a_captured_factor_is_read_at_each_replay(kind):
    import cupy

    from caffepy.ops import cuda

    with cupy.cuda.Stream(non_blocking=True) as stream:
        x, y, alpha = cupy.ones(9, "f"), cupy.zeros(9, "f"), cupy.full((), 2, kind)
        cuda.scaled(alpha, x, y)
        stream.begin_capture()
        cuda.scaled(alpha, x, y)
        graph = stream.end_capture()
        for factor in (3, 4):
            alpha.fill(factor)
            graph.launch(stream)
            np.testing.assert_array_equal(y.get(), np.full(9, factor, "f"))


def test_dot_repeats_bit_for_bit():
    import cupy

    from caffepy.ops import cuda

    with cupy.cuda.Stream(non_blocking=True):
        x = cupy.asarray(data(5_000_000))
        assert len({float(cuda.dot(x, x)) for _ in range(5)}) == 1
