"""Kernels for convolutions of each channel by itself against ops.cpu in float64."""

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

from caffepy.ops import cpu  # noqa: E402
from caffepy.ops.cuda import depthwise  # noqa: E402
from caffepy.ops.cuda.graphs import Geometry  # noqa: E402
from tests.ops.cuda.test_convolution import LAST, PLAIN, close  # noqa: E402

CASES = {
    "one": ((2, 16, 9, 10), (1, 1), (1, 1)),
    "two": ((2, 16, 9, 10), (2, 2), (1, 1)),
    "two, even": ((3, 8, 12, 8), (2, 2), (1, 1)),
    "no padding": ((1, 40, 5, 7), (1, 1), (0, 0)),
    "much padding": ((2, 8, 3, 4), (1, 1), (2, 2)),
    "two, no padding": ((1, 24, 8, 9), (2, 2), (0, 0)),
    "few channels at a time": ((2, 58, 9, 7), (1, 1), (1, 1)),
    "few, two": ((1, 12, 9, 7), (2, 2), (1, 1)),
    "large": ((4, 264, 33, 31), (1, 1), (1, 1)),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", LAST)
def test_all_passes(name, case, bias):
    kind = LAST[name]
    x_shape, stride, pad = CASES[case]
    channels = x_shape[1]
    w_shape, how = (channels, 1, 3, 3), (stride, pad, (1, 1))
    exact = cpu.Convolution(x_shape, w_shape, how, channels, np.float64)
    geometry = Geometry(x_shape, w_shape, exact.y_shape, *how)
    dtype = kind.layout.dtype
    assert depthwise.suits(geometry, dtype)
    rng = np.random.default_rng(0)
    x, dy = (kind.round(rng.standard_normal(s)) for s in (x_shape, exact.y_shape))
    w, b, dw, db = (rng.standard_normal(s).astype(np.float32) for s in (w_shape, w_shape[:1]) * 2)
    on_gpu = kind.on_gpu(x, 0), kind.on_gpu(dy, 0)
    weights, offsets, weight_sum, offset_sum = (PLAIN.on_gpu(a, 0) for a in (w, b, dw, db))
    y, dx = (kind.on_gpu(np.full(a.shape, np.nan), 0) for a in (dy, x))
    for relu in (False, True):
        for make in depthwise.forward(geometry, dtype, relu):
            make()(on_gpu[0], weights, offsets if bias else None, y)
            want = np.empty(exact.y_shape)
            given = x.astype(np.float64), w.astype(np.float64)
            exact.forward(*given, b.astype(np.float64) if bias else None, want)
            close("y", y, np.maximum(want, 0) if relu else want, kind.tolerance)
    for make in depthwise.backward_data(geometry, dtype):
        make()(on_gpu[1], weights, dx)
        want = np.empty(x_shape)
        exact.backward_data(dy.astype(np.float64), w.astype(np.float64), want)
        close("dx", dx, want, kind.tolerance)
    for make in depthwise.backward_weight(geometry, dtype):
        make()(*on_gpu, weight_sum, offset_sum if bias else None)
        sums = dw.astype(np.float64), db.astype(np.float64)
        given = x.astype(np.float64), dy.astype(np.float64), sums[0]
        exact.backward_weight(*given, sums[1] if bias else None)
        close("dw", weight_sum, sums[0], kind.tolerance)
        if bias:
            close("db", offset_sum, sums[1], 1e-5)


@pytest.mark.parametrize(
    ("w", "stride", "dilation"),
    [
        ((16, 1, 5, 5), (1, 1), (1, 1)),
        ((32, 1, 3, 3), (1, 1), (1, 1)),
        ((16, 2, 3, 3), (1, 1), (1, 1)),
        ((16, 1, 3, 3), (2, 1), (1, 1)),
        ((16, 1, 3, 3), (1, 1), (2, 2)),
        ((15, 1, 3, 3), (1, 1), (1, 1)),
    ],
)
def test_others_are_left_to_cudnn(w, stride, dilation):
    channels = 16 if w[0] != 15 else 15
    geometry = Geometry((2, channels, 9, 9), w, (2, w[0], 5, 5), stride, (1, 1), dilation)
    assert not depthwise.suits(geometry, np.float16)
