"""Distances of rows of one matrix from those of another."""

from caffepy.ops.cuda.launch import Array, launch


def distances(x: Array, w: Array, y: Array, squared: bool) -> None:
    launch("distances", "distances", y, y.size, x, w, y, *y.shape, x.shape[1], int(squared))


def distance_gradients(
    dy: Array, x: Array, w: Array, dx: Array, squared: bool, accumulate: bool
) -> None:
    down, across = (stride // dy.itemsize for stride in dy.strides)
    sizes = *dy.shape, x.shape[1], down, across, int(squared), int(accumulate)
    launch("distances", "distance_gradients", dx, dx.size, dy, x, w, dx, *sizes)
