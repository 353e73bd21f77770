"""Softmax, losses over labels, accuracy. Labels are integers as floating-point numbers, cut off as C does.

Sums, counts and positions are arrays without axes: nothing is read back. A scale may be such an array too.
"""

from typing import Any

import cupy
import numpy as np

from caffepy.ops.cuda.blas import THREADS, c_type
from caffepy.ops.cuda.compiler import kernel
from caffepy.ops.cuda.launch import Array, launch, launch_blocks, number, packs, scratch

LABELS = 2048
"""As many labels are worth a block; with several blocks a second launch adds up what they found."""
MOST_BLOCKS = 512


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


def _found(name: str, x: Array, n: int, arguments: tuple[Any, ...], positions: int) -> tuple[Any, ...]:
    """Run a kernel over n labels; its sum, its count and, if it tells positions, where the first wrong label is."""
    blocks = max(1, min(-(-n // LABELS), MOST_BLOCKS))
    results = (cupy.empty((), np.float64), *(cupy.empty((), np.int64) for _ in range(1 + positions)))
    partial = scratch("loss", 3 * blocks)
    launch_blocks("loss", name, x, blocks, *arguments, partial, *results)
    if blocks > 1:
        launch_blocks("loss", "loss_finish", x, 1, partial, blocks, *results, *[0] * (1 - positions))
    return results


def softmax_loss_forward(prob: Array, label: Array, ignore: int | None) -> tuple[Any, Any, Any]:
    """Sum of -log(max(probability of the label, FLT_MIN)), how many labels counted, where the first wrong label is.

    prob (outer, C, inner), label (outer, inner). A label `ignore` does not count; -1 says that no label was wrong.
    """
    arguments = (prob, label, prob.shape[1], prob.shape[2], label.size, *_skip(ignore))
    loss, count, wrong = _found("softmax_loss", prob, label.size, arguments, 1)
    return loss, count, wrong


def softmax_loss_backward(prob: Array, label: Array, ignore: int | None, scale: float, dx: Array) -> None:
    """dx = scale * (prob - 1 at the label), 0 where the label is `ignore`."""
    arguments = (prob, label, dx, *prob.shape, *_skip(ignore), *number(scale))
    launch("loss", "softmax_loss_gradient", prob, prob.size, *arguments)


def sigmoid_loss_forward(x: Array, target: Array, ignore: int | None) -> tuple[Any, Any]:
    """Sum of max(x, 0) - x * target + log(1 + exp(-|x|)) and how many targets counted (those not `ignore`)."""
    loss, count = _found("sigmoid_loss", x, x.size, (x, target, x.size, *_skip(ignore)), 0)
    return loss, count


def sigmoid_loss_backward(x: Array, target: Array, ignore: int | None, scale: float, dx: Array) -> None:
    """dx = scale * (sigmoid(x) - target), 0 where the target is `ignore`."""
    arguments = (x, target, dx, x.size, *_skip(ignore), *number(scale))
    launch("loss", "sigmoid_loss_gradient", x, packs(x), *arguments)


def accuracy(x: Array, label: Array, top_k: int, ignore: int | None, hits: Array, counts: Array) -> Any:
    """Count into `counts` the labels of each class, into `hits` those with fewer than top_k other scores not below.

    x (outer, C, inner), label (outer, inner), hits and counts (C). Returns where the first wrong label is, or -1.
    Whole numbers are counted, so the order in which they meet does not matter.
    """
    hits.fill(0)
    counts.fill(0)
    wrong = cupy.full((), -1, np.int64)
    channels, inner = x.shape[1:]
    lanes = 32 if inner == 1 else 1
    arguments = (x, label, channels, inner, label.size, int(top_k), *_skip(ignore), hits, counts, wrong, lanes)
    launch("loss", "accuracy", x, label.size * lanes, *arguments)
    return wrong
