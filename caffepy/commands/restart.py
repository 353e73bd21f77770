"""`caffepy train --max-restarts N`: a run in a process of its own, which is started again."""

import logging
import signal
import subprocess
import sys
from collections.abc import Sequence

from caffepy.collectives.mpi import launched
from caffepy.core.errors import DataError, DeviceError, SyncError, UsageError
from caffepy.proto.text import read_solver
from caffepy.solver import Signals
from caffepy.solver.snapshot import under

log = logging.getLogger(__name__)

MENDED = {DataError.exit_code, DeviceError.exit_code, SyncError.exit_code, 70}
"""Exit codes after which a new start may help, as after a signal that killed the process."""


def supervise(arguments: Sequence[str], solver: str, most: int) -> int:
    """Run this command line of caffepy; return its exit code.

    After a crash it is run again, from the newest snapshot if there is a new one: up to `most`
    times without one. Signals are passed on.
    """
    if launched():
        raise UsageError(
            "--max-restarts is for one process: MPI starts none of several again; let the launcher "
            "start all of them anew, with --snapshot auto"
        )
    prefix = read_solver(solver).snapshot_prefix
    command = [sys.executable, "-m", "caffepy", *arguments]
    before, resumed, restarts = _newest(prefix), list[str](), 0
    while True:
        with subprocess.Popen([*command, *resumed]) as process:
            handlers = {
                number: signal.signal(number, lambda number, _: process.send_signal(number))
                for number in Signals().effects
            }
            try:
                code = process.wait()
            finally:
                for number, handler in handlers.items():
                    signal.signal(number, handler)
        if code >= 0 and code not in MENDED:
            return code
        newest = _newest(prefix)
        if newest != before:
            before, resumed, restarts = newest, ["--snapshot", "auto"], 0
        ended = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        if restarts == most:
            log.error("The run ended with %s; restarts without a new snapshot: %d", ended, most)
            return code if code >= 0 else 128 - code
        restarts += 1
        place = "its newest snapshot" if resumed else "its beginning"
        told = "The run ended with %s; restart %d of %d, from %s"
        log.warning(told, ended, restarts, most, place)


def _newest(prefix: str) -> object:
    """Return what tells the newest snapshot under the prefix from others."""
    return [snapshot.state for snapshot in under(prefix)]
