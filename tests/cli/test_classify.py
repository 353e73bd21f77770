"""caffepy classify and detect as they are typed."""

import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

import caffepy
from caffepy.cli import main
from caffepy.commands.classify import Classification
from caffepy.commands.preprocess import EXTENSIONS, Preparation
from caffepy.data.datum import decode
from caffepy.data.sources import open_database
from tests.nets import library

DIGITS = Path(__file__).parents[1] / "golden" / "digits"
WEIGHTS = str(DIGITS / "digits_iter_500.caffemodel")
NET = ["--model", "digits", "--weights", WEIGHTS, "--input-scale", "0.00416667"]
Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with two digits, a 0 and a 4."""
    monkeypatch.chdir(tmp_path)
    source = open_database(str(DIGITS / "digits_test_lmdb"), "LMDB")
    for name in ("zero.png", "four.png"):
        cv2.imwrite(name, decode(source.read()[1])[0][0])
    source.close()
    return tmp_path


def test_a_table_and_json(capsys: Captured) -> None:
    assert main.run(["classify", "zero.png", "four.png", *NET, "--top", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[::2] for line in lines] == [
        ["image", "class"],
        ["zero.png", "0"],
        ["four.png", "4"],
    ]
    assert main.run(["classify", ".", *NET, "--json"]) == 0
    shown = capsys.readouterr()
    assert [one["predictions"][0]["class"] for one in json.loads(shown.out)] == [4, 0]
    assert shown.err == ""


def test_as_caffes_script_is_called(capsys: Captured) -> None:
    line = "classify zero.png scores.npy --model_def digits --center_only --images_dim 8,8 --mean_file= --raw_scale 255"
    assert (
        main.run([*line.split(), "--pretrained_model", WEIGHTS, "--input_scale", "0.00416667"]) == 0
    )
    scores = np.load("scores.npy")
    assert scores.shape == (1, 10)
    assert scores.argmax() == 0
    assert "zero.png" in capsys.readouterr().out


def test_scores_of_an_earlier_run_are_replaced_and_images_are_read(capsys: Captured) -> None:
    assert main.run(["classify", "zero.png", "scores.npy", *NET]) == 0
    assert main.run(["classify", "four.png", "scores.npy", *NET]) == 0
    assert np.load("scores.npy").argmax() == 4
    np.save("images.npy", np.zeros((2, 8, 8, 1)))
    before = Path("images.npy").read_bytes()
    capsys.readouterr()
    assert main.run(["classify", "four.png", "images.npy", *NET, "--top", "1"]) == 0
    assert "images.npy[1]" in capsys.readouterr().out
    assert Path("images.npy").read_bytes() == before


def test_an_image_that_cannot_be_read(capsys: Captured) -> None:
    Path("bad.png").write_text("bad")
    assert main.run(["classify", "bad.png", "four.png", *NET, "--top", "1"]) == 4
    shown = capsys.readouterr()
    assert "unreadable" in shown.out
    assert "four.png" in shown.out
    assert shown.err == "caffepy: error: bad.png: not an image that can be decoded (3 bytes)\n"


def test_images_that_cannot_be_read_are_reported_once(capsys: Captured) -> None:
    message = "gone.png: cannot be read: no such file or directory"
    assert main.run(["classify", "gone.png", *NET]) == 4
    assert capsys.readouterr() == ("", f"caffepy: error: {message}\n")
    assert main.run(["classify", "gone.png", *NET, "--json"]) == 4
    assert json.loads(capsys.readouterr().out) == [{"image": "gone.png", "error": message}]


def test_flags_become_values(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def classify(*values: Any, **flags: Any) -> Classification:
        given.append((values, flags))
        return Classification([])

    monkeypatch.setattr("caffepy.commands.classify.classify", classify)
    Path("n.prototxt").write_text("")
    line = "classify a b --model n.prototxt --weights w --labels l --top 3 --oversample --images-dim 4,5 --ext png,jpg"
    line += (
        " --mean-values 1,2,3 --raw-scale 2 --channel-swap 0,1,2 --batch 7 --gpu 2 --precision bf16"
    )
    assert main.run([*line.split(), "--threads", "1", "--no-progress", "--output", "o.npy"]) == 0
    values, flags = given[0]
    assert values == (("a", "b"), "n.prototxt", ("w",))
    assert flags == {
        "preparation": Preparation("", (1, 2, 3), None, 2.0, (0, 1, 2)),
        "images_dim": (4, 5),
        "oversample": True,
        "labels": "l",
        "top": 3,
        "extensions": ("png", "jpg"),
        "output": "o.npy",
        "batch": 7,
        "gpu": "2",
        "precision": "bf16",
        "threads": 1,
        "progress": False,
    }
    assert main.run(["classify", "--gpu", "a", "--model", "n.prototxt", "--weights", "w"]) == 0
    assert given[1][0][0] == ("a",)
    assert given[1][1]["gpu"] == "0"
    assert given[1][1]["oversample"] is None
    assert given[1][1]["extensions"] == EXTENSIONS


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("classify zero.png", "give --model FILE and --weights FILE"),
        ("classify --model digits --weights w", "INPUT"),
        (
            "classify zero.png --model digits --weights w --images-dim 4",
            "give a height and a width",
        ),
        (
            "classify zero.png --model digits --weights w --images-dim 0,4",
            "give a height and a width",
        ),
        ("detect w.csv", "give --model FILE and --weights FILE"),
        (
            "detect w.csv out.txt --model digits --weights w",
            'the extension of "out.txt" must name the format',
        ),
        (
            "detect w.csv --model digits --weights w --crop-mode all",
            "is not one of 'list', 'selective_search'",
        ),
    ],
)
def test_what_cannot_be_done(line: str, message: str, capsys: Captured) -> None:
    assert main.run(line.split()) == 2
    assert message in capsys.readouterr().err


def test_windows(capsys: Captured) -> None:
    net = library.inputs("in", **{"in": (2, 3, 4, 4)})
    net += library.inner_product("ip", "in", 2, filler="")
    Path("net.prototxt").write_text(net)
    caffepy.Net("net.prototxt", caffepy.TEST).save("zero.caffemodel")
    Path("w.csv").write_text("filename,xmin,ymin,xmax,ymax\nzero.png,0,0,7,7\nfour.png,1,1,6,6\n")
    line = [
        "detect",
        "w.csv",
        "--model-def",
        "net.prototxt",
        "--pretrained-model",
        "zero.caffemodel",
        "--context-pad",
        "1",
    ]
    assert main.run(line) == 0
    assert capsys.readouterr().out.splitlines()[2].split() == [
        "four.png",
        "1",
        "1",
        "6",
        "6",
        "0",
        "0",
    ]
    assert main.run([*line, "out.csv"]) == 0
    assert capsys.readouterr().out == ""
    assert Path("out.csv").read_text() == (
        "filename,ymin,xmin,ymax,xmax,class0,class1\nzero.png,0,0,7,7,0.0,0.0\nfour.png,1,1,6,6,0.0,0.0\n"
    )
    assert main.run([*line, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0] == {
        "filename": "zero.png",
        "ymin": 0,
        "xmin": 0,
        "ymax": 7,
        "xmax": 7,
        "prediction": [0, 0],
    }
