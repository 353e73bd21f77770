"""Solvers in threads that train by a parameter server."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format

from caffepy.core.errors import DataError, SyncError
from caffepy.device.blob import Array
from caffepy.device.cuda import CudaDevice
from caffepy.device.device import Device
from caffepy.parallel.manager import p2p_manager
from caffepy.parallel.parameter_server import heartbeat
from caffepy.parallel.parameter_server import worker as worker_module
from caffepy.parallel.parameter_server.attachment import Attachment
from caffepy.parallel.parameter_server.client import Client
from caffepy.parallel.parameter_server.coordinator import Coordinator
from caffepy.parallel.parameter_server.filters import parse
from caffepy.parallel.parameter_server.messages import COORDINATOR, Nesterov, Report, Rule
from caffepy.parallel.parameter_server.worker import ServedWorkers
from caffepy.parallel.synchronization import SyncOptions
from caffepy.parallel.worker import WorkerSolver
from caffepy.proto.caffe_pb2 import SolverParameter
from caffepy.solver import Solver
from tests.nets import library
from tests.parallel.cases import LOSSY, NET, SETTINGS, Run, net
from tests.parallel.parameter_server.test_servers import run
from tests.parallel.parameter_server.threads_engine import ThreadsEngine
from tests.solver import cases
from tests.solver.cases import Recorder

ITERATIONS = 12
WEIGHTS = f"weight_filler {{ {library.NARROW} }}"
NORMALIZED = LOSSY.replace(
    'layer { name: "ip"', library.in_place("BatchNorm", "bn", "pool") + 'layer { name: "ip"'
)
TEXTS = {"plain": net(3, NET), "random": LOSSY, "normalized": NORMALIZED}


@pytest.fixture(autouse=True)
def _frequent_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers hear sooner that a snapshot wants their states."""
    monkeypatch.setattr(heartbeat, "BEAT", 0.05)


class Served:
    """Trains `size` workers of so many `solvers` by servers; has the parameters of each solver, and
    what worker 0 reported.
    """

    def __init__(
        self,
        size: int,
        text: str,
        rule: Rule,
        every: int = 1,
        settings: str = SETTINGS,
        until: int = ITERATIONS,
        state: str | None = None,
        work: Callable[["Served", Solver, int], object] = lambda served, solver, number: None,
        gpu: bool = False,
        solvers: int = 1,
        filters: str = "",
        together: int = 0,
        begin: Callable[[int], object] = lambda number: None,
        servers: ThreadsEngine | None = None,
    ) -> None:
        self.recorder, self.data = Recorder(), dict[int, Array]()
        engine = self.engine = servers or ThreadsEngine()
        trainer, held = "", None
        if servers:
            trainer = f"trainer {id(self)}"
            held = Client(engine, 0).attach(trainer)
        else:
            engine.spawn(COORDINATOR, lambda: Coordinator(engine, 2, 2))

        def worker(number: int) -> None:
            param = text_format.Merge(
                settings + f'max_iter: {until} net_param {{ name: "noise" {text} }}',
                text_format.Parse(cases.SETTINGS, SolverParameter()),
            )
            param.random_seed += number * solvers
            devices: list[Device] = [Device(seed=1) for _ in range(solvers)]
            if gpu:
                first = number * solvers if solvers > 1 else 0
                devices = [CudaDevice(first + i, seed=1) for i in range(solvers)]
            devices[0].follows = number > 0
            recorder = self.recorder if number == 0 else Recorder()
            param.snapshot *= number == 0
            solver = Solver(param, device=devices[0], reporter=recorder)
            if state and number == 0:
                solver.restore(state)
            if held and number == 0:
                of_ray: Any = engine
                Attachment(of_ray, "digits", trainer, held).restore(solver, rule)
            own = parse(filters)
            with p2p_manager(solver, devices, SyncOptions()):
                client = Client(engine, number, bf16=own.bf16)
                begin(number)
                with ServedWorkers(
                    *(solver, client, rule, every, together or size, own, trainer, held)
                ) as workers:
                    solver.step(until - solver.iter)
                    if number == 0 and solver.test_nets:
                        solver.test_all()
                    work(self, solver, number)
                    for rank, each in enumerate(workers.solvers):
                        data = each.device.on_host(each.params.data)
                        self.data[number * solvers + rank] = data.copy()
            solver.close()

        def of(number: int) -> Callable[[], Any]:
            return lambda: worker(number)

        try:
            run([of(number) for number in range(size)], 120)
        finally:
            if not servers:
                engine.close()


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("case", list(TEXTS))
def test_gradients_with_slack_0_are_training_in_step_to_the_bit(case: str, size: int) -> None:
    want = Run(size, TEXTS[case], "flat", until=ITERATIONS)
    served = Served(size, TEXTS[case], Rule(0, gradients=True))
    for number, data in served.data.items():
        np.testing.assert_array_equal(data, want.data[number])
    assert served.recorder.losses == want.losses
    for got, expected in zip(served.recorder.tests, want.tests, strict=True):
        for name, value in expected.items():
            np.testing.assert_allclose(got[name], value, rtol=1e-5)


