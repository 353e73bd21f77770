import numpy as np
import pytest

from tests.ops.cuda.compare import data
from tests.ops.cuda.stored import agree, loaded, rounded, stored

pytestmark = pytest.mark.gpu

ALPHA, K = 0.5, 1.5
PLANES = [(2, 40, 9, 9), (3, 1, 5, 5), (1, 17, 3, 1), (0, 8, 4, 4), (2, 5, 6)]
LINES = [
    (2, 96, 5, 5),
    (2, 264, 3, 3),  # more packs than a warp has threads for
    (3, 1, 5, 5),
    (2, 17, 3, 2),
    (4, 16, 7, 7),
    (0, 8, 4, 4),
    (2, 8, 6),
    (5, 24, 1, 1),
    (1, 3, 2, 2),
]
WINDOWS = {
    "float32": [(1, 0.75), (3, 0.6), (5, 0.75), (5, 0.6), (9, 0.75), (15, 0.75), (15, 0.6)],
    "float64": [(5, 0.75), (15, 0.6)],
    "float16": [(5, 0.75), (15, 0.6)],
    "uint16": [(5, 0.75), (9, 0.6), (15, 0.75)],
}  # sizes and betas; a variant of a kernel is compiled by itself
NEAR = {
    "float32": (1e-5, 1e-5),
    "float64": (1e-12, 1e-12),
    "float16": (1e-3, 1e-3),
    "uint16": (8e-3, 8e-3),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", [1, 3, 5, 9, 15])
@pytest.mark.parametrize("shape", PLANES, ids=str)
def test_planes(shape, size, dtype):
    for beta in (0.75, 0.6):
        x, dy, y, scale = (3 * data(shape), data(shape, seed=1), np.ones(shape), np.ones(shape))
        agree("lrn_forward", dtype, x, y, scale, (size, ALPHA, beta, K), tolerance=NEAR[dtype])
        y = x * (scale := _scale(x, size)) ** -beta
        agree(
            "lrn_backward",
            dtype,
            x,
            y,
            scale,
            dy,
            np.ones(shape),
            (size, ALPHA, beta, K),
            tolerance=NEAR[dtype],
        )


def _scale(x, size):
    squares = np.pad(x * x, [(0, 0), (size // 2, size // 2)] + [(0, 0)] * (x.ndim - 2))
    return K + ALPHA / size * sum(squares[:, i : i + x.shape[1]] for i in range(size))


@pytest.mark.parametrize(
    ("kind", "window"), [(kind, window) for kind in WINDOWS for window in WINDOWS[kind]]
)
@pytest.mark.parametrize("shape", LINES, ids=str)
def test_channels_last(shape, kind, window):
    import cupy

    from caffepy.ops import cpu, cuda

    x, dy = (rounded(factor * data(shape, seed=seed), kind) for seed, factor in ((0, 3), (1, 1)))
    size, beta = window
    y, scale, dx = (np.empty_like(x) for _ in range(3))
    cpu.lrn_forward(x, y, scale, (size, ALPHA, beta, K))
    cpu.lrn_backward(x, y, scale, dy, dx, (size, ALPHA, beta, K))
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        arrays = [stored(values, kind, True) for values in (x, np.ones(shape), dy, np.ones(shape))]
        for replay in (False, True):
            if replay:
                stream.begin_capture()
            cuda.lrn_forward(arrays[0], arrays[1], None, (size, ALPHA, beta, K))
            cuda.lrn_backward(arrays[0], arrays[1], None, *arrays[2:], (size, ALPHA, beta, K))
            if replay:
                stream.end_capture().launch(stream)
            stream.synchronize()
            np.testing.assert_allclose(loaded(arrays[1]), y, *NEAR[kind])
            np.testing.assert_allclose(loaded(arrays[3]), dx, *NEAR[kind])


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("place", [False, True])
@pytest.mark.parametrize(
    ("shape", "last", "size"),
    [
        ((3, 96, 7, 5), True, 5),
        ((64, 192, 14, 14), True, 5),  # more than a block
        ((2, 17, 3, 2), True, 5),
        ((3, 2056, 2, 1), True, 3),  # more than a block has threads for
        ((2, 40, 5, 5), True, 15),
        ((2, 40, 5, 5), False, 5),
    ],
)
def test_in_place_with_a_mask(shape, last, size, place, relu):
    import cupy

    from caffepy.ops import cpu, cuda

    x, dy = 3 * data(shape), data(shape, seed=1)
    y, scale, dx = (np.empty_like(x) for _ in range(3))
    terms = size, ALPHA, 0.75, K
    cpu.lrn_forward(x, y, scale, terms)
    cpu.lrn_backward(x, y, scale, dy, dx, terms)
    want = np.where((x > 0) | (not relu), dx, 0)
    given = dy.copy()
    cpu.lrn_backward(x, y, scale, given, given, terms, relu)
    np.testing.assert_array_equal(given, want)
    with cupy.cuda.Stream(non_blocking=True):
        on_gpu = [stored(a, "float32", last) for a in (x, y, scale, dy, np.ones(shape))]
        out = on_gpu[3] if place else on_gpu[4]
        kept = None if last else on_gpu[2]
        db = cupy.ones(shape[1], np.float32) if relu else None
        cuda.lrn_backward(on_gpu[0], on_gpu[1], kept, on_gpu[3], out, terms, relu, db)
        np.testing.assert_allclose(loaded(out), want, *NEAR["float32"])
        if relu:
            near = 1e-5 * np.abs(want).sum(axis=(0, 2, 3)).max()
            np.testing.assert_allclose(db.get(), 1 + want.sum(axis=(0, 2, 3)), 0, near)


def test_of_nothing():
    from caffepy.ops import cuda

    x = stored(np.ones((0, 8, 4, 4)), "float32", True)
    cuda.lrn_forward(x, x, None, (5, ALPHA, 0.75, K))
    cuda.lrn_backward(x, x, None, x, x, (5, ALPHA, 0.75, K))
