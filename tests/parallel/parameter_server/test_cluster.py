"""Workers that die are replaced, unless that is hopeless."""

import pickle
import platform
import threading
import time
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from caffepy.commands.train import TrainOptions, train
from caffepy.core.errors import CaffeError, ConfigError, DataError, SyncError, UsageError
from caffepy.core.events import asked_to_end
from caffepy.device.threads import num_threads, set_num_threads
from caffepy.parallel.parameter_server import cluster
from caffepy.parallel.parameter_server.cluster import (
    HOPELESS,
    ClusterOptions,
    WorkerOptions,
    _Processes,
    _warn_of_few_pushes,
    run_worker,
)
from caffepy.parallel.parameter_server.messages import (
    DeadPeerError,
    LeftOutError,
    Nesterov,
    Rule,
    View,
)
from caffepy.parallel.parameter_server.ray_cluster import LOCAL
from caffepy.proto.caffe_pb2 import SolverParameter
from caffepy.solver import Solver
from tests.parallel.cases import NET, SETTINGS, net
from tests.solver.cases import solver_of


class Engine:
    """Starts nothing; `futures` are of the workers, by number. It has room for two of them."""

    def __init__(self) -> None:
        self.futures: dict[int, Future[Any]] = {}

    def spawn_worker(self, number: int, *arguments: object, **options: object) -> "Future[Any]":
        self.futures[number] = Future()
        return self.futures[number]

    store = SimpleNamespace(check=lambda: None)

    def room(self, needs: object) -> tuple[int, float, float]:
        return 1, 2, 0

    def kill(self, actor: str, starts_again: bool = False) -> None:
        self.die(int(actor.removeprefix("worker-")))

    def die(self, number: int) -> None:
        until = time.monotonic() + 10
        while number not in self.futures and time.monotonic() < until:
            time.sleep(0.01)
        self.futures[number].set_exception(DeadPeerError(f"worker-{number}"))


@pytest.fixture(autouse=True)
def starts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "PAUSE", 0)


def processes(engine: Engine, rule: Rule, begin_together: int = 2) -> _Processes:
    options = WorkerOptions(b"", "", "", None, None, True, True, 1, 5, "", rule, begin_together)
    of_ray: Any = engine
    return _Processes(of_ray, options, 2, lambda place: (None, {"GPU": 1}))


def test_workers_that_have_joined_are_replaced_however_often() -> None:
    engine = Engine()
    started = processes(engine, Rule(1))
    for number in range(1, 21):
        started.follow(View(members=dict.fromkeys(range(number + 1), 0)))
        engine.die(number)
    time.sleep(0.2)
    assert max(engine.futures) == 21