@pytest.mark.parametrize("case", list(TEXTS))
@pytest.mark.parametrize(("size", "solvers"), [(2, 2), (1, 4), (2, 3)])
def test_workers_of_several_solvers_are_training_in_step(
    size: int, solvers: int, case: str
) -> None:
    """To the bit where halves of sums are exact, and the tree adds each worker's solvers first."""
    want = Run(size * solvers, TEXTS[case], "tree", until=ITERATIONS)
    served = Served(size, TEXTS[case], Rule(0, gradients=True), solvers=solvers)
    exact = solvers != 3
    for number, data in served.data.items():
        if exact:
            np.testing.assert_array_equal(data, want.data[number])
        else:
            np.testing.assert_allclose(data, want.data[number], atol=1e-5)
    assert len(served.data) == size * solvers
    losses = served.recorder.losses
    assert losses == (want.losses if exact else pytest.approx(want.losses, rel=1e-4))
    for got, expected in zip(served.recorder.tests, want.tests, strict=True):
        for name, value in expected.items():
            np.testing.assert_allclose(got[name], value, rtol=1e-5)


def test_changes_with_slack_0_are_training_in_step() -> None:
    """The mean of what each worker's update changes is the update by the mean gradient, if nothing
    is clipped: momentum and weight decay are linear.
    """
    settings = SETTINGS.replace("clip_gradients: 2", "")
    want = Run(3, TEXTS["random"], "flat", settings=settings, until=ITERATIONS)
    served = Served(3, TEXTS["random"], Rule(0), 1, settings)
    for data in served.data.values():
        np.testing.assert_allclose(data, want.data[0], atol=2e-6)


def test_the_changes_of_a_worker_are_those_of_its_solvers() -> None:
    """One worker alone trains on, whatever the slack, as its solvers do without servers."""
    settings = SETTINGS + "snapshot_after_train: false "
    want = Run(2, TEXTS["random"], settings=settings, until=ITERATIONS)
    for slack in (0, 1, inf):
        served = Served(1, TEXTS["random"], Rule(slack), 5, settings, solvers=2)
        for data in served.data.values():
            np.testing.assert_allclose(data, want.data[0], atol=1e-6)


