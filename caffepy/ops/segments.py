"""The segments of flat parameter arrays and their update settings, the same for both back ends."""

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
