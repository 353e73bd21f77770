import json
from pathlib import Path

import pytest

from caffepy.cli import main

pytestmark = pytest.mark.usefixtures("folder")

LOG = str(Path(__file__).parents[1] / "golden" / "logs" / "two_nets.log")
Captured = pytest.CaptureFixture[str]


def names() -> list[str]:
    return sorted(path.name for path in Path().rglob("*") if path.is_file())


def test_files_come_into_the_current_folder(capsys: Captured) -> None:
    assert main.run(["parse_log", LOG]) == 0
    assert names() == ["two_nets.log.test", "two_nets.log.train"]
    wrote = "Wrote ./two_nets.log.train\nWrote ./two_nets.log.test\n"
    assert capsys.readouterr() == (wrote, "")


def test_delimiter_folder_and_words(capsys: Captured) -> None:
    Path("out").mkdir()
    assert main.run(["parse-log", LOG, "out", "-delimiter", "\\t", "--verbose"]) == 0
    assert capsys.readouterr().out == "Wrote out/two_nets.log.train\nWrote out/two_nets.log.test\n"
    assert Path("out/two_nets.log.test").read_text().startswith("NumIters\tSeconds\t")


def test_columns(capsys: Captured) -> None:
    assert main.run(["parse-log", LOG, "--columns", "--verbose"]) == 0
    assert capsys.readouterr().out == "Wrote ./two_nets.log.train\nWrote ./two_nets.log.test\n"
    assert (
        Path("two_nets.log.train")
        .read_text()
        .startswith("#Iters Seconds TrainingLoss LearningRate\n0    ")
    )


def test_json_writes_files_only_where_it_is_told(capsys: Captured) -> None:
    assert main.run(["parse-log", LOG, "--json"]) == 0
    assert [row["NumIters"] for row in json.loads(capsys.readouterr().out)["test"]] == [
        0,
        200,
        400,
        500,
    ]
    assert names() == []
    assert main.run(["parse-log", LOG, ".", "--json"]) == 0
    assert len(names()) == 2


def test_a_log_without_rows_warns_as_caffes_scripts_end_well(capsys: Captured) -> None:
    Path("other.log").write_text("I1128 17:32:20.518199  6170 train.cpp:1] Starting\n")
    assert main.run(["parse-log", "other.log"]) == 0
    assert '"other.log" has no rows' in capsys.readouterr().err
    assert names() == ["other.log"]


@pytest.mark.parametrize("how", [[], ["--columns"], ["--json"]])
def test_a_table_is_not_a_log(how: list[str], capsys: Captured) -> None:
    Path("digits_metrics.csv").write_text("iteration,loss\n0,2.3\n")
    assert main.run(["parse-log", "digits_metrics.csv", *how]) == 3
    assert capsys.readouterr() == (
        "",
        'caffepy: error: "digits_metrics.csv" is not a training log: no line begins with glog\'s '
        "time, as in I1128 17:32:20.518199\n",
    )
    assert names() == ["digits_metrics.csv"]


WRONG = {
    "no log": ("none.log", 3, 'could not open "none.log": no such file or directory'),
    "a folder": (".", 3, 'could not open "."'),
    "no folder": (f"{LOG} nowhere", 2, 'cannot write "nowhere/two_nets.log.train"'),
    "delimiter": (f"{LOG} --delimiter=ab", 2, "'ab' is not one character"),
    "both": (f"{LOG} --columns --json", 2, "--columns goes with neither"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong(case: str, capsys: Captured) -> None:
    line, code, message = WRONG[case]
    assert main.run(["parse-log", *line.split()]) == code
    assert message in capsys.readouterr().err
