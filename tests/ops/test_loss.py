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


def outcome(dtype=np.float64):
    """A loss, what it was divided by, and room for a wrong label."""
    return np.empty((), dtype), np.empty(()), np.zeros(2)


@pytest.mark.parametrize("divisor", [None, 7.0])
@pytest.mark.parametrize("ignore", [None, 0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES[:3])
def test_softmax_loss(shape, dtype, ignore, divisor):
    x, t = data(shape, dtype), labels((shape[0], shape[2]), shape[1], dtype)
    prob, (loss, norm, wrong) = np.empty_like(x), outcome(dtype)
    cpu.softmax_loss_forward(x, t, (ignore, divisor), prob, (loss, norm, wrong))
    p = softmax(x)
    np.testing.assert_allclose(prob, p, rtol=1e-5, atol=1e-7)
    places = [(n, i) for n, i in np.ndindex(t.shape) if t[n, i] != ignore]
    assert norm == (divisor or max(1, len(places)))
    assert not wrong.any()
    assert loss == pytest.approx(-sum(log(p[n, int(t[n, i]), i]) for n, i in places) / norm)
    expected = np.zeros(shape)
    for n, i in places:
        expected[n, :, i] = p[n, :, i]
        expected[n, int(t[n, i]), i] -= 1
    dx = np.empty_like(x)
    cpu.softmax_loss_backward(prob, t, ignore, np.array(3, dtype), norm, dx)
    np.testing.assert_allclose(dx, expected * 3 / norm, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [3, -1, np.nan, np.inf])
def test_the_first_wrong_label_is_put_down(bad):
    x, t = np.full((2, 3, 2), 1 / 3), np.array([[0, 1], [bad, 7]])
    loss, norm, wrong = outcome()
    cpu.softmax_loss_forward(x, t, (None, None), np.empty_like(x), (loss, norm, wrong))
    np.testing.assert_array_equal(wrong, [1, bad])
    assert norm == 2
    hits, counts = np.zeros((2, 3), np.int64)
    wrong[:] = 0
    cpu.accuracy(x, t, 1, None, (hits, counts), (loss, None, wrong))
    np.testing.assert_array_equal(wrong, [1, bad])


@pytest.mark.parametrize("divisor", [None, 7.0])
@pytest.mark.parametrize("ignore", [None, 0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sigmoid_loss(dtype, ignore, divisor):
    x, t = 3 * data((5, 4), dtype), labels((5, 4), 2, dtype)
    s = 1 / (1 + np.exp(-x.astype(float)))
    counts = np.ones(t.shape, bool) if ignore is None else t != ignore
    loss, norm, _ = outcome(dtype)
    cpu.sigmoid_loss_forward(x, t, ignore, divisor, loss, norm)
    assert norm == (divisor or counts.sum())
    assert loss == pytest.approx(
        -(counts * (t * np.log(s) + (1 - t) * np.log(1 - s))).sum() / norm, rel=1e-5
    )
    dx = np.empty_like(x)
    cpu.sigmoid_loss_backward(x, t, ignore, np.array([0.5]), norm, dx)
    np.testing.assert_allclose(dx, 0.5 / norm * counts * (s - t), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_euclidean_loss(dtype):
    a, b = data((5, 4), dtype), data((5, 4), dtype, 1)
    d, dx, loss = np.empty_like(a), np.empty_like(a), np.empty((), dtype)
    cpu.euclidean_loss_forward(a, b, 5, d, loss)
    np.testing.assert_array_equal(d, a - b)
    assert loss == pytest.approx(np.square(a - b, dtype=float).sum() / 10)
    cpu.euclidean_loss_backward(d, np.array(2, dtype), -5, dx)
    np.testing.assert_allclose(dx, (a - b) * -2 / 5, rtol=1e-6)


@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("ignore", [None, 2])
def test_accuracy(top_k, ignore):
    x, t = data((4, 5, 3), np.float32).round(1), labels((4, 3), 5, np.float32)
    hits, counts = np.zeros((2, 5), np.int64)
    share, shares, wrong = np.empty((), np.float32), np.empty(5, np.float32), np.zeros(2)
    cpu.accuracy(x, t, top_k, ignore, (hits, counts), (share, shares, wrong))
    right = np.array(
        [
            [(x[n, :, i] >= x[n, int(t[n, i]), i]).sum() - 1 < top_k for i in range(3)]
            for n in range(4)
        ]
    )
    assert share == np.float32(right[t != ignore].mean())
    for c in range(5):
        of_class = right[(t == c) & (t != ignore)]
        assert shares[c] == np.float32(of_class.mean() if of_class.size else 0)
    assert not wrong.any()
    assert not hits.any()
    assert not counts.any()
