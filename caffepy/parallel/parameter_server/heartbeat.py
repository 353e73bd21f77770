"""WorkerHeartbeat: a worker's signs of life, and what the coordinator answers to them."""

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

from caffepy.core.errors import CaffeError
from caffepy.parallel.parameter_server.leases import Lease
from caffepy.parallel.parameter_server.messages import COORDINATOR, DeadPeerError, Engine

BEAT = 0.5
"""Seconds between two signs of life of a worker."""


class WorkerHeartbeat:
    """A thread that tells the coordinator that a worker lives, and which batches it has leased,
    until `stop`; it hands in the worker's state where a snapshot wants it.

    `ended` is set when the run is at its end; `epoch` is of the coordinator's view at the last
    beat. `state` returns the state at this clock or later, None if the worker is not there yet.
    """

    def __init__(self, engine: Engine, worker: int, patience: float) -> None:
        self.ended = threading.Event()
        self.epoch = 0
        self.leases: Mapping[int, Lease] = {}  # the newest, by clock
        self.state: Callable[[int], object] = lambda clock: None
        self._engine, self._worker, self._patience = engine, worker, patience
        self._stopped = threading.Event()
        self._answered = 0  # the last request for the state

    def start(self, share: int) -> None:
        """Begin, for a worker that takes so many batches at a clock."""
        threading.Thread(target=self._beat, args=(share,), name="caffepy-beat", daemon=True).start()

    def stop(self) -> None:
        """Beat no more."""
        self._stopped.set()

    def _beat(self, share: int) -> None:
        while not self._stopped.wait(BEAT):
            try:
                beat = self._engine.call(COORDINATOR, "beat", self._worker, share, self.leases)
                ended, self.epoch, (request, clock) = beat.result(self._patience)
                if ended:
                    self.ended.set()
                if request not in (0, self._answered):
                    self._hand_in(request, clock)
            except (DeadPeerError, TimeoutError):
                continue

    def _hand_in(self, request: int, clock: int) -> None:
        """Hand in the state, if this worker is at the clock, beside the beats."""
        if (state := self.state(clock)) is None:
            return
        self._answered = request

        def hand_in() -> None:
            with suppress(CaffeError):
                self._engine.call(COORDINATOR, "hand_in", self._worker, request, state).result()

        threading.Thread(target=hand_in, name="caffepy-state", daemon=True).start()
