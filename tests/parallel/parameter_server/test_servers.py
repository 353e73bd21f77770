"""Workers, servers and a coordinator in threads: every push counts once, whoever dies."""

import asyncio
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from math import inf
from typing import Any

import numpy as np
import pytest

from caffepy.core.errors import SyncError, UsageError
from caffepy.parallel.parameter_server import coordinator, heartbeat, server_calls
from caffepy.parallel.parameter_server.client import Client
from caffepy.parallel.parameter_server.coordinator import Coordinator
from caffepy.parallel.parameter_server.leases import Lease
from caffepy.parallel.parameter_server.messages import (
    COORDINATOR,
    DeadPeerError,
    Push,
    Rule,
    StaleViewError,
    View,
)
from caffepy.parallel.parameter_server.range_state import RangeState
from caffepy.parallel.parameter_server.ranges import Blob, key_ranges
from tests.parallel.parameter_server.threads_engine import ThreadsEngine, serving

RANGES = key_ranges([Blob(f"blob{i}", 10 * i, 10, row=5 * (i % 2)) for i in range(12)], largest=5)
SIZE = 120


def servers(
    rule: Rule, count: int = 3, replicas: int = 2, watch: bool = True
) -> AbstractContextManager[ThreadsEngine]:
    engine = ThreadsEngine()
    return serving(engine, RANGES, rule, deadline=1.0, count=count, replicas=replicas, watch=watch)


def split(flat: np.ndarray) -> list[np.ndarray]:
    return [flat[r.start : r.stop] for r in RANGES]


def run(workers: Sequence[Callable[[], Any]], seconds: float = 60) -> list[Any]:
    results: list[Any] = [None] * len(workers)

    def work(i: int) -> None:
        try:
            results[i] = workers[i]()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(workers))]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0, end - time.monotonic()))
    for result in results:
        if isinstance(result, BaseException):
            raise result  # others may wait for that worker
    assert not any(thread.is_alive() for thread in threads), "a worker hangs"
    return results


def ones(engine: ThreadsEngine, worker: int, clocks: int, members: int) -> Callable[[], Client]:
    """A worker that pushes `members` at each clock: each adds one to all values."""

    def work() -> Client:
        client = clients[worker]
        for _ in range(clocks):
            client.push(split(np.full(SIZE, members, np.float32)))
            client.pull()
        return client

    clients = engine.__dict__.setdefault("clients", {})
    if worker not in clients:
        clients[worker] = Client(engine, worker, patience=10)
        clients[worker].join(1)
    return work


def values(engine: ThreadsEngine) -> np.ndarray:
    return np.concatenate(engine.call(COORDINATOR, "cut").result(20)[0])


@pytest.mark.parametrize("slack", [0, 1, 4, inf])
def test_each_push_counts_once(slack: float) -> None:
    with servers(Rule(slack)) as engine:
        run([ones(engine, i, 20, 3) for i in range(3)])
        np.testing.assert_array_equal(values(engine), 60)


@pytest.mark.parametrize("slack", [0, 2, inf])
def test_no_push_is_lost_or_counted_twice_when_servers_die(slack: float) -> None:
    random.seed(int(min(slack, 9)))
    with servers(Rule(slack)) as engine:
        work = [ones(engine, i, 150, 3) for i in range(3)]
        killed = threading.Event()

        def kill() -> None:
            for _ in range(4):
                time.sleep(0.3)
                alive = [n for n, a in engine.actors.items() if n != COORDINATOR and not a.dead]
                if len(alive) > 2:
                    engine.kill(random.choice(alive))
                    killed.set()

        run([*work, kill])
        assert killed.is_set()
        np.testing.assert_array_equal(values(engine), 450)


@pytest.mark.parametrize("slack", [0, 4])
def test_a_coordinator_that_is_started_again_goes_on(slack: float) -> None:
    with servers(Rule(slack)) as engine:
        work = [ones(engine, i, 150, 3) for i in range(3)]

        def again() -> None:
            time.sleep(0.3)
            engine.kill(COORDINATOR)
            engine.kill("server-1")  # whose replacement the next coordinator starts
            engine.respawn(COORDINATOR, lambda: Coordinator(engine, 3, 2, deadline=1.0))

        run([*work, again])
        np.testing.assert_array_equal(values(engine), 450)
        run([lambda: wait_for(lambda: len(view(engine).servers) == 3)])
        assert "server-3" in view(engine).servers
        assert set(view(engine).members) == {0, 1, 2}


def in_place(values: np.ndarray, change: np.ndarray, state: object) -> np.ndarray:
    values += change
    return values


