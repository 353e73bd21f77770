"""Lists: lines of any system, and what is no list."""

import os
from pathlib import Path

import h5py
import pytest

from caffepy.core.errors import DataError
from caffepy.data.sources.base import lines_of
from caffepy.data.sources.image_list import ImageList, read_list

LISTS = {
    "Unix": b"a b.png 1\nc.png 2\n",
    "Windows": b"a b.png 1\r\nc.png 2\r\n",
    "a byte order mark": b"\xef\xbb\xbfa b.png 1\nc.png 2",
    "blank lines": b"\na b.png 1\n \n\t\nc.png 2\n  \n",
}


@pytest.mark.parametrize("case", LISTS)
def test_entries(case: str, tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_bytes(LISTS[case])
    assert read_list(f"{tmp_path}/list.txt") == [("a b.png", 1), ("c.png", 2)]


def test_names_need_not_be_utf_8(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_bytes(b"\xe4.png 1\n")
    assert read_list(f"{tmp_path}/list.txt") == [("\udce4.png", 1)]


def test_a_line_without_a_blank_is_path_and_label(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "list.txt").write_text("a.png\n07.png\nb.png 2\n8\n")
    assert read_list(f"{tmp_path}/list.txt") == [
        ("a.png", 0),
        ("07.png", 7),
        ("b.png", 2),
        ("8", 8),
    ]
    assert caplog.messages == [
        f'{tmp_path}/list.txt: 2 labels are no integers; as in Caffe, "a.png" in line 1 counts as 0'
    ]


LABELS = {
    "": 0,
    "x": 0,
    "+4": 4,
    "-5": -5,
    "3.7": 3,
    "007": 7,
    "0": 0,
    "-2147483648": -(1 << 31),
    "\u0663": 0,
}


@pytest.mark.parametrize("label", LABELS)
def test_labels_are_what_c_makes_of_them(label: str, tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text(f"a.png {label}\n", encoding="utf-8")
    assert read_list(f"{tmp_path}/list.txt") == [("a.png", LABELS[label])]


ODD = {
    "a 1\nb -2\nc +3\t\n": "",
    "a 1 \n": 'a label is no integer; as in Caffe, "" in line 1 counts as 0',
    "a 1\nb 2.5\n": 'a label is no integer; as in Caffe, "2.5" in line 2 counts as 2',
    "a cat\nb dog\n": '2 labels are no integers; as in Caffe, "cat" in line 1 counts as 0',
}


@pytest.mark.parametrize("text", ODD)
def test_labels_that_are_no_integers_are_told(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "list.txt").write_text(text)
    read_list(f"{tmp_path}/list.txt")
    assert caplog.messages == ([f"{tmp_path}/list.txt: {ODD[text]}"] if ODD[text] else [])


@pytest.mark.parametrize("label", ["2147483648", "-2147483649", "9" * 5000])
def test_labels_of_more_than_32_bits(label: str, tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text(f"a.png 1\nb.png {label}\n")
    with pytest.raises(DataError, match=rf"list\.txt:2: label {label[:80]} has more than 32 bits"):
        read_list(f"{tmp_path}/list.txt")


def test_what_is_no_list(tmp_path: Path) -> None:
    (tmp_path / "16").write_bytes("a.png 1\n".encode("utf-16"))
    h5py.File(tmp_path / "h5", "w").close()
    (tmp_path / "0").write_bytes(b"a.png 1\nb\0.png 2\n")
    for name, kind in ("16", "UTF-16 text"), ("h5", "HDF5"), ("0", "unknown binary data"):
        with pytest.raises(DataError, match=rf'{name}" is {kind}, not a list as UTF-8 text'):
            list(lines_of(f"{tmp_path}/{name}"))
    with pytest.raises(DataError, match='no" cannot be read: no such file or directory'):
        list(lines_of(f"{tmp_path}/no"))
    with pytest.raises(DataError, match="cannot be read: is a directory"):
        list(lines_of(str(tmp_path)))


def test_an_image_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.png")
    (tmp_path / "list.txt").write_text("a.png 1\n")
    source = ImageList(f"{tmp_path}/list.txt")
    with pytest.raises(DataError, match=r"a\.png cannot be read: it is a pipe or a device"):
        source.decode(0)


def test_a_path_with_a_nul() -> None:
    with pytest.raises(DataError, match="cannot be read: embedded null byte"):
        read_list("a\0b")


def test_a_device_is_no_list() -> None:
    with pytest.raises(DataError, match='source "/dev/zero" is a device, not a list'):
        read_list("/dev/zero")
