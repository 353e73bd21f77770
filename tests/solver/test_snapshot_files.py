"""Files of snapshots: where they may be written, and that they are whole or absent."""

import logging
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from caffepy.core.errors import ConfigError, DataError, DivergenceError
from caffepy.solver import Action, Solver, check_folder, newest_good, sidecar, snapshot
from tests.solver.cases import ENVIRONMENT, FORMATS, NET, AskAt, solver_of, state_of


def test_folder_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_folder(f"{tmp_path}/s", total=1 << 10)
    with pytest.raises(ConfigError, match=r"the folder .*/gone of snapshot_prefix does not exist"):
        check_folder(f"{tmp_path}/gone/s")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        check_folder("gone/s")
    assert str(caught.value) == (
        f"the folder gone of snapshot_prefix does not exist (the working directory is {tmp_path}); "
        "create it or change snapshot_prefix"
    )
    with pytest.raises(ConfigError, match="a snapshot takes 1099511627776 MiB, but only"):
        check_folder(f"{tmp_path}/s", total=1 << 60)


def test_a_prefix_with_a_nul_is_refused() -> None:
    with pytest.raises(ConfigError, match="snapshot_prefix holds a NUL"):
        check_folder("s\0x")


def test_last_names_are_checked_before_training(tmp_path: Path) -> None:
    (tmp_path / "s_iter_5.caffepystate").mkdir()
    with pytest.raises(ConfigError, match=r"s_iter_5.caffepystate, which is a folder"):
        solver_of(f'max_iter: 5 snapshot_prefix: "{tmp_path}/s" ').solve()
    long = solver_of(f'max_iter: 5 snapshot_prefix: "{tmp_path}/{"s" * 240}" ')
    with pytest.raises(ConfigError, match="File name too long"):
        long.solve()
    assert long.iter == 0


@pytest.mark.parametrize("form", FORMATS)
def test_names_as_long_as_the_system_allows(form: str, tmp_path: Path) -> None:
    prefix = "s" * (255 - len("_iter_5.caffepystate.h5"))
    solver_of(f'max_iter: 5 snapshot_prefix: "{tmp_path}/{prefix}" {FORMATS[form]}').solve()
    assert len(list(tmp_path.iterdir())) == 3


def test_limit_of_file_sizes_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (30, 30))
    solver = solver_of(f'max_iter: 5 snapshot_prefix: "{tmp_path}/s" ')
    with pytest.raises(ConfigError, match="this process may write files of 30 bytes only"):
        solver.solve()
    assert solver.iter == 0


@pytest.mark.parametrize("form", FORMATS)
def test_names_that_cannot_be_loaded_again_are_refused(form: str, tmp_path: Path) -> None:
    settings = f'max_iter: 5 snapshot_prefix: "{tmp_path}/s" {FORMATS[form]}'
    twice = NET.replace('name: "in"', 'name: "ip"')
    with pytest.raises(ConfigError, match='several layers are named "ip"'):
        solver_of(settings, twice).solve()
    with pytest.raises(ConfigError, match='several layers are named "ip"'):
        solver_of(f"{settings} snapshot: 3 ", twice)
    (tmp_path / "net.prototxt").write_text(twice.replace("layer {", "\nlayer {").strip())
    with pytest.raises(ConfigError, match=r"several layers are named .ip. \(lines 1, 3\), so"):
        solver_of(f'net: "{tmp_path}/net.prototxt" {settings} snapshot: 3 ')
    unnamed = solver_of(settings, NET.replace('name: "ip"', 'name: ""'))
    if form == "hdf5":
        with pytest.raises(ConfigError, match='HDF5 cannot hold layers of the names ""'):
            unnamed.solve()
    else:
        unnamed.solve()


def test_files_of_killed_runs_are_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stale = tmp_path / ".s_iter_7.caffemodel.0123456789abcdef.tmp"
    of_others = tmp_path / ".s_best_iter_7.caffemodel.0123456789abcdef.tmp"
    stale.touch()
    of_others.touch()
    with caplog.at_level(logging.INFO):
        solver_of(f'max_iter: 1 snapshot_prefix: "{tmp_path}/s" ').solve()
    assert not stale.exists()
    assert of_others.exists()
    assert f"Removed {stale}, which a killed run left unfinished" in caplog.messages


