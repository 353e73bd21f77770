"""A run that is killed goes on from its newest snapshot, and is not started for ever."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from caffepy.commands import restart
from caffepy.commands.restart import supervise
from caffepy.core.errors import INTERRUPTED
from caffepy.solver import Signals
from caffepy.solver.snapshot import Files, write_elsewhere
from tests.parallel.faults import NOTHING, caffepy, write
from tests.solver.cases import ENVIRONMENT


def test_a_killed_run_goes_on_from_its_newest_snapshot(folder: Path) -> None:
    write(folder, {"what": "SIGKILL", "rank": 0, "at": 6}, "snapshot: 4 max_iter: 8")
    run = caffepy("--max-restarts", "1", on="--cpu 1")
    assert run.returncode == 0
    told = "The run ended with SIGKILL; restart 1 of 1, from its newest snapshot"
    assert run.stderr.count(told) == 1
    assert "Resuming from s_iter_4.solverstate" in run.stderr
    assert Path("s_iter_8.solverstate").exists()


def test_a_run_that_never_gets_on_is_not_started_for_ever(folder: Path) -> None:
    write(folder, {"what": "SIGKILL", "rank": 0, "at": 2}, "snapshot: 4 max_iter: 8")
    run = caffepy("--max-restarts", "1", on="--cpu 1")
    assert run.returncode == 137
    assert "The run ended with SIGKILL; restart 1 of 1, from where it began" in run.stderr
    assert "The run ended with SIGKILL; restarts without a new snapshot: 1" in run.stderr
    assert run.stderr.count("; restart 1 of 1") == run.stderr.count("; restart ") == 1


def test_mistakes_are_no_reason_to_restart(folder: Path) -> None:
    write(folder, {"what": "raise", "rank": 0, "at": 2}, "snapshot: 4 max_iter: 8")
    run = caffepy("--max-restarts", "3", on="--cpu 1")
    assert run.returncode == 3
    assert "restart" not in run.stderr


def test_a_signal_stops_the_run_and_its_restarts(folder: Path) -> None:
    write(folder, {"what": "SIGTERM", "rank": 0, "at": 3}, "snapshot: 100 max_iter: 8")
    run = caffepy("--max-restarts", "3", on="--cpu 1")
    assert run.returncode == 75
    assert "restart" not in run.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_a_run_whose_supervisor_is_killed_ends_with_a_snapshot(folder: Path) -> None:
    write(folder, {"what": "parent killed", "rank": 0, "at": 3}, "snapshot: 100 max_iter: 8")
    command = "-m caffepy train --solver solver.prototxt --cpu 1 --max-restarts 3"
    run = subprocess.run(
        [sys.executable, *command.split()], stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    assert run.returncode == -signal.SIGKILL
    assert "A signal stopped the run at iteration 3;" in run.stderr
    assert Path("s_iter_3.solverstate").exists()


def test_a_run_whose_supervisor_was_killed_while_it_started_does_not_train(folder: Path) -> None:
    write(folder, NOTHING)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    command = [
        sys.executable,
        "-m",
        "caffepy",
        "train",
        "--solver",
        "solver.prototxt",
        "--cpu",
        "1",
    ]
    environment = ENVIRONMENT | {restart.SUPERVISOR: str(dead.pid)}
    run = subprocess.run(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert run.returncode == INTERRUPTED, run.stderr
    assert not list(folder.glob("*.solverstate"))


def test_what_a_run_starts_does_not_take_itself_for_supervised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = list[int]()
    monkeypatch.setattr(restart, "end_with_parent", asked.append)
    monkeypatch.setenv(restart.SUPERVISOR, str(os.getppid()))
    restart.end_with_supervisor()
    assert asked == [signal.SIGTERM]
    assert restart.SUPERVISOR not in os.environ


@pytest.fixture
def handlers() -> Iterator[None]:
    """A command line's, which are put back."""
    before = {number: signal.getsignal(number) for number in Signals().effects}
    for number in before:
        signal.signal(number, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def run_as(script: str, monkeypatch: pytest.MonkeyPatch, most: int = 3) -> int:
    """Supervise a shell script, which notes each start."""
    Path("solver.prototxt").write_text('snapshot_prefix: "s"')
    Path("run").write_text(f"#!/bin/sh\necho >> starts\n{script}\n")
    Path("run").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(Path("run").absolute()))
    return supervise([], "solver.prototxt", most, Signals().effects)


@pytest.mark.parametrize("name", ["TERM", "INT", "HUP"])
def test_a_signal_that_ends_a_run_before_it_listens_starts_no_other(
    name: str, folder: Path, handlers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_as(f"kill -{name} $PPID; sleep 9", monkeypatch) == INTERRUPTED
    assert Path("starts").read_text() == "\n"


def test_a_run_that_was_asked_to_stop_and_fails_is_not_started_again(
    folder: Path, handlers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignoring = "trap : TERM; kill -TERM $PPID; sleep 0.5; exit"
    assert run_as(f"{ignoring} 7", monkeypatch) == 7
    assert Path("starts").read_text() == "\n"


def test_a_signal_that_asks_for_a_snapshot_leaves_the_restarts(
    folder: Path, handlers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignoring = "trap : HUP; kill -HUP $PPID; sleep 0.5; exit"
    assert run_as(f"{ignoring} 7", monkeypatch, most=1) == 7
    assert Path("starts").read_text() == "\n" * 2


def test_a_snapshot_that_was_rescued_from_a_full_disk_is_a_new_one(
    folder: Path,
    handlers: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def write(files: Files) -> None:
        Path(files.state).touch()

    rescued = write_elsewhere(Files.of("s", 4, False), write, str(folder))
    assert rescued
    begins = f"mkdir -p {Path(rescued.state).parent}; touch {rescued.state}; exit 7"
    shutil.rmtree(Path(rescued.state).parent)
    assert run_as(begins, monkeypatch, most=1) == 7
    assert "restart 1 of 1, from its newest snapshot" in caplog.text


def test_a_signal_while_a_process_starts_reaches_it(
    folder: Path, handlers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    class Late(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            started.append(self)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(restart.subprocess, "Popen", Late)
    try:
        assert run_as("sleep 9", monkeypatch) == INTERRUPTED
    finally:
        (process,) = started
        assert process.poll() == -signal.SIGTERM  # it is not left behind


def test_a_signal_that_was_ignored_is_ignored_where_nothing_listens(
    folder: Path, handlers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    assert run_as("kill -HUP $PPID; sleep 0.5; exit 0", monkeypatch) == 0
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
