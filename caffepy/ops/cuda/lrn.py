"""Local response normalization across channels.

s_c = k + alpha/size * sum of x^2 over the `size` channels around c;  y = x * s^-beta;
dx = dy * s^-beta - 2*alpha*beta/size * x * sum over the window of dy * y / s. No array may be another one's.
"""

from math import prod

from caffepy.ops.cuda.launch import Array, launch

RUN = 16
"""Channels of a thread, as in lrn.cu."""


def _sizes(x: Array) -> tuple[int, int, int]:
    return x.shape[0], x.shape[1], prod(x.shape[2:])


def lrn_forward(x: Array, y: Array, scale: Array, size: int, alpha: float, beta: float, k: float) -> None:
    """Write scale (s above) and y; all (N, C, ...)."""
    n, channels, pixels = _sizes(x)
    numbers = (size // 2, float(alpha / size), float(beta), float(k))
    launch("lrn", "lrn_forward", x, n * -(-channels // RUN) * pixels, x, y, scale, n, channels, pixels, *numbers)


def lrn_backward(x: Array, y: Array, scale: Array, dy: Array, dx: Array, size: int, alpha: float, beta: float) -> None:
    """Write dx from what `lrn_forward` left in y and scale."""
    n, channels, pixels = _sizes(x)
    numbers = (size // 2, float(2 * alpha * beta / size), float(beta))
    arguments = (x, y, scale, dy, dx, n, channels, pixels, *numbers)
    launch("lrn", "lrn_backward", x, n * -(-channels // RUN) * pixels, *arguments)
