"""The tables that Caffe's scripts make of a log: parse_log.py's CSV files, parse_log.sh's columns.

A log is text framed by glog. Bytes that are not UTF-8 are kept as they are. Dates have no year, or
begin with it as in newer glogs; without it the first line is taken to be of the year in which the
file was made, as in the scripts.
"""

import csv
import io
import logging
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import zip_longest
from pathlib import Path

from caffepy.core.errors import ConfigError, reason
from caffepy.core.files import written
from caffepy.proto.sniff import sniff
from caffepy.report.text import as_json as to_json

log = logging.getLogger(__name__)

ITERATION = re.compile(r"Iteration (\d+)", re.ASCII)
TRAIN, TEST = (
    re.compile(rf"{net} net output #\d+: (\S+) = ([.\deE+-]+)", re.ASCII)
    for net in ("Train", "Test")
)
RATE = re.compile(r"lr = ([-+]?[0-9]*\.?[0-9]+(?:[eE]?[-+]?[0-9]+)?)")
FIXED = ("NumIters", "Seconds", "LearningRate")
LEFT_OUT = re.compile(
    r"Waiting for data|prefetch queue empty|Iteration .* loss|Iteration .* lr|Train net"
)

Row = dict[str, float]


def read_lines(path: str) -> list[str]:
    """Return the lines of a log without their ends; ConfigError if it cannot be read."""
    if sniff(path) == "a device":  # it may have no end
        raise ConfigError(f'"{path}" is a device, not a log')
    try:
        with open(path, encoding="utf-8", errors="surrogateescape", newline="\n") as file:
            return file.read().split("\n")
    except OSError as error:
        raise ConfigError(f'could not open "{path}": {reason(error)}') from None


def _read_log(path: str) -> list[str]:
    """Return what `read_lines` does; ConfigError, too, if no line has a time."""
    lines = read_lines(path)
    if not any(map(Clock(path).time, lines)):
        raise ConfigError(
            f'"{path}" is not a training log: no line begins with glog\'s time, as in '
            "I1128 17:32:20.518199"
        )
    return lines


class Clock:
    """Reads the times of consecutive lines; if the month goes back, a new year has begun."""

    def __init__(self, path: str) -> None:
        self._year = datetime.fromtimestamp(os.path.getctime(path)).year
        self._month = 0

    def time(self, line: str) -> datetime | None:
        """Return the time of a line, None if it does not begin with glog's prefix."""
        fields = line.split(maxsplit=2)[:2]
        when = self._read(fields) if len(fields) == 2 else None
        if when and when.month < self._month and not _has_year(fields[0]):
            self._year += 1
            when = self._read(fields)
        self._month = when.month if when else self._month
        return when

    def _read(self, fields: Sequence[str]) -> datetime | None:
        date, (clock, _, micros) = fields[0][1:], fields[1].rpartition(".")
        year, date = (int(date[:4]), date[4:]) if _has_year(fields[0]) else (self._year, date)
        with suppress(ValueError, OverflowError):
            hour, minute, second = map(int, clock.split(":")[:3])
            return datetime(year, int(date[:2]), int(date[2:]), hour, minute, second, int(micros))
        return None


def _has_year(date: str) -> bool:
    return len(date) == 9 and date[1:].isdecimal() and date[1:].isascii()


class _Table:
    """Rows of outputs, one for each iteration that has some.

    A row is kept once it is as long as the first, or when the next begins: the last may be missing.
    """

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self.rows: list[Row] = []
        self._pattern = pattern
        self._row: Row | None = None

    def take(self, line: str, iteration: float, seconds: float, rate: float) -> None:
        found = self._pattern.search(line)
        value = _number(found[2]) if found else None
        if found and value is not None:
            if self._row is None or self._row["NumIters"] != iteration:
                if self._row is not None:
                    self.rows.append(self._row)
                self._row = dict(zip(FIXED, (iteration, seconds, rate), strict=True))
            self._row[found[1]] = value
        if self._row is not None and self.rows and len(self._row) == len(self.rows[0]):
            self.rows.append(self._row)
            self._row = None

    def with_first_rate(self) -> list[Row]:
        """Return the rows; the first, older than any learning rate, gets that of the second."""
        if len(self.rows) > 1:
            self.rows[0]["LearningRate"] = self.rows[1]["LearningRate"]
        return self.rows


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # the "-" of "-nan"
        return None


