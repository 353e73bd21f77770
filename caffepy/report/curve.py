"""PREFIX_curve.png: a metrics file as a picture."""

import importlib.util
import logging
import os
from collections.abc import Mapping, Sequence

from caffepy.report import plot
from caffepy.report.series import of_metrics

log = logging.getLogger(__name__)


def draw(columns: Sequence[str], rows: Sequence[Mapping[str, str]], path: str) -> None:
    """Draw a metrics file, if it has at least two rows and matplotlib is installed (extra `plot`).

    An error is logged and leaves the old picture.
    """
    if len(rows) < 2:
        return
    if importlib.util.find_spec("matplotlib") is None:
        log.info("For a picture of the curve, pip install matplotlib")
        return
    try:
        plot.draw([of_metrics(os.path.basename(path), columns, rows)], path)
        log.info("Curve is in %s", path)
    except Exception as error:
        log.warning("no curve in %s: %s", path, error)
