"""Activations, dropout, and both after a product.

What only backward reads (a sigmoid, a mask) is flat.
"""

from caffepy.ops.cuda.bias_relu import add_bias, bias_gradient, over_columns
from caffepy.ops.cuda.channels import finish, lying, sums
from caffepy.ops.cuda.launch import Array, launch, launch_each, packs
from caffepy.ops.protocol.types import Seed


def relu_forward(x: Array, y: Array, slope: float) -> None:
    launch_each("neuron", "relu_forward", (x, y), float(slope))


def relu_backward(x: Array, dy: Array, dx: Array, slope: float) -> None:
    launch_each("neuron", "relu_backward", (x, dy, dx), float(slope))


def relu6_forward(x: Array, y: Array, slope: float) -> None:
    launch_each("neuron", "relu6_forward", (x, y), float(slope))


def relu6_backward(x: Array, dy: Array, dx: Array, slope: float) -> None:
    launch_each("neuron", "relu6_backward", (x, dy, dx), float(slope))


def _by_slope(slope: Array, *arrays: Array) -> tuple[int, int, int]:
    """Return (outer, C, inner) of the arrays in their memory, for C slopes; with one slope they are
    one channel.
    """
    shape = lying(*arrays)
    return shape if slope.size > 1 else (1, 1, arrays[0].size)


def prelu_forward(x: Array, y: Array, slope: Array) -> None:
    launch("neuron", "prelu_forward", x, packs(x), x, slope, y, *_by_slope(slope, x, y))


def prelu_backward(
    x: Array, dy: Array, slope: Array, dx: Array | None, dslope: Array | None
) -> None:
    if not x.size or (dx is None and dslope is None):
        return
    shape = _by_slope(slope, x, dy, dy if dx is None else dx)
    partial, splits = sums("neuron", "prelu_backward", x, shape, x, dy, slope, dx)
    if dslope is not None:
        finish("neuron", "prelu_finish", x, partial, dslope, slope.size, splits)


def sigmoid_forward(x: Array, y: Array) -> None:
    launch_each("neuron", "sigmoid_forward", (x, y))


def sigmoid_backward(y: Array, dy: Array, dx: Array) -> None:
    launch_each("neuron", "sigmoid_backward", (y, dy, dx))


def tanh_forward(x: Array, y: Array) -> None:
    launch_each("neuron", "tanh_forward", (x, y))


def tanh_backward(y: Array, dy: Array, dx: Array) -> None:
    launch_each("neuron", "tanh_backward", (y, dy, dx))


def power_forward(x: Array, y: Array, power: float, scale: float, shift: float) -> None:
    launch_each("neuron", "power_forward", (x, y), float(power), float(scale), float(shift))


def power_backward(
    x: Array, dy: Array, dx: Array, power: float, scale: float, shift: float
) -> None:
    launch_each("neuron", "power_backward", (x, dy, dx), float(power), float(scale), float(shift))


def elu_forward(x: Array, y: Array, alpha: float) -> None:
    launch_each("neuron", "elu_forward", (x, y), float(alpha))


def elu_backward(x: Array, y: Array, dy: Array, dx: Array, alpha: float) -> None:
    launch_each("neuron", "elu_backward", (x, y, dy, dx), float(alpha))


def swish_forward(x: Array, y: Array, sigmoid: Array, beta: float) -> None:
    launch_each("neuron", "swish_forward", (x, y), float(beta), sigmoid)


def swish_backward(y: Array, sigmoid: Array, dy: Array, dx: Array, beta: float) -> None:
    launch_each("neuron", "swish_backward", (y, dy, dx), float(beta), sigmoid)


def _threshold(ratio: float) -> tuple[int, float]:
    """Return the least hash that keeps its element, and the factor of what is kept."""
    return int(ratio * (1 << 32)), 1 / (1 - ratio)


def dropout_forward(
    x: Array, y: Array, mask: Array, ratio: float, seed: Seed, step_counter: Array | None = None
) -> None:
    numbers = *_threshold(ratio), seed, step_counter
    launch_each("neuron", "dropout_forward", (x, y), mask, *numbers)


def rrelu_forward(
    x: Array,
    y: Array,
    slope: Array,
    bounds: tuple[float, float],
    seed: Seed,
    step_counter: Array | None = None,
) -> None:
    numbers = float(bounds[0]), float(bounds[1] - bounds[0]), seed, step_counter
    launch("neuron", "rrelu_forward", y, y.size, x, y, slope, y.size, *numbers)


def dropout_backward(dy: Array, mask: Array, dx: Array, ratio: float) -> None:
    launch_each("neuron", "dropout_backward", (dy, dx), mask, 1 / (1 - ratio))


def bias_act_forward(
    y: Array,
    b: Array | None,
    relu: bool,
    ratio: float,
    seed: Seed,
    mask: Array | None,
    step_counter: Array | None = None,
) -> None:
    if b is not None and not relu and mask is None:
        add_bias(y, b)
    elif relu or mask is not None:
        numbers = *y.shape, int(relu), *_threshold(ratio), seed, step_counter
        launch("neuron", "bias_act_forward", y, packs(y), y, b, mask, *numbers)


def bias_act_backward(
    y: Array, dy: Array, db: Array | None, relu: bool, mask: Array | None, ratio: float
) -> None:
    if relu or mask is not None:
        arguments = y if relu else None, dy, mask, _threshold(ratio)[1]
        over_columns("neuron", "bias_act_backward", dy, dy.shape, db, *arguments)
    elif db is not None:
        bias_gradient(dy, db)
