"""Matrix products on a GPU against numpy in float64."""

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

from caffepy.device import math_mode  # noqa: E402
from caffepy.ops import cuda  # noqa: E402
from caffepy.ops.cuda import blas  # noqa: E402
from tests.ops.cuda.stored import loaded, rounded, stored  # noqa: E402
from tests.ops.test_blas import SHAPES  # noqa: E402

TOLERANCE = {"fp32": 1e-5, "tf32": 2e-3}  # of the largest number of a product of float32 arrays
ROUNDING = {"float32": 1e-5, "float64": 1e-13, "float16": 1.5e-3, "uint16": 1.2e-2}
"""Of what a result is stored in, cuBLAS's sums of parts of a product as well: three times half of
the last bit.
"""


@pytest.fixture(autouse=True, scope="module")
def stream():
    with cupy.cuda.Stream(non_blocking=True) as stream:
        yield stream


@pytest.fixture(params=list(TOLERANCE))
def exactness(request, monkeypatch):
    monkeypatch.setattr(math_mode.default(), "precision", request.param)
    return TOLERANCE[request.param]


@pytest.fixture
def by_cublas(monkeypatch):
    monkeypatch.setattr(blas, "_own_way", lambda *_: None)


def check(have, want, tolerance):
    error = np.abs(loaded(have) - want).max(initial=0) / max(1, np.abs(want).max(initial=0))
    assert error <= tolerance, f"error {error:.2e}, allowed {tolerance}"


def arrays(*shapes):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize("transposed", ["", "a", "b", "ab"])
@pytest.mark.parametrize("shape", [*SHAPES, (256, 4096, 1000), (33, 129, 65)], ids=str)
def test_matmul(shape, transposed, exactness, by_cublas):
    check_matmul(shape, transposed, exactness)


@pytest.mark.parametrize("transposed", ["", "a", "b", "ab"])
@pytest.mark.parametrize("shape", [*SHAPES, (64, 800, 500), (33, 129, 65)], ids=str)
@pytest.mark.parametrize(
    ("kind", "result"),
    [(k, r) for k in ("float16", "uint16") for r in (k, "float32")] + [("float64", "float64")],
)
def test_matmul_of_other_types(kind, result, shape, transposed, by_cublas):
    check_matmul(shape, transposed, ROUNDING[result], kind, result)


@pytest.mark.parametrize("transposed", ["", "a", "b", "ab"])
@pytest.mark.parametrize(
    "shape", [*SHAPES, (64, 800, 500), (33, 129, 65), (16, 16, 16), (1, 1000, 17)], ids=str
)
def test_matmul_by_our_own_kernel(shape, transposed, monkeypatch):
    monkeypatch.setattr(blas, "_own_way", lambda *_: blas._multiply_small)
    check_matmul(shape, transposed, ROUNDING["float32"], scales=[1.0])
    check_matmul_of_narrow(shape, transposed)


@pytest.mark.parametrize("transposed", ["", "a", "b", "ab"])
@pytest.mark.parametrize(
    "shape", [*SHAPES, (64, 500, 800), (33, 129, 65), (32, 32, 32), (1, 1000, 17)], ids=str
)
def test_matmul_by_tensor_cores(shape, transposed, monkeypatch):
    monkeypatch.setattr(blas, "_own_way", lambda *_: blas._multiply_squares)
    check_matmul_of_narrow(shape, transposed)


def check_matmul_of_narrow(shape, transposed):
    for kind in ("float16", "uint16"):
        for result in (kind, "float32"):
            check_matmul(shape, transposed, ROUNDING[result], kind, result, scales=[1.0])


def check_matmul(
    shape, transposed, tolerance, kind="float32", result="float32", scales=(1.0, -0.3)
):
    m, k, n = shape
    a, b, start = arrays((m, k), (k, n), (m, n))
    want = rounded(a, kind).astype(np.float64) @ rounded(b, kind).astype(np.float64)
    x = stored(a.T, kind).T if "a" in transposed else stored(a, kind)
    y = stored(b.T, kind).T if "b" in transposed else stored(b, kind)
    for scale in scales:
        out = stored(np.full((m, n), np.nan), result)
        cuda.matmul(x, y, out, scale=scale)
        check(out, scale * want, tolerance)
        out = stored(start, result)
        cuda.matmul(x, y, out, accumulate=True, scale=scale)
        check(out, rounded(start, result) + scale * want, tolerance)


