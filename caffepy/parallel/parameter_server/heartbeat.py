"""WorkerHeartbeat: a worker's signs of life, and what the coordinator answers to them."""

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from math import ceil
from typing import Any

from caffepy.core.errors import CaffeError
from caffepy.parallel.parameter_server.leases import Lease
from caffepy.parallel.parameter_server.messages import COORDINATOR, DeadPeerError, Engine

log = logging.getLogger(__name__)

BEAT = 0.5
"""Seconds between two signs of life of a worker."""

SILENT = 10.0
"""Seconds after which the first worker has a coordinator that does not answer started again; twice
as many after each time: it may be slow.
"""


class WorkerHeartbeat:
    """A thread that reports to the coordinator that a worker lives and which batches it has leased,
    until `stop`; it hands in the worker's state where a snapshot wants it.

    `ended` is set when the run is at its end; `epoch` is of the coordinator's view at the last
    beat. `state` returns the state at this clock or later, None if the worker is not there yet.
    """

    def __init__(self, engine: Engine, worker: int) -> None:
        self.ended = threading.Event()
        self.epoch = 0
        self.leases: Mapping[int, Lease] = {}  # the newest, by clock
        self.state: Callable[[int], object] = lambda clock: None
        self._engine, self._worker = engine, worker
        self._stopped = threading.Event()
        self._answered = 0  # the last request for the state

    def start(self, share: int) -> None:
        """Begin, for a worker that takes `share` batches at a clock."""
        threading.Thread(target=self._beat, args=(share,), name="caffepy-beat", daemon=True).start()

    def stop(self) -> None:
        """Beat no more."""
        self._stopped.set()

    def _beat(self, share: int) -> None:
        patience = SILENT
        while not self._stopped.wait(BEAT):
            try:
                beat = self._engine.call(COORDINATOR, "beat", self._worker, share, self.leases)
                ended, self.epoch, (request, clock) = _answer(beat, patience)
                if ended:
                    self.ended.set()
                if request not in (0, self._answered):
                    self._hand_in(request, clock)
            except DeadPeerError:
                continue
            except TimeoutError:
                if self._worker == 0:
                    log.warning("The coordinator has not answered for %g s: it is ended", patience)
                    self._engine.kill(COORDINATOR, starts_again=True)
                    patience *= 2

    def _hand_in(self, request: int, clock: int) -> None:
        """Hand in the state, if this worker is at the clock, beside the beats."""
        if (state := self.state(clock)) is None:
            return
        self._answered = request

        def hand_in() -> None:
            with suppress(CaffeError):
                self._engine.call(COORDINATOR, "hand_in", self._worker, request, state).result()

        threading.Thread(target=hand_in, name="caffepy-state", daemon=True).start()


def _answer(beat: "Future[Any]", patience: float) -> Any:
    """Return the answer, or raise TimeoutError; a pause of this process hardly counts."""
    for _ in range(ceil(patience / BEAT)):
        if wait([beat], BEAT).done:
            break
    return beat.result(0)
