"""Local connections: a convolution with separate weights at each output position."""

from caffepy.ops.cuda.launch import Array, launch


def local_forward(x: Array, w: Array, y: Array, side: int, stride: int, pad: int) -> None:
    arguments = (x, w, y, *x.shape, *y.shape[1:], side, stride, pad)
    launch("local", "local_forward", y, y.size, *arguments)


def local_backward_data(dy: Array, w: Array, dx: Array, side: int, stride: int, pad: int) -> None:
    arguments = (dy, w, dx, *dx.shape, *dy.shape[1:], side, stride, pad)
    launch("local", "local_backward_data", dx, dx.size, *arguments)


def local_backward_weight(dy: Array, x: Array, dw: Array, side: int, stride: int, pad: int) -> None:
    arguments = (dy, x, dw, *x.shape, *dy.shape[1:], side, stride, pad)
    launch("local", "local_backward_weight", dw, dw.size, *arguments)
