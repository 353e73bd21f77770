import numpy as np
import pytest

from tests.ops.cuda.compare import CLOSE, EXACT, agree, data

pytestmark = pytest.mark.gpu

DTYPES = [np.float32, np.float64]
SHAPES = [
    (3, 4, 5),
    (6, 7, 1),
    (1, 1, 3),
    (64, 10, 1),
    (256, 1000, 1),
    (5, 3000, 1),
    (2, 21, 50 * 50),
    (0, 3, 1),
    (9000, 3, 1),
]


def labels(shape, classes, dtype):
    return np.random.default_rng(2).integers(0, classes, shape).astype(dtype)


def probabilities(shape, dtype):
    e = np.exp(data(shape))
    return (e / e.sum(1, keepdims=True)).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_softmax(shape, dtype):
    x, dy = 5 * data(shape, dtype), data(shape, dtype, 1)
    agree("softmax_forward", x, np.empty_like(x))
    y = probabilities(shape, dtype)
    agree("softmax_backward", y, dy, np.empty_like(y))
    agree("softmax_backward", y, dy, dy)


def outcome(dtype):
    """A loss, what it was divided by, and room for a wrong label."""
    return np.empty((), dtype), np.empty(()), np.zeros(2)


@pytest.mark.parametrize("divisor", [None, 7.0])
@pytest.mark.parametrize("ignore", [None, 0, 1, -1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_softmax_loss(shape, dtype, ignore, divisor):
    x, label = 5 * data(shape, dtype), labels((shape[0], shape[2]), shape[1], dtype)
    agree(
        "softmax_loss_forward",
        x,
        label,
        (ignore, divisor),
        np.empty_like(x),
        outcome(dtype),
        tolerance=CLOSE,
    )
    weight, norm = np.array(0.3, dtype), np.array(4.0)
    agree(
        "softmax_loss_backward",
        probabilities(shape, dtype),
        label,
        ignore,
        weight,
        norm,
        np.empty_like(x),
    )


@pytest.mark.parametrize("bad", [3, -1, np.nan, np.inf])
@pytest.mark.parametrize("inner", [1, 2])
@pytest.mark.parametrize("outer", [4, 9000])
def test_the_first_wrong_label_is_put_down(outer, inner, bad):
    x, label = np.full((outer, 3, inner), 1 / 3, np.float32), np.zeros((outer, inner), np.float32)
    label[outer - 2] = bad
    label[outer - 1] = 7
    agree("softmax_loss_forward", x, label, (None, None), np.empty_like(x), outcome(np.float32))
    hits, counts = np.zeros((2, 3), np.int64)
    share, _, wrong = outcome(np.float32)
    import cupy

    from caffepy.ops import cuda

    device = [cupy.asarray(a) for a in (x, label, hits, counts, share, wrong)]
    for _ in range(2):
        cuda.accuracy(*device[:2], 1, None, device[2:4], (device[4], None, device[5]))
        np.testing.assert_array_equal(device[5].get(), [1, bad])


def test_certain_mistakes_have_a_bound():
    x = np.array([[0, 200, 0], [-200, 0, -200]], np.float32)[:, :, None]
    agree(
        "softmax_loss_forward",
        x,
        np.zeros((2, 1), np.float32),
        (None, None),
        np.empty_like(x),
        outcome(np.float32),
    )


@pytest.mark.parametrize("divisor", [None, 7.0])
@pytest.mark.parametrize("ignore", [None, 0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 4), (1, 1), (0, 4), (300, 50)])
def test_sigmoid_loss(shape, dtype, ignore, divisor):
    x, target = 3 * data(shape, dtype), labels(shape, 2, dtype)
    loss, norm, _ = outcome(dtype)
    agree("sigmoid_loss_forward", x, target, ignore, divisor, loss, norm)
    weight, norm = np.array(0.3, dtype), np.array(4.0)
    agree("sigmoid_loss_backward", x, target, ignore, weight, norm, np.empty_like(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 4), (1, 1), (0, 4), (300, 50), (3, 1001)])
def test_euclidean_loss(shape, dtype):
    x, target = data(shape, dtype), data(shape, dtype, 1)
    agree("euclidean_loss_forward", x, target, 5, np.empty_like(x), np.empty((), dtype))
    agree("euclidean_loss_backward", x, np.array(0.3, dtype), -5, np.empty_like(x))


@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("ignore", [None, 2])
@pytest.mark.parametrize("shape", [(6, 5, 1), (3, 4, 10), (500, 1000, 1), (1, 21, 900), (0, 4, 1)])
def test_accuracy(shape, ignore, top_k):
    x, label = np.round(data(shape), 1), labels((shape[0], shape[2]), shape[1], np.float32)
    share, _, wrong = outcome(np.float32)
    for shares in (None, np.empty(shape[1], np.float32)):
        hits, counts = np.zeros((2, shape[1]), np.int64)
        outcomes = share, shares, wrong
        agree("accuracy", x, label, top_k, ignore, (hits, counts), outcomes, tolerance=EXACT)


def test_nan_is_a_wrong_answer():
    x = np.array([[1, np.nan], [np.nan, 1], [0, 1]], np.float32)[:, :, None]
    share, _, wrong = outcome(np.float32)
    hits, counts = np.zeros((2, 2), np.int64)
    agree(
        "accuracy",
        x,
        np.array([[0], [0], [1]], "f"),
        1,
        None,
        (hits, counts),
        (share, None, wrong),
        tolerance=EXACT,
    )


def test_a_captured_loss_weight_is_read_at_each_replay():
    import cupy

    from caffepy.ops import cpu, cuda

    prob, label = probabilities((8, 5, 1), np.float32), labels((8, 1), 5, np.float32)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        p, t, dx, weight = (
            cupy.asarray(prob),
            cupy.asarray(label),
            cupy.empty((8, 5, 1), "f"),
            cupy.ones((), "f"),
        )
        norm = cupy.full((), 8.0)
        cuda.softmax_loss_backward(p, t, None, weight, norm, dx)
        stream.begin_capture()
        cuda.softmax_loss_backward(p, t, None, weight, norm, dx)
        graph = stream.end_capture()
        weight.fill(0.25)
        graph.launch(stream)
        expected = np.empty_like(prob)
        cpu.softmax_loss_backward(prob, label, None, np.array(0.25), np.array(8.0), expected)
        np.testing.assert_allclose(dx.get(), expected, rtol=1e-6)
