"""`caffepy train --max-restarts N`: a run in a process of its own, which is started again."""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

from caffepy.collectives.launch import end_with_parent, launched
from caffepy.commands.nodes import nodes
from caffepy.core.errors import INTERRUPTED, DataError, DeviceError, SyncError, UsageError
from caffepy.proto.text import read_solver
from caffepy.solver import Action
from caffepy.solver.snapshot import candidates

log = logging.getLogger(__name__)

RESTARTABLE = {DataError.exit_code, DeviceError.exit_code, SyncError.exit_code, 70}
"""Exit codes after which a restart may help, as after a signal that killed the process."""

SUPERVISOR = "CAFFEPY_SUPERVISOR"
"""Variable of the run's environment with the process id of `supervise`."""


class PassedOn:
    """A context in which signals are passed on to the process that runs.

    `effects` are those of the run, by signal. `asked` are the signals that came. Those of them that
    come before a process has started are for that process.
    """

    def __init__(self, effects: Mapping[int, Action]) -> None:
        self._effects = effects
        self._before = {number: signal.getsignal(number) for number in effects}
        self._process: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []
        self.asked: set[int] = set()

    @property
    def stops(self) -> bool:
        """True if one of them asks the run to stop."""
        return any(Action.STOP in self._effects[number] for number in self.asked)

    def __enter__(self) -> "PassedOn":
        self._handle(ignored=False)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def to(self, process: "subprocess.Popen[bytes]") -> Iterator[None]:
        """Return a block in which this process runs; it must inherit which signals are ignored."""
        self._process = process
        while self._early:
            process.send_signal(self._early.pop(0))
        self._handle(ignored=True)
        try:
            yield
        finally:
            self._process = None
            for number, handler in self._before.items():
                if handler is signal.SIG_IGN:
                    signal.signal(number, handler)

    def _handle(self, ignored: bool) -> None:
        for number, handler in self._before.items():
            if handler is not None and (handler is signal.SIG_IGN) == ignored:
                signal.signal(number, self._pass_on)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.asked.add(number)
        if self._process:
            self._process.send_signal(number)
        else:
            self._early.append(number)


def supervise(
    arguments: Sequence[str], solver: str, most: int, effects: Mapping[int, Action]
) -> int:
    """Run this command line of caffepy; return its exit code.

    After a crash it is run again, from the newest snapshot if there is a new one: up to `most`
    times without one. Signals, which have these `effects`, are passed on; after one that asks to
    stop nothing is started again. UsageError where MPI started several processes.
    """
    if launched():
        with nodes():  # so that one of them tells
            raise UsageError(
                "--max-restarts is for one process: MPI starts none of several again; let the "
                "launcher start all of them anew, with --snapshot auto"
            )
    prefix = read_solver(solver).snapshot_prefix
    command = [sys.executable, "-m", "caffepy", *arguments]
    before, resumed, restarts = _newest(prefix), list[str](), 0
    environment = os.environ | {SUPERVISOR: str(os.getpid())}
    with PassedOn(effects) as signals:
        while not signals.stops:
            process = subprocess.Popen([*command, *resumed], env=environment)
            with process, signals.to(process):
                code = process.wait()
            if -code in signals.asked:  # it came before the run listened
                break
            if code >= 0 and (code not in RESTARTABLE or signals.stops):
                return code
            newest = _newest(prefix)
            if newest != before:
                before, resumed, restarts = newest, ["--snapshot", "auto"], 0
            ended = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
            if restarts == most:
                log.error("The run ended with %s; restarts without a new snapshot: %d", ended, most)
                return code if code >= 0 else 128 - code
            restarts += 1
            place = "its newest snapshot" if resumed else "where it began"
            message = "The run ended with %s; restart %d of %d, from %s"
            log.warning(message, ended, restarts, most, place)
    return INTERRUPTED


def end_with_supervisor() -> None:
    """Stop with a snapshot when the process of `supervise` that started this run is killed, or now
    if it has been.
    """
    supervisor = os.environ.pop(SUPERVISOR, None)  # the run's own processes have another parent
    if supervisor is not None:
        end_with_parent(signal.SIGTERM)
        if supervisor != str(os.getppid()):
            os.kill(os.getpid(), signal.SIGTERM)


def _newest(prefix: str) -> object:
    """Return what identifies the newest snapshot under the prefix, or rescued from there."""
    return [snapshot.state for snapshot in candidates(prefix)]
