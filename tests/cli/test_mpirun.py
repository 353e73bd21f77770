"""Commands that mpirun starts several times, which work as one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from caffepy.cli import main
from tests.collectives.test_mpi import ENVIRONMENT, MPIRUN, version

__all__ = ["version"]

DIGITS = Path(__file__).parents[1] / "golden" / "digits"
MODEL, WEIGHTS = DIGITS / "train_val.prototxt", DIGITS / "digits_iter_500.caffemodel"

pytestmark = pytest.mark.usefixtures("version")


def caffepy(nodes: int, *arguments: object) -> "subprocess.CompletedProcess[str]":
    assert MPIRUN
    start = [MPIRUN, "--oversubscribe", "-n", str(nodes)]
    command = [*start, sys.executable, "-m", "caffepy", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=ENVIRONMENT)


def test_scores_are_those_of_one_process_and_printed_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["test", "--model", MODEL, "--weights", WEIGHTS, "--iterations", 5, "--json"]
    assert main.run(list(map(str, command))) == 0
    together = caffepy(2, *command)
    assert together.returncode == 0, together.stderr
    expected, told = json.loads(capsys.readouterr().out), json.loads(together.stdout)
    assert told["iterations"] == expected["iterations"] == 5
    assert told["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert told["outputs"] == pytest.approx(expected["outputs"], rel=1e-6)


def test_an_error_of_all_is_told_once() -> None:
    ended = caffepy(2, "test", "--model", MODEL, "--weights", "none.caffemodel")
    assert ended.returncode == 3, ended.stderr
    assert ended.stderr.count("caffepy: error:") == 1
    assert "none.caffemodel" in ended.stderr
    assert ended.stdout == ""


@pytest.mark.parametrize(
    "command",
    ["train --solver digits", "bench scaling --model lenet", "bench allreduce --cpu 2"],
)
def test_one_process_has_no_wire(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([*command.split(), "--wire", "bf16"]) == 2
    assert "--wire bf16 is for several nodes" in capsys.readouterr().err


def test_each_node_times_itself() -> None:
    ended = caffepy(2, "time", "--model", "lenet", "--synthetic", "--iterations", 2)
    assert ended.returncode == 0, ended.stderr
    *_, images, slowest = ended.stdout.splitlines()
    assert images.endswith("images/s")
    assert slowest.startswith("the slowest of 2 nodes is node ")
    assert ended.stdout.count("conv1 ") == 1


def test_one_table_of_all_processes() -> None:
    command = ["bench", "scaling", "--model", "lenet", "--batch", 2, "--windows", 1, "--json"]
    ended = caffepy(2, *command, "--wire", "bf16")
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    one, two = told["points"]
    assert [(p["nodes"], p["devices"]) for p in (one, two)] == [(1, 1), (2, 2)]
    assert two["images_per_s"] == pytest.approx(2 * 2 * 1000 / two["ms"])
    assert two["times"] == pytest.approx(two["images_per_s"] / one["images_per_s"])
    assert two["efficiency"] == pytest.approx(two["times"] / 2)
    assert 0 < two["exposed"] < 1
    assert two["host_ms"] is None
    assert told["wire"] == "bf16"

    command = ["bench", "allreduce", "--cpu", 2, "--sizes", "4K,1M", "--sync", "flat"]
    ended = caffepy(2, *command, "--wire", "bf16")
    assert ended.returncode == 0, ended.stderr
    head, *_, small, large = ended.stdout.splitlines()
    assert head.startswith("All-reduce of 4 ranks on the CPU of 2 nodes, bf16 between nodes")
    assert (small.split()[0], large.split()[0]) == ("4K", "1M")


def test_speeds_between_all_nodes() -> None:
    ended = caffepy(2, "device-pairs", "--cpu", 2, "--json")
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert (told["solvers"], told["auto"]) == ([2, 2], "muji")
    (speed,) = told["speeds"]
    assert speed["gigabytes_per_s"] > 0.01
    assert 0 < speed["microseconds"] < 1e6


def test_what_all_are_wrong_in_is_told_once_and_what_one_is_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = caffepy(2, "train", "--slover", "digits")
    assert ended.returncode == 2
    assert ended.stderr.count('caffepy: error: no such option "--slover"') == 1, ended.stderr
    assert "Traceback" not in ended.stderr

    (tmp_path / "mpi4py.py").write_text("raise ImportError('it is not there')")
    with monkeypatch.context() as patched:
        patched.setitem(ENVIRONMENT, "PYTHONPATH", f"{tmp_path}:{ENVIRONMENT['PYTHONPATH']}")
        ended = caffepy(2, "train", "--solver", "digits")
    assert ended.returncode == 2
    assert ended.stderr.count("which needs mpi4py and MPI (it is not there)") == 1, ended.stderr
    assert "Traceback" not in ended.stderr

    assert MPIRUN
    program = ["-n", "1", sys.executable, "-m", "caffepy", "train", "--solver", "digits"]
    command = [MPIRUN, "--oversubscribe", *program, ":", *program, "--batch-mode", "wrong"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=ENVIRONMENT)
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.count("'wrong' is not one of") == 1, ended.stderr
