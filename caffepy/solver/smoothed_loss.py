"""The smoothed loss that is displayed, as Caffe computes it."""

from typing import Any


class LossWindow:
    """Mean of the last `size` losses; `start` is the iteration of the first."""

    def __init__(self, size: int, start: int) -> None:
        self.size = size
        self.start = start
        self.losses: list[float] = []
        self.smoothed = 0.0

    def add(self, iteration: int, loss: float) -> None:
        """Add the loss of an iteration; it replaces the oldest of `size`."""
        count = len(self.losses) + 1
        if count <= self.size:
            self.losses.append(loss)
            self.smoothed = (self.smoothed * (count - 1) + loss) / count
        else:
            slot = (iteration - self.start) % self.size
            self.smoothed += (loss - self.losses[slot]) / self.size
            self.losses[slot] = loss

    def state(self) -> dict[str, Any]:
        """Return what `of` needs to rebuild this window."""
        return {"start": self.start, "losses": list(self.losses), "smoothed": self.smoothed}

    @classmethod
    def of(cls, size: int, state: dict[str, Any]) -> "LossWindow":
        """Return the window of this state; an empty one if its size was another."""
        window = cls(size, int(state["start"]))
        if len(state["losses"]) <= size:
            window.losses, window.smoothed = (
                [float(loss) for loss in state["losses"]],
                float(state["smoothed"]),
            )
        return window
