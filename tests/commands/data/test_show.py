"""data show: each kind of source, records that cannot be read, contact sheets."""

import json
import re
from pathlib import Path

import cv2
import h5py
import numpy as np
import pytest

from caffepy import models
from caffepy.commands.data.show import DataInfo, show
from caffepy.core.errors import DataError, UsageError
from caffepy.data.write import Partial, array_to_datum, write_database
from caffepy.proto.caffe_pb2 import Datum

GOLDEN = Path(__file__).parents[2] / "golden" / "data"


@pytest.mark.parametrize("name", ["raw_lmdb", "encoded_lmdb", "gray_lmdb", "raw_leveldb"])
def test_databases(name: str) -> None:
    if name == "raw_leveldb":
        pytest.importorskip("plyvel", reason="plyvel is not installed")
    info = show(str(GOLDEN / name), threads=2)
    assert (info.kind, info.records, info.seen) == (
        "LevelDB" if "level" in name else "LMDB",
        10,
        10,
    )
    assert info.shapes == {"1 16 18 (288)" if name == "gray_lmdb" else "3 16 18 (864)": 10}
    assert info.stored == {"png" if name == "encoded_lmdb" else "bytes": 10}
    assert info.labels == {0: 4, 1: 3, 2: 3}
    assert info.first[:2] == ["00000000_im0.jpg", "00000001_im1.png"]
    assert info.bad_records == 0
    assert info.size > 9000


def mixed(folder: Path, count: int = 100) -> str:
    with write_database(f"{folder}/db", "lmdb") as writer:
        for i in range(count):
            if i % 10 == 7:
                value: Datum | bytes = Datum(encoded=True, data=b"\xff\xd8\xff", label=1)
            elif i % 10 == 3:
                value = array_to_datum(np.zeros((1, 2, 3), np.float32), -5)
            else:
                value = array_to_datum(np.full((3, 4, 4 + i % 2), i, np.uint8), i)
            writer.put(f"{i:08d}", value)
    return f"{folder}/db"


def test_what_differs_and_what_cannot_be_read_is_counted(tmp_path: Path) -> None:
    info = show(mixed(tmp_path))
    assert info.shapes == {"3 4 4 (48)": 50, "3 4 5 (60)": 30, "1 2 3 (6)": 10}
    assert info.stored == {"bytes": 80, "floats": 10}
    assert info.labels[-5] == 10
    assert info.bad_records == 10
    assert info.bad[0] == 'record "00000007": its image cannot be decoded (3 bytes)'
    assert len(info.bad) == 5
    text = info.table()
    assert 'cannot be read: 10\n  record "00000007": its' in text
    assert "81 different labels" in text
    assert "... and 51 more, up to 99" in text
    content = json.loads(info.json())
    assert content["labels"][0] == [-5, 10]
    assert (content["records"], content["bad_records"]) == (100, 10)


def test_only_the_first_records(tmp_path: Path) -> None:
    info = show(mixed(tmp_path), first=5)
    assert (info.records, info.seen, info.shapes.total()) == (100, 5, 5)
    assert "100 records, of which 5 were looked at" in info.table()


def test_an_unfinished_database_says_so(tmp_path: Path) -> None:
    partial = Partial(f"{tmp_path}/db", "lmdb", {}, {}, False)

    def stop_in_the_middle() -> None:
        with partial.open() as writer:
            writer.write(
                [(b"a", array_to_datum(np.zeros((1, 2, 2), np.uint8)).SerializeToString())]
            )
            partial.note({"lines": 3, "records": 1})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        stop_in_the_middle()
    assert "unfinished: lines 3, records 1" in show(f"{tmp_path}/db.partial").table()


@pytest.fixture
def images(tmp_path: Path) -> Path:
    for i, suffix in enumerate((".png", ".jpg", ".bmp")):
        cv2.imwrite(f"{tmp_path}/{i}{suffix}", np.full((4 + i, 5, 3), 50 * i, np.uint8))
    (tmp_path / "text.png").write_text("no image")
    return tmp_path


