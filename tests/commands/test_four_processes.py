"""caffepy train by four solvers in four processes and in two, on the CPU; and on one GPU, which the
processes share: NCCL takes them for nodes there, and goes through sockets. All but the wires is as on
several machines.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from caffepy.core.errors import SyncError
from tests.collectives.test_mpi import ENVIRONMENT, MPIRUN, ulfm, version
from tests.commands.test_nodes import (
    SETTINGS,
    ULFM,
    figures,
    is_whole,
    message,
    once_all_are_there,
    write,
)
from tests.parallel.cases import net

__all__ = ["ulfm", "version"]

pytestmark = pytest.mark.usefixtures("ulfm")

ON_GPU = ("--gpu", "0", "--precision", "fp32")

NODE = (
    "export NCCL_HOSTID=node$OMPI_COMM_WORLD_RANK NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 "
    'NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1; exec "$@"'
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("matplotlib.py").write_text("raise ImportError")  # curves take seconds


def train(processes: int, place: str, each: int = 1) -> tuple[int, str]:
    """The exit code of so many processes with so many solvers each, and what they said."""
    command = [sys.executable, "-m", "caffepy", "train", "--solver", "solver.prototxt"]
    command += ["--deterministic", *(ON_GPU if place == "gpu" else ("--cpu", str(each)))]
    if processes > 1:
        assert MPIRUN
        start = [MPIRUN, "--oversubscribe", *ULFM, "-n", str(processes)]
        command = [*start, "sh", "-c", NODE, "sh", *command]
    environment = ENVIRONMENT | {"CAFFEPY_AUTOTUNE": "0"}
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, env=environment, timeout=120)
    return ended.returncode, ended.stderr


@pytest.mark.parametrize(
    ("processes", "each", "place"),
    [
        (4, 1, "cpu"),
        (2, 2, "cpu"),
        pytest.param(2, 1, "gpu", marks=pytest.mark.gpu),
        pytest.param(4, 1, "gpu", marks=pytest.mark.gpu),
    ],
)
def test_processes_train_like_one_with_all_their_batches(
    processes: int, each: int, place: str
) -> None:
    Path("solver.prototxt").write_text(SETTINGS + "max_iter: 16")
    Path("net.prototxt").write_text(net(3 * processes * each))
    code, said = train(1, place)
    assert code == 0, said
    one = figures(said)
    Path("net.prototxt").write_text(net(3))
    code, said = train(processes, place, each)
    assert code == 0, said
    together = figures(said)
    assert together.keys() == one.keys() >= {("Iteration 4, loss", 0)}
    for what, figure in together.items():
        assert figure == pytest.approx(one[what], rel=2e-4), what


@pytest.mark.parametrize("place", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_a_killed_process_of_four_ends_the_others_with_a_snapshot(place: str) -> None:
    kill = once_all_are_there(4, "os.kill(os.getpid(), signal.SIGKILL)")
    write(kill, "max_iter: 5000 snapshot: 5000")
    code, said = train(4, place)
    assert code == SyncError.exit_code, said
    assert "universal rank 1) has died, iteration 5" in message(said)
    assert is_whole("s_iter_5.solverstate")
