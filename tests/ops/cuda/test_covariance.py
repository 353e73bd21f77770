"""Convolutions whose output a normalization need not have, against those of the CPU, which have it."""

import numpy as np
import pytest

from caffepy.device.blob import Layout
from caffepy.ops import cpu
from caffepy.ops.objects import NormForward, NormSums
from tests.ops.cuda.compare import data
from tests.ops.cuda.stored import loaded, rounded, stored
from tests.ops.cuda.test_pointwise import convolution, preparation

pytestmark = pytest.mark.gpu

KINDS = {"float16": 3e-3, "uint16": 2e-2}
# N, C, H, W, outputs, stride
SHAPES = {
    "whole tiles": (8, 64, 8, 16, 128, 1),
    "tails everywhere": (3, 40, 7, 9, 96, 1),
    "less than a tile": (1, 8, 3, 2, 32, 1),
    "as many outputs as half a piece": (3, 24, 9, 7, 144, 1),
    "one and a half slices": (5, 16, 11, 13, 96, 1),
    "several tiles": (4, 120, 9, 9, 288, 1),
    "most inputs": (2, 128, 10, 10, 512, 1),
    "many rows": (16, 32, 40, 40, 64, 1),
    "stride": (5, 48, 9, 7, 128, 2),
    "large stride": (4, 16, 10, 10, 32, 3),
}
FEW = [name for name, shape in SHAPES.items() if shape[1] <= 32 and shape[-1] == 1]
# an addend, the ceiling of what follows
VARIANTS = {
    "linear": (False, None),
    "sum": (True, None),
    "relu": (True, np.inf),
    "6": (True, 1.0),
    "6 alone": (False, 1.0),
}


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """Small outputs are skipped too; not on GPUs without wgmma."""
    from caffepy.ops.cuda import context, covariance

    monkeypatch.setattr(covariance, "WORTH", 0)
    if context.capability() != 90:
        pytest.skip("compute capability 9.0 only")


def inputs(name, kind):
    """x as after a ReLU, and weights, as both devices have them."""
    n, c, h, w, outputs, _ = SHAPES[name]
    x = np.maximum(data((n, c, h, w)) + 0.3, 0)
    weights = rounded(data((outputs, c, 1, 1), seed=1) / np.sqrt(c), kind).astype("f")
    return rounded(x, kind).astype("f"), weights


def near(have, want, tolerance):
    assert np.linalg.norm(have - want) <= tolerance * (1e-6 + np.linalg.norm(want))


