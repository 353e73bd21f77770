from functools import partial

import numpy as np
import pytest

from tests.ops.cuda.compare import CLOSE, EXACT, agree, data
from tests.ops.cuda.stored import TOLERANCE, loaded, rounded, stored

pytestmark = pytest.mark.gpu

CASES = {  # (N, C, H, W), kernel, stride, pad
    "lenet": ((4, 20, 24, 24), (2, 2), (2, 2), (0, 0)),
    "caffenet": ((8, 96, 55, 55), (3, 3), (2, 2), (0, 0)),
    "googlenet": ((2, 64, 112, 112), (3, 3), (2, 2), (0, 0)),
    "padded": ((2, 5, 14, 14), (3, 3), (1, 1), (1, 1)),
    "inception": ((2, 16, 14, 13), (3, 3), (1, 1), (1, 1)),
    "vgg": ((2, 8, 12, 10), (2, 2), (2, 2), (0, 0)),
    "oblong": ((3, 2, 7, 11), (3, 2), (2, 1), (1, 0)),
    "one": ((1, 1, 1, 1), (1, 1), (1, 1), (0, 0)),
    "global": ((3, 70, 7, 7), (7, 7), (1, 1), (0, 0)),
    "gaps": ((2, 3, 9, 9), (2, 2), (3, 3), (0, 0)),
    "large": ((1, 2, 200, 300), (5, 5), (2, 2), (2, 2)),
    "wide": ((2, 3, 40, 40), (9, 9), (4, 4), (3, 3)),
    "empty": ((0, 3, 8, 8), (2, 2), (2, 2), (0, 0)),
}


