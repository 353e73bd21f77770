"""Windows of images, scored as pycaffe's Detector scores them."""

import csv
import json
from pathlib import Path

import cv2
import h5py
import numpy as np
import pytest

from caffepy import models
from caffepy.commands.detect import Detections, check_output, detect, read_windows
from caffepy.commands.preprocess import Preparation
from caffepy.core.errors import ConfigError, DataError, UsageError
from caffepy.net.weights import save_binary
from caffepy.pycaffe.classifier import Classifier
from caffepy.pycaffe.detector import Detector
from tests.commands.test_classify import COLOUR

WINDOWS = [
    ("a.png", 1, 2, 14, 12),
    ("b.png", 0, 0, 9, 9),
    ("a.png", 3, 0, 19, 15),
    ("a.png", 5, 5, 11, 11),
]  # xmin, ymin, xmax, ymax
HEAD = "filename,xmin,ymin,xmax,ymax\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with two images, a net and its weights, and windows in
    data/windows.csv.
    """
    monkeypatch.chdir(tmp_path)
    Path("net.prototxt").write_text(COLOUR.replace("dim: 10", "dim: 3"))
    save_binary(Classifier("net.prototxt", None)._net, "w.caffemodel")
    random = np.random.default_rng(2)
    Path("data").mkdir()
    for name, size in (("a.png", (16, 20)), ("b.png", (10, 12))):
        cv2.imwrite(f"data/{name}", random.integers(0, 256, (*size, 3), np.uint8))
    lines = [",".join(map(str, window)) for window in WINDOWS]
    Path("data/windows.csv").write_text(HEAD + "\n".join(lines) + "\n")
    return tmp_path


def expected(pad: int, preparation: bool = False) -> np.ndarray:
    mean = np.array([100.0, 110.0, 120.0]) if preparation else None
    net = Detector(
        "net.prototxt",
        "w.caffemodel",
        mean=mean,
        raw_scale=255,
        channel_swap=(2, 1, 0),
        context_pad=pad,
    )
    a = [(y0, x0, y1, x1) for name, x0, y0, x1, y1 in WINDOWS if name == "a.png"]
    b = [(y0, x0, y1, x1) for name, x0, y0, x1, y1 in WINDOWS if name == "b.png"]
    found = net.detect_windows([("data/a.png", a), ("data/b.png", b)])
    return np.stack([one["prediction"].ravel() for one in found])


def scores(found: Detections) -> np.ndarray:
    return np.stack([one.scores for one in found.found])


@pytest.mark.parametrize("pad", [0, 2])
def test_windows_of_a_csv(pad: int) -> None:
    found = detect("data/windows.csv", "net.prototxt", ["w.caffemodel"], context_pad=pad)
    assert [one.image for one in found.found] == ["data/a.png"] * 3 + ["data/b.png"]
    assert found.found[0].window == (2, 1, 12, 14), "ymin, xmin, ymax, xmax"
    np.testing.assert_allclose(scores(found), expected(pad), rtol=1e-5)
    larger = detect("data/windows.csv", "net.prototxt", ["w.caffemodel"], context_pad=pad, batch=64)
    np.testing.assert_allclose(scores(larger), expected(pad), rtol=1e-5)


def test_of_a_mean_image_the_mean_of_each_channel_is_taken() -> None:
    mean = np.zeros((3, 2, 2), np.float32) + np.array([100, 110, 120])[:, None, None]
    mean[:, 0] += 5
    mean[:, 1] -= 5
    np.save("mean.npy", mean)
    preparation = Preparation(mean_file="mean.npy")
    found = detect(
        "data/windows.csv", "net.prototxt", ["w.caffemodel"], context_pad=2, preparation=preparation
    )
    np.testing.assert_allclose(scores(found), expected(2, True), rtol=1e-5)


def test_a_list_of_images_with_windows_for_all() -> None:
    Path("data/images.txt").write_text("b.png\n\na.png\n")
    Path("windows.csv").write_text("ymax, xmax, ymin, xmin\n9,9,0,0\n5,8,1,2\n")
    found = detect(
        "data/images.txt", "net.prototxt", ["w.caffemodel"], windows="windows.csv", context_pad=0
    )
    assert [(one.image, one.window) for one in found.found] == [
        ("data/b.png", (0, 0, 9, 9)),
        ("data/b.png", (1, 2, 5, 8)),
        ("data/a.png", (0, 0, 9, 9)),
        ("data/a.png", (1, 2, 5, 8)),
    ]
    np.testing.assert_allclose(scores(found)[0], expected(0)[3], rtol=1e-5)


def test_what_is_written() -> None:
    found = detect("data/windows.csv", "net.prototxt", ["w.caffemodel"], context_pad=0)
    for name in ("out.csv", "out.json", "out.h5"):
        found.save(name)
    with open("out.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [
        "filename",
        "ymin",
        "xmin",
        "ymax",
        "xmax",
        *(f"class{i}" for i in range(4)),
    ]
    assert [float(rows[0][side]) for side in ("ymin", "xmin", "ymax", "xmax")] == [2, 1, 12, 14]
    read = np.array([[row[f"class{i}"] for i in range(4)] for row in rows], np.float32)
    np.testing.assert_array_equal(read, scores(found))
    told = json.loads(Path("out.json").read_text())
    assert Path("out.json").read_text().isascii()
    assert told[3]["filename"] == "data/b.png"
    assert (told[0]["xmin"], told[0]["ymax"]) == (1, 12)
    np.testing.assert_array_equal(np.array(told[1]["prediction"], np.float32), scores(found)[1])
    with h5py.File("out.h5") as file:
        assert file["filename"][3] == b"data/b.png"
        assert file["window"][0].tolist() == [2, 1, 12, 14]
        np.testing.assert_array_equal(file["prediction"], scores(found))
    best = scores(found)[0].argmax()
    line = found.table().splitlines()[1].split()
    assert line == ["data/a.png", "2", "1", "12", "14", f"{scores(found)[0].max():.6g}", str(best)]
    with pytest.raises(UsageError, match=r"must name the format: .csv, .h5, .hdf5, .json"):
        found.save("out.txt")
    with pytest.raises(UsageError, match=r'cannot write "none/out.csv": no such file or directory'):
        check_output("none/out.csv")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "filename,xmin,ymin\na,1,2\n",
            r"w.csv:1: no column ymax, xmax \(the first line is: filename, xmin, ymin\)",
        ),
        ("", r"w.csv:1: no column filename.*empty"),
        (HEAD, r"w.csv: no windows are given here"),
        (
            HEAD + "a,1,2,3,4\na,1,2,x,4\n",
            r"w.csv:3: ymin, xmin, ymax, xmax are not numbers: 2, 1, 4, x",
        ),
        (
            HEAD + "a,1,2,inf,nan\n",
            r"w.csv:2: ymin, xmin, ymax, xmax are not numbers: 2, 1, nan, inf",
        ),
        (HEAD + "a,1,2,3\n", r"w.csv:2: .* not numbers"),
        (HEAD + "data/a.png,90,90,99,99\n", r"data/a.png: window .90, 90, 99, 99. is empty"),
        (
            HEAD + "data/a.png,0,0,9,9\nno.png,1,2,3,4\n",
            r"no.png: cannot be read: no such file or directory",
        ),
    ],
)
def test_what_is_wrong_with_windows(text: str, message: str) -> None:
    Path("w.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        detect("w.csv", "net.prototxt", ["w.caffemodel"], context_pad=0)


def test_what_cannot_be_done() -> None:
    Path("i.txt").write_text("data/a.png\n")
    with pytest.raises(UsageError, match=r"i.txt has no windows"):
        read_windows("i.txt")
    with pytest.raises(UsageError, match=r"windows.csv has windows of its own"):
        read_windows("data/windows.csv", "w.csv")
    with pytest.raises(DataError, match=r"no.txt: cannot be read"):
        read_windows("no.txt", "data/windows.csv")
    with pytest.raises(ConfigError, match="selective search needs the package"):
        detect(
            "i.txt", "net.prototxt", ["w.caffemodel"], context_pad=0, crop_mode="selective_search"
        )
    with pytest.raises(ConfigError, match="context_pad must be less than half"):
        detect("data/windows.csv", "net.prototxt", ["w.caffemodel"])
    with pytest.raises(ConfigError, match="takes images of 1 channels"):
        detect("data/windows.csv", str(models.path("digits", "deploy")), [])
