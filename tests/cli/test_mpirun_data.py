"""Processes of one run that find different data."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.collectives.test_mpi import ENVIRONMENT, MPIRUN, version
from tests.parallel.test_alike import NET, database
from tests.solver.cases import SETTINGS

__all__ = ["version"]

pytestmark = pytest.mark.usefixtures("version")


def test_a_node_with_other_data_is_named_before_training(tmp_path: Path) -> None:
    """The second process finds another LMDB under the same relative path."""
    assert MPIRUN
    for folder, last in (("a", 11), ("b", 7)):
        database(tmp_path / folder / "db", 0, last)
    solver = tmp_path / "solver.prototxt"
    prefix = f'snapshot_prefix: "{tmp_path}/s"'
    solver.write_text(f"{SETTINGS} max_iter: 3 {prefix} net_param {{ {NET.format('db')} }}")
    command = [sys.executable, "-m", "caffepy", "train", "--solver", str(solver), "--cpu", "1"]
    both = [["-n", "1", "--wdir", str(tmp_path / folder), *command] for folder in ("a", "b")]
    start = [MPIRUN, "--oversubscribe", *both[0], ":", *both[1]]
    ended = subprocess.run(start, capture_output=True, text=True, timeout=120, env=ENVIRONMENT)
    assert ended.returncode == 4, ended.stderr
    (line,) = (line for line in ended.stderr.splitlines() if line.startswith("caffepy: error:"))
    assert 'layer "images" (Data): the data of node 1 (host ' in line
    assert 'is not that of node 0: 8 records, from "00000" to "00007" instead of 12' in line
    assert "Iteration 0" not in ended.stderr
