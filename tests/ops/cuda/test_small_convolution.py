"""Kernels for small convolutions, in the tilings that are thought best and in others, against
ops.cpu in float64.
"""

import random

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

from caffepy.device import math_mode  # noqa: E402
from caffepy.ops import cpu  # noqa: E402
from caffepy.ops.cuda import autotune, small_convolution  # noqa: E402
from caffepy.ops.cuda.graphs import Geometry  # noqa: E402
from tests.ops.cuda.test_convolution import LAST, PLAIN, check, close  # noqa: E402

CASES = {
    "three channels": ((2, 3, 9, 8), (10, 3, 3, 3), (1, 1), (1, 1), (1, 1)),
    "uneven": ((3, 5, 10, 7), (20, 5, 3, 2), (2, 1), (0, 2), (1, 2)),
    "first of LeNet": ((3, 1, 28, 28), (20, 1, 5, 5), (1, 1), (0, 0), (1, 1)),
    "second of LeNet": ((2, 20, 12, 12), (50, 20, 5, 5), (1, 1), (0, 0), (1, 1)),
    "second of CIFAR-10": ((1, 32, 16, 16), (32, 32, 5, 5), (1, 1), (2, 2), (1, 1)),
    "stride, dilation": ((5, 4, 6, 6), (64, 4, 3, 3), (2, 2), (1, 1), (2, 2)),
    "one output": ((2, 32, 7, 9), (1, 32, 2, 2), (3, 2), (2, 0), (1, 1)),
    "more padding than taps": ((2, 2, 3, 3), (3, 2, 2, 2), (1, 1), (3, 2), (1, 1)),
    "one position": ((7, 6, 3, 3), (9, 6, 3, 3), (1, 1), (0, 0), (1, 1)),
    "one line": ((2, 8, 1, 33), (16, 8, 1, 4), (1, 2), (0, 1), (1, 3)),
}


@pytest.fixture(autouse=True, scope="module")
def stream():
    with cupy.cuda.Stream(non_blocking=True) as stream:
        yield stream


@pytest.fixture(autouse=True)
def precise(monkeypatch):
    default = math_mode.default()
    monkeypatch.setattr(default, "precision", default.precision)


class Problem:
    """A case on the device, and what comes out in float64."""

    def __init__(self, case, kind, offset=0):
        x_shape, w_shape, *how = CASES[case]
        self.kind, self.dtype = kind, kind.layout.dtype
        math_mode.default().precision = kind.precision
        self.cpu = cpu.Convolution(x_shape, w_shape, how, 1, np.float64)
        self.geometry = Geometry(x_shape, w_shape, self.cpu.y_shape, *how)
        rng = np.random.default_rng(0)
        x, dy = (kind.round(rng.standard_normal(s)) for s in (x_shape, self.cpu.y_shape))
        w, b, dw, db = (
            rng.standard_normal(s).astype(np.float32) for s in (w_shape, w_shape[:1]) * 2
        )
        self.host = x, w, b, dy, dw, db
        self.x, self.dy = (kind.on_gpu(a, offset) for a in (x, dy))
        self.w, self.b, self.dw, self.db = (PLAIN.on_gpu(a, offset) for a in (w, b, dw, db))
        self.y, self.dx = (kind.on_gpu(np.full(a.shape, np.nan), offset) for a in (dy, x))

    def compare(self, bias=True, relu=True):
        x, w, b, dy, dw, db = (a.astype(np.float64) for a in self.host)
        y, dx = np.empty_like(dy), np.empty_like(x)
        self.cpu.forward(x, w, b if bias else None, y)
        self.cpu.backward_data(dy, w, dx)
        self.cpu.backward_weight(x, dy, dw, db if bias else None)
        close("y", self.y, np.maximum(y, 0) if relu else y, self.kind.tolerance)
        close("dx", self.dx, dx, self.kind.tolerance)
        close("dw", self.dw, dw, self.kind.tolerance)
        close("db", self.db, db, 1e-5)


def ways(problem, relu=True):
    """Lists of ways: forward, backward_data, backward_weight."""
    geometry, dtype = problem.geometry, problem.dtype
    return (
        small_convolution.forward(geometry, dtype, relu),
        small_convolution.backward_data(geometry, dtype),
        small_convolution.backward_weight(geometry, dtype),
    )


def run(problem, made, bias=True):
    forward, backward_data, backward_weight = made
    p = problem
    forward(p.x, p.w, p.b if bias else None, p.y)
    backward_data(p.dy, p.w, p.dx)
    backward_weight(p.x, p.dy, p.dw, p.db if bias else None)


@pytest.mark.parametrize("kind", LAST)
@pytest.mark.parametrize("case", CASES)
def test_best_tilings(case, kind):
    for i in range(small_convolution.CANDIDATES):
        p = Problem(case, LAST[kind])
        assert small_convolution.suits(p.geometry, p.dtype)
        bias = relu = i == 0
        run(p, [found[i % len(found)]() for found in ways(p, relu)], bias)
        p.compare(bias, relu)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", LAST)
def test_other_tilings(kind, seed, monkeypatch):
    """Any that fit, with arrays that begin anywhere."""
    pick = random.Random(seed)

    def any_that_fits(device, kind, *problem):
        work = kind(*problem)
        return [(work, pick.choice(list(work.tilings())))]

    monkeypatch.setattr(small_convolution, "_best", any_that_fits)
    p = Problem(pick.choice(list(CASES)), LAST[kind], offset=seed % 3)
    run(p, [found[0]() for found in ways(p)])
    p.compare()


@pytest.mark.parametrize("kind", ["tf32", "bf16"])
def test_captured(kind, stream):
    p, again = (Problem("three channels", LAST[kind]) for _ in range(2))
    made = [found[0]() for found in ways(p)]
    run(p, made)
    stream.synchronize()
    stream.begin_capture()
    run(again, made)
    graph = stream.end_capture()
    graph.launch(stream)
    again.compare()
    for have, want in ((again.y, p.y), (again.dx, p.dx), (again.dw, p.dw), (again.db, p.db)):
        np.testing.assert_array_equal(have.get(), want.get())


@pytest.mark.parametrize("kind", ["tf32", "bf16"])
def test_as_ways_of_a_convolution(kind, monkeypatch):
    def last(name, dtype, ways, arguments, launches=1):
        found = [(i, run) for i, way in enumerate(ways) if (run := way()) is not None]
        return found[-1] if found else None

    monkeypatch.setattr(autotune, "fastest", last)
    check((*CASES["uneven"], 1), LAST[kind])


def test_what_does_not_suit():
    case = ((2, 4, 6, 6), (8, 4, 3, 3), (2, 8, 4, 4), (1, 1), (0, 0), (1, 1))
    plain = Geometry(*case)
    math_mode.default().precision = "tf32"
    assert small_convolution.suits(plain, np.float32)
    math_mode.default().precision = "fp32"
    assert not small_convolution.suits(plain, np.float32)
    assert small_convolution.suits(plain, np.uint16)
    assert not small_convolution.suits(plain._replace(w=(8, 2, 3, 3)), np.uint16)
    assert not small_convolution.suits(
        plain._replace(x=(1 << 20, *case[0][1:]), y=(1 << 20, *case[2][1:])), np.uint16
    )
