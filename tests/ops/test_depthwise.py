"""Depthwise convolution against a loop over the definition, for random shapes."""

import numpy as np
import pytest

from caffepy.device.threads import num_threads
from caffepy.ops import cpu
from caffepy.ops.cpu.depthwise import Depthwise, suits


def reference(x, w, b, dy, stride, pad, dilation):
    """y, dx, dw, db by a loop over output positions and taps; channel c makes the outputs c * m to
    c * m + m.
    """
    m = len(w) // x.shape[1]
    (sh, sw), (ph, pw), (dh, dw) = stride, pad, dilation
    grid = [(0, 0), (0, 0), (ph, ph), (pw, pw)]
    wide = np.repeat(np.pad(x, grid), m, axis=1)
    y, d_wide, d_w = np.zeros(dy.shape) + b[:, None, None], np.zeros(wide.shape), np.zeros(w.shape)
    for i, j in np.ndindex(dy.shape[2:]):
        for u, v in np.ndindex(w.shape[2:]):
            at = (slice(None), slice(None), i * sh + u * dh, j * sw + v * dw)
            y[:, :, i, j] += wide[at] * w[:, 0, u, v]
            d_wide[at] += dy[:, :, i, j] * w[:, 0, u, v]
            d_w[:, 0, u, v] += (dy[:, :, i, j] * wide[at]).sum(0)
    h, width = x.shape[2:]
    dx = d_wide[:, :, ph : ph + h, pw : pw + width].reshape(len(x), -1, m, h, width).sum(2)
    return y, dx, d_w, dy.sum((0, 2, 3))


def arrays(x_shape, w_shape, y_shape, dtype):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(s).astype(dtype) for s in (x_shape, w_shape, w_shape[:1], y_shape)]


def run(conv, x, w, b, dy):
    """All results; dw and db are added to ones."""
    y, dx, dw, db = (
        np.full_like(dy, np.nan),
        np.full_like(x, np.nan),
        np.ones_like(w),
        np.ones_like(w[:, 0, 0, 0]),
    )
    conv.forward(x, w, b, y)
    conv.backward_data(dy, w, dx)
    conv.backward_weight(x, dy, dw, db)
    return y, dx, dw, db


def check(n, channels, multiple, size, kernel, stride, pad, dilation, dtype):
    x_shape, w_shape = (n, channels, *size), (channels * multiple, 1, *kernel)
    conv = Depthwise(x_shape, w_shape, stride, pad, dilation, dtype)
    x, w, b, dy = arrays(x_shape, w_shape, conv.y_shape, dtype)
    want = reference(*(a.astype(np.float64) for a in (x, w, b, dy)), stride, pad, dilation)
    want = (*want[:2], want[2] + 1, want[3] + 1)
    tolerance = 1e-12 if dtype == np.float64 else 2e-6
    for name, have, right in zip(
        ("y", "dx", "dw", "db"), run(conv, x, w, b, dy), want, strict=True
    ):
        error = np.abs(have - right).max() / max(1, np.abs(right).max())
        assert error < tolerance, f"{name}: {error}"
    y, dw, db = np.empty_like(dy), np.zeros_like(w), np.zeros_like(b)
    conv.forward(x, w, None, y)
    conv.backward_weight(x, dy, dw, None)
    conv.backward_weight(x, dy, None, db)
    assert np.allclose(y, want[0] - b[:, None, None], atol=1e-4)
    assert np.allclose(dw + 1, want[2], atol=1e-3)
    assert np.allclose(db + 1, want[3], atol=1e-3)


