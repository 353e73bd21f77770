"""How much boxes have in common."""

import numpy as np

from caffepy.device.blob import Array


def overlaps(a: Array, b: Array, *, of_first: bool = False) -> Array:
    """Return intersection over union, or the part of the first, of boxes (..., 4) = x, y, width,
    height; 0 where one is empty.
    """
    sides = np.minimum(a[..., :2] + a[..., 2:], b[..., :2] + b[..., 2:]) - np.maximum(
        a[..., :2], b[..., :2]
    )
    real = (a[..., 2:] > 0).all(-1) & (b[..., 2:] > 0).all(-1) & (sides > 0).all(-1)
    both = np.where(real, sides[..., 0] * sides[..., 1], 0)
    whole = a[..., 2] * a[..., 3]
    if not of_first:
        whole = whole + b[..., 2] * b[..., 3] - both
    return np.where(real, both / np.where(real, whole, 1), 0)
