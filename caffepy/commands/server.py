"""`caffepy server`: servers that outlive trainers, from their start to a snapshot in the end.

This process holds nothing: it starts the servers on the cluster, logs their progress, takes
snapshots of what they hold, and ends them. Where it is killed they go on, until another takes them
up or nobody has used them for an hour.
"""

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

from caffepy.core.errors import INTERRUPTED, STOPPED, CaffeError, SyncError, UsageError
from caffepy.core.files import check_writable
from caffepy.parallel.parameter_server.attachment import check_running, this_process
from caffepy.parallel.parameter_server.client import Client
from caffepy.parallel.parameter_server.cluster import SILENT, check_copies, check_room
from caffepy.parallel.parameter_server.detached import Status
from caffepy.parallel.parameter_server.kept import Held, write
from caffepy.parallel.parameter_server.messages import DeadPeerError, Report
from caffepy.parallel.parameter_server.ray_cluster import LOCAL, check_address, connect
from caffepy.parallel.parameter_server.ray_engine import DETACHED, RayEngine
from caffepy.report.text import AsJson
from caffepy.solver import Action, Signals
from caffepy.solver.monitor import GRACE
from caffepy.solver.snapshot import Files, clean

log = logging.getLogger(__name__)

T = TypeVar("T")

LOOK = 0.5
"""Seconds between two looks how it goes."""

PARTING = 4 * LOOK
"""Seconds that a local cluster outlives its servers: who has asked for their end sees it then."""

ANSWER = 5.0
"""Seconds that servers may take to answer."""


@dataclass(frozen=True)
class ServerOptions:
    """Options of servers that outlive trainers: the flags of `caffepy server`.

    cluster: "local", "auto" or "HOST:PORT", of Ray.
    name: by which trainers find them.
    servers, replicas: among how many the parameters are divided, and how many hold each.
    snapshot_prefix: of the snapshots; the name, if none is given.
    snapshot_every: seconds between two snapshots; 0 for one in the end only.
    display: seconds between two lines of progress.
    grace: seconds that a trainer has to stop in the end.
    """

    cluster: str
    name: str
    servers: int = 2
    replicas: int = 2
    snapshot_prefix: str = ""
    snapshot_every: float = 0.0
    display: float = 10.0
    grace: float = GRACE

    @property
    def prefix(self) -> str:
        """The prefix of the snapshots, from the root folder."""
        return os.path.abspath(self.snapshot_prefix or self.name)

    def check(self) -> None:
        """Raise UsageError unless the options go together and the snapshot can be written."""
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", self.name):
            raise UsageError(f"--name {self.name!r}: give letters, digits and any of . _ -")
        check_address(self.cluster)
        check_copies(self.servers, self.replicas)
        if self.cluster == LOCAL:
            check_room(self.servers)
        check_writable(Files.of(self.prefix, 0, hdf5=False).state)


@dataclass(frozen=True)
class ServerResult:
    """The end of servers: the state file of their snapshot, None if they held nothing, and whether
    a signal ended them.
    """

    snapshot: str | None
    stopped: bool

    @property
    def exit_code(self) -> int:
        """0 for servers that were ended by `stop`, 75 after a signal and a snapshot, 130 after one
        where they held nothing, as of a run.
        """
        if not self.stopped:
            return 0
        return STOPPED if self.snapshot else INTERRUPTED


def serve(options: ServerOptions) -> ServerResult:
    """Start servers, or take up those of this name that run without such a process; end them with a
    snapshot on a signal, or when another process asks to `stop` them.

    UsageError, ConfigError and SyncError say why they cannot start or go on.
    """
    options.check()
    clean(options.prefix)
    hangup = "none" if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else "stop"  # of nohup
    signals = Signals("stop", hangup, "stop", then="The servers end with a snapshot")
    with signals, _connected(options, shared=True) as engine:
        signals.listen()

        def check() -> None:
            signals.check()
            engine.store.check()

        client = Client(engine, 0, poll=check)
        with _explaining(options):
            snapshots = _Snapshots(engine, options)
            stopped = _attend(engine, client, options, signals, snapshots)
            snapshots.finish(client.poll)
            result = ServerResult(_end(engine, client, options), stopped)
            if options.cluster == LOCAL and not stopped:
                time.sleep(PARTING)
            return result


