import numpy as np
import pytest

from tests.ops.cuda.compare import data
from tests.ops.cuda.stored import TOLERANCE, Activation, agree, loaded, stored

pytestmark = pytest.mark.gpu

KINDS = list(TOLERANCE)
LAYOUTS = {"plain": ((3, 5, 7), False), "last": ((3, 5, 7), True), "packs last": ((2, 8, 6), True)}
SIZES = [0, 1, 7, 9, 1023, 40_000]
# name: how many arrays it reads, how many it writes, its numbers, which one it reads may be what it
# writes
FUNCTIONS = {
    "relu_forward": (1, 1, (0.0,), 0),
    "relu6_forward": (1, 1, (0.1,), 0),
    "relu6_backward": (2, 1, (0.1,), 1),
    "relu_backward": (2, 1, (0.0,), 1),
    "sigmoid_forward": (1, 1, (), 0),
    "sigmoid_backward": (2, 1, (), 1),
    "tanh_forward": (1, 1, (), 0),
    "tanh_backward": (2, 1, (), 1),
    "elu_forward": (1, 1, (0.7,), 0),
    "elu_backward": (3, 1, (0.7,), 2),
}


def activation(shape, seed=0):
    return Activation(data(shape, seed=seed))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_of_any_size_type_and_order(name, kind):
    reads, writes, numbers, in_place = FUNCTIONS[name]
    shapes = [(size, False) for size in SIZES] + list(LAYOUTS.values())
    for shape, last in shapes:
        inputs = [activation(shape, seed) for seed in range(reads)]
        agree(name, kind, *inputs, *(activation(shape) for _ in range(writes)), *numbers, last=last)
        agree(name, kind, *inputs, inputs[in_place], *numbers, last=last)


def test_a_large_array():
    agree("relu_forward", "uint16", activation(3_000_001), activation(3_000_001), 0.1)
    agree("sigmoid_forward", "float32", activation(3_000_001), activation(3_000_001))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slope", [0.0, 0.1])
def test_relu_of_special_numbers(slope, kind):
    x, dy = data((3, 7, 5)), activation((3, 7, 5), seed=1)
    x[0, 0] = [np.nan, -np.inf, np.inf, 0, -0.0]
    x = Activation(x)
    agree("relu_forward", kind, x, activation((3, 7, 5)), slope)
    agree("relu_backward", kind, x, dy, dy, slope)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    "shape", [(4, 3, 8), (2, 5, 7), (6, 33, 1), (3, 2, 1025), (0, 3, 4), (2, 16, 700)], ids=str
)
def test_prelu(shape, last, kind):
    x, dy, y = (activation(shape, seed) for seed in range(3))
    for slopes in (shape[1], 1):
        slope, sums = data(slopes, seed=2), data(slopes, seed=3)
        agree("prelu_forward", kind, x, y, slope, last=last)
        agree("prelu_forward", kind, x, x, slope, last=last)
        relative, absolute = TOLERANCE[kind]
        tolerance = (max(relative, 1e-5), max(absolute, 1e-4))
        agree("prelu_backward", kind, x, dy, slope, y, sums, last=last, tolerance=tolerance)
        agree("prelu_backward", kind, x, dy, slope, dy, sums, last=last, tolerance=tolerance)
        agree("prelu_backward", kind, x, dy, slope, None, sums, last=last, tolerance=tolerance)
        agree("prelu_backward", kind, x, dy, slope, dy, None, last=last)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("power", [0.0, 1.0, 2.0, 0.5, 3.0, -0.75, 1.5])
def test_power(power, kind):
    x, dy, out = Activation(np.abs(data(1001))), activation(1001, 1), activation(1001)
    agree("power_forward", kind, x, out, power, 0.5, 0.25)
    agree("power_backward", kind, x, dy, out, power, 0.5, 0.25)


