"""Pooling against loops over the definition."""

import numpy as np
import pytest

from caffepy.ops import cpu

CASES = {
    "2x2": ((2, 3, 8, 8), (2, 2), (2, 2), (0, 0), (4, 4)),
    "overhang": ((2, 3, 8, 7), (3, 3), (2, 2), (0, 0), (4, 3)),
    "pad": ((2, 2, 7, 6), (3, 3), (2, 2), (1, 1), (4, 4)),
    "pad and overhang": ((1, 2, 6, 6), (3, 3), (2, 2), (1, 1), (4, 4)),
    "stride 1": ((2, 3, 7, 7), (3, 3), (1, 1), (1, 1), (7, 7)),
    "stride beyond kernel": ((2, 3, 9, 9), (2, 2), (3, 3), (0, 0), (3, 3)),
    "uneven": ((2, 3, 9, 8), (3, 2), (2, 3), (1, 0), (5, 3)),
    "whole plane": ((3, 4, 5, 6), (5, 6), (1, 1), (0, 0), (1, 1)),
    "3x3 stride 2, wide": ((2, 3, 33, 40), (3, 3), (2, 2), (0, 0), (16, 20)),
    "no image": ((0, 3, 8, 8), (2, 2), (2, 2), (0, 0), (4, 4)),
}


