"""Normalization by statistics of each channel of (outer, C, inner) arrays; sums in double precision."""

from caffepy.ops.cuda.channels import finish, sums
from caffepy.ops.cuda.launch import Array, launch, packs, scratch


def batch_norm_statistics(x: Array, mean: Array, variance: Array) -> None:
    """Mean and biased variance of each channel; x (outer, C, inner), mean and variance (C)."""
    partial, splits = sums("normalization", "statistics", x, x)
    finish("normalization", "statistics_finish", x, partial, x, mean, variance, *x.shape, splits)


def batch_norm_forward(x: Array, mean: Array, inverse: Array, y: Array) -> None:
    """y = (x - mean) * inverse, inverse being that of the standard deviation."""
    launch("normalization", "normalize", x, packs(x), x, mean, inverse, y, *x.shape)


def batch_norm_backward(x: Array, mean: Array, inverse: Array, dy: Array, dx: Array) -> None:
    """dx = (dy - mean(dy) - y * mean(dy * y)) * inverse, y = (x - mean) * inverse, means per channel; dx may be dy."""
    partial, splits = sums("normalization", "gradient_sums", x, x, mean, dy)
    means = scratch("means", 2 * x.shape[1])
    finish("normalization", "gradient_finish", x, partial, inverse, means, *x.shape, splits)
    launch("normalization", "gradient", x, packs(x), x, mean, inverse, means, dy, dx, *x.shape)
