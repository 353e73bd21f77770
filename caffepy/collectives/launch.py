"""Facts from mpirun or srun on the processes that they started, and a watch over these processes
while MPI_Init waits for all of them.

MPI_Init never ends where another process has died, and with ULFM mpirun does not end the others
either. The watch finds the processes of its own host in /proc, where only Linux has them.
"""

import ctypes
import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from caffepy.core.errors import SyncError, UsageError

log = logging.getLogger(__name__)

PROCESSES = Path("/proc")


class Launcher(NamedTuple):
    """Variables of a launcher: with the number of processes that it started, with this one's number
    among them, and with the number of those on this host.
    """

    size: str
    rank: str
    on_host: str


LAUNCHERS = (
    Launcher("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    Launcher("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    Launcher("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS"),  # mpirun of MPICH and Intel MPI
    # srun; sbatch sets it in no script. The last is a number only where there is one host.
    Launcher("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_TASKS_PER_NODE"),
    Launcher("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE"),  # others
)
"""The innermost launcher first: Open MPI, MVAPICH2, ..."""

JOBS = ("PMIX_NAMESPACE", "PMI_JOBID", "SLURM_JOB_ID", "SLURM_STEPID")
"""Variables that processes of one start have alike."""

PARENTS = ("mpirun", "mpiexec", "prterun", "prted", "orterun", "orted", "hydra_pmi_proxy")
"""Names of the programs that start processes on a host, all of them at a time."""

POLL = 0.5
"""Seconds between looks at the other processes."""

SETTLE = 3.0
"""Seconds that a process must be missing: without ULFM the launcher ends all before, and one that
starts many may not have started the last ones.
"""

LAST_WAIT = 10.0
"""Seconds that the others wait until the process with the message has ended."""

PR_SET_PDEATHSIG = 1
"""Option of prctl(2)."""


def end_with_parent(number: int) -> None:
    """Get this signal when the process that started this one dies; only Linux can."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def _launcher(environment: Mapping[str, str]) -> Launcher | None:
    found = (each for each in LAUNCHERS if environment.get(each.size, "").isdecimal())
    return next(found, None)


def launched(environment: Mapping[str, str] = os.environ) -> tuple[int, str] | None:
    """Return the number of processes that a launcher started, if it is above 1, and the variable
    that says so.
    """
    launcher = _launcher(environment)
    if launcher is None or int(environment[launcher.size]) < 2:
        return None
    return int(environment[launcher.size]), launcher.size


def check_single(what: str) -> None:
    """Raise UsageError if this is one of several processes, which would write the same files."""
    if found := launched():
        count, name = found
        raise UsageError(
            f"{what} is for one process, but this is one of {count} ({name}={count}): start it "
            f"without mpirun or srun, or on purpose in this one by env -u {name} {what} ..."
        )


def processes_of_host(rank: str) -> dict[int, str]:
    """Return the processes of this one's launcher on this host: the state of each ("T": stopped) by
    its number, which the variable `rank` has.
    """
    job = [f"{name}={os.environ[name]}" for name in JOBS if name in os.environ]
    found = {}
    for folder in PROCESSES.iterdir():
        if not folder.name.isdecimal():
            continue
        with suppress(OSError, ValueError, StopIteration):
            entries = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            number = next(e for e in entries if e.startswith(f"{rank}=")).partition("=")[2]
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z" and all(entry in entries for entry in job):
                found[int(number)] = state
    return found


class InitWatch:
    """A block in which MPI_Init waits for all processes of the launcher, at most `deadline` s.

    If one of this host has died, or after the deadline, `last_resort` is called in another thread:
    it must end the process. The lowest process of the host gets a SyncError to show; when it has
    ended, the others get SystemExit with its exit code. Without `last_resort` the error is logged.
    """

    def __init__(
        self, deadline: float, last_resort: Callable[[BaseException], object] | None = None
    ) -> None:
        launcher = _launcher(os.environ)
        assert launcher, "no launcher started several processes"
        self._size, self._rank_name = int(os.environ[launcher.size]), launcher.rank
        self._rank = int(os.environ.get(launcher.rank, "0"))
        self._all_here = os.environ.get(launcher.on_host) == str(self._size) and _has_launcher()
        self._deadline, self._last_resort = deadline, last_resort
        self._ended = threading.Event()

    def __enter__(self) -> None:
        threading.Thread(target=self._run, name="caffepy MPI_Init", daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _run(self) -> None:
        known = set(range(self._size)) if self._all_here else set[int]()
        missing: Collection[int] = ()
        waited = since = 0.0
        looked = time.monotonic()
        while not self._ended.wait(POLL):
            now = time.monotonic()
            waited += min(now - looked, 2 * POLL)  # this process may have been stopped
            looked = now
            here = processes_of_host(self._rank_name) if PROCESSES.exists() else {}
            known.update(here)
            if missing != (missing := known - here.keys()):
                since = waited
            if missing and waited - since >= SETTLE:
                self._give_up(self._have_died(missing, waited), here)
                return
            if waited >= self._deadline:
                self._give_up(self._do_not_answer(here), here)
                return

    def _have_died(self, missing: Collection[int], waited: float) -> str:
        return (
            f"{_processes(missing)} of {self._size} (host {platform.node()}) died before MPI_Init "
            f"was over; process {self._rank} waited {waited:.0f} s"
        )

    def _do_not_answer(self, here: Mapping[int, str]) -> str:
        if stopped := [number for number, state in here.items() if state in "Tt"]:
            why = f"{_processes(stopped)} of this host {_is(stopped)} stopped"
        elif others := set(range(self._size)) - here.keys() if here else None:
            why = f"{_processes(here)} of this host {_is(here)} there; look at {_processes(others)}"
        else:
            why = "another process does not answer"
        return (
            f"process {self._rank} of {self._size} (host {platform.node()}): MPI_Init did not end "
            f"within {self._deadline:g} s: {why}; messages of mpirun or srun may tell more"
        )

    def _give_up(self, text: str, here: Mapping[int, str]) -> None:
        if self._ended.is_set():
            return
        error = SyncError(text)
        if self._last_resort is None:
            log.error("%s", error)
            return
        if self._lower(here):
            until = time.monotonic() + LAST_WAIT
            while self._lower(processes_of_host(self._rank_name)) and time.monotonic() < until:
                time.sleep(POLL)
            self._last_resort(SystemExit(error.exit_code))
        self._last_resort(error)

    def _lower(self, here: Mapping[int, str]) -> bool:
        """True if a lower process of this host lives, which has the error to show."""
        return any(n < self._rank and state not in "Tt" for n, state in here.items())


def _has_launcher() -> bool:
    """True if the parent of this process is a launcher, so that it sees the others, too: in a
    container of its own it would not.
    """
    with suppress(OSError):
        return (PROCESSES / str(os.getppid()) / "comm").read_text().strip() in PARENTS
    return False


def _processes(numbers: Collection[int]) -> str:
    """Return "process 1", "processes 1 and 2", ..."""
    *first, last = map(str, sorted(numbers))
    return f"processes {', '.join(first)} and {last}" if first else f"process {last}"


def _is(numbers: Collection[int]) -> str:
    return "is" if len(numbers) == 1 else "are"