ONE, NONE = (1, 1), (0, 0)
CASES = {
    "3x3": (2, 5, 1, (9, 8), (3, 3), ONE, ONE, ONE),
    "3x3 stride 2": (2, 5, 1, (9, 8), (3, 3), (2, 2), ONE, ONE),
    "3x3 stride 2, even": (2, 3, 1, (8, 10), (3, 3), (2, 2), ONE, ONE),
    "stride 3": (2, 3, 1, (13, 11), (3, 3), (3, 3), ONE, ONE),
    "stride beyond kernel": (2, 3, 1, (13, 11), (2, 2), (4, 3), ONE, ONE),
    "dilation 2": (2, 3, 1, (11, 12), (3, 3), ONE, (2, 2), (2, 2)),
    "dilation and stride": (2, 3, 1, (17, 16), (3, 3), (2, 3), (2, 1), (3, 2)),
    "multiplier 2": (3, 4, 2, (7, 9), (3, 3), ONE, ONE, ONE),
    "multiplier 3, stride 2": (3, 2, 3, (7, 9), (3, 5), (2, 2), (1, 2), ONE),
    "kernel beyond the plane": (2, 3, 1, (3, 2), (7, 5), ONE, (3, 3), ONE),
    "kernel far beyond the plane": (2, 3, 1, (1, 1), (5, 5), (2, 1), (2, 4), ONE),
    "pad beyond kernel": (2, 3, 1, (3, 3), (2, 2), (2, 2), (5, 4), ONE),
    "1x1": (3, 4, 1, (7, 7), (1, 1), ONE, NONE, ONE),
    "1x1 stride": (3, 4, 1, (7, 8), (1, 1), (2, 2), NONE, ONE),
    "1x7": (2, 3, 1, (7, 9), (1, 7), ONE, (0, 3), ONE),
    "5x1": (2, 3, 1, (7, 9), (5, 1), ONE, (2, 0), ONE),
    "one image, one channel": (1, 1, 1, (5, 5), (3, 3), ONE, ONE, ONE),
    "many images": (37, 2, 1, (4, 4), (3, 3), ONE, ONE, ONE),
    "upsampling": (1, 2, 1, (48, 47), (8, 8), (4, 4), (2, 2), ONE),
    "wide plane": (2, 2, 1, (67, 65), (3, 3), ONE, ONE, ONE),
    "column": (2, 2, 1, (19, 1), (3, 1), (2, 2), NONE, ONE),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("case", CASES)
def test_as_the_definition(case, dtype):
    check(*CASES[case], dtype)


@pytest.mark.parametrize("seed", range(40))
def test_random_shapes(seed):
    rng = np.random.default_rng(seed)
    n, channels, multiple = (int(rng.integers(1, k)) for k in (6, 8, 4))
    kernel, stride, pad, dilation = (
        tuple(map(int, rng.integers(a, b, 2))) for a, b in ((1, 6), (1, 4), (0, 5), (1, 4))
    )
    span = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    size = [max(1, s - 2 * p) + int(rng.integers(0, 20)) for s, p in zip(span, pad, strict=True)]
    for dtype in (np.float32, np.float64):
        check(n, channels, multiple, size, kernel, stride, pad, dilation, dtype)


@pytest.mark.parametrize(
    "case", ["3x3", "3x3 stride 2", "multiplier 3, stride 2", "many images", "wide plane"]
)
def test_the_number_of_threads_changes_no_bit(case):
    n, channels, multiple, size, kernel, *rest = CASES[case]
    x_shape, w_shape = (8 * n, 3 * channels, *size), (3 * channels * multiple, 1, *kernel)
    conv = Depthwise(x_shape, w_shape, *rest, np.float32)
    inputs = arrays(x_shape, w_shape, conv.y_shape, np.float32)
    before, results = num_threads(), set()
    for threads in (1, 2, 5):
        cpu.set_num_threads(threads)
        results.add(b"".join(a.tobytes() for a in run(conv, *inputs)))
    cpu.set_num_threads(before)
    assert len(results) == 1


def test_padding_is_not_read_from_the_neighbour():
    """Infinities in one plane stay there, and in it where the kernel reaches them."""
    conv = Depthwise((2, 3, 6, 6), (3, 1, 3, 3), (1, 1), (1, 1), (1, 1), np.float32)
    x, w, b, dy = arrays((2, 3, 6, 6), (3, 1, 3, 3), conv.y_shape, np.float32)
    x[1, 1, 2, 5] = np.inf
    y = run(conv, x, w, b, dy)[0]
    assert {tuple(at) for at in np.argwhere(~np.isfinite(y))} == {
        (1, 1, i, j) for i in (1, 2, 3) for j in (4, 5)
    }


def test_no_image():
    conv = cpu.Convolution((0, 3, 6, 6), (3, 1, 3, 3), ((1, 1),) * 3, 3, np.float32)
    _, dx, dw, db = run(conv, *arrays((0, 3, 6, 6), (3, 1, 3, 3), conv.y_shape, np.float32))
    assert dx.size == 0
    assert (dw == 1).all()
    assert (db == 1).all()


@pytest.mark.parametrize(
    ("x_shape", "w_shape", "group", "chosen"),
    [
        ((2, 6, 7, 7), (6, 1, 3, 3), 6, True),
        ((2, 6, 7, 7), (18, 1, 3, 3), 6, True),
        ((2, 6, 7, 7), (6, 2, 3, 3), 3, False),
        ((2, 1, 7, 7), (50, 1, 3, 3), 1, False),
        ((2, 6, 7), (6, 1, 3), 6, False),
        ((2, 6, 7, 7, 7), (6, 1, 3, 3, 3), 6, False),
    ],
)
def test_for_which_shapes(x_shape, w_shape, group, chosen):
    assert suits(x_shape, w_shape, group) is chosen
    axes = len(x_shape) - 2
    window = (1,) * axes, (0,) * axes, (1,) * axes
    conv = cpu.Convolution(x_shape, w_shape, window, group, np.float32)
    assert isinstance(conv.plan, Depthwise) is chosen