def test_power_of_a_negative_number():
    agree("power_forward", "float32", activation(100), activation(100), 2.5, 1.0, 0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_swish(kind):
    for shape, last in [(7, False), (1023, False), *LAYOUTS.values()]:
        x, y, dy, sigmoid = (
            activation(shape),
            activation(shape, 1),
            activation(shape, 2),
            data(shape, seed=3),
        )
        if not last:
            agree("swish_forward", kind, x, y, sigmoid, 1.3)
            agree("swish_backward", kind, y, sigmoid, dy, dy, 1.3)
        agree_in_memory_order(kind, x, dy, shape, last)


def agree_in_memory_order(kind, x, dy, shape, last):
    """Swish there and back, whatever the order in which it keeps the sigmoid."""
    import cupy

    from caffepy.ops import cuda

    with cupy.cuda.Stream(non_blocking=True):
        u, du = stored(x.values, kind, last), stored(dy.values, kind, last)
        v, dv = cupy.empty_like(u), cupy.empty_like(u)
        sigmoid = cupy.empty(shape, "d" if kind == "float64" else "f")
        cuda.swish_forward(u, v, sigmoid, 1.3)
        cuda.swish_backward(v, sigmoid, du, dv, 1.3)
        x, dy = (loaded(a).astype(float) for a in (u, du))
        s = 1 / (1 + np.exp(-1.3 * x))
        relative = 4 * TOLERANCE[kind][0]
        np.testing.assert_allclose(loaded(v), x * s, relative, relative)
        np.testing.assert_allclose(loaded(dv), dy * (s + 1.3 * x * s * (1 - s)), relative, relative)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5, 0.99])
def test_dropout(ratio, kind):
    for size in (0, 1, 1023, 100_003):
        x, y, mask = activation(size), activation(size, 1), np.zeros(size, np.uint8)
        for seed in (0, 12345, 2**32 - 1):
            agree("dropout_forward", kind, x, y, mask, ratio, seed)
        agree("dropout_forward", kind, x, x, mask, ratio, 7)
        agree("dropout_forward", kind, x, x, mask, ratio, 7, np.array(2**32 + 3))
        flags = (data(size, seed=1) > 0).astype(np.uint8)
        agree("dropout_backward", kind, x, flags, y, ratio)
        agree("dropout_backward", kind, x, flags, x, ratio)


def test_a_captured_dropout_follows_the_tick():
    import cupy

    from caffepy.ops import cpu, cuda

    x = data(5000)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        u, v, mask, step_counter = (
            cupy.asarray(x),
            cupy.empty(5000, "f"),
            cupy.empty(5000, "u1"),
            cupy.full((), 5, "int64"),
        )
        cuda.dropout_forward(u, v, mask, 0.5, 9, step_counter)
        step_counter += 1
        step_counter[...] = 5
        stream.synchronize()
        stream.begin_capture()
        cuda.dropout_forward(u, v, mask, 0.5, 9, step_counter)
        step_counter += 1
        graph = stream.end_capture()
        for number in (5, 6, 7):
            graph.launch(stream)
            stream.synchronize()
            y, flags = np.empty_like(x), np.empty(5000, np.uint8)
            cpu.dropout_forward(x, y, flags, 0.5, 9, np.array(number))
            np.testing.assert_array_equal(mask.get(), flags)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "shape", [(1, 1), (3, 10), (64, 500), (5, 33), (600, 48), (2000, 7), (0, 4)], ids=str
)
def test_bias_and_activation_of_rows(shape, kind):
    y, dy, b, db = (
        activation(shape),
        activation(shape, 1),
        data(shape[1], seed=2),
        data(shape[1], seed=3),
    )
    mask, flags = np.zeros(shape, np.uint8), (data(shape, seed=4) > 0).astype(np.uint8)
    relative, absolute = TOLERANCE[kind]
    tolerance = (max(relative, 1e-5), max(absolute, 2e-4))
    for relu in (False, True):
        for bias in (b, None):
            agree("bias_act_forward", kind, y, bias, relu, 0.0, 0, None)
            agree("bias_act_forward", kind, y, bias, relu, 0.3, 11, mask)
            agree("bias_act_forward", kind, y, bias, relu, 0.3, 11, mask, np.array(6))
        for sums in (db, None):
            agree("bias_act_backward", kind, y, dy, sums, relu, None, 0.0, tolerance=tolerance)
            agree("bias_act_backward", kind, y, dy, sums, relu, flags, 0.3, tolerance=tolerance)


def test_arrays_at_odd_addresses():
    import cupy

    from caffepy.ops import cuda

    with cupy.cuda.Stream(non_blocking=True):
        x, y = cupy.asarray(data(1001)), cupy.zeros(1001, "f")
        cuda.relu_forward(x[1:], y[1:], 0.5)
        expected = np.where(x.get() > 0, x.get(), x.get() * np.float32(0.5))
        expected[0] = 0
        np.testing.assert_array_equal(y.get(), expected)


def test_arrays_in_different_orders_are_refused():
    from caffepy.core.errors import DeviceError
    from caffepy.ops import cuda

    x = data((2, 3, 4))
    with pytest.raises(DeviceError, match="different orders"):
        cuda.relu_forward(stored(x, "float32"), stored(x, "float32", True), 0.0)
