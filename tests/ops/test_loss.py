from math import log

import numpy as np
import pytest

from caffepy.ops import cpu

DTYPES = [np.float32, np.float64]
SHAPES = [(3, 4, 5), (6, 7, 1), (1, 1, 3), (0, 3, 2), (0, 3, 1), (500, 30, 4), (3000, 20, 1)]


def data(shape, dtype, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def labels(shape, classes, dtype):
    return np.random.default_rng(2).integers(0, classes, shape).astype(dtype)


def softmax(x):
    e = np.exp(x.astype(float))
    return e / e.sum(1, keepdims=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_softmax(shape, dtype):
    x, dy = data(shape, dtype), data(shape, dtype, 1)
    y, dx = np.empty_like(x), np.empty_like(x)
    cpu.softmax_forward(x, y)
    np.testing.assert_allclose(y, softmax(x), rtol=1e-5, atol=1e-7)
    cpu.softmax_backward(y, dy, dx)
    expected = y * (dy - (y * dy).sum(1, keepdims=True))
    np.testing.assert_allclose(dx, expected, rtol=1e-4, atol=1e-6)
    cpu.softmax_backward(y, dy, dy)
    np.testing.assert_array_equal(dy, dx)


@pytest.mark.parametrize("ignore", [None, 0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES[:3])
def test_softmax_loss(shape, dtype, ignore):
    p, t = softmax(data(shape, dtype)).astype(dtype), labels((shape[0], shape[2]), shape[1], dtype)
    places = [(n, i) for n, i in np.ndindex(t.shape) if t[n, i] != ignore]
    loss, count, wrong = cpu.softmax_loss_forward(p, t, ignore)
    assert (count, wrong) == (len(places), -1)
    assert loss == pytest.approx(-sum(log(p[n, int(t[n, i]), i]) for n, i in places))
    expected = np.zeros(shape)
    for n, i in places:
        expected[n, :, i] = 0.5 * p[n, :, i]
        expected[n, int(t[n, i]), i] -= 0.5
    dx = np.empty_like(p)
    cpu.softmax_loss_backward(p, t, ignore, 0.5, dx)
    np.testing.assert_allclose(dx, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [3, -1, np.nan, np.inf])
def test_first_wrong_label_is_pointed_at(bad):
    p, t = np.full((2, 3, 2), 1 / 3), np.array([[0, 1], [bad, bad]])
    assert cpu.softmax_loss_forward(p, t, None)[2] == 2
    hits, counts = np.zeros((2, 3), np.int64)
    assert cpu.accuracy(p, t, 1, None, hits, counts) == 2


@pytest.mark.parametrize("ignore", [None, 0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sigmoid_loss(dtype, ignore):
    x, t = 3 * data((5, 4), dtype), labels((5, 4), 2, dtype)
    s = 1 / (1 + np.exp(-x.astype(float)))
    counts = np.ones(t.shape, bool) if ignore is None else t != ignore
    loss, count = cpu.sigmoid_loss_forward(x, t, ignore)
    assert count == counts.sum()
    assert loss == pytest.approx(-(counts * (t * np.log(s) + (1 - t) * np.log(1 - s))).sum(), rel=1e-5)
    dx = np.empty_like(x)
    cpu.sigmoid_loss_backward(x, t, ignore, 0.5, dx)
    np.testing.assert_allclose(dx, 0.5 * counts * (s - t), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("ignore", [None, 2])
def test_accuracy(top_k, ignore):
    x, t = data((4, 5, 3), np.float32).round(1), labels((4, 3), 5, np.float32)
    hits, counts = np.full((2, 5), 9, np.int64)
    assert cpu.accuracy(x, t, top_k, ignore, hits, counts) == -1
    for c in range(5):
        places = [(n, i) for n, i in np.ndindex(t.shape) if t[n, i] == c and c != ignore]
        assert counts[c] == len(places)
        assert hits[c] == sum((x[n, :, i] >= x[n, c, i]).sum() - 1 < top_k for n, i in places)
