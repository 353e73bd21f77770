"""Softmax, losses, accuracy.

A loss takes one launch, after the softmax if that is separate: see launch_reduce.
"""

from caffepy.ops.cuda.launch import (
    THREADS,
    Array,
    launch,
    launch_reduce,
    launch_rows,
    number,
    packs,
)
from caffepy.ops.protocol.loss import Counting, Outcome, Room, Shares

LABELS = 2048
"""Labels for which one more block pays."""
NARROWEST, NARROW = 16, 64
"""Most classes of a row that a thread takes, and a warp; a block takes a longer one."""


def softmax_forward(x: Array, y: Array) -> None:
    if x.shape[2] == 1:
        launch_rows("loss", "softmax_rows", x, x, y, *x.shape[:2])
    else:
        launch("loss", "softmax_planes", x, x.shape[0] * x.shape[2], x, y, *x.shape)


def softmax_backward(y: Array, dy: Array, dx: Array) -> None:
    if y.shape[2] == 1:
        launch_rows("loss", "softmax_gradient_rows", y, y, dy, dx, *y.shape[:2])
    else:
        launch("loss", "softmax_gradient_planes", y, y.shape[0] * y.shape[2], y, dy, dx, *y.shape)


def _counted(ignore: int | None, divisor: float | None) -> tuple[int, int, float]:
    """Return what kernels take: a divisor below 0 is the number of labels."""
    return *_skip(ignore), -1.0 if divisor is None else float(divisor)


def _skip(ignore: int | None) -> tuple[int, int]:
    return int(ignore is not None), int(ignore or 0)


def _threads_each(x: Array) -> int:
    """Return the threads for a label: a warp if its scores are contiguous."""
    return 32 if x.shape[2] == 1 else 1


def softmax_loss_forward(
    x: Array, label: Array, counting: Counting, prob: Array, outcome: Outcome
) -> None:
    outer, channels, inner = x.shape
    arguments = (x, label, prob, *x.shape, *_counted(*counting), *outcome)
    if inner > 1 or channels <= NARROWEST:
        launch_reduce("loss", "softmax_loss_planes", x, -(-label.size // THREADS), *arguments)
    elif channels <= NARROW:
        launch_reduce("loss", "softmax_loss_rows", x, -(-outer // (THREADS // 32)), *arguments)
    else:
        launch_reduce("loss", "softmax_loss_long_rows", x, outer, *arguments)


def softmax_loss_backward(
    prob: Array, label: Array, ignore: int | None, weight: Array, norm: Array, dx: Array
) -> None:
    arguments = (prob, label, dx, *prob.shape, *_skip(ignore), *number(weight), *number(norm))
    launch("loss", "softmax_loss_gradient", prob, prob.size, *arguments)


def sigmoid_loss_forward(
    x: Array, target: Array, ignore: int | None, divisor: float | None, loss: Array, norm: Array
) -> None:
    arguments = (x, target, x.size, *_counted(ignore, divisor), loss, norm)
    launch_reduce("loss", "sigmoid_loss", x, -(-x.size // LABELS), *arguments)


def sigmoid_loss_backward(
    x: Array, target: Array, ignore: int | None, weight: Array, norm: Array, dx: Array
) -> None:
    arguments = (x, target, dx, x.size, *_skip(ignore), *number(weight), *number(norm))
    launch("loss", "sigmoid_loss_gradient", x, packs(x), *arguments)


def euclidean_loss_forward(
    x: Array, target: Array, divisor: float, difference: Array, loss: Array
) -> None:
    arguments = (x, target, difference, x.size, float(divisor), loss)
    launch_reduce("loss", "euclidean_loss", x, -(-x.size // LABELS), *arguments)


def euclidean_loss_backward(difference: Array, weight: Array, divisor: float, dx: Array) -> None:
    arguments = (difference, dx, dx.size, *number(weight), float(divisor))
    launch("loss", "euclidean_loss_gradient", dx, packs(dx), *arguments)


def accuracy(
    x: Array, label: Array, top_k: int, ignore: int | None, room: Room, outcome: Shares
) -> None:
    share, shares, wrong = outcome
    threads = _threads_each(x)
    counting = (0, 0, 0) if shares is None else (*room, shares)
    sizes = (*x.shape[1:], label.size, int(top_k), *_skip(ignore), threads)
    worth = -(-label.size * threads // THREADS)
    launch_reduce("loss", "accuracy", x, worth, x, label, *sizes, *counting, share, wrong)


def infogain_loss_forward(
    x: Array, label: Array, matrix: Array, counting: Counting, prob: Array, outcome: Outcome
) -> None:
    softmax_forward(x, prob)
    threads = _threads_each(x)
    *skip, by = _counted(*counting)
    sizes = (label.size, *x.shape[1:], *skip, threads, by)
    worth, arguments = -(-label.size * threads // THREADS), (prob, label, matrix, *sizes)
    launch_reduce("item_loss", "infogain_loss", x, worth, *arguments, *outcome)


def infogain_loss_backward(
    prob: Array,
    label: Array,
    matrix: Array,
    ignore: int | None,
    weight: Array,
    norm: Array,
    dx: Array,
) -> None:
    threads = _threads_each(prob)
    arguments = (prob, label, matrix, dx, label.size, *prob.shape[1:], *_skip(ignore), threads)
    numbers = (*number(weight), *number(norm))
    launch("item_loss", "infogain_loss_gradient", prob, label.size * threads, *arguments, *numbers)


def multinomial_loss_forward(
    prob: Array, label: Array, divisor: float, loss: Array, wrong: Array
) -> None:
    arguments = (prob, label, *prob.shape, float(divisor), loss, wrong)
    launch_reduce("item_loss", "multinomial_loss", prob, -(-label.size // THREADS), *arguments)


def multinomial_loss_backward(
    prob: Array, label: Array, weight: Array, divisor: float, dx: Array
) -> None:
    arguments = (prob, label, dx, *prob.shape, *number(weight), float(divisor))
    launch("item_loss", "multinomial_loss_gradient", prob, prob.size, *arguments)


def hinge_loss_forward(
    x: Array, label: Array, squares: bool, divisor: float, slack: Array, loss: Array, wrong: Array
) -> None:
    arguments = (x, label, slack, *x.shape, int(squares), float(divisor), loss, wrong)
    launch_reduce("item_loss", "hinge_loss", x, -(-x.size // LABELS), *arguments)


def hinge_loss_backward(
    slack: Array, squares: bool, weight: Array, divisor: float, dx: Array
) -> None:
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
    numbers = (*a.shape, float(margin), int(legacy), float(divisor))
    arguments = (a, b, similar, difference, factor, *numbers, loss)
    launch_reduce("item_loss", "contrastive_loss", a, -(-len(a) // (THREADS // 32)), *arguments)


def contrastive_loss_backward(
    difference: Array, factor: Array, weight: Array, divisor: float, dx: Array
) -> None:
    arguments = (difference, factor, dx, *dx.shape, *number(weight), float(divisor))
    launch("item_loss", "contrastive_loss_gradient", dx, dx.size, *arguments)
