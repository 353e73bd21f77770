"""Signals: handlers only record the signal; the solver polls once an iteration."""

import logging
import signal
import threading
from collections.abc import Callable
from enum import Flag
from types import FrameType
from typing import Any

from caffepy.core.errors import UsageError
from caffepy.core.registry import nearest

log = logging.getLogger(__name__)


class Action(Flag):
    """Action of the solver after the current iteration; of both, the snapshot comes first."""

    NONE = 0
    SNAPSHOT = 1
    STOP = 2


EFFECTS = {"stop": Action.STOP, "snapshot": Action.SNAPSHOT, "none": Action.NONE}


def effect(name: str) -> Action:
    """Return the action of a --sigint_effect or --sighup_effect; UsageError for unknown names."""
    if name not in EFFECTS:
        raise UsageError(
            f'invalid signal effect "{name}"{nearest(name, EFFECTS)} (known: {", ".join(EFFECTS)})'
        )
    return EFFECTS[name]


class Signals:
    """A context in which, after `listen`, SIGINT, SIGHUP and SIGTERM are recorded and do not end
    the process.

    SIGTERM asks for a snapshot and a stop. If SIGINT asks to stop, the second SIGINT ends the run:
    `poll` and `check` raise KeyboardInterrupt, hence never in the middle of a snapshot. The third
    raises it at once. After SIGTERM further ones are ignored even when the context has ended.
    Python handles signals in the main thread only; in another, the context does nothing.
    """

    def __init__(self, sigint_effect: str = "stop", sighup_effect: str = "snapshot") -> None:
        self.effects = {
            signal.SIGINT: effect(sigint_effect),
            signal.SIGTERM: Action.SNAPSHOT | Action.STOP,
        }
        if hasattr(signal, "SIGHUP"):
            self.effects[signal.SIGHUP] = effect(sighup_effect)
        self.aborting = False
        self._interrupted = False
        self._failure: tuple[BaseException, Callable[[], object]] | None = None
        self._terminated = False
        self._asked = Action.NONE
        self._before: dict[int, Any] = {}

    def poll(self) -> Action:
        """Return the actions asked for since the last poll."""
        self.check()
        if not self._asked:
            return Action.NONE
        asked, self._asked = self._asked, Action.NONE
        if Action.STOP in asked:
            log.info(
                "Stopping, as a signal asked; Ctrl-C once more stops at once. To go on later: "
                "--snapshot auto"
            )
        return asked

    def check(self, *_: object) -> None:
        """Raise KeyboardInterrupt after the second SIGINT; nets call this before each layer."""
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
        if threading.current_thread() is threading.main_thread():
            for number in self.effects:
                self._before[number] = signal.signal(number, self._note)

    def __enter__(self) -> "Signals":
        return self

    def __exit__(self, *_: object) -> None:
        if self._terminated:  # the process ends; more of the same must not spoil its exit code
            del self._before[signal.SIGTERM]
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._failure is not None:
            (error, informed), self._failure = self._failure, None
            informed()
            raise error
        action = self.effects[signal.Signals(number)]
        if number == signal.SIGINT and Action.STOP in action:
            if self.aborting:
                raise KeyboardInterrupt
            self.aborting = self._interrupted
            self._interrupted = True
        self._terminated |= number == signal.SIGTERM
        self._asked |= action
