"""Servers that outlive trainers, in threads: what the next trainer finds, and what is refused."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from caffepy.core.errors import CaffeError, ConfigError, DataError, UsageError
from caffepy.device.blob import Array
from caffepy.parallel.parameter_server import detached, heartbeat
from caffepy.parallel.parameter_server.client import Client
from caffepy.parallel.parameter_server.detached import DetachedCoordinator, Entrusted
from caffepy.parallel.parameter_server.kept import write
from caffepy.parallel.parameter_server.messages import COORDINATOR, Nesterov, Rule
from caffepy.parallel.parameter_server.ranges import Blob, key_ranges
from caffepy.parallel.parameter_server.worker import ServedWorkers
from caffepy.solver import Solver
from tests.parallel.parameter_server.test_worker import ITERATIONS, SETTINGS, TEXTS, Served
from tests.parallel.parameter_server.threads_engine import ThreadsEngine

HALF = ITERATIONS // 2


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadsEngine]:
    """An engine with a coordinator of two servers, to which somebody attends."""
    monkeypatch.setattr(heartbeat, "BEAT", 0.05)
    engine = ThreadsEngine()
    engine.spawn(COORDINATOR, lambda: DetachedCoordinator(engine, 2, 2, deadline=2))
    ask(engine, "attend", "a test")
    yield engine
    engine.close()


def ask(engine: ThreadsEngine, method: str, *arguments: object) -> Any:
    return engine.call(COORDINATOR, method, *arguments).result(20)


@pytest.mark.parametrize("solvers", [1, 2])
@pytest.mark.parametrize(
    ("case", "rule", "filters"),
    [
        ("random", Rule(0), "significant:1.6"),
        ("normalized", Rule(0), ""),
        ("plain", Rule(0, update=Nesterov(0.9, 0.7)), ""),
    ],
)
def test_a_trainer_goes_on_where_the_last_one_has_ended(
    case: str, rule: Rule, filters: str, solvers: int, servers: ThreadsEngine, tmp_path: Path
) -> None:
    """To the bit, and so does a run that resumes from the snapshot of the servers."""
    given: dict[str, Any] = {"filters": filters, "solvers": solvers}

    def finish(served: Served, solver: Solver, number: int) -> None:
        if number == 0:
            solver._finish()  # a pass that shows the last loss

    want = Served(2, TEXTS[case], rule, 3, **given)
    Served(2, TEXTS[case], rule, 3, until=HALF, servers=servers, work=finish, **given)
    status = ask(servers, "status")
    assert (status.iteration, status.clock, status.members) == (HALF, HALF // 3, ())
    state = write(ask(servers, "held"), str(tmp_path / "digits"))
    assert state == str(tmp_path / f"digits_iter_{HALF}.solverstate")
    for got in (
        Served(2, TEXTS[case], rule, 3, servers=servers, **given),
        Served(2, TEXTS[case], rule, 3, state=state, **given),
    ):
        for number, data in got.data.items():
            np.testing.assert_array_equal(data, want.data[number])
        assert got.recorder.losses[-1] == want.recorder.losses[-1]
    assert ask(servers, "status").clock == ITERATIONS // 3


def test_servers_hold_what_a_trainer_that_failed_has_pushed(
    servers: ThreadsEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pushes count, and its iterations with them."""
    iterated, entered = ServedWorkers.iterated, ServedWorkers.__enter__
    begun = dict[int, tuple[int, Array]]()

    def fail(workers: ServedWorkers) -> None:
        iterated(workers)
        if workers.solver.iter == 8:
            raise DataError("the record is damaged")

    def enter(workers: ServedWorkers) -> ServedWorkers:
        entered(workers)
        begun[workers.client.worker] = workers.solver.iter, workers.params.flat()
        return workers

    monkeypatch.setattr(ServedWorkers, "iterated", fail)
    with pytest.raises(DataError):
        Served(1, TEXTS["plain"], Rule(0), 2, servers=servers)
    held = ask(servers, "held")
    assert (held.kept.state.iteration, held.kept.iteration(held.clock)) == (0, 8)
    monkeypatch.setattr(ServedWorkers, "iterated", iterated)
    monkeypatch.setattr(ServedWorkers, "__enter__", enter)
    Served(3, TEXTS["plain"], Rule(0), 2, servers=servers)
    assert ask(servers, "status").clock == ITERATIONS // 2
    for iteration, flat in begun.values():
        assert iteration == 8
        for key_range, array in zip(held.ranges, held.cut.values, strict=True):
            np.testing.assert_array_equal(flat[key_range.start : key_range.stop], array)


