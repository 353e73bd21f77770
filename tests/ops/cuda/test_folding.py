"""Products of pixels without whole packs of channels, several pixels as one, against the CPU."""

import numpy as np
import pytest

from caffepy.ops import cpu
from caffepy.ops.objects import NormSums
from tests.ops.cuda.compare import data
from tests.ops.cuda.stored import loaded, rounded, stored
from tests.ops.cuda.test_pointwise import convolution, last_of, norm_arrays, preparation

pytestmark = pytest.mark.gpu

KINDS = {"float16": 2e-3, "uint16": 1e-2}
# N, C, H, W, outputs, stride
SHAPES = {
    "four pixels": (2, 58, 6, 8, 58, 1),
    "two pixels": (3, 116, 8, 7, 116, 1),
    "more outputs": (4, 24, 5, 9, 58, 1),
    "more inputs": (4, 116, 13, 14, 12, 1),
    "many pixels": (16, 58, 28, 28, 58, 1),
}
OTHERS = {
    "whole packs": (2, 64, 6, 8, 64, 1),
    "pixels that are left": (1, 58, 3, 3, 58, 1),
    "odd channels": (2, 57, 6, 8, 64, 1),
    "too many channels": (2, 580, 6, 8, 580, 1),
    "stride": (2, 58, 6, 8, 58, 2),
}


def given(name, kind):
    n, c, h, w, outputs, _ = SHAPES[name]
    x, dy = rounded(data((n, c, h, w)), kind), rounded(data((n, outputs, h, w), seed=1), kind)
    return x, rounded(data((outputs, c, 1, 1), seed=2) / np.sqrt(c), kind).astype("f"), dy


def near(have, want, kind):
    assert np.linalg.norm(have - want) <= KINDS[kind] * np.linalg.norm(want)


def number(candidate):
    """Choose the candidate of this number, the last for -1 or if there are fewer."""

    def choose(name, dtype, candidates, *others):
        made = [(i, run) for i, make in enumerate(candidates) if (run := make()) is not None]
        return made[min(candidate, len(made) - 1)] if made else None

    return choose


@pytest.mark.parametrize("name", [*SHAPES, *OTHERS])
def test_what_suits(name):
    from caffepy.ops import cuda
    from caffepy.ops.cuda import folding

    geometry = convolution(cuda, {**SHAPES, **OTHERS}[name])._geometry
    assert folding.suits(geometry, np.uint16) == (name in SHAPES)
    assert not folding.suits(geometry, np.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SHAPES)
def test_all_passes(name, kind, monkeypatch):
    import cupy

    from caffepy.ops import cuda
    from caffepy.ops.cuda import autotune

    monkeypatch.setattr(autotune, "fastest", number(-1))
    x, weights, dy = given(name, kind)
    ours, theirs = convolution(cpu, SHAPES[name]), convolution(cuda, SHAPES[name])
    y, dx, dw, db = np.empty_like(dy), np.empty_like(x), data(weights.shape), data(len(weights))
    bias, on_gpu = data(len(weights), seed=3), [stored(a, kind, True) for a in (x, dy, dy, x)]
    there, dy_there, y_there, dx_there = on_gpu
    dw_there, db_there, w_there, b_there = map(cupy.asarray, (dw, db, weights, bias))
    for with_bias, relu in ((False, False), (True, False), (True, True)):
        ours.forward(x, weights, bias if with_bias else None, y)
        theirs.forward(there, w_there, b_there if with_bias else None, y_there, relu)
        near(loaded(y_there), np.maximum(y, 0) if relu else y, kind)
    for _ in range(2):  # with the weights of forward, then without
        ours.backward_data(dy, weights, dx)
        theirs.backward_data(dy_there, w_there, dx_there)
        near(loaded(dx_there), dx, kind)
        theirs._for(there, dy_there).folding.begin_forward()
    ours.backward_weight(x, dy, dw, db)
    theirs.backward_weight(there, dy_there, dw_there, db_there)
    near(dw_there.get(), dw, kind)
    near(db_there.get(), db, kind)


@pytest.mark.parametrize("candidate", [0, 1, 2, 3], ids=["apart", "64", "128", "few"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SHAPES)
def test_before_a_batch_norm(name, kind, candidate, monkeypatch):
    import cupy

    from caffepy.ops import cuda
    from caffepy.ops.cuda import autotune

    monkeypatch.setattr(autotune, "_autotune", False)
    monkeypatch.setattr(autotune, "fastest", last_of(autotune.fastest, candidate))
    x, weights, dy = given(name, kind)
    ours, theirs = convolution(cpu, SHAPES[name]), convolution(cuda, SHAPES[name])
    y, want, have = (
        np.empty_like(dy),
        *(preparation(len(weights), m) for m in (np.asarray, cupy.asarray)),
    )
    ours.forward_prepare(x, weights, None, y, want)
    there = stored(np.full(y.shape, np.nan), kind, True)
    theirs.forward_prepare(stored(x, kind, True), cupy.asarray(weights), None, there, have)
    near(loaded(there), y, kind)
    for a, b in zip([*want[0], want[4]], [*have[0], have[4]], strict=True):
        np.testing.assert_allclose(b.get(), a, 5 * KINDS[kind], 5 * KINDS[kind])


VARIANTS = {"linear": (0, 0, 0), "linear, two": (0, 0, 1), "relu": (1, 1, 0), "relu6": (1, 2, 0)}


@pytest.mark.parametrize("candidate", [0, 1, 2], ids=["apart", "64", "128"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", SHAPES)
def test_gradients_with_sums(name, variant, candidate, monkeypatch):
    import cupy

    from caffepy.ops import cuda
    from caffepy.ops.cuda import autotune

    kind, variant = "uint16", VARIANTS[variant]
    monkeypatch.setattr(autotune, "fastest", number(candidate))
    _, weights, dy = given(name, kind)
    ours, theirs = convolution(cpu, SHAPES[name]), convolution(cuda, SHAPES[name])
    channels = weights.shape[1]
    shape = SHAPES[name][:4]
    x, more, _, numbers, ceiling = norm_arrays(shape, channels, variant, kind, 1)

    def wanted(wide, narrow):
        arrays = [None if a is None else narrow(a) for a in (x, more)]
        sums, line = wide(np.ones((2, channels), "f")), wide(np.zeros((2, channels), "f"))
        numbers_there = wide(numbers)
        to = narrow(np.zeros(x.shape))
        return NormSums(arrays[0], numbers_there, arrays[1], None, None, ceiling, to, *sums, line)

    want = wanted(np.array, lambda a: np.array(a, "f"))
    ours.backward_data_norm(dy, weights, want)
    have = wanted(cupy.asarray, lambda a: stored(a, kind, True))
    there = stored(dy, kind, True)
    assert theirs.sums_gradients(there, have.masked, True)
    theirs.backward_data_norm(there, cupy.asarray(weights), have)
    near(loaded(have.masked), want.masked, kind)
    for what in ("dscale", "dbias", "line"):
        a, b = getattr(want, what), getattr(have, what).get()
        assert np.linalg.norm(a - b) <= 2e-2 * np.linalg.norm(a), what
