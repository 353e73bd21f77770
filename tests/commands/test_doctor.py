import importlib.util
import sys
from pathlib import Path

import pytest

from caffepy.commands import doctor
from caffepy.commands.doctor import MISSING, OK, WRONG, Finding, Health, examine
from caffepy.device import cublas, cudnn
from tests import fake_cupy


def findings() -> dict[str, Finding]:
    return {finding.name: finding for finding in examine().findings}


def test_a_machine_without_gpu_software_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(cudnn, "wheel", lambda: "")
    monkeypatch.setattr(doctor.gpus, "cuda_of_driver", lambda: 0)
    found = findings()
    assert found.pop("CPU kernel cache").state in (OK, MISSING)
    assert {finding.state for finding in found.values()} == {MISSING}
    assert list(found) == [
        "NVIDIA driver",
        "CuPy",
        "CUDA runtime",
        "cuDNN",
        "cuBLAS",
        "NCCL",
        "GPUs",
    ]
    assert "pip install 'caffepy[cuda13]'" in found["CuPy"].remedy


def test_cupy_for_a_newer_cuda_than_the_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cupy.install(monkeypatch, error="cudaErrorInsufficientDriver", driver=12040)
    found = findings()
    assert found["NVIDIA driver"].state == OK
    assert found["NVIDIA driver"].details.endswith("up to CUDA 12.4")
    assert found["CUDA runtime"].state == WRONG
    assert "pip install 'caffepy[cuda12]'" in found["CUDA runtime"].remedy
    assert found["GPUs"].state == WRONG


def test_cupy_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cupy.install(monkeypatch, error="cudaErrorInsufficientDriver", driver=0)
    found = findings()
    assert found["CuPy"] == Finding("CuPy", OK, "14.2.0")
    assert found["NVIDIA driver"].state == found["GPUs"].state == MISSING


def test_each_gpu_is_told_of_and_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cupy.install(monkeypatch, gpus=2)

    def test(index: int) -> str:
        if index == 1:
            raise RuntimeError("CUDNN_STATUS_NOT_INITIALIZED")
        return "all agree"

    monkeypatch.setattr(doctor, "_tested", test)
    found = findings()
    assert found["GPU 0"].details == "NVIDIA H200, compute capability 9.0, 140.0 of 141.0 GiB free"
    assert found["GPU 0 self-test"].state == OK
    assert found["GPU 1 self-test"].state == WRONG
    assert found["GPU 1 self-test"].details == "CUDNN_STATUS_NOT_INITIALIZED"


def test_a_library_that_is_installed_and_cannot_be_loaded_is_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(name: str) -> None:
        raise OSError("libcublas.so.13: cannot open shared object file")

    damaged = tmp_path / "libcudnn.so.9"
    damaged.write_text("?")
    monkeypatch.setattr(cudnn, "wheel", lambda: str(damaged))
    monkeypatch.setattr(cudnn, "library", cudnn.library.__wrapped__)
    monkeypatch.setattr(cublas, "cuda_library", fail)
    monkeypatch.setattr(cublas, "library", cublas.library.__wrapped__)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    for part, message in ((doctor._cudnn, str(damaged)), (doctor._cublas, "cannot open shared")):
        found = next(part())
        assert found.state == WRONG
        assert message in found.details


def test_no_place_for_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/dev/null/none")
    found = next(doctor._kernel_cache())
    assert found.state == MISSING
    assert "NUMBA_CACHE_DIR" in found.remedy


def test_a_remedy_that_several_need_is_told_once() -> None:
    health = Health([Finding("a", MISSING, "x", "do this"), Finding("b", MISSING, "y", "do this")])
    assert health.table().count("-> do this") == 1
