"""Monitor: a thread that watches the main thread of `caffepy train`, which may hang.

It gets each signal at once through Python's wakeup file, even while the main thread is in code that
does not return. What it does if the main thread fails to:

    first request to stop   `grace` seconds later, unless the stop is under way by then or a
                            snapshot is being written: raises StopError in the main thread, which
                            saves the last complete iteration; after LAST_PATIENCE, saves it here,
                            and ends the process
    second request          ends the process LAST_PATIENCE later
    no progress for the     names the last layer that began, with the stacks of all threads. With
    deadline of the phase   `ends`, raises SyncError as above, else training goes on. Solvers that
                            train as one find that out by themselves, see `RankGroup`
    code keeps Python's     the same, by a loop that needs no lock (`ops/cpu/lock_watch.py`); with
    lock that long          `ends` it ends the process, and nothing is saved
"""

import faulthandler
import logging
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

import numpy as np

from caffepy.core import hangs
from caffepy.core.errors import INTERRUPTED, STOPPED, SyncError
from caffepy.core.events import asked_to_end
from caffepy.net import Net
from caffepy.proto.text import where
from caffepy.solver.faults import rescue
from caffepy.solver.signals import Action, Requests, Signals, StopError
from caffepy.solver.solver import Solver

log = logging.getLogger(__name__)

GRACE = 25.0
"""Seconds from a request to stop to the snapshot: most job systems kill 30 s after SIGTERM."""

LAST_PATIENCE = 3.0
"""Seconds that the main thread has to end after StopError or SyncError was raised in it."""

POLL = 0.25

MOST_COUNTED = 2 * POLL
"""Most seconds that one poll adds to a wait: if more have passed, the process was suspended."""

LOCK_HELD = "the run made no progress, since some code keeps Python's lock:"


class Heartbeat:
    """The callback of a net before each of its layers: signals are checked, the layer is noted."""

    capturable = replayable = adds_nothing = True  # a replayed step is polled instead
    touches_nothing = True

    def __init__(self, monitor: "Monitor", net: Net) -> None:
        self._monitor, self._net, self._check = monitor, net, monitor.signals.check

    def __call__(self, layer: int) -> None:
        """Note that this layer begins."""
        self._monitor.last_layer = self._net, layer
        self._check()


