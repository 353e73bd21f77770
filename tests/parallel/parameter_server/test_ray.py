"""Servers, the coordinator and workers in processes of Ray, which die."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from caffepy.core.abandoned import at_work
from caffepy.core.errors import UsageError
from caffepy.parallel.parameter_server import ray_engine
from caffepy.parallel.parameter_server.client import Client
from caffepy.parallel.parameter_server.messages import (
    COORDINATOR,
    DeadPeerError,
    Rule,
    StaleViewError,
    View,
)
from caffepy.parallel.parameter_server.ranges import Blob, key_ranges
from caffepy.parallel.parameter_server.ray_cluster import connect
from caffepy.parallel.parameter_server.ray_engine import RayEngine

pytest.importorskip("ray", reason="Ray is not installed")

RANGES = key_ranges([Blob(f"blob{i}", 10 * i, 10) for i in range(12)], largest=5)
SIZE = 120


@pytest.fixture(scope="module")
def cluster(ray_address: str) -> Iterator[RayEngine]:
    """Three servers with two copies of each range."""
    engine = connect(ray_address, "test")
    engine.spawn_coordinator(servers=3, replicas=2)
    zeros = [np.zeros(r.stop - r.start, np.float32) for r in RANGES]
    engine.call(COORDINATOR, "start", RANGES, zeros, Rule(slack=4)).result(60)
    engine.call(COORDINATOR, "watch")
    yield engine
    engine.close()


def values(engine: RayEngine) -> np.ndarray:
    while True:
        with contextlib.suppress(DeadPeerError):
            return np.concatenate(engine.call(COORDINATOR, "cut").result(60)[0])


def split(flat: np.ndarray) -> list[np.ndarray]:
    return [flat[r.start : r.stop] for r in RANGES]


def push_ones(engine: RayEngine, worker: int, clocks: int, members: int) -> tuple[int, float]:
    """Push `members` at each clock, which adds one to all values; return the number of pushes that
    were sent again, and the longest pause.
    """
    client = Client(engine, worker)
    client.join(1)
    longest = 0.0
    for _ in range(clocks):
        begun = time.monotonic()
        client.push(split(np.full(SIZE, members, np.float32)))
        client.pull()
        longest = max(longest, time.monotonic() - begun)
    client.leave()
    return client.again, longest


def pid(engine: RayEngine, server: str) -> int:
    return engine.call(server, "ping").result(60)[1]


def test_each_push_counts_once(cluster: RayEngine) -> None:
    before = values(cluster)
    again, _ = cluster.spawn_worker(0, push_ones, 0, 20, 1).result(60)
    assert again == 0
    np.testing.assert_array_equal(values(cluster) - before, 20)


def test_errors_of_ours_travel_as_they_are(cluster: RayEngine) -> None:
    with pytest.raises(StaleViewError, match="there is a later view"):
        cluster.call("server-0", "pull", 0, 0, 0, [0], None, [-1], False).result(60)


def test_a_name_that_nobody_has_is_a_dead_peer(cluster: RayEngine) -> None:
    with pytest.raises(DeadPeerError, match="server-99 has died or cannot be reached"):
        cluster.call("server-99", "ping").result(60)


class Notes:
    """An actor that remembers the order of its calls."""

    def __init__(self, engine: RayEngine) -> None:
        self.noted: list[int] = []

    async def note(self, number: int, array: np.ndarray) -> None:
        self.noted.append(number)

    async def read(self) -> list[int]:
        return self.noted

    async def zeros(self) -> np.ndarray:
        return np.zeros(500_000, np.float32)


def test_memory_of_answers_is_soon_used_again(cluster: RayEngine) -> None:
    """New memory is slow: each of its pages must be made first."""
    cluster.spawn("notes-3", Notes)
    places = set[int]()
    for _ in range(20):
        places.add(cluster.call("notes-3", "zeros").result(60).ctypes.data)
        time.sleep(0.02)
    assert len(places) < 10
    cluster.kill("notes-3")


def test_calls_go_on_after_one_with_wrong_arguments(cluster: RayEngine) -> None:
    with pytest.raises(Exception, match="positional argument"):
        cluster.call("server-0", "ping", 1).result(60)
    assert cluster.call("server-0", "ping").result(60)


def test_calls_of_one_caller_begin_in_their_order(cluster: RayEngine) -> None:
    cluster.spawn("notes", Notes)
    large, small = np.zeros(500_000, np.float32), np.zeros(1, np.float32)
    calls = [cluster.call("notes", "note", i, small if i % 3 else large) for i in range(60)]
    for call in calls:
        call.result(60)
    assert cluster.call("notes", "read").result(60) == list(range(60))
    cluster.kill("notes")


def test_calls_go_on_after_one_that_failed_before_it_began(cluster: RayEngine) -> None:
    cluster.spawn("notes-2", Notes)
    line = cluster._to("notes-2")
    lost, _ = line.begin()  # a call that never arrives
    waits = cluster.call("notes-2", "note", 1, np.zeros(1))
    with pytest.raises(TimeoutError):
        waits.result(1)
    line.end(lost)
    cluster.call("notes-2", "note", 2, np.zeros(1)).result(60)
    waits.result(60)
    assert cluster.call("notes-2", "read").result(60) == [1, 2]
    cluster.kill("notes-2")


def test_a_worker_that_dies_is_heard_of(cluster: RayEngine) -> None:
    death = cluster.spawn_worker(7, die)
    with pytest.raises(DeadPeerError, match="worker-7"):
        death.result(60)
    assert cluster.spawn_worker(7, lambda engine, x: x + 1, 41).result(60) == 42


def die(engine: RayEngine) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_no_push_is_lost_or_counted_twice_when_servers_are_killed(cluster: RayEngine) -> None:
    before = values(cluster)
    worker = cluster.spawn_worker(0, push_ones, 0, 400, 1)
    killed = set[int]()
    while not worker.done():
        servers = cluster.call(COORDINATOR, "current").result(60).servers
        with contextlib.suppress(DeadPeerError):
            pids = [pid(cluster, server) for server in servers]
            if len(pids) == 3:  # so that one may die
                killed.add(victim := random.choice(pids))
                os.kill(victim, signal.SIGKILL)
        time.sleep(0.5)
    again, _ = worker.result()
    assert killed
    assert again > 0
    np.testing.assert_array_equal(values(cluster) - before, 400)


def test_the_coordinator_may_be_killed(cluster: RayEngine) -> None:
    before = values(cluster)
    worker = cluster.spawn_worker(0, push_ones, 0, 300, 1)
    wait_for(lambda: 0 in view(cluster).members)
    epoch, killed = view(cluster).epoch, pid(cluster, COORDINATOR)
    os.kill(killed, signal.SIGKILL)
    worker.result(120)
    np.testing.assert_array_equal(values(cluster) - before, 300)
    assert pid(cluster, COORDINATOR) != killed
    assert view(cluster).epoch > epoch


def test_a_server_that_stops_is_replaced(cluster: RayEngine) -> None:
    wait_for(lambda: len(view(cluster).servers) == 3)
    before, stopped = values(cluster), view(cluster).servers[1]
    process = pid(cluster, stopped)
    worker = cluster.spawn_worker(0, push_ones, 0, 300, 1)
    wait_for(lambda: 0 in view(cluster).members)
    os.kill(process, signal.SIGSTOP)
    try:
        wait_for(lambda: stopped not in view(cluster).servers)
        worker.result(120)
        np.testing.assert_array_equal(values(cluster) - before, 300)
    finally:
        with contextlib.suppress(ProcessLookupError):  # the coordinator ended it
            os.kill(process, signal.SIGKILL)


def test_others_go_on_when_a_worker_is_killed(cluster: RayEngine) -> None:
    before = values(cluster)
    killed = cluster.spawn_worker(1, stop_after, 1, 3)
    wait_for(lambda: 1 in view(cluster).members)
    worker = cluster.spawn_worker(0, push_ones, 0, 100, 1)
    with pytest.raises(DeadPeerError, match="worker-1"):
        killed.result(60)
    worker.result(60)
    assert set(view(cluster).members) == set()
    added = values(cluster) - before  # one or a half at each clock, from each
    assert 50 <= added.min() == added.max() <= 103


def stop_after(engine: RayEngine, worker: int, clocks: int) -> None:
    client = Client(engine, worker)
    client.join(1)
    for _ in range(clocks):
        client.push(split(np.ones(SIZE, np.float32)))
    wait_for(lambda: len(client.ask("current").members) > 1)
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def view(engine: RayEngine) -> View:
    while True:
        with contextlib.suppress(DeadPeerError):
            found: View = engine.call(COORDINATOR, "current").result(60)
            return found


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


SOLVER = f"""
net: "{Path(__file__).parents[2]}/golden/digits/train_val.prototxt" test_iter: 1
test_interval: 100 base_lr: 0.05 lr_policy: "fixed" max_iter: 6 snapshot_after_train: false
"""


def test_servers_outlive_their_trainer_and_their_command(
    cluster: RayEngine, tmp_path: Path
) -> None:
    """The command is killed; --stop still saves what the servers hold, and ends them."""
    (tmp_path / "solver.prototxt").write_text(SOLVER)
    caffepy = [sys.executable, "-m", "caffepy"]
    named = ("--cluster", cluster.address, "--name", "digits")
    command = subprocess.Popen([*caffepy, "server", *named], cwd=tmp_path, stderr=subprocess.PIPE)
    with command:
        assert command.stderr
        assert any(b"wait for a trainer" in line for line in command.stderr)
        command.kill()
    trainer = ("train", "--solver", "solver.prototxt", *named, "--nodes", "1", "--every", "3")
    subprocess.run([*caffepy, *trainer], cwd=tmp_path, check=True, timeout=120)
    client = Client(cluster.detached()["digits"], 0)
    wait_for(lambda: not client.ask("status").keeper)
    status = client.ask("status")
    assert (status.iteration, status.clock) == (6, 2)
    subprocess.run([*caffepy, "server", *named, "--stop"], cwd=tmp_path, check=True, timeout=120)
    assert (tmp_path / "digits_iter_6.solverstate").exists()
    wait_for(lambda: not cluster.detached())


def test_a_local_cluster_listens_on_loopback_only(cluster: RayEngine) -> None:
    found = listening(os.getpid())
    assert len(found) > 5
    assert [told for told in found if not told[0].endswith("0100007F")] == []


def listening(root: int) -> list[tuple[str, str]]:
    """Return the addresses, in the kernel's hexadecimal, at which a process and its descendants
    listen, each with the command.
    """
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
    family = {root}
    while more := {p for p, parent in parents.items() if parent in family} - family:
        family |= more
    sockets: dict[str, str] = {}
    for process in family:
        for fd in Path(f"/proc/{process}/fd").glob("*"):
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ")
                sockets[os.readlink(fd)] = command
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return [
        (line[1].partition(":")[0], sockets[inode])
        for line in lines
        if line[3] == "0A" and (inode := f"socket:[{line[9]}]") in sockets
    ]


def test_the_process_does_not_wait_for_threads_of_a_ray_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where the head has gone while a worker was to be started."""
    engine, hangs = RayEngine(), threading.Event()
    monkeypatch.setattr(ray_engine, "ENDING", 0.1)
    monkeypatch.setattr(engine, "_shut_down", hangs.wait)
    engine.store.away = 1.0
    engine.close()
    assert at_work()
    hangs.set()


def test_a_cluster_without_a_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/nonexistent")
    for key in ("RAY_AUTH_TOKEN", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(key, raising=False)
    with pytest.raises(UsageError, match=r"needs a token.*RAY_AUTH_MODE=disabled goes on without"):
        connect("10.0.0.1:6379", "test")


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        UsageError, match=r"--cluster auto needs Ray .*pip install 'caffepy\[ray\]'"
    ):
        connect("auto", "test")
