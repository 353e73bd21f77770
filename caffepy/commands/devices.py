"""The devices that a command computes on: what --gpu, --cpu and a solver's solver_mode ask for.

Each choice is logged in Caffe's words.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from caffepy import ops
from caffepy.core.errors import DeviceError, UsageError
from caffepy.device.cuda import CudaDevice
from caffepy.device.device import Device
from caffepy.device.gpus import check_gpu, gpu_numbers
from caffepy.proto.caffe_pb2 import SolverParameter
from caffepy.proto.text import locate_field

log = logging.getLogger(__name__)


def choose_device(gpu: str | None, threads: int | None = None) -> Device:
    """Return the first GPU of a list such as "0,1" or "all", the CPU for None.

    `threads` is the number of CPU threads.
    """
    _warn_if_empty(gpu)
    device = CudaDevice(gpu_numbers(gpu)[0]) if gpu else Device()
    if threads:
        ops.backend(device).set_num_threads(threads)
    if isinstance(device, CudaDevice):
        log.info("Use GPU with device ID %d", device.index)
        log.info("GPU device name: %s", device.name)
    else:
        log.info("Use CPU.")
    return device


def choose_for_test(gpu: str | None, cpu: int | None) -> list[Device]:
    """Return the devices that share the batches of a test: these GPUs, or the CPU `cpu` times."""
    _check_one_kind(gpu, cpu)
    if max(cpu or 0, len(gpu_numbers(gpu)) if gpu else 0) < 2:
        return [choose_device(gpu)]
    return _logged(_several(gpu, cpu))


def choose_for_training(
    gpu: str | None, cpu: int | None, param: SolverParameter, path: str
) -> list[Device]:
    """Return the device of each solver that trains: these GPUs, or the CPU `cpu` times.

    With neither, the GPU of a solver that says solver_mode: GPU itself, else the CPU, as in Caffe's
    tool. `path` is the solver's file.
    """
    _check_one_kind(gpu, cpu)
    _warn_if_empty(gpu)
    index = _solvers_gpu(param)
    if gpu or cpu or index is None:
        return _logged(_several(gpu, cpu or 1))
    with _asked_for_by(path, index):
        return _logged([CudaDevice(index)])


def check_solver_mode(param: SolverParameter, path: str) -> None:
    """Raise DeviceError if the file `path` asks for a GPU by solver_mode that is not there."""
    index = _solvers_gpu(param)
    if index is not None:
        with _asked_for_by(path, index):
            check_gpu(index)


def _solvers_gpu(param: SolverParameter) -> int | None:
    if not param.HasField("solver_mode") or param.solver_mode != SolverParameter.GPU:
        return None
    return param.device_id if param.HasField("device_id") else 0


@contextmanager
def _asked_for_by(path: str, index: int) -> Iterator[None]:
    try:
        yield
    except DeviceError as error:
        raise DeviceError(
            f"solver_mode: GPU asks for GPU {index}, but {error.message}; or set solver_mode: CPU, "
            "or give --cpu",
            locate_field(path, "solver_mode"),
        ) from None


def _warn_if_empty(gpu: str | None) -> None:
    if gpu == "":
        log.warning("--gpu is empty: it names no GPU")


def _check_one_kind(gpu: str | None, cpu: int | None) -> None:
    if gpu and cpu:
        raise UsageError("Give --gpu or --cpu, not both.")


def _several(gpu: str | None, cpu: int | None) -> list[Device]:
    if not gpu:
        return [Device() for _ in range(cpu or 0)]
    numbers = gpu_numbers(gpu)
    for number in numbers:
        if numbers.count(number) > 1:
            raise UsageError(f"GPU {number} is named twice")
    return [CudaDevice(number) for number in numbers]


def _logged(devices: list[Device]) -> list[Device]:
    gpus = [device for device in devices if isinstance(device, CudaDevice)]
    if not gpus:
        log.info("Use CPU.")
        return devices
    log.info("Using GPUs %s", ", ".join(str(device.index) for device in gpus))
    for device in gpus:
        log.info("GPU %d: %s", device.index, device.name)
    return devices
