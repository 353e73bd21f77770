"""convert-mnist: idx files, packed or not, and what is wrong with them."""

import gzip
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from caffepy.commands.data.mnist_and_cifar import convert_mnist
from caffepy.core.errors import DataError
from caffepy.data.sources import open_database
from caffepy.proto.caffe_pb2 import Datum

PIXELS = np.random.default_rng(0).integers(0, 256, (7, 5, 4), np.uint8)
IMAGES = struct.pack(">4I", 2051, 7, 5, 4) + PIXELS.tobytes()
LABELS = struct.pack(">2I", 2049, 7) + bytes([3, 1, 4, 1, 5, 9, 2])


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str, str]:
    """The images, the labels, and a database to make."""
    (tmp_path / "images").write_bytes(IMAGES)
    (tmp_path / "labels").write_bytes(LABELS)
    return f"{tmp_path}/images", f"{tmp_path}/labels", f"{tmp_path}/db"


@pytest.mark.parametrize("pack", [(), ("images", "labels")])
@pytest.mark.parametrize("named", ["", ".gz"])
@pytest.mark.parametrize("backend", ["lmdb", "leveldb"])
def test_records(
    pack: tuple[str, ...], named: str, backend: str, files: tuple[str, str, str], tmp_path: Path
) -> None:
    if backend == "leveldb":
        pytest.importorskip("plyvel", reason="plyvel is not installed")
    for name in pack:
        path = tmp_path / name
        path.with_suffix(".gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    images, labels, db = files
    suffix = named if pack else ""
    assert convert_mnist(images + suffix, labels + suffix, db, backend) == 7
    source = open_database(db)
    for i, label in enumerate([3, 1, 4, 1, 5, 9, 2]):
        key, value = source.read()
        assert bytes(key) == b"%08d" % i
        datum = Datum(channels=1, height=5, width=4, data=PIXELS[i].tobytes(), label=label)
        assert bytes(value) == datum.SerializeToString()
    source.close()


WRONG = {
    "labels as images": (
        LABELS,
        LABELS,
        "images is no file of MNIST's images, but a file of labels; .* with 2051",
    ),
    "text": (b"hello, world", LABELS, "images is no file of MNIST's images, but text"),
    "empty": (b"", LABELS, "images is no file of MNIST's images, but empty"),
    "cut short": (IMAGES[:-1], LABELS, "images is damaged: it has 139 values, not 7 x 5 x 4"),
    "packed, cut short": (gzip.compress(IMAGES)[:-9], LABELS, "images cannot be read: "),
    "packed, damaged": (
        gzip.compress(os.urandom(999))[:400] + bytes(600),
        LABELS,
        "images cannot be read: ",
    ),
    "a short head": (IMAGES[:6], LABELS, "images is empty: it has 0 x 0 x 0 values"),
    "no images": (
        struct.pack(">4I", 2051, 0, 28, 28),
        LABELS,
        "images is empty: it has 0 x 28 x 28 values",
    ),
    "no pixels": (
        struct.pack(">4I", 2051, 7, 0, 0),
        LABELS,
        "images is empty: it has 7 x 0 x 0 values",
    ),
    "another number": (
        IMAGES,
        struct.pack(">2I", 2049, 2) + b"ab",
        "has 7 images, but .*labels 2 labels",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_files_that_are_not_right(case: str, files: tuple[str, str, str], tmp_path: Path) -> None:
    images, labels, message = WRONG[case]
    Path(files[0]).write_bytes(images)
    Path(files[1]).write_bytes(labels)
    with pytest.raises(DataError, match=message):
        convert_mnist(*files)
    assert not (tmp_path / "db").exists()


def test_a_missing_file_says_where_to_get_it(files: tuple[str, str, str]) -> None:
    with pytest.raises(
        DataError, match=r'"nowhere" does not exist; .* train-images-idx3-ubyte.gz, are at https://'
    ):
        convert_mnist("nowhere", *files[1:])
