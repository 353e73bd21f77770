"""Local response normalization across channels; formulas in `Ops.lrn_forward`."""

from math import prod

from caffepy.ops.cuda.launch import Array, c_type, channels_last, launch, launch_expression, packs
from caffepy.ops.protocol import Terms

RUN = 16
"""Channels of a thread, as in lrn.cu."""

WIDEST = 4
"""Most channels on each side in a window that has a kernel of its own with the channels last."""


def lrn_forward(x: Array, y: Array, scale: Array | None, terms: Terms) -> None:
    size, alpha, beta, k = terms
    numbers = float(alpha / size), float(beta), float(k)
    if scale is None:
        _lines("lrn_forward", (x, y), size // 2, *numbers)
    else:
        _planes("lrn_forward", (x, y, scale), size // 2, *numbers)


def lrn_backward(
    x: Array, y: Array, scale: Array | None, dy: Array, dx: Array, terms: Terms
) -> None:
    size, alpha, beta, k = terms
    factor = float(2 * alpha * beta / size)
    if scale is None:
        numbers = float(alpha / size), factor, float(beta), float(k)
        _lines("lrn_backward", (x, dy, dx), size // 2, *numbers)
    else:
        _planes("lrn_backward", (x, y, scale, dy, dx), size // 2, factor, float(beta))


def _planes(name: str, arrays: tuple[Array, ...], half: int, *numbers: float) -> None:
    x = arrays[0]
    assert not channels_last(*arrays)
    n, channels, pixels = x.shape[0], x.shape[1], prod(x.shape[2:])
    threads = n * -(-channels // RUN) * pixels
    launch("lrn", name, x, threads, *arrays, n, channels, pixels, half, *numbers)


def _lines(name: str, arrays: tuple[Array, ...], half: int, *numbers: float) -> None:
    x = arrays[0]
    if not x.size:
        return
    lines, channels = x.size // x.shape[1], x.shape[1]
    assert channels_last(*arrays) or channels == 1 or lines == x.shape[0]
    *_, beta, _ = numbers
    if half > WIDEST:
        launch("lrn", f"{name}_wide", x, x.size, *arrays, lines, channels, half, *numbers)
        return
    instance = f"{name}_lines<{c_type(x)}, {half}, {int(beta == 0.75)}>"
    launch_expression("lrn", instance, packs(x), *arrays, lines, channels, *numbers)