def stop(options: ServerOptions) -> ServerResult:
    """End servers with a snapshot: by the process that started them, else by this one.

    SyncError if they still run after `options.grace` seconds and a little more.
    """
    with _connected(options) as engine, _explaining(options):
        check_running(engine, options.cluster, options.name)
        client = Client(engine, 0, patience=ANSWER, poll=engine.store.check)
        until = time.monotonic() + options.grace + GRACE
        while options.name in _answer(engine, engine.detached):
            try:
                status: Status = client.ask("status")
            except DeadPeerError:  # they have just ended
                continue
            if not status.keeper:  # or it was killed a moment ago
                options.check()
                client.ask("attend", this_process("ends them"))
                return ServerResult(_end(engine, client, options), stopped=False)
            if not status.stopping:
                message = 'The servers "%s" end with a snapshot, by %s'
                log.info(message, options.name, status.keeper)
                client.ask("stop")
            if time.monotonic() > until:
                raise SyncError(
                    f"the servers still run, and {status.keeper}, does not end them: end it, then "
                    "give --stop again"
                )
            time.sleep(LOOK)
        return ServerResult(None, stopped=False)


def running_servers(cluster: str) -> "RunningServers":
    """Return the servers of a cluster that outlive trainers."""
    engine = connect(cluster, f"{DETACHED}list")
    try:
        names = dict[str, Status]()
        for name, of_name in sorted(engine.detached().items()):
            with suppress(CaffeError, TimeoutError):  # they have just ended
                names[name] = Client(of_name, 0, patience=ANSWER).ask("status")
        return RunningServers(names)
    finally:
        engine.close()


@dataclass(frozen=True)
class RunningServers(AsJson):
    """Servers that outlive trainers, by name."""

    servers: dict[str, Status]

    def table(self) -> str:
        """Return lines for each name."""
        return "\n".join(map(_lines, self.servers, self.servers.values())) or "no servers"


def _lines(name: str, status: Status) -> str:
    servers = f"{len(status.servers)} of {status.wanted} servers, replicas {status.copies}"
    return "\n".join(
        [
            f"{name}: {_held(status)}",
            f"  {servers if status.servers else f'{status.wanted} servers, not started yet'}",
            f"  trainer: {status.trainer or 'none'}",
            f"  {status.keeper or 'nobody looks after them: start caffepy server, or give --stop'}",
        ]
    )


def _held(status: Status) -> str:
    if status.iteration is None:
        return "they hold nothing yet"
    held = f"iteration {status.iteration}, {status.clock} pushes of each worker"
    return f"{held}, when the run began" if status.trainer else held


# inside


@contextmanager
def _connected(options: ServerOptions, shared: bool = False) -> Iterator[RayEngine]:
    engine = connect(options.cluster, DETACHED + options.name, shared=shared)
    engine.store.start()
    try:
        yield engine
    finally:
        engine.close()


def _answer(engine: RayEngine, ask: Callable[[], T]) -> T:
    """Return what Ray's head answers; SyncError if it has gone: Ray itself waits for an hour."""
    answer: Future[T] = Future()

    def work() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=work, name="caffepy-ask", daemon=True).start()
    while not wait([answer], LOOK).done:
        engine.store.check()
    return answer.result()


@contextmanager
def _explaining(options: ServerOptions) -> Iterator[None]:
    """Return a block whose errors name the servers."""
    try:
        yield
    except DeadPeerError as error:
        raise SyncError(
            f'--cluster {options.cluster} does not answer any more, and what the servers "'
            f'{options.name}" held is lost with it: start it and them again; trainers go on with '
            "--snapshot FILE, from the newest of their own snapshots or of the servers' "
            "(--snapshot-every)"
        ) from error
    except CaffeError as error:
        raise error.at(f"--name {options.name}") from None


class _Snapshots:
    """Snapshots of what servers hold, taken beside what else this process does."""

    def __init__(self, engine: RayEngine, options: ServerOptions) -> None:
        self._engine, self._options = engine, options
        self._begun = time.monotonic()
        self._seen: Status | None = None  # when the last was taken
        self._clocks = (-1, -1)  # of the values and of the momentum in the last
        self._thread = threading.Thread()

    def look(self, status: Status) -> None:
        """Begin one, if it is due and the servers may hold something new."""
        every, now = self._options.snapshot_every, time.monotonic()
        is_new = status.iteration is not None and (status.trainer or status != self._seen)
        if not every or now - self._begun < every or not is_new or self._thread.is_alive():
            return
        self._begun, self._seen = now, status
        self._thread = threading.Thread(target=self._take, name="caffepy-snapshot", daemon=True)
        self._thread.start()

    def finish(self, poll: Callable[[], object]) -> None:
        """Wait for one that was begun; what `poll` raises ends that."""
        while self._thread.is_alive():
            poll()
            self._thread.join(LOOK)

    def _take(self) -> None:
        try:
            held: Held | None = Client(self._engine, 0, patience=ANSWER).ask("held")
            if held and (clocks := (held.clock, held.kept.clock)) != self._clocks:
                saved = write(held, self._options.prefix)
                log.info("Snapshot: %s, after %d pushes of each worker", saved, held.clock)
                self._clocks = clocks
        except (CaffeError, TimeoutError) as error:
            log.warning("There is no snapshot of the servers this time: %s", error)


