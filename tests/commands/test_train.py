import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from caffepy.commands.check import inspect
from caffepy.commands.train import TrainOptions, TrainResult, train
from caffepy.core.errors import ConfigError, DeviceError, UsageError
from caffepy.proto.binary import blob_to_array, read_net
from tests.report.events import values
from tests.solver.cases import ENVIRONMENT, GOLDEN

DIGITS = GOLDEN / "digits"
LOSS = re.compile(r"Iteration (\d+)(?: \(.*\))?, loss = (\S+)")
ACCURACY = re.compile(r"Test net output #0: accuracy = (\S+)")


@pytest.fixture
def digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(DIGITS, tmp_path / "digits")
    monkeypatch.chdir(tmp_path / "digits")
    for path in Path().glob("digits_iter_*"):
        path.unlink()
    return tmp_path / "digits"


def edit(solver: Path, *settings: str) -> None:
    """Replace or append settings of a solver file."""
    text = solver.read_text()
    for setting in settings:
        name = setting.split(":")[0]
        text = re.sub(rf"^{name}:.*\n", "", text, flags=re.MULTILINE) + setting + "\n"
    solver.write_text(text)


def losses(messages: list[str]) -> dict[int, float]:
    return {int(m[1]): float(m[2]) for m in map(LOSS.search, messages) if m}


def test_digits_from_caffes_first_weights(digits: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "caffepy"):
        result = train(TrainOptions("solver.prototxt", weights=["init_iter_0.caffemodel"]))
    caffe_lines = (digits / "caffe_train.log").read_text().splitlines()
    caffe, own = losses(caffe_lines), losses(caplog.messages)
    assert list(own) == list(caffe), "a loss line where Caffe has one"
    for i in range(0, 101, 20):
        assert abs(own[i] - caffe[i]) <= 1e-3 * caffe[i], f"iteration {i}"
    accuracy = [float(m[1]) for m in map(ACCURACY.search, caffe_lines) if m]
    assert abs(float(result.outputs[0][0][1]) - accuracy[-1]) <= 0.01
    assert (result.iteration, result.stopped, result.exit_code) == (500, False, 0)
    assert result.snapshot == "digits_iter_500.solverstate"


@pytest.mark.parametrize(
    ("stopped", "snapshot", "code"), [(False, "s", 0), (True, "s", 75), (True, None, 130)]
)
def test_exit_codes(stopped: bool, snapshot: str | None, code: int) -> None:
    """Also of a process whose main thread does not come to its end."""
    assert TrainResult(3, stopped, [], snapshot).exit_code == code


