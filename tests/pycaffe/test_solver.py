from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import h5py
import numpy as np
import pytest

import caffepy as caffe
from caffepy.device import threads
from tests.nets import library
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


def test_get_solver_makes_the_class_of_the_type(path: str) -> None:
    assert type(caffe.get_solver(path)) is caffe.AdaDeltaSolver
    Path(path).write_text(Path(path).read_text().replace('type: "AdaDelta"', ""))
    assert type(caffe.get_solver(path)) is caffe.SGDSolver
    with pytest.raises(RuntimeError, match=r"Could not open file gone\.prototxt"):
        caffe.get_solver("gone.prototxt")


def test_rates_may_be_set(path: str) -> None:
    solver = caffe.SGDSolver(path)
    assert (solver.param.max_iter, solver.param.display, solver.param.layer_wise_reduce) == (
        0,
        0,
        True,
    )
    assert solver.lr == pytest.approx(0.1)
    solver.param.base_lr = 0.01
    assert solver.lr == pytest.approx(0.01)


def test_steps_are_whole_and_paths_may_be_bytes(path: str) -> None:
    solver = caffe.SGDSolver(path.encode())
    solver.step(np.int64(2))
    with pytest.raises(TypeError, match="'float' object cannot be interpreted as an integer"):
        solver.step(2.5)  # type: ignore[arg-type]
    assert solver.iter == 2


def test_callbacks_are_two_functions(path: str) -> None:
    solver = caffe.SGDSolver(path)
    heard: list[str] = []
    solver.add_callback(lambda: heard.append("start"), lambda: heard.append("gradients"))
    solver.step(2)
    assert heard == ["start", "gradients"] * 2
    with pytest.raises(
        RuntimeError, match="two functions, on_start and on_gradients_ready, or an NCCL"
    ):
        solver.add_callback(heard.append)


def test_share_weights(path: str) -> None:
    solver, other = caffe.SGDSolver(path), caffe.SGDSolver(path)
    solver.share_weights(other.net)
    solver.net.params["ip"][0].data[...] = 7
    assert (other.net.params["ip"][0].data == 7).all()


def test_a_solver_that_is_not_the_root_follows(tmp_path: Path) -> None:
    file = tmp_path / "solver.prototxt"
    file.write_text(
        f"{SETTINGS} test_iter: 1 test_interval: 1 display: 1 snapshot: 1 max_iter: 3 "
        f'snapshot_prefix: "{tmp_path}/run" net_param {{ {NET} }}'
    )
    root = caffe.SGDSolver(str(file))
    caffe.set_solver_count(2)
    caffe.set_solver_rank(1)
    try:
        assert (caffe.solver_count(), caffe.solver_rank()) == (2, 1)
        follower = caffe.SGDSolver(str(file))
    finally:
        caffe.set_solver_count(1)
        caffe.set_solver_rank(0)
    follower.solve()
    assert follower.iter == 3
    assert not list(tmp_path.glob("run*"))
    assert (
        follower.net.params["ip"][0].data != root.net.params["ip"][0].data
    ).any()  # its seed is another
    root.step(1)
    assert list(tmp_path.glob("run_iter_1*"))


ROWS = library.regression(
    library.layer(
        "HDF5Data", "rows", "", 'hdf5_data_param { source: "%s" batch_size: %d }', top="x y"
    )
)


@pytest.fixture
def rows(tmp_path: Path) -> str:
    """A list of an HDF5 file with 40 rows."""
    rng = np.random.default_rng(0)
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file["x"] = rng.standard_normal((40, 3)).astype(np.float32)
        file["y"] = rng.standard_normal((40, 2)).astype(np.float32)
    (tmp_path / "rows.txt").write_text(f"{tmp_path / 'rows.h5'}\n")
    return str(tmp_path / "rows.txt")


