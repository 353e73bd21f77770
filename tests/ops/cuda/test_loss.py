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


@pytest.mark.parametrize("ignore", [None, 0, 1, -1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_softmax_loss(shape, dtype, ignore):
    prob, label = probabilities(shape, dtype), labels((shape[0], shape[2]), shape[1], dtype)
    agree("softmax_loss_forward", prob, label, ignore, tolerance=CLOSE)
    agree("softmax_loss_backward", prob, label, ignore, 0.3, np.empty_like(prob))


@pytest.mark.parametrize("bad", [3, -1, np.nan, np.inf])
@pytest.mark.parametrize("outer", [4, 9000])
def test_first_wrong_label_is_pointed_at(bad, outer):
    prob, label = np.full((outer, 3, 2), 1 / 3, np.float32), np.zeros((outer, 2), np.float32)
    label[outer - 2 :] = bad
    agree("softmax_loss_forward", prob, label, None)
    import cupy

    from caffepy.ops import cuda

    hits, counts = cupy.zeros((2, 3), np.int64)
    assert int(cuda.accuracy(cupy.asarray(prob), cupy.asarray(label), 1, None, hits, counts)) == 2 * (outer - 2)


def test_certain_mistakes_have_a_bound():
    prob = np.array([[0, 1, 0], [1e-40, 1, 0]], np.float32)[:, :, None]
    agree("softmax_loss_forward", prob, np.zeros((2, 1), np.float32), None)


@pytest.mark.parametrize("ignore", [None, 0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 4), (1, 1), (0, 4), (300, 50)])
def test_sigmoid_loss(shape, dtype, ignore):
    x, target = 3 * data(shape, dtype), labels(shape, 2, dtype)
    agree("sigmoid_loss_forward", x, target, ignore)
    agree("sigmoid_loss_backward", x, target, ignore, 0.5, np.empty_like(x))


@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("ignore", [None, 2])
@pytest.mark.parametrize("shape", [(6, 5, 1), (3, 4, 10), (500, 1000, 1), (1, 21, 900), (0, 4, 1)])
def test_accuracy(shape, ignore, top_k):
    x, label = np.round(data(shape), 1), labels((shape[0], shape[2]), shape[1], np.float32)
    hits, counts = (np.empty(shape[1], np.int64) for _ in range(2))
    agree("accuracy", x, label, top_k, ignore, hits, counts, tolerance=EXACT)


def test_a_captured_scale_is_read_at_each_replay():
    import cupy

    from caffepy.ops import cpu, cuda

    prob, label = probabilities((8, 5, 1), np.float32), labels((8, 1), 5, np.float32)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        p, t, dx, scale = cupy.asarray(prob), cupy.asarray(label), cupy.empty((8, 5, 1), "f"), cupy.ones((), "f")
        cuda.softmax_loss_backward(p, t, None, scale, dx)
        stream.begin_capture()
        cuda.softmax_loss_backward(p, t, None, scale, dx)
        graph = stream.end_capture()
        scale.fill(0.25)
        graph.launch(stream)
        expected = np.empty_like(prob)
        cpu.softmax_loss_backward(prob, label, None, 0.25, expected)
        np.testing.assert_allclose(dx.get(), expected, rtol=1e-6)
