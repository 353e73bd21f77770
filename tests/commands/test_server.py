"""`caffepy server` over servers in threads: how it ends, and what it leaves."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from caffepy.cli import main
from caffepy.commands import server
from caffepy.commands.server import ServerOptions, ServerResult, running_servers, serve, stop
from caffepy.core.errors import INTERRUPTED, STOPPED, SyncError, UsageError
from caffepy.parallel.parameter_server import detached, heartbeat
from caffepy.parallel.parameter_server.detached import DetachedCoordinator
from caffepy.parallel.parameter_server.messages import COORDINATOR, Rule
from caffepy.parallel.parameter_server.worker import ServedWorkers
from tests.parallel.parameter_server.test_worker import ITERATIONS, TEXTS, Served
from tests.parallel.parameter_server.threads_engine import ThreadsEngine

OPTIONS = ServerOptions("10.0.0.1:6379", "digits", display=0)
HALF = ITERATIONS // 2


class Engine(ThreadsEngine):
    """A cluster with the servers "digits", if they were started."""

    address = "127.0.0.1:6379"
    is_local = head_has_gone = False

    def detached(self) -> dict[str, "Engine"]:
        if self.head_has_gone:
            time.sleep(60)  # Ray itself waits for an hour
        return {"digits": self} if COORDINATOR in self.names() else {}

    def spawn_detached(self, servers: int, replicas: int, deadline: float) -> None:
        self.spawn(COORDINATOR, lambda: DetachedCoordinator(self, servers, replicas, deadline))

    def end_actors(self) -> None:
        for name in self.names():
            self.kill(name)

    store = SimpleNamespace(start=lambda: None, check=lambda: None)  # it does not fail

    def reserve(self, resources: object) -> None:
        """It has room."""

    def close(self) -> None:
        """Leave them, as a process does that ends; with a local cluster it ends, too."""
        self.head_has_gone = self.is_local

    def ask(self, method: str, *arguments: object) -> Any:
        return self.call(COORDINATOR, method, *arguments).result(20)


@pytest.fixture
def engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[Engine]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(server, "LOOK", 0.02)
    monkeypatch.setattr(server, "PARTING", 0.5)
    monkeypatch.setattr(heartbeat, "BEAT", 0.05)
    caplog.set_level(logging.INFO, "caffepy")
    engine = Engine()
    monkeypatch.setattr(server, "connect", lambda *_, **__: engine)
    yield engine
    ThreadsEngine.close(engine)


def train(engine: Engine, until: int = ITERATIONS, **given: Any) -> Served:
    return Served(2, TEXTS["plain"], Rule(0), 3, until=until, servers=engine, **given)


def beside(work: Callable[[], object]) -> Callable[[], None]:
    """Do this in a thread; return what waits for it and raises its error."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def end() -> None:
        thread.join(60)
        assert not thread.is_alive()
        for error in errors:
            raise error

    return end