@pytest.mark.parametrize("ours", [None, "_multiply_small", "_multiply_squares"])
@pytest.mark.parametrize("transposed", ["", "a", "b", "out"])
def test_matmul_of_parts_of_larger_arrays(transposed, ours, exactness, monkeypatch):
    own = getattr(blas, ours) if ours else None
    monkeypatch.setattr(blas, "_own_way", lambda *_: own)
    kind = "float16" if ours == "_multiply_squares" else "float32"
    a, b = (rounded(x, kind) for x in arrays((40, 50), (50, 30)))
    want = a[3:20, 7:31].astype(np.float64) @ b[9:33, 2:13]
    x = stored(a.T, kind).T if transposed == "a" else stored(a, kind)
    y = stored(b.T, kind).T if transposed == "b" else stored(b, kind)
    out = (
        cupy.zeros((11, 17), np.float32).T
        if transposed == "out"
        else cupy.zeros((17, 11), np.float32)
    )
    cuda.matmul(x[3:20, 7:31], y[9:33, 2:13], out)
    check(out, want, exactness)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", [(64, 800, 500), (64, 500, 10), (33, 129, 65), (1, 1000, 17)])
def test_inner_product(shape, transposed, together, monkeypatch, stream):
    """By either way, captured too: y, and the weights in the narrower type."""

    def chosen(name, dtype, ways, *_, **__):
        return together and "inner product" in name, ways[together and "inner product" in name]()

    monkeypatch.setattr(blas.autotune, "fastest", chosen)
    monkeypatch.setattr(math_mode.default(), "precision", "fp32")
    m, k, n = shape
    a, w, b = arrays((m, k), (n, k) if transposed else (k, n), (n,))
    for kind, result, relu, bias in (
        ("uint16", "uint16", True, True),
        ("uint16", "float32", False, True),
        ("float16", "float16", True, False),
        ("float32", "float32", True, True),
    ):
        weights = w.T if transposed else w
        want = rounded(a, kind).astype(np.float64) @ rounded(weights, kind)
        want += b if bias else 0
        want = np.maximum(want, 0) if relu else want
        x, there, c = stored(a, kind), cupy.asarray(w), cupy.asarray(b)
        copy = None if kind == "float32" else stored(np.full(w.shape, np.nan), kind)
        views = [v if v is None or not transposed else v.T for v in (there, copy)]
        y = stored(np.full((m, n), np.nan), result)
        given = x, *views, c if bias else None, relu, y
        cuda.inner_product(*given)
        check(y, want, ROUNDING[result])
        for array in (y, copy):
            if array is not None:
                array.fill(0)
        stream.synchronize()
        stream.begin_capture()
        cuda.inner_product(*given)
        stream.end_capture().launch(stream)
        check(y, want, ROUNDING[result])
        if copy is not None:
            np.testing.assert_array_equal(loaded(copy), rounded(w, kind))


@pytest.mark.parametrize("size", [1, 7, 4096, 1_000_003])
def test_add_into(size):
    a, b = arrays(size, size)
    out = cupy.asarray(b)
    blas.add_into(cupy.asarray(a), out)
    np.testing.assert_array_equal(out.get(), a + b)
    blas.add_into(cupy.asarray(a), out, -0.5)
    np.testing.assert_allclose(out.get(), 0.5 * a + b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "tolerance"), [("float32", TOLERANCE["tf32"]), ("uint16", ROUNDING["uint16"])]
)
def test_a_captured_product_follows_its_inputs(stream, kind, tolerance):
    x, w, b = arrays((64, 80), (50, 80), 50)
    a, w, bias = stored(x, kind), stored(w, kind), cupy.asarray(b)
    out, db, dw = (
        cupy.zeros((64, 50), kind),
        cupy.zeros(50, np.float32),
        cupy.zeros((50, 80), np.float32),
    )

    def step():
        cuda.matmul(a, w.T, out)
        cuda.add_bias(out, bias)
        cuda.bias_gradient(out, db)
        cuda.matmul(out.T, a, dw, accumulate=True)

    step()
    stream.synchronize()
    stream.begin_capture()
    step()
    graph = stream.end_capture()
    a[...] = stored(2 * x, kind)
    for array in (db, dw):
        array.fill(0)
    graph.launch(stream)
    want = loaded(a).astype(np.float64) @ loaded(w).T + b
    check(out, want, 2 * tolerance)
    check(db, loaded(out).sum(0, np.float64), 1e-5)
    check(dw, loaded(out).T.astype(np.float64) @ loaded(a), TOLERANCE["tf32"])
