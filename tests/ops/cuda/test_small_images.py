"""Convolutions of small images of many channels, in the tilings that are thought best and in
others, against ops.cpu in float64.
"""

import random
from functools import partial

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

from caffepy.ops.cuda import small_images  # noqa: E402
from tests.ops.cuda import test_small_convolution as small  # noqa: E402
from tests.ops.cuda.test_convolution import KINDS, close  # noqa: E402
from tests.ops.cuda.test_small_convolution import precise, stream  # noqa: E402

assert precise, stream  # fixtures

CASES = {
    "second of LeNet": ((5, 20, 12, 12), (50, 20, 5, 5), (1, 1), (0, 0), (1, 1)),
    "second of CIFAR-10": ((3, 32, 16, 16), (32, 32, 5, 5), (1, 1), (2, 2), (1, 1)),
    "third of CIFAR-10": ((9, 32, 8, 8), (64, 32, 5, 5), (1, 1), (2, 2), (1, 1)),
    "many images": ((300, 16, 6, 5), (16, 16, 3, 3), (1, 1), (1, 1), (1, 1)),
    "uneven": ((3, 18, 9, 7), (22, 18, 3, 2), (1, 1), (1, 0), (1, 1)),
    "stride": ((3, 18, 9, 7), (22, 18, 3, 2), (2, 1), (1, 2), (1, 1)),
}
BITS = {name: KINDS[name] for name in ("bf16", "fp16")}


@pytest.fixture(autouse=True)
def cases(monkeypatch):
    monkeypatch.setattr(small, "CASES", CASES)


def ways(problem, relu):
    geometry, dtype = problem.geometry, problem.dtype
    return (
        small_images.forward(geometry, dtype, relu),
        small_images.backward_data(geometry, dtype),
        small_images.backward_weight(geometry, dtype),
    )


def run_and_compare(p, makes, relu):
    forward, backward, gradient = makes
    bias = p.b if relu else None
    p.y.fill(0)
    forward()(p.x, p.w, bias, p.y)
    x, w, b, dy, dw, db = (a.astype(np.float64) for a in p.host)
    y, dx = np.empty_like(dy), np.empty_like(x)
    p.cpu.forward(x, w, b if relu else None, y)
    close("y", p.y, np.maximum(y, 0) if relu else y, p.kind.tolerance)
    if backward:
        backward()(p.dy, p.w, p.dx)
        p.cpu.backward_data(dy, w, dx)
        close("dx", p.dx, dx, p.kind.tolerance)
    gradient()(p.x, p.dy, p.dw, p.db if relu else None)
    p.cpu.backward_weight(x, dy, dw, db if relu else None)
    close("dw", p.dw, dw, p.kind.tolerance)
    close("db", p.db, db, 1e-5)


@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize("case", CASES)
def test_best_tilings(case, kind):
    for i in range(small_images.CANDIDATES):
        p, relu = small.Problem(case, BITS[kind]), i == 0
        forward, backward, gradient = ways(p, relu)
        assert bool(backward) == (case != "stride")
        makes = forward[i], backward[i] if backward else None, gradient[i % len(gradient)]
        run_and_compare(p, makes, relu)


@pytest.mark.parametrize("seed", range(8))
def test_other_tilings(seed, monkeypatch):
    """Any that fit into shared memory."""
    pick = random.Random(seed)

    def any_that_fits(filters, number, dtype, relu):
        tilings = small_images._tilings(0, filters, number)
        return [partial(small_images._plan, filters, number, dtype, relu, pick.choice(tilings))]

    def any_gradient(device, filters, number):
        return [pick.choice(list(small_images._fitting_gradient(filters, number)))]

    monkeypatch.setattr(small_images, "_candidates", any_that_fits)
    monkeypatch.setattr(small_images, "_gradient_tilings", any_gradient)
    p = small.Problem(pick.choice(list(CASES)), BITS["bf16"])
    forward, backward, gradient = ways(p, True)
    run_and_compare(p, (forward[0], backward[0] if backward else None, gradient[0]), True)


def test_captured(stream):
    p, again = (small.Problem("uneven", BITS["bf16"]) for _ in range(2))
    forward, backward, gradient = (found[0]() for found in ways(p, True))

    def both(problem):
        forward(problem.x, problem.w, problem.b, problem.y)
        backward(problem.dy, problem.w, problem.dx)
        gradient(problem.x, problem.dy, problem.dw, problem.db)

    both(p)
    stream.synchronize()
    stream.begin_capture()
    both(again)
    graph = stream.end_capture()
    graph.launch(stream)
    for have, want in ((again.y, p.y), (again.dx, p.dx), (again.dw, p.dw), (again.db, p.db)):
        np.testing.assert_array_equal(have.get(), want.get())


def test_what_does_not_suit():
    p = small.Problem("uneven", BITS["bf16"])
    assert small_images.suits(p.geometry, np.uint16)
    assert not small_images.suits(p.geometry, np.float32)
    assert not small_images.suits(p.geometry._replace(dilation=(2, 2)), np.uint16)
    assert not small_images.suits(p.geometry._replace(w=(22, 9, 3, 2)), np.uint16)
    assert not small_images.suits(p.geometry._replace(x=(3, 18, 20, 20)), np.uint16)
