"""A signal ends a run that does not get on: with a snapshot when its grace is over, and the second
one at once.
"""

import array
import fcntl
import os
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from caffepy.core.events import asked_to_end
from caffepy.report import progress
from tests.parallel.faults import NOTHING, caffepy, goes_on_exactly, write
from tests.solver.cases import ENVIRONMENT, NET


@pytest.mark.parametrize("what", ["asked to stop", "asked to stop, and deaf"])
@pytest.mark.parametrize("on", ["--cpu 1", "--cpu 2"])
def test_a_layer_that_hangs(what: str, on: str, folder: Path) -> None:
    write(folder, {"what": what, "rank": 0, "at": 6})
    run = caffepy("--grace", "0.5", on=on)
    assert run.returncode == 75, run.stderr[-2000:]
    told = "The run has not stopped 0.5 s after a signal asked it to; what was learned up to"
    assert f"{told} iteration 5 is saved before the run ends" in run.stderr
    assert ("the main thread does not answer" in run.stderr) == (what != "asked to stop")
    assert [path.name for path in folder.glob("*.solverstate")] == ["s_iter_5.solverstate"]
    if what == "asked to stop":
        goes_on_exactly(folder, on=on)


def test_a_second_signal_in_a_layer_that_hangs(folder: Path) -> None:
    write(folder, {"what": "asked to stop, and deaf", "rank": 0, "at": 6})
    again = "import os, signal, threading; t = threading.Timer"
    code = f"{again}(6, os.kill, (os.getpid(), signal.SIGTERM)); t.daemon = True; t.start()"
    run = caffepy(on="--cpu 1", code=code)
    assert run.returncode == 130, run.stderr[-2000:]
    assert not list(folder.glob("*.solverstate"))


WAITS = """
import os, signal, time
from caffepy.data.loader import SequentialLoader
following = SequentialLoader._next
def waits(self):
    if self.state()["record"] >= 60 and self.batch_size == 3:
        time.sleep(2)  # batches read ahead are trained on
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    return following(self)
SequentialLoader._next = waits
"""


@pytest.mark.parametrize("on", ["--cpu 1", "--cpu 2"])
def test_data_that_do_not_come(on: str, folder: Path) -> None:
    write(folder, NOTHING, "snapshot: 100 max_iter: 30")
    run = caffepy("--grace", "0.5", on=on, code=WAITS)
    assert run.returncode == 75, run.stderr[-2000:]
    last = {"--cpu 1": 20, "--cpu 2": 10}[on]
    assert [path.name for path in folder.glob("*.solverstate")] == [f"s_iter_{last}.solverstate"]


def test_nobody_reads_stderr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.prototxt").write_text(NET)
    settings = 'net: "net.prototxt" base_lr: 0.01 lr_policy: "fixed" snapshot_prefix: "s"'
    Path("solver.prototxt").write_text(f"{settings} display: 1 max_iter: 1000000")
    read, write = os.pipe()
    command = [sys.executable, "-m", "caffepy", "train", "--solver", "solver.prototxt"]
    with subprocess.Popen(command, stderr=write, env=ENVIRONMENT) as process:
        os.close(write)
        room, filled = fcntl.fcntl(read, fcntl.F_GETPIPE_SZ), array.array("i", [0])
        while filled[0] <= room - 8192:
            time.sleep(0.01)
            fcntl.ioctl(read, termios.FIONREAD, filled)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 75
    os.close(read)
    assert len(list(tmp_path.glob("*.solverstate"))) == 1


def test_lines_that_nobody_reads_are_lost_once_a_run_is_to_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0.01)
    read, write = os.pipe()
    with open(write, "w") as stderr, open(read) as other:
        monkeypatch.setattr(sys, "stderr", stderr)
        monkeypatch.setattr(progress, "_unread", False)
        asked_to_end.set()
        try:
            for _ in range(200):
                progress.write_line("x" * 1999)
            os.set_blocking(read, False)
            told = other.read()
            progress.write_line("y")
            assert other.read() == "y\n"
        finally:
            asked_to_end.clear()
    assert 8192 < len(told) < 200 * 2000
    assert set(told) == {"x", "\n"}
