"""The curves of runs: what a training log or a metrics file tells of each iteration that was shown.

A curve is named as what it shows: `loss` (smoothed), `lr`, `iter/s`, `images/s`, `train NAME` and
`test NAME` for the outputs of the nets, `test1 NAME` for those of the second test net, `NAME[i]`
where an output has several values.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from caffepy.report.text import as_json as to_json

PANELS = ("loss", "outputs", "lr", "images/s", "iter/s")
"""What a curve can be about."""

TESTED = re.compile(r"test(\d*)_")


@dataclass
class Curve:
    """Values at iterations, and after so many seconds of the run; NaN where the time is not known."""

    iterations: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, iteration: int, seconds: float, value: float) -> None:
        """Go on with a value."""
        self.iterations.append(iteration)
        self.seconds.append(seconds)
        self.values.append(value)


@dataclass
class Run:
    """The curves of a run, by name."""

    name: str
    curves: dict[str, Curve] = field(default_factory=dict)

    def add(self, name: str, iteration: int, seconds: float, value: float) -> None:
        """Go on with a curve."""
        self.curves.setdefault(name, Curve()).add(iteration, seconds, value)

    def json(self) -> dict[str, object]:
        """Name and curves."""
        return {
            "name": self.name,
            "curves": {
                name: {
                    "iteration": curve.iterations,
                    "seconds": curve.seconds,
                    "value": curve.values,
                }
                for name, curve in self.curves.items()
            },
        }


def as_json(runs: Sequence[Run]) -> str:
    """A list with an object for each run; what is not finite is null."""
    return to_json([run.json() for run in runs])


def panel_of(name: str) -> str:
    """What a curve is about."""
    if name in PANELS:
        return name
    return "loss" if "loss" in name else "outputs"


def of_metrics(name: str, columns: Sequence[str], rows: Sequence[Mapping[str, str]]) -> Run:
    """The run that a metrics file tells of."""
    run = Run(name)
    for column in columns:
        if column not in ("iteration", "time"):
            curve = TESTED.sub(r"test\1 ", column, count=1)
            for row in rows:
                if row[column]:
                    run.add(
                        curve,
                        int(row["iteration"]),
                        float(row["time"] or "nan"),
                        float(row[column]),
                    )
    return run


def joined(name: str, parts: Sequence[Run]) -> Run:
    """One run of parts of it, each of which goes on from a snapshot of the one before: what it did
    again counts.

    The seconds go on from the iteration where it began.
    """
    whole = Run(name)
    for part in parts:
        first = min((curve.iterations[0] for curve in part.curves.values()), default=math.inf)
        passed = 0.0
        for known, curve in list(whole.curves.items()):
            keep = sum(iteration < first for iteration in curve.iterations)
            kept = whole.curves[known] = Curve(
                curve.iterations[:keep], curve.seconds[:keep], curve.values[:keep]
            )
            passed = max([passed, *kept.seconds[-1:]])
            if not keep:
                del whole.curves[known]
        for known, curve in part.curves.items():
            for iteration, seconds, value in zip(
                curve.iterations, curve.seconds, curve.values, strict=True
            ):
                whole.add(known, iteration, passed + seconds, value)
    return whole
