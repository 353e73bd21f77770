"""Overlap of boxes."""

import numpy as np

from caffepy.device.blob import Array


def overlaps(a: Array, b: Array, *, of_first: bool = False, least: float = 0) -> Array:
    """Return intersection over union, or the part of the first, of boxes (..., 4) = x, y, width,
    height; 0 where one is empty, or where they have less than `least` in common in x or y.
    """
    sides = np.minimum(a[..., :2] + a[..., 2:], b[..., :2] + b[..., 2:]) - np.maximum(
        a[..., :2], b[..., :2]
    )
    real = (a[..., 2:] > 0).all(-1) & (b[..., 2:] > 0).all(-1) & (sides > 0).all(-1)
    real = real & (sides >= least).all(-1)
    both = np.where(real, sides[..., 0] * sides[..., 1], 0)
    whole = a[..., 2] * a[..., 3]
    if not of_first:
        whole = whole + b[..., 2] * b[..., 3] - both
    return np.where(real, both / np.where(real, whole, 1), 0)


def pixel_overlaps(a: Array, b: Array, *, of_first: bool = False) -> Array:
    """Return intersection over union, or over the first, of boxes (..., 4) = x1, y1, x2, y2 whose
    ends are their last pixels, as Cascade R-CNN has it: boxes that share a column of pixels meet,
    of a row they do not.
    """
    low, high = np.maximum(a[..., :2], b[..., :2]), np.minimum(a[..., 2:], b[..., 2:])
    sides_a, sides_b = (box[..., 2:] - box[..., :2] + 1 for box in (a, b))
    real = (sides_a >= 1).all(-1) & (sides_b >= 1).all(-1)
    real = real & (high[..., 0] >= low[..., 0]) & (high[..., 1] > low[..., 1])
    both = np.where(real, np.prod(high - low + 1, axis=-1), 0)
    whole = np.prod(sides_a, axis=-1)
    if not of_first:
        whole = whole + np.prod(sides_b, axis=-1) - both
    return np.where(real, both / np.where(real, whole, 1), 0)
