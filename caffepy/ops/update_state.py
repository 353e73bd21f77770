"""The settings, limits and results of a parameter update, the same for both back ends."""

from enum import IntEnum
from typing import NamedTuple

from caffepy.device.blob import Array

Number = float | Array
"""A number, or an array without axes that is read when an operation runs."""


class Segments(NamedTuple):
    """Segment s ends before element `ends[s]`; its learning rate is `rate * rates[s]`, its decay
    `decay * decays[s]`.

    The gradient that a rule sees is `scale * g + decay * w`, with `l1` `scale * g + decay *
    sign(w)`. If `go` is 0 nothing changes.
    """

    ends: Array
    rates: Array
    decays: Array
    scale: Number
    l1: bool
    rate: Number = 1.0
    decay: Number = 1.0
    go: Number = 1.0


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
