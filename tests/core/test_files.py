import errno
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from caffepy.core import files
from caffepy.core.errors import UsageError
from caffepy.core.files import (
    check_writable,
    locked,
    read_regular,
    remove_stale,
    replacing,
    written,
)


def test_a_file_is_whole_or_absent(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with replacing(str(path)) as temporary:
        Path(temporary).write_text("new")
        assert not path.exists()
    assert path.read_text() == "new"
    with suppress(KeyError), replacing(str(path)) as temporary:
        Path(temporary).write_text("half")
        raise KeyError
    assert [p.read_text() for p in tmp_path.iterdir()] == ["new"]


@pytest.mark.parametrize("name", ["x" * 255, "ä" * 127], ids=["ascii", "two_bytes"])
def test_names_may_be_as_long_as_the_system_allows(name: str, tmp_path: Path) -> None:
    with replacing(str(tmp_path / name)) as temporary:
        Path(temporary).write_text("")
    assert [path.name for path in tmp_path.iterdir()] == [name]


WRITER = """
import sys
from caffepy.core.files import replacing
with replacing(sys.argv[1]) as temporary:
    print(temporary, flush=True)
    sys.stdin.readline()
    open(temporary, "w").write("theirs")
"""


def test_what_killed_processes_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    """Whatever process ids say: those of another container or host mean nothing here."""
    path = tmp_path / "s_iter_3.caffemodel"
    ours = f"{os.getpid()}.01234567.tmp"
    left = [
        tmp_path / f".s_iter_3.caffemodel.{name}"
        for name in (ours, "1.01234567.tmp", "0123456789abcdef.tmp")
    ]
    others = [tmp_path / name for name in (f".s_iter_3.caffemodel.h5.{ours}", ".s_own.tmp")]
    command = [sys.executable, "-c", WRITER, str(path)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as alive:
        assert alive.stdin
        assert alive.stdout
        theirs = alive.stdout.readline().strip()
        for name in (*left, *others):
            name.touch()
        assert remove_stale(str(tmp_path), r"s_iter_\d+\.caffemodel") == sorted(map(str, left))
        assert sorted(map(str, tmp_path.iterdir())) == sorted(map(str, (*others, theirs)))
        alive.stdin.write("\n")
        alive.stdin.flush()
        assert alive.wait() == 0
    assert path.read_text() == "theirs"


def test_a_file_that_another_process_finds_before_it_is_locked_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where both sides of a cut link write the same snapshot."""
    lock, remove = files._lock, files._remove
    looks, removes, written = (threading.Event() for _ in range(3))

    def remove_late(path: str) -> bool:
        removes.set()
        written.wait(0.5)
        return remove(path)

    def lock_late(descriptor: int) -> None:
        if not looks.is_set():
            looks.set()
            other.start()
            removes.wait(5)
        lock(descriptor)

    monkeypatch.setattr(files, "_remove", remove_late)
    monkeypatch.setattr(files, "_lock", lock_late)
    other = threading.Thread(target=remove_stale, args=(str(tmp_path), "x"))
    with replacing(str(tmp_path / "x")) as temporary:
        Path(temporary).write_text("new")
        written.set()
        other.join()
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_text() == "new"


def test_a_lock_holds_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    held = False
    with locked(str(tmp_path / ".s.lock"), "me", "here"):
        held = (tmp_path / ".s.lock").exists()
    assert held
    assert not list(tmp_path.iterdir())


def test_a_tool_that_was_killed_leaves_nothing_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "mean.binaryproto"
    command = [sys.executable, "-c", WRITER, str(path)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as killed:
        assert killed.stdout
        killed.stdout.readline()
        killed.kill()
    assert len(list(tmp_path.iterdir())) == 1
    with written(str(path)) as temporary:
        Path(temporary).write_text("ours")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [(path.name, "ours")]


def test_what_cannot_be_written_is_told_before_the_work(tmp_path: Path) -> None:
    check_writable(str(tmp_path / "new"))
    check_writable(os.devnull)
    assert not list(tmp_path.iterdir())
    for path, message in (
        (tmp_path, "is a directory"),
        (tmp_path / "none" / "x", "no such file or directory"),
    ):
        with pytest.raises(UsageError, match=f'cannot write "{path}": {message}'):
            check_writable(str(path))


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_may_have_no_end_is_not_read(kind: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="it is a pipe or a device, not a file"):
        read_regular(str(tmp_path / "pipe") if kind == "pipe" else "/dev/zero")


@pytest.mark.parametrize("told", [0, 2, 3, 9])
def test_a_file_that_changes_its_size_is_read_whole(
    told: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").write_bytes(b"12345")
    opened = files._opened
    monkeypatch.setattr(files, "_opened", lambda *how: (opened(*how)[0], told))
    monkeypatch.setattr(files, "READ", 1)
    assert read_regular(str(tmp_path / "x")) == b"12345"


def test_a_file_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"123")
    (tmp_path / "link").symlink_to("x")
    assert read_regular(str(tmp_path / "link")) == b"123"
    with pytest.raises(IsADirectoryError):
        read_regular(str(tmp_path))