def test_a_coordinator_that_was_started_again_has_what_was_left_behind(
    servers: ThreadsEngine,
) -> None:
    Served(1, TEXTS["plain"], Rule(0), 3, until=HALF, servers=servers)
    before = ask(servers, "held")
    servers.kill(COORDINATOR)
    servers.respawn(COORDINATOR, lambda: DetachedCoordinator(servers, 2, 2, deadline=2))
    after = ask(servers, "held")
    assert (after.clock, after.kept.state.iteration) == (before.clock, HALF)
    for mine, theirs in zip(after.cut.values, before.cut.values, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(
    ("text", "settings", "rule", "kind", "told"),
    [
        (
            TEXTS["normalized"],
            SETTINGS,
            Rule(0),
            ConfigError,
            'the servers "digits" hold another net: layer "bn" has .*, there no parameters; start '
            "servers under another name",
        ),
        (
            TEXTS["plain"],
            SETTINGS + 'type: "AdaGrad" momentum: 0 ',
            Rule(0),
            ConfigError,
            "this solver is of type AdaGrad, there it is SGD",
        ),
        (
            TEXTS["plain"],
            SETTINGS,
            Rule(2),
            UsageError,
            '--consistency ssp:2: the servers "digits" train with sync: give --consistency sync',
        ),
        (
            TEXTS["plain"],
            SETTINGS,
            Rule(0, update=Nesterov(0.9, 0.7)),
            UsageError,
            "--server-update nesterov:0.9:0.7: .* give --server-update add",
        ),
    ],
    ids=["net", "type", "consistency", "update"],
)
def test_what_is_not_as_the_servers_hold_it_is_refused(
    text: str,
    settings: str,
    rule: Rule,
    kind: type[CaffeError],
    told: str,
    servers: ThreadsEngine,
) -> None:
    Served(1, TEXTS["plain"], Rule(0), 3, until=3, servers=servers)
    with pytest.raises(kind, match=told):
        Served(1, text, rule, 3, settings, servers=servers)


def test_servers_have_one_trainer_at_a_time(servers: ThreadsEngine) -> None:
    other = Client(servers, 0)

    def work(served: Served, solver: Solver, number: int) -> None:
        with pytest.raises(UsageError, match=r"have a trainer already, trainer \d+: wait until it"):
            other.attach("another")

    Served(1, TEXTS["plain"], Rule(0), 3, until=3, servers=servers, work=work)
    assert other.attach("another")  # and dies before its workers join
    with pytest.raises(UsageError, match="have a trainer already, another: wait until"):
        other.attach("a third")
    ask(servers, "release", "another")
    assert other.attach("a third")


def test_a_trainer_that_died_makes_room_when_its_workers_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release = DetachedCoordinator.release

    async def late(self: DetachedCoordinator, trainer: str) -> None:
        await asyncio.sleep(0.2)  # the view has no members meanwhile
        await release(self, trainer)

    monkeypatch.setattr(DetachedCoordinator, "release", late)
    engine, ranges = ThreadsEngine(), key_ranges([Blob("blob", 0, 3)])
    engine.spawn(COORDINATOR, lambda: DetachedCoordinator(engine, 1, 1, deadline=0.3))
    try:
        ask(engine, "attend", "a test")
        assert Client(engine, 0).attach("one") is None
        state = Entrusted(None, None, "one")
        ask(engine, "start", ranges, [np.zeros(3, np.float32)], Rule(), state)
        ask(engine, "join", 0, 1)  # and is not heard of again
        assert Client(engine, 0).attach("another") is None
        assert ask(engine, "status").members == ()
    finally:
        engine.close()


def test_one_process_looks_after_servers(
    servers: ThreadsEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detached, "ABSENT", 0.5)
    ask(servers, "attend", "a test")
    other = servers.call(COORDINATOR, "attend", "another")
    time.sleep(0.1)
    assert ask(servers, "attend", "a test").keeper == "a test"
    with pytest.raises(UsageError, match="these servers run already, by a test: train with them"):
        other.result(20)
    assert ask(servers, "attend", "another").keeper == "another"  # once nobody else asks
