import json
import sys
from pathlib import Path

import pytest

from caffepy.cli import main
from caffepy.device.gpus import import_cupy
from tests import fake_cupy

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def machine(tmp_path: Path):
    """Writes a description of devices and returns its path."""

    def write(**fields: object) -> str:
        path = tmp_path / "machine.json"
        path.write_text(json.dumps(fields))
        return str(path)

    return write


def test_the_tree_the_access_and_the_schedules_of_a_simulated_machine(
    machine, capsys: Captured
) -> None:
    assert main.run(["device-pairs", "--simulate", machine(devices=[0, 1, 2, 3])]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("GPUs pairs 0:1, 2:3, 0:2\n0\n├── 1\n└── 2\n    └── 3\n")
    assert "\n1 P . P P\n" in shown
    assert "tree: 4 levels\n  0 += 1, 2 += 3\n  0 += 2\n  2 = 0\n  1 = 0, 3 = 2\n" in shown
    assert "muji: 4 levels" in shown
    assert "flat: 4 levels" in shown


def test_what_auto_takes_is_told(machine, capsys: Captured) -> None:
    assert main.run(["device-pairs", "--simulate", machine(devices=[0, 1])]) == 0
    shown = capsys.readouterr().out
    assert "nccl: NCCL chooses its own schedule\n\n--sync auto takes nccl: the fastest" in shown
    assert main.run(["device-pairs", "--cpu", "4"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("Solvers pairs 0:1, 2:3, 0:2\n")
    told = "NCCL is for GPUs; there is a schedule for 4 devices joined like this"
    assert f"nccl: NCCL is for GPUs\n\n--sync auto takes muji: {told}\n" in shown
    assert main.run(["device-pairs", "--cpu", "3", "--json"]) == 0
    sync = json.loads(capsys.readouterr().out)["sync"]
    assert sync == {"auto": "tree", "without_nccl": "NCCL is for GPUs"}


def test_without_a_gpu_other_ways_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert main.run(["device-pairs"]) == 6
    told = "(without GPUs, --cpu N or --simulate FILE shows schedules)\n"
    assert capsys.readouterr().err.endswith(told)


def test_as_json_with_edges_that_go_through_the_host(machine, capsys: Captured) -> None:
    description = machine(
        devices=[3, 5, 6], boards=[None, 1, 1], access=[[0, 0, 0], [0, 0, 1], [0, 1, 0]]
    )
    assert main.run(["device-pairs", "--simulate", description, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["pairs"] == [[-1, 3], [5, 6], [3, 5]]
    assert told["schedules"]["muji"] is None
    assert told["schedules"]["tree"][:2] == [[["add", 6, 5, False]], [["add", 5, 3, True]]]
    assert told["speeds"] == []


def test_what_is_told_as_json_can_be_simulated(machine, capsys: Captured) -> None:
    description = machine(
        devices=[3, 5, 6], boards=[None, 1, 1], access=[[0, 0, 0], [0, 0, 1], [0, 1, 0]]
    )
    assert main.run(["device-pairs", "--simulate", description, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert main.run(["device-pairs", "--simulate", machine(**told), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == told


def test_what_joins_the_devices_is_told_if_it_is_known(machine, capsys: Captured) -> None:
    description = machine(devices=[0, 1], links=[[None, "NV18"], ["NV18", None]])
    assert main.run(["device-pairs", "--simulate", description]) == 0
    assert "\n        0    1\n   0    . NV18\n   1 NV18    .\n" in capsys.readouterr().out
    assert main.run(["device-pairs", "--simulate", description, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["links"] == [[None, "NV18"], ["NV18", None]]
    assert main.run(["device-pairs", "--simulate", machine(devices=[0, 1])]) == 0
    assert "Links" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"devices": [0, 0]}, "device 0 is named twice"),
        ({"devices": []}, "no device is named"),
        ({"devices": [0, 1], "access": [[0, 1]]}, "2 rows of 2"),
        ({"devices": ["a"]}, "whole numbers"),
        ({"device": [0]}, 'must be an object with "devices"'),
        (
            {"devices": [0], "acess": 1},
            'there is no "acess", did you mean "access"? (known: devices, boards',
        ),
        ({"devices": [0], "access": "x"}, "list of rows"),
        ({"devices": [0, 1], "access": [["yes", "no"], ["no", "yes"]]}, "rows of 0 and 1"),
        ({"devices": [0, 1], "access": 2}, "rows of 0 and 1"),
        ({"devices": [0, 1], "boards": [[1], [1]]}, '"boards" must be a list of whole numbers'),
        ({"devices": [0, 1], "links": [[None, "NV4"]]}, '"links" must be 2 rows of 2 texts'),
        ({"devices": [0], "links": [[4]]}, '"links" must be 1 rows of 1 texts'),
    ],
)
def test_a_description_that_does_not_fit(
    machine, capsys: Captured, fields: dict[str, object], message: str
) -> None:
    description = machine(**fields)
    assert main.run(["device-pairs", "--simulate", description]) == 3
    shown = capsys.readouterr().err
    assert message in shown
    assert description in shown


def test_what_is_no_json_or_no_file(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "x.json").write_text("{")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    assert main.run(["device-pairs", "--simulate", str(tmp_path / "deep.json")]) == 3
    assert "deep.json is not JSON" in capsys.readouterr().err
    assert main.run(["device-pairs", "--simulate", str(tmp_path / "x.json")]) == 3
    assert main.run(["device-pairs", "--simulate", str(tmp_path / "y.json")]) == 3
    assert main.run(["device-pairs", "--simulate", "m.json", "--measure"]) == 2
    shown = capsys.readouterr().err
    assert "is not JSON" in shown
    assert "cannot read" in shown


def test_the_gpus_of_a_machine(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    fake_cupy.install(monkeypatch, gpus=2)
    import_cupy().cuda.runtime.deviceCanAccessPeer = lambda a, b: True
    assert main.run(["device-pairs"]) == 0
    assert capsys.readouterr().out.startswith("GPUs pairs 0:1\n")
