"""ServerReports: what the servers have seen, as worker 0 reports it at displays."""

from collections.abc import Callable
from concurrent.futures import Future

from caffepy.core.errors import CaffeError
from caffepy.core.events import Served
from caffepy.parallel.parameter_server.client import Client
from caffepy.parallel.parameter_server.filters import Filters
from caffepy.parallel.parameter_server.messages import Report

PATIENCE = 5.0
"""Seconds that the last report may take."""


class ServerReports:
    """The reports of the servers: they are asked at a display, and heard at the next iterations.

    late: pushes by which what this worker trains on is older than what it pulled last.
    show: gets what is to be shown.
    """

    def __init__(
        self, client: Client, filters: Filters, late: int, show: Callable[[Served], object]
    ) -> None:
        self._client, self._filters, self._late, self._show = client, filters, late, show
        self.last: Report | None = None
        self._asked: tuple[int, Future[Report]] | None = None  # at an iteration

    def iterated(self, iteration: int, waited: float, displays: bool) -> None:
        """Show an answer that has come; ask anew after an iteration that displays. `waited` is for
        how many seconds this worker did not train.
        """
        if self._asked and self._asked[1].done():
            self._tell(*self._asked, waited)
            self._asked = None
        if displays and not self._asked:
            self._asked = iteration, self._client.report()

    def end(self, iteration: int, waited: float) -> None:
        """Show the last one."""
        self._tell(iteration, self._client.report(), waited)

    def _tell(self, iteration: int, answer: "Future[Report]", waited: float) -> None:
        try:
            report = self.last = answer.result(PATIENCE)
        except (CaffeError, TimeoutError):
            return
        sent = self._filters.bytes_before + self._client.pulled.bytes_before
        on_wire = self._filters.bytes_after + self._client.pulled.bytes_after
        staleness = {n + self._late: count for n, count in report.staleness.items()}
        self._show(
            Served(iteration, report.clocks, staleness, sent, on_wire, waited, report.behind)
        )
