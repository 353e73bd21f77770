import json

import pytest

from caffepy.cli import main
from caffepy.commands.bench import scaling
from tests.nets.library import DIGITS


def test_two_solvers_beside_one(capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "bench",
        "scaling",
        "--model",
        "lenet",
        "--cpu",
        "2",
        "--batch",
        "2",
        "--windows",
        "1",
        "--json",
    ]
    assert main.run(command) == 0
    told = json.loads(capsys.readouterr().out)
    one, two = told["points"]
    assert (one["devices"], two["devices"]) == (1, 2)
    assert told["precision"] == "fp32"
    assert one["efficiency"] == one["times"] == 1
    assert one["exposed"] == 0
    assert two["times"] == pytest.approx(two["images_per_s"] / one["images_per_s"])
    assert two["efficiency"] == two["times"]  # one solver has all threads, too
    assert two["images_per_s"] == pytest.approx(2 * 2 * 1000 / two["ms"])
    assert 0 < two["exposed"] < 1


def test_the_table_says_what_efficiency_is_on_the_cpu() -> None:
    point = scaling.Point(1, 1, 100.0, 1.0, 1.0, 10.0, 0.0, None)
    tables = [
        scaling.Scaling("net", on, "fp32", "flat", 1, [point]).table()
        for on in ("the CPU", "NVIDIA H200")
    ]
    told = ["one solver that has all threads to itself" in table for table in tables]
    assert told == [True, False]


def test_solvers_share_a_database(capsys: pytest.CaptureFixture[str]) -> None:
    data = str(DIGITS / "digits_train_lmdb")
    command = ["bench", "scaling", "--model", "digits", "--cpu", "2", "--batch", "3"]
    command += ["--windows", "1", "--iterations", "4", "--data", data]
    assert main.run([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["data"] == data
    assert [point["devices"] for point in told["points"]] == [1, 2]
    assert main.run(command) == 0
    assert f", batch 3 each, data of {data}, sync auto" in capsys.readouterr().out
    assert main.run([*command, "--simulate", "nodes=2 gpus=1 nic=1x100"]) == 2
    assert "--simulate goes without --iterations, --data and --decode" in capsys.readouterr().err


def test_what_to_train_and_where_must_be_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["bench", "scaling", "--cpu", "2"]) == 2
    assert main.run(["bench", "scaling", "--model", "lenet", "--cpu", "2", "--gpu", "0"]) == 2
    assert "not both" in capsys.readouterr().err
    for command in ("bench scaling --model lenet", "bench allreduce", "train --solver digits"):
        assert main.run([*command.split(), "--cpu", "100000"]) == 2
        assert "100000 is not in the range 1<=x<=256" in capsys.readouterr().err


def test_a_way_that_cannot_be_had_is_refused_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaling, "Trainer", None)
    for sync, why in (("muji", "for 2, 4 or 8 devices"), ("nccl", "NCCL is for GPUs")):
        assert main.run(["bench", "scaling", "--model", "lenet", "--cpu", "3", "--sync", sync]) == 2
        assert f"--sync {sync}: " in (told := capsys.readouterr().err)
        assert why in told