def top(size, kernel, stride, pad):
    n = -(-(size + 2 * pad - kernel) // stride) + 1
    return n - 1 if pad and (n - 1) * stride >= size + pad else n


def top_shape(shape, window):
    return (*shape[:2], *(top(*sizes) for sizes in zip(shape[2:], *window, strict=True)))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("case", CASES)
def test_max(case, dtype):
    from caffepy.ops import cpu

    shape, *window = CASES[case]
    how = tuple(window)
    x = np.round(data(shape, dtype), 1)  # so that windows have several largest elements
    y = np.empty(top_shape(shape, how), dtype)
    index = np.empty(y.shape, np.int32)
    agree("max_pool_forward", x, y, index, how, tolerance=EXACT)
    if x.size:
        cpu.max_pool_forward(x, y, index, how)
    agree(
        "max_pool_backward", data(y.shape, dtype, 1), index, np.empty_like(x), how, tolerance=EXACT
    )


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_max_of_planes_without_numbers(value):
    x = np.full((1, 2, 6, 6), value, np.float32)
    x[0, 1, 2, 3] = 5
    y = np.empty((1, 2, 4, 4), np.float32)
    agree(
        "max_pool_forward",
        x,
        y,
        np.empty(y.shape, np.int32),
        ((3, 3), (2, 2), (1, 1)),
        tolerance=EXACT,
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("case", CASES)
def test_average(case, dtype):
    shape, *window = CASES[case]
    how = tuple(window)
    x = data(shape, dtype)
    y = np.empty(top_shape(shape, how), dtype)
    agree("ave_pool_forward", x, y, how, tolerance=CLOSE)
    agree("ave_pool_backward", data(y.shape, dtype, 1), np.empty_like(x), how, tolerance=CLOSE)


WINDOWS = {  # kernel, stride, pad
    "2x2 stride 2": ((2, 2), (2, 2), (0, 0)),
    "3x3 stride 2": ((3, 3), (2, 2), (0, 0)),
    "3x3 padded": ((3, 3), (1, 1), (1, 1)),
    "5x5 stride 3": ((5, 5), (3, 3), (0, 0)),
    "global": ((9, 11), (1, 1), (0, 0)),
    "gaps": ((2, 1), (4, 3), (0, 0)),
    "oblong": ((3, 2), (2, 1), (1, 0)),
}
# window, element type, channels last or not, numbers of channels, threads that keep a device busy
FORMATS = [
    *[(case, "uint16", True, (1, 3, 64), 1) for case in WINDOWS],
    ("3x3 stride 2", "uint16", True, (20,), 1),
    *[("3x3 stride 2", kind, True, (5, 8, 64), 1) for kind in ("float32", "float16", "float64")],
    ("3x3 stride 2", "uint16", True, (8,), 1 << 16),
    ("3x3 stride 2", "float16", False, (8,), 1),
]


def twice(stream, function, *arguments):
    """Call the function, and replay a capture of it over what it wrote before."""
    function(*arguments)
    stream.begin_capture()
    function(*arguments)
    stream.end_capture().launch(stream)


@pytest.mark.parametrize(("case", "kind", "last", "sizes", "busy"), FORMATS)
def test_types_and_orders(case, kind, last, sizes, busy, monkeypatch):
    import cupy

    from caffepy.ops import cpu, cuda
    from caffepy.ops.cuda import pooling

    monkeypatch.setattr(pooling, "BUSY", busy)
    how = WINDOWS[case]
    with cupy.cuda.Stream(non_blocking=True) as stream:
        for channels in sizes:
            x = rounded(
                np.round(data((2, channels, 9, 11)), 1), kind
            )  # windows have several largest elements
            dy = rounded(data(top_shape(x.shape, how), seed=1), kind)
            y, dx, index = np.empty_like(dy), np.empty_like(x), np.empty(dy.shape, np.int32)
            u, du = stored(x, kind, last), stored(np.full(x.shape, 9), kind, last)
            v, dv = stored(np.full(dy.shape, 9), kind, last), stored(dy, kind, last)

            cpu.max_pool_forward(x, y, index, how)
            cpu.max_pool_backward(dy, index, dx, how)
            for which in (np.uint8, np.int32) if kind == "float16" else (np.uint8,):
                where = cupy.empty(dy.shape, which)
                twice(stream, cuda.max_pool_forward, u, v, where, how)
                twice(stream, cuda.max_pool_backward, dv, where, du, how)
                np.testing.assert_array_equal(loaded(v), y)
                np.testing.assert_array_equal(
                    loaded(du), dx if kind == "float64" else rounded(dx, kind)
                )

            cpu.ave_pool_forward(x, y, how)
            cpu.ave_pool_backward(dy, dx, how)
            twice(stream, cuda.ave_pool_forward, u, v, how)
            twice(stream, cuda.ave_pool_backward, dv, du, how)
            np.testing.assert_allclose(loaded(v), y, *TOLERANCE[kind])
            np.testing.assert_allclose(loaded(du), dx, *TOLERANCE[kind])

            cpu.stochastic_pool_mean(np.abs(x), y, how)
            twice(stream, cuda.stochastic_pool_mean, stored(np.abs(x), kind, last), v, how)
            np.testing.assert_allclose(loaded(v), y, *TOLERANCE[kind])


@pytest.mark.parametrize("channels", [96, 64])
def test_sums_of_many_blocks(channels):
    import cupy

    from caffepy.ops import cuda

    shape, how = (64, channels, 57, 31), WINDOWS["3x3 stride 2"]
    with cupy.cuda.Stream(non_blocking=True):
        x = stored(data(shape), "uint16", True)
        y = stored(np.ones(top_shape(shape, how)), "uint16", True)
        where, dx = cupy.zeros_like(y).astype(np.uint8), cupy.zeros_like(x)
        cuda.max_pool_forward(x, y, where, how)
        sums = cupy.ones(channels, np.float32)
        cuda.max_pool_backward(y, where, dx, how, sums)
        want = 1 + loaded(dx).astype(np.float64).sum(axis=(0, 2, 3))
        np.testing.assert_allclose(sums.get(), want, 1e-4)


@pytest.mark.parametrize(("case", "kind", "last", "sizes", "busy"), FORMATS)
def test_relu_in_types_and_orders(case, kind, last, sizes, busy, monkeypatch):
    import cupy

    from caffepy.ops import cpu, cuda
    from caffepy.ops.cuda import pooling

    monkeypatch.setattr(pooling, "BUSY", busy)
    how = WINDOWS[case]
    with cupy.cuda.Stream(non_blocking=True) as stream:
        for channels in sizes:
            x = rounded(np.round(data((2, channels, 9, 11)), 1) - 1, kind)
            x[0, 0, :3, :3] = np.nan
            dy = rounded(data(top_shape(x.shape, how), seed=1), kind)
            y, dx, index = np.empty_like(dy), np.empty_like(x), np.empty(dy.shape, np.int32)
            u, du = stored(x, kind, last), stored(np.full(x.shape, 9), kind, last)
            v, dv = stored(np.full(dy.shape, 9), kind, last), stored(dy, kind, last)

            cpu.max_pool_forward(x, y, index, how, relu=True)
            cpu.max_pool_backward(dy, index, dx, how)
            for which in (np.uint8, np.int32):
                where = cupy.empty(dy.shape, which)
                twice(stream, partial(cuda.max_pool_forward, relu=True), u, v, where, how)
                twice(stream, cuda.max_pool_backward, dv, where, du, how)
                np.testing.assert_array_equal(loaded(v), y)
                np.testing.assert_array_equal(
                    loaded(du), dx if kind == "float64" else rounded(dx, kind)
                )

                sums = cupy.ones(channels, np.float64 if kind == "float64" else np.float32)
                cuda.max_pool_backward(dv, where, du, how, sums)
                np.testing.assert_array_equal(
                    loaded(du), dx if kind == "float64" else rounded(dx, kind)
                )
                want = 1 + loaded(du).astype(np.float64).sum(axis=(0, 2, 3))
                np.testing.assert_allclose(sums.get(), want, 1e-5, 1e-5)

            cpu.ave_pool_forward(x, y, how, relu=True)
            twice(stream, partial(cuda.ave_pool_forward, relu=True), u, v, how)
            np.testing.assert_allclose(loaded(v), y, *TOLERANCE[kind])
            cpu.ave_pool_backward(dy, dx, how, y=loaded(v).astype(dy.dtype))
            twice(stream, partial(cuda.ave_pool_backward, y=v), dv, du, how)
            np.testing.assert_allclose(loaded(du), dx, *TOLERANCE[kind])
            cpu.ave_pool_backward(dy, dx, how, x=loaded(u).astype(dy.dtype))
            twice(stream, partial(cuda.ave_pool_backward, x=u), dv, du, how)
            np.testing.assert_allclose(loaded(du), dx, *TOLERANCE[kind])


NORMALIZED = [
    ("uint16", 64, True),
    ("float16", 24, True),
    ("float32", 12, True),
    ("uint16", 9, True),
    ("float32", 5, False),
]
"""Element type, channels, and whether they lie last: all that the kernels take, and two others."""


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("kind", "channels", "last"), NORMALIZED)
@pytest.mark.parametrize("case", ["3x3 stride 2", "padded", "wide"])
def test_maxima_of_a_normalization(case, kind, channels, last, frozen):
    """As a normalization and a pooling one after the other, but for the order of sums. Where sums
    go by way of the maxima, no gradient of 16 bits is rounded before: they are the CPU's then.
    """
    import cupy

    from caffepy.ops import cuda

    how = {"3x3 stride 2": ((3, 3), (2, 2), (0, 0)), "padded": ((3, 3), (2, 2), (1, 1))}
    window = how.get(case, ((2, 5), (1, 2), (0, 1)))
    shape = 3, channels, 13, 16
    flat = 3, channels, 13 * 16
    numbers = cupy.asarray(data((4, channels)).astype("f"))
    x = stored(data(shape), kind, last)
    top = top_shape(shape, window)
    dy = stored(data(top, seed=1), kind, last)
    answers = []
    for together in (True, False):
        y, dx = stored(np.zeros(top), kind, last), stored(np.zeros(shape), kind, last)
        index = stored(np.zeros(top), "float32", last).astype(np.uint8, order="K")
        dscale, dbias = cupy.zeros((2, channels), np.float32)
        given = dscale, dbias, frozen
        if together:
            cuda.norm_max_pool_forward(x, numbers, y, index, window)
            cuda.norm_max_pool_backward(x, numbers, dy, index, window, dx, *given)
        else:
            z = stored(np.zeros(shape), kind, last)
            cuda.norm_forward(x.reshape(flat), numbers, None, np.inf, z.reshape(flat))
            cuda.max_pool_forward(z, y, index, window, relu=True)
            cuda.max_pool_backward(dy, index, dx, window)
            g = dx.reshape(flat)
            cuda.norm_backward(x.reshape(flat), numbers, [g], None, None, None, g, *given)
        answers.append([loaded(y), index.get(), loaded(dx), dscale.get(), dbias.get()])
    (y, index, *have), (same_y, same_index, *want) = answers
    np.testing.assert_array_equal(y, same_y)
    np.testing.assert_array_equal(index, same_index)
    nears = 1e-3, 1e-3, 1e-3
    if kind == "uint16" and channels % 8 == 0 and not frozen:
        want = on_the_cpu(loaded(x), numbers.get(), loaded(dy), index, window)
        nears = TOLERANCE[kind][0], 1e-3, 1e-3
    for a, b, near in zip(have, want, nears, strict=True):
        assert np.linalg.norm(a - b) <= near * np.linalg.norm(b)


def on_the_cpu(x, numbers, dy, index, window):
    """dx, dscale and dbias in float32, for indices within the windows."""
    from caffepy.ops import cpu

    (_, kw), strides, pads = window
    top, shape, channels = dy.shape, x.shape, x.shape[1]
    first = [np.arange(n) * s - p for n, s, p in zip(top[2:], strides, pads, strict=True)]
    down, right = index.astype(int) // kw + first[0][:, None], index % kw + first[1]
    of_planes = np.where(index == 255, -1, down * shape[3] + right).astype(np.int32)
    dx, (dscale, dbias) = np.empty(shape, "f"), np.zeros((2, channels), "f")
    given = of_planes, window, dx, dscale, dbias, False
    cpu.norm_max_pool_backward(x.astype("f"), numbers, dy.astype("f"), *given)
    return dx, dscale, dbias


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("case", CASES)
def test_relu(case, dtype):
    shape, *window = CASES[case]
    how = tuple(window)
    x = np.round(data(shape, dtype), 1) - dtype(1)
    y = np.empty(top_shape(shape, how), dtype)
    agree("max_pool_forward", x, y, np.empty(y.shape, np.int32), how, True, tolerance=EXACT)
    agree("ave_pool_forward", x, y, how, True, tolerance=CLOSE)
    dy, y = data(y.shape, dtype, 1), data(y.shape, dtype, 2)
    agree("ave_pool_backward", dy, np.empty_like(x), how, y, tolerance=CLOSE)


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("kind", ["float32", "uint16"])
def test_max_without_numbers_with_the_channels_last(kind, value, monkeypatch):
    import cupy

    from caffepy.ops import cpu, cuda
    from caffepy.ops.cuda import pooling

    monkeypatch.setattr(pooling, "BUSY", 1)
    x = np.full((1, 8, 6, 6), value, np.float32)
    x[0, 1, 2, 3] = 5
    how = (3, 3), (2, 2), (1, 1)
    y, dx, dy = np.empty((1, 8, 4, 4), "f"), np.empty_like(x), rounded(data((1, 8, 4, 4)), kind)
    index = np.empty(y.shape, np.int32)
    cpu.max_pool_forward(x, y, index, how)
    cpu.max_pool_backward(dy, index, dx, how)
    with cupy.cuda.Stream(non_blocking=True):
        u, v, where = stored(x, kind, True), stored(y, kind, True), cupy.empty(y.shape, np.uint8)
        cuda.max_pool_forward(u, v, where, how)
        np.testing.assert_array_equal(loaded(v), y)
        cuda.max_pool_backward(stored(dy, kind, True), where, u, how)
        np.testing.assert_array_equal(loaded(u), rounded(dx, kind))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("case", CASES)
def test_stochastic(case, dtype):
    shape, *window = CASES[case]
    how = tuple(window)
    x = np.maximum(np.round(data(shape, dtype), 1), 0)
    y = np.empty(top_shape(shape, how), dtype)
    step_counter = np.array(5, np.int64)
    agree(
        "stochastic_pool_forward",
        x,
        y,
        np.empty(y.shape, np.int32),
        how,
        1 << 31,
        step_counter,
        tolerance=EXACT,
    )
    agree(
        "stochastic_pool_forward", x, y, np.empty(y.shape, np.int32), how, 3, None, tolerance=EXACT
    )
    agree("stochastic_pool_mean", x, y, how, tolerance=CLOSE)


@pytest.mark.parametrize("kind", ["float32", "float16", "uint16"])
def test_stochastic_with_the_channels_last(kind, monkeypatch):
    import cupy

    from caffepy.ops import cuda
    from caffepy.ops.cuda import pooling

    monkeypatch.setattr(pooling, "BUSY", 1)
    how = (
        (3, 3),
        (3, 3),
        (0, 0),
    )  # no element is in two windows, so a gradient of 1 shows what was taken
    x = rounded(np.maximum(np.round(data((4, 24, 12, 12)), 1), 0) + 0.1, kind)
    taken = np.zeros(x.shape)
    with cupy.cuda.Stream(non_blocking=True):
        u, v, du = (
            stored(x, kind, True),
            stored(np.zeros((4, 24, 4, 4)), kind, True),
            stored(x, kind, True),
        )
        where, ones = cupy.empty(v.shape, np.uint8), stored(np.ones(v.shape), kind, True)
        for step_counter in range(200):
            cuda.stochastic_pool_forward(
                u, v, where, how, 11, cupy.full((), step_counter, np.int64)
            )
            cuda.max_pool_backward(ones, where, du, how)
            chosen = loaded(du)
            np.testing.assert_array_equal(
                (chosen * x).reshape(4, 24, 4, 3, 4, 3).sum((3, 5)), loaded(v)
            )
            taken += chosen
    windows = x.reshape(4, 24, 4, 3, 4, 3).astype(np.float64)
    expected = (windows / windows.sum((3, 5), keepdims=True)).reshape(x.shape)
    assert np.abs(taken / 200 - expected).max() < 0.2
    assert np.abs((taken / 200 - expected).mean((0, 1))).max() < 0.02
