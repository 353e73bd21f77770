"""The newest snapshot that can be resumed from, as `--snapshot auto` takes it."""

import shutil
from itertools import product
from pathlib import Path

import pytest

from caffepy.core.errors import ConfigError
from caffepy.solver import newest_good
from tests.solver.cases import FORMATS, SOLVERS, damage, solver_of, state_of, trained


@pytest.mark.parametrize("how", ["flipped", "truncated", "empty", "gone"])
@pytest.mark.parametrize("which", ["caffemodel", "solverstate", "caffepystate"])
@pytest.mark.parametrize("form", FORMATS)
def test_auto_falls_back_to_the_newest_that_is_whole(
    form: str, which: str, how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    solver = trained(tmp_path, FORMATS[form])
    for _ in range(2):
        solver.step(3)
        solver.snapshot()
    suffix = ".h5" if form == "hdf5" and which != "caffepystate" else ""
    damage(tmp_path / f"s_iter_9.{which}{suffix}", how)
    expected = (
        9 if (which, how) == ("caffepystate", "gone") else 6
    )  # without a sidecar it is one of Caffe's snapshots
    assert newest_good(f"{tmp_path}/s") == state_of(tmp_path, expected, FORMATS[form])
    if expected == 6 and (which, how) != ("solverstate", "gone"):
        assert "s_iter_9" in caplog.text
        assert "cannot be resumed from" in caplog.text


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("differ", [False, True])
def test_files_of_two_writers_are_taken_only_if_they_belong_together(
    form: str, differ: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides of a cut link write the same iteration to a file system that they share, and each
    file is of either.
    """
    both, *sides = (tmp_path / name for name in ("both", "a", "b"))
    for folder, steps, kind in zip(
        (both, *sides), (2, 3, 3), ("SGD", "SGD", "Nesterov"), strict=True
    ):
        folder.mkdir()
        monkeypatch.chdir(folder)
        trained(Path(), f'type: "{kind if differ else "SGD"}" {FORMATS[form]}', steps)
    older, newer = (state_of(both, iteration, FORMATS[form]) for iteration in (2, 3))
    names = sorted(path.name for path in sides[0].glob("s_iter_3.*"))
    assert len(names) == 3
    for chosen in product(sides, repeat=3):
        for name, side in zip(names, chosen, strict=True):
            shutil.copy(side / name, both / name)
        fits = not differ or len(set(chosen)) == 1
        assert newest_good(f"{both}/s") == (newer if fits else older), chosen


def test_explicit_restore_refuses_a_damaged_snapshot(tmp_path: Path) -> None:
    trained(tmp_path)
    damage(tmp_path / "s_iter_3.caffemodel", "flipped")
    with pytest.raises(
        ConfigError, match=r"s_iter_3\.caffemodel: this file was damaged or changed"
    ):
        solver_of("").restore(state_of(tmp_path, 3))


def test_auto_without_snapshots_starts_fresh_and_without_whole_ones_refuses(tmp_path: Path) -> None:
    assert newest_good(f"{tmp_path}/s") is None
    trained(tmp_path)
    assert newest_good(f"{tmp_path}/other") is None
    damage(tmp_path / "s_iter_3.solverstate", "empty")
    with pytest.raises(ConfigError, match="none of the 1 snapshot"):
        newest_good(f"{tmp_path}/s")


def test_auto_takes_caffes_snapshots(tmp_path: Path) -> None:
    for path in SOLVERS.glob("sgd_step_iter_10.*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    found = newest_good(f"{tmp_path}/sgd_step")
    assert found is not None
    damage(Path(found), "truncated")
    other = newest_good(f"{tmp_path}/sgd_step")
    assert other is not None
    assert {Path(found).suffix, Path(other).suffix} == {".solverstate", ".h5"}
