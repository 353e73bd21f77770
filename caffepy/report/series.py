"""The curves of runs, from training logs or metrics files.

A curve is named after what it shows: `loss` (smoothed), `lr`, `iter/s`, `images/s`, `train NAME`
and `test NAME` for the outputs of the nets, `test1 NAME` for those of the second test net,
`NAME[i]` if an output has several values.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from caffepy.report.text import as_json as to_json

PANELS = ("loss", "outputs", "lr", "images/s", "iter/s")
"""The kinds of curves."""

TESTED = re.compile(r"test(\d*)_")


@dataclass
class Curve:
    """Values at iterations and at seconds of the run; seconds are NaN if they are unknown."""

    iterations: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


@dataclass
class Run:
    """The curves of a run, by name."""

    name: str
    curves: dict[str, Curve] = field(default_factory=dict)

    def add(self, name: str, iteration: int, seconds: float, value: float) -> None:
        """Append a value to a curve."""
        curve = self.curves.setdefault(name, Curve())
        curve.iterations.append(iteration)
        curve.seconds.append(seconds)
        curve.values.append(value)


def as_json(runs: Sequence[Run]) -> str:
    """Return a list with an object for each run; values that are not finite are null."""
    described = []
    for run in runs:
        curves = {
            name: {"iteration": curve.iterations, "seconds": curve.seconds, "value": curve.values}
            for name, curve in run.curves.items()
        }
        described.append({"name": run.name, "curves": curves})
    return to_json(described)


def panel_of(name: str) -> str:
    """Return the kind of a curve."""
    if name in PANELS:
        return name
    return "loss" if "loss" in name else "outputs"


def of_metrics(name: str, columns: Sequence[str], rows: Sequence[Mapping[str, str]]) -> Run:
    """Return the run that a metrics file describes."""
    run = Run(name)
    for column in columns:
        if column not in ("iteration", "time"):
            curve = TESTED.sub(r"test\1 ", column, count=1)
            for row in rows:
                if cell := row[column]:
                    seconds = float(row["time"] or "nan")
                    run.add(curve, int(row["iteration"]), seconds, float(cell))
    return run


def joined(name: str, parts: Sequence[Run]) -> Run:
    """Join parts of a run, each resumed from a snapshot of the one before.

    Repeated iterations count once; the seconds continue from the iteration at which a part began.
    """
    whole = Run(name)
    for part in parts:
        first = min((curve.iterations[0] for curve in part.curves.values()), default=math.inf)
        passed = 0.0
        for known, curve in list(whole.curves.items()):
            keep = sum(iteration < first for iteration in curve.iterations)
            for column in (curve.iterations, curve.seconds, curve.values):
                del column[keep:]
            passed = max([passed, *curve.seconds[-1:]])
            if not keep:
                del whole.curves[known]
        for known, curve in part.curves.items():
            for i, iteration in enumerate(curve.iterations):
                whole.add(known, iteration, passed + curve.seconds[i], curve.values[i])
    return whole
