"""Convolutions with MAX pooling behind them in one kernel, in all candidates, against ops.cpu in
float64; and what chooses between them and the passes one after the other.
"""

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

from caffepy.device import math_mode  # noqa: E402
from caffepy.layer.pooling import pooled_size  # noqa: E402
from caffepy.ops import cpu, cuda  # noqa: E402
from caffepy.ops.cuda import autotune, pooled_convolution, small_images  # noqa: E402
from caffepy.ops.cuda.graphs import Geometry  # noqa: E402
from caffepy.ops.objects import Maxima  # noqa: E402
from tests.ops.cuda.test_convolution import KINDS, PLAIN, close, host  # noqa: E402

TWO, OVERLAPPING = ((2, 2), (2, 2), (0, 0)), ((3, 3), (2, 2), (0, 0))
CASES = {
    "first of LeNet": ((64, 1, 28, 28), (20, 1, 5, 5), (1, 1), (0, 0), TWO),
    "few images": ((3, 1, 28, 28), (20, 1, 5, 5), (1, 1), (0, 0), TWO),
    "first of CIFAR-10": ((7, 3, 32, 32), (32, 3, 5, 5), (1, 1), (2, 2), OVERLAPPING),
    "strides": ((5, 2, 9, 7), (12, 2, 3, 2), (2, 1), (1, 2), ((3, 2), (2, 1), (1, 1))),
    "uneven": ((3, 3, 11, 10), (8, 3, 3, 3), (1, 2), (0, 1), ((2, 3), (1, 2), (1, 2))),
    "four channels": ((2, 4, 8, 8), (16, 4, 3, 3), (1, 1), (1, 1), TWO),
    "second of LeNet": ((5, 20, 12, 12), (50, 20, 5, 5), (1, 1), (0, 0), TWO),
    "wide": ((9, 32, 8, 8), (64, 32, 5, 5), (1, 1), (2, 2), ((3, 3), (2, 2), (1, 1))),
    "many images": ((300, 1, 6, 6), (4, 1, 3, 3), (1, 1), (0, 0), TWO),
}
BITS = {name: KINDS[name] for name in ("bf16", "fp16")}


@pytest.fixture(autouse=True, scope="module")
def stream():
    with cupy.cuda.Stream(non_blocking=True) as stream:
        yield stream


@pytest.fixture(autouse=True)
def precise(monkeypatch):
    monkeypatch.setattr(math_mode.default(), "precision", "bf16")


class Problem:
    """A case on the device, and what comes out in float64 of the output as it is rounded."""

    def __init__(self, case, kind, relu):
        x_shape, w_shape, stride, pad, window = CASES[case]
        self.kind, how = kind, (stride, pad, (1, 1))
        self.cpu = cpu.Convolution(x_shape, w_shape, how, 1, np.float64)
        self.gpu = cuda.Convolution(x_shape, w_shape, how, 1, kind.layout.dtype)
        self.geometry = Geometry(x_shape, w_shape, self.cpu.y_shape, *how)
        axes = zip(self.cpu.y_shape[2:], *window, strict=True)
        planes = [pooled_size(*axis, any_pad=any(window[2]), up=True) for axis in axes]
        y_shape = (*self.cpu.y_shape[:2], *planes)
        rng = np.random.default_rng(0)
        self.x, self.dy = (kind.round(rng.standard_normal(s)) for s in (x_shape, y_shape))
        self.w, self.b, self.dw, self.db = (
            rng.standard_normal(s).astype(np.float32) for s in (w_shape, w_shape[:1]) * 2
        )
        index = cupy.full(np.prod(y_shape), 77, np.uint8)
        self.index = index.reshape(y_shape[0], *y_shape[2:], y_shape[1]).transpose(0, 3, 1, 2)
        self.there = [PLAIN.on_gpu(a) for a in (self.w, self.b, self.dw, self.db)]
        self.gpu_x, self.output = (
            kind.on_gpu(a) for a in (self.x, np.full(self.cpu.y_shape, np.nan))
        )
        self.y = Maxima(kind.on_gpu(np.full(y_shape, np.nan)), self.index, window, relu)
        self.gradient = self.y._replace(y=kind.on_gpu(self.dy))

    def forward(self, run, bias=True):
        w, b, _, _ = self.there
        run(self.gpu_x, w, b if bias else None, self.output, self.y)

    def backward(self, run, bias=True):
        _, _, dw, db = self.there
        run(self.gpu_x, self.output, self.gradient, dw, db if bias else None)

    def compare(self, bias=True):
        window, relu = self.y[2:]
        x, w, b, dy, dw, db = (
            a.astype(np.float64) for a in (self.x, self.w, self.b, self.dy, self.dw, self.db)
        )
        output, y, index = np.empty(self.cpu.y_shape), np.empty_like(dy), self.index.get()
        self.cpu.forward(x, w, b if bias else None, output)
        cpu.max_pool_forward(output, y, np.empty(y.shape, np.int32), window, relu)
        close("y", self.y.y, y, self.kind.tolerance)
        # Of outputs that round to one number the first is the largest: the index decides.
        named = cpu_index(index, window, output.shape, relu)
        largest = taken(output, named)
        np.testing.assert_allclose(largest, y, atol=2 * self.kind.tolerance * np.abs(y).max())
        cpu.max_pool_backward(dy, named, output, window)
        self.cpu.backward_weight(x, output, dw, db if bias else None)
        close("dw", self.there[2], dw, self.kind.tolerance)
        close("db", self.there[3], db, self.kind.tolerance)


