"""Weight gradients of convolutions with a kernel of 1, channels last: a product that cuBLAS adds to
float32 sums, where cuDNN leaves a narrow gradient that another pass adds.

The interface is that of small_convolution, of which it has this pass alone.
"""

from math import prod

from numpy.typing import DTypeLike

from caffepy.ops.cuda.autotune import Make, Run
from caffepy.ops.cuda.bias_relu import relu_bias_backward
from caffepy.ops.cuda.blas import matmul
from caffepy.ops.cuda.graphs import Geometry
from caffepy.ops.cuda.launch import Array


def suits(geometry: Geometry, dtype: DTypeLike) -> bool:
    """Return True if a pixel of the output is a product of the weights and one of the input."""
    return (
        geometry.group == prod(geometry.w[2:]) == prod(geometry.stride) == 1
        and not any(geometry.padding)
        and geometry.w[1] > 1
    )


def backward_weight(geometry: Geometry, dtype: DTypeLike) -> list[Make]:
    """Return candidates that run with x, dy, dw, db or None, and add to the last two."""

    def pixels(x: Array) -> Array:
        return x.transpose(0, 2, 3, 1).reshape(-1, x.shape[1])

    def run(x: Array, dy: Array, dw: Array, db: Array | None) -> None:
        matmul(pixels(dy).T, pixels(x), dw.reshape(dw.shape[:2]), accumulate=True)
        if db is not None:
            relu_bias_backward(None, dy, db)

    def make() -> Run:
        return run

    return [make]
