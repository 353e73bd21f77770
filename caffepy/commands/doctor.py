"""`caffepy doctor`: the requirements of a GPU, whether they are met, and what to do if not."""

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy import ops
from caffepy.core.errors import DeviceError
from caffepy.device import cublas, cudnn, gpus
from caffepy.device.cuda import CudaDevice
from caffepy.device.device import Device

OK, MISSING, WRONG = "ok", "missing", "wrong"
FOR_GPUS = f"for GPUs: {gpus.INSTALL}"
TOLERANCE = 5e-3  # of the largest value: factors of products may be rounded to 10 bits


@dataclass(frozen=True)
class Finding:
    """One check; its state is "ok", "missing" or "wrong"."""

    name: str
    state: str
    details: str
    remedy: str = ""


@dataclass(frozen=True)
class Health:
    """All findings."""

    findings: list[Finding]

    @property
    def works(self) -> bool:
        """True if everything that is installed works."""
        return not any(finding.state == WRONG for finding in self.findings)

    def table(self) -> str:
        """Return a line a finding; the remedy in the line below, once if several need the same."""
        width = max(len(finding.name) for finding in self.findings)
        lines, shown = [], {""}
        for finding in self.findings:
            lines.append(f"{finding.name:{width}}  {finding.state:7}  {finding.details}".rstrip())
            if finding.remedy not in shown:
                lines.append(f"{'':{width}}  {'':7}  -> {finding.remedy}")
                shown.add(finding.remedy)
        return "\n".join(lines)

    def json(self) -> str:
        """Return an object: whether all works, and the findings."""
        return json.dumps({"works": self.works, **asdict(self)})


def examine() -> Health:
    """Run all checks, the GPUs last; raise nothing."""
    parts = (_kernel_cache, _driver, _cupy, _cuda, _cudnn, _cublas, _nccl)
    return Health([finding for part in parts for finding in part()] + list(_gpus()))


def _kernel_cache() -> Iterator[Finding]:
    from caffepy.ops.cpu.compiler import folder_to_write

    name = "CPU kernel cache"
    try:
        yield Finding(name, OK, str(folder_to_write()))
    except OSError:
        details = "no folder to keep compiled kernels in: every start compiles them anew"
        yield Finding(name, MISSING, details, "set NUMBA_CACHE_DIR to a folder that can be written")


def _driver() -> Iterator[Finding]:
    cuda = gpus.cuda_of_driver()
    if cuda:
        details = ", ".join(
            filter(None, (gpus.driver_version(), f"up to CUDA {gpus.cuda_version(cuda)}"))
        )
        yield Finding("NVIDIA driver", OK, details)
    else:
        yield Finding("NVIDIA driver", MISSING, gpus.NO_DRIVER, "not needed on the CPU")


def _cupy() -> Iterator[Finding]:
    try:
        yield Finding("CuPy", OK, str(gpus.import_cupy().__version__))
    except DeviceError as error:
        yield _failed("CuPy", "cupy", error)


def _cuda() -> Iterator[Finding]:
    try:
        built = gpus.cuda_of_cupy()
    except Exception:  # CuPy's own line says why
        yield Finding("CUDA runtime", MISSING, "comes with CuPy", FOR_GPUS)
        return
    driver = gpus.cuda_of_driver()
    if driver and driver // 1000 < built // 1000:
        yield Finding("CUDA runtime", WRONG, gpus.cuda_version(built), gpus.too_old(driver, built))
    else:
        yield Finding("CUDA runtime", OK, gpus.cuda_version(built))


def _cudnn() -> Iterator[Finding]:
    try:
        yield Finding("cuDNN", OK, _dotted(cudnn.version()))
    except DeviceError as error:
        if cudnn.wheel():
            yield Finding("cuDNN", WRONG, str(error.__cause__), gpus.INSTALL)
        else:
            yield Finding("cuDNN", MISSING, "not installed", FOR_GPUS)