def test_a_layer_that_changes_the_working_directory_moves_no_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in "here", "there":
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    solver = solver_of('max_iter: 4 snapshot: 2 snapshot_prefix: "s" ')
    solver.net.before_forward.append(lambda layer: os.chdir(tmp_path / "there"))
    solver.solve()
    assert len(list((tmp_path / "here").iterdir())) == 6
    assert not list((tmp_path / "there").iterdir())
    assert solver.resume_state.saved_now == "s_iter_4.solverstate"


def test_an_infinite_history_is_not_saved(tmp_path: Path) -> None:
    solver = solver_of(f'type: "Adam" momentum: 0.9 snapshot_prefix: "{tmp_path}/s" max_iter: 2 ')
    solver.step(1)
    solver.params.split(solver.history[1])[1][0] = np.inf
    with pytest.raises(DivergenceError) as caught:
        solver.solve()
    assert str(caught.value).startswith(
        'iteration 2: the history of parameter 1 of layer "ip" (InnerProduct) is not finite, so no '
        "snapshot is written; lower base_lr"
    )
    assert not list(tmp_path.iterdir())


def test_folder_is_checked_before_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="snapshot_prefix: the folder"):
        solver_of(f'snapshot: 5 snapshot_prefix: "{tmp_path}/gone/s" ')
    solver = solver_of(f'max_iter: 5 snapshot_prefix: "{tmp_path}/gone/s" ')
    with pytest.raises(ConfigError, match="does not exist"):
        solver.solve()
    assert solver.iter == 0


def test_unwritable_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(ConfigError, match="cannot be written: Permission denied"):
        check_folder(f"{tmp_path}/s")


def test_failing_snapshot_costs_the_snapshot_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    solver = solver_of(f'max_iter: 6 snapshot: 2 snapshot_prefix: "{tmp_path}/s" ')
    solver.step(2)
    whole = {path: path.read_bytes() for path in tmp_path.iterdir()}

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "_write_binary", full)
        solver.step(2)
    assert "No snapshot of iteration 4" in caplog.text
    assert re.search(
        "s_iter_4.solverstate: this file of a snapshot cannot be written: No space left on device "
        r"\(a snapshot takes \d+ KiB, and \d+ KiB are free\); "
        f"{tmp_path}/s_iter_2.solverstate is the last one that is complete; training goes on\n",
        caplog.text,
    )
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == whole
    solver.step(2)
    assert len(list(tmp_path.iterdir())) == 6


