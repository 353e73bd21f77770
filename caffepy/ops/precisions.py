"""The precisions in which a GPU can compute, and how activations lie in each; known without a GPU,
too.
"""

import os

import numpy as np

from caffepy.core.errors import ConfigError
from caffepy.device.blob import PLAIN, Layout

STORAGE = {"fp32": "float32", "tf32": "float32", "bf16": "uint16", "fp16": "float16"}
"""The element type of activations and their gradients; uint16 stands for bfloat16, a type that
numpy has not.
"""

PRECISIONS = tuple(STORAGE)


def default() -> str:
    """What CAFFEPY_PRECISION says, else "tf32" (factors rounded to 10 bits, sums in float32)."""
    return checked(os.environ.get("CAFFEPY_PRECISION") or "tf32")


def checked(precision: str) -> str:
    """The precision; ConfigError if it is none of PRECISIONS."""
    if precision not in PRECISIONS:
        raise ConfigError(f'unknown precision "{precision}"; choose from {", ".join(PRECISIONS)}')
    return precision


def preferred_layout(precision: str) -> Layout:
    """How activations lie best: as Caffe has them in fp32, which is for comparisons, else with
    their channels last.
    """
    return PLAIN if precision == "fp32" else Layout(np.dtype(STORAGE[precision]), True)
