"""Sums of few outer products, and updates with them as gradient."""

import numpy as np
import pytest

from tests.ops.cuda.compare import copied, data
from tests.ops.cuda.test_update import RULES, segments

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

from caffepy.ops import cuda  # noqa: E402
from caffepy.ops.cuda import blas, outer_products  # noqa: E402
from tests.ops.cuda.stored import rounded, stored  # noqa: E402

SHAPES = [
    (64, 128, 256),
    (1, 8, 8),
    (70, 200, 136),
    (256, 1000, 512),
    (33, 8, 1032),
    (1000, 136, 264),
]
"""Depth, rows, columns."""


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    monkeypatch.setattr(outer_products, "LEAST", 1)
    monkeypatch.setattr(outer_products, "DEPTH", outer_products.DEEPEST)
    with cupy.cuda.Stream(non_blocking=True):
        yield


def factors(shape, kind):
    depth, rows, columns = shape
    values = [data(depth * n, seed=n).reshape(depth, n) for n in (rows, columns)]
    want = np.matmul(*(rounded(v, kind).astype(np.float64) for v in (values[0].T, values[1])))
    return *(stored(v, kind) for v in values), want


@pytest.mark.parametrize("kind", ["uint16", "float16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product(shape, kind, monkeypatch):
    monkeypatch.setattr(blas, "_multiply", None)  # these are not made by cuBLAS
    a, b, want = factors(shape, kind)
    start = data(want.size, seed=3).reshape(want.shape)
    largest = np.abs(want).max()
    for scale in (1.0, -0.3):
        out = cupy.full(want.shape, np.nan, np.float32)
        cuda.matmul(a.T, b, out, scale=scale)
        np.testing.assert_allclose(out.get(), scale * want, rtol=0, atol=1e-5 * largest)
        out = cupy.asarray(start)
        cuda.matmul(a.T, b, out, accumulate=True, scale=scale)
        np.testing.assert_allclose(out.get(), start + scale * want, rtol=0, atol=1e-5 * largest)


@pytest.mark.parametrize("l1", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_an_update_is_that_by_a_product_to_the_bit(rule, shape, l1):
    histories, numbers = RULES[rule]
    a, b, want = factors(shape, "uint16")
    w, *more = (data(want.size, seed=seed) for seed in range(1 + histories))
    start = w, *map(np.abs, more)
    how = copied(segments([want.size], np.float32, l1), cupy.asarray, {})
    gradient = cupy.empty(want.shape, np.float32)
    cuda.matmul(a.T, b, gradient)
    first, *rest = map(cupy.asarray, start)
    cuda.update_params(rule, (first, gradient.ravel(), *rest), how, numbers)
    assert np.abs(first.get() - w).max() > 0
    updated = [cupy.asarray(x).reshape(want.shape) for x in start]
    cuda.product_update(rule, a, b, updated, how, numbers)
    for have, wanted in zip(updated, (first, *rest), strict=True):
        np.testing.assert_array_equal(have.get().ravel(), wanted.get())


def test_nothing_happens_without_go():
    a, b, want = factors((64, 128, 256), "uint16")
    how = segments([want.size], np.float32)._replace(go=np.array(0.0))
    arrays = [cupy.ones(want.shape, np.float32) for _ in range(2)]
    cuda.product_update("sgd", a, b, arrays, copied(how, cupy.asarray, {}), (0.9,))
    assert all((x == 1).all() for x in arrays)
