"""Softmax, losses, accuracy. Labels are integers as floating-point numbers, cut off as C does.

A loss is written divided by `norm`, which is `divisor`, or how many labels counted where that is None, and at least 1.
`weight` is an array whose first element is the loss weight. The first label that names no class is put down in
`wrong`: 1, the label. All of these lie on the device: nothing is read back.

A loss takes one launch: the last of its blocks to end adds up what all of them found, in their order.
"""

from typing import Any

import cupy
import numpy as np

from caffepy.ops.cuda.blas import THREADS, c_type
from caffepy.ops.cuda.compiler import kernel
from caffepy.ops.cuda.launch import Array, launch, launch_blocks, number, packs, scratch

LABELS = 2048
"""As many labels are worth a block."""
MOST_BLOCKS = 512
NARROW = 64
"""A warp takes a row of so many classes or fewer, a block a longer one."""


def _rows(name: str, x: Array, *arguments: Any) -> None:
    """A block for each row of (outer, C, 1)."""
    outer, channels = x.shape[:2]
    if x.size:
        threads = min(THREADS, -(-channels // 32) * 32)
        kernel("loss", f"{name}<{c_type(x)}>")((outer,), (threads,), (*arguments, outer, channels))


def softmax_forward(x: Array, y: Array) -> None:
    """y = exp(x - max) / sum of that over the channels; x and y (outer, C, inner)."""
    if x.shape[2] == 1:
        _rows("softmax_rows", x, x, y)
    else:
        launch("loss", "softmax_planes", x, x.shape[0] * x.shape[2], x, y, *x.shape)


def softmax_backward(y: Array, dy: Array, dx: Array) -> None:
    """dx = y * (dy - sum of dy * y over the channels); dx may be dy."""
    if y.shape[2] == 1:
        _rows("softmax_gradient_rows", y, y, dy, dx)
    else:
        launch("loss", "softmax_gradient_planes", y, y.shape[0] * y.shape[2], y, dy, dx, *y.shape)


def _skip(ignore: int | None) -> tuple[int, int]:
    return int(ignore is not None), int(ignore or 0)


_arrivals: dict[tuple[int, int], Array] = {}


def _arrived() -> Array:
    """Where the blocks of a launch on this stream count themselves: zero before and after."""
    key = (cupy.cuda.runtime.getDevice(), cupy.cuda.get_current_stream().ptr)
    if key not in _arrivals:
        _arrivals[key] = cupy.zeros((), np.uint64)
    return _arrivals[key]


def _reduce(name: str, like: Array, worth: int, arguments: tuple[Any, ...]) -> None:
    """A kernel of about `worth` blocks whose last one concludes."""
    blocks = max(1, min(worth, MOST_BLOCKS))
    launch_blocks("loss", name, like, blocks, *arguments, scratch("loss", 3 * blocks), _arrived())


def _divisor(divisor: float | None) -> float:
    """What kernels take: below 0 for the number of labels."""
    return -1.0 if divisor is None else float(divisor)


def softmax_loss_forward(
    x: Array,
    label: Array,
    ignore: int | None,
    divisor: float | None,
    prob: Array,
    loss: Array,
    norm: Array,
    wrong: Array,
) -> None:
    """prob = softmax of x, loss = sum of -log(max(probability of the label, FLT_MIN)) / norm.

    x and prob (outer, C, inner), label (outer, inner). A label `ignore` does not count.
    """
    outer, channels, inner = x.shape
    arguments = (x, label, prob, outer, channels, inner, *_skip(ignore), _divisor(divisor), loss, norm, wrong)
    if inner > 1:
        _reduce("softmax_loss_planes", x, -(-label.size // THREADS), arguments)
    elif channels <= NARROW:
        _reduce("softmax_loss_rows", x, -(-outer // (THREADS // 32)), arguments)
    else:
        _reduce("softmax_loss_long_rows", x, outer, arguments)


def softmax_loss_backward(prob: Array, label: Array, ignore: int | None, weight: Array, norm: Array, dx: Array) -> None:
    """dx = weight / norm * (prob - 1 at the label), 0 where the label is `ignore`."""
    arguments = (prob, label, dx, *prob.shape, *_skip(ignore), *number(weight), *number(norm))
    launch("loss", "softmax_loss_gradient", prob, prob.size, *arguments)


def sigmoid_loss_forward(
    x: Array, target: Array, ignore: int | None, divisor: float | None, loss: Array, norm: Array
) -> None:
    """loss = sum of max(x, 0) - x * target + log(1 + exp(-|x|)) / norm over the targets that are not `ignore`."""
    arguments = (x, target, x.size, *_skip(ignore), _divisor(divisor), loss, norm)
    _reduce("sigmoid_loss", x, -(-x.size // LABELS), arguments)


def sigmoid_loss_backward(x: Array, target: Array, ignore: int | None, weight: Array, norm: Array, dx: Array) -> None:
    """dx = weight / norm * (sigmoid(x) - target), 0 where the target is `ignore`."""
    arguments = (x, target, dx, x.size, *_skip(ignore), *number(weight), *number(norm))
    launch("loss", "sigmoid_loss_gradient", x, packs(x), *arguments)


def euclidean_loss_forward(x: Array, target: Array, divisor: float, difference: Array, loss: Array) -> None:
    """difference = x - target, loss = sum of its squares / 2 / divisor."""
    _reduce("euclidean_loss", x, -(-x.size // LABELS), (x, target, difference, x.size, float(divisor), loss))


def euclidean_loss_backward(difference: Array, weight: Array, divisor: float, dx: Array) -> None:
    """dx = weight / divisor * difference."""
    arguments = (difference, dx, dx.size, *number(weight), float(divisor))
    launch("loss", "euclidean_loss_gradient", dx, packs(dx), *arguments)


def accuracy(
    x: Array,
    label: Array,
    top_k: int,
    ignore: int | None,
    hits: Array,
    counts: Array,
    share: Array,
    shares: Array | None,
    wrong: Array,
) -> None:
    """share = the share of the labels with fewer than top_k other scores not below theirs, shares = that of each class.

    x (outer, C, inner), label (outer, inner), shares (C). hits and counts (C) are room to count in: zeros before and
    after. Whole numbers are counted, so the order in which they meet does not matter.
    """
    channels, inner = x.shape[1:]
    lanes = 32 if inner == 1 else 1
    room = (0, 0, 0) if shares is None else (hits, counts, shares)
    sizes = (channels, inner, label.size, int(top_k), *_skip(ignore), lanes)
    _reduce("accuracy", x, -(-label.size * lanes // THREADS), (x, label, *sizes, *room, share, wrong))
