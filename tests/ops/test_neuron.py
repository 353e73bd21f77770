import numpy as np
import pytest

from caffepy.device.threads import num_threads
from caffepy.ops import cpu
from caffepy.ops.cpu.elementwise import BLOCK, GRAIN

DTYPES = [np.float32, np.float64]
SIZES = [0, 1, 33, 4 * GRAIN + BLOCK + 1]


def pair(size, dtype):
    rng = np.random.default_rng(size)
    return rng.standard_normal(size).astype(dtype), rng.standard_normal(size).astype(dtype)


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=5e-6, atol=5e-7)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


# name: forward, backward, y(x), dy/dx; the functions with the layer's numbers
FUNCTIONS = {
    "relu": (
        lambda x, y: cpu.relu_forward(x, y, 0.0),
        lambda x, y, dy, dx: cpu.relu_backward(x, dy, dx, 0.0),
        lambda x: np.maximum(x, 0),
        lambda x: x > 0,
    ),
    "relu leaky": (
        lambda x, y: cpu.relu_forward(x, y, 0.1),
        lambda x, y, dy, dx: cpu.relu_backward(x, dy, dx, 0.1),
        lambda x: np.where(x > 0, x, 0.1 * x),
        lambda x: np.where(x > 0, 1, 0.1),
    ),
    "relu6": (
        lambda x, y: cpu.relu6_forward(x, y, 0.1),
        lambda x, y, dy, dx: cpu.relu6_backward(x, dy, dx, 0.1),
        lambda x: np.where(x > 0, x, 0.1 * x),
        lambda x: np.where(x > 0, 1, 0.1),
    ),
    "sigmoid": (
        cpu.sigmoid_forward,
        lambda x, y, dy, dx: cpu.sigmoid_backward(y, dy, dx),
        sigmoid,
        lambda x: sigmoid(x) * sigmoid(-x),
    ),
    "tanh": (
        cpu.tanh_forward,
        lambda x, y, dy, dx: cpu.tanh_backward(y, dy, dx),
        np.tanh,
        lambda x: 1 - np.tanh(x) ** 2,
    ),
    "power": (
        lambda x, y: cpu.power_forward(x, y, 3.0, 0.5, 9.0),
        lambda x, y, dy, dx: cpu.power_backward(x, dy, dx, 3.0, 0.5, 9.0),
        lambda x: (9 + 0.5 * x) ** 3,
        lambda x: 1.5 * (9 + 0.5 * x) ** 2,
    ),
    "elu": (
        lambda x, y: cpu.elu_forward(x, y, 0.7),
        lambda x, y, dy, dx: cpu.elu_backward(x, y, dy, dx, 0.7),
        lambda x: np.where(x > 0, x, 0.7 * np.expm1(x)),
        lambda x: np.where(x > 0, 1, 0.7 * np.exp(x)),
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_against_numpy(name, size, dtype):
    forward, backward, function, derivative = FUNCTIONS[name]
    x, dy = pair(size, dtype)
    y, dx = np.empty_like(x), np.empty_like(x)
    forward(x, y)
    close(y, function(x.astype(float)))
    backward(x, y, dy, dx)
    close(dx, dy * derivative(x.astype(float)))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_in_place_gives_the_same(name):
    forward, backward, _, _ = FUNCTIONS[name]
    x, dy = pair(1000, np.float32)
    y, dx = np.empty_like(x), np.empty_like(x)
    forward(x, y)
    backward(x, y, dy, dx)
    backward(x, y, dy, dy)
    np.testing.assert_array_equal(dy, dx)
    forward(x, x)
    np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("dtype", DTYPES)
def test_swish(dtype):
    x, dy = pair(1000, dtype)
    y, s, dx = (np.empty_like(x) for _ in range(3))
    cpu.swish_forward(x, y, s, 1.3)
    close(y, x * sigmoid(1.3 * x))
    cpu.swish_backward(y, s, dy, dx, 1.3)
    close(dx, dy * (s + 1.3 * x * s * (1 - s)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3, 4), (5, 3, 1), (1, 1, 7), (0, 2, 3), (3, 5, GRAIN)])
def test_prelu(shape, dtype):
    x, dy = (a.reshape(shape) for a in pair(int(np.prod(shape)), dtype))
    slope = np.linspace(0.1, 0.5, shape[1]).astype(dtype)
    y, dx, dslope = np.empty_like(x), np.empty_like(x), np.ones_like(slope)
    cpu.prelu_forward(x, y, slope)
    close(y, np.where(x > 0, x, slope[:, None] * x))
    cpu.prelu_backward(x, dy, slope, dx, dslope)
    close(dx, dy * np.where(x > 0, 1, slope[:, None]))
    np.testing.assert_allclose(
        dslope, 1 + (dy * np.minimum(x, 0)).sum((0, 2)), rtol=1e-4, atol=1e-3
    )
    cpu.prelu_backward(x, dy, slope, dy, None)
    np.testing.assert_array_equal(dy, dx)


@pytest.mark.parametrize("shape", [(2, 3, 4), (1, 1, 7)])
def test_prelu_with_one_slope_for_all(shape):
    x, dy = (a.reshape(shape) for a in pair(int(np.prod(shape)), np.float32))
    y, dx, slope, dslope = (
        np.empty_like(x),
        np.empty_like(x),
        np.float32([0.3]),
        np.ones(1, np.float32),
    )
    cpu.prelu_forward(x, y, slope)
    close(y, np.where(x > 0, x, 0.3 * x))
    cpu.prelu_backward(x, dy, slope, dx, dslope)
    close(dx, dy * np.where(x > 0, 1, 0.3))
    close(dslope, 1 + (dy * np.minimum(x, 0)).sum())


def mask_of(size, ratio, seed, step_counter=None):
    x = np.ones(size, np.float32)
    y, mask = np.empty_like(x), np.empty(size, np.uint8)
    cpu.dropout_forward(
        x, y, mask, ratio, seed, None if step_counter is None else np.array(step_counter)
    )
    np.testing.assert_allclose(y, mask / (1 - ratio), rtol=1e-6)
    return mask


@pytest.mark.parametrize(
    "draws",
    [[(0,), (1,), (2,), (2**32 - 1,)], [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (7, 10**6)]],
    ids=["seeds", "seeds and counters"],
)
def test_dropout_masks_are_independent(draws):
    size = 200_000
    masks = [mask_of(size, 0.5, *draw).astype(float) for draw in draws]
    for a in masks:
        assert a.mean() == pytest.approx(0.5, abs=0.01)
        assert abs(np.corrcoef(a[:-1], a[1:])[0, 1]) < 0.01
    for i, a in enumerate(masks):
        for b in masks[:i]:
            for shift in range(4):
                assert abs(np.corrcoef(a[shift:], b[: size - shift])[0, 1]) < 0.01
                assert abs(np.corrcoef(b[shift:], a[: size - shift])[0, 1]) < 0.01


@pytest.mark.parametrize("ratio", [0, 0.1, 0.75])
def test_dropout_ratio(ratio):
    assert mask_of(100_000, ratio, 7).mean() == pytest.approx(1 - ratio, abs=0.01)


def test_dropout_mask_does_not_depend_on_the_threads():
    threads = num_threads()
    try:
        masks = []
        for n in (1, 2, 3):
            cpu.set_num_threads(n)
            masks.append(mask_of(5 * GRAIN + 17, 0.5, 3))
    finally:
        cpu.set_num_threads(threads)
    np.testing.assert_array_equal(masks[0], masks[1])
    np.testing.assert_array_equal(masks[0], masks[2])


def test_dropout_gradient_in_place():
    x, dy = pair(1000, np.float32)
    y, dx, mask = np.empty_like(x), np.empty_like(x), np.empty(1000, np.uint8)
    cpu.dropout_forward(x, y, mask, 0.3, 5)
    cpu.dropout_backward(dy, mask, dx, 0.3)
    cpu.dropout_backward(dy, mask, dy, 0.3)
    np.testing.assert_array_equal(dy, dx)
    cpu.dropout_forward(x, x, mask, 0.3, 5)
    np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("dropping", [False, True])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_bias_and_activation(bias, relu, dropping):
    shape, ratio = (30, 7), 0.25
    z, dy = (a.reshape(shape) for a in pair(210, np.float32))
    b, db = np.linspace(-1, 1, 7, dtype=np.float32), np.ones(7, np.float32)
    y, dx, mask = z.copy(), dy.copy(), np.empty(shape, np.uint8)
    cpu.bias_act_forward(y, b if bias else None, relu, ratio, 3, mask if dropping else None)
    if bias:
        z = z + b
    factor = mask_of(210, ratio, 3).reshape(shape) / (1 - ratio) if dropping else 1
    close(y, (np.maximum(z, 0) if relu else z) * factor)
    cpu.bias_act_backward(y, dx, db if bias else None, relu, mask if dropping else None, ratio)
    want = dy * factor * (z > 0 if relu else 1)
    close(dx, want)
    np.testing.assert_allclose(db, 1 + bias * want.sum(0), rtol=1e-5, atol=1e-5)
