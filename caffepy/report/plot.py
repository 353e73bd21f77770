"""Pictures of runs: their curves over iterations or seconds, several runs beside one another."""

import importlib.util
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from caffepy.core.errors import UsageError
from caffepy.core.files import written
from caffepy.core.registry import nearest
from caffepy.report.series import PANELS, Curve, Run, panel_of

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


def format_of(path: str) -> str:
    """Return the format of a file name; UsageError if it is unknown or matplotlib is missing."""
    ext = path.rpartition(".")[2].lower()
    if ext not in FORMATS:
        known = ", ".join(f".{name}" for name in FORMATS)
        raise UsageError(f'the extension of "{path}" must tell the format: {known}')
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            "plots are drawn by matplotlib, which is not installed: pip install 'caffepy[plot]'"
        )
    return ext


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
    format_of(path)
    _check_times(runs, x)
    panels = list(_panels(runs, wanted))
    figure = _figure(len(panels))
    first = None
    for i, (panel, curves) in enumerate(panels):
        axes = figure.add_subplot(len(panels), 1, i + 1, sharex=first)
        first = first or axes
        for run, name, curve in curves:
            _line(
                axes,
                runs,
                run,
                name,
                curve,
                x,
                1 if panel == "lr" else smooth,
                [known for _, known, _ in curves],
            )
        axes.set_ylabel(
            panel if panel != "outputs" else _text(_one([name for _, name, _ in curves]))
        )
        if _is_logarithmic(panel, [curve for *_, curve in curves], log_loss):
            axes.set_yscale("log")
        _finish(axes)
        axes.tick_params(labelbottom=i == len(panels) - 1)
    axes.set_xlabel(x)
    save(figure, path)


def draw_chart(runs: Sequence[Run], number: int, path: str) -> None:
    """Write the chart of this number of Caffe's plot_training_log; UsageError if a run lacks the
    curve.
    """
    format_of(path)
    what, x = CHARTS[number]
    _check_times(runs, x)
    figure = _figure(1)
    axes = figure.add_subplot(title=f"{what} vs. {AXES[x]}", xlabel=AXES[x], ylabel=what)
    for run in runs:
        _line(axes, runs, run, what, _of_chart(run, what), x, 1, [what])
    _finish(axes)
    save(figure, path)


def _check_times(runs: Sequence[Run], x: str) -> None:
    for run in runs:
        if x == "seconds" and not any(
            map(math.isfinite, (s for curve in run.curves.values() for s in curve.seconds))
        ):
            raise UsageError(
                f"{run.name} has no times: its lines do not begin as glog's; draw it over "
                f"iterations"
            )


def _of_chart(run: Run, what: str) -> Curve:
    tested = [name for name in run.curves if name.startswith("test")]
    names = {
        "Test accuracy": sorted(
            (name for name in tested if "loss" not in name), key=lambda name: "acc" not in name
        ),
        "Test loss": [name for name in tested if "loss" in name],
        "Train learning rate": ["lr"],
        "Train loss": ["loss"],
    }[what]
    curve = next((run.curves[name] for name in names if name in run.curves), None)
    if curve is None:
        raise UsageError(f"{run.name} has no curve for {what!r} (curves: {', '.join(run.curves)})")
    return curve


def _panels(
    runs: Sequence[Run], wanted: Sequence[str]
) -> Iterator[tuple[str, list[tuple[Run, str, Curve]]]]:
    """Return the panels that have curves, with the run and the name of each curve."""
    names = list(dict.fromkeys(name for run in runs for name in run.curves))
    known = [*dict.fromkeys([panel_of(name) for name in names] + names)]
    for name in wanted:
        if name not in known:
            raise UsageError(
                f'no run has curves of "{name}"{nearest(name, known)} (there are: '
                f"{', '.join(known)})"
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
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5 if panels == 1 else 1 + 2.6 * panels), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _line(
    axes: Any,
    runs: Sequence[Run],
    run: Run,
    name: str,
    curve: Curve,
    x: str,
    smooth: int,
    names: Sequence[str],
) -> None:
    """Draw a curve; colours are for runs if there are several, else for curves.

    Values that are not finite are crosses at the bottom.
    """
    index = list(dict.fromkeys(names)).index(name)
    several = len(runs) > 1
    place = next(i for i, other in enumerate(runs) if other is run)
    colour = f"C{(place if several else index) % 10}"
    label = _text(
        name if not several else run.name if len(set(names)) == 1 else f"{run.name}: {name}"
    )
    at = np.array(curve.iterations if x == "iterations" else curve.seconds, float)
    values = np.array(curve.values, float)
    good = np.isfinite(values)
    values[~good] = math.nan
    style = {"color": colour, "linewidth": 1.2}
    if smooth > 1:
        axes.plot(at, values, **style, alpha=0.25)
    elif len(values) < MARKED:
        style["marker"] = "."
    axes.plot(
        at,
        smoothed(values, smooth),
        **style,
        linestyle=DASHES[index % 4] if several else "-",
        label=label,
    )
    if not good.all():
        below = np.full((~good).sum(), 0.03)
        axes.plot(
            at[~good],
            below,
            "x",
            color=colour,
            transform=axes.get_xaxis_transform(),
            label=f"{label}: not finite",
        )


def smoothed(values: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    """Return the mean of the `count` values up to each, without NaN; NaN where the value itself is
    NaN.
    """
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


def _is_logarithmic(panel: str, curves: Sequence[Curve], log_loss: bool) -> bool:
    values = [value for curve in curves for value in curve.values if math.isfinite(value)]
    if panel == "loss":
        return log_loss and max(values, default=0.0) > 0
    return panel == "lr" and min(values, default=0.0) > 0 and max(values) > SPREAD * min(values)


def _one(names: Sequence[str]) -> str:
    """Return the label of an axis of outputs: the name of the output, if there is only one."""
    outputs = {name.partition(" ")[2] for name in names}
    return outputs.pop() if len(outputs) == 1 else "outputs"


def _text(label: str) -> str:
    """Return a label that matplotlib shows as it is, neither as a formula nor hidden."""
    shown = label.encode(errors="surrogateescape").decode(errors="replace").replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def _finish(axes: Any) -> None:
    axes.grid(alpha=0.3)
    if [label for label in axes.get_legend_handles_labels()[1] if label != axes.get_ylabel()]:
        points = sum(len(line.get_xdata()) for line in axes.get_lines())
        axes.legend(loc="best" if points < FEW else "upper right", fontsize="small")


def save(figure: "Figure", path: str) -> None:
    """Write the figure in the format of the file's extension; UsageError if that fails."""
    kind = format_of(path)
    with written(path) as temporary:
        figure.savefig(
            temporary, format=kind, dpi=120, metadata={"Date": None} if kind == "svg" else None
        )
