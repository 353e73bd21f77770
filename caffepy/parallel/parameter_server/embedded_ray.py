"""EmbeddedRay: a cluster of Ray of one node, which ends with the process that started it.

    this process --pipe--> keeper --> starter --> gcs_server, raylet --> servers, workers, agents

The keeper reads the pipe, which ends with this process, however that dies. Then it kills all its
descendants, also those whose parents have died (on Linux they become its children), and removes
their folder. It knows nothing of Ray, whose code may keep Python's lock for long. It is in a
session of its own: a signal to the group of this process, as from a terminal or `timeout`, does not
end what a last snapshot needs.
"""

import ctypes
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from typing import Any

from caffepy.core.errors import SyncError
from caffepy.core.events import asked_to_end
from caffepy.core.files import temporary

log = logging.getLogger(__name__)

START = 60.0
"""Seconds that Ray's processes may take to start; Ray itself gives its agents 30, which are too few
where their code is read from a slow disk for the first time.
"""

SLOW, TRIES = 10.0, 4
"""Seconds after which a start is slow, which is logged; the most starts, since Ray is started again
if one fails.
"""

ENDING = 10.0
"""Seconds that they may take to end."""

POLL = 0.1
"""Seconds between looks for a signal while they start."""

LONGEST = 13
"""Bytes of the name of the folder of temporary files: names of sockets have 107 at most."""

PR_SET_CHILD_SUBREAPER = 36
"""Option of prctl(2)."""


class EmbeddedRay:
    """Processes of Ray that listen on 127.0.0.1 only, at `address`.

    cpus: CPUs that Ray counts. store: bytes of the object store.
    SyncError if they do not start; KeyboardInterrupt if a signal asked to end before they have.
    """

    def __init__(self, cpus: int, store: int) -> None:
        for left in reversed(range(TRIES)):
            begun = time.monotonic()
            try:
                self._start(cpus, store)
                break
            except SyncError as error:
                seconds = time.monotonic() - begun
                if not left or seconds < SLOW:
                    raise
                log.warning(
                    "%s, after %.0f s: it starts again, since a disk that is slow at first gives "
                    "the same files sooner the next time",
                    *(error, seconds),
                )

    def _start(self, cpus: int, store: int) -> None:
        self._stack = ExitStack()
        base = tempfile.gettempdir()
        base = base if len(os.fsencode(base)) <= LONGEST else "/tmp"
        folder = self._stack.enter_context(temporary(f"{base}/caffepy", is_folder=True))
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import keep; keep()"
        self._errors = os.path.join(folder, "errors")
        with open(self._errors, "wb") as errors:
            self._keeper = subprocess.Popen(
                [sys.executable, "-c", code, folder, str(cpus), str(store)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        self._stack.callback(self._end)
        try:
            self.address = self._read_address()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the processes, and remove their folder."""
        self._stack.close()

    def _read_address(self) -> str:
        out = self._keeper.stdout
        assert out
        begun = time.monotonic()
        until, slow = begun + START, begun + SLOW
        while not select.select([out], [], [], POLL)[0] and (now := time.monotonic()) < until:
            if asked_to_end.is_set():
                raise KeyboardInterrupt
            if now > slow:
                log.info("Ray is still starting on this machine, for %.0f s", now - begun)
                slow += SLOW
        if time.monotonic() < until and (line := out.readline()):
            return line.decode().strip()
        with open(self._errors, errors="replace") as file:
            lines = file.read().strip().splitlines()
        reason = lines[-1].rstrip(".") if lines else f"nothing was heard of it for {START:g} s"
        raise SyncError(f"Ray did not start on this machine: {reason}")

    def _end(self) -> None:
        with self._keeper as keeper:  # closes the pipes
            assert keeper.stdin
            keeper.stdin.close()
            try:
                keeper.wait(ENDING)
            except subprocess.TimeoutExpired:
                log.warning("Ray's processes have not ended for %g s", ENDING)
                keeper.kill()


def keep() -> None:
    """Be the keeper: the command line has the folder, the CPUs and the bytes of the store."""
    folder, cpus, store = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    starter = os.fork()
    if not starter:
        _start(folder, cpus, store)
    os.close(1)  # so that the end of the starter is seen
    while os.read(0, 1024):
        pass
    _end(starter)
    shutil.rmtree(folder, ignore_errors=True)


def _start(folder: str, cpus: int, store: int) -> None:
    """Start Ray's processes; write their address to stdout, and wait to be killed."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Ray's own code prints
    import ray._private.node as ray_node
    from ray._private import parameter, ray_constants

    node_class: Any = ray_node.Node  # its types are not public, either
    params_class: Any = parameter.RayParams

    # Ray's switch for systems on which it serves one host only: if off, it binds to 127.0.0.1
    ray_constants.ENABLE_RAY_CLUSTER = False
    # the autoscaler, who sends logs to drivers, and the server of the dashboard's data: nobody asks
    node_class.start_api_server = lambda *arguments, **named: None
    params = params_class(
        num_cpus=cpus,
        object_store_memory=store,
        include_dashboard=False,
        include_log_monitor=False,
        no_monitor=True,
        temp_dir=folder,
    )
    node = node_class(
        params, head=True, shutdown_at_exit=False, spawn_reaper=True, ray_init_cluster=True
    )
    out.write(f"{node.gcs_address}\n")
    out.flush()
    while True:
        signal.pause()


def _end(starter: int) -> None:
    """Kill all descendants of this process, and those that they start meanwhile. Without /proc,
    Ray's processes end by themselves after the one that started them.
    """
    until = time.monotonic() + ENDING / 2
    while time.monotonic() < until:
        for process in _descendants() or {starter}:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:  # none is left
            return
        time.sleep(0.02)


def _descendants() -> set[int]:
    parents = {}
    for name in os.listdir("/proc") if sys.platform == "linux" else ():
        with suppress(OSError, ValueError), open(f"/proc/{int(name)}/stat") as file:
            parents[int(name)] = int(file.read().rpartition(")")[2].split()[1])
    found = {os.getpid()}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}
