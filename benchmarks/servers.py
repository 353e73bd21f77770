"""Deaths and rates of a parameter server over an embedded Ray, on one machine.

python benchmarks/servers.py rate [--mb 244]
python benchmarks/servers.py kills|stops --of servers|workers [--count 20]

`rate`: a worker pushes and pulls at three servers, with one copy of each range and with two.
`kills`: three workers push while servers, or workers, are killed at random, one at a time; a worker
that died is replaced by one with the next number. `stops`: they are stopped (SIGSTOP), and go on
(SIGCONT) when the others have gone on without them for a while: then they must end.

Each worker adds 1, and the number of its push, to two elements of each range, which are its own: so
it is known of each worker whether all its pushes counted once. A push on which its worker died
may count or not. Also printed: the longest time from one push of a worker to its next, but for those
that were stopped; how soon the view was without who died or stopped; and the time from the start
of a process to the first push of a worker that joined.
"""

import argparse
import contextlib
import itertools
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np

from caffepy.core.errors import SyncError
from caffepy.parallel.parameter_server.client import Client
from caffepy.parallel.parameter_server.messages import COORDINATOR, DeadPeerError, Rule, View
from caffepy.parallel.parameter_server.ranges import Blob, KeyRange, key_ranges
from caffepy.parallel.parameter_server.ray_cluster import connect
from caffepy.parallel.parameter_server.ray_engine import RayEngine

STEPS = 8
WORKERS = 3
DEADLINE = 5.0
"""Seconds after which a silent worker is left out."""


def start(ranges: list[KeyRange], replicas: int, slack: float = 4) -> RayEngine:
    size = ranges[-1].stop
    engine = connect("local", "benchmark", 12 * size)
    engine.spawn_coordinator(servers=3, replicas=replicas, deadline=DEADLINE)
    zeros = [np.zeros(r.stop - r.start, np.float32) for r in ranges]
    engine.call(COORDINATOR, "start", ranges, zeros, Rule(slack=slack)).result(200)
    engine.call(COORDINATOR, "watch")
    return engine


def rate(mb: int) -> None:
    ranges = key_ranges([Blob("fc", 0, mb * 250_000)])
    for replicas in (1, 2):
        engine = start(ranges, replicas)
        client = Client(engine, 0)
        client.join(1)
        change = [np.ones(r.stop - r.start, np.float32) for r in ranges]
        seconds = []
        for _ in range(STEPS):
            begun = time.perf_counter()
            client.push(change)
            pushed = time.perf_counter()
            client.pull()
            seconds.append((pushed - begun, time.perf_counter() - pushed))
        push, pull = np.median(seconds[1:], axis=0)
        click.echo(
            f"{mb} MB, 3 servers, {replicas} copies: push {mb / push / 1e3:.2f} GB/s, pull "
            f"{mb / pull / 1e3:.2f} GB/s, both {2 * mb / (push + pull) / 1e3:.2f} GB/s"
        )
        client.leave()
        engine.close()


