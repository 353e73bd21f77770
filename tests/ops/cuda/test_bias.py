"""Biases and their gradients on a GPU, in every element type and order."""

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

from caffepy.ops import cuda  # noqa: E402
from tests.ops.cuda.compare import data  # noqa: E402
from tests.ops.cuda.stored import TOLERANCE, Activation, agree, loaded, rounded, stored  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def stream():
    with cupy.cuda.Stream(non_blocking=True) as stream:
        yield stream


def check(have, want, relative):
    np.testing.assert_allclose(loaded(have), want, relative, relative * np.abs(want).max(initial=1))


BIASES = [
    (4, 3),
    (4, 3, 1),
    (2, 5, 7),
    (64, 32, 100),
    (0, 3, 4),
    (500, 7),
    (513, 40),
    (256, 1000),
    (1, 1),
    (3, 4096),
    (2, 3, 10_001),
    (2, 64, 56 * 56),
    (30, 2000, 9),
]


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("kind", TOLERANCE)
@pytest.mark.parametrize("shape", BIASES, ids=str)
def test_bias(shape, kind, last):
    y, b = data(shape), data(shape[1], seed=1)
    tolerance = (
        (1e-12, 1e-10) if kind == "float64" else (5e-6, 2e-3)
    )  # sums of up to 20,000 numbers
    agree("bias_gradient", kind, Activation(y), b, last=last, tolerance=tolerance)
    agree("add_bias", kind, Activation(y), b, last=last)


@pytest.mark.parametrize("kind", ["float16", "uint16"])
@pytest.mark.parametrize("shape", [(64, 10), (3, 1), (700, 64), (2, 4096)], ids=str)
def test_a_bias_gradient_that_copies(shape, kind):
    y, b = data(shape), data(shape[1], seed=1)
    dy, db, copy = cupy.asarray(y), cupy.asarray(b), stored(np.zeros(shape), kind)
    cuda.bias_gradient(dy, db, copy)
    check(db, b + y.sum(0, np.float64), 2e-6)
    np.testing.assert_array_equal(loaded(copy), rounded(y, kind))


@pytest.mark.parametrize("kind", TOLERANCE)
def test_bias_that_is_not_aligned(kind):
    y, b = data(1 + 2 * 3 * 8), data(3, seed=1)
    x, db = stored(y, kind)[1:].reshape(2, 3, 8), cupy.zeros(3, "d" if kind == "float64" else "f")
    host = loaded(x)
    cuda.bias_gradient(x, db)
    cuda.add_bias(x, cupy.asarray(b.astype(db.dtype)))
    check(db, host.sum((0, 2), np.float64), 1e-6)
    check(x, host + b[:, None], TOLERANCE[kind][0])


@pytest.mark.parametrize("last", [False, True])
def test_a_bias_gradient_repeats_to_the_last_bit(last):
    y = data((64, 48, 31 * 31))
    results = []
    for _ in range(3):
        db = cupy.zeros(48, np.float32)
        cuda.bias_gradient(stored(y, "uint16", last), db)
        results.append(db.get().tobytes())
    assert len(set(results)) == 1
