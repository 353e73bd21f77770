"""Recurrent loops: any size against numpy, the same bits with any number of threads, the range of
the exponential.
"""

import numpy as np
import pytest

from caffepy.device.threads import num_threads
from caffepy.ops import cpu

SIZES = {
    "tiny": (1, 1, 1),
    "odd": (3, 7, 5),
    "a tile": (2, 8, 16),
    "more": (5, 19, 33),
    "wide": (2, 40, 70),
}


def arrays(dtype, *shapes):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(s).astype(dtype) for s in shapes]


def flags(steps, streams, dtype):
    cont = np.ones((steps, streams), dtype)
    cont[steps // 2, ::3] = 0
    return cont


def lstm(steps, streams, size, dtype):
    """Everything that a forward and a backward pass write."""
    state = (steps, streams, size)
    gates = (steps, streams, 4 * size)
    a, w, h0, c0, dy = arrays(dtype, gates, (4 * size, size), state[1:], state[1:], state)
    kept, h, c = (np.full(state, np.nan, dtype) for _ in range(3))
    da = np.full(gates, np.nan, dtype)
    cont = flags(steps, streams, dtype)
    loop = cpu.LSTM(*state, dtype)
    loop.forward(a, w, cont, (h0, c0), kept, h, c)
    loop.backward(a, w, cont, c0, c, dy, da)
    return a, kept, h, c, da


def rnn(steps, streams, size, dtype):
    state = (steps, streams, size)
    h, w, h0, dh = arrays(dtype, state, (size, size), state[1:], state)
    kept = np.full(state, np.nan, dtype)
    cont = flags(steps, streams, dtype)
    loop = cpu.RNN(*state, dtype)
    loop.forward(h, w, cont, h0, kept)
    loop.backward(h, w, cont, dh)
    return h, kept, dh


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", SIZES)
def test_lstm(size, dtype):
    steps, streams, n = SIZES[size]
    a, kept, h, c, da = lstm(steps, streams, n, dtype)
    sums, w, h_t, c_t, dy = arrays(
        dtype, a.shape, (4 * n, n), (streams, n), (streams, n), h.shape
    )  # the values that `lstm` began with
    cont = flags(steps, streams, dtype)
    tolerance = {"rtol": 0, "atol": 2e-5 if dtype == np.float32 else 1e-12}
    cells = [c_t.astype(np.float64)]
    h_t = h_t.astype(np.float64)
    for t in range(steps):
        h_t = cont[t, :, None] * h_t
        np.testing.assert_allclose(kept[t], h_t, **tolerance)
        i, f, o, g = np.split(sums[t] + h_t @ w.T.astype(np.float64), 4, axis=1)
        cells.append(cont[t, :, None] * sigmoid(f) * cells[-1] + sigmoid(i) * np.tanh(g))
        h_t = sigmoid(o) * np.tanh(cells[-1])
        np.testing.assert_allclose(h[t], h_t, **tolerance)
        np.testing.assert_allclose(c[t], cells[-1], **tolerance)
    dh, dc = np.zeros((2, streams, n))
    for t in reversed(range(steps)):
        i, f, o, g = (x.astype(np.float64) for x in np.split(a[t], 4, axis=1))
        dh, tanh = dh + dy[t], np.tanh(cells[t + 1])
        dc = dc + dh * o * (1 - tanh**2)
        want = [
            dc * g * i * (1 - i),
            dc * cells[t] * f * (1 - f),
            dh * tanh * o * (1 - o),
            dc * i * (1 - g**2),
        ]
        np.testing.assert_allclose(da[t], np.hstack(want), rtol=1e-4, atol=tolerance["atol"] * 10)
        dh, dc = cont[t, :, None] * (da[t] @ w.astype(np.float64)), dc * f


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", SIZES)
def test_rnn(size, dtype):
    steps, streams, n = SIZES[size]
    h, kept, dh = rnn(steps, streams, n, dtype)
    sums, w, h_t, dy = arrays(dtype, h.shape, (n, n), (streams, n), h.shape)
    cont = flags(steps, streams, dtype)
    tolerance = {"rtol": 0, "atol": 2e-5 if dtype == np.float32 else 1e-12}
    for t in range(steps):
        h_t = cont[t, :, None] * h_t
        np.testing.assert_allclose(kept[t], h_t, **tolerance)
        h_t = np.tanh(sums[t] + h_t.astype(np.float64) @ w.T)
        np.testing.assert_allclose(h[t], h_t, **tolerance)
        h_t = h[t]  # as it is, so that rounding does not grow from step to step
    rest = np.zeros((streams, n))
    for t in reversed(range(steps)):
        want = (dy[t] + rest) * (1 - h[t].astype(np.float64) ** 2)
        np.testing.assert_allclose(dh[t], want, rtol=1e-4, atol=tolerance["atol"] * 10)
        rest = cont[t, :, None] * (dh[t].astype(np.float64) @ w)


@pytest.mark.parametrize("loop", [lstm, rnn])
def test_same_bits_with_any_number_of_threads(loop):
    before = num_threads()
    try:
        answers = []
        for threads in (1, 2, 5):
            cpu.set_num_threads(threads)
            answers.append(loop(4, 45, 20, np.float32))
        for other in answers[1:]:
            for mine, its in zip(answers[0], other, strict=True):
                np.testing.assert_array_equal(mine, its)
    finally:
        cpu.set_num_threads(before)


def test_no_streams():
    assert all(a.size == 0 for a in lstm(3, 0, 4, np.float32))
    assert all(a.size == 0 for a in rnn(3, 0, 4, np.float32))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_activations_over_the_whole_range(dtype):
    """Sigmoid and tanh of numbers from tiny to huge, within a few units in the last place; NaN
    stays NaN.
    """
    magnitudes = np.geomspace(1e-30, 80, 4001)
    x = np.concatenate([-magnitudes, [0], magnitudes]).astype(dtype)
    a = np.tile(x, 4)[None].copy()
    c, h = np.empty((2, 1, x.size), dtype)
    zero, one = np.zeros((1, x.size), dtype), np.ones(1, dtype)
    cpu.lstm_unit_forward(a, zero, one, c, h)
    i, f, o, g = np.split(a[0], 4)
    exact = x.astype(np.longdouble)
    relative = 4 * np.finfo(dtype).eps
    for gate in (i, f, o):
        np.testing.assert_allclose(gate, 1 / (1 + np.exp(-exact)), rtol=relative)
    np.testing.assert_allclose(g, np.tanh(exact), rtol=relative)
    for value, ends in (
        (np.inf, (1, 1)),
        (-np.inf, (0, -1)),
        (1e30, (1, 1)),
        (-1e30, (0, -1)),
        (np.nan, (np.nan,) * 2),
    ):
        a = np.full((1, 4), value, dtype)
        cpu.lstm_unit_forward(a, zero[:, :1], one, c[:, :1], h[:, :1])
        np.testing.assert_allclose(a[0], [ends[0]] * 3 + [ends[1]], atol=1e-35)


def test_a_begun_sequence_forgets():
    a, c_before = arrays(np.float64, (1, 8), (1, 2))
    c, h = np.empty((2, 1, 2))
    cpu.lstm_unit_forward(a, c_before, np.zeros(1), c, h)
    np.testing.assert_array_equal(a[0, 2:4], 0)
    np.testing.assert_array_equal(c, a[:, :2] * a[:, 6:])
    dc, da = np.ones((1, 2)), np.empty((1, 8))
    cpu.lstm_unit_backward(a, c_before, c, np.ones((1, 2)), dc, da)
    assert not dc.any()
    assert not da[0, 2:4].any()
