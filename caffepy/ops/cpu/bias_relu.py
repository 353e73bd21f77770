"""Gradients of the bias and ReLU that follow a convolution or product."""

from math import prod
from typing import Any

from numpy.typing import NDArray

from caffepy.ops.cpu.blas import bias_gradient
from caffepy.ops.cpu.neuron import relu_backward

Array = NDArray[Any]


def relu_bias_backward(y: Array | None, dy: Array, db: Array | None) -> None:
    if y is not None:
        relu_backward(y, dy, dy, 0.0)
    if db is not None:
        bias_gradient(dy if dy.ndim == 2 else dy.reshape(*dy.shape[:2], prod(dy.shape[2:])), db)
