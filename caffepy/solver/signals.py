"""Signals: handlers only record the signal; the solver polls once an iteration."""

import logging
import signal
import threading
import time
from collections.abc import Callable
from enum import Flag
from types import FrameType
from typing import Any

from caffepy.core.errors import INTERRUPTED, UsageError
from caffepy.core.events import asked_to_end
from caffepy.core.names import nearest

log = logging.getLogger(__name__)


class Action(Flag):
    """Action of the solver after the current iteration; of both, the snapshot comes first."""

    NONE = 0
    SNAPSHOT = 1
    STOP = 2


EFFECTS = {"stop": Action.STOP, "snapshot": Action.SNAPSHOT, "none": Action.NONE}


def effect(name: str) -> Action:
    """Return the action of a --sigint-effect and its like; UsageError for unknown names."""
    if name not in EFFECTS:
        raise UsageError(
            f'invalid signal effect "{name}"{nearest(name, EFFECTS)} (known: {", ".join(EFFECTS)})'
        )
    return EFFECTS[name]


SAME = 0.25
"""Seconds after the first request to stop in which more signals are the same request: `timeout` and
launchers signal a process and its group, so that it gets each signal twice.
"""


class Requests:
    """The signals that asked to stop: the times of the first and of a second request."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.second: float | None = None

    def add(self, number: int) -> None:
        """Count a signal. SIGXCPU comes every second once the limit is passed: never a second."""
        now = time.monotonic()
        if self.first is None:
            self.first = now
        elif now - self.first >= SAME and signal.Signals(number).name != "SIGXCPU":
            self.second = self.second or now


class StopError(KeyboardInterrupt):
    """Raised in the main thread when the grace of a run that was asked to stop is over, and given
    to `last_resort` if that thread does not answer.

    `saves`: a snapshot is to be written, whatever the solver says.
    """

    def __init__(self, message: str, saves: bool = False, exit_code: int = INTERRUPTED) -> None:
        super().__init__(message)
        self.saves = saves
        self.exit_code = exit_code


class Signals:
    """A context in which, after `listen`, signals are recorded and do not end the process.

    SIGTERM, SIGUSR2, SIGXCPU and SIGQUIT ask for a snapshot and a stop; SIGINT, SIGHUP and SIGUSR1
    for what their effects say. A second request to stop ends the run at once: the handler raises
    KeyboardInterrupt, and so do `poll` and `check` from then on. Before `listen` the first one
    does. Python handles signals in the main thread only; in another, the context does nothing.
    `then` is what the log says when a signal stops the run.
    """

    def __init__(
        self,
        sigint_effect: str = "stop",
        sighup_effect: str = "snapshot",
        sigusr1_effect: str = "stop",
        then: str = "To resume: --snapshot auto",
    ) -> None:
        self._then = then
        stop = Action.SNAPSHOT | Action.STOP
        usr1 = effect(sigusr1_effect)
        effects = {
            "SIGINT": effect(sigint_effect),
            "SIGHUP": effect(sighup_effect),
            "SIGUSR1": stop if Action.STOP in usr1 else usr1,
            **dict.fromkeys(("SIGTERM", "SIGUSR2", "SIGXCPU", "SIGQUIT"), stop),
        }
        known = {name: action for name, action in effects.items() if hasattr(signal, name)}
        self.effects = {int(getattr(signal, name)): action for name, action in known.items()}
        self.listening = False
        self.polled = False  # `poll` has returned a request to stop
        self.ended = False  # the exit code is final: set this to ignore signals from then on
        self.calls = 0  # of `check`: the run gets on
        self.requests = Requests()
        self._failure: tuple[BaseException, Callable[[], object]] | None = None
        self._terminated: set[int] = set()
        self._asked = Action.NONE
        self._before: dict[int, Any] = {}

    @property
    def aborting(self) -> bool:
        """True if a second signal has asked to stop."""
        return self.requests.second is not None

    def poll(self) -> Action:
        """Return the actions asked for since the last poll."""
        self.check()
        if not self._asked:
            return Action.NONE
        asked, self._asked = self._asked, Action.NONE
        if Action.STOP in asked:
            self.polled = True
            log.info("Stopping after a signal; Ctrl-C once more stops at once. %s", self._then)
        return asked

    poll.takes_several = True  # type: ignore[attr-defined]

    def check(self, *_: object) -> None:
        """Raise KeyboardInterrupt after the second signal; nets call this before each layer."""
        self.calls += 1
        if self.aborting:
            raise KeyboardInterrupt

    check.capturable = True  # type: ignore[attr-defined]  # a replayed step is polled instead
    check.adds_nothing = True  # type: ignore[attr-defined]

    def fail(self, error: BaseException, informed: Callable[[], object]) -> None:
        """Call `informed` and raise this error in the main thread, if signals are handled."""
        thread = threading.main_thread().ident
        if self._before and thread is not None and hasattr(signal, "pthread_kill"):
            self._failure = error, informed
            signal.pthread_kill(thread, signal.SIGINT)

    def listen(self) -> None:
        """Record signals from now on, until the context ends."""
        self.listening = bool(self._before)

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():
            asked_to_end.clear()
            for number in self.effects:
                if signal.getsignal(number) is not None:  # else faulthandler has it
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        # After a request the process ends; more of the same must not spoil its exit code.
        for number in self._before.keys() - self._terminated:
            signal.signal(number, self._before[number])
        asked_to_end.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._failure is not None:
            (error, informed), self._failure = self._failure, None
            informed()
            raise error
        before = self._before[number]
        if self.ended or (before is signal.SIG_IGN and not self.listening):  # as nohup does
            return
        action, aborting = self.effects[number], self.aborting
        if Action.STOP in action or not self.listening:
            asked_to_end.set()
            self.requests.add(number)
            if not self.listening:
                self._asked |= action | Action.STOP  # Python ignores what is raised in a destructor
            if not self.listening or (self.aborting and (not aborting or number == signal.SIGINT)):
                if callable(before):
                    before(number, frame)
                raise KeyboardInterrupt
            if number != signal.SIGINT:
                self._terminated.add(number)
        self._asked |= action
