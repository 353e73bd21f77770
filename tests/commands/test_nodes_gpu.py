"""caffepy train on a GPU each of two processes: the end when one is missing while NCCL connects."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from caffepy.core.errors import SyncError
from tests.collectives.test_mpi import ENVIRONMENT, MPIRUN, ulfm, version  # noqa: F401  # fixtures
from tests.commands.test_nodes import ULFM, message, write

pytestmark = [
    pytest.mark.gpus(2),
    pytest.mark.usefixtures("ulfm"),
]

MISSING = """
import os, signal, time
from pathlib import Path
from caffepy.cli.main import main
from caffepy.collectives.nccl import NcclSync

def miss(sync, unique_id):
    Path("missing").touch()
    {what}

if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    NcclSync._connect = miss
main()
"""
DEADLINE = 12


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write()


def train(what: str) -> tuple[int, str, float]:
    """The exit code of two nodes, of which the second does this and never connects; what they said,
    and the seconds that it took from then on.
    """
    Path("missing.py").write_text(MISSING.format(what=what))
    assert MPIRUN
    command = [MPIRUN, "--oversubscribe", *ULFM, "-n", "2", sys.executable, "missing.py", "train"]
    flags = ["--solver", "solver.prototxt", "--gpu", "local", "--deadlines", f"set-up={DEADLINE}"]
    environment = ENVIRONMENT | {"CAFFEPY_AUTOTUNE": "0"}
    ended = subprocess.run(
        [*command, *flags], stderr=subprocess.PIPE, text=True, env=environment, timeout=150
    )
    assert Path("missing").exists(), ended.stderr
    return ended.returncode, ended.stderr, time.time() - Path("missing").stat().st_mtime


def test_a_process_that_dies_while_nccl_connects() -> None:
    code, said, seconds = train("os.kill(os.getpid(), signal.SIGKILL)")
    assert code == SyncError.exit_code, said
    found = message(said)
    assert found.startswith("node 1 (host ")
    assert "universal rank 1) has died" in found
    assert seconds < 5


@pytest.mark.parametrize("what", ["time.sleep(600)", "os.kill(os.getpid(), signal.SIGSTOP)"])
def test_a_process_that_hangs_while_nccl_connects(what: str) -> None:
    code, said, seconds = train(what)
    assert code == SyncError.exit_code, said
    found = message(said)
    assert found.startswith("node 1 (host ")
    assert f"universal rank 1) made no progress for {DEADLINE} s (set-up" in found
    assert seconds < DEADLINE + 5
