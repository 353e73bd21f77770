"""Teams on GPUs: they follow one solver on the CPU with the batch of all, replayed or not, by every way."""

from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format

from caffepy import ops
from caffepy.blob import Array
from caffepy.device import CudaDevice, Device
from caffepy.errors import DataError, UsageError
from caffepy.parallel import peers
from caffepy.proto.caffe_pb2 import SolverParameter
from caffepy.solver import Solver
from caffepy.team import Team, Terms
from tests.solver.cases import Recorder
from tests.team.cases import NET, SETTINGS, net

pytestmark = pytest.mark.gpus(2)

ONCE = SETTINGS.replace("iter_size: 2", "iter_size: 1")
ITERATIONS = 12


def train(settings: str, text: str, device: Device | None = None) -> tuple[Solver, Recorder]:
    recorder = Recorder()
    param = text_format.Parse(f"random_seed: 3 {settings} net_param {{ {text} }}", SolverParameter())
    return Solver(param, device=device, reporter=recorder, precision="fp32"), recorder


def finish(solver: Solver) -> None:
    solver.step(ITERATIONS)
    solver.test_all()


def on_gpus(
    size: int, sync: str, settings: str = ONCE, text: str = NET, capture: bool = True
) -> tuple[Recorder, list[Array]]:
    """What a team on the first GPUs tells, and the parameters of all solvers at the end."""
    devices = [CudaDevice(i) for i in range(size)]
    root, recorder = train(settings, net(3, text), devices[0])
    root.capture = capture
    topology = peers.prepare(peers.query(range(size)))
    with Team(root, devices, topology, Terms(sync, deadlines={"step": 60, "set-up": 300, "test": 60})) as team:
        finish(root)
        team.agree()
        data = [solver.device.on_host(solver.params.data) for solver in (root, *team._workers)]
    root.close()
    return recorder, data


@pytest.mark.parametrize(
    "size", [2, pytest.param(3, marks=pytest.mark.gpus(3)), pytest.param(4, marks=pytest.mark.gpus(4))]
)
@pytest.mark.parametrize("sync", ["nccl", "tree", "muji", "flat"])
@pytest.mark.parametrize("how", ["replayed", "two passes", "layer by layer"])
def test_solvers_follow_one_with_their_batches_together(how: str, sync: str, size: int) -> None:
    if sync == "muji" and size == 3:
        pytest.skip("muji has no schedule for 3")
    settings = SETTINGS if how == "two passes" else ONCE
    recorder, data = on_gpus(size, sync, settings, capture=how != "layer by layer")
    alone, expected = train(settings, net(3 * size))
    finish(alone)
    alone.close()
    np.testing.assert_allclose(recorder.losses, expected.losses, rtol=2e-4)
    np.testing.assert_allclose(data[0], alone.params.data, rtol=1e-3, atol=1e-4)
    for own, other in zip(recorder.tests, expected.tests, strict=True):
        np.testing.assert_allclose(float(own["loss"]), float(other["loss"]), rtol=5e-4)
    for other in data[1:] if sync != "tree" else ():
        np.testing.assert_array_equal(other, data[0])


def test_a_label_that_is_none_is_told_by_the_solver_that_met_it() -> None:
    few = NET.replace("num_output: 10", "num_output: 9")
    with pytest.raises(DataError, match="label"):
        on_gpus(2, "nccl", text=few)


class KilledError(Exception):
    """What ends a worker."""


@pytest.mark.parametrize("sync", ["nccl", "tree", "flat"])
def test_a_worker_that_fails_ends_all_with_a_snapshot(sync: str, tmp_path: Path) -> None:
    settings = f'{ONCE} snapshot_prefix: "{tmp_path}/s" snapshot: 100 max_iter: 12 '
    devices = [CudaDevice(i) for i in range(2)]
    root, _ = train(settings, net(3), devices[0])
    deadlines = {"step": 60.0, "set-up": 300.0, "test": 60.0}

    def run() -> None:
        with Team(root, devices, peers.prepare(peers.query([0, 1])), Terms(sync, deadlines=deadlines)) as team:
            (worker,) = team._workers
            perform = worker._step.perform

            def fail() -> None:
                if worker.iter == 7:
                    raise KilledError
                perform()

            worker._step.perform = fail  # type: ignore[method-assign]
            root.solve()

    with pytest.raises(KilledError):
        run()
    root.close()
    assert root.iter == 7
    state = f"{tmp_path}/s_iter_7.solverstate"
    resumed, _ = train(settings, net(3), CudaDevice(0))
    resumed.restore(state)
    resumed.device.flush()
    straight, _ = train(settings, net(6), CudaDevice(0))
    straight.step(7)
    np.testing.assert_allclose(
        resumed.device.on_host(resumed.params.data),
        straight.device.on_host(straight.params.data),
        rtol=1e-3,
        atol=1e-4,
    )


def test_the_tree_is_not_for_fp16() -> None:
    param = text_format.Parse(f"random_seed: 3 {ONCE} net_param {{ {net(3)} }}", SolverParameter())
    devices = [CudaDevice(i) for i in range(2)]
    root = Solver(param, device=devices[0], precision="fp16")
    with pytest.raises(UsageError, match="--sync tree is not for fp16"):
        Team(root, devices, peers.prepare(peers.query([0, 1])), Terms("tree"))
    root.close()
    ops.set_precision(devices[0], "fp32")
