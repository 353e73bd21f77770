"""Links between NVIDIA GPUs, as `nvidia-smi topo -m` names them: NVLinks, or the part of the host
that lies between them.

NVML knows them, which comes with the driver. It has its own numbers for GPUs, so they are looked up
by their address on the PCI bus.
"""

import ctypes
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from caffepy.device.gpus import import_cupy

log = logging.getLogger(__name__)

Links = Sequence[Sequence[str | None]]
"""The link between each two devices, by place, such as "NV18" or "SYS"; None for a device and
itself, or if it is not known.
"""

LIBRARY = "libnvidia-ml.so.1"
LEVELS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""nvmlGpuTopologyLevel_t: one bridge, several, the host bridge, one NUMA node, several of them."""

MOST_LINKS = 18
"""NVML_NVLINK_MAX_LINKS"""

NVLINK_CAPABILITY, OK, ACTIVE = 2, 0, 1
"""NVML_P2P_CAPS_INDEX_NVLINK, NVML_SUCCESS, NVML_FEATURE_ENABLED"""


class _Place(ctypes.Structure):
    """nvmlPciInfo_t"""

    _fields_ = (
        ("legacy_id", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("device_id", ctypes.c_uint),
        ("subsystem_id", ctypes.c_uint),
        ("id", ctypes.c_char * 32),
    )


class _UnknownError(Exception):
    """NVML does not know."""


UNKNOWN = (OSError, AttributeError, _UnknownError)
"""Errors if there is no NVML, if it is too old for a function, or if it does not know."""


def query(devices: Sequence[int], library: Any = None) -> Links | None:
    """Return the links between these GPUs; None without NVML. `library` replaces NVML."""
    try:
        nvml = library or ctypes.CDLL(LIBRARY)
        _call(nvml.nvmlInit_v2)
        try:
            runtime = import_cupy().cuda.runtime
            return _matrix(nvml, [str(runtime.deviceGetPCIBusId(device)) for device in devices])
        finally:
            with suppress(_UnknownError):
                _call(nvml.nvmlShutdown)
    except UNKNOWN as error:
        log.debug("links are not known: %s", error)
        return None


def _matrix(nvml: Any, ids: Sequence[str]) -> Links:
    by_id = nvml.nvmlDeviceGetHandleByPciBusId_v2
    handles = [_found(ctypes.c_void_p(), by_id, each.encode()) for each in ids]
    ends = [_ends(nvml, handle) for handle in handles]
    places = [_numbers(each) for each in ids]

    def link(a: int, b: int) -> str | None:
        direct = ends[a].count(places[b])
        if direct:
            return f"NV{direct}"
        pair = handles[a], handles[b]
        with suppress(_UnknownError):
            p2p_status = nvml.nvmlDeviceGetP2PStatus
            status = _found(ctypes.c_int(), p2p_status, *pair, NVLINK_CAPABILITY)
            through_switches = min(len(ends[a]), len(ends[b]))
            if status.value == OK and through_switches:
                return f"NV{through_switches}"
        with suppress(_UnknownError):
            level = _found(ctypes.c_int(), nvml.nvmlDeviceGetTopologyCommonAncestor, *pair)
            return LEVELS.get(level.value)
        return None

    return [[None if a == b else link(a, b) for b in range(len(ids))] for a in range(len(ids))]


def _ends(nvml: Any, handle: Any) -> list[tuple[int, int, int] | None]:
    """Return the PCI addresses at which a GPU's active NVLinks end; None where not known."""
    found: list[tuple[int, int, int] | None] = []
    for link in range(MOST_LINKS):
        with suppress(_UnknownError):
            if _found(ctypes.c_int(), nvml.nvmlDeviceGetNvLinkState, handle, link).value == ACTIVE:
                found.append(None)
                place = _found(_Place(), nvml.nvmlDeviceGetNvLinkRemotePciInfo_v2, handle, link)
                found[-1] = place.domain, place.bus, place.device
    return found


def _numbers(bus_id: str) -> tuple[int, int, int]:
    """Domain, bus and device of CUDA's "0000:1b:00.0"."""
    domain, bus, rest = bus_id.split(":")
    return int(domain, 16), int(bus, 16), int(rest.partition(".")[0], 16)


def _found(into: Any, function: Callable[..., int], *arguments: Any) -> Any:
    """Call a function with a pointer to `into` as its last argument; return `into`."""
    _call(function, *arguments, ctypes.byref(into))
    return into


def _call(function: Callable[..., int], *arguments: Any) -> None:
    status = function(*arguments)
    if status != OK:
        raise _UnknownError(f"{getattr(function, '__name__', function)} returned {status}")
