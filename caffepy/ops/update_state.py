"""The limits and results of a parameter update, the same for both back ends."""

from enum import IntEnum
from typing import NamedTuple


class Limits(NamedTuple):
    """Settings of the check before an update.

    `clip` is the largest gradient norm, below 0 for no clipping. An iteration accumulates `passes`
    passes (iter_size). `loss_scale` is the initial dynamic loss scale of float16: if a gradient is
    not finite the update is skipped and the scale halved; after PATIENCE updates it is doubled.
    """

    clip: float
    passes: int
    loss_scale: float | None = None


PATIENCE = 2000
LEAST_SCALE, MOST_SCALE = 1.0, 2.0**24


class StepStatus(IntEnum):
    """The end of an iteration."""

    DONE = 0
    SKIPPED = 1  # gradients overflowed: no update, the loss scale is halved
    STOPPED = 2  # non-finite loss, bad data or an abort: no update from this iteration on


class StepResult(NamedTuple):
    """Result of an iteration: mean loss, gradient norm (0 if nothing needs it), clipping factor,
    loss scale of the next iteration, status.
    """

    loss: float
    norm: float
    factor: float
    loss_scale: float
    status: StepStatus
