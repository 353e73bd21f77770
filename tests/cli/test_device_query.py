import json
import sys

import pytest

from caffepy.cli import main
from tests import fake_cupy

Captured = pytest.CaptureFixture[str]
CAFFES = """\
Device id:                     1
Major revision number:         9
Minor revision number:         0
Name:                          NVIDIA H200
Total global memory:           150000000000
Total shared memory per block: 49152
Total registers per block:     65536
Warp size:                     32
Maximum memory pitch:          2147483647
Maximum threads per block:     1024
Maximum dimension of block:    1024, 1024, 64
Maximum dimension of grid:     2147483647, 65535, 65535
Clock rate:                    1980000
Total constant memory:         65536
Texture alignment:             512
Concurrent copy and execution: Yes
Number of multiprocessors:     132
Kernel execution timeout:      No
"""


def test_without_gpus_asked_for_none_is_shown(capsys: Captured) -> None:
    assert main.run(["device_query"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("CPU: ")
    assert shown.out.count("\n") == 1
    assert "Querying GPUs" in shown.err
    assert main.run(["device-query", "--json", "-minloglevel=1"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["gpus"] == []
    assert shown.err == ""


def test_the_labels_are_caffes(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    fake_cupy.install(monkeypatch, gpus=2)
    assert main.run(["device-query", "-gpu", "1"]) == 0
    assert capsys.readouterr().out.partition("\n")[2] == CAFFES
    assert main.run(["device-query", "-gpu", "all"]) == 0
    assert capsys.readouterr().out.count("Device id: ") == 2


def test_json(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    fake_cupy.install(monkeypatch, gpus=2)
    assert main.run(["device-query", "-gpu", "0,1", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["gpus"]
    assert (first["id"], second["id"]) == (0, 1)
    assert first["name"] == "NVIDIA H200"
    assert first["maxThreadsDim"] == [1024, 1024, 64]


def test_gpus_that_are_not_there(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    fake_cupy.install(monkeypatch, gpus=1)
    assert main.run(["device-query", "-gpu", "1"]) == 6
    assert "there is no GPU 1: this machine has 1, numbered from 0" in capsys.readouterr().err
    fake_cupy.install(monkeypatch, gpus=0)
    assert main.run(["device-query", "-gpu", "all"]) == 6
    assert "this machine has no GPU" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr("caffepy.device.gpus.cuda_of_driver", lambda: 13000)
    assert main.run(["device-query", "-gpu", "all"]) == 6
    assert "error: a GPU needs CuPy: pip install 'caffepy[cuda13]'" in capsys.readouterr().err
    monkeypatch.setattr("caffepy.device.gpus.cuda_of_driver", lambda: 0)
    assert main.run(["device-query", "-gpu", "all"]) == 6
    assert "error: no NVIDIA driver is found: install one" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_real_gpu(capsys: Captured) -> None:
    assert main.run(["device-query", "-gpu", "0"]) == 0
    told = dict(line.split(":", 1) for line in capsys.readouterr().out.splitlines())
    assert told.keys() >= {line.split(":")[0] for line in CAFFES.splitlines()}
    assert int(told["Warp size"]) == 32
    assert int(told["Clock rate"]) > 0
    assert main.run(["device-query", "-gpu", "all", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gpus"][0]["totalGlobalMem"] > 1 << 30
