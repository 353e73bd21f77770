from pathlib import Path

import pytest

from caffepy.core import cache


def test_entries_come_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = cache.cache_file("things.json")
    assert path == tmp_path / "caffepy" / "things.json"
    assert cache.read(path) == {}
    cache.add_entries(path, {"a": 1, "b": 2})
    cache.add_entries(path, {"b": 3})
    assert cache.read(path) == {"a": 1, "b": 3}
    assert [found.name for found in path.parent.iterdir()] == ["things.json"]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache.add_entries(tmp_path / "file" / "things.json", {"a": 1})
    assert cache.read(tmp_path / "file" / "things.json") == {}
