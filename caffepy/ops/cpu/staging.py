"""Buffers between a thread that fills them and one that computes: on the CPU the same arrays."""

import numpy as np

from caffepy.device.blob import Array
from caffepy.ops import objects


class Staging(objects.Staging):
    def __init__(self) -> None:
        self._layout: objects.Specs = ()
        self._arrays: list[Array] = []

    def room(self, layout: objects.Specs) -> list[Array]:
        if layout != self._layout:
            self._layout, self._arrays = layout, [np.empty(shape, dtype) for shape, dtype in layout]
        return self._arrays

    def take(self) -> list[Array]:
        return self._arrays
