"""A run that is killed goes on from its newest snapshot, and is not started for ever."""

from pathlib import Path

from tests.parallel.faults import caffepy, write


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
    assert "The run ended with SIGKILL; restart 1 of 1, from its beginning" in run.stderr
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
