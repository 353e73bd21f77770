from pathlib import Path
from typing import Any

import h5py
import pytest

from caffepy.cli import main
from caffepy.commands.extract_features import Feature
from caffepy.data.sources import open_database

pytestmark = pytest.mark.usefixtures("folder")

WEIGHTS = str(Path(__file__).parents[1] / "golden" / "digits" / "digits_iter_500.caffemodel")
Captured = pytest.CaptureFixture[str]


def test_caffes_arguments(capsys: Captured) -> None:
    assert main.run(["extract_features", WEIGHTS, "digits", "ip1,label", "a,b", "2", "lmdb"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line[0] in "IWEF"]
    assert [line.partition("] ")[2] for line in lines if "Compiling" not in line] == [
        "Using CPU",
        "Extracting Features",
        "Extracted features of 198 query images for feature blob ip1",
        "Extracted features of 198 query images for feature blob label",
        "Successfully extracted the features!",
    ]
    for name in "ab":
        source = open_database(name, "LMDB")
        assert len(source) == 198
        source.close()
    assert main.run(["extract_features", WEIGHTS, "digits", "ip1", "a", "2", "lmdb", "CPU"]) == 4
    assert "exists already; remove it or choose another name" in capsys.readouterr().err


def test_options() -> None:
    line = [
        "extract-features",
        "-model",
        "digits",
        "-weights",
        WEIGHTS,
        "-blob=ip1",
        "--blob",
        "label",
    ]
    assert main.run([*line, "-output", "f.h5", "-noprogress", "--minloglevel", "1"]) == 0
    with h5py.File("f.h5") as file:
        assert {name: len(rows) for name, rows in file.items()} == {"ip1": 297, "label": 297}


def test_both_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(
        "caffepy.commands.extract_features.extract_features",
        lambda *given, **more: calls.append((given, more)),
    )
    Path("n.prototxt").write_text("")
    assert (
        main.run(["extract_features", "w", "n.prototxt", "a,b", "x,y", "7", "leveldb", "GPU", "3"])
        == 0
    )
    line = "extract-features --model n.prototxt --weights w --blob a,b --output x --output y --batches 7 --gpu 3"
    assert main.run([*line.split(), "--backend", "leveldb"]) == 0
    assert calls[0] == calls[1]
    (model, weights, features), more = calls[0]
    assert (model, weights, more["batches"], more["gpu"]) == ("n.prototxt", ("w",), 7, "3")
    assert features == [Feature("a", "x", "leveldb"), Feature("b", "y", "leveldb")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("w digits ip1 a 2", "has 6 to 8 arguments, not 5"),
        ("w digits ip1 a 0 lmdb", 'The number of batches is 1 or more, not "0"'),
        ("w digits ip1 a 2 lmdb CUDA", 'come CPU or GPU and its number, not "CUDA"'),
        ("w digits ip1 a 2 lmbd", 'unknown kind of database "lmbd", did you mean "lmdb"?'),
        ("w digits ip1 a,b 2 lmdb", "must be equal, not 1 and 2"),
        ("w digits ip1 a 2 lmdb --batches 3", "not both"),
        ("--model digits --weights w --blob ip1", "give --blob NAME and --output PATH"),
        ("--model digits --blob ip1 --output a", "give --model FILE and --weights FILE"),
    ],
)
def test_what_cannot_be_done(line: str, message: str, capsys: Captured) -> None:
    assert main.run(["extract-features", *line.split()]) == 2
    assert message in capsys.readouterr().err
