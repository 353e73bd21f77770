"""Caffe's log lines as its log parsers expect them, and several reporters as one."""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

from caffepy.core.events import Displayed, Output, Reporter, Served
from caffepy.report.text import number, scalars

log = logging.getLogger(__name__)

LISTED = 4
"""Staleness from which on its shares are shown as one."""


def _shares(times: Mapping[int, int]) -> str:
    """Return "0: 90 %, 1: 10 %" for how often each staleness came."""
    total, parts = sum(times.values()), dict[int, float]()
    for staleness, n in times.items():
        group = min(staleness, LISTED)
        parts[group] = parts.get(group, 0) + 100 * n / total
    words = {LISTED: f"{LISTED} or more"}
    texts = [f"{words.get(group, group)}: {part:.3g} %" for group, part in sorted(parts.items())]
    return ", ".join(texts) or "none"


class LogReporter(Reporter):
    """Logs each event with the text and in the order of Caffe's solver."""

    def solving(self, net_name: str, lr_policy: str) -> None:
        """Log the net's name and the policy; parsers take the time of this line as the start."""
        log.info("Solving %s", net_name)
        log.info("Learning Rate Policy: %s", lr_policy)

    def test_started(self, iteration: int, k: int) -> None:
        log.info("Iteration %d, Testing net (#%d)", iteration, k)

    def test_done(
        self, iteration: int, k: int, outputs: Sequence[Output], loss: float | None
    ) -> None:
        if loss is not None:
            log.info("Test loss: %s", number(loss))
        for i, text in enumerate(scalars(outputs)):
            log.info("    Test net output #%d: %s", i, text)

    def displayed(self, shown: Displayed) -> None:
        speed = f"{number(shown.iterations_per_s)} iter/s"
        speed += f", {number(shown.seconds)}s/{shown.display} iters"
        log.info("Iteration %d (%s), loss = %s", shown.iteration, speed, number(shown.loss))
        for i, text in enumerate(scalars(shown.outputs)):
            log.info("    Train net output #%d: %s", i, text)

    def lr(self, iteration: int, rate: float) -> None:
        log.info("Iteration %d, lr = %s", iteration, number(rate))

    def served(self, counts: Served) -> None:
        pushes = ", ".join(f"{worker}: {n}" for worker, n in sorted(counts.pushes.items()))
        log.info("Pushes by worker: %s", pushes)
        log.info(
            "Staleness: %s; sent %.1f MB as %.1f MB; waited %.1f s; replicas %d pushes behind",
            *(_shares(counts.staleness), counts.sent / 1e6, counts.on_wire / 1e6, counts.waited),
            counts.behind,
        )

    def snapshotted(self, kind: str, path: str) -> None:
        log.info("Snapshotting %s file %s", kind, path)

    def finished(self, iteration: int, loss: float | None) -> None:
        if loss is not None:
            log.info("Iteration %d, loss = %s", iteration, number(loss))

    def done(self, stopped_early: bool) -> None:
        log.info("Optimization stopped early." if stopped_early else "Optimization Done.")


class Reporters(Reporter):
    """Passes each event on to several reporters, in their order."""

    def __init__(self, *reporters: Reporter) -> None:
        self.reporters = reporters

    @property
    def takes_several(self) -> bool:
        return all(reporter.takes_several for reporter in self.reporters)


def _passed_on(event: Callable[..., None]) -> Callable[..., None]:
    @wraps(event)
    def pass_on(self: Reporters, *arguments: Any, **named: Any) -> None:
        for reporter in self.reporters:
            getattr(reporter, event.__name__)(*arguments, **named)

    return pass_on


for _name, _event in vars(Reporter).items():
    if callable(_event) and not _name.startswith("_"):
        setattr(Reporters, _name, _passed_on(_event))
