"""What sources tell of their size and their ends, without moving."""

from pathlib import Path

import h5py
import numpy as np
import pytest

from caffepy.core.errors import DataError
from caffepy.data.sources import open_database
from caffepy.data.sources.hdf5 import HDF5Rows
from caffepy.data.sources.image_list import ImageList
from caffepy.data.write import write_database
from tests.data.test_resume import feed
from tests.parallel.test_data import folder  # noqa: F401  # a fixture


def database(place: Path, backend: str, count: int) -> str:
    with write_database(f"{place}/{backend}", backend) as writer:
        for i in range(count):
            writer.put(f"{i:05d}", bytes([i % 256]) * 300)
    return f"{place}/{backend}"


@pytest.mark.parametrize("count", [1, 5, 2000])
def test_an_lmdb_of_one_page_or_many(count: int, tmp_path: Path) -> None:
    source = open_database(database(tmp_path, "lmdb", count))
    source.take(3)
    before = source.state()
    assert source.extent() == f'{count:,} records, from "00000" to "{count - 1:05d}"'
    np.testing.assert_equal(source.state(), before)
    assert bytes(source.take(1)[0][0]) == b"%05d" % (3 % count)
    source.close()


def test_a_leveldb(tmp_path: Path) -> None:
    pytest.importorskip("plyvel", reason="plyvel is not installed")
    source = open_database(database(tmp_path, "leveldb", 20))
    source.take(3)
    assert source.extent() == 'records from "00000" to "00019"'
    assert bytes(source.take(1)[0][0]) == b"00003"
    source.close()


def test_a_damaged_last_page_is_named(tmp_path: Path) -> None:
    path = database(tmp_path, "lmdb", 2000)
    source = open_database(path)
    (last,) = source._pages._leaves[-1:]  # type: ignore[attr-defined]
    source.close()
    with open(f"{path}/data.mdb", "r+b") as file:
        file.seek(int(last) * 4096 + 10)
        file.write(b"\xff" * 6)
    source = open_database(path)
    with pytest.raises(DataError, match=rf"damaged at page {last} of"):
        source.extent()
    source.close()


def test_a_list_of_images_with_its_labels(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("a b.png 3\nc.png 1\nd.png 07\n")
    source = ImageList(f"{tmp_path}/list.txt", seed=5)
    assert source.extent() == '3 lines, from "a b.png 3" to "d.png 7"'


def test_hdf5_files(tmp_path: Path) -> None:
    for name, rows in (("x", 3), ("y", 4), ("z", 1200)):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["data"] = np.arange(rows)
    (tmp_path / "files.txt").write_text("x.h5\ny.h5\nz.h5\n")
    rows = HDF5Rows(f"{tmp_path}/files.txt", ["data"], np.float32, seed=1)
    before = rows.state()
    assert rows.extent() == '3 files, from "x.h5" (3 rows) to "z.h5" (1,200 rows)'
    assert rows.state() == before


@pytest.mark.parametrize(
    ("content", "what"), [(None, "missing"), (b"", "empty, not an HDF5 file")], ids=str
)
def test_an_hdf5_file_that_is_gone_when_its_turn_comes(
    content: bytes | None, what: str, tmp_path: Path
) -> None:
    for name in "xy":
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["data"] = np.arange(3)
    (tmp_path / "files.txt").write_text("x.h5\ny.h5\n")
    rows = HDF5Rows(f"{tmp_path}/files.txt", ["data"], np.float32)
    (tmp_path / "y.h5").unlink()
    if content is not None:
        (tmp_path / "y.h5").write_bytes(content)
    with pytest.raises(DataError, match=rf"y\.h5\", which .*files\.txt names, is {what}$"):
        rows.read([np.empty(4, np.float32)])


def test_windows(folder: Path) -> None:  # noqa: F811
    layer = feed("WindowData", folder, 1).layer
    assert layer.extent() == '20 images, from "0.png" to "19.png"'
    layer.close()
    assert layer.extent() == ""
