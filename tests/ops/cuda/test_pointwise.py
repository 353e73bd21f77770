"""Products of pixels and weights with the sums of a normalization, against numpy and the CPU."""

from itertools import product

import numpy as np
import pytest

from caffepy.ops import cpu
from caffepy.ops.objects import NormSums
from tests.ops.cuda.compare import data
from tests.ops.cuda.stored import loaded, rounded, stored

pytestmark = pytest.mark.gpu

KINDS = {"float16": 2e-3, "uint16": 1e-2}
# N, C, H, W, outputs, stride
SHAPES = {
    "whole tiles": (8, 64, 8, 16, 128, 1),
    "tails everywhere": (3, 40, 7, 9, 72, 1),
    "less than a tile": (1, 8, 3, 2, 8, 1),
    "deep": (2, 520, 9, 9, 136, 1),
    "many tiles": (16, 32, 40, 40, 64, 1),
    "few outputs": (3, 72, 7, 9, 24, 1),
    "few outputs of many pixels": (16, 96, 20, 20, 16, 1),
    "stride": (5, 48, 9, 7, 64, 2),
    "large stride": (2, 16, 10, 10, 16, 3),
}
# N, C, H, W, outputs, height and width of the kernel
KERNELS = {
    "lines of taps": (3, 16, 21, 19, 64, 4, 4),
    "uneven": (2, 24, 9, 11, 40, 3, 5),
    "one tap high": (2, 8, 9, 11, 72, 1, 3),
}


def convolution(backend, shape):
    n, c, h, w, outputs, stride = shape
    window = (stride, stride), (0, 0), (1, 1)
    return backend.Convolution((n, c, h, w), (outputs, c, 1, 1), window, 1, np.float32)


def preparation(outputs, make=np.asarray):
    scale, bias = data(outputs, seed=3), data(outputs, seed=4)
    running = [np.ones(outputs, "f"), np.ones(outputs, "f"), np.ones(1, "f")]
    arrays = [make(a) for a in (*running, scale, bias, np.zeros((4, outputs), "f"))]
    return arrays[:3], 0.9, 1e-5, arrays[3:5], arrays[5]


@pytest.mark.parametrize("width", [32, 64, 128])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SHAPES)
def test_products_with_moments(name, kind, width):
    import cupy

    from caffepy.ops import cuda
    from caffepy.ops.cuda import pointwise

    n, c, h, w, outputs, stride = SHAPES[name]
    x, weights = 2 * data((n, c, h, w)) + 1, data((outputs, c), seed=1) / np.sqrt(c)
    geometry = convolution(cuda, SHAPES[name])._geometry
    y = stored(np.full(geometry.y, np.nan), kind, True)
    run = pointwise.moments(geometry, np.dtype(kind), width)
    partial, splits = run(stored(x, kind, True), stored(weights, kind), y)
    pixels = rounded(x, kind)[:, :, ::stride, ::stride].astype("d")
    truth = np.einsum("nchw,oc->nohw", pixels, rounded(weights, kind).astype("d"))
    found = loaded(y).astype("d")
    assert np.linalg.norm(found - truth) <= KINDS[kind] * np.linalg.norm(truth)
    sums = cupy.asnumpy(partial[: 2 * splits * outputs]).reshape(2, splits, outputs).sum(1)
    np.testing.assert_allclose(sums[0], found.sum((0, 2, 3)), 1e-5, 1e-3)
    np.testing.assert_allclose(sums[1], (found**2).sum((0, 2, 3)), 1e-5)


