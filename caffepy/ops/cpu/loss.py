"""Softmax, losses, accuracy."""

from functools import partial
from typing import Any

import numpy as np

from caffepy.device.blob import Array
from caffepy.device.recording import call
from caffepy.device.threads import parallel, parallel_calls
from caffepy.ops.cpu.compiler import EXACT, inlined, kernel
from caffepy.ops.cpu.elementwise import GRAIN, dot, eltwise_sum, flatwise, scaled
from caffepy.ops.protocol.loss import Counting, Outcome, Room, Shares

# log(FLT_MIN) = -87.3365: no label can cost more than 87.3365, as in Caffe
FLT_MIN = float(np.finfo(np.float32).tiny)

LEAST = 1e-20
"""The least probability in the losses that have Caffe's kLOG_THRESHOLD."""


def _grain(x: Array) -> int:
    return GRAIN // 4 * int(x.shape[0]) // (x.size + 1) + 1


@kernel
def _subtract_max_planes(x: Array, y: Array, lo: int, hi: int) -> None:
    most = np.empty(x.shape[2], x.dtype)
    for n in range(lo, hi):
        for p in range(most.size):
            most[p] = x[n, 0, p]
        for c in range(1, x.shape[1]):
            u = x[n, c]
            for p in range(u.size):
                most[p] = most[p] if most[p] > u[p] else u[p]
        for c in range(x.shape[1]):
            u, v = x[n, c], y[n, c]
            for p in range(u.size):
                v[p] = u[p] - most[p]


@kernel
def _divide_by_sum_planes(y: Array, lo: int, hi: int) -> None:
    total = np.empty(y.shape[2], y.dtype)
    for n in range(lo, hi):
        total[:] = 0
        for c in range(y.shape[1]):
            v = y[n, c]
            for p in range(v.size):
                total[p] += v[p]
        for c in range(y.shape[1]):
            v = y[n, c]
            for p in range(v.size):
                v[p] /= total[p]


@kernel
def _subtract_max_rows(x: Array, y: Array, lo: int, hi: int) -> None:
    for n in range(lo, hi):
        u, v = x[n], y[n]
        most = u[0]
        for c in range(u.size):
            most = most if most > u[c] else u[c]
        for c in range(u.size):
            v[c] = u[c] - most


@kernel
def _divide_by_sum_rows(y: Array, lo: int, hi: int) -> None:
    for n in range(lo, hi):
        v = y[n]
        total = v[0] - v[0]
        for c in range(v.size):
            total += v[c]
        for c in range(v.size):
            v[c] /= total


def softmax_forward(x: Array, y: Array) -> None:
    first, last = _subtract_max_planes, _divide_by_sum_planes
    if x.shape[2] == 1:
        first, last, x, y = _subtract_max_rows, _divide_by_sum_rows, x[:, :, 0], y[:, :, 0]

    def piece(lo: int, hi: int) -> None:
        call(first, x, y, lo, hi)
        with np.errstate(all="ignore"):
            call(np.exp, y[lo:hi], y[lo:hi])
        call(last, y, lo, hi)

    if x.size:  # the first of 0 channels lies outside of the array
        parallel_calls(piece, x.shape[0], _grain(x))


@kernel
def _softmax_gradient(y: Array, dy: Array, dx: Array, lo: int, hi: int) -> None:
    product = np.empty(y.shape[2], y.dtype)
    for n in range(lo, hi):
        product[:] = 0
        for c in range(y.shape[1]):
            t, u = y[n, c], dy[n, c]
            for p in range(t.size):
                product[p] += t[p] * u[p]
        for c in range(y.shape[1]):
            t, u, v = y[n, c], dy[n, c], dx[n, c]
            for p in range(t.size):
                v[p] = (u[p] - product[p]) * t[p]


def softmax_backward(y: Array, dy: Array, dx: Array) -> None:
    parallel(partial(_softmax_gradient, y, dy, dx), y.shape[0], _grain(y))


@partial(inlined, fastmath=EXACT)
def _quotient(total: Any, divisor: Any) -> Any:
    return total / divisor


