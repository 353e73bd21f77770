"""Sampling of images at affine places, between the pixels."""

from caffepy.ops.cuda.launch import Array, launch, launch_blocks


def affine_sample_forward(x: Array, theta: Array, y: Array) -> None:
    launch("sampling", "affine_sample_forward", y, y.size, x, theta, y, *x.shape, *y.shape[2:])


def affine_sample_backward(dy: Array, theta: Array, dx: Array) -> None:
    arguments = (dy, theta, dx, *dx.shape, *dy.shape[2:])
    launch("sampling", "affine_sample_backward", dx, dx.size, *arguments)


def affine_theta_gradient(dy: Array, x: Array, theta: Array, dtheta: Array) -> None:
    arguments = (dy, x, theta, dtheta, *x.shape, *dy.shape[2:])
    launch_blocks("sampling", "affine_theta_gradient", x, len(x), *arguments)
