"""Hangs that no rank waits for: of the root's set-up, of one solver, of code that keeps Python's
lock. tests/parallel has those of ranks.
"""

import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from caffepy.core import hangs
from caffepy.core.errors import SyncError
from caffepy.ops.cpu import lock_watch
from caffepy.solver import Monitor, Signals
from tests.parallel.cases import Run, net
from tests.parallel.faults import caffepy, goes_on_exactly, write

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compile what the CPU runs, so that no deadline passes meanwhile."""
    Run(2, net(3), until=2)


def test_the_set_up_of_the_root(folder: Path) -> None:
    write(folder, {"what": "hang", "rank": 0, "at": "setup"})
    run = caffepy("--deadlines", "set-up=2", on="--cpu 2")
    assert run.returncode == SyncError.exit_code
    assert "the run made no progress for 2 s (set-up)" in run.stderr
    assert "time.sleep(60)" in run.stderr, "the stacks of all threads"


@pytest.mark.parametrize("what", ["hang", "deaf"])
def test_one_solver(what: str, folder: Path) -> None:
    write(folder, {"what": what, "rank": 0, "at": 6})
    run = caffepy("--deadlines", "step=4", on="--cpu 1")
    assert run.returncode == SyncError.exit_code
    told = "the run made no progress for 4 s (step); the last layer that began is net.prototxt:"
    assert told in run.stderr
    assert 'layer "faulty" (Python)' in run.stderr
    assert "time.sleep(60)" in run.stderr
    goes_on_exactly(folder, on="--cpu 1")


@pytest.mark.parametrize(("at", "on"), [("setup", "--cpu 1"), (6, "--cpu 1"), (6, "--cpu 2")])
def test_code_that_keeps_pythons_lock(at: object, on: str, folder: Path) -> None:
    write(folder, {"what": "keeps the lock", "rank": 0, "at": at})
    run = caffepy("--deadlines", "set-up=4,step=4,test=4", on=on)
    assert run.returncode == SyncError.exit_code
    said = "the run made no progress, since some code keeps Python's lock:\n"
    assert f"caffepy: error: {said}" in run.stderr
    assert "faulty.py" in run.stderr.split(said)[1], "the stacks of all threads"


@pytest.fixture
def monitor() -> Iterator[Monitor]:
    with Signals() as signals, Monitor(signals) as monitor:
        yield monitor


def test_a_run_without_deadlines_is_told_of_once_and_goes_on(
    monitor: Monitor, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "caffepy"):
        monitor.begin({"set-up": 0.3}, ends=False)
        time.sleep(1.5)
    (told,) = caplog.messages
    assert told.startswith("the run made no progress for 0.3 s (set-up)\n")
    assert "time.sleep(1.5)" in told


def test_a_run_that_gets_on_is_left_alone(
    monitor: Monitor, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "caffepy"):
        monitor.begin({"set-up": 2}, ends=True)
        for _ in range(50):
            monitor.signals.check()
            time.sleep(0.06)
    assert not caplog.messages


def test_the_loop_without_a_lock_ends() -> None:
    state = np.zeros(hangs.SIZE, np.int64)
    state[hangs.SIGNAL], state[hangs.DESCRIPTOR] = signal.SIGRTMAX - 1, -1
    given = state, np.zeros(1, np.int32), np.zeros(1, np.uint8), 130
    thread = threading.Thread(target=lock_watch.watch, args=given)
    thread.start()
    state[hangs.ENDED] = 1
    thread.join(60)
    assert state[hangs.STARTED]
    assert not thread.is_alive()
