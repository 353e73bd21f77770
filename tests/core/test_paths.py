from pathlib import Path

import pytest

from caffepy import models
from caffepy.core.files import locate


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def test_the_working_directory_comes_first(folders: Path) -> None:
    solver = str(folders / "there" / "solver.prototxt")
    (folders / "there" / "net").touch()
    assert locate("net", solver) == str(folders / "there" / "net")
    (folders / "here" / "net").touch()
    assert locate("net", solver) == "net"


def test_what_is_nowhere_stays_as_it_was_written(folders: Path) -> None:
    assert locate("net", str(folders / "there" / "solver.prototxt")) == "net"
    assert locate("net") == "net"
    assert locate("") == ""
    assert locate("/a/net", "/b/solver") == "/a/net"


def test_a_bundled_net_means_its_own_files(folders: Path) -> None:
    solver = models.path("digits", "solver")
    assert solver
    (folders / "here" / "train_val.prototxt").touch()
    assert locate("train_val.prototxt", solver) == models.path("digits", "train_val")
    (folders / "here" / "mnist_train_lmdb").mkdir()
    assert locate("mnist_train_lmdb", models.path("lenet", "train_val")) == "mnist_train_lmdb"
