"""--gpu, --cpu and --precision: with a CuPy that only pretends, and (marked gpu) on a real GPU."""

import json
import logging
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from caffepy import models
from caffepy.cli import main
from caffepy.commands.train import TrainOptions, train
from caffepy.core.errors import ConfigError, DeviceError, UsageError
from caffepy.device.cuda import CudaDevice
from caffepy.device.gpus import count_gpus, import_cupy
from tests import fake_cupy

Captured = pytest.CaptureFixture[str]
DIGITS = str(models.path("digits", "solver"))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Devices with which solvers are made; nothing is trained."""
    devices: list[Any] = []

    def solver(param: Any, *, device: Any, **_: Any) -> None:
        devices.append(device)
        raise ConfigError("made")

    monkeypatch.setattr("caffepy.commands.train.Solver", solver)
    return devices


def solver_file(folder: Path, more: str) -> str:
    path = folder / "solver.prototxt"
    path.write_text(
        f'net: "x" base_lr: 0.1 lr_policy: "fixed" max_iter: 1 snapshot_prefix: "x" {more}\n'
    )
    return str(path)


@pytest.mark.parametrize(
    ("more", "gpu", "index"),
    [
        ("", "1", 1),
        ("solver_mode: GPU", None, 0),
        ("solver_mode: GPU device_id: 1", None, 1),
        ("solver_mode: GPU device_id: 1", "0", 0),
        ("solver_mode: CPU", "1", 1),
    ],
)
def test_which_gpu_trains(
    more: str,
    gpu: str | None,
    index: int,
    folder: Path,
    opened: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fake_cupy.install(monkeypatch, gpus=2)
    caplog.set_level(logging.INFO, "caffepy.commands.devices")
    with pytest.raises(ConfigError, match="made"):
        train(TrainOptions(solver_file(folder, more), gpu=gpu))
    assert [(type(device), device.index) for device in opened] == [(CudaDevice, index)]
    assert caplog.messages == [f"Using GPUs {index}", f"GPU {index}: NVIDIA H200"]


@pytest.mark.parametrize(
    ("more", "cpu"), [("", False), ("device_id: 1", False), ("solver_mode: GPU", True)]
)
def test_when_the_cpu_trains(
    more: str, cpu: bool, folder: Path, opened: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "caffepy.commands.devices")
    with pytest.raises(ConfigError, match="made"):
        train(TrainOptions(solver_file(folder, more), cpu=cpu))
    assert [device.kind for device in opened] == ["cpu"]
    assert caplog.messages == ["Use CPU."]


def test_a_gpu_list_that_is_empty_is_told(
    folder: Path, opened: list[Any], capsys: Captured
) -> None:
    assert main.run(["train", "--solver", solver_file(folder, ""), "--gpu="]) == 3
    assert "--gpu is empty: it names no GPU" in capsys.readouterr().err
    assert [device.kind for device in opened] == ["cpu"]
    assert main.run(["train", "--solver", solver_file(folder, "")]) == 3
    assert "--gpu is empty" not in capsys.readouterr().err


def test_all_gpus_train(
    folder: Path, opened: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    fake_cupy.install(monkeypatch, gpus=2)
    caplog.set_level(logging.INFO, "caffepy.commands.devices")
    with pytest.raises(ConfigError, match="made"):
        train(TrainOptions(solver_file(folder, ""), gpu="all"))
    assert caplog.messages == ["Using GPUs 0, 1", "GPU 0: NVIDIA H200", "GPU 1: NVIDIA H200"]
    assert [device.index for device in opened] == [0]


def test_a_gpu_twice_and_words_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    fake_cupy.install(monkeypatch, gpus=2)
    assert main.run(["train", "-solver", DIGITS, "-gpu", "1,1"]) == 2
    assert "GPU 1 is named twice" in capsys.readouterr().err
    with pytest.raises(UsageError, match="neither"):
        train(TrainOptions(DIGITS, gpu="first"))


@pytest.mark.parametrize(
    ("command", "instead"),
    [
        ("test -model digits -weights w", "(without --gpu, the CPU computes)"),
        ("time -model digits", "(without --gpu, the CPU computes)"),
        ("train -solver digits", "(with --cpu instead of --gpu, the CPU computes)"),
        ("bench allreduce", "(without GPUs, --cpu N measures threads of the CPU)"),
    ],
)
def test_without_cupy(
    command: str, instead: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr("caffepy.device.gpus.cuda_of_driver", lambda: 13000)
    assert main.run([*command.split(), "-gpu", "all"]) == 6
    needs = "a GPU needs CuPy: pip install 'caffepy[cuda13]' (in a clone '.[cuda13]'), or cuda12"
    told = capsys.readouterr().err
    assert f"caffepy: error: {needs}" in told
    assert told.endswith(f"\n{instead}\n")


@pytest.mark.parametrize(
    ("driver", "built", "message"),
    [
        (0, 13000, "no NVIDIA driver is found: install one"),
        (
            12040,
            13000,
            "built for CUDA 13.0, but the NVIDIA driver goes up to CUDA 12.4: update the "
            "driver, or pip",
        ),
        (
            11080,
            12000,
            "built for CUDA 12.0, but the NVIDIA driver goes up to CUDA 11.8: update the driver$",
        ),
        (13000, 13000, r"CUDA finds no GPU \(cudaErrorNoDevice\); CUDA_VISIBLE_DEVICES is \"\"$"),
    ],
    ids=["no driver", "driver of CUDA 12", "driver of CUDA 11", "hidden"],
)
def test_what_keeps_cuda_from_working(
    driver: int, built: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_cupy.install(monkeypatch, error="cudaErrorNoDevice", driver=driver, built=built)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(DeviceError, match=message):
        count_gpus()


def test_a_cupy_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __init__(self, message: str) -> None:
            self.message = message

        def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
            if name == "cupy":
                raise ImportError(self.message)

    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(
        sys, "meta_path", [Broken("=====\nFailed to import\n  libnvrtc.so.13: no such file\n====")]
    )
    with pytest.raises(
        DeviceError,
        match=r"installed but cannot be loaded \(libnvrtc.so.13: no such file\): pip inst",
    ):
        import_cupy()
    monkeypatch.setattr(sys, "meta_path", [Broken("libcuda.so.1: cannot open shared object file")])
    with pytest.raises(DeviceError, match="no NVIDIA driver is found"):
        import_cupy()


def test_full_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cupy.install(monkeypatch)
    device = CudaDevice(0)
    with pytest.raises(DeviceError, match=r"the GPU's memory is full.*batch_size"), device.scope():
        raise fake_cupy.OutOfMemoryError("Out of memory allocating 2 bytes")


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_digits_on_a_gpu(precision: str, folder: Path, capsys: Captured) -> None:
    assert (
        main.run(
            ["train", "-solver", "digits", "-gpu", "0", "--precision", precision, "--no-progress"]
        )
        == 0
    )
    log = capsys.readouterr().err
    assert "Using GPUs 0" in log
    assert re.search(r"GPU 0: \w+", log)
    weights = sorted(folder.glob("digits_iter_*.caffemodel"))[-1]
    command = ["test", "-model", "digits", "-weights", str(weights), "-iterations", "3", "--json"]
    scores = []
    for more in ([], ["-gpu", "0", "--precision", precision]):
        assert main.run([*command, *more]) == 0
        shown = capsys.readouterr()
        scores.append(json.loads(shown.out)["outputs"]["accuracy"])
    assert "Use GPU with device ID 0" in shown.err
    assert "GPU device name: " in shown.err
    assert scores[0] == pytest.approx(scores[1], abs=0.01)
    assert scores[1] >= 0.97


@pytest.mark.gpu
def test_a_run_goes_on_on_the_other_device(folder: Path, capsys: Captured) -> None:
    more = ["--no-progress", "--precision", "fp32"]
    assert main.run(["train", "-solver", "digits", "-gpu", "0", *more]) == 0
    state = sorted(folder.glob("digits_iter_*.solverstate"))[0]
    assert main.run(["train", "-solver", "digits", "-snapshot", str(state), "--cpu", *more]) == 0
    assert "Use CPU." in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["lenet", "cifar10_quick", "caffenet"])
def test_timing_on_a_gpu(model: str, capsys: Captured) -> None:
    command = [
        "time",
        "-model",
        model,
        "--synthetic",
        "-iterations",
        "3",
        "-gpu",
        "0",
        "--json",
        "-minloglevel=1",
    ]
    assert main.run(command) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["images_per_s"] > 0
    assert all(np.isfinite([layer["forward"], layer["backward"]]).all() for layer in told["layers"])