def _cublas() -> Iterator[Finding]:
    try:
        yield Finding("cuBLAS", OK, cublas.version())
    except DeviceError as error:
        yield _failed("cuBLAS", "cupy", error.__cause__ or error)


def _nccl() -> Iterator[Finding]:
    try:
        yield Finding("NCCL", OK, _dotted(gpus.nccl_version()))
    except DeviceError as error:
        yield _failed("NCCL", "cupy", error)
    except ImportError as error:
        yield Finding("NCCL", MISSING, f"not found ({gpus.last_line(error)})", FOR_GPUS)


def _dotted(number: int) -> str:
    return f"{number // 10000}.{number % 10000 // 100}.{number % 100}"


def _failed(name: str, module: str, error: BaseException) -> Finding:
    """Return a finding: missing if the module is not installed, else wrong."""
    if importlib.util.find_spec(module) is None:
        return Finding(name, MISSING, "not installed", FOR_GPUS)
    return Finding(name, WRONG, gpus.last_line(error), gpus.INSTALL)


def _gpus() -> Iterator[Finding]:
    try:
        count = gpus.count_gpus()
    except Exception as error:
        if importlib.util.find_spec("cupy") is None:
            yield Finding("GPUs", MISSING, "unknown without CuPy")
        else:
            yield Finding(
                "GPUs", WRONG if gpus.cuda_of_driver() else MISSING, gpus.last_line(error)
            )
        return
    if not count:
        yield Finding("GPUs", MISSING, "CUDA sees none")
    for index in range(count):
        for name, look in (f"GPU {index}", _described), (f"GPU {index} self-test", _tested):
            try:
                yield Finding(name, OK, look(index))
            except Exception as error:  # a broken installation fails in many ways
                advice = "see what is missing or wrong above; is another program using it?"
                yield Finding(name, WRONG, gpus.last_line(error), advice)


def _described(index: int) -> str:
    properties = gpus.gpu_properties(index)
    free, total = (size / (1 << 30) for size in gpus.gpu_memory(index))
    capability = f"compute capability {properties['major']}.{properties['minor']}"
    return f"{properties['name']}, {capability}, {free:.1f} of {total:.1f} GiB free"


def _tested(index: int) -> str:
    """Compare a copy, a product and a convolution with the CPU's; DeviceError if they differ."""
    start = perf_counter()
    device, rng = CudaDevice(index), np.random.default_rng(1)
    gpu, cpu = ops.backend(device), ops.backend(Device())

    def random(*shape: int) -> tuple[NDArray[np.float32], Any]:
        array = rng.standard_normal(shape, np.float32)
        there: Any = device.zeros(array.size, array.dtype)
        device.upload(array.reshape(-1), there)
        return array, there.reshape(shape)

    def compare(what: str, there: Any, expected: NDArray[np.float32], tolerance: float) -> None:
        error = float(np.abs(device.on_host(there) - expected).max() / np.abs(expected).max())
        if not error <= tolerance:
            difference = f"relative difference {error:.2g}"
            raise DeviceError(f"the GPU's {what} differs from the CPU's ({difference})")

    with device.scope():
        (a, a_there), (b, b_there), (_, out_there) = random(64, 48), random(48, 32), random(64, 32)
        compare("copy", a_there, a, 0.0)
        gpu.matmul(a_there, b_there, out_there)
        compare("product", out_there, a @ b, TOLERANCE)
        (x, x_there), (w, w_there) = random(2, 4, 9, 9), random(6, 4, 3, 3)
        y, y_there = random(2, 6, 9, 9)
        sizes = (x.shape, w.shape, ((1, 1),) * 3, 1, np.float32)
        cpu.Convolution(*sizes).forward(x, w, None, y)
        gpu.Convolution(*sizes).forward(x_there, w_there, None, y_there)
        compare("convolution", y_there, y, TOLERANCE)
    return f"copy, product and convolution agree with the CPU's ({perf_counter() - start:.1f} s)"