@pytest.mark.parametrize(
    ("update", "error", "told"),
    [
        (in_place, ValueError, "read-only"),
        (lambda values, change, state: in_place(change, values, state), ValueError, "read-only"),
        (lambda values, change, state: values[:3], UsageError, r"given: 10, not .* shape \(3,\)"),
        (lambda values, change, state: None, UsageError, r"given: 10, not .* shape \(\)"),
    ],
    ids=["writes to values", "writes to the change", "some values", "nothing"],
)
def test_an_update_that_gives_no_new_values_is_an_error(
    update: Any, error: type[Exception], told: str
) -> None:
    state = RangeState(np.ones(10, np.float32), Rule(0, update=update), is_mean=False)
    state.set_members(View(members={0: 0}))
    with pytest.raises(error, match=told):
        state.push(Push(0, 0, 0, 1, np.ones(10, np.float32)), np.array)
    np.testing.assert_array_equal(state.values, 1)


def test_values_are_float32_whatever_an_update_computes_in() -> None:
    rule = Rule(0, update=lambda values, change, state: values + np.float64(0.5) * change)
    state = RangeState(np.ones(10, np.float32), rule, is_mean=False)
    state.set_members(View(members={0: 0}))
    assert state.push(Push(0, 0, 0, 1, np.ones(10, np.float32)), np.array)
    assert state.values.dtype == np.float32
    np.testing.assert_array_equal(state.values, 1.5)


@pytest.mark.parametrize("call", ["push", "lease", "cut"])
def test_workers_hear_that_all_servers_have_died_from_a_coordinator_that_was_started_again(
    call: str,
) -> None:
    with servers(Rule(0)) as engine:
        first, second = (Client(engine, worker) for worker in range(2))
        for client in (first, second):
            client.join(1)
        for name in ("server-0", "server-1", "server-2", COORDINATOR):
            engine.kill(name)
        engine.respawn(COORDINATOR, lambda: Coordinator(engine, 3, 2, deadline=1.0))
        work = {
            "push": lambda: first.push(split(np.ones(SIZE, np.float32))),
            "lease": lambda: first.lease(0),
            "cut": first.cut,
        }
        with pytest.raises(SyncError, match="the coordinator and all servers have died"):
            run([work[call]], 20)
        with pytest.raises(SyncError, match="the coordinator and all servers have died"):
            run([second.pull], 20)
        for client in (first, second):
            client.heartbeat.stop()


def test_a_server_that_stops_is_replaced() -> None:
    with servers(Rule(2)) as engine:
        work = [ones(engine, i, 100, 3) for i in range(3)]

        def stop() -> None:
            time.sleep(0.2)
            engine.stop("server-1")
            wait_for(
                lambda: len(view(engine).servers) == 3 and view(engine).servers[2] != "server-2"
            )

        engine.kill_takes_effect = False  # as for a process that hangs in the kernel
        run([*work, stop], 15)
        np.testing.assert_array_equal(values(engine), 300)
        engine.resume("server-1")