@pytest.mark.parametrize("width", [32, 64, 128])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_with_moments(name, width):
    """Larger kernels, whose lines lie side by side in the image."""
    import cupy

    from caffepy.ops import cuda
    from caffepy.ops.cuda import pointwise

    (n, c, h, w, outputs, *taps), kind = KERNELS[name], "uint16"
    shapes = (n, c, h, w), (outputs, c, *taps), ((1, 1), (0, 0), (1, 1)), 1, np.float32
    ours, geometry = cpu.Convolution(*shapes), cuda.Convolution(*shapes)._geometry
    x, weights = rounded(data((n, c, h, w)), kind), rounded(data((outputs, c, *taps), seed=1), kind)
    want = np.empty(ours.y_shape, "f")
    ours.forward(x, weights, None, want)
    y = stored(np.full(want.shape, np.nan), kind, True)
    assert pointwise.suits_moments(geometry, np.dtype(kind))
    assert not pointwise.suits_gradients(geometry, np.dtype(kind))
    run = pointwise.moments(geometry, np.dtype(kind), width)
    partial, splits = run(stored(x, kind, True), stored(weights, kind, True), y)
    found = loaded(y).astype("d")
    assert np.linalg.norm(found - want) <= 1e-2 * np.linalg.norm(want)
    sums = cupy.asnumpy(partial[: 2 * splits * outputs]).reshape(2, splits, outputs).sum(1)
    np.testing.assert_allclose(sums[0], found.sum((0, 2, 3)), 1e-5, 1e-2)
    np.testing.assert_allclose(sums[1], (found**2).sum((0, 2, 3)), 1e-5)


@pytest.mark.parametrize("shape", [(4, 3, 33, 30, 64, 7, 2), (4, 3, 20, 20, 16, 3, 2)], ids=str)
def test_an_image_of_few_channels_before_a_batch_norm(shape):
    import cupy

    from caffepy.ops import cuda
    from caffepy.ops.cuda import autotune

    n, c, h, w, outputs, side, stride = shape
    window = (stride, stride), (side // 2,) * 2, (1, 1)
    sizes = (n, c, h, w), (outputs, c, side, side), window, 1, np.float32
    x, weights = rounded(data((n, c, h, w)), "uint16"), data((outputs, c, side, side), seed=1)
    ours, want = cpu.Convolution(*sizes), preparation(outputs)
    y = np.empty(ours.y_shape, "f")
    ours.forward_prepare(x, weights, None, y, want)
    for last in range(3):  # of the candidates
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(autotune, "fastest", last_of(autotune.fastest, last))
            theirs = cuda.Convolution(*sizes)
            there, have = (
                stored(np.full(y.shape, np.nan), "uint16", True),
                preparation(outputs, cupy.asarray),
            )
            given = stored(x, "uint16", True), cupy.asarray(weights), None, there, have
            theirs.forward_prepare(*given)
            dw = cupy.zeros(weights.shape, np.float32)
            theirs.backward_weight(given[0], there, dw, None)
        assert np.linalg.norm(loaded(there) - y) <= 1e-2 * np.linalg.norm(y)
        np.testing.assert_allclose(have[4].get(), want[4], 5e-2, 5e-2)
        truth = np.zeros(weights.shape, "f")
        ours.backward_weight(x, loaded(there).astype("f"), truth, None)
        assert np.linalg.norm(dw.get() - truth) <= 1e-2 * np.linalg.norm(truth)


def test_nothing_is_kept_of_candidates_that_are_only_compiled():
    import cupy

    from caffepy.ops import cuda

    shape = SHAPES["many tiles"]
    n, c, h, w, outputs, _ = shape
    theirs, have = convolution(cuda, shape), preparation(outputs, cupy.asarray)
    x, y = stored(data((n, c, h, w)), "uint16", True), stored(data((n, outputs, h, w)), "uint16", 1)
    with cuda.compile_ahead():
        theirs.forward_prepare(x, cupy.zeros((outputs, c, 1, 1), np.float32), None, y, have)
    made = theirs._for(x, y)
    assert not made.cudnn._used
    assert not made._runs
    assert not made.summed._runs


def last_of(fastest, last):
    """Choose the candidate of this number among those with moments."""

    def choose(name, dtype, candidates, *others):
        if name.startswith("forward moments"):
            return last, candidates[last]()
        return fastest(name, dtype, candidates, *others)

    return choose


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["tails everywhere", "stride", "many tiles"])
def test_a_convolution_before_a_batch_norm(name, kind):
    import cupy

    from caffepy.ops import cuda

    shape = SHAPES[name]
    ours, theirs = convolution(cpu, shape), convolution(cuda, shape)
    n, c, h, w, outputs, _ = shape
    x, weights = data((n, c, h, w)), data((outputs, c, 1, 1), seed=1)
    y, want = np.empty(ours.y_shape, "f"), preparation(outputs)
    ours.forward_prepare(rounded(x, kind), weights, None, y, want)
    there = stored(np.full(ours.y_shape, np.nan), kind, True)
    have = preparation(outputs, cupy.asarray)
    theirs.forward_prepare(stored(x, kind, True), cupy.asarray(weights), None, there, have)
    near = KINDS[kind]
    assert np.linalg.norm(loaded(there) - y) <= near * np.linalg.norm(y)
    for a, b in zip([*want[0], want[4]], [*have[0], have[4]], strict=True):
        np.testing.assert_allclose(b.get(), a, 5 * near, 5 * near)


