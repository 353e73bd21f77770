"""Arrays that one thread fills and another uses; on the host they are handed over as they are."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.ops.objects import Specs

Array = NDArray[Any]


class Staging:
    """Arrays on their way to where layers compute: `room`, fill, `send` in one thread; `take`,
    `done` in another.
    """

    def __init__(self) -> None:
        self._layout: Specs = ()
        self._arrays: list[Array] = []

    def room(self, layout: Specs) -> list[Array]:
        if layout != self._layout:
            self._layout, self._arrays = layout, [np.empty(shape, dtype) for shape, dtype in layout]
        return self._arrays

    def send(self) -> None:
        """Let what was filled go to the device."""

    def take(self) -> list[Array]:
        return self._arrays

    def done(self) -> None:
        """The operations that use what was taken have been given to the current stream."""
