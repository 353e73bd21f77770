"""What `set_mode_cpu`, `set_device` and `set_random_seed` set: per thread, as in pycaffe."""

import threading

from caffepy.device import Device

_state = threading.local()


def device() -> Device:
    """The calling thread's device, on which nets are built."""
    if not hasattr(_state, "device"):
        _state.device = Device()
    current: Device = _state.device
    return current


def set_mode_cpu() -> None:
    """Build nets on the CPU from now on (the default)."""
    device()


def set_random_seed(seed: int) -> None:
    """Seed the calling thread's random numbers; call it before building nets."""
    device().seed(seed)