def test_workers_that_die_before_they_join_are_given_up(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    started = processes(engine, Rule(1))
    for number in range(1, HOPELESS + 2):
        engine.die(number)
    time.sleep(0.2)
    assert max(engine.futures) == HOPELESS + 1
    with pytest.raises(SyncError, match="4 workers have died one after the other before they"):
        started.check()  # the run has not begun
    assert f"No worker takes its place: {HOPELESS + 1} have died in a row" in caplog.messages


def test_workers_that_push_gradients_are_not_replaced(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    processes(engine, Rule(0, gradients=True))
    engine.die(1)
    time.sleep(0.2)
    assert max(engine.futures) == 1
    assert any("those that push gradients begin together" in text for text in caplog.messages)


def test_whom_a_run_waits_for_to_begin_is_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "WAIT", 0)
    started = processes(Engine(), Rule(1), begin_together=3)
    started.check()
    assert caplog.messages == ["The servers are still starting"]
    started.follow(View(members={0: 0}))
    started.check()
    started.check()  # which it says once
    (told,) = (text for text in caplog.messages if "begins with" in text)
    assert told == (
        "The run begins with 3 workers, of which 1 have joined. Ray's 1 host(s) have room for 2, "
        "as each needs GPU: 1: start it on more hosts (ray start --address=HOST:PORT), or give a "
        "smaller --nodes, such as 2:2"
    )
    asked_to_end.set()
    try:
        with pytest.raises(KeyboardInterrupt):
            started.check()
        started.follow(View(members={0: 0, 1: 0, 2: 0}))
        started.check()
    finally:
        asked_to_end.clear()


@pytest.mark.parametrize("ends_by_itself", [False, True])
def test_workers_that_were_left_out_are_replaced(ends_by_itself: bool) -> None:
    engine = Engine()
    started = processes(engine, Rule(1))
    started.follow(View(members={0: 0, 1: 0}))
    if ends_by_itself:
        engine.futures[1].set_exception(LeftOutError("worker 1 was left out"))
    started.follow(View(members={0: 0}))
    time.sleep(0.2)
    started.check()
    assert max(engine.futures) == 2


def test_the_end_waits_for_no_worker_that_has_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one for which the cluster had no room."""
    monkeypatch.setattr(cluster, "SILENT", 3600)
    engine = Engine()
    started = processes(engine, Rule(1))
    assert started.end() == {}
    started.follow(View(members={0: 0, 1: 0}))
    threading.Timer(0.1, engine.futures[1].set_result, [(8, 0.5)]).start()
    assert started.end() == {1: (8, 0.5)}


def test_an_error_of_a_worker_ends_the_run() -> None:
    engine = Engine()
    started = processes(engine, Rule(1))
    started.check()
    engine.futures[1].set_exception(DataError("the record is damaged"))
    with pytest.raises(DataError, match="the record is damaged"):
        started.check()


def error_of_worker(folder: Path, text: str) -> Exception:
    """What a worker on this net raises, as another process gets it."""
    (folder / "net.prototxt").write_text(text)
    param = SolverParameter(net=f"{folder}/net.prototxt", base_lr=0.1, lr_policy="fixed")
    content, threads = param.SerializeToString(), num_threads()
    options = WorkerOptions(content, "", "", None, None, True, True, threads, 5, "", Rule(1), 2)
    with pytest.raises(CaffeError) as raised:
        run_worker(Engine(), 3, options)  # type: ignore[arg-type]
    error: Exception = pickle.loads(pickle.dumps(raised.value))
    assert str(error).startswith(f"worker 3 (host {platform.node()}): {folder}/net.prototxt:")
    return error


def test_an_error_of_a_worker_names_it_and_its_host(tmp_path: Path) -> None:
    text = net(3).replace('digits_train_lmdb"', 'digits_train_lmdb_that_only_the_first_host_has"')
    error = error_of_worker(tmp_path, text)
    assert isinstance(error, DataError)
    assert 'layer "data" (Data): source ' in str(error)


BROKEN = """
class BrokenError(Exception):
    def __init__(self, code, reason):
        super().__init__(f"{reason} ({code})")  # so it cannot be unpickled

class Layer:
    def setup(self, bottom, top):
        raise BrokenError(5, "no such index")
    reshape = forward = setup
"""


def test_an_error_of_a_workers_python_layer_survives_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    monkeypatch.chdir(tmp_path)
    layer = 'layer { name: "own" type: "Python" top: "own" python_param { module: "broken" layer: "Layer" } }'
    error = error_of_worker(tmp_path, layer + net(3))
    assert isinstance(error, ConfigError)
    assert str(error).endswith("broken.py:8: in setup: BrokenError: no such index (5)")


@pytest.mark.parametrize(
    ("rule", "every", "told"),
    [
        (Rule(4), 25, "10 pushes in all are few for --consistency ssp:4"),
        (Rule(0, update=Nesterov(0.9, 0.7)), 25, "10 pushes in all are few for an update of the"),
        (Rule(4), 5, ""),
        (Rule(0), 25, ""),
    ],
)
def test_few_pushes_are_warned_of_where_they_cost_accuracy(
    rule: Rule, every: int, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    _warn_of_few_pushes(solver_of("max_iter: 250 "), rule, every)
    assert told in caplog.text
    assert ("give --every 6 or less" in caplog.text) == bool(told)


def test_gpus_of_a_machine_are_dealt_to_its_workers() -> None:
    options = ClusterOptions(LOCAL, (2, 2))
    assert [options.dealt([0, 1, 2, 3], place) for place in (0, 1)] == [[0, 1], [2, 3]]
    assert [options.dealt([5], place) for place in (0, 1)] == [[5], [5]]
    assert replace(options, cluster="10.0.0.1:6379").dealt([0, 1, 2], 1) == [0, 1, 2]
    with pytest.raises(UsageError, match="3 GPUs cannot be dealt to 2 workers"):
        options.dealt([0, 1, 2])


def test_workers_of_a_machine_share_its_threads_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first worker has its share before the options of the others are made."""
    given = list[int]()

    def served(solver: Solver, options: ClusterOptions, worker: WorkerOptions, _: None) -> Any:
        given.append(worker.threads)
        return nullcontext()

    monkeypatch.chdir(tmp_path)
    Path("solver.prototxt").write_text(
        f'{SETTINGS} max_iter: 1 snapshot_after_train: false net_param {{ name: "n" {net(3, NET)} }}'
    )
    monkeypatch.setattr("caffepy.parallel.parameter_server.cluster.served", served)
    before = num_threads()
    set_num_threads(16)
    try:
        train(TrainOptions("solver.prototxt", cluster=ClusterOptions("local", (2, 4)), cpu=1))
    finally:
        set_num_threads(before)
    assert given == [4]
