"""Pooling over length, height and width of volumes."""

from functools import partial

from caffepy.device.blob import Array
from caffepy.device.threads import parallel
from caffepy.ops.cpu.compiler import inlined, kernel

Three = tuple[int, int, int]
Window = tuple[Three, Three, Three]


@inlined
def _span(i: int, kernel: int, stride: int, pad: int, size: int) -> Three:
    """The first element of window i along an axis, the one behind its last, and how many elements
    and zeros of the padding it has.
    """
    first = i * stride - pad
    last = min(first + kernel, size + pad)
    return max(first, 0), min(last, size), last - first


@kernel
def _max_pool(x: Array, y: Array, least: float, window: Window, lo: int, hi: int) -> None:
    (kl, kh, kw), (sl, sh, sw), (pl, ph, pw) = window
    length, h, w = x.shape[1:]
    for p in range(lo, hi):
        for i in range(y.shape[1]):
            l0, l1, _ = _span(i, kl, sl, pl, length)
            for j in range(y.shape[2]):
                h0, h1, _ = _span(j, kh, sh, ph, h)
                for k in range(y.shape[3]):
                    w0, w1, _ = _span(k, kw, sw, pw, w)
                    best = y.dtype.type(least)
                    for a in range(l0, l1):
                        for b in range(h0, h1):
                            for c in range(w0, w1):
                                best = max(best, x[p, a, b, c])
                    y[p, i, j, k] = best


@kernel
def _max_pool_gradient(
    x: Array, y: Array, dy: Array, dx: Array, window: Window, lo: int, hi: int
) -> None:
    (kl, kh, kw), (sl, sh, sw), (pl, ph, pw) = window
    length, h, w = x.shape[1:]
    for p in range(lo, hi):
        dx[p] = 0
        for i in range(y.shape[1]):
            l0, l1, _ = _span(i, kl, sl, pl, length)
            for j in range(y.shape[2]):
                h0, h1, _ = _span(j, kh, sh, ph, h)
                for k in range(y.shape[3]):
                    w0, w1, _ = _span(k, kw, sw, pw, w)
                    for a in range(l0, l1):
                        for b in range(h0, h1):
                            for c in range(w0, w1):
                                if x[p, a, b, c] == y[p, i, j, k]:
                                    dx[p, a, b, c] += dy[p, i, j, k]


@kernel
def _mean_pool(x: Array, y: Array, window: Window, lo: int, hi: int) -> None:
    (kl, kh, kw), (sl, sh, sw), (pl, ph, pw) = window
    length, h, w = x.shape[1:]
    for p in range(lo, hi):
        for i in range(y.shape[1]):
            l0, l1, n = _span(i, kl, sl, pl, length)
            for j in range(y.shape[2]):
                h0, h1, m = _span(j, kh, sh, ph, h)
                for k in range(y.shape[3]):
                    w0, w1, o = _span(k, kw, sw, pw, w)
                    total = y.dtype.type(0)
                    for a in range(l0, l1):
                        for b in range(h0, h1):
                            for c in range(w0, w1):
                                total += x[p, a, b, c]
                    y[p, i, j, k] = total / y.dtype.type(max(n * m * o, 1))


@kernel
def _mean_pool_gradient(dy: Array, dx: Array, window: Window, lo: int, hi: int) -> None:
    (kl, kh, kw), (sl, sh, sw), (pl, ph, pw) = window
    length, h, w = dx.shape[1:]
    for p in range(lo, hi):
        dx[p] = 0
        for i in range(dy.shape[1]):
            l0, l1, n = _span(i, kl, sl, pl, length)
            for j in range(dy.shape[2]):
                h0, h1, m = _span(j, kh, sh, ph, h)
                for k in range(dy.shape[3]):
                    w0, w1, o = _span(k, kw, sw, pw, w)
                    share = dy[p, i, j, k] / dy.dtype.type(max(n * m * o, 1))
                    for a in range(l0, l1):
                        for b in range(h0, h1):
                            for c in range(w0, w1):
                                dx[p, a, b, c] += share


def max_pool_volumes_forward(x: Array, y: Array, least: float, window: Window) -> None:
    parallel(partial(_max_pool, x, y, least, window), len(x))


def max_pool_volumes_backward(x: Array, y: Array, dy: Array, dx: Array, window: Window) -> None:
    parallel(partial(_max_pool_gradient, x, y, dy, dx, window), len(x))


def ave_pool_volumes_forward(x: Array, y: Array, window: Window) -> None:
    parallel(partial(_mean_pool, x, y, window), len(x))


def ave_pool_volumes_backward(dy: Array, dx: Array, window: Window) -> None:
    parallel(partial(_mean_pool_gradient, dy, dx, window), len(dx))
