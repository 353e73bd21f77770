"""The precisions in which a GPU can compute, and the layout of activations in each. Importable
without a GPU.
"""

import os

import numpy as np

from caffepy.core.errors import ConfigError
from caffepy.device.blob import PLAIN, Layout

STORAGE = {"fp32": "float32", "tf32": "float32", "bf16": "uint16", "fp16": "float16"}
"""The element type of activations and their gradients; uint16 stands for bfloat16, which numpy
lacks.
"""

PRECISIONS = tuple(STORAGE)


def default() -> str:
    """Return CAFFEPY_PRECISION, or "tf32" if it is not set (factors rounded to 10 bits, sums in
    float32).
    """
    return checked(os.environ.get("CAFFEPY_PRECISION") or "tf32")


def checked(precision: str) -> str:
    """Return the precision; ConfigError if it is none of PRECISIONS."""
    if precision not in PRECISIONS:
        raise ConfigError(f'unknown precision "{precision}"; choose from {", ".join(PRECISIONS)}')
    return precision


def preferred_layout(precision: str) -> Layout:
    """Return the preferred layout: Caffe's in fp32, for comparisons, else channels last."""
    return PLAIN if precision == "fp32" else Layout(np.dtype(STORAGE[precision]), True)
