"""The math mode of a device: the precision in which it computes, and True if it is deterministic.

A device takes the default when it is made. An operation computes in the mode of the device in whose
`scope` it is called, outside of any in the default. Parameters, their gradients, statistics, losses
and sums are float32 in every precision.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache

from caffepy.core.errors import ConfigError

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")


@dataclass
class MathMode:
    """Arithmetic of a device: in one of PRECISIONS; with `deterministic` only in fixed orders of
    sums, chosen without timing.
    """

    precision: str
    deterministic: bool


def checked(precision: str) -> str:
    """Return the precision; ConfigError if it is none of PRECISIONS."""
    if precision not in PRECISIONS:
        raise ConfigError(f'unknown precision "{precision}"; choose from {", ".join(PRECISIONS)}')
    return precision


@cache
def default() -> MathMode:
    """Return the mode of new GPUs, which may be written to.

    At first its precision is CAFFEPY_PRECISION, else "tf32" (factors rounded to 10 bits, sums in
    float32), and it is deterministic if CAFFEPY_DETERMINISTIC is set, but for "0".
    """
    return MathMode(
        checked(os.environ.get("CAFFEPY_PRECISION") or "tf32"),
        os.environ.get("CAFFEPY_DETERMINISTIC", "") not in ("", "0"),
    )


def new() -> MathMode:
    """Return a mode for one device, at first the default."""
    return replace(default())


class _Scope(threading.local):
    mode: MathMode | None = None


_scope = _Scope()


@contextmanager
def using(mode: MathMode) -> Iterator[None]:
    """Return the context in which the calling thread's operations compute in this mode."""
    before, _scope.mode = _scope.mode, mode
    try:
        yield
    finally:
        _scope.mode = before


def current() -> MathMode:
    """Return the mode in which the calling thread's operations compute."""
    return _scope.mode or default()
