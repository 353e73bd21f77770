"""Arithmetic on one device. Every back end has the same functions with the same signatures."""

from types import ModuleType

from caffepy.device import Device
from caffepy.errors import DeviceError


def backend(device: Device) -> ModuleType:
    """The module of functions for the device's kind."""
    if device.kind == "cpu":
        from caffepy.ops import cpu

        return cpu
    if device.kind == "cuda":
        from caffepy.ops import cuda

        return cuda
    raise DeviceError(f'no arithmetic for devices of kind "{device.kind}"; choose cpu or cuda')
