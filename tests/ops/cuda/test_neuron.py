import numpy as np
import pytest

from tests.ops.cuda.compare import CLOSE, EXACT, agree, data

pytestmark = pytest.mark.gpu

SIZES = [0, 1, 3, 4, 5, 1023, 40_000, 3_000_001]
DTYPES = [np.float32, np.float64]
FORWARD = {
    "relu_forward": (0.0,),
    "sigmoid_forward": (),
    "tanh_forward": (),
    "elu_forward": (0.7,),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", FORWARD)
def test_forward(name, size, dtype):
    x = 4 * data(size, dtype)
    agree(name, x, np.empty_like(x), *FORWARD[name])
    agree(name, x, x, *FORWARD[name])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["sigmoid_backward", "tanh_backward"])
def test_backward(name, size, dtype):
    y, dy = data(size, dtype), data(size, dtype, 1)
    agree(name, y, dy, np.empty_like(y))
    agree(name, y, dy, dy)


@pytest.mark.parametrize("slope", [0.0, 0.1])
def test_relu(slope):
    x, dy = data((3, 7, 5)), data((3, 7, 5), seed=1)
    x[0, 0] = [np.nan, -np.inf, np.inf, 0, -0.0]
    agree("relu_forward", x, np.empty_like(x), slope, tolerance=EXACT)
    agree("relu_backward", x, dy, np.empty_like(x), slope, tolerance=EXACT)
    agree("relu_backward", x, dy, dy, slope, tolerance=EXACT)


@pytest.mark.parametrize("shape", [(4, 3, 8), (2, 5, 7), (6, 33, 1), (3, 2, 3025), (0, 3, 4), (700, 40, 1)])
def test_prelu(shape):
    x, dy, slope, sums = data(shape), data(shape, seed=1), data(shape[1], seed=2), data(shape[1], seed=3)
    agree("prelu_forward", x, np.empty_like(x), slope)
    agree("prelu_forward", x, x, slope)
    tolerance = (1e-5, 1e-4)
    agree("prelu_backward", x, dy, slope, np.empty_like(x), sums, tolerance=tolerance)
    agree("prelu_backward", x, dy, slope, dy, sums, tolerance=tolerance)
    agree("prelu_backward", x, dy, slope, None, sums, tolerance=tolerance)
    agree("prelu_backward", x, dy, slope, dy, None)


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0, 0.5, 3.0, -0.75, 1.5])
def test_power(power):
    x, dy = np.abs(data(1001)), data(1001, seed=1)
    agree("power_forward", x, np.empty_like(x), power, 0.5, 0.25)
    agree("power_backward", x, dy, np.empty_like(x), power, 0.5, 0.25)


def test_power_of_a_negative_number():
    x = data(100)
    agree("power_forward", x, np.empty_like(x), 2.5, 1.0, 0.0)


@pytest.mark.parametrize("size", SIZES)
def test_elu_and_swish_gradients(size):
    x, y, dy = data(size), data(size, seed=1), data(size, seed=2)
    agree("elu_backward", x, y, dy, np.empty_like(x), 0.7)
    agree("swish_forward", x, np.empty_like(x), np.empty_like(x), 1.3)
    agree("swish_backward", x, y, dy, dy, 1.3)


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5, 0.99])
@pytest.mark.parametrize("size", [0, 1, 1023, 1_000_003])
def test_dropout(size, ratio):
    x, mask = data(size), np.empty(size, np.uint8)
    for seed in (0, 12345, 2**32 - 1):
        agree("dropout_forward", x, np.empty_like(x), mask, ratio, seed, tolerance=CLOSE)
    agree("dropout_forward", x, x, mask, ratio, 7)
    flags = (data(size, seed=1) > 0).astype(np.uint8)
    agree("dropout_backward", x, flags, np.empty_like(x), ratio)
    agree("dropout_backward", x, flags, x, ratio)


@pytest.mark.parametrize("kind", ["int64", "uint32", "uint64"])
def test_a_captured_dropout_follows_its_seed(kind):
    import cupy

    from caffepy.ops import cpu, cuda

    x = data(5000)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        u, v, mask, seed = cupy.asarray(x), cupy.empty(5000, "f"), cupy.empty(5000, "u1"), cupy.full((), 5, kind)
        cuda.dropout_forward(u, v, mask, 0.5, seed)
        seed += 1
        seed[...] = 5
        stream.begin_capture()
        cuda.dropout_forward(u, v, mask, 0.5, seed)
        seed += 1
        graph = stream.end_capture()
        for number in (5, 6, 7):
            graph.launch(stream)
            stream.synchronize()
            y, flags = np.empty_like(x), np.empty(5000, np.uint8)
            cpu.dropout_forward(x, y, flags, 0.5, number)
            np.testing.assert_array_equal(mask.get(), flags)


def test_arrays_at_odd_addresses():
    import cupy

    from caffepy.ops import cuda

    with cupy.cuda.Stream(non_blocking=True):
        x, y = cupy.asarray(data(1001)), cupy.zeros(1001, "f")
        cuda.relu_forward(x[1:], y[1:], 0.5)
        expected = np.where(x.get() > 0, x.get(), x.get() * np.float32(0.5))
        expected[0] = 0
        np.testing.assert_array_equal(y.get(), expected)
