"""Device: where arrays live and arithmetic runs, with the random state that belongs to it."""

import numpy as np


class Device:
    """One CPU or one GPU as a solver sees it: kind ("cpu" or "cuda"), index, random generator.

    Every solver has its own Device, hence its own random numbers; `seed` None takes one from the system.
    """

    def __init__(self, kind: str = "cpu", index: int = 0, seed: int | None = None) -> None:
        self.kind = kind
        self.index = index
        self.seed(seed)

    def seed(self, seed: int | None) -> None:
        """Start the random generator anew (Mersenne twister, as Caffe's)."""
        self.rng = np.random.Generator(np.random.MT19937(seed))

    def draw_seed(self) -> int:
        """One 32-bit number that starts a generator of its own: of a transformer, a dropout mask, a shuffle."""
        return int(self.rng.integers(1 << 32))

    def __repr__(self) -> str:
        return f"Device({self.kind!r}, {self.index})"
