import json
import os
from pathlib import Path

import pytest

from caffepy.cli import main
from caffepy.commands import check_files
from caffepy.commands.check_files import FileInfo, check_file, files_in
from tests.nets import library

NET = """
layer { name: "in" type: "Input" top: "x" input_param { shape { dim: 2 dim: 3 dim: 8 dim: 8 } } }
layer { name: "ip" type: "InnerProduct" bottom: "x" top: "y" inner_product_param { num_output: 5 } }
"""
SOLVER = 'net: "%s" base_lr: 0.1 lr_policy: "fixed" max_iter: 1'
FILES = {
    "a/good.prototxt": NET,
    "a/wrong.prototxt": NET.replace("InnerProduct", "InnerPrduct"),
    "b/also.pt": NET,
    "b/map.prototxt": 'item { name: "dog" label: 1 display_name: "dog" }',
    "b/odd.ptototxt": "colour: 3",
    "b/notes.txt": "colour: 3",
    "solver.prototxt": SOLVER % "nowhere.prototxt",
    "worse.prototxt": SOLVER.replace("fixed", "fxed"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "torch.pt").write_bytes(b"PK\x03\x04 data.pkl")
    return tmp_path


def told(file: str) -> FileInfo:
    return check_file(file, lambda kind: None)


def test_prototxts_below_folders_are_found_once(folder: Path) -> None:
    os.mkfifo(folder / "pipe.prototxt")
    files = list(files_in([str(folder), str(folder / "a/good.prototxt"), str(folder / "none")]))
    assert [Path(file).relative_to(folder).as_posix() for file in files] == [
        "solver.prototxt",
        "worse.prototxt",
        "a/good.prototxt",
        "a/wrong.prototxt",
        "b/also.pt",
        "b/map.prototxt",
        "b/odd.ptototxt",
        "none",
    ]


def test_what_comes_of_a_file(folder: Path) -> None:
    good = told(str(folder / "a/good.prototxt"))
    assert good == FileInfo(good.file, "net", True, None, 2, 965)
    assert good.text() == f"{good.file}: net: ok, 2 layers, 965 parameters"
    wrong = told(str(folder / "a/wrong.prototxt"))
    assert not wrong.ok
    assert f'{wrong.file}:3:1: layer "ip" (InnerPrduct): unknown layer type' in wrong.text()
    assert told(str(folder / "b/map.prototxt")).kind == "label map"
    for text in (FILES["b/odd.ptototxt"], 'name: "DPU" type: "DPU" batch: 4'):
        (folder / "b/odd.ptototxt").write_text(text)
        odd = told(str(folder / "b/odd.ptototxt"))
        assert odd.kind == "other"
        assert "neither a net nor a solver" in str(odd.error)
    assert "no such file" in str(told(str(folder / "none")).error)
    assert told(str(folder / "worse.prototxt")).error is not None
    solver = told(str(folder / "solver.prototxt"))
    assert (solver.kind, solver.ok, solver.layers) == ("solver", True, None)
    own = SOLVER.replace('net: "%s"', "train_net_param { %s }" % NET)
    (folder / "own.prototxt").write_text(own)
    assert told(str(folder / "own.prototxt")).parameters == 965


UNREAD = """
layer { name: "in" type: "Input" top: "a" top: "b" top: "c" input_param {
  shape { dim: 1 dim: 8 } shape { dim: 1 dim: 8 } shape { dim: 1 dim: 2 dim: 8 } } }
layer { name: "out" type: "DetectionOutput" bottom: "a" bottom: "b" bottom: "c" top: "d"
  detection_output_param { num_classes: 4 save_output_param { label_map_file: "none" } } }
layer { name: "x" type: "Silence" bottom: "d" include { phase: TRAIN } }
"""


def test_warnings_are_told_once_with_their_file(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "a/unread.prototxt").write_text(UNREAD)
    monkeypatch.setattr(check_files, "cores", lambda: 1)
    assert main.run(["check", str(folder / "a"), "--json"]) == 3
    good, unread, wrong = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert unread["ok"]
    assert [len(found["warnings"]) for found in (good, unread, wrong)] == [0, 1, 0]
    assert unread["warnings"][0].startswith("label_map_file none is not there; it is not read")
    first, second = told(unread["file"]).text().splitlines()
    assert first == f"{unread['file']}: net: ok, 3 layers, 0 parameters"
    assert second == f"{unread['file']}: net: warning: {unread['warnings'][0]}"


def test_a_bug_in_one_file_is_no_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(check_files, "inspect", fail)
    error = str(told(str(folder / "a/good.prototxt")).error)
    assert error.endswith("a bug of caffepy: ZeroDivisionError: oh")


def test_nets_that_hang_or_crash(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import os, time\nclass Layer:\n  def setup(self, b, t): print('hm'); %s\n  def reshape(self, b, t): pass\n  def forward(self, b, t): pass\n"
    bodies = {
        "hangs": "time.sleep(600)",
        "burns": "[None for _ in iter(int, 1)]",
        "crashes": "os._exit(9)",
    }
    for name, line in bodies.items():
        (folder / f"b/{name}.py").write_text(code % line)
        layer = library.layer(
            "Python", "p", "", f'python_param {{ module: "{name}" layer: "Layer" }}'
        )
        (folder / f"b/{name}.prototxt").write_text(layer)
    monkeypatch.setattr(check_files, "SECONDS", 2.0)
    monkeypatch.setattr(check_files, "cores", lambda: 1)
    assert main.run(["check", str(folder / "a"), str(folder / "b"), "--json"]) == 3
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert set(lines[0]) == {"file", "kind", "ok", "error", "layers", "parameters", "warnings"}
    errors = {Path(line["file"]).name: line["error"] or "" for line in lines}
    assert [Path(line["file"]).name for line in lines if line["ok"]] == [
        "good.prototxt",
        "also.pt",
        "map.prototxt",
    ]
    assert "ends the process (exit code 9)" in errors["crashes.prototxt"]
    assert "takes more than 2 seconds" in errors["hangs.prototxt"]
    assert "takes more than 2 seconds" in errors["burns.prototxt"]
    assert "neither" in errors["odd.ptototxt"]


@pytest.mark.parametrize(
    ("own", "wall", "counts"),
    [
        (0.5, 0.5, 0.5),  # it computes
        (0.05, 0.5, 0.05),  # and shares its core with nine others
        (0.001, 0.5, 0.5),  # it waits
        (4, 0.5, 0.5),  # it has eight threads
    ],
)
def test_what_counts_of_the_time_for_a_net(own: float, wall: float, counts: float) -> None:
    assert check_files.counted(own, wall) == counts


def test_several_files_that_are_right(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_files, "cores", lambda: 1)
    assert main.run(["check", str(folder / "a/good.prototxt"), "lenet", "--synthetic"]) == 0
    first, second, last = capsys.readouterr().out.splitlines()
    assert first.endswith("good.prototxt: net: ok, 2 layers, 965 parameters")
    assert second.endswith("431,080 parameters")
    assert last == "2 files, 0 with an error"


def test_a_folder_without_prototxts_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["check", str(tmp_path)]) == 2
    assert "no prototxt lies below" in capsys.readouterr().err