def test_a_server_that_answers_later_and_later_is_not_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While all of a loaded machine are slow; one that stops then is found all the same."""
    monkeypatch.setattr(coordinator, "PING", 0.1)
    for name, seconds in {"ANSWER": 1.0, "LONGEST": 2.0}.items():
        monkeypatch.setattr(server_calls, name, seconds)
    delays, over = [0.6, 1.3], threading.Event()

    async def ping_late() -> tuple[str, int]:
        if not delays:
            over.set()
        await asyncio.sleep(delays.pop(0) if delays else 0.0)
        return "host", 1

    with servers(Rule(0)) as engine:
        epoch = view(engine).epoch
        engine.actors["server-1"].object.ping = ping_late
        assert over.wait(5), "it was replaced"
        run([ones(engine, i, 5, 3) for i in range(3)])
        assert view(engine).servers == ("server-0", "server-1", "server-2")
        assert view(engine).epoch == epoch + 3  # the workers have joined
        np.testing.assert_array_equal(values(engine), 15)
        engine.stop("server-1")
        run([lambda: wait_for(lambda: "server-1" not in view(engine).servers)], 20)
        engine.resume("server-1")


def test_a_coordinator_that_stops_for_a_while_leaves_nobody_out() -> None:
    with servers(Rule(2)) as engine:
        work = [ones(engine, i, 10, 3) for i in range(3)]
        epoch = view(engine).epoch
        time.sleep(0.6)  # it is in a ping, or between two
        engine.stop(COORDINATOR)
        time.sleep(2.7)  # more than a worker may be silent, and a server may take for a ping
        engine.resume(COORDINATOR)
        time.sleep(0.7)
        run(work)
        assert view(engine).epoch == epoch
        np.testing.assert_array_equal(values(engine), 30)


def test_no_view_is_told_that_may_die_with_the_coordinator() -> None:
    with servers(Rule(2), watch=False) as engine:
        old, stopped = view(engine), set[str]()

        def stop(actor: str, method: str) -> None:
            if method == "install":
                engine.stop(actor)
                stopped.add(actor)

        engine.before = stop
        join = engine.call(COORDINATOR, "join", 0, 1)
        run([lambda: wait_for(lambda: stopped == set(old.servers))])
        assert view(engine).epoch == old.epoch
        for server in stopped:
            engine.resume(server)
        told, _ = join.result(10)
        assert told.epoch == view(engine).epoch == old.epoch + 1


def view(engine: ThreadsEngine) -> View:
    found: View = engine.call(COORDINATOR, "current").result(20)
    return found


def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.05)


@pytest.mark.parametrize("slack", [0, 2])
def test_a_worker_that_dies_within_a_push_holds_up_no_cut(slack: float) -> None:
    with servers(Rule(slack)) as engine:
        for worker in range(2):
            engine.call(COORDINATOR, "join", worker, 1).result(10)  # which do not beat
        now = view(engine)
        part = [Push(i, 0, 0, 2, np.ones(5, np.float32)) for i in now.of_primary("server-0")]
        engine.call("server-0", "push", now.epoch, part).result(10)  # the others get none
        engine.call(COORDINATOR, "cut").result(12)
        assert 0 not in view(engine).members


def test_a_replica_does_not_confirm_a_push_if_it_missed_one_before() -> None:
    with servers(Rule(inf), watch=False) as engine:
        engine.call(COORDINATOR, "join", 0, 1).result(10)
        now = view(engine)
        _, replica = now.owners[0]
        version = engine.call(replica, "freeze").result(10)[0][0]
        later = [(version + 2, Push(0, 0, 1, 1, np.ones(5, np.float32)))]
        with pytest.raises(StaleViewError, match="did not arrive"):
            engine.call(replica, "replicate", now.epoch, later).result(10)


def test_a_server_that_dies_within_a_cut_costs_no_push() -> None:
    with servers(Rule(1)) as engine:
        run([ones(engine, i, 5, 2) for i in range(2)])
        killed = set[str]()

        def kill(name: str, method: str) -> None:
            if method == "cut" and name == "server-1":
                killed.add(name)
                engine.kill(name)

        engine.before = kill
        np.testing.assert_array_equal(values(engine), 10)
        assert killed


@pytest.mark.parametrize("slack", [0, inf])
def test_all_ranges_average_a_push_among_as_many_workers(slack: float) -> None:
    """While workers join and leave, and cuts are taken."""
    with servers(Rule(slack)) as engine:
        over = threading.Event()

        def join_and_leave(first: int) -> None:
            for worker in range(first, first + 5):
                client = Client(engine, worker, patience=10)
                client.join(1)
                for _ in range(5):
                    client.push(split(np.full(SIZE, 12 * worker, np.float32)))
                    client.pull()
                client.leave()

        def work() -> None:
            ones(engine, 0, 100, 12)()
            clients[0].leave()
            over.set()

        def cut() -> None:
            while not over.is_set():
                all_ranges_have_the_same(values(engine))

        ones(engine, 0, 0, 1)
        clients: dict[int, Client] = engine.__dict__["clients"]
        run([work, cut, lambda: join_and_leave(1), lambda: join_and_leave(11)])
        all_ranges_have_the_same(values(engine))


def test_a_push_within_which_a_worker_joins_is_averaged_alike_in_all_ranges() -> None:
    with servers(Rule(inf)) as engine:
        client = Client(engine, 0, patience=10)
        client.join(1)
        joining = iter(range(1, 5))
        last = list(dict.fromkeys(owners[0] for owners in view(engine).owners))[-1]

        def join(name: str, method: str) -> None:
            if method == "push" and (newcomer := next(joining, 0)) and name == last:
                time.sleep(0.1)  # the parts for the other servers are counted
                engine.call(COORDINATOR, "join", newcomer, 1).result(10)

        engine.before = join
        for _ in range(4):
            client.push(split(np.full(SIZE, 12, np.float32)))
        all_ranges_have_the_same(values(engine))
        assert client.again


def all_ranges_have_the_same(flat: np.ndarray) -> None:
    np.testing.assert_array_equal(flat, flat[0])


def test_a_push_of_which_some_ranges_died_with_its_worker_is_averaged_alike_in_all() -> None:
    with servers(Rule(0)) as engine:
        clients = [Client(engine, i, patience=10) for i in range(2)]
        for client in clients:
            client.join(1)
        engine.call(COORDINATOR, "join", 2, 1).result(10)
        now = view(engine)
        push = [Push(i, 2, 0, 3, np.zeros(5, np.float32)) for i in now.of_primary("server-0")]
        assert 0 < len(push) < len(RANGES)
        engine.call("server-0", "push", now.epoch, push).result(10)

        def work(client: Client) -> Callable[[], None]:
            return lambda: client.push(split(np.full(SIZE, 3, np.float32)))

        run([work(clients[0])])  # all but one before its death, in all ranges
        engine.call(COORDINATOR, "leave", 2).result(10)
        run([work(clients[1])])
        np.testing.assert_array_equal(values(engine), 2)


def test_a_coordinator_that_stops_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "SILENT", 0.5)
    with servers(Rule(2)) as engine:
        client = Client(engine, 0)
        client.join(1)
        stopped = engine.actors[COORDINATOR]
        engine.stop(COORDINATOR)
        assert run([lambda: client.lease(0)], 15) == [range(1)]
        assert stopped.dead
        client.heartbeat.stop()


def test_the_first_worker_tells_that_the_coordinator_was_started_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with servers(Rule(2)) as engine:
        clients = [Client(engine, i, patience=10) for i in range(2)]
        for client in clients:
            client.join(1)
        for _ in range(2):
            engine.kill(COORDINATOR)
            engine.respawn(COORDINATOR, lambda: Coordinator(engine, 3, 2, deadline=1.0))
            for client in clients:
                client.push(split(np.ones(SIZE, np.float32)))
        for client in clients:
            client.heartbeat.stop()
    told = "The coordinator has died and was started again; the run goes on"
    said = [record.getMessage() for record in caplog.records if record.name.endswith("client")]
    assert said.count(told) == 2


@pytest.mark.parametrize("slack", [0, 4])
def test_no_batch_is_dealt_twice_when_the_coordinator_dies(slack: float) -> None:
    with servers(Rule(slack)) as engine:
        clients = [Client(engine, i, patience=10) for i in range(3)]
        for client in clients:
            client.join(2)
        dealt = [client.lease(0) for client in clients] + [clients[1].lease(1)]
        time.sleep(0.6)  # all workers beat
        engine.kill(COORDINATOR)
        engine.respawn(COORDINATOR, lambda: Coordinator(engine, 3, 2, deadline=1.0))
        dealt += [clients[i].lease(1) for i in (0, 2)]
        dealt += [client.lease(2) for client in clients]
        assert sorted(batch for lease in dealt for batch in lease) == list(range(18))
        if slack == 0:
            assert [lease[0] for lease in dealt] == [0, 1, 2, 7, 6, 8, 12, 13, 14]


@pytest.mark.parametrize("slack", [0, 2, inf])
@pytest.mark.parametrize("seed", [0, 1])
def test_each_batch_is_learned_from_once_when_workers_join_leave_and_die(
    slack: float, seed: int
) -> None:
    """Also those that a worker had in its hands when it died, and had read ahead when it left."""
    dice = random.Random(seed)
    with servers(Rule(slack), watch=False) as engine:
        learned: dict[int, list[int]] = {}

        def work(worker: int, clocks: int, ahead: int, share: int, end: str) -> Client:
            client = Client(engine, worker, patience=10)
            client.join(share)
            leases, first = dict[int, Lease](), client.clock
            own = learned[worker] = []
            while client.clock < first + clocks:
                for clock in range(client.clock, client.clock + 1 + ahead):
                    leases.setdefault(clock, client.lease(clock))
                client.push(split(np.zeros(SIZE, np.float32)))
                own += leases[client.clock - 1]
                if end == "last" and own[-1] >= fresh:
                    break
                client.pull()
            assert sorted(set(own)) == own  # data layers read forwards only
            if end == "dies":
                client.heartbeat.stop()  # it beats no more
                engine.call(COORDINATOR, "leave", worker).result(10)
            else:
                client.leave()
            return client

        def one_after_the_other(first: int) -> Callable[[], None]:
            given = [
                (dice.randrange(1, 15), dice.randrange(4), dice.choice([2, 2, 3]), end)
                for end in ("dies", "leaves", "dies", "dies", "leaves")
            ]
            return lambda: [work(first + i, *of) for i, of in enumerate(given)]

        dealer = engine.actors[COORDINATOR].object._dealer
        run([one_after_the_other(10 * k) for k in range(3)])
        fresh = dealer._next
        work(40, 1000, 0, 1, "last")  # takes what is to be dealt again
        batches = sorted(batch for own in learned.values() for batch in own)
        assert len(batches) > 100
        assert batches == list(range(len(batches)))


def test_a_coordinator_that_is_lost_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, calls = ThreadsEngine(), list[str]()

    def call(name: str, method: str, *arguments: object) -> "Future[Any]":
        calls.append(method)
        answer: Future[Any] = Future()
        answer.set_exception(DeadPeerError(name))
        return answer

    monkeypatch.setattr(engine, "call", call)
    client = Client(engine, 0, patience=0.1)
    with pytest.raises(DeadPeerError):
        client.cut()
    again = len(calls)
    assert again > 1
    with pytest.raises(DeadPeerError):
        client.collect()
    assert calls[again:] == ["collect"]
