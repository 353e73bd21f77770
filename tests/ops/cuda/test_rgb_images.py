"""Convolutions of images with three channels to few outputs against ops.cpu in float64."""

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

from caffepy.ops import cpu  # noqa: E402
from caffepy.ops.cuda import rgb_images  # noqa: E402
from caffepy.ops.cuda.graphs import Geometry  # noqa: E402
from tests.ops.cuda.test_convolution import KINDS, PLAIN, close, host  # noqa: E402

# x, outputs, padding
CASES = {
    "mobilenet": ((2, 3, 112, 112), 32, (1, 1)),
    "shufflenet": ((3, 3, 64, 48), 24, (1, 1)),
    "odd": ((2, 3, 37, 23), 16, (1, 1)),
    "no padding": ((1, 3, 35, 34), 8, (0, 0)),
    "much padding": ((2, 3, 9, 11), 32, (2, 2)),
    "padding of lines": ((2, 3, 20, 21), 24, (0, 1)),
    "one pixel": ((1, 3, 3, 3), 8, (0, 0)),
    "many images": ((70, 3, 40, 40), 32, (1, 1)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_against_the_cpu(name, case):
    kind, (x_shape, outputs, pad) = KINDS[name], CASES[case]
    w_shape, how = (outputs, 3, 3, 3), ((2, 2), pad, (1, 1))
    exact = cpu.Convolution(x_shape, w_shape, how, 1, np.float64)
    geometry, dtype = Geometry(x_shape, w_shape, exact.y_shape, *how), kind.layout.dtype
    assert rgb_images.suits(geometry, dtype)
    rng = np.random.default_rng(0)
    x, dy = (kind.round(1 + rng.standard_normal(s)) for s in (x_shape, exact.y_shape))
    w, dw, db = (rng.standard_normal(s) for s in (w_shape, w_shape, outputs))
    there, weights, y = kind.on_gpu(x), PLAIN.on_gpu(w), kind.on_gpu(np.full(dy.shape, np.nan))
    partial, shares = rgb_images.moments(geometry, dtype)(there, weights, y)
    want = np.empty(dy.shape)
    exact.forward(x, w, None, want)
    close("y", y, want, kind.tolerance)
    written = host(y).astype(np.float64)
    sums = partial.get().reshape(-1)[: 2 * shares * outputs].reshape(2, shares, -1).sum(1)
    of_squares = (written**2).sum((0, 2, 3))
    np.testing.assert_allclose(
        sums[0], written.sum((0, 2, 3)), rtol=0, atol=1e-5 * of_squares.max()
    )
    np.testing.assert_allclose(sums[1], of_squares, 1e-5)
    have = PLAIN.on_gpu(dw), PLAIN.on_gpu(db)
    for make in rgb_images.backward_weight(geometry, dtype):
        make()(there, kind.on_gpu(dy), *have)
    exact.backward_weight(x, dy, dw, db)
    close("dw", have[0], dw, 1e-4)
    close("db", have[1], db, 1e-4)


@pytest.mark.parametrize(
    ("w", "stride", "y"),
    [
        ((32, 3, 3, 3), (1, 1), (2, 32, 40, 40)),
        ((64, 3, 3, 3), (2, 2), (2, 64, 20, 20)),
        ((20, 3, 3, 3), (2, 2), (2, 20, 20, 20)),
        ((32, 3, 5, 5), (2, 2), (2, 32, 20, 20)),
        ((32, 3, 3, 3), (2, 2), (2, 32, 500, 500)),
    ],
)
def test_others_are_left(w, stride, y):
    geometry = Geometry((2, 3, 40, 40), w, y, stride, (1, 1), (1, 1))
    assert not rgb_images.suits(geometry, np.float16)
