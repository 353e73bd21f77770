"""The order in which an epoch visits its items."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def visits(count: int, seed: int | None, epoch: int) -> NDArray[Any]:
    """The numbers 0 to count - 1, in order, or shuffled by seed and epoch."""
    if seed is None:
        return np.arange(count)
    return np.random.Generator(np.random.MT19937([seed, epoch])).permutation(count)
