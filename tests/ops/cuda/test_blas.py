"""Matrix products and biases on a GPU against numpy in float64."""

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

from caffepy.ops import cuda  # noqa: E402
from caffepy.ops.cuda import blas, precision  # noqa: E402
from tests.ops.test_blas import SHAPES  # noqa: E402

TOLERANCE = {"fp32": 1e-5, "tf32": 2e-3}  # of the largest number of a result


@pytest.fixture(autouse=True, scope="module")
def stream():
    with cupy.cuda.Stream(non_blocking=True) as stream:
        yield stream


@pytest.fixture(params=["fp32", "tf32"])
def exactness(request):
    before = precision.get()
    precision.set(request.param)
    yield TOLERANCE[request.param]
    precision.set(before)


def check(have, want, tolerance):
    error = np.abs(have.get() - want).max(initial=0) / max(1, np.abs(want).max(initial=0))
    assert error <= tolerance, f"error {error:.2e}, allowed {tolerance}"


def arrays(dtype, *shapes):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


@pytest.mark.parametrize("transposed", ["", "a", "b", "ab"])
@pytest.mark.parametrize("shape", [*SHAPES, (256, 4096, 1000), (33, 129, 65)], ids=str)
def test_matmul(shape, transposed, exactness):
    check_matmul(shape, transposed, exactness)


@pytest.mark.parametrize("transposed", ["", "a", "b", "ab"])
@pytest.mark.parametrize("shape", [(256, 4096, 1000), (64, 512, 16)], ids=str)
def test_matmul_by_cudnn(shape, transposed, monkeypatch):
    monkeypatch.setattr(blas, "_import_cublas", lambda: None)
    check_matmul(shape, transposed, TOLERANCE["tf32"])


def check_matmul(shape, transposed, tolerance):
    m, k, n = shape
    a, b, start = arrays(np.float32, (m, k), (k, n), (m, n))
    want = a.astype(np.float64) @ b.astype(np.float64)
    x = cupy.asarray(a.T.copy()).T if "a" in transposed else cupy.asarray(a)
    y = cupy.asarray(b.T.copy()).T if "b" in transposed else cupy.asarray(b)
    out = cupy.full((m, n), np.nan, np.float32)
    cuda.matmul(x, y, out)
    check(out, want, tolerance)
    out[...] = cupy.asarray(start)
    cuda.matmul(x, y, out, accumulate=True)
    check(out, want + start, tolerance)


@pytest.mark.parametrize("transposed", ["", "a", "b", "out"])
def test_matmul_of_parts_of_larger_arrays(transposed, exactness):
    a, b = arrays(np.float32, (40, 50), (50, 30))
    want = a[3:20, 7:31].astype(np.float64) @ b[9:33, 2:13]
    x = cupy.asarray(a.T.copy()).T if transposed == "a" else cupy.asarray(a)
    y = cupy.asarray(b.T.copy()).T if transposed == "b" else cupy.asarray(b)
    out = cupy.zeros((11, 17), np.float32).T if transposed == "out" else cupy.zeros((17, 11), np.float32)
    cuda.matmul(x[3:20, 7:31], y[9:33, 2:13], out)
    check(out, want, exactness)


def test_matmul_of_doubles():
    a, b, start = arrays(np.float64, (70, 90), (90, 30), (70, 30))
    out = cupy.asarray(start)
    cuda.matmul(cupy.asarray(a), cupy.asarray(b), out, accumulate=True)
    check(out, start + a @ b, 1e-13)


BIASES = [
    (4, 3),
    (4, 3, 1),
    (2, 5, 7),
    (64, 32, 100),
    (0, 3, 4),
    (500, 7),
    (256, 1000),
    (1, 1),
    (3, 4096),
    (2, 3, 100_001),
    (1, 2, 224 * 224),
    (128, 96, 55 * 55),
    (300, 2000, 9),
]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", BIASES, ids=str)
def test_bias(shape, dtype):
    y, b = arrays(dtype, shape, shape[1])
    want_y = y + b.reshape(-1, *[1] * (y.ndim - 2))
    want_db = b + y.sum(axis=(0, *range(2, y.ndim)), dtype=np.float64)
    x, bias, db = cupy.asarray(y), cupy.asarray(b), cupy.asarray(b)
    cuda.bias_gradient(x, db)
    cuda.add_bias(x, bias)
    np.testing.assert_array_equal(x.get(), want_y)
    check(db, want_db, 2e-6 if dtype == np.float32 else 1e-14)


def test_bias_that_is_not_aligned():
    y, b = arrays(np.float32, 1 + 2 * 3 * 8, 3)
    x, db = cupy.asarray(y)[1:].reshape(2, 3, 8), cupy.zeros(3, np.float32)
    cuda.bias_gradient(x, db)
    cuda.add_bias(x, cupy.asarray(b))
    host = y[1:].reshape(2, 3, 8)
    check(db, host.sum((0, 2), np.float64), 1e-6)
    np.testing.assert_array_equal(x.get(), host + b[:, None])


def test_a_bias_gradient_repeats_to_the_last_bit():
    (y,) = arrays(np.float32, (64, 48, 31 * 31))
    results = []
    for _ in range(5):
        db = cupy.zeros(48, np.float32)
        cuda.bias_gradient(cupy.asarray(y), db)
        results.append(db.get().tobytes())
    assert len(set(results)) == 1


@pytest.mark.parametrize("size", [1, 7, 4096, 1_000_003])
def test_add_into(size):
    a, b = arrays(np.float32, size, size)
    out = cupy.asarray(b)
    blas.add_into(cupy.asarray(a), out)
    np.testing.assert_array_equal(out.get(), a + b)


def test_a_captured_product_follows_its_inputs(stream):
    a, b, bias = (cupy.asarray(x) for x in arrays(np.float32, (64, 80), (80, 50), 50))
    out, db = cupy.zeros((64, 50), np.float32), cupy.zeros(50, np.float32)

    def step():
        cuda.matmul(a, b, out)
        cuda.add_bias(out, bias)
        cuda.bias_gradient(out, db)

    step()
    stream.synchronize()
    stream.begin_capture()
    step()
    graph = stream.end_capture()
    a *= 2
    db.fill(0)
    graph.launch(stream)
    want = a.get().astype(np.float64) @ b.get() + bias.get()
    check(out, want, TOLERANCE["tf32"])
    check(db, out.get().sum(0, np.float64), 1e-5)
