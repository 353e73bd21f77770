from math import inf

import numpy as np
import pytest

from caffepy.device.blob import Layout
from tests.ops.cuda.compare import data
from tests.ops.cuda.stored import TOLERANCE, Activation, agree, loaded, stored

pytestmark = pytest.mark.gpu

KINDS = list(TOLERANCE)
THOROUGH = (
    "float32",
    "uint16",
)  # every variant of a kernel is compiled by itself, which takes its time
# shape, whether the channels lie last
LAYOUTS = {
    "planes": ((4, 3, 8), False),
    "odd planes": ((2, 5, 49), False),
    "one element": ((1, 1, 1), True),
    "one position": ((67, 33, 1), False),
    "one channel": ((3, 1, 25), True),
    "long planes": ((3, 2, 3025), False),
    "few channels last": ((2, 3, 35), True),
    "odd channels last": ((3, 37, 9), True),
    "pixels of three channels, folded": ((8, 3, 35), True),
    "pixels of 58 channels, folded": ((4, 58, 26), True),
    "a pack of channels last": ((5, 8, 7), True),
    "three packs last": ((2, 24, 100), True),
    "channels last": ((4, 64, 196), True),
    "many channels last": ((3, 2048, 9), True),
    "lines of odd length": ((2, 272, 5), True),
    "many lines": ((7, 16, 1600), True),
}
# Sums are compared with those of float32 on the CPU; what is stored in 16 bits is rounded once more
# than there.
SUMS = {
    "float32": (1e-4, 1e-4),
    "float64": (1e-10, 1e-10),
    "float16": (3e-3, 4e-3),
    "uint16": (2e-2, 3e-2),
}


def activation(shape, seed=0):
    return Activation(data(shape, seed=seed))


def like(shape):
    return Activation(np.full(shape, 7))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_batch_norm(layout, kind):
    shape, last = LAYOUTS[layout]
    x, dy, c = Activation(2 * data(shape) + 3), activation(shape, 1), shape[1]
    agree(
        "batch_norm_statistics", kind, x, np.ones(c), np.ones(c), last=last, tolerance=(1e-4, 1e-5)
    )
    mean, inverse = 3 + data(c), 0.5 + np.abs(data(c, seed=1))
    agree("batch_norm_forward", kind, x, mean, inverse, like(shape), last=last)
    agree("batch_norm_forward", kind, x, mean, inverse, x, last=last)
    for dx in (like(shape), dy):
        agree(
            "batch_norm_backward", kind, x, mean, inverse, dy, dx, last=last, tolerance=SUMS[kind]
        )


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("shift", [1e2, 1e4])
def test_statistics_of_large_means(shift, last):
    x = Activation(data((8, 4, 100)) + np.float32(shift))
    agree(
        "batch_norm_statistics",
        "float32",
        x,
        np.ones(4),
        np.ones(4),
        last=last,
        tolerance=(1e-3, 0),
    )


@pytest.mark.parametrize("last", [False, True])
def test_an_outlier_does_not_spoil_the_statistics(last):
    values = data((8, 4, 100))
    values[0, :, 0] = 1e5
    agree("batch_norm_statistics", "float32", Activation(values), np.ones(4), np.ones(4), last=last)


def running(c):
    return [data(c, seed=5), np.abs(data(c, seed=6)), np.full(1, 3.0)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "layout", ["planes", "one element", "odd channels last", "channels last", "one position"]
)
def test_prepare(layout, kind):
    shape, last = LAYOUTS[layout]
    c = shape[1]
    x, scale, bias = Activation(2 * data(shape) + 3), data(c, seed=1), data(c, seed=2)
    for given in ([scale, bias], [scale, None], [None, None]):
        arguments = (x, running(c), 0.9, 1e-3, given, np.ones((4, c)))
        agree("batch_norm_prepare", kind, *arguments, last=last, tolerance=(1e-4, 1e-4))


def test_prepare_for_no_values():
    agree(
        "batch_norm_prepare",
        "float32",
        like((0, 3, 4)),
        running(3),
        0.9,
        1e-3,
        [None, None],
        np.ones((4, 3)),
    )


