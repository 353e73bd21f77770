"""Distances of rows of one matrix from those of another."""

from functools import partial

from caffepy.device.blob import Array
from caffepy.device.threads import parallel
from caffepy.ops.cpu.compiler import kernel


@kernel
def _distances(x: Array, w: Array, y: Array, squared: bool, lo: int, hi: int) -> None:
    for m in range(lo, hi):
        for n in range(w.shape[0]):
            total = y.dtype.type(0)
            a, b = x[m], w[n]
            if squared:
                for k in range(a.size):
                    total += (a[k] - b[k]) * (a[k] - b[k])
            else:
                for k in range(a.size):
                    total += abs(a[k] - b[k])
            y[m, n] = total


@kernel
def _gradients(
    dy: Array, x: Array, w: Array, dx: Array, squared: bool, accumulate: bool, lo: int, hi: int
) -> None:
    two, one = dx.dtype.type(2), dx.dtype.type(1)
    for m in range(lo, hi):
        a, out = x[m], dx[m]
        if not accumulate:
            out[:] = 0
        for n in range(w.shape[0]):
            d, b = dy[m, n], w[n]
            if squared:
                for k in range(a.size):
                    out[k] += d * two * (a[k] - b[k])
            else:
                for k in range(a.size):
                    gap = a[k] - b[k]
                    out[k] += d * (one if gap > 0 else -one if gap < 0 else gap)


def distances(x: Array, w: Array, y: Array, squared: bool) -> None:
    parallel(partial(_distances, x, w, y, squared), len(x))


def distance_gradients(
    dy: Array, x: Array, w: Array, dx: Array, squared: bool, accumulate: bool
) -> None:
    parallel(partial(_gradients, dy, x, w, dx, squared, accumulate), len(x))