class Progress:
    """Progress of a run, as polls see it. Polls count rather than time: a suspended process has not
    hung.

    `waited` is the number of seconds without progress.
    """

    def __init__(self) -> None:
        self.waited = 0.0
        self._seen: object = None
        self._looked = time.monotonic()

    def stops(self, now: float, seen: object, seconds: float) -> bool:
        """True at the first poll that finds what is `seen` unchanged for more than `seconds`."""
        before = self.waited
        self.waited += min(now - self._looked, MOST_COUNTED)
        if seen != self._seen:
            self.waited = 0.0
        self._seen, self._looked = seen, now
        return before <= seconds < self.waited


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
        self.signals = signals
        self.solver: Solver | None = None
        self.last_layer: tuple[Net, int] | None = None
        self._deadlines: Mapping[str, float] = {}
        self._ends = False
        self._progress = Progress()
        self._lock_state = np.zeros(hangs.SIZE, np.int64)
        self._lock_text = np.frombuffer(f"caffepy: error: {LOCK_HELD}\n".encode(), np.uint8)
        self._lock_state[hangs.LENGTH] = self._lock_text.size
        self._error: BaseException | None = None  # what was raised in the main thread
        self.exit_code = INTERRUPTED  # of a process that is ended here
        self._grace = grace
        self._last_resort = last_resort or (lambda error: None)
        self._requests = Requests()
        self._saves = False  # a signal asked for a snapshot
        self._answered = threading.Event()  # the main thread has got the error
        self._raised_at: float | None = None  # when it was raised there
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

    def begin(self, deadlines: Mapping[str, float], ends: bool) -> None:
        """Watch for progress from now on: `deadlines` are seconds by phase; `ends`: end a run that
        makes none.
        """
        self._progress.waited = 0.0
        self._deadlines, self._ends = deadlines, ends
        if self._thread and sys.platform == "linux":
            watch = threading.Thread(target=self._watch_lock, name="caffepy lock", daemon=True)
            watch.start()
            while ends and watch.is_alive() and not self._lock_state[hangs.STARTED]:
                time.sleep(0.005)  # what is set up next may keep the lock
        self._beat()

    def watch(self, solver: Solver) -> None:
        """Watch the solver of the run from now on; its layers note that they begin."""
        self.signals.listen()
        self.solver, solver.action = solver, self.signals.poll
        for net in (solver.net, *solver.test_nets):
            heartbeat = Heartbeat(self, net)
            net.before_forward.append(heartbeat)
            net.before_backward.append(heartbeat)

    def forget(self) -> None:
        """Watch no solver, and keep none alive, until the next `watch`."""
        self.solver, self.last_layer = None, None

    def __exit__(self, *_: object) -> None:
        if self._thread:
            signal.set_wakeup_fd(self._before)
            self._ended.set()
            os.write(self._write, b"\0")
            self._thread.join()
            self._lock_state[hangs.ENDED] = 1
            os.close(self._read)
            os.close(self._write)

    def _run(self) -> None:
        while not self._ended.is_set():
            select.select([self._read], [], [], POLL)
            with suppress(BlockingIOError):
                for number in os.read(self._read, 1024):
                    self._count(number)
            now = time.monotonic()
            self._look_for_requests(now)
            if self._raised_at is None:
                self._look_for_progress(now)

    def _count(self, number: int) -> None:
        action = self.signals.effects.get(number, Action.NONE)
        starts = number in self.signals.effects and not self.signals.listening
        if self._raised_at is None and (Action.STOP in action or starts):
            asked_to_end.set()
            self._saves |= Action.SNAPSHOT in action
        if Action.STOP in action or starts:
            self._requests.add(number)

    def _look_for_requests(self, now: float) -> None:
        first, second = self._requests.first, self._requests.second
        if not self.signals.listening:
            second = first
        if second is not None:
            if now > second + LAST_PATIENCE:
                what = "a signal ended the run"
                self._last_resort(StopError(what, exit_code=self.exit_code))
        elif self._raised_at is not None and not self._answered.is_set():
            if now > self._raised_at + LAST_PATIENCE:
                self._answered.set()
                threading.Thread(target=self._rescue, name="caffepy rescue", daemon=True).start()
        elif first is not None and now > first + self._grace and not self._stops:
            what = f"The run has not stopped {self._grace:g} s after a signal asked it to"
            self._give_up(StopError(what, self._saves))

    def _give_up(self, error: BaseException) -> None:
        self._error, self._raised_at = error, time.monotonic()
        self.signals.fail(error, self._answered.set)

    @property
    def _stops(self) -> bool:
        """True if the stop is under way, or waits for a snapshot that is being written."""
        under_way = self.signals.polled or self.signals.ended or self._raised_at is not None
        return under_way or self._phase == "snapshot"

    @property
    def _phase(self) -> str:
        return self.solver.workers.phase if self.solver else "set-up"

    def _look_for_progress(self, now: float) -> None:
        """Find a run without progress; solvers that train as one find that out by themselves."""
        phase, solver = self._phase, self.solver
        alone = not solver or solver.workers.size == 1
        seconds = self._deadlines.get(phase, math.inf) if alone else math.inf
        self._beat()
        seen = phase, alone, self.signals.calls, solver and solver.iter
        if self._progress.stops(now, seen, seconds):
            at = ""
            if self.last_layer and phase in ("step", "test"):
                net, layer = self.last_layer
                at = f"; the last layer that began is {where(net.path, net.param.layer[layer])}"
            error = SyncError(f"the run made no progress for {seconds:g} s ({phase}){at}")
            log.warning("%s\n%s", error, hangs.stacks({}))
            if self._ends:
                self._give_up(error)

    def _beat(self) -> None:
        """Report to the loop without a lock that Python runs, and for how long it may stand still:
        the deadline of the phase at the last poll, between phases that of the set-up.
        """
        state, phase = self._lock_state, self._phase
        seconds = self._deadlines.get("set-up" if phase == "idle" else phase, math.inf)
        state[hangs.LIMIT] = max(1, seconds * hangs.POLLS_PER_S) if math.isfinite(seconds) else 0
        state[hangs.CODE] = SyncError.exit_code if self._ends else -1
        state[hangs.BEATS] += 1

    def _watch_lock(self) -> None:
        """Run the loop that finds code that keeps Python's lock.

        In a run that it would not end, it waits until the CPU's kernels are loaded or an iteration
        is done: on a GPU, loading them would hold the lock for 0.1 s of the start.
        """
        loaded = "caffepy.ops.cpu"
        while not (self._ends or loaded in sys.modules or (self.solver and self.solver.iter)):
            if self._ended.wait(POLL):
                return
        state, number = self._lock_state, signal.SIGRTMAX - 1
        state[[hangs.SIGNAL, hangs.DESCRIPTOR]] = number, self._read
        with suppress(Exception):
            from caffepy.ops.cpu.lock_watch import watch

            faulthandler.register(number, file=2, all_threads=True)
            watch(state, np.zeros(1, np.int32), self._lock_text, INTERRUPTED)

    def _rescue(self) -> None:
        """Save and end the process in place of the main thread."""
        error = self._error
        assert error is not None
        if self.solver is not None:
            rescue(self.solver.resume_state, error)
            if isinstance(error, StopError) and self.solver.resume_state.saved_now:
                error.exit_code = STOPPED
        self._last_resort(error)
