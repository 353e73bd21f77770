"""Gradients of a convolution of images with few channels and its ReLU, against those on the CPU."""

import numpy as np
import pytest

from tests.ops.cuda.compare import data

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

from caffepy.ops import cpu, cuda  # noqa: E402
from caffepy.ops.cuda import autotune, few_channels  # noqa: E402
from tests.ops.cuda.stored import loaded, rounded, stored  # noqa: E402

CASES = {  # x, outputs, kernel, stride, pad, dilation
    "3 x 3": ((2, 3, 20, 35), 64, (3, 3), (1, 1), (1, 1), (1, 1)),
    "two blocks of outputs": ((3, 3, 17, 16), 128, (3, 3), (1, 1), (1, 1), (1, 1)),
    "strided": ((2, 1, 21, 70), 64, (5, 5), (2, 3), (2, 0), (1, 1)),
    "dilated": ((1, 4, 30, 9), 64, (3, 2), (1, 1), (0, 1), (3, 2)),
    "a line": ((2, 7, 9, 40), 64, (1, 4), (1, 1), (0, 2), (1, 1)),
}


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    monkeypatch.setattr(few_channels, "LEAST", 1)
    with cupy.cuda.Stream(non_blocking=True):
        yield


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("kind", ["uint16", "float16"])
@pytest.mark.parametrize("case", [case for case in CASES if case != "dilated"])
def test_forward(case, kind, relu, with_bias):
    x_shape, outputs, kernel, *window = CASES[case]
    w_shape = outputs, x_shape[1], *kernel
    reference, conv = (
        ops.Convolution(x_shape, w_shape, window, 1, np.float32) for ops in (cpu, cuda)
    )
    x, w = (data(np.prod(s), seed=i).reshape(s) for i, s in enumerate((x_shape, w_shape)))
    b = data(outputs, seed=5) if with_bias else None
    want = np.empty(reference.y_shape, np.float32)
    reference.forward(rounded(x, kind), rounded(w, kind), b, want, relu=relu)
    y = stored(np.full_like(want, np.nan), kind, channels_last=True)
    (make,) = few_channels.forward(conv._geometry, kind, relu)
    on_gpu = cupy.asarray(w), None if b is None else cupy.asarray(b)
    make()(stored(x, kind, channels_last=True), *on_gpu, y)
    np.testing.assert_allclose(loaded(y), want, rtol=8e-3, atol=1e-5)


def test_forward_of_others():
    x_shape, outputs, kernel, *window = CASES["dilated"]
    conv = cuda.Convolution(x_shape, (outputs, 4, *kernel), window, 1, np.float32)
    assert few_channels.forward(conv._geometry, "uint16", True) == []


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("kind", ["uint16", "float16"])
@pytest.mark.parametrize("case", CASES)
def test_as_on_the_cpu(case, kind, with_bias, monkeypatch):
    def own(name, dtype, candidates, arguments, launches=1):
        return len(candidates) - 1, candidates[-1]()

    x_shape, outputs, kernel, *window = CASES[case]
    w_shape = outputs, x_shape[1], *kernel
    convs = [ops.Convolution(x_shape, w_shape, window, 1, np.float32) for ops in (cpu, cuda)]
    y_shape = convs[0].y_shape
    sizes = x_shape, y_shape, y_shape
    x, y, dy = (data(np.prod(s), seed=i).reshape(s) for i, s in enumerate(sizes))
    y = np.maximum(y, 0)
    dw, db = data(np.prod(w_shape), seed=4).reshape(w_shape), data(outputs, seed=5)
    have = [cupy.asarray(a) for a in (dw, db)]
    arrays = [stored(a, kind, channels_last=True) for a in (x, y, dy)]
    before = arrays[2].copy()
    monkeypatch.setattr(autotune, "fastest", own)
    convs[1].backward_weight_relu(*arrays, have[0], have[1] if with_bias else None)
    assert (arrays[2] == before).all(), "the kernel was not used: it leaves dy as it is"
    x, y, dy = (rounded(a, kind) for a in (x, y, dy))
    unchanged = db.copy()
    convs[0].backward_weight_relu(x, y, dy, dw, db if with_bias else None)
    np.testing.assert_allclose(have[0].get(), dw, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(have[1].get(), db if with_bias else unchanged, rtol=1e-4, atol=1e-3)


def test_of_two_ways_one_is_timed_and_kept():
    """The fastest of both gives the sums of the other."""
    x_shape, w_shape = (4, 3, 32, 32), (64, 3, 3, 3)
    conv = cuda.Convolution(x_shape, w_shape, ((1, 1), (1, 1), (1, 1)), 1, np.float32)
    sizes = x_shape, conv.y_shape, conv.y_shape
    x, y, dy = (data(np.prod(s), seed=i).reshape(s) for i, s in enumerate(sizes))
    y = np.maximum(y, 0)
    reference = cpu.Convolution(x_shape, w_shape, ((1, 1), (1, 1), (1, 1)), 1, np.float32)
    dw, db = np.zeros(w_shape, np.float32), np.zeros(64, np.float32)
    reference.backward_weight_relu(*(rounded(a, "uint16") for a in (x, y, dy)), dw, db)
    arrays = [stored(a, "uint16", channels_last=True) for a in (x, y, dy)]
    for _ in range(2):
        have = cupy.zeros(w_shape, np.float32), cupy.zeros(64, np.float32)
        conv.backward_weight_relu(*arrays, *have)
        np.testing.assert_allclose(have[0].get(), dw, rtol=2e-2, atol=0.5)
        np.testing.assert_allclose(have[1].get(), db, rtol=1e-3, atol=1e-2)