def await_(condition: Callable[[], object]) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def await_servers(engine: Engine) -> None:
    await_(lambda: engine.detached() and engine.ask("status").keeper)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_servers_with_a_snapshot_of_what_they_hold(
    number: int, engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def train_and_signal() -> None:
        await_servers(engine)
        train(engine, HALF)
        time.sleep(0.1)  # so that it shows them without a trainer
        os.kill(os.getpid(), number)

    before = signal.signal(number, signal.SIG_DFL)  # as the tests themselves may run under nohup
    try:
        end = beside(train_and_signal)
        result = serve(OPTIONS)
        end()
    finally:
        signal.signal(number, before)
    state = str(tmp_path / f"digits_iter_{HALF}.solverstate")
    assert result == ServerResult(state, stopped=True)
    assert result.exit_code == STOPPED
    assert engine.names() == []
    want = Served(2, TEXTS["plain"], Rule(0), 3)
    for worker, data in Served(2, TEXTS["plain"], Rule(0), 3, state=state).data.items():
        np.testing.assert_array_equal(data, want.data[worker])
    told = "\n".join(caplog.messages)
    assert (
        'Servers "digits" wait for a trainer: caffepy train --solver FILE --cluster 10.0.0.1:6379 '
        "--nodes N --name digits" in told
    )
    assert f"The trainer has gone: iteration {HALF}, 2 pushes of each worker" in told


def test_servers_take_snapshots_while_a_run_trains(
    engine: Engine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One that cannot be written is told, and the next one is tried."""
    iterated, state = ServedWorkers.iterated, tmp_path / "digits_iter_6.solverstate"
    (tmp_path / "digits_iter_3.caffemodel").mkdir()

    def wait(workers: ServedWorkers) -> None:
        iterated(workers)
        if workers.client.worker == 0 and workers.solver.iter == 4:
            await_(lambda: "digits_iter_3.caffemodel: this file of a snapshot" in caplog.text)
        if workers.client.worker == 0 and workers.solver.iter == 7:
            await_(state.exists)

    def train_on() -> None:
        await_servers(engine)
        train(engine)
        await_(lambda: f"digits_iter_{ITERATIONS}.solverstate, after 4 pushes" in caplog.text)
        time.sleep(0.2)  # there is nothing more to save
        engine.ask("stop")

    monkeypatch.setattr(ServedWorkers, "iterated", wait)
    end = beside(train_on)
    serve(ServerOptions(OPTIONS.cluster, "digits", snapshot_every=0.02))
    end()
    last = f"Snapshot: {tmp_path}/digits_iter_{ITERATIONS}"  # maybe before the run's own end
    assert sum(text.startswith(last) for text in caplog.messages) <= 2
    monkeypatch.setattr(ServedWorkers, "iterated", iterated)
    want = Served(2, TEXTS["plain"], Rule(0), 3, until=6).data
    for worker, data in Served(
        2, TEXTS["plain"], Rule(0), 3, until=6, state=str(state)
    ).data.items():
        np.testing.assert_array_equal(data, want[worker])


def test_servers_that_held_nothing_end_without_a_snapshot(engine: Engine, tmp_path: Path) -> None:
    """Those under nohup do not end with the terminal."""

    def end_them() -> None:
        await_servers(engine)
        os.kill(os.getpid(), signal.SIGHUP)
        time.sleep(0.2)
        assert not engine.ask("status").stopping
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        end = beside(end_them)
        result = serve(OPTIONS)
        assert result == ServerResult(None, stopped=True)
        assert result.exit_code == INTERRUPTED
        end()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert list(tmp_path.iterdir()) == []


def test_the_run_that_trains_stops_before_the_servers(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves all that its workers have learned; the servers are as after a run until then."""
    iterated = ServedWorkers.iterated
    stopping: list[Callable[[], None]] = []

    def stop_at_5(workers: ServedWorkers) -> None:
        iterated(workers)
        if workers.solver.iter == 5 and workers.client.worker == 0:
            stopping.append(beside(lambda: stop(OPTIONS)))
            assert workers.client.heartbeat.ended.wait(20)

    def train_on() -> None:
        await_servers(engine)
        train(engine)

    monkeypatch.setattr(ServedWorkers, "iterated", stop_at_5)
    end = beside(train_on)
    assert serve(OPTIONS) == ServerResult(str(tmp_path / "digits_iter_5.solverstate"), False)
    end()
    stopping[0]()


def test_a_run_that_does_not_stop_gets_an_error(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    iterated, state = ServedWorkers.iterated, tmp_path / "digits_iter_3.solverstate"

    def hang_at_6(workers: ServedWorkers) -> None:
        if workers.solver.iter == 6 and workers.client.worker == 0:
            engine.ask("stop")
            await_(state.exists)
        iterated(workers)

    def serve_them() -> None:
        options = ServerOptions("10.0.0.1:6379", "digits", grace=0)
        assert serve(options) == ServerResult(str(state), stopped=False)

    monkeypatch.setattr(ServedWorkers, "iterated", hang_at_6)
    end = beside(serve_them)
    await_servers(engine)
    with pytest.raises(SyncError, match=r'the servers "digits" were ended: --snapshot .* goes on'):
        train(engine)
    end()


def test_servers_whose_command_was_killed_are_taken_up_or_ended(
    engine: Engine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine.spawn_detached(1, 1, 5)
    engine.ask("attend", "one that is killed")
    train(engine, HALF)
    monkeypatch.setattr(detached, "ABSENT", 0)
    assert "nobody looks after them" in running_servers(OPTIONS.cluster).table()

    def kill() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(server, "_tell_changes", lambda *_: kill())
    with pytest.raises(KeyboardInterrupt):
        serve(OPTIONS)
    assert (
        'Taking up the servers "digits", which run without a process that attends to them: '
        f"iteration {HALF}, 2 pushes of each worker" in caplog.messages
    )
    assert "They stay 1 servers with replicas 1, as they were started" in caplog.messages
    state = str(tmp_path / f"digits_iter_{HALF}.solverstate")
    assert stop(OPTIONS) == ServerResult(state, stopped=False)
    assert Path(state).exists()
    assert engine.names() == []
    with pytest.raises(UsageError, match=r'no servers "digits" on --cluster 10\.0\.0\.1'):
        stop(OPTIONS)


def test_who_ends_servers_of_a_local_cluster_does_not_wait_for_it(engine: Engine) -> None:
    engine.is_local = True
    end = beside(lambda: serve(ServerOptions("local", "digits")))
    await_servers(engine)
    beside(lambda: stop(OPTIONS))()
    end()


def test_who_ends_servers_hears_that_the_head_has_gone(engine: Engine) -> None:
    engine.spawn_detached(1, 1, 5)
    engine.head_has_gone = True

    def check() -> None:
        raise SyncError("Ray's head has not answered for 40 s")

    engine.store = SimpleNamespace(start=lambda: None, check=check)
    with pytest.raises(SyncError, match="head has not answered"):
        server._answer(engine, engine.detached)  # type: ignore[arg-type]


def test_a_snapshot_that_cannot_be_written_leaves_the_servers(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.spawn_detached(1, 1, 5)
    train(engine, 3)
    (tmp_path / "digits_iter_3.caffemodel").mkdir()
    with pytest.raises(Exception, match="cannot be written"):
        stop(OPTIONS)
    monkeypatch.setattr(detached, "ABSENT", 0)
    assert engine.ask("held").clock == 1
    stop(ServerOptions(OPTIONS.cluster, "digits", snapshot_prefix="other"))
    assert (tmp_path / "other_iter_3.solverstate").exists()


@pytest.mark.parametrize(
    ("given", "told"),
    {
        ("--cluster", "auto"): "Need a cluster and a name: give --cluster auto --name NAME.",
        ("--name", "digits"): "Need a cluster and a name",
        ("--cluster", "auto", "--name", "d", "--list"): "--list shows all of a cluster",
        ("--cluster", "local", "--list"): "give the address that caffepy server shows",
        ("--cluster", "auto", "--name", "a/b"): "'a/b': give letters, digits and any of . _ -",
        ("--cluster", "auto", "--name", "d", "--servers", "1"): "give --servers 2 or more",
        ("--cluster", "auto", "--name", "d", "--snapshot-prefix", "no/d"): "no/d_iter_0",
    }.items(),
)
def test_what_does_not_go_together_is_told(
    given: tuple[str, ...],
    told: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.run(["server", *given]) == 2
    assert told in capsys.readouterr().err
