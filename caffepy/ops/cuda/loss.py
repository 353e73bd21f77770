"""Softmax, losses, accuracy. Labels are integers as floating-point numbers, cut off as C does.

A loss is written divided by `norm`, which is `divisor`, or how many labels counted where that is
None, and at least 1. `weight` is an array whose first element is the loss weight. The first label
that names no class is put down in `wrong`: 1, the label. All of these lie on the device: nothing is
read back.

A loss takes one launch, after the softmax if that is not part of it: the last of its blocks to end
adds up what all of them found, in their order.
"""

from typing import Any

from caffepy.ops.cuda.blas import THREADS, c_type
from caffepy.ops.cuda.block_reduce import launch_finding
from caffepy.ops.cuda.compiler import kernel
from caffepy.ops.cuda.launch import Array, launch, number, packs

LABELS = 2048
"""As many labels are worth a block."""
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


def _divisor(divisor: float | None) -> float:
    """What kernels take: below 0 for the number of labels."""
    return -1.0 if divisor is None else float(divisor)


def _lanes(x: Array) -> int:
    """Threads that take a label: a warp where the scores of one lie in a row."""
    return 32 if x.shape[2] == 1 else 1


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
    arguments = (
        x,
        label,
        prob,
        outer,
        channels,
        inner,
        *_skip(ignore),
        _divisor(divisor),
        loss,
        norm,
        wrong,
    )
    if inner > 1:
        launch_finding("loss", "softmax_loss_planes", x, -(-label.size // THREADS), arguments)
    elif channels <= NARROW:
        launch_finding("loss", "softmax_loss_rows", x, -(-outer // (THREADS // 32)), arguments)
    else:
        launch_finding("loss", "softmax_loss_long_rows", x, outer, arguments)


def softmax_loss_backward(
    prob: Array, label: Array, ignore: int | None, weight: Array, norm: Array, dx: Array
) -> None:
    """dx = weight / norm * (prob - 1 at the label), 0 where the label is `ignore`."""
    arguments = (prob, label, dx, *prob.shape, *_skip(ignore), *number(weight), *number(norm))
    launch("loss", "softmax_loss_gradient", prob, prob.size, *arguments)


def sigmoid_loss_forward(
    x: Array, target: Array, ignore: int | None, divisor: float | None, loss: Array, norm: Array
) -> None:
    """loss = sum of max(x, 0) - x * target + log(1 + exp(-|x|)) / norm over the targets that are
    not `ignore`.
    """
    arguments = (x, target, x.size, *_skip(ignore), _divisor(divisor), loss, norm)
    launch_finding("loss", "sigmoid_loss", x, -(-x.size // LABELS), arguments)


def sigmoid_loss_backward(
    x: Array, target: Array, ignore: int | None, weight: Array, norm: Array, dx: Array
) -> None:
    """dx = weight / norm * (sigmoid(x) - target), 0 where the target is `ignore`."""
    arguments = (x, target, dx, x.size, *_skip(ignore), *number(weight), *number(norm))
    launch("loss", "sigmoid_loss_gradient", x, packs(x), *arguments)


def euclidean_loss_forward(
    x: Array, target: Array, divisor: float, difference: Array, loss: Array
) -> None:
    """difference = x - target, loss = sum of its squares / 2 / divisor."""
    arguments = (x, target, difference, x.size, float(divisor), loss)
    launch_finding("loss", "euclidean_loss", x, -(-x.size // LABELS), arguments)


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
    """share = the share of the labels with fewer than top_k other scores not below theirs, shares =
    that of each class.

    x (outer, C, inner), label (outer, inner), shares (C). hits and counts (C) are room to count in:
    zeros before and after. Whole numbers are counted, so the order in which they meet does not
    matter.
    """
    lanes = _lanes(x)
    room = (0, 0, 0) if shares is None else (hits, counts, shares)
    sizes = (*x.shape[1:], label.size, int(top_k), *_skip(ignore), lanes)
    launch_finding(
        "loss",
        "accuracy",
        x,
        -(-label.size * lanes // THREADS),
        (x, label, *sizes, *room, share, wrong),
    )


def infogain_loss_forward(
    x: Array,
    label: Array,
    matrix: Array,
    ignore: int | None,
    divisor: float | None,
    prob: Array,
    loss: Array,
    norm: Array,
    wrong: Array,
) -> None:
    """prob = softmax of x, loss = -sum over the classes of matrix[label] * log(max(prob, 1e-20)) /
    norm.

    x and prob (outer, C, inner), label (outer, inner), matrix (C, C). A label `ignore` does not
    count.
    """
    softmax_forward(x, prob)
    lanes = _lanes(x)
    arguments = (
        prob,
        label,
        matrix,
        label.size,
        *x.shape[1:],
        *_skip(ignore),
        lanes,
        _divisor(divisor),
    )
    worth = -(-label.size * lanes // THREADS)
    launch_finding("item_loss", "infogain_loss", x, worth, (*arguments, loss, norm, wrong))


def infogain_loss_backward(
    prob: Array,
    label: Array,
    matrix: Array,
    ignore: int | None,
    weight: Array,
    norm: Array,
    dx: Array,
) -> None:
    """dx = weight / norm * (prob * sum of matrix[label] - matrix[label]), 0 where the label does
    not count.
    """
    lanes = _lanes(prob)
    arguments = (prob, label, matrix, dx, label.size, *prob.shape[1:], *_skip(ignore), lanes)
    numbers = (*number(weight), *number(norm))
    launch("item_loss", "infogain_loss_gradient", prob, label.size * lanes, *arguments, *numbers)


def multinomial_loss_forward(
    prob: Array, label: Array, divisor: float, loss: Array, wrong: Array
) -> None:
    """loss = -sum of log(max(prob of the label, 1e-20)) / divisor; prob (N, C), label (N)."""
    arguments = (prob, label, *prob.shape, float(divisor), loss, wrong)
    launch_finding("item_loss", "multinomial_loss", prob, -(-label.size // THREADS), arguments)


def multinomial_loss_backward(
    prob: Array, label: Array, weight: Array, divisor: float, dx: Array
) -> None:
    """dx = -weight / divisor / max(prob, 1e-20) at the label, else 0."""
    arguments = (prob, label, dx, *prob.shape, *number(weight), float(divisor))
    launch("item_loss", "multinomial_loss_gradient", prob, prob.size, *arguments)


def hinge_loss_forward(
    x: Array, label: Array, squares: bool, divisor: float, slack: Array, loss: Array, wrong: Array
) -> None:
    """slack = max(0, 1 + x), at the label -max(0, 1 - x); loss = sum of its sizes, or of its
    squares / divisor.

    x and slack (N, C), label (N).
    """
    arguments = (x, label, slack, *x.shape, int(squares), float(divisor), loss, wrong)
    launch_finding("item_loss", "hinge_loss", x, -(-x.size // LABELS), arguments)


def hinge_loss_backward(
    slack: Array, squares: bool, weight: Array, divisor: float, dx: Array
) -> None:
    """dx = weight / divisor * sign of the slack, or times twice the slack for squares."""
    arguments = (slack, dx, dx.size, int(squares), *number(weight), float(divisor))
    launch("item_loss", "hinge_loss_gradient", dx, packs(dx), *arguments)


def contrastive_loss_forward(
    a: Array,
    b: Array,
    similar: Array,
    margin: float,
    legacy: bool,
    divisor: float,
    difference: Array,
    factor: Array,
    loss: Array,
) -> None:
    """difference = a - b (N, C), d its length; loss = sum of d^2 where similar (N), else max(margin
    - d, 0)^2 / 2N.

    N is the divisor; legacy takes max(margin - d^2, 0). factor (N) is what backward multiplies the
    difference by.
    """
    arguments = (
        a,
        b,
        similar,
        difference,
        factor,
        *a.shape,
        float(margin),
        int(legacy),
        float(divisor),
        loss,
    )
    launch_finding("item_loss", "contrastive_loss", a, -(-a.shape[0] // (THREADS // 32)), arguments)


def contrastive_loss_backward(
    difference: Array, factor: Array, weight: Array, divisor: float, dx: Array
) -> None:
    """dx = weight / divisor * factor * difference."""
    arguments = (difference, factor, dx, *dx.shape, *number(weight), float(divisor))
    launch("item_loss", "contrastive_loss_gradient", dx, dx.size, *arguments)
