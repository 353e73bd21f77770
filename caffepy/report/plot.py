"""Pictures of runs: their curves over iterations or seconds, several runs beside one another."""

import importlib.util
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from caffepy.core.errors import UsageError, install
from caffepy.core.files import written
from caffepy.core.names import listed, nearest
from caffepy.report.series import PANELS, Curve, Run, panel_of
from caffepy.report.text import extension_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf")
AXES = {"iterations": "Iters", "seconds": "Seconds"}
CHARTS = [
    (what, x)
    for what in ("Test accuracy", "Test loss", "Train learning rate", "Train loss")
    for x in AXES
]
"""Charts of Caffe's plot_training_log, by number."""

DASHES = ("-", "--", ":", "-.")
MARKED = 100
"""Curves of fewer points have a marker at each."""

FEW = 5000
"""Most points of a panel that are considered in placing its legend."""

SPREAD = 20.0
"""A learning rate that changes by more than this factor has a logarithmic axis."""

Shown = tuple[Run, str, Curve]
"""A curve with its run and its name."""


def format_of(path: str) -> str:
    """Return the format of a file name; UsageError if it is unknown or matplotlib is missing."""
    kind = extension_of(path, FORMATS)
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            f"plots are drawn by matplotlib, which is not installed: {install('plot')}"
        )
    return kind


def draw(
    runs: Sequence[Run],
    path: str,
    *,
    x: str = "iterations",
    wanted: Sequence[str] = (),
    smooth: int = 1,
    log_loss: bool = False,
) -> None:
    """Write a picture with a panel for each kind of curve, in the format of the file's extension.

    `x` is "iterations" or "seconds". `wanted` names panels or curves, all if empty. With `smooth` a
    curve is the mean of that many values up to each point, and the values are pale. `log_loss`
    makes the axis of losses logarithmic. UsageError says what cannot be drawn.
    """
    _check(runs, path, x)
    panels = list(_panels(runs, wanted))
    figure = _figure(len(panels))
    first = None
    for i, (panel, curves) in enumerate(panels):
        axes = figure.add_subplot(len(panels), 1, i + 1, sharex=first)
        first = first or axes
        outputs = {name.partition(" ")[2] for _, name, _ in curves}
        one_output = panel == "outputs" and len(outputs) == 1
        axes.set_ylabel(_text(outputs.pop()) if one_output else panel)
        _draw_curves(axes, runs, curves, x, smooth=1 if panel == "lr" else smooth)
        values = [value for *_, curve in curves for value in curve.values if math.isfinite(value)]
        low, high = min(values, default=0.0), max(values, default=0.0)
        rate_falls = panel == "lr" and low > 0 and high > SPREAD * low
        if rate_falls or (panel == "loss" and log_loss and high > 0):
            axes.set_yscale("log")
        axes.tick_params(labelbottom=i == len(panels) - 1)
    axes.set_xlabel(x)
    save(figure, path)


def draw_chart(runs: Sequence[Run], number: int, path: str) -> None:
    """Write a chart of Caffe's plot_training_log; UsageError if a run lacks its curve."""
    what, x = CHARTS[number]
    _check(runs, path, x)
    curves: list[Shown] = []
    for run in runs:
        tested = [name for name in run.curves if name.startswith("test")]
        outputs = [name for name in tested if "loss" not in name]
        candidates = {
            "Test accuracy": sorted(outputs, key=lambda name: "acc" not in name),
            "Test loss": [name for name in tested if "loss" in name],
            "Train learning rate": ["lr"],
            "Train loss": ["loss"],
        }[what]
        curve = next((run.curves[name] for name in candidates if name in run.curves), None)
        if curve is None:
            known = ", ".join(run.curves)
            raise UsageError(f"{run.name} has no curve for {what!r} (curves: {known})")
        curves.append((run, what, curve))
    figure = _figure(1)
    axes = figure.add_subplot(title=f"{what} vs. {AXES[x]}", xlabel=AXES[x], ylabel=what)
    _draw_curves(axes, runs, curves, x)
    save(figure, path)


def _check(runs: Sequence[Run], path: str, x: str) -> None:
    format_of(path)
    for run in runs:
        seconds = (s for curve in run.curves.values() for s in curve.seconds)
        if x == "seconds" and not any(map(math.isfinite, seconds)):
            raise UsageError(
                f"{run.name} has no times: its lines do not begin as glog's; draw it over "
                f"iterations"
            )