def test_lines_stand_where_caffes_stand(digits: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Those of the set-up, with its definitions, to the letter."""
    shape = re.compile(r"\(.*(iter/s|loss).*\)|= -?[\d.e+-]+|digits_iter\S+")
    kept = re.compile(
        r"Use CPU|Creating t|Finetuning|scaffolding|Starting|Solving|Learning Rate|Iteration|net output|Snapshot|Done"
    )

    def skeleton(lines: list[str]) -> list[str]:
        texts = [line.split("] ", 1)[-1] if "] " in line[:80] else line for line in lines]
        return [shape.sub("", text) for text in texts if kept.search(text)]

    with caplog.at_level(logging.INFO, "caffepy"):
        train(TrainOptions("solver.prototxt", weights=["init_iter_0.caffemodel"], stages=[""]))
    caffe = (digits / "caffe_train.log").read_text()
    assert skeleton(caplog.messages) == skeleton(caffe.splitlines())
    records = re.findall(r"^[IWEF]\d{8} \S+ +\d+ \S+\] (.*\n(?:(?![IWEF]\d{8}).*\n)*)", caffe, re.M)
    printed = [text.rstrip("\n") for text in records if not text.startswith("Restarting data")]
    ready = "Solver scaffolding done."
    own = caplog.messages[: caplog.messages.index(ready)]
    assert own == printed[: printed.index(ready)]


def test_resuming_says_so_and_drops_the_solvers_weights(
    digits: Path, caplog: pytest.LogCaptureFixture
) -> None:
    solver = digits / "solver.prototxt"
    edit(solver, "max_iter: 5", "display: 0", "test_interval: 100", "test_initialization: false")
    train(TrainOptions("solver.prototxt"))
    edit(solver, "max_iter: 7", 'weights: "gone.caffemodel"')
    with caplog.at_level(logging.INFO, "caffepy"):
        result = train(TrainOptions("solver.prototxt", snapshot="digits_iter_5.solverstate"))
    assert result.iteration == 7
    assert not any("Nothing is left" in message for message in caplog.messages)
    train(TrainOptions("solver.prototxt", snapshot="digits_iter_7.solverstate"))
    assert "Nothing is left to train: max_iter is 7" in caplog.messages
    place = caplog.messages.index("Resuming from digits_iter_5.solverstate")
    assert "Starting Optimization" in caplog.messages[place:]
    assert not any("Finetuning" in message for message in caplog.messages)


def test_weights_of_another_net_are_told(digits: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = (digits / "train_val.prototxt").read_text()
    (digits / "train_val.prototxt").write_text(re.sub('name: "(conv|ip)', r'name: "my_\1', text))
    edit(digits / "solver.prototxt", "max_iter: 1", "test_interval: 100", "snapshot: 0")
    train(TrainOptions("solver.prototxt", weights=["init_iter_0.caffemodel"]))
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        "init_iter_0.caffemodel gives no weights to this net: none of its layers has the name of "
        'one of "my_conv1", "my_conv2", "my_ip1", "my_ip2"'
    ]


def test_missing_weights_are_told_before_nets_are_built(
    digits: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.INFO, "caffepy"),
        pytest.raises(ConfigError, match=r"could not open .none\.caffemodel.: no such file"),
    ):
        train(TrainOptions("solver.prototxt", weights=["none.caffemodel"]))
    assert not any("Creating training net" in message for message in caplog.messages)


def test_weights_whose_name_is_not_utf8_are_told(digits: Path) -> None:
    name = os.fsdecode(b"\xff.caffemodel")
    with pytest.raises(ConfigError, match=r'^--weights ".*\.caffemodel": this name is not UTF-8'):
        train(TrainOptions("solver.prototxt", weights=[name]))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("", r"solver.prototxt: max_iter is missing: give the number of iterations to train"),
        ("max_iter: -5", r"solver.prototxt:\d+:1: max_iter must be 0 or more, not -5"),
    ],
    ids=["missing", "negative"],
)
def test_a_run_without_iterations_is_refused(digits: Path, setting: str, message: str) -> None:
    solver = digits / "solver.prototxt"
    solver.write_text(solver.read_text().replace("max_iter: 500", setting))
    with pytest.raises(ConfigError, match=message):
        train(TrainOptions("solver.prototxt"))
    with pytest.raises(ConfigError, match=message):
        inspect("solver.prototxt")


def test_no_iterations_on_purpose_are_told(digits: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit(digits / "solver.prototxt", "max_iter: 0", "test_interval: 100", "snapshot: 0")
    assert train(TrainOptions("solver.prototxt")).iteration == 0
    assert "max_iter is 0: nothing will be trained" in caplog.messages


def test_auto_resumes_the_newest_good_snapshot(
    digits: Path, caplog: pytest.LogCaptureFixture
) -> None:
    solver = digits / "solver.prototxt"
    edit(
        solver,
        "max_iter: 6",
        "snapshot: 2",
        "display: 0",
        "test_interval: 100",
        "test_initialization: false",
    )
    with caplog.at_level(logging.INFO, "caffepy"):
        train(TrainOptions("solver.prototxt", snapshot="auto", weights=["init_iter_0.caffemodel"]))
        assert "No snapshot under digits; starting from scratch" in caplog.messages
        assert "Finetuning from init_iter_0.caffemodel" in caplog.messages
        (digits / "digits_iter_6.caffemodel").write_bytes(b"")
        caplog.clear()
        train(TrainOptions("solver.prototxt", snapshot="auto", weights=["init_iter_0.caffemodel"]))
    assert "Resuming from digits_iter_4.solverstate" in caplog.messages
    assert any(
        "digits_iter_6.solverstate cannot be resumed from" in message for message in caplog.messages
    )
    assert not any("Finetuning" in message for message in caplog.messages)


def test_level_and_stages_reach_the_train_net_only(digits: Path) -> None:
    net = digits / "train_val.prototxt"
    rule = 'layer { name: "extra" type: "Silence" bottom: "conv1" include { stage: "more" min_level: 2 } }'
    net.write_text(net.read_text() + rule)
    edit(digits / "solver.prototxt", "max_iter: 1", "test_initialization: false")
    train(TrainOptions("solver.prototxt", level=2, stages=["more"]))
    saved = read_net("digits_iter_1.caffemodel")
    assert "extra" in [layer.name for layer in saved.layer]


def test_log_dir_gets_the_log(digits: Path) -> None:
    edit(digits / "solver.prototxt", "max_iter: 1", "test_initialization: false")
    train(TrainOptions("solver.prototxt", log_dir="logs"))
    assert "Optimization Done." in (digits / "logs" / "caffepy.INFO").read_text()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("s_iter_100.solverstate", "; the newest under s is s_iter_1000.solverstate (the working"),
        ("t_iter_100.solverstate", ', did you mean "s_iter_1000.solverstate"? (the working'),
        ("s_iter_1000", ', did you mean "s_iter_1000.solverstate"? (the working'),
        ("somewhere/s_iter_1000.solverstate", " (the working"),
    ],
)
def test_a_missing_snapshot_is_told_with_one_that_is_there(
    given: str, told: str, digits: Path
) -> None:
    for name in ("s_iter_900.solverstate", "s_iter_1000.solverstate", "s_iter_1000.caffemodel"):
        (digits / name).touch()
        os.utime(name, (0, int(name == "s_iter_1000.solverstate")))
    with pytest.raises(ConfigError) as caught:
        train(TrainOptions("solver.prototxt", snapshot=given))
    assert str(caught.value).startswith(f'snapshot "{given}" does not exist{told}')


def test_snapshot_and_weights_exclude_each_other() -> None:
    with pytest.raises(
        UsageError, match="Give a snapshot to resume training or weights to finetune but not both"
    ):
        train(TrainOptions("solver.prototxt", snapshot="x.solverstate", weights=["x.caffemodel"]))


def test_a_solver_for_the_gpu_where_there_is_none(
    digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr("caffepy.device.gpus.cuda_of_driver", lambda: 13000)
    edit(digits / "solver.prototxt", "solver_mode: GPU")
    with pytest.raises(DeviceError) as caught:
        train(TrainOptions("solver.prototxt"))
    assert re.fullmatch(
        r"solver\.prototxt:15:1: solver_mode: GPU asks for GPU 0, but a GPU needs CuPy: pip install .*; "
        r"or set solver_mode: CPU, or give --cpu",
        str(caught.value),
    )
    with pytest.raises(DeviceError, match=r"^a GPU needs CuPy: pip install"):
        train(TrainOptions("solver.prototxt", gpu="0"))


def test_cpu_overrules_the_solver_file(digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    edit(digits / "solver.prototxt", "solver_mode: GPU", "max_iter: 1")
    assert train(TrainOptions("solver.prototxt", cpu=True)).iteration == 1
    with pytest.raises(UsageError, match="not both"):
        train(TrainOptions("solver.prototxt", cpu=True, gpu="0"))


def test_deterministic_runs_and_those_of_the_seed_that_was_drawn_are_the_same(
    digits: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit(digits / "solver.prototxt", "max_iter: 3", "random_seed: -1")
    runs = []
    with caplog.at_level(logging.INFO, "caffepy"):
        for _ in range(2):
            train(TrainOptions("solver.prototxt", cpu=2, deterministic=True))
            runs.append(weights("digits_iter_3.caffemodel"))
    np.testing.assert_array_equal(*runs)
    assert "Deterministic: random_seed is 1" in caplog.messages
    with caplog.at_level(logging.INFO, "caffepy"):
        train(TrainOptions("solver.prototxt", cpu=2))
    drawn = weights("digits_iter_3.caffemodel")
    assert (drawn != runs[0]).any()
    seed = re.search(r"The random seed is (\d+); random_seed: \1 repeats the run", caplog.text)
    assert seed
    edit(digits / "solver.prototxt", f"random_seed: {seed[1]}")
    train(TrainOptions("solver.prototxt", cpu=2))
    np.testing.assert_array_equal(weights("digits_iter_3.caffemodel"), drawn)


def test_settings_are_located(digits: Path) -> None:
    edit(digits / "solver.prototxt", 'lr_policy: "stepp"')
    with pytest.raises(
        ConfigError, match=r'solver\.prototxt:15:1: unknown lr_policy "stepp", did you mean "step"'
    ):
        train(TrainOptions("solver.prototxt"))


RANKS = {
    "mpirun": ({"OMPI_COMM_WORLD_SIZE": "2"}, "mpirun"),
    "mpiexec of MPICH": ({"PMI_SIZE": "4", "SLURM_STEP_NUM_TASKS": "1"}, "mpirun"),
    "srun": ({"SLURM_NTASKS": "4", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"}, "srun"),
    "a script of sbatch": ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, None),
    "srun of one task": ({"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1"}, None),
    "mpirun of one, with daemons of srun": (
        {"OMPI_COMM_WORLD_SIZE": "1", "SLURM_STEP_NUM_TASKS": "2"},
        None,
    ),
}


@pytest.mark.parametrize("case", RANKS)
def test_processes_of_a_launcher_meet_before_they_train(
    case: str, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meets() -> None:
        raise UsageError("there is no MPI")

    edit(digits / "solver.prototxt", "max_iter: 1")
    monkeypatch.setattr("caffepy.collectives.mpi.start", meets)
    variables, launcher = RANKS[case]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if launcher is None:
        assert train(TrainOptions("solver.prototxt")).iteration == 1
    else:
        with pytest.raises(UsageError, match="there is no MPI"):
            train(TrainOptions("solver.prototxt"))
        assert not list(digits.glob("digits_iter_1.*"))


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "caffepy", "train", "--solver", "solver.prototxt", *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)


def wait_for(process: subprocess.Popen[str], text: str) -> None:
    assert process.stderr is not None
    assert any(text in line for line in process.stderr), f"no line with {text!r}"


def weights(path: str) -> np.ndarray:
    return np.concatenate(
        [blob_to_array(blob).ravel() for layer in read_net(path).layer for blob in layer.blobs]
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_run_goes_on_exactly(number: signal.Signals, digits: Path) -> None:
    settings = ["max_iter: 600", "display: 10", "snapshot: 0", "test_interval: 250"]
    edit(digits / "solver.prototxt", *settings)
    with start("--weights", "init_iter_0.caffemodel", "--threads", "1") as process:
        wait_for(process, "Iteration 30 ")
        process.send_signal(number)
        log = process.communicate()[1]
        assert "Optimization stopped early." in log
        assert re.search(
            r"A signal stopped the run at iteration (\d+); --snapshot digits_iter_\1.solverstate resumes it",
            log,
        )
        assert process.returncode == 75
    assert not Path("digits_iter_600.caffemodel").exists()
    train(TrainOptions("solver.prototxt", snapshot="auto", threads=1))
    resumed = weights("digits_iter_600.caffemodel")
    train(TrainOptions("solver.prototxt", weights=["init_iter_0.caffemodel"], threads=1))
    np.testing.assert_array_equal(weights("digits_iter_600.caffemodel"), resumed)


def test_sighup_takes_a_snapshot_and_goes_on(digits: Path) -> None:
    edit(
        digits / "solver.prototxt",
        "max_iter: 100000",
        "display: 10",
        "snapshot: 0",
        "test_interval: 100000",
    )
    with start() as process:
        wait_for(process, "Iteration 10 ")
        process.send_signal(signal.SIGHUP)
        wait_for(process, "Snapshotting solver state")
        wait_for(process, "Iteration ")
        process.send_signal(signal.SIGTERM)
        process.communicate()
        assert process.returncode == 75
    assert len(list(digits.glob("*.solverstate"))) == 2


def test_second_sigint_quits_without_a_snapshot(digits: Path) -> None:
    edit(
        digits / "solver.prototxt",
        "max_iter: 100000",
        "display: 1",
        "snapshot: 0",
        "test_iter: 100000",
    )
    with start() as process:
        wait_for(process, "Testing net")
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        process.communicate()
        assert process.returncode in (130, 75)


def test_further_sigterms_lose_no_snapshot_that_is_written(digits: Path) -> None:
    """Not while the process ends."""
    edit(
        digits / "solver.prototxt",
        "max_iter: 100000",
        "display: 5",
        "snapshot: 0",
        "test_interval: 100000",
    )
    with start() as process:
        wait_for(process, "Iteration 5 ")
        while process.poll() is None:
            process.send_signal(signal.SIGTERM)
            time.sleep(0.002)
        assert process.returncode == (75 if list(digits.glob("*.solverstate")) else 130)


def test_events_for_tensorboard_go_on_in_a_resumed_run(digits: Path) -> None:
    pytest.importorskip("tensorboardX")
    edit(digits / "solver.prototxt", "max_iter: 60", "snapshot: 40", "test_interval: 30")
    how = {"tensorboard": "events", "tensorboard_histograms": 20, "progress": False}
    train(TrainOptions("solver.prototxt", weights=["init_iter_0.caffemodel"], **how))
    whole = values(digits / "events")
    train(TrainOptions("solver.prototxt", snapshot="digits_iter_40.solverstate", **how))
    again = values(digits / "events")
    assert list(again["loss"]) == list(whole["loss"]) == [0, 20, 30, 40, 60]
    assert list(again["test/accuracy"]) == [0, 30, 60]
    assert list(again["gradients/conv1/0"]) == list(again["weights/conv1/0"]) == [0, 20, 40]
    assert list(again["filters/conv1"]) == [0, 20, 40, 60]
    for tag in again.keys() - {"images_per_s"}:
        for step, value in again[tag].items():
            assert value == whole[tag][step], f"{tag} at {step}"
    assert len(list((digits / "events").iterdir())) == 2


QUICK = ("display: 0", "test_interval: 100", "test_initialization: false")


def run_to(folder: Path, iterations: int, *settings: str, **options: object) -> str | None:
    """Train up to this iteration, with a snapshot every 2; return the last snapshot."""
    edit(folder / "solver.prototxt", f"max_iter: {iterations}", "snapshot: 2", *QUICK, *settings)
    return train(TrainOptions("solver.prototxt", **options)).snapshot  # type: ignore[arg-type]


@pytest.mark.parametrize("rate", ["base_lr: 0.01", "base_lr: 0.001"], ids=["equal", "other"])
def test_auto_goes_on_with_the_newest_run_under_its_prefix(
    rate: str, digits: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_to(digits, 8, "base_lr: 0.01")
    run_to(digits, 4, rate)
    assert (
        "This run starts at iteration 0, but 4 snapshot(s) of an earlier one lie under digits, the "
        "newest is digits_iter_8.solverstate; those of the same iterations are overwritten. "
        "--snapshot auto goes on from them; another snapshot_prefix keeps them"
    ) in caplog.messages
    caplog.clear()
    with caplog.at_level(logging.INFO):
        run_to(digits, 6, rate, snapshot="auto")
        run_to(digits, 6, rate, snapshot="auto")
    assert [m for m in caplog.messages if m.startswith("Resuming")] == [
        "Resuming from digits_iter_4.solverstate",
        "Resuming from digits_iter_6.solverstate",
    ]


def test_auto_skips_another_run_and_refuses_if_there_is_only_that(
    digits: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = ("base_lr: 0.01", "random_seed: 5"), ("base_lr: 0.02", "random_seed: 6")
    run_to(digits, 5, *first)
    run_to(digits, 4, *second)
    with caplog.at_level(logging.INFO):
        run_to(digits, 6, *first, snapshot="auto")
    other = "is of another run, with base_lr 0.02 instead of 0.01, random_seed 6 instead of 5"
    assert f"digits_iter_4.solverstate {other}; it is skipped" in caplog.messages
    assert "Resuming from digits_iter_5.solverstate" in caplog.messages
    net = digits / "train_val.prototxt"
    net.write_text(net.read_text().replace("num_output: 10", "num_output: 11"))
    with pytest.raises(ConfigError) as caught:
        run_to(digits, 6, *first, snapshot="auto")
    assert str(caught.value) == (
        "no snapshot under digits is of this run: digits_iter_6.solverstate is of another run, "
        "with another net; give it as --snapshot to go on from it all the same, or set another "
        "snapshot_prefix"
    )


def test_moved_data_and_more_iterations_are_the_same_run(digits: Path) -> None:
    run_to(digits, 2)
    net = digits / "train_val.prototxt"
    net.write_text(re.sub(r"batch_size: \d+", "batch_size: 3", net.read_text()))
    assert run_to(digits, 3, snapshot="auto") == "digits_iter_3.solverstate"


def test_auto_does_not_overwrite_a_model_whose_state_is_lost(digits: Path) -> None:
    run_to(digits, 2)
    model = Path("digits_iter_2.caffemodel")
    Path("digits_iter_2.solverstate").unlink()
    content = model.read_bytes()
    with pytest.raises(
        ConfigError, match=r"digits_iter_2\.caffemodel is there, but not its \.solverstate; bring"
    ):
        run_to(digits, 2, "random_seed: 9", snapshot="auto")
    assert model.read_bytes() == content
    run_to(digits, 3, snapshot="auto", weights=["digits_iter_2.caffemodel"])


def test_two_runs_of_one_prefix_are_refused(digits: Path) -> None:
    """The lock ends with the process, however that ends."""
    edit(digits / "solver.prototxt", "max_iter: 100000", "display: 1", *QUICK[1:])
    with start() as other:
        wait_for(other, "Iteration 1 ")
        with pytest.raises(ConfigError) as caught:
            train(TrainOptions("solver.prototxt"))
        other.kill()
    assert re.fullmatch(
        rf"solver\.prototxt:\d+:1: another run writes under this snapshot_prefix: process {other.pid} "
        r"on \S+, which trains solver\.prototxt since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d; wait until it "
        "ends, or end it, or set another snapshot_prefix",
        str(caught.value),
    )
    assert run_to(digits, 1) == "digits_iter_1.solverstate"
    assert not Path(".digits.lock").exists()


def test_the_last_snapshots_of_a_run_are_kept(digits: Path) -> None:
    def iterations() -> list[int]:
        names = [p.name for p in digits.iterdir() if p.name.startswith("digits_iter")]
        found = sorted({int(name.split("_")[2].split(".")[0]) for name in names})
        assert len(names) == 3 * len(found)
        return found

    run_to(digits, 5)
    run_to(digits, 8, keep=2)
    assert iterations() == [5, 6, 8], "5 is of another run, though of the same settings"
    run_to(digits, 9, keep=2, snapshot="auto")
    assert iterations() == [5, 8, 9]
    run_to(digits, 12, keep=1, snapshot="auto")
    assert iterations() == [5, 12]


def test_data_that_are_computed_again_change_nothing(
    digits: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit(digits / "solver.prototxt", "max_iter: 12", "test_interval: 6", "random_seed: 5")
    weights = []
    for recompute in (1, 3, "auto"):
        with caplog.at_level(logging.INFO, "caffepy"):
            train(TrainOptions("solver.prototxt", recompute=recompute))  # type: ignore[arg-type]
        weights.append(Path("digits_iter_12.caffemodel").read_bytes())
    assert weights[0] == weights[1] == weights[2]
    told = [m for m in caplog.messages if m.startswith("Recomputing")]
    assert re.match(r"Recomputing [1-9]\d* of 11 layers before backward", told[0])
    assert told[1].startswith("Recomputing no layer")


def test_what_needs_the_data_that_are_kept_is_refused(digits: Path) -> None:
    with pytest.raises(UsageError, match="--bn-stats sync"):
        train(TrainOptions("solver.prototxt", recompute=2, cpu=2, bn_stats="sync"))
    edit(digits / "solver.prototxt", "debug_info: true")
    with pytest.raises(UsageError, match="debug_info, which shows every blob"):
        train(TrainOptions("solver.prototxt", recompute="auto"))