def since_start() -> float:
    """Return the seconds since this process began."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    up = float(Path("/proc/uptime").read_text().split()[0])
    return up - ticks / os.sysconf("SC_CLK_TCK")


class Journal:
    """Notes of a worker in a file: its process, and of each push when it was counted, and among
    how many members; with the first the seconds since the process began.
    """

    def __init__(self, folder: Path, worker: int) -> None:
        self.path = folder / str(worker)

    def pushes(self) -> list[tuple[float, int, float]]:
        lines = self.path.read_text().splitlines()[1:] if self.path.exists() else []
        return [(float(t), int(m), float(s)) for t, m, s in map(str.split, lines)]

    def process(self) -> int:
        return int(self.path.read_text().split()[0])


class Audited(Client):
    """Knows among how many members its last push was averaged."""

    members = 0

    def _call(self, server: str, method: str, *arguments: Any) -> "Future[Any]":
        if method == "push":
            self.members = arguments[0][0].members
        return super()._call(server, method, *arguments)


SLOTS = 300
"""Most workers, the dead included."""

UNIT = 12
"""Value of a push, times the members: 1, 2, 3, 4 or 6."""


def push_for(engine: RayEngine, worker: int, folder: Path, together: int) -> int:
    """Push and pull until there is a file "over"; return how many calls went out again."""
    with Journal(folder, worker).path.open("w", buffering=1) as journal:
        journal.write(f"{os.getpid()}\n")
        client = Audited(engine, worker)
        client.join(1)
        client.await_members(together)
        number = 0
        while not (folder / "over").exists():
            number += 1
            own = np.zeros(2 * SLOTS, np.float32)
            own[worker], own[SLOTS + worker] = UNIT, UNIT * number
            client.push([own] * len(client.view.ranges))
            journal.write(f"{time.monotonic()} {client.members} {since_start()}\n")
            client.pull()
        client.leave()
        return client.again


class Workers:
    """Workers that push; who dies is replaced."""

    def __init__(self, engine: RayEngine, folder: Path) -> None:
        self._engine, self._folder = engine, folder
        self.running: dict[int, Future[Any]] = {}
        self.journals: list[Journal] = []
        for _ in range(WORKERS):
            self._spawn(WORKERS)

    def _spawn(self, together: int) -> None:
        worker = len(self.journals)
        self.journals.append(Journal(self._folder, worker))
        future = self._engine.spawn_worker(worker, push_for, worker, self._folder, together)
        self.running[worker] = future

    def replace_dead(self) -> None:
        for worker, future in list(self.running.items()):
            if future.done():
                assert isinstance(future.exception(), SyncError), future
                del self.running[worker]
                self._spawn(1)

    def all_push(self) -> bool:
        self.replace_dead()
        return all(len(self.journals[worker].pushes()) > 2 for worker in self.running)

    def end(self) -> int:
        (self._folder / "over").touch()
        return sum(future.result(60) for future in self.running.values())


def view(engine: RayEngine) -> View:
    while True:
        with contextlib.suppress(DeadPeerError):
            found: View = engine.call(COORDINATOR, "current").result(60)
            return found


def is_running(process: int) -> bool:
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def wait_for(condition: Callable[[], bool]) -> float:
    """Return the seconds until this became true."""
    begun = time.monotonic()
    while not condition():
        if time.monotonic() > begun + 60:
            raise TimeoutError("for a minute it did not become true")
        time.sleep(0.02)
    return time.monotonic() - begun


def faults(what: str, of: str, count: int) -> None:
    ranges = key_ranges([Blob(f"blob{i}", 2 * SLOTS * i, 2 * SLOTS) for i in range(12)])
    engine = start(ranges, replicas=2, slack=1)
    noticed, stopped = list[float](), set[int]()
    with tempfile.TemporaryDirectory() as name:
        workers = Workers(engine, Path(name))
        for _ in range(count):
            wait_for(lambda: len(view(engine).servers) == 3 and workers.all_push())
            time.sleep(random.random())
            victim: Any
            if of == "servers":
                victim = random.choice(view(engine).servers)
                process = engine.call(victim, "ping").result(60)[1]
            else:
                victim = random.choice(list(workers.running))
                process = workers.journals[victim].process()
            os.kill(process, signal.SIGKILL if what == "kills" else signal.SIGSTOP)

            def is_out(victim: Any = victim) -> bool:
                now = view(engine)
                return victim not in now.servers and victim not in now.members

            noticed.append(wait_for(is_out))
            if what == "stops":
                stopped.add(victim)
                time.sleep(1 + 2 * random.random())
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGCONT)
                wait_for(lambda process=process: not is_running(process))
        wait_for(lambda: len(view(engine).servers) == 3 and workers.all_push())
        time.sleep(1)
        again = workers.end()
        flat = np.concatenate(engine.call(COORDINATOR, "cut").result(60)[0])
        engine.close()
        pushes = [journal.pushes() for journal in workers.journals]
    own = flat.reshape(len(ranges), 2, SLOTS)
    audit([[m for _, m, _ in own] for own in pushes], own, set(workers.running))
    pauses = [
        after[0] - before[0]
        for worker, own in enumerate(pushes)
        for before, after in itertools.pairwise(own)
        if worker not in stopped
    ]
    starts = [own[0][2] for own in pushes[WORKERS:] if own]
    click.echo(
        f"{what} of {count} {of}: {sum(map(len, pushes))} pushes, each counted once; "
        f"{again} calls of the last workers went out again; longest pause {max(pauses):.2f} s; "
        f"out of the view after {median(noticed):.2f} s, at most {max(noticed):.2f} s"
    )
    if starts:
        click.echo(
            f"{len(starts)} new workers pushed {median(starts):.2f} s after the start of their "
            f"process, at most {max(starts):.2f} s"
        )
    click.echo(f"load {os.getloadavg()[0]:.1f}")


def audit(members: list[list[int]], values: np.ndarray, alive: Collection[int]) -> None:
    """Check the sums of (ranges, 2, SLOTS) against the pushes of each worker."""
    for worker, own in enumerate(members):
        sums = np.zeros(2, np.float32)
        for number, m in enumerate(own, 1):
            sums += np.float32([UNIT, UNIT * number]) * np.float32(1 / m)
        possible = [sums]
        if worker not in alive:  # one more may have come without an answer
            last = np.float32([UNIT, UNIT * (len(own) + 1)])
            possible += [sums + last * np.float32(1 / m) for m in (1, 2, 3, 4)]
        for found in values[:, :, worker]:
            assert any((found == sums).all() for sums in possible), (worker, found, possible)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["rate", "kills", "stops"])
    parser.add_argument("--mb", type=int, default=244)
    parser.add_argument("--of", choices=["servers", "workers"], default="servers")
    parser.add_argument("--count", type=int, default=20)
    options = parser.parse_args()
    if options.what == "rate":
        rate(options.mb)
    else:
        faults(options.what, options.of, options.count)