def windows(h, w, kernel, stride, pad, out):
    for i in range(out[0]):
        for j in range(out[1]):
            top, left = i * stride[0] - pad[0], j * stride[1] - pad[1]
            bottom, right = min(top + kernel[0], h + pad[0]), min(left + kernel[1], w + pad[1])
            yield (
                i,
                j,
                slice(max(top, 0), min(bottom, h)),
                slice(max(left, 0), min(right, w)),
                (bottom - top) * (right - left),
            )


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("case", CASES)
def test_max(case, dtype):
    shape, kernel, stride, pad, out = CASES[case]
    rng = np.random.default_rng(0)
    x = rng.integers(-4, 4, shape).astype(dtype)  # many ties: the first maximum wins
    y, index = np.empty((*shape[:2], *out), dtype), np.empty((*shape[:2], *out), np.int32)
    dy, dx = rng.standard_normal(y.shape).astype(dtype), np.full(shape, np.nan, dtype)
    cpu.max_pool_forward(x, y, index, (kernel, stride, pad))
    cpu.max_pool_backward(dy, index, dx, (kernel, stride, pad))
    want = np.zeros(shape, dtype)
    for i, j, rows, columns, _ in windows(*shape[2:], kernel, stride, pad, out):
        for n, c in np.ndindex(shape[:2]):
            window = x[n, c, rows, columns]
            a, b = divmod(int(window.argmax()), window.shape[1])
            assert y[n, c, i, j] == window.max()
            assert index[n, c, i, j] == (rows.start + a) * shape[3] + columns.start + b
            want[n, c, rows.start + a, columns.start + b] += dy[n, c, i, j]
    np.testing.assert_allclose(dx, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("has_dx", [True, False])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_maxima_of_a_normalization(case, frozen, has_dx):
    """As normalization, ReLU and pooling one after the other."""
    shape, kernel, stride, pad, out = CASES[case]
    window = kernel, stride, pad
    n, c, h, w = shape
    rng = np.random.default_rng(0)
    x, numbers = rng.standard_normal(shape), rng.standard_normal((4, c))
    y, index = np.empty((n, c, *out)), np.empty((n, c, *out), np.int32)
    dy, flat = rng.standard_normal(y.shape), (n, c, h * w)
    cpu.norm_max_pool_forward(x, numbers, y, index, window)
    z, want, where = np.empty(shape), np.empty_like(y), np.empty_like(index)
    cpu.norm_forward(x.reshape(flat), numbers, None, np.inf, z.reshape(flat))
    cpu.max_pool_forward(z, want, where, window, relu=True)
    np.testing.assert_allclose(y, want, 1e-12, 1e-12)
    np.testing.assert_array_equal(index, where)
    answers = []
    for together in (True, False):
        dx, sums = np.full(shape, np.nan), np.ones((2, c))
        given = dx if has_dx else None
        if together:
            cpu.norm_max_pool_backward(x, numbers, dy, index, window, given, *sums, frozen)
        else:
            g = np.empty(shape)
            cpu.max_pool_backward(dy, index, g, window)
            g, to = g.reshape(flat), None if given is None else given.reshape(flat)
            arguments = x.reshape(flat), numbers, [g], z.reshape(flat), np.inf, g, to
            cpu.norm_backward(*arguments, *sums, frozen)
        answers.append([sums, dx] if has_dx else [sums])
    for a, b in zip(*answers, strict=True):
        np.testing.assert_allclose(a, b, 1e-9, 1e-9)


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("case", ["2x2", "pad", "3x3 stride 2, wide"])
def test_a_window_without_a_maximum_keeps_its_first_element(case, value):
    shape, kernel, stride, pad, out = CASES[case]
    x = np.full(shape, value, np.float32)
    y, index = np.empty((*shape[:2], *out), np.float32), np.empty((*shape[:2], *out), np.int32)
    cpu.max_pool_forward(x, y, index, (kernel, stride, pad))
    for i, j, rows, columns, _ in windows(*shape[2:], kernel, stride, pad, out):
        assert (index[:, :, i, j] == rows.start * shape[3] + columns.start).all()
    np.testing.assert_array_equal(y, np.full(y.shape, value, np.float32))


def test_a_window_beyond_the_plane_takes_the_nearest_element():
    x = np.arange(16, dtype=np.float32).reshape(1, 1, 4, 4)
    y, index = np.empty((1, 1, 2, 3), np.float32), np.empty((1, 1, 2, 3), np.int32)
    cpu.max_pool_forward(x, y, index, ((1, 1), (3, 3), (0, 0)))
    assert index.ravel().tolist() == y.ravel().tolist() == [0, 3, 3, 12, 15, 15]
    cpu.ave_pool_forward(x, y, ((1, 1), (3, 3), (0, 0)))
    assert y.ravel().tolist() == [0, 3, 0, 12, 15, 0]


def test_nan_does_not_hide_the_maximum_after_it():
    x = np.array([[[[1, np.nan, 3, 2]]]], np.float32)
    y, index = np.empty((1, 1, 1, 1), np.float32), np.empty((1, 1, 1, 1), np.int32)
    cpu.max_pool_forward(x, y, index, ((1, 4), (1, 1), (0, 0)))
    assert (y.item(), index.item()) == (3, 2)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("case", CASES)
def test_average(case, dtype):
    shape, kernel, stride, pad, out = CASES[case]
    rng = np.random.default_rng(0)
    x, dy = (
        rng.standard_normal(shape).astype(dtype),
        rng.standard_normal((*shape[:2], *out)).astype(dtype),
    )
    y, dx = np.full(dy.shape, np.nan, dtype), np.full(shape, np.nan, dtype)
    cpu.ave_pool_forward(x, y, (kernel, stride, pad))
    cpu.ave_pool_backward(dy, dx, (kernel, stride, pad))
    want = np.zeros(shape)
    for i, j, rows, columns, area in windows(*shape[2:], kernel, stride, pad, out):
        np.testing.assert_allclose(
            y[:, :, i, j], x[:, :, rows, columns].sum((2, 3)) / area, rtol=1e-4, atol=1e-5
        )
        want[:, :, rows, columns] += dy[:, :, i : i + 1, j : j + 1] / area
    np.testing.assert_allclose(dx, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("case", CASES)
def test_relu_with_the_pooling_is_that_after_it(case, dtype):
    shape, kernel, stride, pad, out = CASES[case]
    rng, how = np.random.default_rng(0), (kernel, stride, pad)
    x = (rng.integers(-9, 4, shape) - 2).astype(dtype)
    x[..., :3, :3] = np.nan
    dy = rng.standard_normal((*shape[:2], *out)).astype(dtype)
    y, index, dx = np.empty_like(dy), np.empty(dy.shape, np.int32), np.empty_like(x)
    fused, where, dx_fused = np.empty_like(dy), np.empty_like(index), np.full_like(x, np.nan)
    masked = np.empty_like(dy)

    cpu.max_pool_forward(x, y, index, how)
    cpu.relu_forward(y, y, 0)
    cpu.relu_backward(y, dy, masked, 0)
    cpu.max_pool_backward(masked, index, dx, how)
    cpu.max_pool_forward(x, fused, where, how, relu=True)
    cpu.max_pool_backward(dy, where, dx_fused, how)
    np.testing.assert_array_equal(fused, y)
    np.testing.assert_array_equal(where, np.where(y <= 0, -1, index))
    np.testing.assert_array_equal(dx_fused, dx)
    again, db = np.full_like(x, np.nan), np.ones(shape[1], dtype)
    cpu.max_pool_backward(dy.copy(), where, again, how, db)
    np.testing.assert_array_equal(again, dx)
    np.testing.assert_allclose(db, 1 + dx.sum(axis=(0, 2, 3)), rtol=1e-5, atol=1e-5)

    cpu.ave_pool_forward(x, y, how)
    cpu.relu_forward(y, y, 0)
    cpu.relu_backward(y, dy, masked, 0)
    cpu.ave_pool_backward(masked, dx, how)
    cpu.ave_pool_forward(x, fused, how, relu=True)
    cpu.ave_pool_backward(dy, dx_fused, how, y=fused)
    np.testing.assert_array_equal(fused, y)
    np.testing.assert_array_equal(dx_fused, dx)

    cpu.ave_pool_backward(dy, dx, how)
    cpu.relu_backward(x, dx, dx, 0)
    cpu.ave_pool_backward(dy, dx_fused, how, x=x)
    np.testing.assert_array_equal(dx_fused, dx)


def test_stochastic_takes_each_element_by_its_share():
    x = np.random.default_rng(0).integers(0, 4, (2, 3, 7, 7)).astype(np.float32)
    x[0, 0, :3, :3] = 0
    y, index = np.empty((2, 3, 3, 3), np.float32), np.empty((2, 3, 3, 3), np.int32)
    how, counts = ((3, 3), (2, 2), (0, 0)), np.zeros((2, 3, 3, 3, 49))
    for step_counter in range(2000):
        cpu.stochastic_pool_forward(x, y, index, how, 7, np.array(step_counter))
        taken = np.take_along_axis(x.reshape(2, 3, 49), index.reshape(2, 3, 9), 2)
        np.testing.assert_array_equal(taken.reshape(y.shape), y)
        np.add.at(counts, (*np.indices(y.shape), index), 1)
    window = x[1, 1, 2:5, 2:5]
    seen = counts[1, 1, 1, 1].reshape(7, 7)[2:5, 2:5] / 2000
    np.testing.assert_allclose(seen, window / window.sum(), atol=0.04)
    assert (seen[window == 0] == 0).all()
    assert counts[0, 0, 0, 0, 0] == 2000  # all are 0: the first
    cpu.stochastic_pool_mean(x, y, how)
    assert y[1, 1, 1, 1] == pytest.approx((window**2).sum() / window.sum())
    assert y[0, 0, 0, 0] == 0


def test_stochastic_draws_anew_in_each_pass():
    x = np.ones((1, 4, 8, 8), np.float32)
    y, index = np.empty((1, 4, 4, 4), np.float32), np.empty((1, 4, 4, 4), np.int32)
    draws = []
    for seed, step_counter in ((1, None), (1, None), (1, np.array(0)), (1, np.array(1)), (2, None)):
        cpu.stochastic_pool_forward(x, y, index, ((2, 2), (2, 2), (0, 0)), seed, step_counter)
        draws.append(index.tobytes())
    assert draws[0] == draws[1]
    assert len(set(draws)) == 4
