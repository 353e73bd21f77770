"""Bilinear resizing with aligned corners, and its transpose."""

from caffepy.ops.cuda.launch import Array, launch


def interp_forward(x: Array, y: Array) -> None:
    launch("resize", "interp_forward", y, y.size, x, y, len(x), *x.shape[1:], *y.shape[1:])


def interp_backward(dy: Array, dx: Array) -> None:
    launch("resize", "interp_backward", dx, dx.size, dy, dx, len(dx), *dx.shape[1:], *dy.shape[1:])
