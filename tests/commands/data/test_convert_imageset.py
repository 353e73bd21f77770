"""convert-imageset: Caffe's keys and bytes, what is left out, interrupted runs that go on,
comparisons.
"""

import fcntl
import json
import logging
import os
import shutil
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import cv2
import numpy as np
import pytest

from caffepy.commands.data import convert_imageset as module
from caffepy.commands.data.convert_imageset import Converted, Recipe, convert_imageset
from caffepy.core.errors import DataError, UsageError
from caffepy.data.datum import decode
from caffepy.data.sources import open_database
from caffepy.data.write import unfinished, write_database
from caffepy.proto.caffe_pb2 import Datum

GOLDEN = Path(__file__).parents[2] / "golden" / "data"
IMAGES = f"{GOLDEN / 'images'}/"
LIST = str(GOLDEN / "list.txt")
Records = list[tuple[bytes, bytes]]


def records(path: object) -> Records:
    source = open_database(str(path))
    found = [
        (bytes(key), bytes(value)) for key, value in (source.read() for _ in range(len(source)))
    ]
    source.close()
    return found


def draw(folder: Path, count: int = 30, suffix: str = ".png") -> tuple[str, str]:
    """The root and the list of `count` small images, each of one colour: its number."""
    (folder / "images").mkdir()
    for i in range(count):
        cv2.imwrite(f"{folder}/images/{i}{suffix}", np.full((2, 3, 3), i, np.uint8))
    (folder / "list.txt").write_text("".join(f"{i}{suffix} {i}\n" for i in range(count)))
    return f"{folder}/images/", f"{folder}/list.txt"


CAFFES = {
    "raw_lmdb": (Recipe(False, 18, 16), "lmdb"),
    "gray_lmdb": (Recipe(True, 18, 16), "lmdb"),
    "encoded_lmdb": (Recipe(False, 18, 16, "png"), "lmdb"),
    "raw_leveldb": (Recipe(False, 18, 16), "leveldb"),
}


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", CAFFES)
def test_what_caffe_wrote(name: str, threads: int, tmp_path: Path) -> None:
    recipe, backend = CAFFES[name]
    if backend == "leveldb":
        pytest.importorskip("plyvel", reason="plyvel is not installed")
    out = tmp_path / "db"
    result = convert_imageset(
        IMAGES, LIST, str(out), recipe=recipe, backend=backend, threads=threads, check=True
    )
    assert result == Converted(10, 0)
    expected = records(shutil.copytree(GOLDEN / name, tmp_path / "caffe"))
    if name == "encoded_lmdb":  # compressed by another version of the library
        assert [(k, decode(v)[0].tolist()) for k, v in records(out)] == [
            (k, decode(v)[0].tolist()) for k, v in expected
        ]
    else:
        assert records(out) == expected
    assert sorted(os.listdir(tmp_path)) == ["caffe", "db"]


def test_a_jpeg_that_is_cut_short_is_kept_as_caffe_keeps_it(tmp_path: Path) -> None:
    root, listed = draw(tmp_path, 2, ".jpg")
    cut = Path(root) / "1.jpg"
    cut.write_bytes(cut.read_bytes()[:-2])
    assert convert_imageset(root, listed, str(tmp_path / "db"), check=True) == Converted(2, 0)
    image = decode(records(tmp_path / "db")[1][1])[0]
    np.testing.assert_array_equal(image, cv2.imread(str(cut)).transpose(2, 0, 1))


def test_files_are_stored_as_they_are_if_they_can_be(tmp_path: Path) -> None:
    image = np.random.default_rng(0).integers(0, 256, (9, 8, 3), np.uint8)
    for name in ("a.jpg", "b.JPEG", "c.png"):
        cv2.imwrite(f"{tmp_path}/{name}", image)
    (tmp_path / "list.txt").write_text("a.jpg 1\nb.JPEG 2\nc.png 3\n")

    def convert(encode: str | None, width: int = 0) -> list[Datum]:
        convert_imageset(
            f"{tmp_path}/",
            f"{tmp_path}/list.txt",
            f"{tmp_path}/db",
            recipe=Recipe(False, width, width, encode),
        )
        datums = [Datum.FromString(value) for _, value in records(tmp_path / "db")]
        shutil.rmtree(tmp_path / "db")
        assert all(d.encoded and not d.HasField("channels") for d in datums)
        assert [d.label for d in datums] == [1, 2, 3]
        return datums

    files = [(tmp_path / name).read_bytes() for name in ("a.jpg", "b.JPEG", "c.png")]
    assert [d.data for d in convert(None)] == files
    jpegs = [d.data for d in convert("jpg")]
    assert jpegs[:2] == files[:2]
    assert jpegs[2].startswith(b"\xff\xd8\xff")
    jpegs = [d.data for d in convert("jpeg")]
    assert jpegs[1] == files[1]
    assert jpegs[0] != files[0], "to Caffe .jpg files are of type jpg only, and jpeg is another"
    assert [d.data[1:4] for d in convert("png")] == [b"PNG"] * 3
    assert all(decode(d.SerializeToString())[0].shape == (3, 4, 4) for d in convert(None, 4))