@pytest.mark.parametrize("rooted", [False, True])
def test_lists_of_images(rooted: bool, images: Path, tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("0.png 3\n1.jpg 4\ngone.png 4\n2.bmp 3\ntext.png 0\n")
    info = show(f"{tmp_path}/list.txt", root=f"{images}/" if rooted else "")
    assert (info.kind, info.records) == ("list of images", 5)
    assert info.stored == {"png": 1, "jpeg": 1, "bmp": 1}
    assert info.labels == {3: 2, 4: 1}
    assert info.bad == [
        f"{images}/gone.png cannot be read: no such file or directory",
        f"{images}/text.png: its image cannot be decoded (8 bytes)",
    ]
    assert "--root" not in info.table()


def test_a_list_of_images_that_layers_bring_to_8_bits_and_three_channels(tmp_path: Path) -> None:
    """ImageData and convert-imageset read them, so that they are none that cannot be read."""
    deep = np.full((4, 5), 40000, np.uint16)
    for name, image in {"deep": deep, "rgba": np.dstack([deep >> 8] * 4).astype(np.uint8)}.items():
        cv2.imwrite(f"{tmp_path}/{name}.png", image)
    (tmp_path / "list.txt").write_text("deep.png 0\nrgba.png 1\n")
    info = show(f"{tmp_path}/list.txt")
    assert (info.shapes, info.bad) == ({"1 4 5 (20)": 1, "3 4 5 (60)": 1}, [])


def test_a_list_of_images_that_lie_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("0.png 3\n")
    lines = show(f"{tmp_path}/list.txt").table().splitlines()
    assert lines[0].startswith(f"list of images {tmp_path}/list.txt: 1 record;")
    assert lines[-1] == "their names may be relative to another folder: name it with --root"


def test_hdf5_files_and_lists_of_them(tmp_path: Path) -> None:
    for name, count in (("a", 4), ("b", 6)):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["data"] = np.random.default_rng(0).random((count, 3, 5, 4))
            file["label"] = np.arange(count)[:, None].astype(np.float32)
            file.create_group("others")
    (tmp_path / "list.txt").write_text("a.h5\nb.h5\n")
    info = show(f"{tmp_path}/a.h5", sheet_path=f"{tmp_path}/sheet.png")
    assert (info.kind, info.records, info.labels) == ("HDF5 file", 4, {0: 1, 1: 1, 2: 1, 3: 1})
    assert info.facts == {
        'dataset "data"': "rows of 3 5 4 (60), float64",
        'dataset "label"': "rows of 1 (1), float32",
    }
    assert cv2.imread(f"{tmp_path}/sheet.png") is not None
    info = show(f"{tmp_path}/list.txt")
    assert (info.kind, info.records, info.labels[5], info.labels[0]) == (
        "list of HDF5 files",
        10,
        1,
        2,
    )
    assert info.facts["files"] == 2
    info = show(f"{tmp_path}/list.txt", first=5)
    assert (info.seen, info.labels) == (5, {0: 2, 1: 1, 2: 1, 3: 1})
    assert show(f"{tmp_path}/list.txt", first=3).labels == {0: 1, 1: 1, 2: 1}
    (tmp_path / "list.txt").write_text("a.h5\nc.h5\n")
    assert show(f"{tmp_path}/list.txt").bad_records == 1


ODD = {
    "no pixels": {"data": np.zeros((3, 3, 0, 2))},
    "complex numbers": {"data": np.zeros((3, 3, 2, 2), np.complex64)},
    "structures": {"data": np.zeros((3, 3, 2, 2), [("a", "f4")])},
    "large labels": {"label": np.full(3, 1e30)},
    "labels that are no numbers": {"label": np.full(3, np.nan)},
    "links": {"data": h5py.SoftLink("/no"), "label": h5py.ExternalLink("no.h5", "/data")},
}


@pytest.mark.parametrize("case", ODD)
def test_odd_hdf5_files(case: str, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, value in ODD[case].items():
            file[name] = value
    assert not show(f"{tmp_path}/a.h5").labels
    with pytest.raises(DataError, match=r"a\.h5 has no images for a contact sheet"):
        show(f"{tmp_path}/a.h5", sheet_path=f"{tmp_path}/sheet.png")


def test_a_damaged_hdf5_file_is_told(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["data"] = np.zeros((3, 3, 4, 5))
    content = (tmp_path / "a.h5").read_bytes().replace(b"HEAP", b"PAEH")
    (tmp_path / "a.h5").write_bytes(content)
    assert show(f"{tmp_path}/a.h5").bad_records == 1
    with pytest.raises(DataError, match=r"no images for a contact sheet: .*a\.h5 cannot be read: "):
        show(f"{tmp_path}/a.h5", sheet_path=f"{tmp_path}/sheet.png")


def test_window_files(tmp_path: Path) -> None:
    (tmp_path / "w.txt").write_text("# 0\na.png\n3\n9\n9\n2\n4 0.9 0 0 4 4\n0 0.1 1 1 5 5\n")
    info = show(f"{tmp_path}/w.txt")
    assert (info.kind, info.records, info.labels, info.first) == (
        "window file",
        1,
        {4: 1, 0: 1},
        ["a.png"],
    )


def test_means(tmp_path: Path) -> None:
    info = show(str(GOLDEN / "mean.binaryproto"), sheet_path=f"{tmp_path}/mean.png")
    assert (info.kind, info.shapes) == ("mean file", {"3 16 18 (864)": 1})
    assert info.facts["mean_value"] == pytest.approx([135.137, 130.48, 127.093], abs=1e-3)
    assert "mean_value: 135.137, 130.48, 127.093" in info.table()
    assert cv2.imread(f"{tmp_path}/mean.png") is not None


def test_a_table_is_told_from_a_list_of_images(tmp_path: Path) -> None:
    (tmp_path / "run_metrics.csv").write_text("iteration,loss\n0,2.3\n")
    shown = show(f"{tmp_path}/run_metrics.csv").table()
    assert "a list of images has a file, a blank and a label in each line" in shown


def test_contact_sheets_are_of_all_the_records(tmp_path: Path) -> None:
    with write_database(f"{tmp_path}/db", "lmdb") as writer:
        for i in range(250):
            writer.put(f"{i:08d}", array_to_datum(np.full((3, 8, 8), i, np.uint8), i))
    show(f"{tmp_path}/db", sheet_path=f"{tmp_path}/sheet.png")
    picture = cv2.imread(f"{tmp_path}/sheet.png")
    middles = picture[4 + 48 :: 116, 4 + 48 :: 100, 0]  # the middle of each place
    assert middles.reshape(-1)[:100].tolist() == [i * 250 // 100 for i in range(100)]


@pytest.mark.parametrize("shape", [(1, 3, 200), (3, 1, 1), (4, 9, 9)])
def test_pictures_of_any_shape(shape: tuple[int, ...], tmp_path: Path) -> None:
    with write_database(f"{tmp_path}/db", "lmdb") as writer:
        writer.put("a", array_to_datum(np.full(shape, 3, np.float32)))
        writer.put("b", array_to_datum(np.full(shape, np.nan, np.float32)))
    show(f"{tmp_path}/db", sheet_path=f"{tmp_path}/sheet.png")
    assert cv2.imread(f"{tmp_path}/sheet.png") is not None


WRONG = {
    "nothing": (None, DataError, "does not exist"),
    "text": (b"hello\tthere\n", DataError, "source:1: "),
    "weights": (b"", DataError, "source is empty, not a source of data"),
    "a picture": (b"\x89PNG\r\n\x1a\n", DataError, "source is a PNG image, not a source of data"),
}


@pytest.mark.parametrize("case", WRONG)
def test_other_files(case: str, tmp_path: Path) -> None:
    content, error, message = WRONG[case]
    if content is not None:
        (tmp_path / "source").write_bytes(content)
    with pytest.raises(error, match=message):
        show(f"{tmp_path}/source")


def test_sheets_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r'the extension of "x\.txt" must name the format'):
        show(str(GOLDEN / "raw_lmdb"), sheet_path="x.txt")
    with pytest.raises(UsageError, match=r'cannot write ".*no/x.png": no such file or directory'):
        show(f"{tmp_path}/nothing", sheet_path=f"{tmp_path}/no/x.png")
    with pytest.raises(DataError, match="has no images for a contact sheet"):
        show(str(GOLDEN / "h0.h5"), sheet_path=f"{tmp_path}/x.png")


def test_nothing_is_shown_of_nothing() -> None:
    assert DataInfo("LMDB", "db", 0).table() == "LMDB db: 0 records; 0 bytes"


def test_boxes_of_annotated_records() -> None:
    path = Path(str(models.path("digits_ssd", "solver"))).parent / "scenes_test_lmdb"
    info = show(str(path))
    assert (info.records, info.bad_records) == (150, 0)
    assert info.shapes == {"1 64 64 (4096)": 150}
    assert info.stored == {"png": 150}
    assert sorted(info.labels) == list(range(1, 11))
    assert info.labels.total() > 300
    table = info.table()
    assert "labels: of boxes" in table
    assert re.search("^label  *boxes  *share$", table, re.MULTILINE)
