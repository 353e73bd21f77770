"""Local connections: a convolution with separate weights at each output position."""

from functools import partial

from caffepy.device.blob import Array
from caffepy.device.threads import parallel
from caffepy.ops.cpu.compiler import inlined, kernel


@inlined
def _reach(at: int, stride: int, pad: int, size: int, out: int) -> tuple[int, int]:
    """The first output position whose element `at` of the window lies inside, and the one behind
    the last.
    """
    first = 0 if at >= pad else (pad - at + stride - 1) // stride
    behind = (size - 1 - at + pad) // stride + 1 if size - 1 - at + pad >= 0 else 0
    return min(first, out), min(behind, out)


@kernel
def _forward(
    x: Array, w: Array, y: Array, side: int, stride: int, pad: int, lo: int, hi: int
) -> None:
    rows, columns = y.shape[2:]
    for o in range(lo, hi):
        y[:, o] = 0
        for n in range(x.shape[0]):
            for k in range(w.shape[1]):
                c, i, j = k // (side * side), k // side % side, k % side
                r0, r1 = _reach(i, stride, pad, x.shape[2], rows)
                c0, c1 = _reach(j, stride, pad, x.shape[3], columns)
                for r in range(r0, r1):
                    for q in range(c0, c1):
                        value = x[n, c, r * stride + i - pad, q * stride + j - pad]
                        y[n, o, r, q] += value * w[o, k, r * columns + q]


@kernel
def _data(
    dy: Array, w: Array, dx: Array, side: int, stride: int, pad: int, lo: int, hi: int
) -> None:
    rows, columns = dy.shape[2:]
    for c in range(lo, hi):
        dx[:, c] = 0
        for n in range(dx.shape[0]):
            for o in range(dy.shape[1]):
                for at in range(side * side):
                    i, j, k = at // side, at % side, c * side * side + at
                    r0, r1 = _reach(i, stride, pad, dx.shape[2], rows)
                    c0, c1 = _reach(j, stride, pad, dx.shape[3], columns)
                    for r in range(r0, r1):
                        for q in range(c0, c1):
                            share = dy[n, o, r, q] * w[o, k, r * columns + q]
                            dx[n, c, r * stride + i - pad, q * stride + j - pad] += share


@kernel
def _weight(
    dy: Array, x: Array, dw: Array, side: int, stride: int, pad: int, lo: int, hi: int
) -> None:
    rows, columns = dy.shape[2:]
    for o in range(lo, hi):
        for k in range(dw.shape[1]):
            c, i, j = k // (side * side), k // side % side, k % side
            r0, r1 = _reach(i, stride, pad, x.shape[2], rows)
            c0, c1 = _reach(j, stride, pad, x.shape[3], columns)
            for n in range(x.shape[0]):
                for r in range(r0, r1):
                    for q in range(c0, c1):
                        value = x[n, c, r * stride + i - pad, q * stride + j - pad]
                        dw[o, k, r * columns + q] += dy[n, o, r, q] * value


def local_forward(x: Array, w: Array, y: Array, side: int, stride: int, pad: int) -> None:
    parallel(partial(_forward, x, w, y, side, stride, pad), y.shape[1])


def local_backward_data(dy: Array, w: Array, dx: Array, side: int, stride: int, pad: int) -> None:
    parallel(partial(_data, dy, w, dx, side, stride, pad), dx.shape[1])


def local_backward_weight(dy: Array, x: Array, dw: Array, side: int, stride: int, pad: int) -> None:
    parallel(partial(_weight, dy, x, dw, side, stride, pad), dy.shape[1])
