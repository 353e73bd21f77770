import numpy as np
import pytest

from tests.ops.cuda.compare import agree, data
from tests.ops.cuda.test_loss import DTYPES, labels, outcome, probabilities

pytestmark = pytest.mark.gpu

ITEMS = [(4, 3), (1, 1), (0, 3), (700, 10), (9, 1000)]
WEIGHT, NORM = np.array(0.3, np.float32), np.array(4.0)


@pytest.mark.parametrize("divisor", [None, 7.0])
@pytest.mark.parametrize("ignore", [None, 0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 4, 5), (6, 7, 1), (0, 3, 1), (300, 30, 1), (2, 21, 400)])
def test_infogain_loss(shape, dtype, ignore, divisor):
    x, label = 5 * data(shape, dtype), labels((shape[0], shape[2]), shape[1], dtype)
    given = label, data((shape[1], shape[1]), dtype, 1)
    agree(
        "infogain_loss_forward",
        x,
        *given,
        (ignore, divisor),
        np.empty_like(x),
        outcome(dtype),
        tolerance=(1e-5, 1e-5),
    )
    p = probabilities(shape, dtype)
    agree("infogain_loss_backward", p, *given, ignore, WEIGHT.astype(dtype), NORM, np.empty_like(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ITEMS)
def test_multinomial_loss(shape, dtype):
    p, label = probabilities((*shape, 1), dtype)[..., 0].copy(), labels(shape[:1], shape[1], dtype)
    p[1:2], p[2:3] = 0, np.nan
    loss, _, wrong = outcome(dtype)
    agree("multinomial_loss_forward", p, label, 5, loss, wrong)
    p[2:3] = 1e-30
    agree("multinomial_loss_forward", p, label, 5, loss, wrong)
    agree("multinomial_loss_backward", p, label, WEIGHT.astype(dtype), 5, np.empty_like(p))


@pytest.mark.parametrize("squares", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ITEMS)
def test_hinge_loss(shape, dtype, squares):
    x, label = data(shape, dtype), labels(shape[:1], shape[1], dtype)
    loss, _, wrong = outcome(dtype)
    agree("hinge_loss_forward", x, label, squares, 5, np.empty_like(x), loss, wrong)
    slack = np.where(data(shape, seed=3) > 0.5, 0, x).astype(dtype)
    agree("hinge_loss_backward", slack, squares, WEIGHT.astype(dtype), 5, np.empty_like(x))


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4, 3), (1, 1), (0, 3), (100, 2), (9, 1000)])
def test_contrastive_loss(shape, dtype, legacy):
    a, b = (data(shape, dtype, seed) / np.sqrt(shape[1]).astype(dtype) for seed in (0, 1))
    similar, loss = labels(shape[:1], 3, dtype), np.empty((), dtype)
    b[-1:], similar[-1:] = a[-1:], 0
    room = np.empty_like(a), np.empty_like(similar)
    agree("contrastive_loss_forward", a, b, similar, 1.3, legacy, 5, *room, loss)
    factor = data(shape[:1], dtype, 2)
    agree("contrastive_loss_backward", a, factor, WEIGHT.astype(dtype), -5, np.empty_like(a))


@pytest.mark.parametrize("bad", [3, -1, np.nan, np.inf])
@pytest.mark.parametrize("items", [4, 9000])
def test_the_first_wrong_label_is_put_down(items, bad):
    p, label = np.full((items, 3), 1 / 3, np.float32), np.zeros(items, np.float32)
    label[-2:] = bad, 7
    loss, norm, wrong = outcome(np.float32)
    agree("multinomial_loss_forward", p, label, items, loss, wrong)
    agree("multinomial_loss_backward", p, label, WEIGHT, items, np.empty_like(p))
    for squares in (False, True):
        agree("hinge_loss_forward", p, label, squares, items, np.empty_like(p), loss, wrong)
    x, label, matrix = p[:, :, None], label[:, None], data((3, 3))
    agree(
        "infogain_loss_forward",
        x,
        label,
        matrix,
        (None, None),
        np.empty_like(x),
        (loss, norm, wrong),
    )
    agree("infogain_loss_backward", x, label, matrix, None, WEIGHT, NORM, np.empty_like(x))


def test_what_is_wrong_may_be_the_ignored_label():
    x, label = data((4, 3, 1)), np.array([0, 255, 2, 255], np.float32)[:, None]
    given = label, data((3, 3))
    agree("infogain_loss_forward", x, *given, (255, None), np.empty_like(x), outcome(np.float32))
    agree("infogain_loss_backward", x, *given, 255, WEIGHT, NORM, np.empty_like(x))


def test_a_captured_loss_weight_is_read_at_each_replay():
    import cupy

    from caffepy.ops import cpu, cuda

    slack = data((8, 5))
    with cupy.cuda.Stream(non_blocking=True) as stream:
        given, dx, weight = cupy.asarray(slack), cupy.empty((8, 5), "f"), cupy.ones((), "f")
        cuda.hinge_loss_backward(given, True, weight, 8, dx)
        stream.begin_capture()
        cuda.hinge_loss_backward(given, True, weight, 8, dx)
        graph = stream.end_capture()
        weight.fill(0.25)
        graph.launch(stream)
        expected = np.empty_like(slack)
        cpu.hinge_loss_backward(slack, True, np.array(0.25), 8, expected)
        np.testing.assert_array_equal(dx.get(), expected)