def test_sums_of_large_means_do_not_cancel():
    import cupy

    from caffepy.ops import cuda
    from caffepy.ops.cuda import pointwise

    shape = SHAPES["many tiles"]
    n, c, h, w, outputs, _ = shape
    geometry = convolution(cuda, shape)._geometry
    y = stored(np.zeros(geometry.y), "float16", True)
    run = pointwise.moments(geometry, np.dtype("float16"), 64)
    weights = np.zeros((outputs, c))
    weights[:, 0] = 1000
    x = np.ones((n, c, h, w)) + data((n, c, h, w)) / 1000
    partial, splits = run(stored(x, "float16", True), stored(weights, "float16"), y)
    first, second = cupy.asnumpy(partial[: 2 * splits * outputs]).reshape(2, splits, -1).sum(1)
    count, found = n * h * w, loaded(y).astype("d")
    variance = second / count - (first / count) ** 2
    np.testing.assert_allclose(variance, found.var((0, 2, 3)), 1e-4)


def norm_arrays(shape, outputs, variant, kind, stride):
    """x, more, y, the numbers of the normalization, and the ceiling, for a kind of mask."""
    mask, after, has_more = variant
    x, more, y = (rounded(data(shape, seed=seed), kind) for seed in (5, 6, 7))
    if stride > 1:  # as another convolution with this stride leaves it
        there = np.zeros(shape, bool)
        there[:, :, ::stride, ::stride] = True
        more = np.where(there, more, 0)
    mean, inverse = data(outputs, seed=8), 0.5 + np.abs(data(outputs, seed=9))
    factor, shift = data(outputs, seed=10), data(outputs, seed=11)
    numbers = np.stack([mean, inverse, factor, shift]).astype("f")
    if mask == BY_X:  # where float32 and float64 agree
        z = x * factor[:, None, None] + shift[:, None, None]
        near = np.minimum(np.abs(z), np.abs(z - CEILING)) < 1e-2
        x = np.where(near, rounded(np.float32(3), kind), x)
    given = more if has_more else None, y if mask == BY_BITS else None
    return x, *given, numbers, (None, np.inf, CEILING)[after]


BY_X, BY_BITS = 1, 3
CEILING = 1.0
# kind of mask, what follows the normalization, more
VARIANTS = {
    "linear": (0, 0, 0),
    "linear, two": (0, 0, 1),
    "relu": (BY_X, 1, 0),
    "relu6": (BY_X, 2, 0),
    "sum and relu, two": (BY_BITS, 1, 1),
    "sum and relu6": (BY_BITS, 2, 0),
}