@pytest.mark.parametrize("solvers", [1, 2])
@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize("slack", [0, 1, inf])
def test_all_workers_end_with_the_values_of_the_servers(
    slack: float, every: int, solvers: int
) -> None:
    ends: dict[int, Array] = {}

    def work(served: Served, solver: Solver, number: int) -> None:
        if number == 0:
            group = solver.workers
            assert isinstance(group, ServedWorkers)
            values, _, batches, _ = group.client.cut()
            ends[0] = np.concatenate(values)
            assert batches == 3 * 10 * solver.param.iter_size or slack == inf

    text = TEXTS["random"]
    served = Served(3, text, Rule(slack), every, until=10, work=work, solvers=solvers)
    for rank in range(solvers):
        own = served.data[rank]
        if slack < inf:  # worker 0 pulls last when all have pushed
            assert set(ends[0]) <= {*own}
    for number in range(3):  # solvers of a worker are in step
        of = [served.data[number * solvers + rank] for rank in range(solvers)]
        assert all(np.array_equal(of[0], each) for each in of)


@pytest.mark.parametrize("slack", [0, 1])
def test_a_worker_that_joins_late_begins_where_the_others_are(
    slack: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    iterated, iterations = ServedWorkers.iterated, dict[int, list[int]]()
    may_join, joined = threading.Event(), threading.Event()

    def note(workers: ServedWorkers) -> None:
        iterations.setdefault(workers.client.worker, []).append(workers.solver.iter)
        if workers.solver.iter == 6 and workers.client.worker == 0:
            may_join.set()
            assert joined.wait(60)
        iterated(workers)

    def begin(number: int) -> None:
        assert number == 0 or may_join.wait(60)

    def follow(*arguments: Any) -> None:
        follow_begun(*arguments)
        joined.set()

    follow_begun = worker_module.follow
    monkeypatch.setattr(ServedWorkers, "iterated", note)
    monkeypatch.setattr(worker_module, "follow", follow)
    served = Served(2, TEXTS["plain"], Rule(slack), 2, solvers=2, together=1, begin=begin)
    assert iterations[0] == list(range(1, ITERATIONS + 1))
    assert iterations[1][0] in (3, 5)  # after the pushes that were counted when it joined
    for first, second in ((0, 1), (2, 3)):  # the solvers of a worker
        np.testing.assert_array_equal(served.data[first], served.data[second])


@pytest.mark.parametrize("rule", [Rule(0, gradients=True), Rule(1)])
def test_an_error_of_one_of_a_workers_solvers_ends_the_worker(
    rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    iterate = WorkerSolver.iterate

    def fail(worker: WorkerSolver, count: int) -> None:
        if worker.iter == 4:
            raise DataError("the record is damaged")
        iterate(worker, count)

    monkeypatch.setattr(WorkerSolver, "iterate", fail)
    with pytest.raises(DataError, match="rank 1: the record is damaged"):
        Served(1, TEXTS["plain"], rule, 1, solvers=2)


VOCABULARY, WIDTH = 4000, 64


def words(used: int) -> str:
    """A net that embeds words, of which only the first `used` come."""
    embed = f"input_dim: {VOCABULARY} num_output: {WIDTH} bias_term: false"
    return (
        library.dummies("in", 'type: "gaussian"', 'type: "uniform"', x=(64, used), y=(64, 2))
        + library.layer("ArgMax", "word", "x", "argmax_param { axis: 1 }")
        + library.layer("Embed", "embed", "word", f"embed_param {{ {embed} {WEIGHTS} }}")
        + library.inner_product("ip", "embed", 2, filler=library.NARROW, top="o")
        + library.euclidean_loss("o", "y")
    )


@pytest.mark.parametrize(
    ("rule", "every", "filters"),
    [(Rule(0, gradients=True), 1, ""), (Rule(0), 3, ""), (Rule(1), 3, ""), (Rule(1), 3, "bf16")],
)
def test_rows_that_are_used_are_pushed_and_pulled_and_no_others(
    rule: Rule, every: int, filters: str
) -> None:
    settings = 'base_lr: 0.05 lr_policy: "fixed" momentum: 0.9 '
    pushed, pulled, clocks = dict[int, int](), dict[int, int](), 12 // every

    def work(served: Served, solver: Solver, number: int) -> None:
        group = solver.workers
        assert isinstance(group, ServedWorkers)
        if number == 0:  # which leaves first: then others may have to pull all again
            pushed[used] = group.filters.bytes_after
            pulled[used] = group.client.pulled.bytes_after

    for used in (4, 20):
        Served(2, words(used), rule, every, settings, until=12, work=work, filters=filters)
    row = WIDTH * (2 if filters else 4)
    of_more = 16 * row * clocks
    assert 0.9 * of_more < pushed[20] - pushed[4] < 1.1 * of_more
    assert 0.8 * of_more < pulled[20] - pulled[4] < 1.1 * of_more
    assert pushed[20] < 2 * 20 * row * clocks  # of 4000


@pytest.mark.parametrize("coordinator_too", [False, True])
@pytest.mark.parametrize("rule", [Rule(0, gradients=True), Rule(0), Rule(1)])
def test_when_all_servers_have_died_a_snapshot_has_the_first_workers_values(
    rule: Rule, coordinator_too: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved: dict[str, Array] = {}

    def work(served: Served, solver: Solver, number: int) -> None:
        if number:
            return
        for name in ("server-0", "server-1"):
            served.engine.kill(name)
        if coordinator_too:
            served.engine.kill(COORDINATOR)
            served.engine.respawn(COORDINATOR, lambda: Coordinator(served.engine, 2, 2))
        solver.param.snapshot_prefix = str(tmp_path / "run")
        solver.snapshot()
        solver.params.data *= 0
        solver.restore(str(tmp_path / f"run_iter_{ITERATIONS}.solverstate"))
        saved["own"] = solver.params.data.copy()

    with suppress(SyncError):  # of a worker that pulls last
        Served(2, TEXTS["plain"], rule, work=work)
    told = (
        "the coordinator and all servers have died" if coordinator_too else "all servers that held"
    )
    assert f"first worker's own parameters: {told}" in caplog.text
    assert saved["own"].any()


@pytest.mark.parametrize("solvers", [1, 2])
@pytest.mark.parametrize(
    ("case", "rule", "every", "filters"),
    [
        ("random", Rule(0), 3, "significant:1.6"),
        ("plain", Rule(0, update=Nesterov(0.9, 0.7)), 3, ""),
        ("normalized", Rule(0), 3, ""),
        ("random", Rule(0, gradients=True), 1, ""),
    ],
)
def test_as_many_workers_go_on_from_a_snapshot_to_the_bit(
    case: str, rule: Rule, every: int, filters: str, solvers: int, tmp_path: Path
) -> None:
    """Each with its own momentum, random numbers, running statistics and rests of filters, and the
    servers with the momentum of their update.
    """
    settings = SETTINGS + f'snapshot: 6 snapshot_prefix: "{tmp_path}/run" '
    given = {"settings": settings, "filters": filters, "solvers": solvers}
    want = Served(2, TEXTS[case], rule, every, **given)
    state = f"{tmp_path}/run_iter_6.solverstate"
    got = Served(2, TEXTS[case], rule, every, state=state, **given)
    for number, data in got.data.items():
        np.testing.assert_array_equal(data, want.data[number])
    assert got.recorder.losses[-1] == want.recorder.losses[-1]


def test_another_number_of_workers_goes_on_with_the_momentum_of_the_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = SETTINGS + f'snapshot: 6 snapshot_prefix: "{tmp_path}/run" '
    Served(2, TEXTS["plain"], Rule(1), 3, settings, until=6)
    begun: dict[int, Array] = {}

    def work(served: Served, solver: Solver, number: int) -> None:
        begun[number] = np.concatenate(solver.history)

    state = f"{tmp_path}/run_iter_6.solverstate"
    Served(3, TEXTS["plain"], Rule(1), 3, settings, until=6, state=state, work=work)
    for history in begun.values():
        np.testing.assert_array_equal(history, begun[0])
    told = "The snapshot is of 2 workers, not 3: all begin with the momentum of worker 0"
    assert told in caplog.messages


@pytest.mark.parametrize("slack", [0, 2])
def test_reports_tell_who_waits_for_whom(slack: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker 1 pushes after worker 0 has begun to pull, and so never waits for it."""
    push, pull, pulls = Client.push, Client.pull, threading.Semaphore(0)
    reports: list[Report] = []

    def push_late(client: Client, payloads: Any) -> None:
        if client.worker == 1:
            assert pulls.acquire(timeout=60)
            time.sleep(0.01)
        push(client, payloads)

    def pull_and_tell(client: Client, slack: float | None = None) -> list[Array]:
        if client.worker == 0 and client.clock:
            pulls.release()
        return pull(client, slack)

    def work(served: Served, solver: Solver, number: int) -> None:
        group = solver.workers
        assert isinstance(group, ServedWorkers)
        if number == 0:
            reports.append(group.client.report().result(10))

    monkeypatch.setattr(Client, "push", push_late)
    monkeypatch.setattr(Client, "pull", pull_and_tell)
    served = Served(2, TEXTS["plain"], Rule(slack), work=work)
    first, *_, last = served.recorder.reports
    assert 0 < first.iteration <= last.iteration == ITERATIONS
    assert last.pushes == {0: ITERATIONS, 1: ITERATIONS}
    assert 0 < last.on_wire <= last.sent
    assert last.behind == 0
    if slack:
        assert last.staleness[2]
        assert set(last.staleness) <= {1, 2}  # what comes beside the iterations is a push older
    else:
        assert set(last.staleness) == {0}
        assert {*reports[0].waits} == {(0, 1)}
        assert reports[0].waits[0, 1] > 0


@pytest.mark.gpu
@pytest.mark.usefixtures("exact")  # rounded to tf32, a ReLU passes what it stops on the CPU
@pytest.mark.parametrize(
    ("size", "solvers"),
    [
        (2, 1),
        pytest.param(1, 2, marks=pytest.mark.gpus(2)),
        pytest.param(2, 2, marks=pytest.mark.gpus(4)),
    ],
)
@pytest.mark.parametrize(
    ("rule", "every"), [(Rule(0, gradients=True), 1), (Rule(0), 5), (Rule(1), 5), (Rule(inf), 1)]
)
def test_workers_on_gpus_learn_what_those_on_the_cpu_do(
    rule: Rule, every: int, size: int, solvers: int, caplog: pytest.LogCaptureFixture
) -> None:
    settings = SETTINGS + "snapshot_after_train: false "
    text = TEXTS["plain"].replace(
        'layer { name: "ip"', library.in_place("BatchNorm", "bn", "pool") + 'layer { name: "ip"'
    )
    learned: list[list[Array]] = []
    means: list[list[Array]] = []

    def work(served: Served, solver: Solver, number: int) -> None:
        if number == 0:
            statistics = solver.iterations.statistics
            blobs = (learnable.blob for learnable in solver.net.learnable)
            learned.append([blob.host_data.copy() for blob in blobs if blob not in statistics])
            assert isinstance(solver.workers, ServedWorkers)
            means.append(solver.workers.statistics.means)

    on_gpu, on_cpu = (
        Served(size, text, rule, every, settings, until=20, gpu=gpu, work=work, solvers=solvers)
        for gpu in (True, False)
    )
    assert "cannot be captured" not in caplog.text
    assert len(on_gpu.data) == size * solvers
    losses = on_gpu.recorder.losses, on_cpu.recorder.losses
    if rule.slack == 0:
        for got, expected in zip(*learned, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
        for got, expected in zip(*means, strict=True):
            np.testing.assert_allclose(got, expected, rtol=5e-3)
        assert losses[0] == pytest.approx(losses[1], rel=0.01, abs=0.01)
    else:  # workers come in any order
        assert np.mean(losses[0]) == pytest.approx(np.mean(losses[1]), rel=0.3)
