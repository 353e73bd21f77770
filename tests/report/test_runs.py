import json
import math
from pathlib import Path

import numpy as np
import pytest

from caffepy.core.errors import ConfigError, UsageError
from caffepy.report import Metrics
from caffepy.report.metrics import rows_in
from caffepy.report.runs import name_of, read_run, read_runs
from caffepy.report.series import Run, as_json, joined, panel_of
from tests.report import golden

LOGS = Path(__file__).parents[1] / "golden" / "logs"


def log(
    folder: Path,
    name: str,
    *messages: str,
    prefix: str = "I0102 10:00:%02d.%06d    42 solver.cpp:1] ",
) -> str:
    """A log with these messages, half a second apart."""
    stamps = (
        prefix % divmod(500_000 * i, 1_000_000) if "%" in prefix else prefix
        for i in range(len(messages))
    )
    path = folder / name
    path.write_text(
        "".join(f"{stamp}{line}\n" for stamp, line in zip(stamps, messages, strict=True))
    )
    return str(path)


def shown(*iterations: int, speed: str = "") -> list[str]:
    return [f"Iteration {i}{speed}, loss = {i / 10}" for i in iterations]


def points(run: Run, name: str) -> list[tuple[int, float, float]]:
    it = run.curves[name]
    return list(zip(it.iterations, it.seconds, it.values, strict=True))


def test_caffes_log_of_the_digits() -> None:
    run = read_run([str(golden.LOG)])
    assert run.name == "caffe_train"
    assert {*run.curves} == {"test accuracy", "test loss", "loss", "train loss", "lr", "iter/s"}
    assert points(run, "test accuracy")[-1][::2] == (500, 0.983165)
    assert points(run, "loss")[0] == (0, 0.008857, 2.32759)
    assert points(run, "loss")[-1][::2] == (500, 0.0404198)
    assert run.curves["iter/s"].iterations == list(range(20, 500, 20))  # the first means nothing
    assert run.curves["iter/s"].values[0] == 666.667
    assert run.curves["lr"].values[:2] == [0.05, 0.0492629]


def test_two_test_nets_and_an_output_of_two_values() -> None:
    run = read_run([str(LOGS / "two_nets.log")])
    assert points(run, "test1 top5")[1][::2] == (200, 0.01)
    assert [name for name in run.curves if name.startswith("train p")] == [
        "train p,\udcf6[0]",
        "train p,\udcf6[1]",
    ]
    assert math.isinf(run.curves["loss"].values[5])
    assert math.isnan(run.curves["test loss"].values[2])
    assert run.curves["loss"].seconds[-1] == 18.25  # a new year began on the way


def test_an_old_log_has_speeds_from_its_times(tmp_path: Path) -> None:
    run = read_run([log(tmp_path, "a.log", "Solving a", *shown(0, 20, 60))])
    assert points(run, "iter/s") == [(20, 1.0, 40.0), (60, 1.5, 80.0)]


def test_a_log_without_times_is_drawn_over_iterations(tmp_path: Path) -> None:
    run = read_run([log(tmp_path, "a.log", *shown(0, 20), "Iteration 20, lr = 1e-05", prefix="")])
    assert run.curves["loss"].values == [0.0, 2.0]
    assert run.curves["lr"].values == [1e-5]
    assert all(map(math.isnan, run.curves["loss"].seconds))


def test_lines_as_nvcaffe_has_them(tmp_path: Path) -> None:
    more = "Iteration %d (31.5 iter/s, 0.6s/20 iters), 0.4/10.2ep, loss = 1.5"
    rate = "Iteration 20, lr = 0.01, m = 0.9, wd = 0.0005, gs = 1"
    run = read_run([log(tmp_path, "a.log", "Solving a", more % 0, more % 20, rate)])
    assert (run.curves["loss"].values, run.curves["lr"].values) == ([1.5, 1.5], [0.01])
    assert run.curves["iter/s"].values == [31.5]


def test_restarts_in_a_log_and_in_several_files(tmp_path: Path) -> None:
    first = ["Solving a", *shown(0, 10, 20, 30)]
    again = ["Solving a", *shown(20, 30, 40)]
    one = read_run([log(tmp_path, "one.log", *first, *again)])
    two = read_run([log(tmp_path, "first.log", *first), log(tmp_path, "again.log", *again)])
    assert points(one, "loss") == points(two, "loss")
    # the second part begins half a second after the last iteration that it builds on, which was at
    # 1.0
    assert points(one, "loss") == [
        (0, 0.5, 0.0),
        (10, 1.0, 1.0),
        (20, 1.5, 2.0),
        (30, 2.0, 3.0),
        (40, 2.5, 4.0),
    ]