def parse_log(path: str) -> tuple[list[Row], list[Row]]:
    """Return the rows of train and test outputs as parse_log.py has them.

    What ends the script is skipped here: lines of one word or none, outputs that are -nan or -inf,
    dates with a year, and a log without the line `Solving`, whose first line counts as the start. A
    log without rows is a warning. ConfigError if the file cannot be read or is not a log.
    """
    lines = _read_log(path)
    clock = Clock(path)
    train, test = _Table(TRAIN), _Table(TEST)
    start, first = _start(lines, clock)
    iteration, rate = -1.0, math.nan
    for line in lines[first:]:
        if found := ITERATION.search(line):
            iteration = float(found[1])
        if iteration == -1 or start is None:
            continue
        when = clock.time(line)
        if when is None:
            continue
        if (found := RATE.search(line)) and (number := _number(found[1])) is not None:
            rate = number
        for table in (train, test):
            table.take(line, iteration, (when - start).total_seconds(), rate)
    if not train.rows and not test.rows:
        text = '"%s" has no rows: no iteration in lines of glog shows all outputs of a net'
        log.warning(text, path)
    return train.with_first_rate(), test.with_first_rate()


def _start(lines: Sequence[str], clock: Clock) -> tuple[datetime | None, int]:
    """Return the time from which seconds count, and the index of the line after it."""
    for mark, after in (("Solving", 1), ("", 0)):
        for i, line in enumerate(lines):
            if mark in line and (when := clock.time(line)):
                return when, i + after
    return None, 0


def as_json(path: str) -> str:
    """Return a log's rows as `{"train": [...], "test": [...]}`; what is not a number is null."""
    train, test = parse_log(path)
    return to_json({"train": train, "test": test})


def csv_text(rows: Sequence[Row], delimiter: str = ",") -> str:
    """Return rows as a CSV file, empty if there are none; columns of later rows only come last."""
    if not rows:
        return ""
    file = io.StringIO(newline="")
    columns = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(file, columns, delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def save_log_csvs(path: str, folder: str, delimiter: str = ",") -> list[str]:
    """Write parse_log.py's LOG.train and LOG.test into a folder; return its messages."""
    return _save(path, folder, [csv_text(rows, delimiter) for rows in parse_log(path)])


def save_log_columns(path: str, folder: str) -> list[str]:
    """Write parse_log.sh's LOG.train and LOG.test into a folder; return a message for each."""
    return _save(path, folder, log_columns(path))


def _save(path: str, folder: str, tables: Sequence[str]) -> list[str]:
    messages = []
    for name, text in zip(("train", "test"), tables, strict=True):
        file = os.path.join(folder, f"{os.path.basename(path)}.{name}")
        if text:
            with written(file) as temporary:
                Path(temporary).write_bytes(text.encode(errors="surrogateescape"))
        messages.append(f"Wrote {file}" if text else f"Not writing {file}; no lines to write")
    return messages


def log_columns(path: str) -> tuple[str, str]:
    """Return the tables of train and test lines of parse_log.sh, which cuts lines by field numbers.

    Output #0 of the test net counts as accuracy and #1 as loss. ConfigError if the file cannot be
    read or is not a log.
    """
    lines = _read_log(path)
    losses = [line for line in lines if ", loss = " in line]
    tests = [line for line in lines if "Testing net" in line]
    first_test = (i for i, line in enumerate(lines) if re.search("Iteration .* Testing net", line))
    begin = next(first_test, len(lines))
    tested = [line for line in lines[begin:] if not LEFT_OUT.search(line)]
    train = zip_longest(
        _iterations(losses),
        _seconds(path, lines, losses),
        [line.split("=")[1] for line in losses],
        [_field(line, 8) for line in lines if ", lr = " in line],
        fillvalue="",
    )
    test = zip_longest(
        _iterations(tested),
        _seconds(path, lines, tests),
        *([_field(line, 10) for line in tested if f"Test net output #{i}" in line] for i in (0, 1)),
        fillvalue="",
    )
    return (
        "#Iters Seconds TrainingLoss LearningRate\n" + _columns(train),
        "#Iters Seconds TestAccuracy TestLoss\n" + _columns(test),
    )


def _iterations(lines: Sequence[str]) -> list[str]:
    """Return the last number after the word in each line that has the word."""
    return [
        re.sub(r".*Iteration (\d*).*", r"\1", line, flags=re.ASCII)
        for line in lines
        if "Iteration " in line
    ]


def _seconds(path: str, lines: Sequence[str], chosen: Sequence[str]) -> Iterator[str]:
    clock = Clock(path)
    start, _ = _start([line for line in lines if "] Solving " in line] or chosen, clock)
    for line in chosen:
        when = clock.time(line) if "Iteration" in line else None
        if when and start:
            yield f"{(when - start).total_seconds():f}"


def _field(line: str, index: int) -> str:
    return (line.split() + [""] * (index + 1))[index]


def _columns(rows: Iterator[tuple[str, ...]]) -> str:
    """Return rows of words with two blanks between columns; cells after a missing one move up."""
    words = [[word for cell in row for word in cell.split()] for row in rows]
    columns = list(zip_longest(*(row for row in words if row), fillvalue=""))
    widths = [*(max(map(len, column)) for column in columns[:-1]), 0]
    rows_of_all = zip(*columns, strict=True)
    return "".join("  ".join(map(str.ljust, row, widths)) + "\n" for row in rows_of_all)
