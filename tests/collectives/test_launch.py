"""What processes of a launcher know of each other while MPI_Init waits."""

import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from caffepy.collectives import launch
from caffepy.collectives.launch import InitWatch
from caffepy.core.errors import SyncError

SIZE, RANK, ON_HOST = launch.LAUNCHERS[0]
JOB = "PMIX_NAMESPACE"
CASES: dict[str, tuple[Mapping[int, str], str, str]] = {
    # states of the processes of this host; how many of them the launcher says are on it; the error
    "not one began": ({0: "S"}, "3", "processes 1 and 2 of 3 (host HOST) died before MPI_Init was"),
    "one is a zombie": ({0: "S", 1: "Z", 2: "S"}, "3", "process 1 of 3 (host HOST) died before "),
    "one is stopped": ({0: "S", 1: "T", 2: "S"}, "3", "within 0.2 s: process 1 of this host is st"),
    "another host": (
        {0: "S", 1: "S"},
        "2",
        "processes 0 and 1 of this host are there; look at pro",
    ),
    "all are there": (
        {0: "S", 1: "S", 2: "S"},
        "3",
        "0 of 3 (host HOST): MPI_Init did not end wit",
    ),
}


def put(folder: Path, number: int, rank: int, state: str, job: str = "mine") -> None:
    """Write the files of a process as /proc has them."""
    (folder / str(number)).mkdir()
    (folder / str(number) / "environ").write_bytes(f"A=\0{RANK}={rank}\0{JOB}={job}\0".encode())
    (folder / str(number) / "stat").write_text(f"{number} (a) b) {state} 1 2")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("own", [0, 2])
def test_who_is_missing_is_told_by_the_lowest_that_lives(
    own: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states, on_host, expected = CASES[name]
    for name, value in {SIZE: "3", RANK: str(own), ON_HOST: on_host, JOB: "mine"}.items():
        monkeypatch.setenv(name, value)
    for attribute, value in {"PROCESSES": tmp_path, "POLL": 0.01, "SETTLE": 0.03}.items():
        monkeypatch.setattr(launch, attribute, value)
    monkeypatch.setattr(launch, "LAST_WAIT", 0.05)
    monkeypatch.setattr(launch, "_has_launcher", lambda: True)
    monkeypatch.setattr(launch.platform, "node", lambda: "HOST")
    for rank, state in states.items():
        put(tmp_path, 100 + rank, rank, state)
    put(tmp_path, 200, 1, "S", job="of another run")
    (tmp_path / "self").mkdir()
    ends, told = list[BaseException](), threading.Event()

    def end(error: BaseException) -> None:
        ends.append(error)
        told.set()

    with InitWatch(0.2, end):
        assert told.wait(20)
    if own:
        assert isinstance(ends[0], SystemExit)
        assert ends[0].code == SyncError.exit_code
    else:
        assert isinstance(ends[0], SyncError)
        assert expected in str(ends[0])