@pytest.mark.parametrize("c", [1, 3, 300])
@pytest.mark.parametrize("weight", [0, 1.5])
def test_stored(weight, c):
    sums = running(c)
    sums[2][:] = weight
    for given in ([data(c, seed=1), data(c, seed=2)], [None, None]):
        agree("batch_norm_stored", "float32", sums, 1e-3, given, np.ones((4, c)))


def numbers(c):
    mean, inverse, scale, bias = (
        data(c),
        0.5 + np.abs(data(c, seed=1)),
        data(c, seed=2),
        data(c, seed=3),
    )
    return np.stack([mean, inverse, scale * inverse, bias - mean * scale * inverse])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_norm_forward(layout, kind):
    shape, last = LAYOUTS[layout]
    x, other, of = activation(shape), activation(shape, 4), numbers(shape[1])
    tolerance = tuple(map(max, TOLERANCE[kind], (1e-5, 2e-6))) if kind != "float64" else None
    cases = ((None, 1.0), (None, inf), (None, None), (other, inf), (other, None), (other, 1.0))
    for addend, ceiling in cases[: 6 if kind in THOROUGH else 2]:
        for y in (like(shape), x):
            agree("norm_forward", kind, x, of, addend, ceiling, y, last=last, tolerance=tolerance)


def away(values, distance=0.02):
    """Values that are not so near 0 or 1 that rounding takes them to the other side."""
    near = (np.abs(values) < distance) | (np.abs(values - 1) < distance)
    return np.where(near, 0.5, values)


def norm_inputs(shape):
    """x whose y is away from 0 and 1."""
    of = numbers(shape[1]).astype("f")
    y = away(data(shape, seed=7), 0.05)
    return Activation((y - of[3][:, None]) / np.where(np.abs(of[2]) < 0.1, 0.1, of[2])[:, None]), of


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_norm_backward(layout, kind):
    shape, last = LAYOUTS[layout]
    x, of = norm_inputs(shape)
    of[2] = np.where(np.abs(of[2]) < 0.1, 0.1, of[2])
    c, dy, more, y = (
        shape[1],
        activation(shape, 4),
        activation(shape, 5),
        Activation(away(data(shape, seed=6))),
    )
    dscale, dbias, dx, masked = data(c, seed=8), data(c, seed=9), like(shape), like(shape)
    relative, absolute = SUMS[kind]
    tolerance = relative, absolute * max(1, np.sqrt(shape[0] * shape[2]) / 8)

    def check(dys, y, ceiling, masked, dx, dscale, dbias, frozen):
        arguments = (x, of, dys, y, ceiling, masked, dx, dscale, dbias, frozen)
        agree("norm_backward", kind, *arguments, last=last, tolerance=tolerance)

    check([dy], None, inf, None, dx, dscale, dbias, False)
    check([dy], None, inf, None, dy, dscale, None, False)
    check([dy, more], y, inf, masked, dy, None, None, False)
    check([dy], None, 1.0, None, dx, dscale, dbias, False)
    check([dy, more], y, 1.0, masked, dy, None, None, False)
    if kind not in THOROUGH:
        return
    check([dy], None, None, None, dx, dscale, dbias, False)
    check([dy], y, inf, masked, dx, dscale, dbias, False)
    check([dy, more], None, inf, dy, dy, dscale, dbias, False)
    check([dy], None, None, masked, None, None, dbias, False)
    check([dy], None, inf, None, dx, dscale, dbias, True)
    check([dy, more], y, inf, masked, dy, dscale, dbias, True)
    check([dy], None, inf, None, dy, None, None, True)


