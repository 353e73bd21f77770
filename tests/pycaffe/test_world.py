"""Scripts that mpirun starts several times, whose solvers train as one."""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import caffepy as caffe
from caffepy.core.errors import UsageError
from caffepy.pycaffe import nodes
from tests.collectives.test_mpi import ENVIRONMENT, MPIRUN, version
from tests.parallel.test_nodes import NORMALIZED
from tests.solver.cases import SETTINGS

__all__ = ["version"]

SCRIPT = """
import sys
import numpy as np
import caffepy as caffe

folder, solvers = sys.argv[1], int(sys.argv[2])
world = caffe.world(solvers)
solver = caffe.get_solver(f"{folder}/solver.prototxt")
name, weights = f"{folder}/{world.nodes}.{world.node}", solver.net.params["ip"][0].data
with solver.together(cpus=solvers, world=world):
    solver.step(3)
    solver.test_nets[0].forward()
    weights[...] *= 0.5
    solver.step(2)
    solver.test_nets[0].forward()
np.save(f"{name}.npy", weights)
with solver.together(cpus=solvers, world=world):
    solver.step(2)
np.save(f"{name}.more.npy", weights)
solver.snapshot()
"""


def start(count: int, *command: object) -> "subprocess.CompletedProcess[str]":
    assert MPIRUN
    launcher = [MPIRUN, "--oversubscribe", "-n", str(count)] if count > 1 else []
    words = [*launcher, sys.executable, *map(str, command)]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, env=ENVIRONMENT)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A script beside its solver, whose net draws random numbers and has BatchNorm."""
    settings = f'{SETTINGS} display: 1 iter_size: 2 test_iter: 3 test_interval: 2 snapshot_prefix: "{tmp_path}/s"'
    (tmp_path / "solver.prototxt").write_text(f"{settings} net_param {{ {NORMALIZED} }}")
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path / "script.py"


@pytest.mark.usefixtures("version")
def test_two_processes_are_two_solvers_to_the_bit(script: Path) -> None:
    folder = script.parent
    for count, solvers in ((1, 2), (2, 1)):
        ended = start(count, script, folder, solvers)
        assert ended.returncode == 0, ended.stderr
        assert ended.stderr == ""
        names = sorted(path.name for path in folder.glob("s_iter_*"))
        assert names == ["s_iter_7.caffemodel", "s_iter_7.caffepystate", "s_iter_7.solverstate"]
    alone, *both = (np.load(folder / f"{name}.npy") for name in ("1.0", "2.0", "2.1"))
    for array in both:
        np.testing.assert_array_equal(array, alone)
    again = [np.load(folder / f"{name}.more.npy") for name in ("2.0", "2.1")]
    np.testing.assert_array_equal(*again)
    assert np.abs(again[0] - alone).max() > 0


@pytest.mark.usefixtures("version")
@pytest.mark.parametrize("phase", ["before", "within"])
def test_an_exception_in_one_process_ends_the_other(phase: str, script: Path) -> None:
    fails = "if world.node == 1: raise ValueError('mine')\n"
    places = {
        "before": ("solver = ", fails + "solver = "),
        "within": ("    solver.step(2)\n", f"    {fails}    solver.step(2)\n"),
    }
    script.write_text(script.read_text().replace(*places[phase]))
    ended = start(2, script, script.parent, 1)
    assert ended.returncode == 1, ended.stderr
    assert "ValueError: mine" in ended.stderr


@pytest.mark.usefixtures("version")
@pytest.mark.parametrize(
    ("node", "count", "ends", "told"),
    [
        (1, 3, "sys.exit(3)", " with exit code 3,"),
        (0, 2, "sys.exit('no')", " with exit code 1,"),
        (1, 2, "raise SystemExit(3)", ","),
    ],
    ids=["exit", "text", "raised"],
)
def test_a_process_that_exits_ends_those_that_wait_for_it(
    node: int, count: int, ends: str, told: str, script: Path
) -> None:
    line = f"if world.node == {node}: {ends}\n"
    script.write_text(script.read_text().replace("solver = ", f"{line}solver = "))
    begun = time.monotonic()
    ended = start(count, script, script.parent, 1)
    assert ended.returncode in (1, 3), ended.stderr
    assert f"SyncError: node {node} (host " in ended.stderr
    assert f"universal rank {node}) has ended{told} while node " in ended.stderr
    assert time.monotonic() - begun < 30


@pytest.mark.usefixtures("version")
def test_what_a_process_sent_before_its_end_is_received(script: Path) -> None:
    late = "import time\ntime.sleep(2 * world.node)\nassert world.broadcast(5) == 5\n"
    text = script.read_text().replace("solver.snapshot()", late)
    script.write_text(f"{text}print(world.node, 'is done')\n")
    ended = start(2, script, script.parent, 1)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == ["0 is done", "1 is done"]


@pytest.mark.usefixtures("version")
def test_a_solver_from_before_the_world_is_refused(script: Path) -> None:
    lines = script.read_text().splitlines()
    world, solver = (
        next(line for line in lines if line.startswith(f"{n} =")) for n in ("world", "solver")
    )
    late = script.read_text().replace(f"{world}\n{solver}", f"{solver}\n{world}")
    script.write_text(late)
    ended = start(2, script, script.parent, 1)
    assert ended.returncode == 1
    assert "UsageError: call caffepy.world() before the solver is built" in ended.stderr


@pytest.mark.usefixtures("version")
def test_processes_with_other_solvers_are_named(script: Path) -> None:
    script.write_text(
        script.read_text().replace("name, ", "solver.param.base_lr /= 1 + world.node\nname, ")
    )
    ended = start(2, script, script.parent, 1)
    assert ended.returncode == 1
    assert "ConfigError: the solver of node 1 (host " in ended.stderr


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "_world", nodes.World(solvers=1))


@pytest.mark.usefixtures("alone")
def test_a_process_by_itself(script: Path) -> None:
    world = caffe.world(2)
    assert (world.node, world.nodes, world.size, world.rank_on_host) == (0, 1, 2, 0)
    solver = caffe.get_solver(str(script.parent / "solver.prototxt"))
    with solver.together(cpus=2, world=world):
        solver.step(1)
    with pytest.raises(UsageError, match="1 solver or more, not 0"):
        caffe.world(0)