def test_overflows_are_silent_on_all_threads(tmp_path: Path) -> None:
    """Warnings are errors here."""
    before = threads.num_threads()
    threads.set_num_threads(3)
    try:
        file = tmp_path / "net.prototxt"
        shape = "shape { dim: 256 dim: 256 }"
        file.write_text(
            f'layer {{ name: "x" type: "Input" top: "x" input_param {{ {shape} }} }}'
            + library.layer("InnerProduct", "ip", "x", "inner_product_param { num_output: 256 }")
        )
        net = caffe.Net(str(file), caffe.TRAIN)
        net.params["ip"][0].data[...] = net.blobs["x"].data[...] = 1e30
        assert np.isinf(net.forward()["ip"]).all()
    finally:
        threads.set_num_threads(before)


def step_and_do(solver: "caffe.SGDSolver", action: Callable[[], object]) -> None:
    with solver.together(cpus=2):
        solver.step(1)
        action()
        solver.step(1)


def test_solvers_on_the_cpu_train_together(rows: str, tmp_path: Path) -> None:
    """Two solvers with half the batch are one with the whole."""
    solvers = []
    for batch in (8, 4):
        file = tmp_path / f"{batch}.prototxt"
        file.write_text(f"{SETTINGS} net_param {{ {ROWS % (rows, batch)} }}")
        solvers.append(caffe.SGDSolver(str(file)))
    one, two = solvers
    one.step(5)
    with two.together(cpus=2):
        two.step(3)
        two.step(2)
    np.testing.assert_allclose(
        two.net.params["ip"][0].data, one.net.params["ip"][0].data, rtol=1e-5
    )
    with pytest.raises(ZeroDivisionError):
        step_and_do(two, lambda: 1 / 0)
    two.step(1)
    assert two.iter == 7
    for settings in ({"gpus": [0]}, {}):
        with (
            pytest.raises(RuntimeError, match="this solver is on the CPU: give cpus=2"),
            two.together(**settings),
        ):
            pass


def fail(_: int) -> None:
    raise ValueError("mine")


def test_an_error_in_an_iteration_ends_all_solvers(rows: str, tmp_path: Path) -> None:
    file = tmp_path / "solver.prototxt"
    file.write_text(f"{SETTINGS} net_param {{ {ROWS % (rows, 4)} }}")
    solver = caffe.SGDSolver(str(file))
    with pytest.raises(ValueError, match="mine"):
        step_and_do(solver, lambda: solver.net.after_forward(fail))
    again = caffe.SGDSolver(str(file))
    with again.together(cpus=2):
        again.step(2)


def test_an_error_that_the_block_catches_ends_it(rows: str, tmp_path: Path) -> None:
    file = tmp_path / "solver.prototxt"
    file.write_text(
        f'{SETTINGS} snapshot_prefix: "{tmp_path}/s" net_param {{ {ROWS % (rows, 4)} }}'
    )
    solver = caffe.SGDSolver(str(file))
    solver.net.after_forward(fail)

    def train() -> None:
        with solver.together(cpus=2), suppress(ValueError):
            solver.step(1)

    with pytest.raises(ValueError, match="mine"):
        train()
    for more in (
        lambda: solver.step(1),
        train,
        lambda: solver.restore(f"{tmp_path}/s_iter_0.solverstate"),
    ):
        with pytest.raises(RuntimeError, match="until an error ended that, and cannot go on"):
            more()
    solver.snapshot()
    assert (tmp_path / "s_iter_0.solverstate").exists()


def test_an_error_of_a_solver_alone_condemns_no_block(rows: str, tmp_path: Path) -> None:
    file = tmp_path / "solver.prototxt"
    file.write_text(f"{SETTINGS} net_param {{ {ROWS % (rows, 4)} }}")
    solver = caffe.SGDSolver(str(file))
    errors = [ValueError("once")]

    def fail_once(_: int) -> None:
        if errors:
            raise errors.pop()

    solver.net.after_forward(fail_once)
    with pytest.raises(ValueError, match="once"):
        solver.step(1)
    with pytest.raises(KeyError), solver.together(cpus=2):
        raise KeyError("outside of steps")
    solver.step(1)
    assert solver.iter == 1