def _panels(runs: Sequence[Run], wanted: Sequence[str]) -> Iterator[tuple[str, list[Shown]]]:
    names = list(dict.fromkeys(name for run in runs for name in run.curves))
    known = [*dict.fromkeys([panel_of(name) for name in names] + names)]
    for name in wanted:
        if name not in known:
            raise UsageError(
                f'no run has curves of "{name}"{nearest(name, known)} (there are: '
                f"{listed(known, name)})"
            )
    for panel in PANELS:
        curves = [
            (run, name, run.curves[name])
            for run in runs
            for name in names
            if name in run.curves
            and panel_of(name) == panel
            and (not wanted or {name, panel} & set(wanted))
            if name in wanted or not _is_the_loss(run, name)
        ]
        if curves:
            yield panel, curves


def _is_the_loss(run: Run, name: str) -> bool:
    """True if an output of the train net repeats the loss: it is not smoothed, and the only one."""
    loss = run.curves.get("loss")
    if not (loss and name.startswith("train ")):
        return False
    values = dict(zip(loss.iterations, loss.values, strict=True))
    curve = run.curves[name]
    pairs = zip(curve.iterations, curve.values, strict=True)
    return all(math.isclose(values.get(i, math.inf), value, rel_tol=1e-4) for i, value in pairs)


def _figure(panels: int) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(9, 5 if panels == 1 else 1 + 2.6 * panels), layout="constrained")


def _draw_curves(
    axes: Any, runs: Sequence[Run], curves: Sequence[Shown], x: str, smooth: int = 1
) -> None:
    """Draw the curves of a panel; colours are for runs if there are several, else for curves.

    Values that are not finite are crosses at the bottom.
    """
    names = list(dict.fromkeys(name for _, name, _ in curves))
    several = len(runs) > 1
    for run, name, curve in curves:
        index = names.index(name)
        place = next(i for i, other in enumerate(runs) if other is run)
        colour = f"C{(place if several else index) % 10}"
        label = name
        if several:
            label = run.name if len(names) == 1 else f"{run.name}: {name}"
        label = _text(label)
        at = np.array(curve.iterations if x == "iterations" else curve.seconds, float)
        values = np.array(curve.values, float)
        good = np.isfinite(values)
        values[~good] = math.nan
        style = {"color": colour, "linewidth": 1.2}
        if smooth > 1:
            axes.plot(at, values, **style, alpha=0.25)
        elif len(values) < MARKED:
            style["marker"] = "."
        dashes = DASHES[index % 4] if several else "-"
        axes.plot(at, smoothed(values, smooth), **style, linestyle=dashes, label=label)
        if not good.all():
            bottom = {"transform": axes.get_xaxis_transform(), "label": f"{label}: not finite"}
            axes.plot(at[~good], np.full((~good).sum(), 0.03), "x", color=colour, **bottom)
    axes.grid(alpha=0.3)
    if [label for label in axes.get_legend_handles_labels()[1] if label != axes.get_ylabel()]:
        points = sum(len(line.get_xdata()) for line in axes.get_lines())
        axes.legend(loc="best" if points < FEW else "upper right", fontsize="small")


def smoothed(values: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    """Return the mean of the `count` values up to each, without NaN; NaN where the value is NaN."""
    if count <= 1:
        return values
    known = np.isfinite(values)
    sums, counts = (
        np.concatenate([[0.0], np.cumsum(part)]) for part in (np.where(known, values, 0.0), known)
    )
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - count, 0)
    means = (sums[ends] - sums[starts]) / np.maximum(counts[ends] - counts[starts], 1)
    return np.where(known, means, math.nan)


def _text(label: str) -> str:
    """Return a label that matplotlib shows as it is, neither as a formula nor hidden."""
    shown = label.encode(errors="surrogateescape").decode(errors="replace").replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def save(figure: "Figure", path: str) -> None:
    """Write the figure in the format of the file's extension; UsageError if that fails."""
    kind = format_of(path)
    with written(path) as temporary:
        figure.savefig(
            temporary, format=kind, dpi=120, metadata={"Date": None} if kind == "svg" else None
        )
