"""Watchdog: finds ranks that hang, and makes sure that the root ends when the run has failed.

Only faults need it. A failure is heard of in three ways: a rank raises (`RankGroup.abort`), a rank
waits for another longer than the deadline of the phase, or, on GPUs, nothing makes progress for
that long although no thread waits for another rank (both `RankGroup.abort_hung`). Then

    all threads     their waits end, and they raise
    "caffepy watch" waits PATIENCE for the root to know, unless the root itself has failed
                    raises the error in the main thread, by a signal
                    waits LAST_PATIENCE
                    writes the snapshot that is due in the root's place, and calls `last_resort`,
                    which ends the process
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence

from caffepy.collectives.rank_group import RankGroup
from caffepy.collectives.rank_names import named
from caffepy.device.device import Device
from caffepy.solver import Signals

log = logging.getLogger(__name__)

PATIENCE = 5.0
"""Seconds that a thread has to end what it does."""

LAST_PATIENCE = 3.0
"""Seconds that the root has to end after the signal."""

POLL = 1.0
"""Seconds between checks for progress."""

SETTLING = 2.0
"""Seconds that GPUs have to end kernels that wait for other ranks, once they are told to."""

Rescue = Callable[[BaseException], object]


class Watchdog:
    """Watches the ranks of a group, each on its device; `busy` are the ranks whose threads work.

    `signals` reach the root where it hangs. If they do not, `rescue` saves what can be saved and
    `last_resort` ends the process; both get the error.
    """

    def __init__(
        self,
        group: RankGroup,
        devices: Sequence[Device],
        busy: Callable[[], list[int]],
        signals: Signals | None = None,
        rescue: Rescue | None = None,
        last_resort: Rescue | None = None,
    ) -> None:
        self.group = group
        self.stopped = threading.Event()
        self._devices, self._busy = devices, busy
        self._signals, self._rescue, self._last_resort = signals, rescue, last_resort
        if signals:
            group.interrupted = signals.check
        group.hung_ranks = self._hung_ranks
        group.on_abort(self._on_abort)

    def start(self, progress: Callable[[], object]) -> None:
        """Abort when `progress()` stays the same for longer than the deadline, until `stop`.

        For GPUs, which can hang while no thread waits for another.
        """

        def watch() -> None:
            known: object = None
            waited = 0.0  # in polls, not by the clock: a process that was stopped has not hung
            while not (self.group.stopped or self.stopped.wait(POLL)):
                now = progress()
                still = now == known and not self.group.root_is_away  # whose wait has an end
                known, waited = now, waited + POLL if still else 0.0
                seconds = self.group.deadlines[self.group.phase]
                if waited > seconds + POLL:  # a thread that waits for a rank names it first
                    self.group.abort_hung([0], seconds)

        threading.Thread(target=watch, name="caffepy guard", daemon=True).start()

    def stop(self) -> None:
        """End the checks for progress."""
        self.stopped.set()

    def is_idle(self, rank: int, until: float) -> bool:
        """True if the rank's device is idle, or becomes so before `until`."""
        while not self._devices[rank].idle:
            if time.monotonic() > until:
                return False
            time.sleep(POLL / 100)
        return True

    def _hung_ranks(self, missing: list[int]) -> list[int]:
        """Return the ranks that work although nothing waits for other ranks any more: whose GPUs
        do, or else whose threads do; if there are none, those that are missing.
        """
        until = time.monotonic() + SETTLING
        while True:
            on_device = [rank for rank, device in enumerate(self._devices) if not device.idle]
            hung = on_device or self._busy()
            if not hung or time.monotonic() >= until:
                return hung or missing
            time.sleep(POLL / 10)

    def _on_abort(self) -> None:
        threading.Thread(target=self._end_root, name="caffepy watch", daemon=True).start()

    def _end_root(self) -> None:
        """Make sure that the root ends, also where it does not wait for other ranks."""
        failure = self.group.wait_failure()
        assert failure
        rank, error = failure
        if self.group.root_informed.wait(PATIENCE if rank else 0):
            return
        if self._signals and isinstance(error, Exception):
            self._signals.fail(named(self.group.world, rank, error), self.group.root_informed.set)
        if not self.group.root_informed.wait(LAST_PATIENCE) and self._last_resort:
            if self._rescue:
                saving = threading.Thread(
                    target=self._rescue, args=(error,), name="caffepy rescue", daemon=True
                )
                saving.start()
                saving.join(PATIENCE)
                if saving.is_alive():
                    log.error("No snapshot: the state of the last iteration cannot be reached")
            self._last_resort(named(self.group.world, rank, error))