@pytest.mark.parametrize("ceiling", [inf, 1.0])
@pytest.mark.parametrize("kind", THOROUGH)
@pytest.mark.parametrize("layout", ["a pack of channels last", "three packs last", "channels last"])
def test_bits_in_place_of_y(layout, kind, ceiling):
    """Bits that forward kept give what y would have given, to the bit."""
    import cupy

    from caffepy.ops import cuda

    shape, _ = LAYOUTS[layout]
    of = cupy.asarray(numbers(shape[1]).astype("f"))
    x, other, dy, more = (stored(data(shape, seed=seed), kind, True) for seed in range(4))
    y = stored(np.zeros(shape), kind, True)
    bits = cupy.zeros(cuda.mask_size(shape, Layout(np.dtype(kind), True)), np.uint8)
    cuda.norm_forward(x, of, other, ceiling, y, bits)
    found = loaded(y)
    passes = np.moveaxis((found > 0) & (found < ceiling), 1, -1).reshape(len(bits), -1)
    unpacked = np.unpackbits(bits.get()[:, None], axis=1, bitorder="little")
    np.testing.assert_array_equal(unpacked[:, : passes.shape[1]], passes)
    answers = []
    for given in (None, bits):
        masked, dx = (stored(np.zeros(shape), kind, True) for _ in range(2))
        dscale, dbias = cupy.zeros((2, shape[1]), np.float32)
        arguments = (x, of, [dy, more], y, ceiling, masked, dx, dscale, dbias, False, given)
        cuda.norm_backward(*arguments)
        alone = stored(np.zeros(shape), kind, True)
        cuda.norm_mask([dy, more], y, ceiling, alone, given)
        np.testing.assert_array_equal(alone.get(), masked.get())
        answers.append([a.get() for a in (masked, dx, dscale, dbias)])
    for by_y, by_bits in zip(*answers, strict=True):
        np.testing.assert_array_equal(by_y, by_bits)


def test_bits_are_kept_of_whole_packs_only():
    from caffepy.ops import cuda

    sizes = {(True, 8): 6, (True, 12): 0, (False, 8): 0}
    for (last, channels), size in sizes.items():
        assert cuda.mask_size((2, channels, 3), Layout(np.dtype("uint16"), last)) == size
    assert cuda.mask_size((2, 12, 3), Layout(np.dtype("float32"), True)) == 18


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scale(layout, kind):
    shape, last = LAYOUTS[layout]
    x, dy, c = activation(shape), activation(shape, 1), shape[1]
    scale, bias, dscale, dbias = (data(c, seed=seed) for seed in range(2, 6))
    near = tuple(map(max, TOLERANCE[kind], (1e-5, 1e-6))) if kind != "float64" else None
    agree("scale_forward", kind, x, scale, bias, like(shape), last=last, tolerance=near)
    agree("scale_forward", kind, x, scale, None, like(shape), last=last, tolerance=near)
    agree("scale_forward", kind, x, scale, bias, x, last=last, tolerance=near)
    for dx, *sums in (
        (like(shape), dscale, dbias),
        (dy, dscale, None),
        (None, None, dbias),
        (dy, None, None),
    ):
        agree("scale_backward", kind, x, scale, dy, dx, *sums, last=last, tolerance=SUMS[kind])


@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0, 4), (3, 4, 0)], ids=str)
def test_of_nothing(shape):
    x, c = like(shape), shape[1]
    agree("scale_forward", "float32", x, data(c), None, like(shape))
    agree("scale_backward", "float32", x, data(c), x, like(shape), data(c), data(c, seed=1))
    agree("norm_forward", "float32", x, np.ones((4, c)), None, inf, like(shape))
    arguments = (x, np.ones((4, c)), [x], None, inf, None, like(shape), data(c), data(c), False)
    agree("norm_backward", "float32", *arguments)


def test_offset_arrays_are_not_taken_for_aligned_ones():
    """Scales within the flat parameters of a solver lie anywhere."""
    import cupy

    from caffepy.ops import cpu, cuda

    x, flat = data((6, 16, 1)), data(33)
    y, theirs = np.empty_like(x), cupy.empty(x.shape, np.float32)
    scale, bias = flat[1:17], flat[17:33]
    cpu.scale_forward(x, scale, bias, y)
    on_gpu = cupy.asarray(flat)
    cuda.scale_forward(cupy.asarray(x), on_gpu[1:17], on_gpu[17:33], theirs)
    np.testing.assert_allclose(theirs.get(), y, 1e-6, 1e-6)
