"""Activations. The output may be the input and the input's gradient may be the output's: then the same array object."""

from caffepy.ops.cuda.channels import finish, sums
from caffepy.ops.cuda.launch import Array, integer, launch, packs


def relu_forward(x: Array, y: Array, slope: float) -> None:
    """y = x > 0 ? x : slope * x; NaN stays NaN."""
    launch("neuron", "relu_forward", x, packs(x), x, y, x.size, float(slope))


def relu_backward(x: Array, dy: Array, dx: Array, slope: float) -> None:
    """dx = dy * (x > 0 ? 1 : slope); with a slope of 0 or more x may be the output."""
    launch("neuron", "relu_backward", x, packs(x), x, dy, dx, x.size, float(slope))


def prelu_forward(x: Array, y: Array, slope: Array) -> None:
    """y = x > 0 ? x : slope_c * x; x (N, C, P), slope (C)."""
    launch("neuron", "prelu_forward", x, packs(x), x, slope, y, *x.shape)


def prelu_backward(x: Array, dy: Array, slope: Array, dx: Array | None, dslope: Array | None) -> None:
    """dx = dy * (x > 0 ? 1 : slope_c), dslope_c += sum of dy * x over x <= 0; dx may be dy."""
    if dx is None and dslope is None:
        return
    partial, splits = sums("neuron", "prelu_backward", x, x, dy, slope, 0 if dx is None else dx)
    if dslope is not None:
        finish("neuron", "prelu_finish", x, partial, dslope, x.shape[1], splits)


def sigmoid_forward(x: Array, y: Array) -> None:
    """y = 1 / (1 + exp(-x)), by way of tanh(x/2)."""
    launch("neuron", "sigmoid_forward", x, packs(x), x, y, x.size)


def sigmoid_backward(y: Array, dy: Array, dx: Array) -> None:
    """dx = dy * y * (1 - y)."""
    launch("neuron", "sigmoid_backward", y, packs(y), y, dy, dx, y.size)


def tanh_forward(x: Array, y: Array) -> None:
    """y = tanh(x)."""
    launch("neuron", "tanh_forward", x, packs(x), x, y, x.size)


def tanh_backward(y: Array, dy: Array, dx: Array) -> None:
    """dx = dy * (1 - y^2)."""
    launch("neuron", "tanh_backward", y, packs(y), y, dy, dx, y.size)


def power_forward(x: Array, y: Array, power: float, scale: float, shift: float) -> None:
    """y = (shift + scale * x)^power; NaN for a negative base with a fractional power."""
    launch("neuron", "power_forward", x, packs(x), x, y, x.size, float(power), float(scale), float(shift))


def power_backward(x: Array, dy: Array, dx: Array, power: float, scale: float, shift: float) -> None:
    """dx = dy * power * scale * (shift + scale * x)^(power - 1)."""
    launch("neuron", "power_backward", x, packs(x), x, dy, dx, x.size, float(power), float(scale), float(shift))


def elu_forward(x: Array, y: Array, alpha: float) -> None:
    """y = x > 0 ? x : alpha * (exp(x) - 1)."""
    launch("neuron", "elu_forward", x, packs(x), x, y, x.size, float(alpha))


def elu_backward(x: Array, y: Array, dy: Array, dx: Array, alpha: float) -> None:
    """dx = dy * (x > 0 ? 1 : alpha + y); with an alpha of 0 or more x may be y."""
    launch("neuron", "elu_backward", x, packs(x), x, y, dy, dx, x.size, float(alpha))


def swish_forward(x: Array, y: Array, sigmoid: Array, beta: float) -> None:
    """sigmoid = 1 / (1 + exp(-beta * x)), y = x * sigmoid."""
    launch("neuron", "swish_forward", x, packs(x), x, y, sigmoid, x.size, float(beta))


def swish_backward(y: Array, sigmoid: Array, dy: Array, dx: Array, beta: float) -> None:
    """dx = dy * (beta * y + sigmoid * (1 - beta * y))."""
    launch("neuron", "swish_backward", y, packs(y), y, sigmoid, dy, dx, y.size, float(beta))


def dropout_forward(x: Array, y: Array, mask: Array, ratio: float, seed: int) -> None:
    """mask = 1 with probability 1 - ratio, a hash of seed and position; y = x * mask / (1 - ratio).

    The masks are those of the CPU. The seed may be an array without axes, read when the kernel runs.
    """
    threshold = int(ratio * (1 << 32))
    arguments = (x, y, mask, x.size, threshold, 1 / (1 - ratio), *integer(seed))
    launch("neuron", "dropout_forward", x, packs(x), *arguments)


def dropout_backward(dy: Array, mask: Array, dx: Array, ratio: float) -> None:
    """dx = dy * mask / (1 - ratio)."""
    launch("neuron", "dropout_backward", dy, packs(dy), dy, mask, dx, dy.size, 1 / (1 - ratio))
