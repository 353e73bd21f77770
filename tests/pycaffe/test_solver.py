from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import caffepy as caffe
from tests.solver.cases import NET, SETTINGS


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "solver.prototxt"
    file.write_text(f'{SETTINGS} type: "AdaDelta" delta: 1e-6 net_param {{ {NET} }}')
    return str(file)


@pytest.mark.parametrize("kind", ["SGD", "Nesterov", "AdaGrad", "RMSProp", "AdaDelta", "Adam"])
def test_classes_ignore_the_type_of_the_file(kind: str, path: str) -> None:
    if kind in ("AdaGrad", "RMSProp"):
        Path(path).write_text(Path(path).read_text().replace("momentum: 0.9", ""))
    solver = getattr(caffe, f"{kind}Solver")(path)
    assert solver.param.type == kind
    solver.step(2)
    assert solver.iter == 2
    assert caffe.get_solver(path).param.type == "AdaDelta"


def test_lr_is_the_rate_of_the_next_iteration(path: str) -> None:
    settings = 'lr_policy: "step" gamma: 0.5 stepsize: 2'
    Path(path).write_text(Path(path).read_text().replace('lr_policy: "fixed"', settings))
    solver = caffe.SGDSolver(path)
    assert solver.lr == pytest.approx(0.1)
    solver.step(2)
    assert solver.lr == pytest.approx(0.05)


@pytest.fixture
def on_gpu() -> Iterator[None]:
    caffe.set_mode_gpu()
    yield
    caffe.set_mode_cpu()


@pytest.mark.gpu
@pytest.mark.usefixtures("on_gpu")
def test_a_gpu_replays_steps_between_which_python_reads_and_writes(path: str) -> None:
    ended = []
    for capture in (True, False):
        caffe.set_random_seed(1)
        solver = caffe.get_solver(path)
        solver.capture = capture
        assert solver.fuse
        losses = []
        for i in range(8):
            solver.step(2)
            losses.append(float(solver.net.blobs["loss"].data))
            solver.net.params["ip"][0].data[...] *= 0.99
            solver.net.params["ip"][1].diff[...] = i
        ended.append((losses, solver.net.params["ip"][0].data.copy()))
    assert ended[0][0] == ended[1][0]
    np.testing.assert_array_equal(ended[0][1], ended[1][1])


@pytest.mark.gpu
@pytest.mark.usefixtures("on_gpu")
def test_callbacks_on_a_gpu_are_called_in_each_iteration(path: str) -> None:
    solver, calls = caffe.get_solver(path), []
    solver.step(5)
    solver.add_callback(lambda: calls.append("start"), lambda: calls.append("ready"))
    solver.step(3)
    assert calls == ["start", "ready"] * 3


@pytest.mark.gpu
@pytest.mark.usefixtures("on_gpu")
def test_updates_by_hand_on_a_gpu(path: str) -> None:
    solver = caffe.SGDSolver(path)
    solver.net.forward()
    solver.net.backward()
    weight = solver.net.params["ip"][0]
    before = weight.data.copy()
    weight.diff[...] = 2
    solver.apply_update()
    np.testing.assert_allclose(weight.data, before - 0.2, rtol=1e-6)
