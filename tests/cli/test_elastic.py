"""The launcher script of docs/ for SLURM, with stand-ins for srun and scontrol."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

SCRIPT = Path(__file__).parents[2] / "docs" / "slurm-elastic.sh"
BASH = shutil.which("bash")

SRUN = """#!/bin/bash
for word; do case $word in --nodelist=*) machines=${word#*=} ;; esac; done
if [ "${!#}" = true ]; then
    ! grep -qx "$machines" dead
    exit
fi
echo "$*" >> starts
read -r code victims < <(sed -n "$(wc -l < starts)p" runs)
for victim in $victims; do echo "$victim" >> dead; done
exit "$code"
"""
SCONTROL = """#!/bin/bash
case "$*" in
"show hostnames m[1-4]") printf '%s\\n' m1 m2 m3 m4 ;;
"requeue 7") echo requeued >> requeues ;;
*) exit 9 ;;
esac
"""

pytestmark = pytest.mark.skipif(not BASH, reason="there is no bash")


class Ended(NamedTuple):
    """Exit code, the machines of each start, number of requeues, stderr, the last command."""

    code: int
    starts: list[str]
    requeues: int
    said: str
    last: str


def launch(folder: Path, runs: Sequence[str], dead: Sequence[str] = (), **variables: str) -> Ended:
    """Run the script: each srun of caffepy ends with a code of `runs`, after machines died."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "runs").write_text("".join(f"{run}\n" for run in runs))
    (folder / "dead").write_text("".join(f"{machine}\n" for machine in dead))
    for name in ("starts", "requeues"):
        (folder / name).write_text("")
    assert BASH
    ended = subprocess.run(
        [BASH, str(SCRIPT), "--solver", "my solver.prototxt", "--gpu", "all"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        env={
            **os.environ,
            "PATH": f"{folder}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "m[1-4]",
            **variables,
        },
    )
    commands = (folder / "starts").read_text().splitlines()
    machines = [command.split("--nodelist=")[1].split()[0] for command in commands]
    requeues = (folder / "requeues").read_text().count("requeued")
    last = commands[-1] if commands else ""
    return Ended(ended.returncode, machines, requeues, ended.stderr, last)


def test_a_run_that_is_done_ends_the_job(tmp_path: Path) -> None:
    ended = launch(tmp_path, ["0"])
    assert (ended.code, ended.starts, ended.requeues) == (0, ["m1,m2,m3,m4"], 0)
    own = "caffepy train --solver my solver.prototxt --gpu all --nodes 2:4 --snapshot auto"
    assert ended.last.endswith(own)
    assert "--nodes=4 --ntasks=4 " in ended.last


def test_it_goes_on_without_machines_that_died(tmp_path: Path) -> None:
    ended = launch(tmp_path, ["7 m2", "137 m4", "0"])
    assert (ended.code, ended.requeues) == (0, 0)
    assert ended.starts == ["m1,m2,m3,m4", "m1,m3,m4", "m1,m3"]
    assert "m2 does not answer" in ended.said
    assert "--nodes=2 --ntasks=2 " in ended.last


def test_with_too_few_machines_it_queues_again(tmp_path: Path) -> None:
    ended = launch(tmp_path, ["1 m1 m2 m3", "0"])
    assert (ended.code, ended.starts, ended.requeues) == (75, ["m1,m2,m3,m4"], 1)
    assert "1 of 2 machines are left: the job is put into the queue again" in ended.said
    ended = launch(tmp_path, ["0"], dead=["m1", "m2", "m3"], SLURM_RESTART_COUNT="10")
    assert (ended.code, ended.starts, ended.requeues) == (1, [], 0)


def test_after_a_signal_it_queues_again(tmp_path: Path) -> None:
    ended = launch(tmp_path, ["75", "0"], SLURM_RESTART_COUNT="100")
    assert (ended.code, len(ended.starts), ended.requeues) == (75, 1, 1)


@pytest.mark.parametrize("code", [2, 3, 5, 130])
def test_what_no_restart_mends_ends_the_job(code: int, tmp_path: Path) -> None:
    ended = launch(tmp_path, [str(code), "0"])
    assert (ended.code, len(ended.starts), ended.requeues) == (code, 1, 0)
    assert f"ended with {code}, which no restart mends" in ended.said


@pytest.mark.parametrize("code", [1, 4, 6, 7, 70, 137])
def test_restarts_are_bounded(code: int, tmp_path: Path) -> None:
    ended = launch(tmp_path, [str(code)] * 5, RESTARTS="2")
    assert (ended.code, len(ended.starts), ended.requeues) == (code, 3, 0)
    assert "2 restarts did not help" in ended.said


def test_no_more_machines_than_it_may_take(tmp_path: Path) -> None:
    ended = launch(tmp_path, ["0"], dead=["m1"], MOST="2")
    assert ended.starts == ["m2,m3"]
    assert ended.last.endswith("--nodes 2:2 --snapshot auto")


@pytest.mark.parametrize("script", sorted(SCRIPT.parent.glob("*.sh")), ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script: Path) -> None:
    found = shutil.which("shellcheck")
    if not found:
        pytest.skip("shellcheck is missing")
    ended = subprocess.run([found, str(script)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout
