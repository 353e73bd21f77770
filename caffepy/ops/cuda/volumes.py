"""Pooling over length, height and width of volumes."""

from itertools import chain

from caffepy.ops.cuda.launch import Array, launch

Three = tuple[int, int, int]
Window = tuple[Three, Three, Three]


def _sizes(x: Array, y: Array, window: Window) -> list[int]:
    """Return the sizes as kernels take them: volumes, size, output size, kernel, stride, pad."""
    return [len(x), *x.shape[1:], *y.shape[1:], *chain(*window)]


def max_pool_volumes_forward(x: Array, y: Array, least: float, window: Window) -> None:
    arguments = (x, y, float(least), *_sizes(x, y, window))
    launch("volumes", "max_pool_volumes_forward", y, y.size, *arguments)


def max_pool_volumes_backward(x: Array, y: Array, dy: Array, dx: Array, window: Window) -> None:
    arguments = (x, y, dy, dx, *_sizes(x, y, window))
    launch("volumes", "max_pool_volumes_backward", dx, dx.size, *arguments)


def ave_pool_volumes_forward(x: Array, y: Array, window: Window) -> None:
    launch("volumes", "ave_pool_volumes_forward", y, y.size, x, y, *_sizes(x, y, window))


def ave_pool_volumes_backward(dy: Array, dx: Array, window: Window) -> None:
    arguments = (dy, dx, *_sizes(dx, dy, window))
    launch("volumes", "ave_pool_volumes_backward", dx, dx.size, *arguments)