def test_images_that_cannot_be_read_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root, names = draw(tmp_path, 3)
    (tmp_path / "images" / "text.jpg").write_text("no image")
    (tmp_path / "images" / "empty.jpg").touch()
    (tmp_path / "images" / "a name of blanks.png").write_bytes(
        (tmp_path / "images" / "2.png").read_bytes()
    )
    Path(names).write_text(
        "0.png 5\ngone.png 1\ntext.jpg 1\nempty.jpg 0\na name of blanks.png -7\n1.png 3x\n"
    )
    with caplog.at_level(logging.INFO, "caffepy"):
        result = convert_imageset(root, names, f"{tmp_path}/db", check=True)
    assert result == Converted(3, 3)
    assert [(key, Datum.FromString(value).label) for key, value in records(tmp_path / "db")] == [
        (b"00000000_0.png", 5),
        (b"00000004_a name of blanks.png", -7),
        (b"00000005_1.png", 3),
    ]
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert errors == [
        f"Could not open or find file {root}{name}"
        for name in ("gone.png", "text.jpg", "empty.jpg")
    ]
    assert "3 of 6 images could not be read and were left out" in caplog.text
    assert "Processed 3 files." in caplog.text


def test_the_number_of_records_is_logged_if_the_last_image_cannot_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root, names = draw(tmp_path, 2)
    with open(names, "a") as file:
        file.write("gone.png 1\n")
    with caplog.at_level(logging.INFO, "caffepy"):
        convert_imageset(root, names, f"{tmp_path}/db")
    assert "Processed 2 files." in caplog.messages


def test_blank_lines_count_in_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root, names = draw(tmp_path, 2)
    Path(names).write_text("\n0.png 0\n  \n1.png 1\n")
    assert convert_imageset(root, names, f"{tmp_path}/db", check=True) == Converted(2, 2)
    assert [key for key, _ in records(tmp_path / "db")] == [b"00000001_0.png", b"00000003_1.png"]
    assert caplog.messages[:2] == [f"Could not open or find file {root}"] * 2


def test_no_image_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("a.png 0\n")
    missing = ", which does not exist: ROOTFOLDER/ stands before the names of the list"
    for root, hint in (
        ("nowhere", '; there is no folder "nowhere"'),
        (f"{tmp_path}/", missing),
        ("", missing),
    ):
        with pytest.raises(DataError) as caught:
            convert_imageset(root, f"{tmp_path}/list.txt", f"{tmp_path}/db")
        assert str(caught.value) == f"none of the 1 images could be read, such as {root}a.png{hint}"
    (tmp_path / "a.png").write_text("no image")
    with pytest.raises(DataError, match=r"none of the 1 images could be read, such as .*a\.png$"):
        convert_imageset(f"{tmp_path}/", f"{tmp_path}/list.txt", f"{tmp_path}/db")
    assert sorted(os.listdir(tmp_path)) == ["a.png", "list.txt"]


