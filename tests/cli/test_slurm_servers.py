"""The job script of docs/ for a parameter server on SLURM, with stand-ins for its commands."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docs" / "slurm-servers.sh"
BASH = shutil.which("bash")

RAY = """#!/bin/bash
[ "$1" = health-check ] && exit "$DEAD"
echo "$RAY_AUTH_MODE $RAY_AUTH_TOKEN $*" >> rays
echo "Ray runtime started."
"""
CAFFEPY = """#!/bin/bash
echo "$*" > run
trap 'exit 75' USR1
[ "$ENDS" ] && exit "$ENDS"
touch runs
while :; do read -rt 0.05 < <(sleep 1); done
"""
COMMANDS = {
    "srun": '#!/bin/bash\nwhile [[ $1 = --* ]]; do shift; done\nexec "$@"\n',
    "scontrol": """#!/bin/bash
case "$*" in
"show hostnames m[1-3]") printf '%s\\n' m1 m2 m3 ;;
"requeue 7") echo requeued >> requeues ;;
*) exit 9 ;;
esac
""",
    "hostname": "#!/bin/bash\necho 10.0.0.1 172.17.0.1\n",
    "ray": RAY,
    "caffepy": CAFFEPY,
}

pytestmark = pytest.mark.skipif(not BASH, reason="there is no bash")


def launch(folder: Path, **variables: str) -> subprocess.Popen[bytes]:
    """Start the script on m1 of m1, m2 and m3."""
    for name, text in COMMANDS.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    assert BASH
    return subprocess.Popen(
        [BASH, str(SCRIPT), "--solver", "my solver.prototxt", "--gpu", "all"],
        cwd=folder,
        env={
            "PATH": f"{folder}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "m[1-3]",
            "SLURM_CPUS_PER_TASK": "64",
            "DEAD": "0",
            **variables,
        },
    )


def await_file(file: Path) -> None:
    until = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.parametrize("code", [0, 2, 75])
def test_it_ends_with_the_code_of_the_run(code: int, tmp_path: Path) -> None:
    assert launch(tmp_path, ENDS=str(code)).wait(60) == code
    assert not (tmp_path / "requeues").exists()
    told = (tmp_path / "run").read_text().strip()
    expected = "train --solver my solver.prototxt --gpu all --cluster 10.0.0.1:20007 --nodes 2:3"
    assert told == f"{expected} --snapshot auto"


def test_ray_starts_once_on_each_machine_with_one_token(tmp_path: Path) -> None:
    launch(tmp_path, ENDS="0", ADDRESS="10.1.0.1").wait(60)
    lines = [line.split(" ", 2) for line in (tmp_path / "rays").read_text().splitlines()]
    (mode,), (token,) = ({line[i] for line in lines} for i in (0, 1))
    assert (mode, len(token)) == ("token", 32)
    joins = "start --address=10.1.0.1:20007 --num-cpus=64 --block"
    head = "start --head --node-ip-address=10.1.0.1 --port=20007 --include-dashboard=false"
    assert sorted(line[2] for line in lines) == [joins, joins, f"{head} --num-cpus=64"]


def test_without_its_first_machine_the_job_queues_again(tmp_path: Path) -> None:
    launch(tmp_path, ENDS="0", DEAD="1").wait(60)
    await_file(tmp_path / "requeues")


@pytest.mark.parametrize(("sent", "requeued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_a_signal_reaches_the_run(sent: signal.Signals, requeued: bool, tmp_path: Path) -> None:
    job = launch(tmp_path, ENDS="")
    await_file(tmp_path / "runs")
    job.send_signal(sent)
    assert job.wait(60) == 75
    assert (tmp_path / "requeues").exists() is requeued
