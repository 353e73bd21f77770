"""In what numbers a GPU computes, and whether sums may change from run to run: read when a plan is
made.

Parameters, their gradients, statistics, losses and sums are float32 in every precision.
"""

import os

from caffepy.ops.precisions import checked, default

_precision: str | None = None
_deterministic: bool | None = None


def get() -> str:
    """One of PRECISIONS, at first the default."""
    global _precision
    if _precision is None:
        _precision = default()
    return _precision


def set(precision: str) -> None:
    """Use this precision for every product that is planned from now on."""
    global _precision
    _precision = checked(precision)


def deterministic() -> bool:
    """Whether only plans are taken that sum in a fixed order; at first CAFFEPY_DETERMINISTIC (0 or
    1), else no.
    """
    if _deterministic is None:
        set_deterministic(os.environ.get("CAFFEPY_DETERMINISTIC", "") not in ("", "0"))
    assert _deterministic is not None
    return _deterministic


def set_deterministic(yes: bool) -> None:
    """Keep to plans that sum in a fixed order, chosen without timing, from now on."""
    global _deterministic
    _deterministic = yes
