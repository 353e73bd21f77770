import json
import re
from pathlib import Path

import pytest

from caffepy.core.errors import ConfigError, UsageError
from caffepy.report import LogReporter, log_tables, logging_to
from tests.report import golden, parsers

LOGS = Path(__file__).parents[1] / "golden" / "logs"
PREFIX = "I0102 10:00:%02d.%06d    42 solver.cpp:1] "


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    """Caffe's log of the digits run, with dates as Caffe's scripts know them."""
    path = tmp_path / "digits.log"
    path.write_text(re.sub(r"^([IWEF])2026", r"\1", golden.LOG.read_text(), flags=re.MULTILINE))
    return path


def write(folder: Path, *lines: str) -> str:
    """A log with these messages, a quarter of a second apart; a line that begins with | stands as
    it is.
    """
    path = folder / "it.log"
    stamps = (PREFIX % divmod(250_000 * i, 1_000_000) for i in range(len(lines)))
    framed = (
        line[1:] if line.startswith("|") else stamp + line
        for stamp, line in zip(stamps, lines, strict=True)
    )
    path.write_text("\n".join(framed) + "\n")
    return str(path)


@pytest.mark.parametrize("name", ["digits", "two_nets"])
def test_csv_files_are_parse_log_pys_to_the_byte(name: str, digits: Path, tmp_path: Path) -> None:
    log = digits if name == "digits" else LOGS / "two_nets.log"
    log_tables.save_log_csvs(str(log), str(tmp_path))
    for kind in ("train", "test"):
        assert (tmp_path / f"{name}.log.{kind}").read_bytes() == (
            LOGS / f"{name}.log.{kind}"
        ).read_bytes()


def test_columns_are_parse_log_shs_to_the_byte(tmp_path: Path) -> None:
    log_tables.save_log_columns(str(LOGS / "two_nets.log"), str(tmp_path))
    for kind in ("train", "test"):
        ours = (tmp_path / f"two_nets.log.{kind}").read_bytes()
        assert ours == (LOGS / f"two_nets.log.columns.{kind}").read_bytes()


def test_dates_with_a_year(digits: Path) -> None:
    assert log_tables.parse_log(str(golden.LOG)) == log_tables.parse_log(str(digits))


def test_our_own_log(tmp_path: Path) -> None:
    with logging_to(stderr=False, log_dir=str(tmp_path)):
        golden.replay(LogReporter(), golden.messages())
    text = (tmp_path / "caffepy.INFO").read_text()
    ours, theirs = log_tables.parse_log(str(tmp_path / "caffepy.INFO")), parsers.tables(text)
    for mine, other in zip(ours, theirs, strict=True):
        assert [list(row) for row in mine] == [list(row) for row in other][: len(mine)]
        assert [row["NumIters"] for row in mine] == [row["NumIters"] for row in other][: len(mine)]
        assert len(mine) >= len(other) - 1 > 1


def outputs(iteration: int, value: str = "1.5") -> list[str]:
    return [
        f"Iteration {iteration}, loss = 1",
        f"    Train net output #0: loss = {value}",
        f"Iteration {iteration}, lr = 1",
    ]


DEADLY = {
    "a blank line": ("|", 3),
    "a word": ("|Traceback", 3),
    "a time without minutes": ("|I0102 10.5 rest", 3),
    "no time": ("|I0102 then 42 it", 3),
    "an hour of many digits": (f"|I0102 {'9' * 30}:00:00.000000 42 x.cpp:1] Iteration 100", 3),
    "the 30th of February": ("|I0230 10:00:00.000000 42 x.cpp:1] Iteration 100", 3),
    "minus nan": ("    Train net output #0: other = -nan", 3),
    "a number that is none": ("    Train net output #0: other = 1.2.3", 3),
}


@pytest.mark.parametrize("case", DEADLY)
def test_what_ends_caffes_script_is_passed_over(case: str, tmp_path: Path) -> None:
    line, count = DEADLY[case]
    log = write(tmp_path, "Solving net", *outputs(0), *outputs(10), line, *outputs(100))
    train, _ = log_tables.parse_log(log)
    assert [row["NumIters"] for row in train] == [0, 10, 100][:count]
    assert all(list(row) == [*log_tables.FIXED, "loss"] for row in train)


def test_a_net_called_solving(tmp_path: Path) -> None:
    log = write(
        tmp_path,
        "Initializing net from parameters: ",
        '|name: "Solving"',
        "Solving it",
        *outputs(0),
        *outputs(5),
    )
    assert [row["Seconds"] for row in log_tables.parse_log(log)[0]] == [0.5, 1.25]


def test_a_log_that_lacks_its_beginning_counts_from_its_first_line(tmp_path: Path) -> None:
    log = write(tmp_path, *outputs(10), *outputs(20))
    assert [row["Seconds"] for row in log_tables.parse_log(log)[0]] == [0.25, 1.0]


def test_columns_that_the_first_row_lacks_come_last(tmp_path: Path) -> None:
    log = write(
        tmp_path, "Solving net", *outputs(0), "Train net output #1: b = 2", *outputs(5), *outputs(6)
    )
    rows = log_tables.parse_log(log)[0]
    rows[1]["c"] = 3.0
    head, first, second = log_tables.csv_text(rows, ";").splitlines()
    assert (head, first.count(";"), second[-5:]) == (
        "NumIters;Seconds;LearningRate;loss;b;c",
        5,
        ";;3.0",
    )


def test_no_rows_no_file(tmp_path: Path) -> None:
    said = log_tables.save_log_csvs(
        write(tmp_path, "Solving net", *outputs(0), *outputs(1)), str(tmp_path)
    )
    assert said == [
        f"Wrote {tmp_path}/it.log.train",
        f"Not writing {tmp_path}/it.log.test; no lines to write",
    ]
    assert not (tmp_path / "it.log.test").exists()


def test_json_has_null_for_what_is_no_number(tmp_path: Path) -> None:
    log = write(
        tmp_path,
        "Solving net",
        "Iteration 0",
        "Test net output #0: a = 1",
        "Iteration 1",
        "Test net output #0: a = 2",
    )
    told = json.loads(log_tables.as_json(log))
    assert told["train"] == []
    assert told["test"] == [
        {"NumIters": 0, "Seconds": 0.5, "LearningRate": None, "a": 1},
        {"NumIters": 1, "Seconds": 1.0, "LearningRate": None, "a": 2},
    ]


def test_files_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'could not open ".*none\.log": no such file'):
        log_tables.parse_log(str(tmp_path / "none.log"))
    with pytest.raises(UsageError, match="cannot write"):
        log_tables.save_log_csvs(
            write(tmp_path, "Solving net", *outputs(0), *outputs(1)), str(tmp_path / "nowhere")
        )


def test_a_device_is_no_log() -> None:
    with pytest.raises(ConfigError, match='"/dev/zero" is a device, not a log'):
        log_tables.parse_log("/dev/zero")
