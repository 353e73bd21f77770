import importlib.util
import logging
import os
import shlex
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from caffepy.cli import main
from caffepy.core.events import Displayed
from caffepy.report import Metrics
from caffepy.report.beside import CurveProcess
from caffepy.report.metrics import read_rows
from caffepy.report.runs import read_run
from tests.report import golden


@pytest.fixture
def prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix for files; no curve is drawn unless a test asks for it."""
    monkeypatch.setattr("caffepy.report.metrics.draw_curve", lambda *_: None)
    return str(tmp_path / "net")


def run(metrics: Metrics, first: int, last: int, display: int = 2, test: int = 4) -> None:
    metrics.solving("net", "fixed")
    for i in range(first, last):
        if i % test == 0:
            accuracy(metrics, i)
        if i % display == 0:
            metrics.displayed(Displayed(i, i / 10, [], 1, 1, display))
            metrics.lr(i, 0.01)
        metrics.iterated(i, i / 10, 0.01, 50)


def accuracy(metrics: Metrics, i: int, k: int = 0) -> None:
    metrics.test_started(i, k)
    metrics.test_done(i, k, [("accuracy", np.float32(i / 100), 0.0)], None)


def column(prefix: str, name: str) -> list[str]:
    return [row[name] for row in read_rows(f"{prefix}_metrics.csv")[1]]


def test_a_row_for_each_display_and_test(prefix: str) -> None:
    with Metrics(prefix) as metrics:
        golden.replay(metrics, golden.messages())
    columns, rows = read_rows(f"{prefix}_metrics.csv")
    assert columns == ["iteration", "time", "loss", "lr", "test_accuracy", "test_loss", "images/s"]
    assert [int(row["iteration"]) for row in rows] == [*range(0, 500, 20), 500]
    assert (rows[5]["loss"], rows[5]["lr"], rows[5]["test_accuracy"]) == (
        "0.511121",
        "0.0465506",
        "0.878788",
    )
    assert (rows[6]["test_accuracy"], rows[-1]["loss"], rows[-1]["test_accuracy"]) == (
        "",
        "0.0404198",
        "0.983165",
    )
    assert all(float(row["images/s"]) > 0 for row in rows[:-1])
    times = [float(row["time"]) for row in rows]
    assert times == sorted(times)


def test_a_row_is_in_the_file_when_its_iteration_is_over(prefix: str) -> None:
    metrics = Metrics(prefix)
    run(metrics, 0, 1)
    assert column(prefix, "iteration") == ["0"]
    metrics.close()


def test_a_test_without_display_still_has_loss_and_rate(prefix: str) -> None:
    with Metrics(prefix) as metrics:
        run(metrics, 0, 9, display=100)
    assert column(prefix, "iteration") == ["0", "4", "8"]
    assert column(prefix, "loss") == ["0", "0.4", "0.8"]


def test_a_resumed_run_goes_on_in_the_file_and_drops_later_rows(prefix: str) -> None:
    with Metrics(prefix) as metrics:
        run(metrics, 0, 11)
    with open(f"{prefix}_metrics.csv", "a") as file:
        file.write("12,0.")  # cut off by a crash
    with Metrics(prefix) as metrics:
        run(metrics, 6, 13)
    assert column(prefix, "iteration") == ["0", "2", "4", "6", "8", "10", "12"]
    assert column(prefix, "test_accuracy") == ["0", "", "0.04", "", "0.08", "", "0.12"]
    times = [float(time) for time in column(prefix, "time")]
    assert times == sorted(times)


def test_a_fresh_run_begins_a_new_file(prefix: str) -> None:
    for last in (9, 3):
        with Metrics(prefix) as metrics:
            run(metrics, 0, last)
    assert column(prefix, "iteration") == ["0", "2"]


def test_rows_that_other_programs_damaged_are_left_out(prefix: str) -> None:
    with Metrics(prefix) as metrics:
        run(metrics, 0, 5)
    path = Path(f"{prefix}_metrics.csv")
    bad = ["x,1,1,1,,1", "6,x,1,1,,1", "8,1,x,1,,1", "\u00b2,1,1,1,,1", ",,,,,", "-1,1,1,1,,1"]
    path.write_text(
        "\n".join(["\ufeff" + path.read_text(), *bad, "7,,1,1,,\n"]).replace("\n\n", "\n"),
        encoding="utf-8",
    )
    assert column(prefix, "iteration") == ["0", "2", "4", "7"]
    assert read_run([str(path)]).curves["loss"].iterations == [0, 2, 4, 7]


def test_something_else_of_that_name_is_not_continued(prefix: str) -> None:
    Path(f"{prefix}_metrics.csv").write_bytes(b"\xff\x00 what is this")
    with Metrics(prefix) as metrics:
        run(metrics, 6, 7)
    assert column(prefix, "iteration") == ["6"]


def test_columns_for_several_test_nets_and_scalars_that_come_late(prefix: str) -> None:
    with Metrics(prefix) as metrics:
        run(metrics, 1, 5)
        accuracy(metrics, 5, k=1)
        metrics.test_done(5, 2, [("p", np.array([0.25, 0.75]), 0.0)], None)
        metrics.done(False)
    columns, rows = read_rows(f"{prefix}_metrics.csv")
    assert columns[4:] == [
        "test_accuracy",
        "test1_accuracy",
        "test2_p[0]",
        "test2_p[1]",
        "images/s",
    ]
    assert list(rows[-1].values())[4:8] == ["", "0.05", "0.25", "0.75"]
    assert [row["iteration"] for row in rows] == ["2", "4", "5"]


def test_disk_trouble_costs_the_file_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Metrics(str(tmp_path / "absent" / "net")) as metrics:
        run(metrics, 0, 9)
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert "the run continues without it" in caplog.text


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_disk_that_fills_up_costs_the_file_only(
    prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Metrics(prefix) as metrics:
        run(metrics, 0, 3)
        assert metrics._file is not None
        metrics._file.close()
        metrics._file = open("/dev/full", "a")  # noqa: SIM115
        run(metrics, 3, 9)
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert column(prefix, "iteration") == ["0", "2"]


def test_the_curve_is_drawn_at_the_end(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with Metrics(str(tmp_path / "net")) as metrics:
        run(metrics, 0, 9)
        metrics.done(stopped_early=False)
    assert (tmp_path / "net_curve.png").read_bytes().startswith(b"\x89PNG")
    assert {p.name for p in tmp_path.iterdir()} == {"net_curve.png", "net_metrics.csv"}


def test_no_curve_without_matplotlib_or_for_who_leaves_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = Metrics(str(tmp_path / "left"))
    run(metrics, 0, 9)
    metrics.done(stopped_early=False)
    metrics.close(complete=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with Metrics(str(tmp_path / "without")) as metrics:
        run(metrics, 0, 9)
        metrics.done(stopped_early=False)
    assert {p.name for p in tmp_path.iterdir()} == {"left_metrics.csv", "without_metrics.csv"}


@pytest.mark.parametrize("end", ["signal", "error"])
def test_a_run_that_ends_early_leaves_its_curve_to_plot(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    with (
        caplog.at_level(logging.INFO, "caffepy"),
        suppress(ValueError),
        Metrics("a net") as metrics,
    ):
        run(metrics, 0, 9)
        if end == "error":
            raise ValueError("a layer's")
        metrics.done(stopped_early=True)
    assert [path.name for path in tmp_path.iterdir()] == ["a net_metrics.csv"]
    (told,) = caplog.messages
    assert told.startswith("Metrics are in a net_metrics.csv; to draw them: caffepy plot ")
    _, command = told.split(": caffepy ")
    assert main.run(shlex.split(command)) == 0
    assert Path("a net_curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_failing_curve_does_not_fail_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with Metrics(str(tmp_path / "net")) as metrics:
        run(metrics, 0, 9)
        metrics.done(stopped_early=False)
    assert "no curve in" in caplog.text or not importlib.util.find_spec("matplotlib")


def test_files_stay_where_the_run_began_wherever_layers_change_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    for folder in "here", "there":
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with Metrics("net") as metrics:
        os.chdir("../there")
        run(metrics, 0, 5)
        run(metrics, 6, 8)
        metrics.done(stopped_early=False)
    names = sorted(path.name for path in (tmp_path / "here").iterdir())
    assert names == ["net_curve.png", "net_metrics.csv"]
    assert not list((tmp_path / "there").iterdir())


def run_beside(prefix: str, complete: bool = True, spoil: bool = False) -> CurveProcess | None:
    metrics = Metrics(prefix, iterations=40)
    metrics.solving("net", "fixed")
    for i in range(0, 40, 2):
        metrics.displayed(Displayed(i, 2 / (i + 1), [], 1, 1, 2))
        metrics.lr(i, 0.1)
        metrics.iterated(i, 2 / (i + 1), 0.1, 5)
        metrics.iterated(i + 1, 2 / (i + 1), 0.1, 5)
    beside = metrics._beside
    if spoil and beside:
        beside._process.kill()
        beside._process.wait()
    if complete:
        metrics.done(False)
    metrics.close()
    return beside


@pytest.mark.parametrize("spoil", [False, True])
def test_a_process_beside_the_end_of_a_run_draws(
    spoil: bool, prefix: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.undo()  # draw
    caplog.set_level("INFO")
    monkeypatch.setattr("caffepy.report.metrics.cores", lambda: 2)
    beside = run_beside(prefix, spoil=spoil)  # one that was killed leaves it to this process
    assert beside is not None
    assert beside._process.returncode is not None
    assert Path(f"{prefix}_curve.png").read_bytes().startswith(b"\x89PNG")
    assert caplog.messages[-1] == f"Curve is in {prefix}_curve.png"


def test_no_process_is_left_by_a_run_that_ends_early(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("caffepy.report.metrics.cores", lambda: 2)
    beside = run_beside(prefix, complete=False)
    assert beside is not None
    assert beside._process.returncode is not None
    assert not Path(f"{prefix}_curve.png").exists()
    monkeypatch.setattr("caffepy.report.metrics.cores", lambda: 1)
    assert run_beside(prefix) is None
