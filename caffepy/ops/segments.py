"""How the parts of flat parameter arrays are updated, in the same terms for every back end and rule."""

from typing import NamedTuple

from caffepy.blob import Array


class Segments(NamedTuple):
    """Segment s ends before element `ends[s]` and has learning rate `rates[s]` and weight decay `decays[s]`.

    The gradient that a rule sees is `scale*g + decay*w`, with `l1` `scale*g + decay*sign(w)`.
    """

    ends: Array
    rates: Array
    decays: Array
    scale: float
    l1: bool