@pytest.mark.parametrize("root", ["imagez", "imagez/", "list.txt/", "images/sub/x"])
def test_a_root_that_is_not_there_is_one_error(
    tmp_path: Path, root: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, names = draw(tmp_path, 9)
    with pytest.raises(DataError, match="there is no folder"):
        convert_imageset(f"{tmp_path}/{root}", names, f"{tmp_path}/db")
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == []


def test_a_root_may_be_the_start_of_names(tmp_path: Path) -> None:
    draw(tmp_path, 2)
    (tmp_path / "ends.txt").write_text(".png 0\n")
    result = convert_imageset(f"{tmp_path}/images/1", f"{tmp_path}/ends.txt", f"{tmp_path}/db")
    assert result == Converted(1, 0)


def test_a_root_without_its_slash(tmp_path: Path) -> None:
    root, names = draw(tmp_path, 2)
    assert convert_imageset(root[:-1], names, f"{tmp_path}/db").records == 2


def test_an_existing_target_is_refused(tmp_path: Path) -> None:
    root, names = draw(tmp_path, 2)
    (tmp_path / "db").mkdir()
    for resume in (False, True):
        with pytest.raises(DataError, match="db exists already; remove it or choose another name"):
            convert_imageset(root, names, f"{tmp_path}/db", resume=resume)


def test_check_size(tmp_path: Path) -> None:
    root, names = draw(tmp_path, 9)
    cv2.imwrite(f"{root}7.png", np.zeros((4, 4, 3), np.uint8))
    with pytest.raises(DataError, match=r"7.png has 48 values, the first image 18"):
        convert_imageset(root, names, f"{tmp_path}/db", check_size=True)
    with pytest.raises(UsageError, match="-check_size compares raw images"):
        convert_imageset(
            root, names, f"{tmp_path}/db", check_size=True, recipe=Recipe(encode="png")
        )
    assert convert_imageset(root, names, f"{tmp_path}/db").records == 9


def test_an_unknown_type_of_file(tmp_path: Path) -> None:
    root, names = draw(tmp_path, 2)
    with pytest.raises(DataError, match=r'0.png cannot be stored as an image of type "xyz"'):
        convert_imageset(root, names, f"{tmp_path}/db", recipe=Recipe(encode="xyz"))


class Stop(KeyboardInterrupt):
    pass


@contextmanager
def interrupted(monkeypatch: pytest.MonkeyPatch, after: int) -> Iterator[None]:
    """In this block runs commit each 4 records, and one is interrupted at the line `after`."""
    count = module.Job._count

    def stop(job: module.Job, done: module.Done, *rest: object) -> module.Done:
        if done.lines == after:
            raise Stop
        return count(job, done, *rest)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(module, "COMMIT_EVERY", 4)
        patch.setattr(module.Job, "_count", stop)
        with pytest.raises(Stop):
            yield


@pytest.mark.parametrize("backend", ["lmdb", "leveldb"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_interrupted_runs_go_on(
    backend: str,
    shuffle: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if backend == "leveldb":
        pytest.importorskip("plyvel", reason="plyvel is not installed")
    root, names = draw(tmp_path)
    os.remove(f"{root}3.png")
    db, partial = tmp_path / "db", tmp_path / "db.partial"
    for after in (10, 21):
        with interrupted(monkeypatch, after):
            convert_imageset(root, names, str(db), shuffle=shuffle, backend=backend, resume=True)
        assert not db.exists()
        note = json.loads((partial / "caffepy_partial.json").read_text())
        assert after - 6 < note["progress"]["lines"] <= after
        assert len(records(partial)) == note["progress"]["records"]
        assert f"{partial} holds the records of the first" in caplog.text
    with pytest.raises(
        DataError,
        match=r"db.partial is left of an interrupted run; go on with --resume, or remove it",
    ):
        convert_imageset(root, names, str(db), shuffle=shuffle, backend=backend)
    assert convert_imageset(
        root, names, str(db), shuffle=shuffle, backend=backend, resume=True
    ) == Converted(29, 1)
    assert not partial.exists()
    assert not (db / "caffepy_partial.json").exists()
    seed = note["recipe"]["seed"]
    convert_imageset(root, names, f"{tmp_path}/whole", shuffle=shuffle, seed=seed, backend=backend)
    assert records(db) == records(tmp_path / "whole")
    labels = [Datum.FromString(value).label for _, value in records(db)]
    assert sorted(labels) == [i for i in range(30) if i != 3]
    assert (labels == sorted(labels)) != shuffle


def test_only_the_same_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, names = draw(tmp_path)
    with interrupted(monkeypatch, 10):
        convert_imageset(root, names, f"{tmp_path}/db", shuffle=True, seed=5)
    for other in (
        {"recipe": Recipe(gray=True)},
        {"seed": 6},
        {"shuffle": False},
        {"check_size": True},
    ):
        with pytest.raises(DataError, match=r"db.partial was made with another \w+; give the same"):
            convert_imageset(
                root, names, f"{tmp_path}/db", resume=True, **{"shuffle": True, **other}
            )  # type: ignore[arg-type]
    Path(names).write_text("0.png 1\n")
    with pytest.raises(DataError, match="was made with another list;"):
        convert_imageset(root, names, f"{tmp_path}/db", shuffle=True, resume=True)
    (tmp_path / "db.partial" / "caffepy_partial.json").write_text("{")
    with pytest.raises(DataError, match="does not say how far the run came"):
        convert_imageset(root, names, f"{tmp_path}/db", shuffle=True, resume=True)


def test_a_batch_that_was_written_but_not_noted_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, names = draw(tmp_path)
    with interrupted(monkeypatch, 18):
        convert_imageset(root, names, f"{tmp_path}/db")
    note = tmp_path / "db.partial" / "caffepy_partial.json"
    content = json.loads(note.read_text())
    content["progress"].update(lines=8, records=8)
    note.write_text(json.dumps(content))
    assert convert_imageset(root, names, f"{tmp_path}/db", resume=True, check=True) == Converted(
        30, 0
    )


def test_two_processes_do_not_write_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, names = draw(tmp_path)
    with interrupted(monkeypatch, 18):
        convert_imageset(root, names, f"{tmp_path}/db")
    descriptor = os.open(tmp_path / "db.partial", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(DataError, match=r"db\.partial is being written by another process"):
        convert_imageset(root, names, f"{tmp_path}/db", resume=True)
    os.close(descriptor)
    assert convert_imageset(root, names, f"{tmp_path}/db", resume=True, check=True) == Converted(
        30, 0
    )


@pytest.mark.parametrize("resume", [False, True])
def test_another_process_starts_at_the_same_moment(
    resume: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, names = draw(tmp_path)
    order = module.Job.order

    def other(job: module.Job, shuffle: bool, seed: int | None) -> None:
        (tmp_path / "db.partial").mkdir()
        (tmp_path / "db.partial" / "data.mdb").touch()
        order(job, shuffle, seed)

    monkeypatch.setattr(module.Job, "order", other)
    with pytest.raises(DataError, match=r"db\.partial is being written by another process"):
        convert_imageset(root, names, f"{tmp_path}/db", resume=resume)
    assert os.listdir(tmp_path / "db.partial") == ["data.mdb"]


def test_killed_before_anything_was_written(tmp_path: Path) -> None:
    root, names = draw(tmp_path)
    (tmp_path / "db.partial").mkdir()
    (tmp_path / "db.partial" / ".caffepy_partial.json.999999999.0123abcd.tmp").touch()
    assert convert_imageset(root, names, f"{tmp_path}/db", resume=True, check=True) == Converted(
        30, 0
    )
    assert os.listdir(tmp_path / "db") == ["data.mdb"]


@pytest.mark.parametrize("step", ["rename", "unlink"])
def test_killed_in_the_end(step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, names = draw(tmp_path)

    def stop(*_: object) -> None:
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(os, step, stop)
        with pytest.raises(Stop):
            convert_imageset(root, names, f"{tmp_path}/db")
    if step == "rename":
        assert convert_imageset(
            root, names, f"{tmp_path}/db", resume=True, check=True
        ) == Converted(30, 0)
    else:
        assert unfinished(f"{tmp_path}/db") == ""
        assert len(records(tmp_path / "db")) == 30


def test_a_list_that_can_be_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, names = draw(tmp_path)
    with interrupted(monkeypatch, 18):
        convert_imageset(root, names, f"{tmp_path}/db")
    reading, writing = os.pipe()
    os.write(writing, Path(names).read_bytes().replace(b"29.png 29", b"29.png 30"))
    os.close(writing)
    with pytest.raises(DataError, match="was made with another list;"):
        convert_imageset(root, f"/dev/fd/{reading}", f"{tmp_path}/db", resume=True)
    os.close(reading)


def test_a_database_without_a_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the new database has no name"):
        convert_imageset(*draw(tmp_path), "")


def test_a_database_that_differs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root, names = draw(tmp_path, 5)
    os.remove(f"{root}3.png")
    convert_imageset(root, names, f"{tmp_path}/good")
    (_, zero), (key1, _), (key2, two), (key4, _) = records(tmp_path / "good")
    label = Datum.FromString(two)
    label.label = 9
    with write_database(f"{tmp_path}/db") as writer:
        for key, value in [
            (b"00000000_other", zero),
            (key1, zero),
            (key2, label),
            (b"00000003_3.png", zero),
        ]:
            writer.put(key, value)
        writer.put("z", zero)
    caplog.clear()
    with pytest.raises(DataError, match="db differs from the list and its images in 7 records"):
        convert_imageset(root, names, f"{tmp_path}/db", check=True)
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR] == [
        '"00000000_0.png" is missing',
        '"00000000_other" is not of the list',
        '"00000001_1.png" has label 0, not 1',
        '"00000002_2.png" has label 9, not 2',
        '"00000003_3.png" is there, but its image cannot be read',
        f'"{key4.decode()}" is missing',
        '"z" is not of the list',
    ]
    assert convert_imageset(root, names, f"{tmp_path}/good", check=True) == Converted(4, 1)


def test_records_that_are_no_datums_differ(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root, names = draw(tmp_path, 1)
    with write_database(f"{tmp_path}/db") as writer:
        writer.put("00000000_0.png", b"\xff\xff")
    with pytest.raises(DataError, match="db differs from the list and its images in 1 records"):
        convert_imageset(root, names, f"{tmp_path}/db", check=True)
    assert '"00000000_0.png" is no Datum' in caplog.messages


def test_a_shuffled_database_is_compared_in_the_order_of_its_seed(tmp_path: Path) -> None:
    root, names = draw(tmp_path, 9)
    convert_imageset(root, names, f"{tmp_path}/db", shuffle=True, seed=3)
    assert (
        convert_imageset(root, names, f"{tmp_path}/db", shuffle=True, seed=3, check=True).records
        == 9
    )
    with pytest.raises(UsageError, match="give the --seed"):
        convert_imageset(root, names, f"{tmp_path}/db", shuffle=True, check=True)
    with pytest.raises(DataError, match="differs"):
        convert_imageset(root, names, f"{tmp_path}/db", shuffle=True, seed=4, check=True)


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, names = draw(tmp_path, 3)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("caffepy.data.write.LMDBWriter._write", full)
    with pytest.raises(DataError, match="db cannot be written: no space left on device"):
        convert_imageset(root, names, f"{tmp_path}/db")
    assert sorted(os.listdir(tmp_path)) == ["images", "list.txt"]


def test_a_map_that_is_too_small_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("caffepy.data.write.FIRST_MAP_SIZE", 1 << 15)
    monkeypatch.setattr(module, "COMMIT_EVERY", 7)
    root, names = draw(tmp_path, 40)
    recipe = Recipe(False, 64, 64)
    assert convert_imageset(root, names, f"{tmp_path}/db", recipe=recipe, check=True).records == 40


def test_a_key_that_is_too_long_is_named(tmp_path: Path) -> None:
    root, names = draw(tmp_path, 2)
    inner = "/".join(["d" * 200, "e" * 200, "f" * 150])
    os.makedirs(f"{root}{os.path.dirname(inner)}")
    shutil.copy(f"{root}1.png", f"{root}{inner}")
    Path(names).write_text(f"0.png 0\n{inner} 1\n")
    with pytest.raises(DataError, match=r'keys have 1 to 511 bytes, but "00000001_ddd.*f" 561'):
        convert_imageset(root, names, f"{tmp_path}/db")


def test_a_label_of_more_than_32_bits_is_named(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("a.png 1\nb.png 2147483648\n")
    with pytest.raises(DataError, match=r"list.txt:2: label 2147483648 has more than 32 bits"):
        convert_imageset("", f"{tmp_path}/list.txt", f"{tmp_path}/db")


def test_images_that_are_too_large(tmp_path: Path) -> None:
    root, names = draw(tmp_path, 2)
    png = bytearray(Path(f"{root}1.png").read_bytes())
    png[16:24] = struct.pack(">II", 1 << 17, 1 << 17)  # its width and height
    png[29:33] = struct.pack(">I", zlib.crc32(png[12:29]))
    Path(f"{root}1.png").write_bytes(png)
    assert convert_imageset(root, names, f"{tmp_path}/db") == Converted(1, 1)
    with pytest.raises(MemoryError, match="an image of 2147483648 x 2 pixels"):
        convert_imageset(root, names, f"{tmp_path}/large", recipe=Recipe(width=1 << 31, height=2))
    assert sorted(os.listdir(tmp_path)) == ["db", "images", "list.txt"]


def test_lists_of_other_systems(tmp_path: Path) -> None:
    root, names = draw(tmp_path, 2)
    Path(names).write_bytes(b"0.png 7\r\n1.png 8\r\n\r\n")
    convert_imageset(root, names, f"{tmp_path}/db")
    assert [Datum.FromString(value).label for _, value in records(tmp_path / "db")] == [7, 8]