def cpu_index(index, window, shape, relu):
    """The index within planes, as the CPU has it, of one within windows; -1 where there is none."""
    (_, width), (down, right), (top, left) = window
    rows, columns = np.indices(index.shape[2:])
    place = index.astype(np.int64)
    row, column = rows * down - top + place // width, columns * right - left + place % width
    none = index == 255
    assert relu or not none.any()
    inside = (row >= 0) & (row < shape[2]) & (column >= 0) & (column < shape[3])
    assert (inside | none).all()
    return np.where(none, -1, row * shape[3] + column).astype(np.int32)


def taken(output, index):
    """The elements of planes, 0 for -1."""
    flat, at = output.reshape(*output.shape[:2], -1), index.reshape(*index.shape[:2], -1)
    return np.where(at < 0, 0, np.take_along_axis(flat, np.maximum(at, 0), 2)).reshape(index.shape)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize("case", CASES)
def test_candidates(case, kind, relu):
    dtype = BITS[kind].layout.dtype
    for i in range(2):
        p, bias = Problem(case, BITS[kind], relu), i == 0
        given = p.geometry, p.y, dtype
        of_images = small_images.forward_maxima(*given)
        forward = [*pooled_convolution.forward(*given), *of_images]
        backward = pooled_convolution.backward_weight(*given)
        assert bool(of_images) == (case in ("second of LeNet", "wide"))
        p.forward(forward[i % len(forward)](), bias)
        p.backward(
            backward[i % len(backward)]() if backward else p.gpu.backward_weight_maxima, bias
        )
        p.compare(bias)


@pytest.mark.parametrize("candidate", [0, -1])
@pytest.mark.parametrize("case", CASES)
def test_captured_as_eager(case, candidate, monkeypatch, stream):
    """A convolution with either way has the same bits when it is replayed."""

    def chosen(name, dtype, ways, *_):
        found = [(i, run) for i, way in enumerate(ways) if (run := way()) is not None]
        return found[candidate if "maxima" in name else 0] if found else None

    monkeypatch.setattr(autotune, "fastest", chosen)
    p, again = (Problem(case, BITS["bf16"], True) for _ in range(2))

    def both(problem):
        problem.forward(p.gpu.forward_maxima)
        problem.backward(p.gpu.backward_weight_maxima)

    both(p)
    p.compare()
    stream.synchronize()
    stream.begin_capture()
    both(again)
    graph = stream.end_capture()
    graph.launch(stream)
    again.compare()
    written = not np.isnan(host(again.output)).any()
    small = bool(pooled_convolution.backward_weight(p.geometry, p.y, np.uint16))
    assert written == (candidate == 0 or not small)
    pairs = [(p.y.y, again.y.y), (p.index, again.index), *zip(p.there, again.there, strict=True)]
    for have, want in pairs:
        np.testing.assert_array_equal(have.get(), want.get())


def test_what_does_not_suit():
    p = Problem("four channels", BITS["bf16"], False)

    def suits(window=TWO, dtype=np.uint16, **changes):
        maxima = p.y._replace(window=window)
        return pooled_convolution.suits(p.geometry._replace(**changes), maxima, dtype)

    assert suits()
    assert not suits(dtype=np.float32)
    assert not suits(dilation=(2, 2))
    assert not suits(w=(16, 2, 3, 3))  # groups
    assert not suits(w=(18, 4, 3, 3))
    assert not suits(w=(16, 4, 11, 11))  # the weights do not fit into registers
    assert not suits(((2, 2), (3, 3), (0, 0)))  # elements under no window
    assert not suits(((4, 4), (2, 2), (0, 0)))