def is_narrow(name, variant):
    """True if products of few outputs in registers give it."""
    (mask, _, more), (*_, outputs, stride) = VARIANTS[variant], SHAPES[name]
    return mask != BY_BITS and not more and outputs <= 32 and stride == 1


GRADIENTS = [
    (name, variant, width)
    for name, variant, width in product(SHAPES, VARIANTS, (64, 128, "narrow", None))
    if width != "narrow" or is_narrow(name, variant)
]


@pytest.mark.parametrize(("name", "variant", "width"), GRADIENTS)
def test_gradients_with_sums(name, variant, width):
    """The kernels, and (None) cuDNN's gradient with a pass after it, against the CPU."""
    import cupy

    from caffepy.ops import cuda
    from caffepy.ops.cuda import autotune, normalization, pointwise

    kind, variant, shape = "uint16", VARIANTS[variant], SHAPES[name]
    n, c, h, w, outputs, stride = shape
    ours, theirs = convolution(cpu, shape), convolution(cuda, shape)
    x, more, y, numbers, ceiling = norm_arrays((n, c, h, w), c, variant, kind, stride)
    dy = rounded(data(ours.y_shape), kind)
    weights = rounded(data((outputs, c, 1, 1), seed=1), kind).astype("f")

    def given(take, narrow):
        arrays = [None if a is None else narrow(a) for a in (x, more, y)]
        bits = None
        if y is not None and narrow is not np.array:
            passes = np.moveaxis((y > 0) & (y < ceiling), 1, -1).reshape(-1, 8)
            bits = cupy.asarray(np.packbits(passes, axis=1, bitorder="little").reshape(-1))
        sums = take(np.ones((2, c), "f"))
        return NormSums(
            arrays[0],
            take(numbers),
            *arrays[1:],
            bits,
            ceiling,
            narrow(np.full(x.shape, np.nan)),
            sums[0],
            sums[1],
            take(np.zeros((2, c), "f")),
        )

    want = given(np.array, np.array)
    want = want._replace(masked=np.zeros(x.shape, "f"))
    ours.backward_data_norm(dy, weights, want)
    have = given(cupy.asarray, lambda a: stored(a, kind, True))
    there, w_there = stored(dy, kind, True), cupy.asarray(weights)
    assert theirs.sums_gradients(there, have.masked, True)
    assert theirs.sums_gradients(there, have.masked, False) == (stride == 1)
    if width is None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(autotune, "_autotune", False)
            theirs.backward_data_norm(there, w_there, have)
    else:
        of = theirs._geometry, np.dtype(kind)
        if width == "narrow":
            assert pointwise.suits_narrow_sums(of[0], (*variant, 1))
            run = pointwise.narrow_sums(*of, variant[1])
        else:
            run = pointwise.gradient(*of, width, (*variant, 1))
        partial = run(there, stored(weights.reshape(outputs, c), kind), have)
        planes = have.x.reshape(n, c, h * w)
        normalization.finish_gradient(
            partial, planes, have.numbers, have.dscale, have.dbias, have.line
        )
    masked = loaded(have.masked)
    assert np.linalg.norm(masked - want.masked) <= 1e-2 * np.linalg.norm(want.masked)
    assert not masked[want.masked == 0].any()
    for name_ in ("dscale", "dbias", "line"):
        a, b = getattr(want, name_), getattr(have, name_).get()
        assert np.linalg.norm(a - b) <= 2e-2 * np.linalg.norm(a), name_


