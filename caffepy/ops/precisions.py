"""The layout of activations in each precision of a GPU. Importable without a GPU."""

import numpy as np

from caffepy.device.blob import PLAIN, Layout

STORAGE = {"fp32": "float32", "tf32": "float32", "bf16": "uint16", "fp16": "float16"}
"""The element type of activations and gradients; uint16 stands for bfloat16, which numpy lacks."""


def preferred_layout(precision: str) -> Layout:
    """Return the preferred layout: Caffe's in fp32, for comparisons, else channels last."""
    return PLAIN if precision == "fp32" else Layout(np.dtype(STORAGE[precision]), True)
