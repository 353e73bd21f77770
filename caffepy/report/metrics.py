"""PREFIX_metrics.csv: one row for each iteration that was displayed or tested.

Columns: `iteration`; `time`, seconds of the run, with the earlier parts of a resumed one; `loss`, smoothed as shown;
`lr`; a column for each scalar that a test net gives, `test_NAME` (`test1_NAME` for the second test net and so on,
`NAME[i]` where an output has several scalars); `images/s` of training since the row before, tests not counted.
What is unknown is empty.
"""

import csv
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TextIO

from caffepy.files import replacing
from caffepy.report import curve
from caffepy.report.speed import Speed
from caffepy.report.text import number
from caffepy.reporter import Output, Reporter

log = logging.getLogger(__name__)

FIRST = ["iteration", "time", "loss", "lr"]
LAST = ["images/s"]
Row = dict[str, str]


def read_rows(path: str) -> tuple[list[str], list[Row]]:
    """Columns and complete rows of a metrics file; none of either if it does not exist or is something else."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            header, *rows = csv.reader(file)
    except (OSError, ValueError, csv.Error):
        return [], []
    if header[: len(FIRST)] != FIRST or header[-1:] != LAST:
        return [], []
    return header, [dict(zip(header, row, strict=True)) for row in rows if len(row) == len(header) and row[0].isdigit()]


class Metrics(Reporter):
    """Writes the metrics file of a run, row by row, and at the end its curve.

    A run that starts at iteration K > 0 goes on in the file of the earlier part; rows from K on are written anew.
    Disk trouble costs the file, not the run.
    """

    def __init__(self, prefix: str) -> None:
        self.path = f"{prefix}_metrics.csv"
        self.curve_path = f"{prefix}_curve.png"
        self._columns = FIRST + LAST
        self._row: Row = {}  # of the iteration at hand, not written yet
        self._file: TextIO | None = None
        self._started = False
        self._failed = False
        self._start = time.monotonic()
        self._speed = Speed()

    def solving(self, net_name: str, lr_policy: str) -> None:
        """Time begins."""
        self._start = time.monotonic()
        self._speed.read()

    def test_started(self, iteration: int, k: int) -> None:
        """The time of a test is not training time."""
        self._speed.pause()
        self._begin_row(iteration)

    def test_done(self, iteration: int, k: int, outputs: Sequence[Output], loss: float | None) -> None:
        """Take the outputs into the row."""
        self._speed.resume()
        self._begin_row(iteration)
        self._row.update(_columns_of(k, outputs))

    def displayed(
        self,
        iteration: int,
        loss: float,
        outputs: Sequence[Output],
        iterations_per_s: float,
        seconds: float,
        display: int,
    ) -> None:
        """Take the loss into the row."""
        self._begin_row(iteration)
        self._row["loss"] = number(loss)

    def lr(self, iteration: int, rate: float) -> None:
        """Take the rate into the row."""
        self._row["lr"] = number(rate)

    def iterated(self, iteration: int, loss: float | None, rate: float, images: int) -> None:
        """Write the row, if this iteration has one."""
        self._speed.add(images)
        if self._row:
            known = {} if loss is None else {"loss": number(loss)}
            self._row = {**known, "lr": number(rate), **self._row}
            self._write_row()

    def finished(self, iteration: int, loss: float | None) -> None:
        """Take the loss of the last forward pass into the row."""
        if loss is not None:
            self._begin_row(iteration)
            self._row["loss"] = number(loss)

    def done(self, stopped_early: bool) -> None:
        """Write the last row."""
        self._write_row()

    def close(self, complete: bool = True) -> None:
        """Write what is left and draw the curve."""
        self._write_row()
        if self._file is not None:
            self._file.close()
            log.info("Metrics are in %s", self.path)
            if complete:
                curve.draw(*read_rows(self.path), self.curve_path)

    def _begin_row(self, iteration: int) -> None:
        if not self._started:
            self._started = True
            self._continue_from(iteration)
        if self._row and self._row["iteration"] != str(iteration):
            self._write_row()
        self._row["iteration"] = str(iteration)

    def _continue_from(self, iteration: int) -> None:
        columns, rows = read_rows(self.path) if iteration > 0 else ([], [])
        rows = [row for row in rows if int(row["iteration"]) < iteration]
        if rows:
            self._columns = columns
            self._start -= float(rows[-1]["time"] or 0)
        self._rewrite(rows)

    def _write_row(self) -> None:
        row, self._row = self._row, {}
        if row.keys() <= {"iteration"} or self._failed:  # nothing to tell, as of a test that was interrupted
            return
        images_per_s = self._speed.read()
        row |= {
            "time": f"{time.monotonic() - self._start:.3f}",
            "images/s": "" if images_per_s is None else number(images_per_s),
        }
        new = [name for name in row if name not in self._columns]
        if new:
            self._columns = self._columns[:-1] + new + LAST
            self._rewrite([*read_rows(self.path)[1], row])
            return
        try:
            assert self._file is not None
            csv.writer(self._file).writerow(row.get(name, "") for name in self._columns)
            self._file.flush()
        except OSError as error:
            self._give_up(error)

    def _rewrite(self, rows: Sequence[Row]) -> None:
        try:
            if self._file is not None:
                self._file.close()
            with replacing(self.path) as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, self._columns, restval="")
                writer.writeheader()
                writer.writerows(rows)
            self._file = open(self.path, "a", newline="", encoding="utf-8")  # noqa: SIM115 (held for the run)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._failed = True
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None
        log.warning("cannot write %s (%s); the run goes on without it", self.path, error.strerror)


def _columns_of(k: int, outputs: Sequence[Output]) -> Iterator[tuple[str, str]]:
    for name, values, _ in outputs:
        scalars = values.reshape(-1)
        for i, value in enumerate(scalars):
            yield f"test{k or ''}_{name}{f'[{i}]' if len(scalars) > 1 else ''}", number(value)
