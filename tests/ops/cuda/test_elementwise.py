import numpy as np
import pytest

from tests.ops.cuda import stored as narrow
from tests.ops.cuda.compare import EXACT, agree, data
from tests.ops.cuda.stored import Activation

pytestmark = pytest.mark.gpu

SIZES = [0, 1, 5, 1023, 70_001, 3_000_004]
DTYPES = [np.float32, np.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_products_and_sums(size, dtype):
    xs = [data(size, dtype, seed) for seed in range(20)]
    out = np.empty_like(xs[0])
    agree("scaled", 0.3, xs[0], out)
    agree("scaled", -2.0, xs[0], xs[0])
    agree("axpy", 0.3, xs[0], xs[1])
    agree("add", xs[0], xs[1])
    agree("multiply", xs[0], xs[1], out)
    for n in (2, 3, 4, 8, 12, 20):
        agree(
            "eltwise_sum",
            xs[:n],
            [0.5, -1.0, 2.0, 0.1][:n] * (n // 4 or 1),
            out,
            tolerance=(1e-5, 1e-5),
        )
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


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("kind", ["float32", "float16", "uint16", "float64"])
@pytest.mark.parametrize(
    "shape", [(2, 3, 5, 7), (3, 1, 4, 4), (2, 64, 6), (1001,), (2, 8, 1, 1)], ids=str
)
def test_types_and_orders(shape, kind, last):
    x, y, z = (Activation(data(shape, seed=seed)) for seed in range(3))
    for factor in (0.3, -2.0):
        narrow.agree("scaled", kind, factor, x, y, last=last)
        narrow.agree(
            "axpy",
            kind,
            factor,
            x,
            y,
            last=last,
            tolerance=(1e-2, 1e-2) if kind in NARROW else None,
        )
    narrow.agree("scaled", kind, 3.0, x, x, last=last)
    narrow.agree("multiply", kind, x, y, z, last=last)


NARROW = ["float16", "uint16"]


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("kind", ["float32", *NARROW])
def test_sums_and_maxima_in_types_and_orders(kind, last):
    import cupy

    from caffepy.ops import cpu, cuda

    shape, factors = (2, 8, 5, 3), [0.5, -1.0, 2.0, 1.0, 0.25, 3.0, 1.0, -4.0]
    values = [narrow.rounded(np.round(data(shape, seed=seed), 1), kind) for seed in range(8)]
    with cupy.cuda.Stream(non_blocking=True) as stream:
        xs, out = (
            [narrow.stored(v, kind, last) for v in values],
            narrow.stored(np.zeros(shape), kind, last),
        )
        index, want, which = (
            cupy.zeros(shape, np.int32),
            np.empty_like(values[0]),
            np.empty(shape, np.int32),
        )
        for n in range(2, 9):
            cpu.eltwise_sum(values[:n], factors[:n], want)
            cuda.eltwise_sum(xs[:n], factors[:n], out)
            relative, absolute = narrow.TOLERANCE[kind]
            np.testing.assert_allclose(narrow.loaded(out), want, relative, 10 * absolute)
        for n in (2, 4):
            cpu.eltwise_max(values[:n], want, which)
            cuda.eltwise_max(xs[:n], out, index)
            np.testing.assert_array_equal(narrow.loaded(out), want)
            for rank in range(n):
                out.fill(0)
                stream.begin_capture()
                cuda.eltwise_select(index, rank, xs[7], out)
                stream.end_capture().launch(stream)
                np.testing.assert_array_equal(
                    narrow.loaded(out), np.where(which == rank, values[7], 0)
                )
        assert float(cuda.dot(xs[0], xs[1])) == pytest.approx(
            cpu.dot(values[0], values[1]), rel=1e-12
        )


def test_arrays_that_lie_differently_are_refused():
    from caffepy.core.errors import DeviceError
    from caffepy.ops import cuda

    x, y = (narrow.stored(data((2, 3, 4, 5)), "float32", last) for last in (False, True))
    with pytest.raises(DeviceError, match="different orders"):
        cuda.add(x, y)
