"""What decides on an update of parameters, in the same terms for every back end."""

from enum import IntEnum
from typing import NamedTuple


class Limits(NamedTuple):
    """How gradients are judged.

    `clip` is the largest norm that they may have, below 0 for any. An iteration adds up those of
    `passes` passes. With a `loss_scale` the losses' weights are multiplied by it, to begin with:
    where a gradient is not finite the update is left out and the scale halved, after PATIENCE
    updates it is doubled.
    """

    clip: float
    passes: int
    loss_scale: float | None = None


PATIENCE = 2000
LEAST_SCALE, MOST_SCALE = 1.0, 2.0**24


class StepStatus(IntEnum):
    """What became of an iteration."""

    DONE = 0
    SKIPPED = 1  # gradients overflowed: with a smaller loss scale the next ones will not
    STOPPED = 2  # something is wrong; from this iteration on nothing is updated


class StepResult(NamedTuple):
    """An iteration as it was judged: its mean loss, the norm of its gradients, what clipping
    multiplied them by.

    `loss_scale` is the one of the next iteration. The norm is 0 where nothing asks for it.
    """

    loss: float
    norm: float
    factor: float
    loss_scale: float
    status: StepStatus
