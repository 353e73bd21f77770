"""Gradients of weights in tf32, in every tiling, against ops.cpu in float64."""

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

from caffepy.device import math_mode  # noqa: E402
from caffepy.ops import cpu  # noqa: E402
from caffepy.ops.cuda import filter_gradient  # noqa: E402
from caffepy.ops.cuda.graphs import Geometry  # noqa: E402
from caffepy.ops.cuda.small_convolution import here  # noqa: E402
from tests.ops.cuda.test_convolution import KINDS, PLAIN, close, host  # noqa: E402

TF32 = KINDS["tf32"]

# x, w, stride, padding, dilation, groups
FEW = {
    "first of resnet50": ((2, 3, 49, 64), (64, 3, 7, 7), (2, 2), (3, 3), (1, 1), 1),
    "first of vgg16": ((2, 3, 41, 40), (64, 3, 3, 3), (1, 1), (1, 1), (1, 1), 1),
    "first of caffenet": ((2, 3, 83, 83), (96, 3, 11, 11), (4, 4), (0, 0), (1, 1), 1),
    "one channel": ((3, 1, 17, 29), (36, 1, 5, 5), (1, 1), (2, 2), (1, 1), 1),
    "four channels, other strides": ((2, 4, 23, 22), (20, 4, 3, 5), (3, 2), (0, 2), (1, 1), 1),
    "short lines": ((5, 3, 8, 5), (16, 3, 3, 3), (1, 1), (1, 1), (1, 1), 1),
    "one line of y": ((3, 3, 7, 40), (64, 3, 7, 7), (2, 2), (0, 3), (1, 1), 1),
}
WIDE = {
    "lines of 14": ((2, 128, 14, 14), (128, 128, 3, 3), (1, 1), (1, 1), (1, 1), 1),
    "lines of 7": ((3, 64, 7, 7), (192, 64, 3, 3), (1, 1), (1, 1), (1, 1), 1),
    "lines of 13, groups": ((2, 128, 13, 13), (192, 64, 3, 3), (1, 1), (1, 1), (1, 1), 2),
    "long lines": ((1, 64, 30, 57), (64, 64, 3, 3), (1, 1), (1, 1), (1, 1), 1),
    "parts of tiles": ((3, 20, 9, 31), (68, 20, 3, 3), (1, 1), (1, 1), (1, 1), 1),
    "more channels than a tile": ((1, 132, 11, 16), (140, 132, 3, 3), (1, 1), (0, 0), (1, 1), 1),
    "five columns, groups": ((2, 96, 27, 27), (256, 48, 5, 5), (1, 1), (2, 2), (1, 1), 2),
    "other lines than columns": ((2, 32, 12, 15), (64, 32, 2, 3), (1, 1), (1, 0), (1, 1), 1),
    "dilation": ((1, 64, 17, 18), (64, 64, 3, 3), (1, 1), (2, 2), (2, 2), 1),
    "much padding": ((1, 16, 4, 5), (16, 16, 3, 3), (1, 1), (3, 4), (1, 1), 1),
    "one pixel": ((4, 32, 3, 3), (32, 32, 3, 3), (1, 1), (0, 0), (1, 1), 1),
    "many images": ((40, 16, 6, 6), (16, 16, 3, 3), (1, 1), (1, 1), (1, 1), 1),
}


@pytest.fixture(autouse=True)
def tf32(monkeypatch):
    monkeypatch.setattr(math_mode.default(), "precision", "tf32")
    monkeypatch.setattr(filter_gradient, "LEAST", 0)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("case", [*FEW, *WIDE])
def test_against_the_cpu(case, bias):
    if case in WIDE and here().capability != 90:
        pytest.skip("has wgmma for compute capability 9.0 only")
    x_shape, w_shape, *how, group = {**FEW, **WIDE}[case]
    exact = cpu.Convolution(x_shape, w_shape, how, group, np.float64)
    geometry = Geometry(x_shape, w_shape, exact.y_shape, *how)
    assert filter_gradient.suits(geometry, np.float32)
    rng = np.random.default_rng(0)
    x, dy, dw, db = (rng.standard_normal(s) for s in (x_shape, exact.y_shape, w_shape, w_shape[:1]))
    there, before = (TF32.on_gpu(x), TF32.on_gpu(dy)), (dw.copy(), db.copy())
    exact.backward_weight(x, dy, dw, db)
    for make in filter_gradient.backward_weight(geometry, np.float32):
        results = []
        for _ in range(2):
            have = [PLAIN.on_gpu(a) for a in before]
            make()(*there, have[0], have[1] if bias else None)
            close("dw", have[0], dw, 1e-3)
            close("db", have[1], db if bias else before[1], 1e-5)
            results.append(host(have[0]))
        np.testing.assert_array_equal(*results)


def test_factors_are_rounded_to_the_nearest_number_of_tf32():
    x_shape, w_shape, *how, _ = FEW["one channel"]
    y_shape = (3, 36, 17, 29)
    geometry = Geometry(x_shape, w_shape, y_shape, *how)
    (make,) = filter_gradient.backward_weight(geometry, np.float32)
    dy = np.zeros(y_shape, np.float32)
    dy[0, 0, 4, 4] = 1 + 3 * 2.0**-12  # 1.0007 lies nearer to 1 + 2^-10 than to 1
    dw = PLAIN.on_gpu(np.zeros(w_shape))
    make()(TF32.on_gpu(np.ones(x_shape)), TF32.on_gpu(dy), dw, None)
    np.testing.assert_array_equal(host(dw)[0], np.full((1, 5, 5), 1 + 2.0**-10))


@pytest.mark.parametrize(
    ("w", "stride", "dilation"),
    [
        ((62, 3, 7, 7), (2, 2), (1, 1)),  # no packs of four outputs
        ((64, 3, 7, 7), (2, 2), (2, 2)),  # few channels, with dilation
        ((64, 3, 1, 7), (2, 2), (1, 1)),  # one line
        ((64, 64, 3, 3), (2, 2), (1, 1)),
        ((64, 64, 1, 1), (1, 1), (1, 1)),
        ((64, 62, 3, 3), (1, 1), (1, 1)),  # no packs of four channels
        ((64, 64, 3, 3), (1, 1), (30, 30)),  # too much to see for shared memory
    ],
)
def test_what_does_not_suit(w, stride, dilation):
    geometry = Geometry((1, w[1], 64, 64), w, (1, w[0], 16, 16), stride, (0, 0), dilation)
    assert not filter_gradient.suits(geometry, np.float32)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_other_precisions_do_not_suit(precision):
    math_mode.default().precision = precision
    x, w, *how, _ = FEW["first of vgg16"]
    assert not filter_gradient.suits(Geometry(x, w, (2, 64, 41, 40), *how), np.float32)
