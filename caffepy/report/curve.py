"""PREFIX_curve.png: the losses and the other test outputs of a metrics file over the iterations."""

import importlib.util
import logging
from collections.abc import Mapping, Sequence

from caffepy.files import replacing

log = logging.getLogger(__name__)


def draw(columns: Sequence[str], rows: Sequence[Mapping[str, str]], path: str) -> None:
    """Draw what a metrics file holds, if matplotlib is installed (extra `plot`) and there are two rows or more.

    Whatever goes wrong is logged and leaves the old picture.
    """
    if len(rows) < 2:
        return
    if importlib.util.find_spec("matplotlib") is None:
        log.info("For a picture of the curve, pip install matplotlib")
        return
    try:
        _draw(columns, rows, path)
        log.info("Curve is in %s", path)
    except Exception as error:
        log.warning("no curve in %s: %s", path, error)


def _draw(columns: Sequence[str], rows: Sequence[Mapping[str, str]], path: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    losses = figure.add_subplot(xlabel="iteration", ylabel="loss")
    losses.grid(alpha=0.3)
    left = ["loss", *(name for name in columns if name.startswith("test") and "loss" in name)]
    right = [name for name in columns if name.startswith("test") and "loss" not in name]
    others = losses.twinx() if right else losses
    if right:
        others.set_ylabel(right[0].partition("_")[2] if len(right) == 1 else "test outputs")
    lines = []
    for i, name in enumerate(left + right):
        points = [(int(row["iteration"]), float(row[name])) for row in rows if row[name]]
        if points:
            axes = others if name in right else losses
            marker = "." if name.startswith("test") else ""
            lines += axes.plot(*zip(*points, strict=True), color=f"C{i % 10}", marker=marker, label=name)
    losses.legend(handles=lines, loc="center right")
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
