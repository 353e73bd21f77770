"""RandomNumbers: the Mersenne Twister of a device, from which another thread may draw ahead."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np


def set_twister(twister: np.random.BitGenerator, state: dict[str, Any]) -> None:
    """Restore the state of a Mersenne Twister; ValueError if its position lies outside its words,
    where numpy would read memory that is not its own.
    """
    position, words = int(state["state"]["pos"]), len(state["state"]["key"])
    if not 0 <= position <= words:
        raise ValueError(f"position {position} among {words} random words")
    twister.state = state


class RandomNumbers:
    """A Mersenne Twister, as in Caffe. Reading `state` costs nothing if none were drawn since."""

    def __init__(self, seed: int | None) -> None:
        self._generator = np.random.Generator(np.random.MT19937(seed))
        self._state: dict[str, Any] | None = None
        self._may_draw_beside = False
        self._drawer: ThreadPoolExecutor | None = None
        self._draws: list[Future[None]] = []

    @property
    def generator(self) -> np.random.Generator:
        """The generator, to draw from at once; do not keep it."""
        self.wait()
        self._state = None
        return self._generator

    @contextmanager
    def drawing_beside(self) -> Iterator[None]:
        """Return a block in which another thread may draw; it ends when all is drawn."""
        before, self._may_draw_beside = self._may_draw_beside, True
        try:
            yield
        finally:
            self._may_draw_beside = before
            self.wait()

    @property
    def at_work(self) -> bool:
        """True if another thread may still draw."""
        return self._drawer is not None

    def beside(self, draw: Callable[[np.random.Generator], None]) -> None:
        """Call `draw` with the generator: within `drawing_beside` in another thread, after earlier
        calls. Whoever draws next waits for it.
        """
        if not self._may_draw_beside:
            draw(self.generator)
            return
        self._drawer = self._drawer or ThreadPoolExecutor(1, "caffepy-draw")
        self._state = None
        self._draws.append(self._drawer.submit(draw, self._generator))

    def wait(self) -> None:
        """Wait until all calls of `beside` have drawn, and end the thread."""
        if self._drawer:
            drawer, draws = self._drawer, self._draws
            self._drawer, self._draws = None, []
            drawer.shutdown()
            for draw in draws:
                draw.result()

    @property
    def state(self) -> dict[str, Any]:
        """State of the Mersenne Twister."""
        self.wait()
        if self._state is None:
            self._state = dict(self._generator.bit_generator.state)
        return self._state

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        set_twister(self.generator.bit_generator, state)
