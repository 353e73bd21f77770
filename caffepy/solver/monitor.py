"""Monitor: a thread beside the main one, which may hang, during a run of `caffepy train`.

It gets each signal as it comes, through Python's wakeup file, also where the main thread is in code
that does not return. What it does if the main thread does not do it by itself:

    first request to stop   `grace` seconds later, unless the stop is under way by then or a
                            snapshot is being written: raises StopError in the main thread, which
                            saves the last complete iteration; after LAST_PATIENCE, saves it here,
                            and ends the process
    second request          ends the process LAST_PATIENCE later
"""

import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from caffepy.core.errors import INTERRUPTED, STOPPED
from caffepy.core.events import asked_to_end
from caffepy.solver.faults import rescue
from caffepy.solver.signals import Action, Requests, Signals, StopError
from caffepy.solver.solver import Solver

log = logging.getLogger(__name__)

GRACE = 25.0
"""Seconds from a request to stop to the snapshot: most job systems kill 30 s after SIGTERM."""

LAST_PATIENCE = 3.0
"""Seconds that the main thread has to end once it is told to."""

POLL = 0.25


class Monitor:
    """A context for a run that `signals` stop, with its `solver` as soon as there is one.

    `last_resort` ends the process; without it the monitor only saves and raises. In a thread other
    than the main one the context does nothing.
    """

    def __init__(
        self,
        signals: Signals,
        grace: float = GRACE,
        last_resort: Callable[[BaseException], object] | None = None,
    ) -> None:
        self.solver: Solver | None = None
        self.exit_code = INTERRUPTED  # of a process that is ended here
        self._signals, self._grace = signals, grace
        self._last_resort = last_resort or (lambda error: None)
        self._requests = Requests()
        self._saves = False  # a signal asked for a snapshot
        self._answered = threading.Event()  # the main thread has got the StopError
        self._told: float | None = None  # when it was raised there
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Monitor":
        if os.name == "posix" and threading.current_thread() is threading.main_thread():
            self._read, self._write = os.pipe()
            os.set_blocking(self._read, False)
            os.set_blocking(self._write, False)
            self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            self._thread = threading.Thread(target=self._run, name="caffepy monitor", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread:
            signal.set_wakeup_fd(self._before)
            self._ended.set()
            os.write(self._write, b"\0")
            self._thread.join()
            os.close(self._read)
            os.close(self._write)

    def _run(self) -> None:
        while not self._ended.is_set():
            select.select([self._read], [], [], POLL)
            with suppress(BlockingIOError):
                for number in os.read(self._read, 1024):
                    self._count(number)
            self._look(time.monotonic())

    def _count(self, number: int) -> None:
        action = self._signals.effects.get(number, Action.NONE)
        starts = number in self._signals.effects and not self._signals.listening
        if self._told is None and (Action.STOP in action or starts):
            asked_to_end.set()
            self._saves |= Action.SNAPSHOT in action
        if Action.STOP in action or starts:
            self._requests.add(number)

    def _look(self, now: float) -> None:
        first, second = self._requests.first, self._requests.second
        if not self._signals.listening:
            second = first
        if second is not None:
            if now > second + LAST_PATIENCE:
                what = "a signal ended the run"
                self._last_resort(StopError(what, exit_code=self.exit_code))
        elif first is None or self._signals.ended or self._answered.is_set():
            return
        elif self._told is not None:
            if now > self._told + LAST_PATIENCE:
                self._answered.set()
                threading.Thread(target=self._rescue, name="caffepy rescue", daemon=True).start()
        elif not self._signals.polled and now > first + self._grace and not self._saving:
            self._told = now
            self._signals.fail(self._error(), self._answered.set)

    @property
    def _saving(self) -> bool:
        return self.solver is not None and self.solver.workers.phase == "snapshot"

    def _error(self) -> StopError:
        what = f"The run has not stopped {self._grace:g} s after a signal asked it to"
        return StopError(what, self._saves)

    def _rescue(self) -> None:
        """Save and end the process in place of the main thread."""
        error = self._error()
        if self.solver is not None:
            rescue(self.solver.resume_state, error)
            if self.solver.resume_state.saved_now:
                error.exit_code = STOPPED
        self._last_resort(error)
