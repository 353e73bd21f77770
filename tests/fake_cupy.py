"""CuPy as it looks on machines that are not at hand: what it says of GPUs, drivers and memory."""

import sys
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

PROPERTIES = {
    "name": b"NVIDIA H200",
    "major": 9,
    "minor": 0,
    "totalGlobalMem": 150_000_000_000,
    "sharedMemPerBlock": 49152,
    "regsPerBlock": 65536,
    "warpSize": 32,
    "maxThreadsPerBlock": 1024,
    "maxThreadsDim": (1024, 1024, 64),
    "maxGridSize": (2147483647, 65535, 65535),
    "totalConstMem": 65536,
    "textureAlignment": 512,
    "multiProcessorCount": 132,
}
ATTRIBUTES = {11: 2147483647, 13: 1980000, 15: 1, 17: 0}


class CUDARuntimeError(RuntimeError):
    pass


class OutOfMemoryError(MemoryError):
    pass


def install(
    monkeypatch: pytest.MonkeyPatch,
    *,
    gpus: int = 1,
    error: str = "",
    driver: int = 13000,
    built: int = 13000,
) -> Any:
    """Put a CuPy that sees so many GPUs, or meets this error, in the place of the real one; returns
    it.
    """

    def count() -> int:
        if error:
            raise CUDARuntimeError(error)
        return gpus

    fake: Any = ModuleType("cupy")
    fake.__spec__ = ModuleSpec("cupy", None)
    fake.__version__ = "14.2.0"
    runtime = SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError,
        getDeviceCount=count,
        runtimeGetVersion=lambda: built,
        getDeviceProperties=lambda index: dict(PROPERTIES),
        deviceGetAttribute=lambda number, index: ATTRIBUTES[number],
        memGetInfo=lambda: (140 << 30, 141 << 30),
    )
    fake.cuda = SimpleNamespace(
        runtime=runtime,
        memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
        Device=lambda index: nullcontext(),
        Stream=lambda **_: nullcontext(),
    )
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setitem(sys.modules, "cupy.cuda", fake.cuda)
    monkeypatch.setattr("caffepy.device.gpus.cuda_of_driver", lambda: driver)
    return fake