@pytest.mark.parametrize("width", [64, 128, None])
@pytest.mark.parametrize("variant", [name for name, (mask, *_) in VARIANTS.items() if mask != BY_X])
@pytest.mark.parametrize("name", ["tails everywhere", "many tiles", "stride"])
def test_masks_without_sums(name, variant, width):
    import cupy

    from caffepy.ops import cuda
    from caffepy.ops.cuda import autotune, pointwise

    kind, variant, shape = "uint16", VARIANTS[variant], SHAPES[name]
    n, c, h, w, outputs, stride = shape
    ours, theirs = convolution(cpu, shape), convolution(cuda, shape)
    _, more, y, numbers, ceiling = norm_arrays((n, c, h, w), c, variant, kind, stride)
    dy = rounded(data(ours.y_shape), kind)
    weights = rounded(data((outputs, c, 1, 1), seed=1), kind).astype("f")
    masked, nothing = np.zeros((n, c, h, w), "f"), (None, None, None)
    ours.backward_data_norm(
        dy, weights, NormSums(None, numbers, more, y, None, ceiling, masked, *nothing)
    )
    more, y_there = (None if a is None else stored(a, kind, True) for a in (more, y))
    bits = None
    if y is not None:
        passes = np.moveaxis((y > 0) & (y < ceiling), 1, -1).reshape(-1, 8)
        bits = cupy.asarray(np.packbits(passes, axis=1, bitorder="little").reshape(-1))
    to = stored(np.full(masked.shape, np.nan), kind, True)
    have = NormSums(None, cupy.asarray(numbers), more, y_there, bits, ceiling, to, *nothing)
    there = stored(dy, kind, True)
    if width is None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(autotune, "_autotune", False)
            theirs.backward_data_norm(there, cupy.asarray(weights), have)
    else:
        run = pointwise.gradient(theirs._geometry, np.dtype(kind), width, (*variant, 0))
        run(there, stored(weights.reshape(outputs, c), kind), have)
    found = loaded(to)
    assert np.linalg.norm(found - masked) <= 1e-2 * np.linalg.norm(masked)
    assert not found[masked == 0].any()


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["stride", "large stride", "tails everywhere"])
def test_gradients_of_the_data(name, kind, width):
    from caffepy.ops import cuda
    from caffepy.ops.cuda import pointwise

    shape = SHAPES[name]
    n, c, h, w, outputs, _ = shape
    ours, geometry = convolution(cpu, shape), convolution(cuda, shape)._geometry
    dy = rounded(data(ours.y_shape), kind)
    weights = rounded(data((outputs, c, 1, 1), seed=1), kind).astype("f")
    want = np.empty((n, c, h, w), "f")
    ours.backward_data(dy, weights, want)
    dx = stored(np.full(want.shape, np.nan), kind, True)
    run = pointwise.spread(geometry, np.dtype(kind), width)
    run(stored(dy, kind, True), stored(weights.reshape(outputs, c), kind), dx)
    found = loaded(dx)
    assert np.linalg.norm(found - want) <= KINDS[kind] * np.linalg.norm(want)
    assert not found[want == 0].any()


def test_few_of_all_convolutions_suit():
    from caffepy.ops.cuda import pointwise
    from caffepy.ops.cuda.graphs import Geometry

    one, two = (1, 1), (2, 2)
    usual = Geometry((2, 16, 8, 8), (24, 16, 1, 1), (2, 24, 8, 8), one, (0, 0), one)
    strided = usual._replace(stride=two, y=(2, 24, 4, 4))
    others = [
        usual._replace(w=(24, 16, 3, 3), padding=one),
        usual._replace(w=(24, 16, 3, 3), y=(2, 24, 3, 3), stride=two),
        usual._replace(w=(24, 8, 1, 1)),
        usual._replace(x=(2, 12, 8, 8), w=(24, 12, 1, 1)),
        usual._replace(w=(20, 16, 1, 1), y=(2, 20, 8, 8)),
        usual._replace(padding=one, y=(2, 24, 10, 10)),
    ]
    narrow = np.dtype("uint16")
    assert pointwise.suits_moments(usual, narrow)
    assert pointwise.suits_moments(strided, narrow)
    assert not pointwise.suits_moments(usual, np.dtype("float32"))
    assert not any(pointwise.suits_moments(other, narrow) for other in others)