@kernel
def _softmax_loss(
    prob: Array, label: Array, skip: bool, ignore: int, divisor: float, outcome: Outcome
) -> None:
    """`divisor` is 0 to divide by the number of labels that count."""
    loss, count, wrong = 0.0, 0, -1
    for n in range(label.shape[0]):
        for p in range(label.shape[1]):
            t = label[n, p]
            if skip and int(t) == ignore:
                continue
            if not (t > -1 and t < prob.shape[1]):
                if wrong < 0:
                    wrong = n * label.shape[1] + p
                continue
            likelihood = np.float64(prob[n, int(t), p])
            loss -= np.log(FLT_MIN if likelihood < FLT_MIN else likelihood)
            count += 1
    mean, norm, flag = outcome
    if wrong >= 0:
        flag[0], flag[1] = 1, label[wrong // label.shape[1], wrong % label.shape[1]]
    by = divisor if divisor > 0 else float(max(1, count))
    norm[()] = by
    mean[()] = _quotient(loss, by)


def _divided(total: float, count: int, divisor: float | None, loss: Array, norm: Array) -> None:
    norm.fill(max(1, count if divisor is None else divisor))
    loss.fill(total / float(norm))


def softmax_loss_forward(
    x: Array, label: Array, counting: Counting, prob: Array, outcome: Outcome
) -> None:
    ignore, divisor = counting
    loss, norm, wrong = outcome
    softmax_forward(x, prob)
    by = 0.0 if divisor is None else max(1.0, divisor)
    given = prob, label, ignore is not None, ignore or 0, by
    call(_softmax_loss, *given, (loss.reshape(()), norm, wrong))


@kernel
def _softmax_loss_gradient(
    prob: Array,
    label: Array,
    skip: bool,
    ignore: int,
    weight: Array,
    norm: Array,
    dx: Array,
    lo: int,
    hi: int,
) -> None:
    s = prob.dtype.type(_quotient(np.float64(weight[()]), norm[()]))
    for n in range(lo, hi):
        for c in range(prob.shape[1]):
            u, v = prob[n, c], dx[n, c]
            for p in range(u.size):
                v[p] = u[p] * s
        for p in range(label.shape[1]):
            t = int(label[n, p])
            if skip and t == ignore:
                for c in range(prob.shape[1]):
                    dx[n, c, p] = 0
            elif 0 <= t < prob.shape[1]:  # forward refuses others, which a script may catch
                dx[n, t, p] -= s


def softmax_loss_backward(
    prob: Array, label: Array, ignore: int | None, weight: Array, norm: Array, dx: Array
) -> None:
    given = prob, label, ignore is not None, ignore or 0, weight.reshape(-1)[:1].reshape(()), norm
    parallel(partial(_softmax_loss_gradient, *given, dx), prob.shape[0], _grain(prob))


@kernel
def _sigmoid_loss(x: Array, target: Array, skip: bool, ignore: int, sums: Array) -> None:
    """sums (2) = the sum of the losses and their number."""
    loss, count = 0.0, 0
    for i in range(x.size):
        if skip and int(target[i]) == ignore:
            continue
        v = np.float64(x[i])
        loss += max(v, 0.0) - v * np.float64(target[i]) + np.log1p(np.exp(-abs(v)))
        count += 1
    sums[0], sums[1] = loss, count


def sigmoid_loss_forward(
    x: Array, target: Array, ignore: int | None, divisor: float | None, loss: Array, norm: Array
) -> None:
    sums = np.zeros(2)
    _sigmoid_loss(x.reshape(-1), target.reshape(-1), ignore is not None, ignore or 0, sums)
    _divided(float(sums[0]), int(sums[1]), divisor, loss, norm)


@kernel
def _sigmoid_loss_gradient(
    x: Array, target: Array, dx: Array, skip: bool, ignore: int, scale: float
) -> None:
    for i in range(x.size):
        if skip and int(target[i]) == ignore:
            dx[i] = 0
        else:
            dx[i] = scale * (0.5 * np.tanh(0.5 * x[i]) + 0.5 - target[i])


def sigmoid_loss_backward(
    x: Array, target: Array, ignore: int | None, weight: Array, norm: Array, dx: Array
) -> None:
    scale = float(weight.flat[0]) / float(norm)
    numbers = ignore is not None, ignore or 0, scale
    flatwise(_sigmoid_loss_gradient, (x, target), dx, *numbers, grain=GRAIN // 8)


def euclidean_loss_forward(
    x: Array, target: Array, divisor: float, difference: Array, loss: Array
) -> None:
    eltwise_sum((x, target), (1.0, -1.0), difference)
    loss.fill(dot(difference, difference) / 2 / divisor)


def euclidean_loss_backward(difference: Array, weight: Array, divisor: float, dx: Array) -> None:
    scaled(float(weight.flat[0]) / divisor, difference, dx)


@kernel
def _accuracy(
    x: Array,
    label: Array,
    top_k: int,
    skip: bool,
    ignore: int,
    hits: Array,
    counts: Array,
    share: Array,
    shares: Array,
    wrong: Array,
) -> None:
    """`shares` is empty if they are not wanted."""
    for n in range(label.shape[0]):
        for p in range(label.shape[1]):
            if skip and int(label[n, p]) == ignore:
                continue
            if not (label[n, p] > -1 and label[n, p] < x.shape[1]):
                wrong[0], wrong[1] = 1, label[n, p]
                hits[:], counts[:] = 0, 0
                return
            t = int(label[n, p])
            better = -1  # the label itself is not below its own score
            for c in range(x.shape[1]):
                better += 0 if x[n, c, p] < x[n, t, p] else 1
            counts[t] += 1
            hits[t] += 1 if better < top_k else 0
    share[()] = _quotient(float(hits.sum()), float(max(1, counts.sum())))
    for t in range(shares.size):
        shares[t] = _quotient(float(hits[t]), float(max(1, counts[t])))
    hits[:], counts[:] = 0, 0


def accuracy(
    x: Array, label: Array, top_k: int, ignore: int | None, room: Room, outcome: Shares
) -> None:
    (hits, counts), (share, shares, wrong) = room, outcome
    wanted = np.empty(0, share.dtype) if shares is None else shares.reshape(-1)
    given = x, label, top_k, ignore is not None, ignore or 0, hits, counts
    call(_accuracy, *given, share.reshape(()), wanted, wrong)


def _gains(label: Array, matrix: Array, ignore: int | None) -> tuple[Array, Array, Array]:
    """Return the rows of the matrix for labels (outer, inner) as (outer, C, inner), 0 for a label
    that does not count; then which labels count, and which of those are invalid.
    """
    classes = matrix.shape[0]
    counts = np.ones_like(label, bool) if ignore is None else np.trunc(label) != ignore
    wrong = counts & ~((label > -1) & (label < classes))
    chosen = np.where(counts & ~wrong, label, 0).astype(np.intp)
    rows = matrix[chosen] * (counts & ~wrong)[..., None]  # (outer, inner, C)
    return np.moveaxis(rows, 2, 1), counts, wrong


def infogain_loss_forward(
    x: Array, label: Array, matrix: Array, counting: Counting, prob: Array, outcome: Outcome
) -> None:
    ignore, divisor = counting
    loss, norm, wrong = outcome
    softmax_forward(x, prob)
    rows, counts, bad = _gains(label, matrix, ignore)
    if bad.any():
        wrong[:] = 1, label[bad][0]
    total = -np.sum(rows * np.log(np.maximum(prob, LEAST)), dtype=np.float64)
    _divided(float(total), int((counts & ~bad).sum()), divisor, loss, norm)


def infogain_loss_backward(
    prob: Array,
    label: Array,
    matrix: Array,
    ignore: int | None,
    weight: Array,
    norm: Array,
    dx: Array,
) -> None:
    rows = _gains(label, matrix, ignore)[0]
    gradient = prob * rows.sum(axis=1, keepdims=True) - rows
    np.multiply(gradient, float(weight.flat[0]) / float(norm), out=dx)


def _of_labels(label: Array, classes: int, wrong: Array | None = None) -> tuple[Array, Array]:
    """Return the index of each item's label, for valid labels: (items, labels)."""
    good = (label > -1) & (label < classes)
    if wrong is not None and not good.all():
        wrong[:] = 1, label[~good][0]
    return np.flatnonzero(good), label[good].astype(np.intp)


def multinomial_loss_forward(
    prob: Array, label: Array, divisor: float, loss: Array, wrong: Array
) -> None:
    likelihood = np.maximum(prob[_of_labels(label, prob.shape[1], wrong)], LEAST)
    loss.fill(-np.log(likelihood).sum(dtype=np.float64) / divisor)


def multinomial_loss_backward(
    prob: Array, label: Array, weight: Array, divisor: float, dx: Array
) -> None:
    at = _of_labels(label, prob.shape[1])
    dx.fill(0)
    dx[at] = -float(weight.flat[0]) / divisor / np.maximum(prob[at], LEAST)


def hinge_loss_forward(
    x: Array, label: Array, squares: bool, divisor: float, slack: Array, loss: Array, wrong: Array
) -> None:
    at = _of_labels(label, x.shape[1], wrong)
    slack[...] = x
    slack[at] *= -1
    slack += 1
    np.maximum(slack, 0, out=slack)
    loss.fill((dot(slack, slack) if squares else float(slack.sum(dtype=np.float64))) / divisor)
    slack[at] *= -1


def hinge_loss_backward(
    slack: Array, squares: bool, weight: Array, divisor: float, dx: Array
) -> None:
    scale = float(weight.flat[0]) / divisor
    if squares:
        np.multiply(slack, 2 * scale, out=dx)
    else:
        np.multiply(np.sign(slack), scale, out=dx)


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
    np.subtract(a, b, out=difference)
    square = np.einsum("nc,nc->n", difference, difference)
    distance = np.sqrt(square)
    if legacy:
        far = np.maximum(margin - square, 0)
        slope = np.where(margin - distance * distance > 0, -1, 0)
    else:
        left = np.maximum(margin - distance, 0)
        far, slope = left**2, -left / (distance + 1e-4)
    alike = similar.astype(np.int64) != 0
    factor[...] = np.where(alike, 1, slope)
    loss.fill(np.where(alike, square, far).sum(dtype=np.float64) / 2 / divisor)


def contrastive_loss_backward(
    difference: Array, factor: Array, weight: Array, divisor: float, dx: Array
) -> None:
    np.multiply(difference, (factor * (float(weight.flat[0]) / divisor))[:, None], out=dx)
