"""Activations, dropout, and both after a product.

What only backward reads (a sigmoid, a mask) is flat.
"""

from typing import Any

from caffepy.ops.cuda.bias import add_bias, bias_gradient, over_columns
from caffepy.ops.cuda.channels import finish, lying, sums
from caffepy.ops.cuda.launch import Array, channels_last, launch, packs


def _each(name: str, arrays: tuple[Array, ...], *arguments: Any) -> None:
    """Run a kernel over the elements of arrays with one layout."""
    x = arrays[0]
    assert all(a.dtype == x.dtype and a.shape == x.shape for a in arrays)
    channels_last(*arrays)
    launch("neuron", name, x, packs(x), *arrays, x.size, *arguments)


def relu_forward(x: Array, y: Array, slope: float) -> None:
    _each("relu_forward", (x, y), float(slope))


def relu_backward(x: Array, dy: Array, dx: Array, slope: float) -> None:
    _each("relu_backward", (x, dy, dx), float(slope))


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
    partial, splits = sums(
        "neuron", "prelu_backward", x, x, dy, slope, 0 if dx is None else dx, shape=shape
    )
    if dslope is not None:
        finish("neuron", "prelu_finish", x, partial, dslope, slope.size, splits)


def sigmoid_forward(x: Array, y: Array) -> None:
    _each("sigmoid_forward", (x, y))


def sigmoid_backward(y: Array, dy: Array, dx: Array) -> None:
    _each("sigmoid_backward", (y, dy, dx))


def tanh_forward(x: Array, y: Array) -> None:
    _each("tanh_forward", (x, y))


def tanh_backward(y: Array, dy: Array, dx: Array) -> None:
    _each("tanh_backward", (y, dy, dx))


def power_forward(x: Array, y: Array, power: float, scale: float, shift: float) -> None:
    _each("power_forward", (x, y), float(power), float(scale), float(shift))


def power_backward(
    x: Array, dy: Array, dx: Array, power: float, scale: float, shift: float
) -> None:
    _each("power_backward", (x, dy, dx), float(power), float(scale), float(shift))


def elu_forward(x: Array, y: Array, alpha: float) -> None:
    _each("elu_forward", (x, y), float(alpha))


def elu_backward(x: Array, y: Array, dy: Array, dx: Array, alpha: float) -> None:
    _each("elu_backward", (x, y, dy, dx), float(alpha))


def swish_forward(x: Array, y: Array, sigmoid: Array, beta: float) -> None:
    _each("swish_forward", (x, y), float(beta), sigmoid)


def swish_backward(y: Array, sigmoid: Array, dy: Array, dx: Array, beta: float) -> None:
    _each("swish_backward", (y, dy, dx), float(beta), sigmoid)


def _threshold(ratio: float) -> tuple[int, float]:
    """Return the least hash that keeps its element, and the factor of what is kept."""
    return int(ratio * (1 << 32)), 1 / (1 - ratio)


def dropout_forward(
    x: Array, y: Array, mask: Array, ratio: float, seed: int, step_counter: Array | None = None
) -> None:
    _each(
        "dropout_forward",
        (x, y),
        mask,
        *_threshold(ratio),
        seed,
        0 if step_counter is None else step_counter,
    )


def dropout_backward(dy: Array, mask: Array, dx: Array, ratio: float) -> None:
    _each("dropout_backward", (dy, dx), mask, 1 / (1 - ratio))


def bias_act_forward(
    y: Array,
    b: Array | None,
    relu: bool,
    ratio: float,
    seed: int,
    mask: Array | None,
    step_counter: Array | None = None,
) -> None:
    if b is not None and not relu and mask is None:
        add_bias(y, b)
    elif relu or mask is not None:
        pointers = (0 if a is None else a for a in (b, mask))
        numbers = *_threshold(ratio), seed, 0 if step_counter is None else step_counter
        launch(
            "neuron", "bias_act_forward", y, packs(y), y, *pointers, *y.shape, int(relu), *numbers
        )


def bias_act_backward(
    y: Array, dy: Array, db: Array | None, relu: bool, mask: Array | None, ratio: float
) -> None:
    if relu or mask is not None:
        pointers = y if relu else 0, dy, 0 if mask is None else mask
        over_columns(
            "neuron", "bias_act_backward", dy, dy.shape, db, *pointers, _threshold(ratio)[1]
        )
    elif db is not None:
        bias_gradient(dy, db)
