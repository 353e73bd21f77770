import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from caffepy.core.errors import UsageError
from caffepy.core.files import check_writable, remove_stale, replacing, temporary_name


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


def test_what_killed_processes_left_is_removed(tmp_path: Path) -> None:
    code = (
        "from caffepy.core.files import temporary_name as t; "
        f"print(t({str(tmp_path / 's_iter_3.caffemodel')!r}))"
    )
    dead = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()
    alive, other = temporary_name(str(tmp_path / "s_iter_4.caffemodel")), dead.replace(".s_", ".r_")
    for path in (
        dead,
        alive,
        other,
        str(tmp_path / ".s_own.tmp"),
        str(tmp_path / "s_iter_3.caffemodel"),
    ):
        Path(path).touch()
    assert remove_stale(str(tmp_path / "s_")) == [dead]
    assert not os.path.exists(dead)
    assert len(list(tmp_path.iterdir())) == 4


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
