"""`caffepy train --cluster`: workers in processes of Ray, on this machine."""

import re
from pathlib import Path

import pytest

from caffepy.cli import main

pytest.importorskip("ray", reason="Ray has no wheels for this Python")

DIGITS = Path(__file__).parents[1] / "golden" / "digits"
SOLVER = f"""
net: "{DIGITS}/train_val.prototxt"
test_iter: 3 test_interval: 20 base_lr: 0.05 lr_policy: "fixed" momentum: 0.9
display: 10 max_iter: 40 snapshot: 20 snapshot_prefix: "run" random_seed: 1
"""
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "solver.prototxt").write_text(SOLVER)
    return tmp_path


def train(*arguments: str) -> int:
    return main.run(["train", "--solver", "solver.prototxt", *arguments])


SERVED = ("--cluster", "local", "--nodes", "2", "--cpu")


def test_workers_that_push_seldom_learn(folder: Path, capsys: Captured) -> None:
    given = ("--consistency", "ssp:1", "--every", "5", "--filters", "bf16,significant:1.6")
    assert train(*SERVED, *given) == 0
    shown = capsys.readouterr().err
    assert float(re.findall(r"accuracy = ([\d.]+)", shown)[-1]) > 0.3  # of untrained: 0.1
    sizes = re.search(r"pushed and pulled ([\d.]+) MB, as ([\d.]+) MB", shown)
    assert sizes
    assert float(sizes[2]) < 0.5 * float(sizes[1])


@pytest.mark.parametrize(
    ("given", "told"),
    {
        ("--cluster", "local"): "--cluster needs the number of workers: --nodes N, or MIN:MAX",
        ("--every", "5"): "--every is for a parameter server: give --cluster local --nodes N",
        ("--sync", "ps"): "--sync ps is for a parameter server: give --cluster local --nodes N",
        (*SERVED, "--sync", "tree"): "--cluster trains by --sync ps, not tree",
        (*SERVED, "--consistency", "ssp"): "'ssp' is none of sync, ssp:S, async",
        (*SERVED, "--filters", "f16"): "'f16' is none of bf16, significant:T",
        (*SERVED, "--replicas", "3"): "give --servers 3 or more",
        (*SERVED, "--servers", "99999"): "would be 100001 processes of this machine",
        (*SERVED, "--cluster", "here"): "--cluster here is none of local, auto and HOST:PORT",
        (*SERVED, "--cluster", "10.0.0.1:65536"): "is none of local, auto and HOST:PORT",
        (*SERVED, "--server-update", "nesterov:0.9"): "--consistency sync with --every 2 or more",
        (*SERVED, "--server-update", "adam"): "'adam' is neither add nor nesterov:MOMENTUM[:RATE]",
        (*SERVED, "--bn-stats", "sync"): "--cluster does not go together with --bn-stats sync",
    }.items(),
)
def test_what_does_not_go_together_is_told(
    folder: Path, capsys: Captured, given: tuple[str, ...], told: str
) -> None:
    assert train(*given) == 2
    assert told in capsys.readouterr().err


def test_it_is_for_one_process_of_a_launcher(
    folder: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "3")
    assert train(*SERVED) == 2
    assert (
        "caffepy train --cluster is for one process, but this is one of 3 (SLURM_STEP_NUM_TASKS=3)"
        in capsys.readouterr().err
    )