def test_iterations_that_go_back_are_a_restart(tmp_path: Path) -> None:
    run = read_run([log(tmp_path, "a.log", *shown(0, 10, 20, 10, 20, 30))])
    assert run.curves["loss"].iterations == [0, 10, 20, 30]
    assert run.curves["loss"].seconds == sorted(run.curves["loss"].seconds)


def test_a_part_replaces_curves_that_it_begins_anew() -> None:
    old, new = Run("old"), Run("new")
    old.add("loss", 10, 1.0, 5.0)
    new.add("lr", 5, 1.0, 0.1)
    assert list(joined("both", [old, new]).curves) == ["lr"]


def test_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("caffepy.report.metrics.draw_curve", lambda *_: None)
    with Metrics(str(tmp_path / "net")) as metrics:
        golden.replay(metrics, golden.messages())
        metrics.test_started(501, 1)
        metrics.test_done(501, 1, [("prob", np.float32([1, np.nan]), 0.0)], None)
    run = read_run([str(tmp_path / "net_metrics.csv")])
    assert run.name == "net"
    assert {
        "loss",
        "lr",
        "images/s",
        "test accuracy",
        "test loss",
        "test1 prob[0]",
        "test1 prob[1]",
    } == {*run.curves}
    assert math.isnan(run.curves["test1 prob[1]"].values[0])
    assert run.curves["test accuracy"].iterations == [*range(0, 501, 100)]


def test_lines_that_were_cut_off(tmp_path: Path) -> None:
    run = read_run(
        [log(tmp_path, "a.log", *shown(0), "Iteration 10, loss = 1.Iteration", *shown(20))]
    )
    assert run.curves["loss"].iterations == [0, 20]


@pytest.mark.parametrize("digits", [19, 5000])
def test_an_iteration_of_too_many_digits_is_skipped(digits: int, tmp_path: Path) -> None:
    number = "9" * digits
    path = log(tmp_path, "x.log", "Iteration 1, loss = 2", f"Iteration {number}, loss = 3")
    assert [curve.iterations for curve in read_run([path]).curves.values()] == [[1]]
    lines = ["iteration,time,loss,lr,images/s", f"{number},0,1,1,1"]
    assert rows_in(lines) == (lines[0].split(","), [])


def test_names(tmp_path: Path) -> None:
    assert [name_of(path) for path in ("a/b.log", "c_metrics.csv", "caffe.INFO", ".log")] == [
        "b",
        "c",
        "caffe",
        ".log",
    ]
    (tmp_path / "x").mkdir()
    one, two = log(tmp_path, "a.log", *shown(0)), log(tmp_path / "x", "a.log", *shown(0))
    assert [run.name for run in read_runs([one, two])] == [one, two]
    assert [run.name for run in read_runs([f"{one},{two}", two], ["both", "second"])] == [
        "both",
        "second",
    ]
    with pytest.raises(UsageError, match="1 names were given for 2 runs"):
        read_runs([one, two], ["a"])


def test_a_name_with_a_comma_is_one_file(tmp_path: Path) -> None:
    assert len(read_runs([log(tmp_path, "a,b.log", *shown(0))])) == 1


def test_what_tells_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("nothing\n")
    with pytest.raises(ConfigError, match=r'a\.log" is neither a metrics file'):
        read_run([str(tmp_path / "a.log")])
    with pytest.raises(ConfigError, match="no such file"):
        read_run([str(tmp_path / "b.log")])
    with pytest.raises(ConfigError, match="could not open"):
        read_runs([","])


def test_json_and_panels() -> None:
    run = Run("a")
    run.add("loss", 1, math.nan, math.inf)
    told = {"name": "a", "curves": {"loss": {"iteration": [1], "seconds": [None], "value": [None]}}}
    assert json.loads(as_json([run])) == [told]
    names = ["loss", "train loss1/x", "lr", "test acc", "iter/s"]
    assert [panel_of(name) for name in names] == ["loss", "loss", "lr", "outputs", "iter/s"]
