"""PREFIX_metrics.csv, one row for each displayed or tested iteration, and PREFIX_curve.png.

Columns: `iteration`; `time`, seconds of the run, with the earlier parts of a resumed one; `loss`,
smoothed as shown; `lr`; a column for each scalar that a test net gives, `test_NAME` (`test1_NAME`
for the second test net and so on, `NAME[i]` where an output has several scalars); `images/s` of
training since the row before, tests not counted. What is unknown is empty.
"""

import csv
import importlib.util
import logging
import os
import shlex
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TextIO

from caffepy.core.files import replacing, working_directory
from caffepy.device.threads import cores
from caffepy.report import plot
from caffepy.report.beside import AHEAD, CurveProcess
from caffepy.report.display_record import DisplayCollector, DisplayRecord, elements
from caffepy.report.series import of_metrics
from caffepy.report.text import number

log = logging.getLogger(__name__)

FIRST = ["iteration", "time", "loss", "lr"]
LAST = ["images/s"]
Row = dict[str, str]


def read_rows(path: str) -> tuple[list[str], list[Row]]:
    """Return the columns and complete rows of a metrics file; none if it is missing or another one.

    Cells are numbers or empty.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            return rows_in(file)
    except (OSError, ValueError):
        return [], []


def rows_in(lines: Iterable[str]) -> tuple[list[str], list[Row]]:
    """Return columns and rows of lines, as `read_rows` does."""
    try:
        header, *rows = csv.reader(lines)
    except (ValueError, csv.Error):
        return [], []
    if header[: len(FIRST)] != FIRST or header[-1:] != LAST:
        return [], []
    whole = (row for row in rows if len(row) == len(header) and _has_numbers(row))
    return header, [dict(zip(header, row, strict=True)) for row in whole]


def _has_numbers(row: Sequence[str]) -> bool:
    try:
        numbers = [int(row[0]), *(float(cell) for cell in row[1:] if cell)]
    except ValueError:  # damaged, or by another hand
        return False
    return 0 <= numbers[0] < 1 << 63


def draw_rows(columns: Sequence[str], rows: Sequence[Row], path: str) -> None:
    """Draw the rows of a metrics file."""
    plot.draw([of_metrics(os.path.basename(path), columns, rows)], path)


def draw_curve(
    metrics: str, path: str, folder: str = "", beside: CurveProcess | None = None
) -> None:
    """Draw a metrics file, if it has at least two rows and matplotlib is installed (extra `plot`),
    by a process that waits `beside` this one, if there is one.

    Both paths are relative to `folder`. An error is logged and leaves the old picture.
    """
    whole, picture = os.path.join(folder, metrics), os.path.join(folder, path)
    columns, rows = read_rows(whole)
    if len(rows) < 2:
        return
    if importlib.util.find_spec("matplotlib") is None:
        log.info("For a picture of the curve, pip install matplotlib")
        return
    problem = beside.draw(whole, picture) if beside else None
    try:
        if problem is None:
            draw_rows(columns, rows, picture)
    except Exception as error:
        problem = str(error)
    if problem:
        log.warning("no curve in %s: %s", path, problem)
    else:
        log.info("Curve is in %s", path)


class Metrics(DisplayCollector):
    """Writes the metrics file of a run, row by row, and its curve once all iterations are done.

    A run that a signal or an error ends must end at once: matplotlib takes seconds, so that the log
    says how to draw the curve later. A run that starts at iteration K > 0 appends to the file of
    the earlier part, whose rows from K on are dropped. A disk error costs the file, not the run.

    If the end of the run is known to be at `iterations`, another process loads matplotlib beside
    its last seconds, and draws.
    """

    def __init__(self, prefix: str, iterations: int = 0) -> None:
        super().__init__()
        self._iterations = iterations
        self._since: tuple[int, float] | None = None  # iteration and time of the first one
        self._beside: CurveProcess | None = None
        self.path = f"{prefix}_metrics.csv"
        self.curve_path = f"{prefix}_curve.png"
        self._folder = working_directory()  # that names are relative to, wherever layers change to
        self._absolute = os.path.join(self._folder, self.path)
        self._columns = FIRST + LAST
        self._file: TextIO | None = None  # None after a disk error
        self._start = time.monotonic()
        self._complete = False  # all iterations are done

    def solving(self, net_name: str, lr_policy: str) -> None:
        super().solving(net_name, lr_policy)
        self._start = time.monotonic()

    def begin(self, iteration: int) -> None:
        """Append to the file of the earlier part, or create one."""
        columns, rows = read_rows(self._absolute) if iteration > 0 else ([], [])
        rows = [row for row in rows if int(row["iteration"]) < iteration]
        if rows:
            self._columns = columns
            self._start -= float(rows[-1]["time"] or 0)
        self._rewrite(rows)

    def show(self, record: DisplayRecord) -> None:
        if self._file is None:
            return
        row = {"iteration": str(record.iteration), "time": f"{time.monotonic() - self._start:.3f}"}
        known = {"loss": record.loss, "lr": record.lr, "images/s": record.images_per_s}
        row |= {name: "" if value is None else number(value) for name, value in known.items()}
        for k, outputs in record.tests.items():
            row |= {f"test{k or ''}_{name}": number(value) for name, value in elements(outputs)}
        new = [name for name in row if name not in self._columns]
        if new:
            self._columns = self._columns[:-1] + new + LAST
            self._rewrite([*read_rows(self._absolute)[1], row])
            return
        try:
            csv.writer(self._file).writerow(row.get(name, "") for name in self._columns)
            self._file.flush()
        except OSError as error:
            self._stop_writing(error)

    def iterated(self, iteration: int, loss: float | None, rate: float, images: int) -> None:
        super().iterated(iteration, loss, rate, images)
        if self._iterations:
            self._look_ahead(iteration, time.monotonic())

    def _look_ahead(self, iteration: int, now: float) -> None:
        """Start the process that draws if the run is expected to end soon."""
        first, since = self._since = self._since or (iteration, now)
        done, left = iteration - first, self._iterations - 1 - iteration
        if done > 0 and (now - since) * left < AHEAD * done:
            self._iterations = 0
            if cores() > 1 and importlib.util.find_spec("matplotlib"):
                with suppress(OSError):
                    self._beside = CurveProcess()

    def done(self, stopped_early: bool) -> None:
        super().done(stopped_early)
        self._complete = not stopped_early

    def close(self, complete: bool = True) -> None:
        """Write the last row; draw the curve of a complete run."""
        try:
            self._end(complete)
        finally:
            if self._beside:
                self._beside.close()

    def _end(self, complete: bool) -> None:
        self.show_pending()
        if self._file is None:
            return
        self._file.close()
        if complete and self._complete:
            log.info("Metrics are in %s", self.path)
            draw_curve(self.path, self.curve_path, self._folder, self._beside)
        else:
            command = shlex.join(["caffepy", "plot", self.path, "--output", self.curve_path])
            log.info("Metrics are in %s; to draw them: %s", self.path, command)

    def _rewrite(self, rows: Sequence[Row]) -> None:
        try:
            if self._file is not None:
                self._file.close()
            with (
                replacing(self._absolute) as temporary,
                open(temporary, "w", newline="", encoding="utf-8") as file,
            ):
                writer = csv.DictWriter(file, self._columns, restval="")
                writer.writeheader()
                writer.writerows(rows)
            self._file = open(self._absolute, "a", newline="", encoding="utf-8")  # noqa: SIM115 (held for the run)
        except OSError as error:
            self._stop_writing(error)

    def _stop_writing(self, error: OSError) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()
        log.warning("cannot write %s (%s); the run continues without it", self.path, error.strerror)
