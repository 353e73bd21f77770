"""Solvers in threads that train by a parameter server."""

from collections.abc import Callable
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format

from caffepy.core.errors import SyncError
from caffepy.device.blob import Array
from caffepy.device.cuda import CudaDevice
from caffepy.device.device import Device
from caffepy.parallel.parameter_server.client import Client
from caffepy.parallel.parameter_server.coordinator import Coordinator
from caffepy.parallel.parameter_server.messages import COORDINATOR, Rule
from caffepy.parallel.parameter_server.worker import ServedWorkers
from caffepy.proto.caffe_pb2 import SolverParameter
from caffepy.solver import Solver
from tests.nets import library
from tests.parallel.cases import LOSSY, NET, SETTINGS, Run, net
from tests.parallel.parameter_server.test_servers import run
from tests.parallel.parameter_server.threads_engine import ThreadsEngine
from tests.solver import cases
from tests.solver.cases import Recorder

ITERATIONS = 12
NORMALIZED = LOSSY.replace(
    'layer { name: "ip"', library.in_place("BatchNorm", "bn", "pool") + 'layer { name: "ip"'
)
TEXTS = {"plain": net(3, NET), "random": LOSSY, "normalized": NORMALIZED}


class Served:
    """Trains `size` workers by servers; has their parameters and what worker 0 reported."""

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
    ) -> None:
        self.recorder, self.data = Recorder(), dict[int, Array]()
        engine = self.engine = ThreadsEngine()
        engine.spawn(COORDINATOR, lambda: Coordinator(engine, 2, 2))

        def worker(number: int) -> None:
            param = text_format.Merge(
                settings + f'max_iter: {until} net_param {{ name: "noise" {text} }}',
                text_format.Parse(cases.SETTINGS, SolverParameter()),
            )
            device = CudaDevice(0, seed=1) if gpu else Device(seed=1)
            device.follows = number > 0
            recorder = self.recorder if number == 0 else Recorder()
            solver = Solver(param, device=device, rank=number, reporter=recorder)
            if state and number == 0:
                solver.restore(state)
            with ServedWorkers(solver, Client(engine, number), rule, every, size):
                solver.step(until - solver.iter)
                if number == 0 and solver.test_nets:
                    solver.test_all()
                work(self, solver, number)
                self.data[number] = device.on_host(solver.params.data).copy()
            solver.close()

        def of(number: int) -> Callable[[], Any]:
            return lambda: worker(number)

        try:
            run([of(number) for number in range(size)], 120)
        finally:
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


def test_changes_with_slack_0_are_training_in_step() -> None:
    """The mean of what each worker's update changes is the update by the mean gradient, if nothing
    is clipped: momentum and weight decay are linear.
    """
    settings = SETTINGS.replace("clip_gradients: 2", "")
    want = Run(3, TEXTS["random"], "flat", settings=settings, until=ITERATIONS)
    served = Served(3, TEXTS["random"], Rule(0), 1, settings)
    for data in served.data.values():
        np.testing.assert_allclose(data, want.data[0], atol=2e-6)


@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize("slack", [0, 1, inf])
def test_all_workers_end_with_the_values_of_the_servers(slack: float, every: int) -> None:
    ends: dict[int, Array] = {}

    def work(served: Served, solver: Solver, number: int) -> None:
        if number == 0:
            group = solver.workers
            assert isinstance(group, ServedWorkers)
            values, batches = group.client.cut()
            ends[0] = np.concatenate(values)
            assert batches == 3 * 10 * solver.param.iter_size or slack == inf

    served = Served(3, TEXTS["random"], Rule(slack), every, until=10, work=work)
    own = served.data[0]
    if slack < inf:  # worker 0 pulls last when all have pushed
        assert set(ends[0]) <= {*own}


@pytest.mark.parametrize("rule", [Rule(0, gradients=True), Rule(0), Rule(1)])
def test_when_all_servers_have_died_a_snapshot_has_the_first_workers_values(
    rule: Rule, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved: dict[str, Array] = {}

    def work(served: Served, solver: Solver, number: int) -> None:
        if number:
            return
        for name in ("server-0", "server-1"):
            served.engine.kill(name)
        solver.param.snapshot_prefix = str(tmp_path / "run")
        solver.snapshot()
        solver.params.data *= 0
        solver.restore(str(tmp_path / f"run_iter_{ITERATIONS}.solverstate"))
        saved["own"] = solver.params.data.copy()

    with suppress(SyncError):  # of a worker that pulls last
        Served(2, TEXTS["plain"], rule, work=work)
    assert "first worker's own parameters: all servers that held" in caplog.text
    assert saved["own"].any()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rule", "every"), [(Rule(0, gradients=True), 1), (Rule(0), 5), (Rule(1), 5), (Rule(inf), 1)]
)
def test_workers_on_gpus_learn_what_those_on_the_cpu_do(
    rule: Rule, every: int, caplog: pytest.LogCaptureFixture
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
        Served(2, text, rule, every, settings, until=20, gpu=gpu, work=work)
        for gpu in (True, False)
    )
    assert "cannot be captured" not in caplog.text
    losses = on_gpu.recorder.losses, on_cpu.recorder.losses
    if rule.slack == 0:
        for got, expected in zip(*learned, strict=True):
            np.testing.assert_allclose(got, expected, rtol=2e-3, atol=2e-3)
        for got, expected in zip(*means, strict=True):
            np.testing.assert_allclose(got, expected, rtol=5e-3)
        assert losses[0] == pytest.approx(losses[1], rel=0.01, abs=0.01)
    else:  # workers come in any order
        assert np.mean(losses[0]) == pytest.approx(np.mean(losses[1]), rel=0.3)
