"""The visible side of a run: Caffe's log lines, progress bar, metrics, curve, TensorBoard."""

from collections.abc import Sequence

from caffepy.core.events import Reporter
from caffepy.report.glog import logging_to
from caffepy.report.metrics import Metrics
from caffepy.report.performance import Performance
from caffepy.report.progress import Progress, counting, wanted
from caffepy.report.reporter import LogReporter, Reporters
from caffepy.report.tensorboard import TensorBoard

__all__ = [
    "LogReporter",
    "Metrics",
    "Performance",
    "Progress",
    "Reporters",
    "TensorBoard",
    "counting",
    "logging_to",
    "open_report",
]


def open_report(
    prefix: str | None,
    iterations: int,
    progress: bool | None = None,
    others: Sequence[Reporter] = (),
    beside: bool = False,
) -> Reporters:
    """Return the reporter of a run that ends at `iterations`: Caffe's log lines, metrics, a
    progress bar.

    `prefix` None writes no metrics; `progress` None draws the bar if stderr is a capable terminal.
    `others` receive the same events. `beside`: a separate process may draw the curve.
    """
    reporters: list[Reporter] = [LogReporter(), *others]
    if prefix is not None:
        reporters.append(Metrics(prefix, iterations if beside else 0))
    if wanted(progress):
        reporters.append(Progress(iterations))
    return Reporters(*reporters)
