"""Runs read from files: training logs, caffepy's and Caffe's of any age, and metrics files."""

import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from datetime import datetime

from caffepy.core.errors import ConfigError, UsageError
from caffepy.report.log_tables import Clock, read_lines
from caffepy.report.metrics import rows_in
from caffepy.report.series import Run, joined, of_metrics

# a number of more digits is damage
SHOWN = re.compile(
    r"Iteration (\d{1,18})(?: \((\S+) iter/s\b[^)]*\))?,(?: [^=]*,)? loss = ([^\s,]+)"
)
TESTING = re.compile(r"Iteration (\d{1,18}), Testing net \(#(\d+)\)")
RATE = re.compile(r"Iteration (\d{1,18}), lr = ([^\s,]+)")
OUTPUT = re.compile(r"(Train|Test) net output #\d+: (\S+) = (\S+)")
TEST_LOSS = re.compile(r"\] Test loss: (\S+)")
SUFFIXES = ("_metrics.csv", ".csv", ".log", ".txt", ".INFO")


def read_runs(logs: Sequence[str], names: Sequence[str] = ()) -> list[Run]:
    """Return a run for each log, which may be several files of one run, separated by commas.

    Runs are called by `names`, else by their files; UsageError if the numbers differ.
    """
    if names and len(names) != len(logs):
        raise UsageError(f"{len(names)} names were given for {len(logs)} runs")
    files = [
        (not os.path.exists(log) and [part for part in log.split(",") if part]) or [log]
        for log in logs
    ]
    own = [name_of(some[0]) for some in files]
    if len(set(own)) < len(own):
        own = list(logs)
    return [read_run(some, name) for some, name in zip(files, names or own, strict=True)]


def read_run(files: Sequence[str], name: str = "") -> Run:
    """Return the run in these files, in their order: logs, with or without restarts, or metrics.

    ConfigError if one cannot be read or describes no run.
    """
    parts = []
    for path in files:
        lines = read_lines(path)  # once: it may be a pipe
        columns, rows = rows_in(line.removeprefix("\ufeff") for line in lines)
        found = [of_metrics(path, columns, rows)] if columns else _LogReader(path, lines).parts
        if not any(part.curves for part in found):
            raise ConfigError(
                f'"{path}" is neither a metrics file nor a training log: no line has an iteration '
                f"and a loss"
            )
        parts += found
    return joined(name or name_of(files[0]), parts)


def name_of(path: str) -> str:
    """Return the name of the run in a file."""
    base = os.path.basename(path)
    suffix = next((suffix for suffix in SUFFIXES if base.endswith(suffix)), "")
    return base.removesuffix(suffix) or base


class _LogReader:
    """Splits a log into parts of a run: a part begins at `Solving`, or where iterations go back."""

    def __init__(self, path: str, lines: Sequence[str]) -> None:
        self.parts = [Run(path)]
        self._clock = Clock(path)
        self._start: datetime | None = None
        self._seconds = math.nan
        self._iteration = -1
        self._net = "train"
        self._seen: Counter[str] = Counter()  # outputs of the net that was shown last, by name
        self._display: tuple[int, float] | None = None
        self._several: set[str] = set()
        for line in lines:
            self._read(line)
        for part in self.parts:
            for key in list(part.curves):  # outputs of several values get an index
                name, mark, k = key.partition("\0")
                if mark:
                    shown = f"{name}[{k}]" if name in self._several else name
                    part.curves[shown] = part.curves.pop(key)
            derived = part.curves.pop("derived iter/s", None)
            if derived and "iter/s" not in part.curves:
                part.curves["iter/s"] = derived

    def _read(self, line: str) -> None:
        when = self._clock.time(line)
        if "] Solving " in line:
            self._begin(when)
        if when:
            self._start = self._start or when
            self._seconds = (when - self._start).total_seconds()
        if found := SHOWN.search(line):
            self._move(int(found[1]), "train", when)
            self._add("loss", found[3])
            self._speed(found[2])
        elif found := TESTING.search(line):
            self._move(int(found[1]), f"test{'' if found[2] == '0' else found[2]}", when)
        elif found := RATE.search(line):
            self._move(int(found[1]), "train", when)
            self._add("lr", found[2])
        elif self._iteration < 0:
            return
        elif found := TEST_LOSS.search(line):
            self._add(f"{self._net} loss of the net", found[1])
        elif found := OUTPUT.search(line):
            net = "train" if found[1] == "Train" else self._net
            k = self._seen[found[2]]
            self._seen[found[2]] += 1
            if k:
                self._several.add(f"{net} {found[2]}")
            self._add(f"{net} {found[2]}\0{k}", found[3])

    def _begin(self, when: datetime | None) -> None:
        self.parts.append(Run(self.parts[0].name))
        self._start, self._seconds, self._iteration, self._display = when, math.nan, -1, None

    def _move(self, iteration: int, net: str, when: datetime | None) -> None:
        if iteration < self._iteration:
            self._begin(when)
            self._seconds = 0.0 if when else math.nan
        self._iteration, self._net = iteration, net
        self._seen.clear()

    def _add(self, name: str, text: str) -> None:
        try:
            value = float(text)
        except ValueError:  # cut off, or written by several at once
            return
        self.parts[-1].add(name, self._iteration, self._seconds, value)

    def _speed(self, stated: str | None) -> None:
        """Add the speed that the line states; in old logs it is that since the line before.

        The first is skipped: it includes the start.
        """
        before, self._display = self._display, (self._iteration, self._seconds)
        if stated is not None and before:
            self._add("iter/s", stated)
        elif before and self._seconds > before[1]:
            speed = (self._iteration - before[0]) / (self._seconds - before[1])
            self._add("derived iter/s", str(speed))