@pytest.mark.parametrize("seed", range(12))
def test_of_what_is_kept_the_newest_can_be_resumed(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever snapshots fail, and in whichever of their files: the last whole ones are there."""
    draw = np.random.default_rng(seed)
    keep = int(draw.integers(1, 4))
    solver = solver_of(f'max_iter: 100 snapshot: 1 snapshot_prefix: "{tmp_path}/s" ')
    solver.resume_state.keep = keep
    whole = [1]
    solver.step(1)
    for _ in range(12):
        fails = draw.random() < 0.5
        writer = ("write_binary", "_write_binary", "replacing_all")[draw.integers(3)]

        def full(*args: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            if fails:
                patch.setattr(snapshot, writer, full)
            solver.step(1)
        if not fails:
            whole.append(solver.iter)
        assert newest_good(f"{tmp_path}/s") == state_of(tmp_path, whole[-1])
        left = sorted(int(path.stem.rpartition("_")[2]) for path in tmp_path.glob("*.solverstate"))
        assert left == whole[-keep:]
        assert len(list(tmp_path.iterdir())) == 3 * len(left)
    assert 1 < len(whole) < 13


def test_failing_last_snapshot_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    solver = solver_of(f'max_iter: 2 snapshot: 2 snapshot_prefix: "{tmp_path}/s" ')

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(snapshot, "_write_binary", full)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ConfigError, match=r"No space left on device \(a snap[^;]* are free\)$"):
        solver.solve()
    assert not list(tmp_path.iterdir())


def fail_at(solver: Solver, iteration: int) -> None:
    if solver.iter == iteration:
        raise DataError("it fails")


@pytest.mark.parametrize("how", ["the last iteration", "an error", "a signal"])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("free", ["here", "temporary"])
def test_the_last_snapshot_is_kept_where_there_is_room(
    free: str,
    form: str,
    how: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name in ("here", "temporary", "full", "whole"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    settings = f"max_iter: 7 momentum: 0.9 {FORMATS[form]} "
    (whole := solver_of(f'{settings} snapshot_prefix: "../whole/s" ')).solve()
    settings += 'snapshot: 3 snapshot_prefix: "../full/s" '
    solver = solver_of(settings)
    if how == "an error":
        solver.net.before_forward.append(lambda layer: fail_at(solver, 5))
    elif how == "a signal":
        solver.action = AskAt(5, Action.STOP)
    write_sidecar = sidecar.write

    def write(path: str, content: dict[str, Any]) -> None:
        if not os.path.realpath(path).startswith(f"{tmp_path}/{free}/"):
            raise OSError(28, "No space left on device")
        write_sidecar(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(sidecar, "write", write)
        with pytest.raises(DataError if how == "an error" else ConfigError) as caught:
            solver.solve()
    told = f"{caught.value}\n{caplog.text}"
    state = re.search(r"\. This one is in (.*): --snapshot (\1/\S*), or --snapshot auto", told)
    assert state, told
    assert "No snapshot of iteration 3: ../full/s_iter_3.caff" in told
    (kept,) = (tmp_path / free).iterdir()
    assert os.path.realpath(state[1]) == str(kept)
    assert len(list(kept.iterdir())) == 3
    others = {"here", "temporary", "full"} - {free}
    assert not [path for name in others for path in (tmp_path / name).iterdir()]
    resumed = solver_of(settings)
    for prefix, there in {"../full/s": True, str(tmp_path / "full/s"): True, "s": False}.items():
        assert bool(newest_good(prefix, resumed.resume_state.run)) == there
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: -1)
        assert not newest_good("../full/s"), "it is another user's"
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", None)
        patch.setattr(tempfile, "_candidate_tempdir_list", list)
        assert bool(newest_good("../full/s")) == (free == "here"), "no file can be written anywhere"
    newest = newest_good("../full/s")
    assert newest
    assert os.path.samefile(newest, state[2])
    resumed.restore(newest)
    assert resumed.iter == (7 if how == "the last iteration" else 5)
    resumed.step(7 - resumed.iter)
    np.testing.assert_array_equal(resumed.params.data, whole.params.data)


def test_the_last_snapshot_comes_back_under_its_prefix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once there is room, a run that was rescued after its last iteration writes its files."""
    for name in ("here", "full"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    settings = 'max_iter: 6 snapshot: 3 snapshot_prefix: "../full/s" '
    write_sidecar = sidecar.write

    def write(path: str, content: dict[str, Any]) -> None:
        if "full" in os.path.realpath(path):
            raise OSError(28, "No space left on device")
        write_sidecar(path, content)

    solver = solver_of(settings)
    with monkeypatch.context() as patch:
        patch.setattr(sidecar, "write", write)
        with pytest.raises(ConfigError, match="This one is in"):
            solver.solve()
    assert not list((tmp_path / "full").iterdir())
    for _ in range(2):  # the second goes on from what the first wrote, and writes nothing
        solver_of(settings).solve(newest_good("../full/s"))
        assert len(list((tmp_path / "full").iterdir())) == 3
    assert newest_good("../full/s") == "../full/s_iter_6.solverstate"
    (back := solver_of(settings)).restore("../full/s_iter_6.solverstate")
    np.testing.assert_array_equal(back.params.data, solver.params.data)


def test_what_killed_processes_left_of_rescued_snapshots_is_completed_or_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("whole", "full"):
        (tmp_path / name).mkdir()
    solver_of('snapshot_prefix: "whole/s" ').snapshot()
    whole, lost = (snapshot.Files.of(f"{name}/s", 0, hdf5=False) for name in ("whole", "full"))

    def unfinished(path: str) -> Path:
        return Path(path).with_name(f".{os.path.basename(path)}.0123456789abcdef.tmp")

    def killed_at_the_last_name(files: snapshot.Files) -> None:
        shutil.copy(whole.model, files.model)
        shutil.copy(whole.sidecar, files.sidecar)
        shutil.copy(whole.state, unfinished(files.state))

    assert snapshot.write_elsewhere(lost, killed_at_the_last_name)
    assert snapshot.write_elsewhere(lost, lambda files: unfinished(files.model).touch())
    assert len(list(tmp_path.glob("s_rescued_*"))) == 2
    assert not newest_good("full/s")
    snapshot.clean("full/s")
    (kept,) = tmp_path.glob("s_rescued_*")
    assert newest_good("full/s") == f"{kept.name}/s_iter_0.solverstate"


FULL = """
import resource, signal, sys
from tests.solver.cases import solver_of
from caffepy.core.errors import CaffeError, ConfigError, DataError
solver = solver_of(sys.argv[1])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (200, resource.RLIM_INFINITY))
try:
    solver.snapshot()
except ConfigError as error:
    sys.exit(str(error))
"""


@pytest.mark.parametrize("form", FORMATS)
def test_full_disk_is_one_message(form: str, tmp_path: Path) -> None:
    settings = f'snapshot_prefix: "{tmp_path}/s" {FORMATS[form]}'
    command = [sys.executable, "-c", FULL, settings]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT)
    assert run.returncode == 1
    assert "this file of a snapshot cannot be written: " in run.stderr
    assert "Traceback" not in run.stderr
    assert not list(tmp_path.iterdir())


WRITER = """
import os, sys
from tests.solver.cases import solver_of
solver = solver_of(sys.argv[1])
for _ in sys.stdin:
    if not (child := os.fork()):
        print(os.getpid(), flush=True)
        while True:
            solver.step(1)
            solver.snapshot()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""For each line a process that trains and saves without an end, and how it ended."""


KILLED = """
import os, signal, sys
from pathlib import Path
from caffepy.solver import newest_good, snapshot
from tests.solver.cases import solver_of

folder = Path(sys.argv[1]).parent
settings = f'snapshot_prefix: "{sys.argv[1]}" {sys.argv[2]}'
files = lambda: {p.name: p.read_bytes() for p in folder.glob("s_iter*") if "caffepy" not in p.name}
old, new = solver_of(settings), solver_of(settings + "random_seed: 8 ")
new.snapshot()
written = files()
kinds = []
for point in range(1, 100):
    old.snapshot()
    before = files()
    if not (child := os.fork()):
        calls = 0
        def killing(call):
            def count(*args):
                global calls
                calls += 1
                if calls == point:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*args)
            return count
        os.replace, os.fsync = killing(os.replace), killing(os.fsync)
        new.snapshot()
        os._exit(0)
    if not os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        break
    snapshot.clean(sys.argv[1])
    left = files()
    assert left in (before, written), point
    assert newest_good(sys.argv[1]), "its sidecar has other checksums"
    assert len(list(folder.iterdir())) == 3
    kinds.append(left == written)
print(*kinds)
"""


@pytest.mark.parametrize("form", FORMATS)
def test_a_snapshot_that_is_killed_while_it_replaces_another_leaves_one_of_both(
    form: str, tmp_path: Path
) -> None:
    """Killed before each fsync and each rename."""
    command = [sys.executable, "-c", KILLED, f"{tmp_path}/s", FORMATS[form]]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT)
    assert not run.returncode, run.stderr
    kinds = run.stdout.split()
    assert sorted(kinds) == kinds, "first the old one, then the new one"
    assert (kinds.count("False"), kinds.count("True")) == (4, 5)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_killed_snapshots_are_whole_or_absent(form: str, tmp_path: Path) -> None:
    """After each of CAFFEPY_KILLS kills, every file under its final name must load."""
    settings = f'snapshot_prefix: "{tmp_path}/s" snapshot_diff: true {FORMATS[form]}'
    rng = np.random.default_rng()
    command, pipe = [sys.executable, "-c", WRITER, settings], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=ENVIRONMENT) as writer:
        assert writer.stdin
        assert writer.stdout
        for _ in range(int(os.environ.get("CAFFEPY_KILLS", "4"))):
            print(file=writer.stdin, flush=True)
            process = int(writer.stdout.readline())
            time.sleep(rng.uniform(0.005, 0.3))
            os.kill(process, signal.SIGKILL)
            assert int(writer.stdout.readline()) == -signal.SIGKILL
            _check_all(tmp_path, settings)


def _check_all(folder: Path, settings: str) -> None:
    solver = solver_of(settings)
    for path in folder.glob("s_iter_*"):
        if ".caffemodel" in path.name:
            model = solver_of(f'{settings} weights: "{path}" ')
            assert np.isfinite(model.params.data).all()
        elif ".solverstate" in path.name:
            solver.restore(str(path))
            assert solver.iter == int(path.name.split("_")[2].split(".")[0])
        else:
            assert sidecar.read(str(path)) is not None
    for path in folder.iterdir():
        assert path.name.startswith("s_iter_") or path.name.endswith(".tmp"), path
        path.unlink()
