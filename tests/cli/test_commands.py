"""The commands at work, on the digits and on nets without data."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import caffepy
from caffepy.cli import main
from caffepy.commands.train import TrainOptions, TrainResult
from caffepy.report.metrics import read_rows
from tests.report import parsers

DIGITS = Path(__file__).parents[1] / "golden" / "digits"
WEIGHTS = DIGITS / "digits_iter_500.caffemodel"
SOLVER = f"""
net: "{DIGITS}/train_val.prototxt"
test_iter: 3 test_interval: 4 base_lr: 0.05 lr_policy: "fixed" momentum: 0.9
display: 2 max_iter: %d snapshot: 4 snapshot_prefix: "run" random_seed: 1
"""
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a solver of six iterations in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "solver.prototxt").write_text(SOLVER % 6)
    return tmp_path


def test_train_leaves_log_snapshots_metrics_and_curve(folder: Path, capsys: Captured) -> None:
    assert (
        main.run(["train", "-solver", "solver.prototxt", "-log_dir=logs", "-weights", str(WEIGHTS)])
        == 0
    )
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "\r" not in shown.err
    train, test = parsers.tables(shown.err)
    assert [row["NumIters"] for row in train] == [0, 2, 4]
    assert [row["NumIters"] for row in test] == [0, 4]
    assert test[0]["accuracy"] == pytest.approx(0.983165)
    assert (folder / "logs" / "caffepy.INFO").read_text().endswith(shown.err)
    columns, rows = read_rows("run_metrics.csv")
    assert columns == ["iteration", "time", "loss", "lr", "test_accuracy", "test_loss", "images/s"]
    assert [row["iteration"] for row in rows] == ["0", "2", "4", "6"]
    left = {path.name for path in folder.iterdir()}
    assert left >= {"run_iter_4.caffemodel", "run_iter_6.caffemodel", "run_iter_6.solverstate"}
    if "run_curve.png" not in left:
        pytest.importorskip("matplotlib")
        pytest.fail("no curve although matplotlib is there")


def test_train_resumed_goes_on_in_its_metrics(folder: Path, capsys: Captured) -> None:
    assert main.run(["train", "-solver", "solver.prototxt"]) == 0
    before = read_rows("run_metrics.csv")[1]
    (folder / "solver.prototxt").write_text(SOLVER % 10)
    assert main.run(["train", "-solver", "solver.prototxt", "-snapshot", "auto"]) == 0
    assert "Resuming from run_iter_6.solverstate" in capsys.readouterr().err
    rows = read_rows("run_metrics.csv")[1]
    assert [row["iteration"] for row in rows] == ["0", "2", "4", "6", "8", "10"]
    assert rows[:3] == before[:3]


def test_train_passes_its_flags_on(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[TrainOptions] = []

    def train(options: TrainOptions) -> TrainResult:
        given.append(options)
        return TrainResult(3, True, [], None)

    monkeypatch.setattr("caffepy.commands.train.train", train)
    line = "train -solver digits -weights a.h5,b.h5 -level 2 -stage x,y -sigint_effect none -noprogress -threads=1"
    line += " -nofuse -precision bf16 -cpu 3 -sync tree -batch_mode global -bn_stats root -deterministic"
    line += " -deadlines step=5 -wire bf16 -max_bad_records 7 -tensorboard events -tensorboard_histograms 0 -decode processes"
    assert main.run(line.split()) == 130  # stopped, but there is no snapshot to go on from
    (options,) = given
    assert os.path.basename(options.solver) == "solver.prototxt"
    assert callable(options.last_resort)
    assert options == TrainOptions(
        options.solver,
        last_resort=options.last_resort,
        weights=("a.h5", "b.h5"),
        snapshot="",
        gpu=None,
        cpu=3,
        sync="tree",
        wire="bf16",
        bn_stats="root",
        deadlines={"step": 5.0},
        batch_mode="global",
        deterministic=True,
        max_bad_records=7,
        decode="processes",
        precision="bf16",
        capture=True,
        fuse=False,
        level=2,
        stages=("x", "y"),
        sigint_effect="none",
        sighup_effect="snapshot",
        progress=False,
        tensorboard="events",
        tensorboard_histograms=0,
        threads=1,
    )


@pytest.mark.parametrize(
    ("given", "message"),
    {
        "step": "'step' is not PHASE=SECONDS",
        "steps=1": "'steps' is no phase (phases: set-up, step, test, snapshot)",
        "test=9,step=0": "'step=0' is no number of seconds above 0",
        "step=nan": "'step=nan' is no number of seconds above 0",
    }.items(),
)
def test_deadlines_that_are_none(given: str, message: str, capsys: Captured) -> None:
    assert main.run(["train", "--solver", "digits", "--deadlines", given]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "given",
    [
        "detect x.jpg --threshold nan",
        "train --solver digits --grace inf",
        "classify x y --mean-values 1,nan",
        "classify x y --raw-scale=-inf",
    ],
)
def test_numbers_that_are_not_finite(given: str, capsys: Captured) -> None:
    assert main.run(given.split()) == 2
    assert "finite" in capsys.readouterr().err


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="needs POSIX signals")
def test_sigterm_stops_with_a_snapshot_and_75(folder: Path) -> None:
    (folder / "solver.prototxt").write_text(SOLVER % 1_000_000 + "snapshot_after_train: true")
    child = subprocess.Popen(
        [sys.executable, "-m", "caffepy", "train", "-solver", "solver.prototxt"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(caffepy.__file__).parents[1])},
    )
    assert child.stderr
    for line in child.stderr:
        if "Iteration 2," in line:
            child.terminate()
            break
    rest = child.stderr.read()
    child.stderr.close()
    assert child.wait() == 75, rest
    assert "Optimization stopped early." in rest
    assert list(folder.glob("run_iter_*.solverstate"))


def test_divergence_is_one_message_and_5(folder: Path, capsys: Captured) -> None:
    (folder / "solver.prototxt").write_text((SOLVER % 1000).replace("0.05", "1e9"))
    assert main.run(["train", "-solver", "solver.prototxt", "-minloglevel", "1"]) == 5
    error = capsys.readouterr().err
    assert error.startswith("caffepy: error: ")
    assert error.count("\n") == 1


def test_test_prints_the_means(capsys: Captured) -> None:
    line = [
        "test",
        "-model",
        str(DIGITS / "train_val.prototxt"),
        "-weights",
        str(WEIGHTS),
        "-iterations=3",
    ]
    assert main.run(line) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines()[0] == "accuracy = 0.983165"
    assert "] Batch 2, accuracy = " in shown.err
    assert main.run([*line, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["outputs"]["accuracy"] == pytest.approx(0.983165)


def test_time_of_a_bundled_net_without_data(capsys: Captured) -> None:
    assert (
        main.run(["time", "-model", "lenet", "-synthetic", "-iterations", "1", "-minloglevel", "1"])
        == 0
    )
    shown = capsys.readouterr()
    assert [line.split()[0] for line in shown.out.splitlines()[:3]] == ["layer", "mnist", "conv1"]
    assert shown.err == ""
    assert (
        main.run(
            [
                "time",
                "-model",
                "lenet",
                "-synthetic",
                "-iterations",
                "1",
                "-phase",
                "TEST",
                "--json",
            ]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["iterations"] == 1


def test_missing_data_and_the_way_around_it(capsys: Captured) -> None:
    assert main.run(["check", "lenet"]) == 4
    error = capsys.readouterr().err
    assert error.startswith("caffepy: error: ")
    assert error.endswith("(to go without the data, add --synthetic)\n")


def test_the_way_around_missing_data_is_not_told_twice(tmp_path: Path, capsys: Captured) -> None:
    data = 'layer { name: "d" type: "Data" top: "x" data_param { source: "x" batch_size: 1 } } '
    loss = 'layer { name: "l" type: "InfogainLoss" bottom: "x" bottom: "y" infogain_loss_param { source: "gone" } }'
    labels = 'layer { name: "y" type: "DummyData" top: "y" dummy_data_param { shape { dim: 1 } } } '
    (tmp_path / "net.prototxt").write_text(data + labels + loss)
    assert main.run(["check", str(tmp_path / "net.prototxt"), "-image=2,1,1"]) == 4
    error = capsys.readouterr().err
    assert 'could not open "' in error
    assert "--synthetic" not in error


def test_check(folder: Path, capsys: Captured) -> None:
    assert main.run(["check", "digits"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("train net of 'digits'\n")
    assert shown.err == ""
    assert main.run(["check", "-solver", "solver.prototxt", "--json"]) == 0
    train, test = json.loads(capsys.readouterr().out)
    assert (train["parameters"], test["role"]) == (13706, "test net #0")
    assert main.run(["check", "-model", "lenet", "-image", "1,20,20", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["layers"][0]["tops"]["data"] == [64, 1, 20, 20]
    assert main.run(["check", "-model", "lenet", "-solver", "digits"]) == 2


@pytest.mark.parametrize(
    "command", ["train --solver digits", f"test --model digits --weights {WEIGHTS}"]
)
def test_a_gpu_for_each_process_needs_processes(command: str, capsys: Captured) -> None:
    assert main.run([*command.split(), "--gpu", "local"]) == 2
    told = "--gpu local is for processes that mpirun or srun started"
    assert told in capsys.readouterr().err
