"""Arithmetic on one device.

`protocol` is the contract and the place to start reading: every function with its shapes and
formula. The packages `cpu` (numba and BLAS) and `cuda` (cuDNN, cuBLAS and kernels) both fulfil it;
`backend(device)` returns the one for a device. `shapes_only.py` serves nets that are never run.
`objects.py` describes the classes in the contract, `update_state.py` the terms of an update.
"""

import logging
from typing import TYPE_CHECKING, cast

import numpy as np

from caffepy.core.errors import DeviceError
from caffepy.device.blob import PLAIN, Layout
from caffepy.device.device import Device
from caffepy.device.math_mode import checked

if TYPE_CHECKING:  # a start does without what only type checkers read
    from caffepy.ops.protocol.contract import Ops

log = logging.getLogger(__name__)

STORAGE = {"tf32": "float32", "bf16": "uint16", "fp16": "float16"}
"""The element type of activations and gradients; uint16 stands for bfloat16, which numpy lacks."""


def backend(device: Device) -> "Ops":
    """Return the functions for the device's kind: a module that mypy holds to the contract.

    DeviceError for a kind that is none of cpu, cuda and shapes only.
    """
    if device.kind == "cpu":
        from caffepy.ops import cpu

        return cpu
    if device.kind == "cuda":
        from caffepy.ops import cuda

        return cuda
    if device.kind == "shapes only":
        from caffepy.ops.shapes_only import ShapesOnly

        return cast("Ops", ShapesOnly(device.is_cuda))
    raise DeviceError(f'no arithmetic for devices of kind "{device.kind}"; choose cpu or cuda')


def preferred_layout(device: Device) -> Layout:
    """Return the preferred layout on the device: Caffe's in fp32, for comparisons, else channels
    last.
    """
    precision = device.math_mode.precision
    return PLAIN if precision == "fp32" else Layout(np.dtype(STORAGE[precision]), True)


def set_precision(device: Device, precision: str | None) -> None:
    """Set this GPU's precision; None changes nothing, and the CPU always computes in float32."""
    if precision and device.kind == "cuda":
        device.math_mode.precision = checked(precision)
    elif precision and precision != "fp32":
        log.warning("The CPU computes in float32: %s is for GPUs", precision)
