"""Kernels for convolutions of each channel by itself against ops.cpu in float64."""

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

from caffepy.ops import cpu, cuda  # noqa: E402
from caffepy.ops.cuda import depthwise  # noqa: E402
from caffepy.ops.cuda.graphs import Geometry  # noqa: E402
from caffepy.ops.objects import Normalized, NormGradient, NormSums  # noqa: E402
from tests.ops.cuda.test_convolution import LAST, PLAIN, close, host  # noqa: E402

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


@pytest.mark.parametrize("ceiling", ["nothing", None, np.inf, 1.0], ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", LAST)
def test_sums_for_a_normalization_behind(name, case, ceiling):
    """Sums of what was written, far from 0, too; of what a normalization gives, unless nothing."""
    kind = LAST[name]
    x_shape, stride, pad = CASES[case]
    w_shape, how = (x_shape[1], 1, 3, 3), (stride, pad, (1, 1))
    exact = cpu.Convolution(x_shape, w_shape, how, x_shape[1], np.float64)
    geometry = Geometry(x_shape, w_shape, exact.y_shape, *how)
    rng = np.random.default_rng(0)
    x, w = kind.round(3 + rng.standard_normal(x_shape)), rng.standard_normal(w_shape).astype("f")
    y = kind.on_gpu(np.full(exact.y_shape, np.nan), 0)
    given = None
    if ceiling != "nothing":
        numbers = rng.standard_normal((4, x_shape[1])).astype("f")
        given = Normalized(PLAIN.on_gpu(numbers, 0), ceiling)
    run = depthwise.moments(geometry, kind.layout.dtype, given)
    partial, shares = run(kind.on_gpu(x, 0), PLAIN.on_gpu(w, 0), y)
    if given is not None:
        x = x * numbers[2, :, None, None] + numbers[3, :, None, None]
        x = x if ceiling is None else np.clip(x, 0, ceiling)
    want = np.empty(exact.y_shape)
    exact.forward(x.astype(np.float64), w.astype(np.float64), None, want)
    close("y", y, want, kind.tolerance)
    written = host(y).astype(np.float64)
    sums = partial.get().reshape(-1)[: 2 * shares * x_shape[1]].reshape(2, shares, -1).sum(1)
    of_squares = (written**2).sum((0, 2, 3))
    np.testing.assert_allclose(
        sums[0], written.sum((0, 2, 3)), rtol=0, atol=1e-5 * of_squares.max()
    )
    np.testing.assert_allclose(sums[1], of_squares, 1e-5)


# What made x: nothing that matters, a ReLU6 whose result is x, normalizations with what follows; the
# last two want more than one pass gives.
BEFORE = ("nothing", "6", "norm", "norm relu", "norm 6", "norm 6 more", "norm 6 sum", "6 more")
CEILINGS = {"relu": np.inf, "6": 1.0}


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_both_gradients_past_that_of_a_normalization(name, case, before):
    """With the first half of the gradient of a normalization before it."""
    x_shape, stride, pad = CASES[case]
    channels = x_shape[1]
    check_both(LAST[name], x_shape, (channels, 1, 3, 3), (stride, pad, (1, 1)), channels, before)


PRODUCTS = {  # x, outputs
    "16": ((2, 96, 9, 10), 16),
    "24": ((3, 144, 7, 5), 24),
    "32, not all of a slice": ((2, 40, 12, 8), 32),
    "8": ((1, 16, 5, 7), 8),
    "one pixel": ((1, 64, 1, 1), 32),
    "many pixels": ((16, 72, 30, 31), 24),
}


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("case", PRODUCTS)
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_both_gradients_of_a_product_with_few_outputs(name, case, before):
    x_shape, outputs = PRODUCTS[case]
    how = (1, 1), (0, 0), (1, 1)
    check_both(LAST[name], x_shape, (outputs, x_shape[1], 1, 1), how, 1, before)


@pytest.mark.parametrize("ceiling", [None, np.inf, 1.0], ids=str)
@pytest.mark.parametrize("case", PRODUCTS)
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_products_of_what_a_normalization_gives(name, case, ceiling):
    check_given(LAST[name], *PRODUCTS[case], ceiling)


def check_given(kind, x_shape, outputs, ceiling):
    """With the numbers of a BatchNorm behind the product."""
    channels, how = x_shape[1], ((1, 1), (0, 0), (1, 1))
    w_shape = outputs, channels, 1, 1
    rng = np.random.default_rng(0)
    sizes = x_shape, w_shape, (4, channels), outputs, outputs, 1, outputs, outputs
    x, w, numbers, *others = (rng.standard_normal(s).astype("f") for s in sizes)
    x, w = kind.round(x), kind.round(w)

    def run(conv, wide, narrow):
        y, of_y = narrow(np.full(conv.y_shape, np.nan)), wide(np.zeros((4, outputs)))
        others_there = [wide(np.abs(a)) for a in others]
        preparation = others_there[:3], 0.9, 1e-3, others_there[3:], of_y
        given = Normalized(wide(numbers), ceiling)
        conv.forward_prepare(narrow(x), wide(w), None, y, preparation, given)
        return {"y": y, "numbers": of_y, "mean": others_there[0], "variance": others_there[1]}

    exact = cpu.Convolution(x_shape, w_shape, how, 1, np.float64)
    ours = cuda.Convolution(x_shape, w_shape, how, 1, kind.layout.dtype)
    assert ours.takes_normalized(kind.layout)
    want = run(exact, lambda a: a.astype(np.float64), lambda a: a.astype(np.float64))
    have = run(ours, lambda a: PLAIN.on_gpu(a, 0), lambda a: kind.on_gpu(a, 0))
    for what in want:
        close(what, have[what], want[what], 3 * kind.tolerance)


def check_both(kind, x_shape, w_shape, how, group, before):
    exact = cpu.Convolution(x_shape, w_shape, how, group, np.float64)
    ours = cuda.Convolution(x_shape, w_shape, how, group, kind.layout.dtype)
    assert ours.skips_gradient(kind.layout)
    rng = np.random.default_rng(0)
    data = rng.standard_normal
    source, more = (kind.round(data(x_shape)) for _ in range(2))
    z, g = (kind.round(data(exact.y_shape)) for _ in range(2))
    channels, outputs = x_shape[1], w_shape[0]
    of_two, of_four = (2, channels), (4, channels)
    sizes = w_shape, (4, outputs), (2, outputs), of_four, w_shape, channels, channels, of_two
    w, numbers, line, of_x, dw, dscale, dbias, its_line = (data(s).astype("f") for s in sizes)
    of_x[1] = 1 + of_x[1] ** 2
    _, *words = before.split() if before.startswith("norm") else ("", *before.split())
    ceiling = next((CEILINGS[word] for word in words if word in CEILINGS), None)
    x = source
    if before != "nothing":
        x = source * of_x[2, :, None, None] + of_x[3, :, None, None]
        x = x if ceiling is None else np.clip(x, 0, ceiling)
        x = kind.round(x)

    def wanted(wide, narrow):
        masked = narrow(np.full(x_shape, np.nan))
        if before == "nothing":
            return masked
        return NormSums(
            narrow(source) if before.startswith("norm") else None,
            wide(of_x),
            narrow(more) if "more" in words else None,
            narrow(x) if "sum" in words or not before.startswith("norm") else None,
            None,
            ceiling,
            masked,
            *(wide(a) for a in (dscale, dbias, its_line)),
        )

    def run(conv, wide, narrow):
        to, sums = wanted(wide, narrow), wide(dw)
        dy = NormGradient(narrow(z), wide(numbers), wide(line), narrow(g))
        hidden = before in ("norm", "norm relu", "norm 6")
        conv.backward_norm_gradient(None if hidden else narrow(x), wide(w), dy, sums, to)
        if before == "nothing":
            return {"dx": to, "dw": sums}
        found = {"masked": to.masked, "dw": sums}
        if to.x is not None:
            found |= {"dscale": to.dscale, "dbias": to.dbias, "line": to.line}
        return found

    want = run(exact, lambda a: a.astype(np.float64), lambda a: a.astype(np.float64))
    have = run(ours, lambda a: PLAIN.on_gpu(a, 0), lambda a: kind.on_gpu(a, 0))
    for what in want:
        close(what, have[what], want[what], kind.tolerance)


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
