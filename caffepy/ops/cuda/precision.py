"""The precision of a GPU, and whether it is deterministic: read when a plan is made.

Parameters, their gradients, statistics, losses and sums are float32 in every precision.
"""

import os

from caffepy.ops.precisions import checked, default

_precision: str | None = None
_deterministic: bool | None = None


def get() -> str:
    """Return one of PRECISIONS, at first the default."""
    global _precision
    if _precision is None:
        _precision = default()
    return _precision


def set(precision: str) -> None:
    """Use this precision for every product that is planned from now on."""
    global _precision
    _precision = checked(precision)


def deterministic() -> bool:
    """Return True if only plans are used that sum in a fixed order; at first CAFFEPY_DETERMINISTIC
    (0 or 1), else False.
    """
    if _deterministic is None:
        set_deterministic(os.environ.get("CAFFEPY_DETERMINISTIC", "") not in ("", "0"))
    assert _deterministic is not None
    return _deterministic


def set_deterministic(yes: bool) -> None:
    """Use only plans that sum in a fixed order, chosen without timing, from now on."""
    global _deterministic
    _deterministic = yes