def _attend(
    engine: RayEngine,
    client: Client,
    options: ServerOptions,
    signals: Signals,
    snapshots: _Snapshots,
) -> bool:
    """Start or take up servers; return true when a signal ends them, false when --stop does."""
    me = this_process("looks after them")
    running = options.name in engine.detached()
    if not running:
        engine.spawn_detached(options.servers, options.replicas, SILENT)
    status: Status = client.ask("attend", me)
    cluster = engine.address if options.cluster == LOCAL else options.cluster
    if running:
        message = 'Taking up the servers "%s", which run without a process that attends to them: %s'
        log.warning(message, options.name, _held(status))
    if (status.wanted, status.copies) != (options.servers, options.replicas):
        message = "They stay %d servers with replicas %d, as they were started"
        log.warning(message, status.wanted, status.copies)
    log.info(
        'Servers "%s" wait for a trainer: caffepy train --solver FILE --cluster %s --nodes N '
        "--name %s",
        *(options.name, cluster, options.name),
    )
    shown, last, told_at = status, Report({}, {}, {}, 0, 0, 0), time.monotonic()
    while Action.STOP not in signals.poll():
        client.poll()
        status = client.ask("attend", me)
        if status.lost:
            engine.end_actors()
            raise SyncError(status.lost)
        if status.stopping:
            return False
        _tell_changes(shown, status)
        snapshots.look(status)
        shown = status
        if time.monotonic() - told_at >= options.display:
            told_at = time.monotonic()
            last = _tell_progress(client, status, last)
        time.sleep(LOOK)
    return True


def _tell_changes(before: Status, now: Status) -> None:
    """Log who has come and gone."""
    if now.trainer != before.trainer:
        if now.trainer:
            log.info("Trainer: %s", now.trainer)
        else:
            log.info("The trainer has gone: %s", _held(now))
    if now.members != before.members:
        log.info("Workers: %s", ", ".join(map(str, now.members)) or "none")
    for server in before.servers:
        if server not in now.servers:
            log.warning("Server %s is out; %d servers go on", server, len(now.servers))
    for server in now.servers if before.servers else ():
        if server not in before.servers:
            log.info("Server %s has joined", server)


def _tell_progress(client: Client, status: Status, last: Report) -> Report:
    """Log what the servers have seen, if it is more than last time; return it."""
    try:
        report = client.report().result(ANSWER)
    except (CaffeError, TimeoutError):
        return last
    if report.clocks and report.clocks != last.clocks:
        clock = max(report.clocks.values())
        iteration = (status.iteration or 0) + (clock - status.clock) * status.every
        log.info(
            "Iteration %d; pushes by worker: %s; received %.1f MB, sent %.1f MB; replicas %d "
            "pushes behind",
            iteration,
            ", ".join(f"{worker}: {report.clocks[worker]}" for worker in sorted(report.clocks)),
            *(report.received / 1e6, report.sent / 1e6, report.behind),
        )
    return report


def _end(engine: RayEngine, client: Client, options: ServerOptions) -> str | None:
    """Stop the trainer, write a snapshot and end the servers; return the snapshot's state."""
    client.ask("stop")
    _await_end(client, options.grace)
    held = client.ask("held")
    saved = write(held, options.prefix) if held else None
    if saved:
        log.info('The servers "%s" end; %s has what they held', options.name, saved)
    else:
        log.info('The servers "%s" end; they held nothing', options.name)
    client.ask("refuse", f'the servers "{options.name}" were ended: --snapshot {saved} goes on')
    _await_end(client, ANSWER)
    engine.end_actors()
    return saved


def _await_end(client: Client, seconds: float) -> None:
    """Return when trainer and workers have gone, or after `seconds`."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        status: Status = client.ask("status")
        if not (status.trainer or status.members):
            break
        client.poll()
        time.sleep(LOOK)
