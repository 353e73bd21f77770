"""The commands of data: flags as Caffe's tools take them, what they print, exit codes."""

import gzip
import json
import os
import struct
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from caffepy.cli import main
from caffepy.data.sources import open_database

pytestmark = pytest.mark.usefixtures("folder")

GOLDEN = Path(__file__).parents[1] / "golden" / "data"
IMAGES, LIST = f"{GOLDEN / 'images'}/", str(GOLDEN / "list.txt")
Captured = pytest.CaptureFixture[str]


def count(path: str) -> int:
    source = open_database(path)
    number = len(source)
    source.close()
    return number


def test_convert_imageset_passes_its_flags_on(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(
        "caffepy.commands.data.convert_imageset.convert_imageset",
        lambda *a, **k: given.append((a, k)),
    )
    line = "convert_imageset -gray -shuffle=true -backend=leveldb -resize_width=8 --resize_height 9 -check_size"
    line += " -encoded -encode_type png -seed 3 -noprogress -threads 2 -resume -check root/ list db"
    assert main.run(line.split()) == 0
    assert main.run(["convert_imageset", "-noshuffle", "-encoded", "root/", "list", "db"]) == 0
    assert capsys.readouterr().err == ""
    assert main.run(["convert_imageset", "-encode_type=jpg", "root/", "list", "db"]) == 0
    assert "encode_type specified, assuming encoded=true." in capsys.readouterr().err
    (arguments, flags), (_, plain), (_, typed) = given
    assert arguments == ("root/", "list", "db")
    recipe = flags.pop("recipe")
    assert (recipe.gray, recipe.width, recipe.height, recipe.encode) == (True, 8, 9, "png")
    assert flags == {
        "backend": "leveldb",
        "shuffle": True,
        "seed": 3,
        "check_size": True,
        "resume": True,
        "check": True,
        "threads": 2,
        "progress": False,
    }
    assert (plain["shuffle"], plain["backend"], plain["recipe"].encode) == (False, "lmdb", None)
    assert typed["recipe"].encode == "jpg"


def test_from_images_to_a_mean_and_back(capsys: Captured) -> None:
    line = ["convert_imageset", "-resize_width=18", "-resize_height=16", IMAGES, LIST, "db"]
    assert main.run(line) == 0
    log = capsys.readouterr()
    assert "] A total of 10 images." in log.err
    assert "] Processed 10 files." in log.err
    assert log.out == ""
    assert main.run(line) == 4
    assert capsys.readouterr().err.endswith(
        "caffepy: error: db exists already; remove it or choose another name\n"
    )
    assert main.run(["compute_image_mean", "-backend=lmdb", "db", "mean.binaryproto"]) == 0
    assert "] mean_value channel [2]: 127.093" in capsys.readouterr().err
    assert Path("mean.binaryproto").read_bytes() == (GOLDEN / "mean.binaryproto").read_bytes()
    assert main.run(["compute-image-mean", "db", "--json", "-minloglevel", "1"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["count"] == 10
    assert shown.err == ""
    assert main.run(["compute-image-mean", "db", "no/such/folder"]) == 2


def test_data_show(capsys: Captured) -> None:
    assert main.run(["data", "show", str(GOLDEN / "raw_lmdb"), "--sheet", "sheet.png"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith(f"LMDB {GOLDEN / 'raw_lmdb'}: 10 records; ")
    assert shown.err == ""
    assert cv2.imread("sheet.png") is not None
    assert main.run(["data", "show", LIST, "-root", IMAGES, "-json", "-first", "4"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert (content["seen"], content["records"]) == (4, 10)
    Path("absent.txt").write_text("a.jpg 0\nb.jpg 1\n")
    assert main.run(["data", "show", "absent.txt"]) == 4
    shown = capsys.readouterr()
    assert "cannot be read: 2" in shown.out
    assert "absent.txt: no record can be read" in shown.err
    assert main.run(["data", "show", "nowhere"]) == 4
    assert main.run(["data"]) == 0
    assert "show" in capsys.readouterr().out
    assert main.run(["data", "shw"]) == 2


def test_convert_mnist_and_cifar(capsys: Captured) -> None:
    pixels = np.arange(60, dtype=np.uint8)
    Path("images.gz").write_bytes(
        gzip.compress(struct.pack(">4I", 2051, 3, 5, 4) + pixels.tobytes())
    )
    Path("labels").write_bytes(struct.pack(">2I", 2049, 3) + bytes(3))
    assert main.run(["convert_mnist", "images.gz", "labels", "db"]) == 0
    assert count("db") == 3
    assert main.run(["convert-mnist", "nowhere", "labels", "other"]) == 4
    assert "https://" in capsys.readouterr().err
    row = bytes(3073)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        Path(f"{name}.bin").write_bytes(row)
    assert main.run(["convert_cifar", ".", "out", "lmdb"]) == 0
    assert sorted(os.listdir("out")) == ["cifar10_test_lmdb", "cifar10_train_lmdb"]
    assert count("out/cifar10_train_lmdb") == 5


WRONG = {
    "one size": ["convert-imageset", "-resize_width", "3", IMAGES, LIST, "db"],
    "sizes of encoded images": ["convert-imageset", "-check_size", "-encoded", IMAGES, LIST, "db"],
    "a seed below 0": ["convert-imageset", "-shuffle", "--seed", "-1", IMAGES, LIST, "db"],
    "backend": ["convert-imageset", "-backend", "lmbd", IMAGES, LIST, "db"],
    "too few": ["convert-imageset", IMAGES, LIST],
    "kind": ["convert-cifar", ".", "out", "sqlite"],
}


@pytest.mark.parametrize("case", WRONG)
def test_usage(case: str, capsys: Captured) -> None:
    assert main.run(WRONG[case]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert not os.path.exists("db")