class Both:
    """A convolution on both devices after forward."""

    def __init__(self, name, kind, variant="relu"):
        import cupy

        from caffepy.ops import cuda

        added, self.ceiling = VARIANTS[variant]
        self.ours, self.theirs = (convolution(backend, SHAPES[name]) for backend in (cpu, cuda))
        assert self.theirs.skips_output(Layout(np.dtype(kind), True))
        assert not self.theirs.skips_output(Layout(np.dtype(kind), False))
        self.kind, (self.x, self.w) = kind, inputs(name, kind)
        self.shape, outputs = self.ours.y_shape, self.ours.y_shape[1]
        self.want, self.have = preparation(outputs), preparation(outputs, cupy.asarray)
        other = rounded(data(self.shape, seed=2), kind).astype("f") if added else None
        self.y = np.empty(self.shape, "f")
        norm = NormForward(self.want, self.want[4], other, self.ceiling, self.y, None)
        self.ours.forward_normalized(self.x, self.w, norm)
        self.x_there, self.w_there = stored(self.x, kind, True), cupy.asarray(self.w)
        self.bits = cupy.zeros(self.y.size // 8, np.uint8) if self.ceiling and added else None
        self.y_there = stored(np.full(self.shape, np.nan), kind, True)
        there = None if other is None else stored(other, kind, True)
        to = there, self.ceiling, self.y_there, self.bits
        norm = NormForward(self.have, self.have[4], *to)
        self.theirs.forward_normalized(self.x_there, self.w_there, norm)

    def backward(self, to, to_there):
        """Return the gradients of w, scale and bias, each on both devices."""
        import cupy

        g = rounded(data(self.shape, seed=12) + 0.2, self.kind).astype("f")
        sizes = self.w.shape, self.shape[1], self.shape[1]
        want = [np.ones(size, "f") for size in sizes]
        have = [cupy.ones(size, np.float32) for size in sizes]
        self.ours.backward_normalized(self.x, self.w, g, self.want[4], want, to)
        there = stored(g, self.kind, True)
        given = self.x_there, self.w_there, there, self.have[4], have, to_there
        self.theirs.backward_normalized(*given)
        return [(a - 1, b.get() - 1) for a, b in zip(want, have, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", SHAPES)
def test_forward(name, variant, kind):
    both = Both(name, kind, variant)
    for a, b in zip([*both.want[0], both.want[4]], [*both.have[0], both.have[4]], strict=True):
        near(b.get(), a, KINDS[kind])
    near(loaded(both.y_there), both.y, KINDS[kind])
    if both.bits is not None:
        y = np.moveaxis(loaded(both.y_there), 1, -1).reshape(-1, 8)
        passes = np.packbits((y > 0) & (y < both.ceiling), axis=1, bitorder="little")
        np.testing.assert_array_equal(both.bits.get(), passes.reshape(-1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", ["linear", "6 alone"])
@pytest.mark.parametrize("name", FEW)
def test_forward_of_few_inputs(name, variant, kind, monkeypatch):
    from caffepy.ops.cuda import autotune

    def last(name, dtype, candidates, arrays, launches=1):
        """The last candidate of all, which is that of few inputs where there is one."""
        run = candidates[-1]()
        return run and (len(candidates) - 1, run)

    monkeypatch.setattr(autotune, "fastest", last)
    both = Both(name, kind, variant)
    near(loaded(both.y_there), both.y, KINDS[kind])


def test_numbers_that_are_there_are_taken():
    both = Both("whole tiles", "uint16")
    running = [a.get() for a in both.have[0]]
    both.have[4][2] *= 2
    norm = NormForward(None, both.have[4], None, None, both.y_there, None)
    both.theirs.forward_normalized(both.x_there, both.w_there, norm)
    want = np.empty(both.shape, "f")
    both.want[4][2] *= 2
    norm = NormForward(None, both.want[4], None, None, want, None)
    both.ours.forward_normalized(both.x, both.w, norm)
    near(loaded(both.y_there), want, 2e-2)
    for a, b in zip(running, both.have[0], strict=True):
        np.testing.assert_array_equal(b.get(), a)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SHAPES)
def test_backward(name, kind):
    both, tolerance = Both(name, kind), KINDS[kind]
    dx, dx_there = np.empty(both.x.shape, "f"), stored(np.full(both.x.shape, np.nan), kind, True)
    for want, have in both.backward(dx, dx_there):
        near(have, want, tolerance)
    found = loaded(dx_there).astype("d")
    near(found, dx, tolerance)
    # The gradient of x has no mean, and what is rounded on the way adds none.
    assert np.abs(found.mean((0, 2, 3))).max() <= 4e-3 * found.std()
    assert not found[dx == 0].any()


@pytest.mark.parametrize(
    "name", ["whole tiles", "tails everywhere", "as many outputs as half a piece", "most inputs"]
)
@pytest.mark.parametrize("width", [64, 128])
def test_backward_to_a_normalization(name, width, monkeypatch):
    """With the sums for the normalization that made x, for tiles of both widths."""
    import cupy

    from caffepy.ops.cuda import pointwise

    monkeypatch.setattr(pointwise, "WIDTHS", (width,))
    both, kind = Both(name, "uint16"), "uint16"
    c = both.x.shape[1]
    before = rounded(data(both.x.shape, seed=5), kind).astype("f")
    numbers = np.stack([data(c, seed=8), 1 + data(c, seed=9) ** 2, data(c, seed=10) + 2, data(c)])
    z = before * numbers[2, :, None, None] + numbers[3, :, None, None]
    before = np.where(np.abs(z) < 1e-2, 3, before).astype("f")  # where both decide alike

    def norm(take, narrow):
        sums, line = (take(np.zeros((2, c), "f")) for _ in range(2))
        masked = narrow(np.zeros(before.shape, "f"))
        of_x = narrow(before), take(numbers.astype("f")), None, None, None
        return NormSums(*of_x, np.inf, masked, *sums, line)

    want, have = norm(np.array, np.array), norm(cupy.asarray, lambda a: stored(a, kind, True))
    for a, b in both.backward(want, have):
        near(b, a, 2e-2)
    near(loaded(have.masked), want.masked, 2e-2)
    for name_ in ("dscale", "dbias", "line"):
        near(getattr(have, name_).get(), getattr(want, name_), 3e-2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("name", FEW)
def test_backward_of_few_inputs_to_a_normalization(name, added, kind, monkeypatch):
    """With the sums for one without a ReLU, and another gradient."""
    import cupy

    from caffepy.ops.cuda import pointwise

    both = Both(name, kind, "6 alone")
    c = both.x.shape[1]
    before, more = (rounded(data(both.x.shape, seed=seed), kind).astype("f") for seed in (5, 6))
    numbers = np.stack([data(c, seed=8), 1 + data(c, seed=9) ** 2, data(c, seed=10), data(c)])

    def norm(take, narrow):
        sums, line = (take(np.zeros((2, c), "f")) for _ in range(2))
        masked = narrow(np.zeros(before.shape, "f"))
        addend = narrow(more) if added else None
        of_x = narrow(before), take(numbers.astype("f")), addend, None, None
        return NormSums(*of_x, None, masked, *sums, line)

    want, have = norm(np.array, np.array), norm(cupy.asarray, lambda a: stored(a, kind, True))
    monkeypatch.setattr(pointwise, "WIDTHS", ())
    for a, b in both.backward(want, have):
        near(b, a, KINDS[kind])
    near(loaded(have.masked), want.masked, KINDS[kind])
    near(have.line.get(), want.line, 3e-2)
    # Without another gradient the sums of this one, dbias, are 0 but for rounding.
    sums = np.stack([have.dscale.get(), have.dbias.get()])
    near(sums, np.stack([want.dscale, want.dbias]), 3e-2)


def test_means_far_from_0_do_not_cancel():
    """Inputs whose deviation is a tenth of their mean."""
    import cupy

    from caffepy.ops import cuda

    shape = SHAPES["many rows"]
    n, c, h, w, outputs, _ = shape
    theirs, have = convolution(cuda, shape), preparation(outputs, cupy.asarray)
    x = rounded(8 + data((n, c, h, w)), "float16").astype("d")
    weights = rounded(data((outputs, c, 1, 1), seed=1), "float16")
    y = stored(np.zeros(theirs.y_shape), "float16", True)
    norm = NormForward(have, have[4], None, None, y, None)
    theirs.forward_normalized(stored(x, "float16", True), cupy.asarray(weights), norm)
    z = np.einsum("nchw,oc->nohw", x, weights[:, :, 0, 0].astype("d"))
    mean, inverse = have[4].get()[:2]
    np.testing.assert_allclose(mean, z.mean((0, 2, 3)), 1e-4, 1e-4)
    np.testing.assert_allclose(inverse, 1 / np.sqrt(z.var((0, 2, 3)) + 1e-5), 1e-3)


def test_the_same_bits_each_time():
    runs = []
    for _ in range(2):
        both = Both("several tiles", "uint16")
        dx = stored(np.zeros(both.x.shape), "uint16", True)
        gradients = both.backward(None, dx)
        runs.append([loaded(dx), loaded(both.y_there), *(have for _, have in gradients)])
    for a, b in zip(*runs, strict=True):
        np.testing.assert_array_equal(a, b)


def test_few_of_all_convolutions_skip(monkeypatch):
    from caffepy.ops.cuda import covariance
    from caffepy.ops.cuda.graphs import Geometry

    one, narrow = (1, 1), np.dtype("uint16")
    usual = Geometry((2, 16, 8, 8), (64, 16, 1, 1), (2, 64, 8, 8), one, (0, 0), one)
    others = [
        usual._replace(x=(2, 48, 8, 8), w=(64, 48, 1, 1)),  # of little less than it makes
        usual._replace(w=(68, 16, 1, 1), y=(2, 68, 8, 8)),
        usual._replace(x=(2, 136, 8, 8), w=(1024, 136, 1, 1), y=(2, 1024, 8, 8)),
        usual._replace(w=(64, 16, 3, 3), padding=one),
    ]
    assert covariance.suits(usual, narrow)
    assert not covariance.suits(usual, np.dtype("float32"))
    assert not any(covariance.suits(other, narrow) for other in others)
    monkeypatch.setattr(covariance, "WORTH", 2 * 2 * 64 * 64 + 1)
    assert not covariance.suits(usual, narrow)
