"""Random numbers of a device."""

from typing import Any

import numpy as np


class RandomNumbers:
    """A Mersenne Twister, as in Caffe; reading `state` is free unless numbers were drawn since."""

    def __init__(self, seed: int | None) -> None:
        self._generator = np.random.Generator(np.random.MT19937(seed))
        self._state: dict[str, Any] | None = None

    @property
    def generator(self) -> np.random.Generator:
        """The generator, to draw from at once; do not keep it."""
        self._state = None
        return self._generator

    @property
    def state(self) -> dict[str, Any]:
        """State of the Mersenne Twister."""
        if self._state is None:
            self._state = dict(self._generator.bit_generator.state)
        return self._state

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        self.generator.bit_generator.state = state
