"""convert-cifar: the binary files become two databases."""

import os
from pathlib import Path

import numpy as np
import pytest

from caffepy.commands.data.mnist_and_cifar import TEST, TRAIN, convert_cifar
from caffepy.core.errors import DataError
from caffepy.data.sources import open_database
from caffepy.proto.caffe_pb2 import Datum

ROWS = np.random.default_rng(0).integers(0, 256, (12, 3073), np.uint8)
ROWS[:, 0] %= 10


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Five files of two images and one of two more."""
    for i, name in enumerate((*TRAIN, *TEST)):
        (tmp_path / name).write_bytes(ROWS[2 * i : 2 * i + 2].tobytes())
    return tmp_path


@pytest.mark.parametrize("backend", ["lmdb", "leveldb"])
@pytest.mark.parametrize("inner", [False, True])
def test_records(inner: bool, backend: str, folder: Path) -> None:
    if backend == "leveldb":
        pytest.importorskip("plyvel", reason="plyvel is not installed")
    if inner:
        (folder / "in" / "cifar-10-batches-bin").mkdir(parents=True)
        for name in (*TRAIN, *TEST):
            os.rename(folder / name, folder / "in" / "cifar-10-batches-bin" / name)
    out = folder / "out"
    counts = convert_cifar(str(folder / "in" if inner else folder), str(out), backend)
    assert counts == {f"{out}/cifar10_train_{backend}": 10, f"{out}/cifar10_test_{backend}": 2}
    row = iter(ROWS)
    for path, count in counts.items():
        source = open_database(path)
        assert len(source) == count
        for i, (label, *pixels) in zip(range(count), row, strict=False):
            key, value = source.read()
            assert bytes(key) == b"%05d" % i
            datum = Datum(channels=3, height=32, width=32, data=bytes(pixels), label=label)
            assert bytes(value) == datum.SerializeToString()
        source.close()


def test_what_is_wrong_is_told_and_nothing_written(folder: Path) -> None:
    (folder / "data_batch_2.bin").write_bytes(bytes(3072))
    with pytest.raises(
        DataError,
        match=r"data_batch_2.bin is damaged or not of CIFAR-10's binary version: 3072 bytes",
    ):
        convert_cifar(str(folder), str(folder / "out"))
    (folder / "data_batch_2.bin").write_bytes(b"\x0a" * 3073)
    with pytest.raises(DataError, match=r"data_batch_2.bin is damaged"):
        convert_cifar(str(folder), str(folder / "out"))
    os.remove(folder / "data_batch_2.bin")
    with pytest.raises(
        DataError, match=r'data_batch_2.bin" does not exist; .* https://www.cs.toronto.edu/~kriz/'
    ):
        convert_cifar(str(folder), str(folder / "out"))
    assert not (folder / "out").exists()


def test_a_folder_that_cannot_be(folder: Path) -> None:
    (folder / "file").touch()
    for name in "file", "file/out":
        with pytest.raises(
            DataError, match="cifar10_train_lmdb cannot be written: not a directory"
        ):
            convert_cifar(str(folder), f"{folder}/{name}")


def test_neither_database_may_exist(folder: Path) -> None:
    (folder / "out" / "cifar10_test_lmdb").mkdir(parents=True)
    with pytest.raises(DataError, match="cifar10_test_lmdb exists already"):
        convert_cifar(str(folder), str(folder / "out"))
    assert os.listdir(folder / "out") == ["cifar10_test_lmdb"]
