"""A solver that computes data again before backward trains as one that keeps them, to the last bit:
on the CPU, and captured on a GPU.
"""

import logging
import re
from collections.abc import Callable

import numpy as np
import pytest
from google.protobuf import text_format

from caffepy.core.errors import DivergenceError
from caffepy.device import math_mode
from caffepy.device.cuda import CudaDevice
from caffepy.device.device import Device
from caffepy.layer.base import Drawing
from caffepy.net import Net, memory
from caffepy.net.memory import Usage, lifetimes
from caffepy.net.recompute import OVERHEAD_OF_HOST, arena, recomputed_layers
from caffepy.parallel.manager import p2p_manager
from caffepy.parallel.synchronization import SyncOptions
from caffepy.proto.caffe_pb2 import TRAIN, NetParameter, SolverParameter
from caffepy.solver import Solver
from tests.nets import library

from .cases import Recorder


def conv(name: str, bottom: str) -> str:
    return library.convolution(name, bottom, 6, 3, "pad: 1")


# A branch around two BatchNorms, one of them in place, as is Dropout after ReLU.
NET = (
    library.dummies(
        "in", 'type: "gaussian"', 'type: "uniform" max: 4.9', data=(4, 3, 8, 8), label=(4,)
    )
    + conv("a", "data")
    + library.relu("a_relu", "a")
    + library.in_place("Dropout", "a_drop", "a")
    + conv("b", "a")
    + library.normalization("b", "b", "b_normal")
    + library.relu("b_relu", "b_normal")
    + conv("c", "b_normal")
    + library.in_place("BatchNorm", "c_norm", "c")
    + library.layer("Eltwise", "sum", "b_normal c")
    + library.relu("sum_relu", "sum")
    + library.pooling("pool", "sum", "kernel_size: 2 stride: 2")
    + library.inner_product("ip1", "pool", 12)
    + library.relu("ip1_relu", "ip1")
    + library.in_place("Dropout", "ip1_drop", "ip1")
    + library.inner_product("ip2", "ip1", 5)
    + library.softmax_loss("ip2")
)
SETTINGS = (
    'base_lr: 0.05 lr_policy: "fixed" momentum: 0.9 random_seed: 3 display: 2 '
    "snapshot_after_train: false test_iter: 2 test_interval: 3 "
)


def solver_of(device: Device, settings: str = "", fuse: bool = True, **given: object) -> Solver:
    text = f'{SETTINGS} {settings} net_param {{ name: "again" {NET} }}'
    param = text_format.Parse(text, SolverParameter())
    solver = Solver(param, device=device, **given)  # type: ignore[arg-type]
    solver.fuse = fuse
    return solver


def trained(solver: Solver) -> list[np.ndarray]:
    """Weights, history and running statistics after some iterations; the solver is closed."""
    solver.step(7)
    with solver.device.scope():
        solver.device.flush()
        blobs = [blob for layer in solver.net.layers for blob in layer.statistics]
        arrays = [solver.params.data, *solver.history, *(blob.data for blob in blobs)]
        found = [np.array(solver.device.on_host(array)) for array in arrays]
    solver.close()
    return found


def assert_same(a: list[np.ndarray], b: list[np.ndarray]) -> None:
    for x, y in zip(a, b, strict=True):
        assert np.isfinite(x).all()
        np.testing.assert_array_equal(x, y)


DEVICES = [
    pytest.param(lambda: Device(seed=1), id="cpu"),
    pytest.param(lambda: CudaDevice(0, seed=1), id="gpu", marks=pytest.mark.gpu),
]


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_mode.default(), "deterministic", True)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("settings", ["", "iter_size: 2"])
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_training_is_the_same(device: Callable[[], Device], fuse: bool, settings: str) -> None:
    heard = Recorder(), Recorder()
    plain, saving = (solver_of(device(), settings, fuse, reporter=one) for one in heard)
    saving.save_memory(4)
    assert len(saving.net.recompute) >= 2
    assert_same(trained(plain), trained(saving))
    assert heard[0].events == heard[1].events
    assert heard[0].losses == heard[1].losses
    if saving.device.is_cuda:
        assert saving.iterations.step.graphs._replayed > 0


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("device", DEVICES)
def test_a_divergence_names_the_first_blob(device: Callable[[], Device], passes: int) -> None:
    """The iteration runs forward again, from where it began, and leaves all as if it had not."""
    said, states = [], []
    for capture, segments in ((False, 1), (True, 4)):
        solver = solver_of(device(), f"iter_size: {passes} ")
        solver.capture = capture
        if segments > 1:
            solver.save_memory(segments)
        solver.step(4)
        (weight,) = (blob for blob in solver.net.learnable_params if blob.shape == (12, 96))
        weight.host_data[3, 5] = np.nan
        with pytest.raises(DivergenceError) as error:
            solver.step(9)
        said.append(str(error.value))
        assert solver.iter == 4
        statistics = [
            blob.host_data.copy() for layer in solver.net.layers for blob in layer.statistics
        ]
        states.append(statistics)
    start = 'iteration 4: the loss is nan; the first blob that is not finite is "ip1" of layer '
    parameter = '; parameter 0 of layer "ip1" (InnerProduct) is not finite; lower base_lr'
    for one in said:
        assert one.startswith(f'{start}"ip1" (InnerProduct){parameter}')
    for a, b in zip(*states, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("segments", [1, 4])
def test_a_divergence_within_a_group_names_its_first_layer(segments: int) -> None:
    """What lies within a group is not written, and what stands in place writes over it."""
    solver = solver_of(Device(seed=1))
    if segments > 1:
        solver.save_memory(segments)
    solver.step(2)
    heard = list[int]()
    solver.net.before_forward.append(heard.append)
    names = solver.net.layer_names
    solver.net.layers[names.index("b")].blobs[0].host_data[...] = 3e38
    with pytest.raises(DivergenceError, match=r'first blob .* is "b" of layer "b" \(Convolution\)'):
        solver.step(1)
    assert len(heard) == len(names), "a callback hears of the pass once"


@pytest.mark.parametrize("segments", [1, 4])
def test_a_divergence_of_one_of_two_solvers_names_it_and_the_first_blob(segments: int) -> None:
    root = solver_of(Device(seed=1))
    root.save_memory(segments)

    def train() -> None:
        with p2p_manager(root, [root.device, Device(seed=2)], SyncOptions("tree")) as manager:
            root.step(2)
            net = manager.workers[0].net
            (weight, _) = net.layers[net.layer_names.index("ip1")].blobs
            net.before_forward.append(lambda _: weight.host_data.fill(np.nan))
            root.step(2)

    with pytest.raises(DivergenceError) as error:
        train()
    told = (
        'rank 1: iteration 2: the loss is nan; the first blob that is not finite is "ip1" of layer'
    )
    assert str(error.value).startswith(f'{told} "ip1" (InnerProduct); parameter 0 of layer "ip1"')


def test_a_divergence_whose_blob_is_not_found_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> str:
        raise ValueError

    monkeypatch.setattr("caffepy.solver.divergence.first_blob", fail)
    solver = solver_of(Device(seed=1))
    solver.save_memory(4)
    solver.step(4)
    before = solver.iterations.positions()
    solver.net.learnable_params[0].host_data[0] = np.nan
    with pytest.raises(
        DivergenceError, match=r'is nan; parameter 0 of layer "a" \(Con.*is not finite; low'
    ):
        solver.step(9)
    assert str(solver.iterations.positions()) == str(before)


def test_blobs_that_take_much_share_memory_without_recomputation(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain, small, saving = (solver_of(Device(seed=1)) for _ in range(3))
    with caplog.at_level(logging.INFO, "caffepy"):
        small.save_memory()
        assert not small.saves_memory
        assert not caplog.messages
        monkeypatch.setattr(memory, "WORTH", 1)
        saving.save_memory()
    assert saving.saves_memory
    assert re.search(r"Blobs of [\d.]+ MiB share [\d.]+ MiB", caplog.text)
    assert_same(trained(saving), trained(plain))


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_in_other_precisions(precision: str) -> None:
    plain, saving = (solver_of(CudaDevice(0, seed=1), precision=precision) for _ in range(2))
    saving.save_memory(4)
    assert_same(trained(plain), trained(saving))


class CountingDevice(Device):
    """A device of the host with a step counter, as a GPU has one."""

    step_counter = np.array(4, np.int64)


def test_numbers_are_drawn_again_after_the_pass_was_counted() -> None:
    """On a GPU the solver's kernel counts a pass as soon as its loss is known."""
    text = library.dummies("in", data=(2, 3)) + library.in_place("Dropout", "drop", "data")
    param = text_format.Parse(text, NetParameter())
    param.state.phase = TRAIN
    net = Net(param, device=CountingDevice(seed=1))
    drop = net.layers[-1]
    assert isinstance(drop, Drawing)
    drop.is_recomputed = True
    seed, counter = drop.draw()
    net.device.step_counter += 1
    drop.recomputes = True
    assert drop.draw() == (seed, counter) == (drop.seed, 4)
    drop.recomputes = False
    assert drop.draw() == (seed, 5)


def test_layers_know_that_they_are_recomputed() -> None:
    solver = solver_of(Device(seed=1))
    solver.save_memory(4)
    again = {i for steps in solver.net.recompute.values() for s in steps for i in s.indices}
    assert {i for i, layer in enumerate(solver.net.layers) if layer.is_recomputed} == again
    assert any(isinstance(solver.net.layers[i], Drawing) for i in again)


def test_only_as_many_layers_as_are_needed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "caffepy.net.recompute")
    plain = solver_of(Device(seed=1))
    usage = Usage(plain.net, plain.iterations.step.graphs.steps, True)
    size, want = arena(usage), trained(plain)
    again = []
    for room in (2 * size, int(0.9 * size), int(0.7 * size), 1):
        solver = solver_of(Device(seed=1))
        solver.save_memory("auto", room)
        again.append(sum(map(len, solver.net.recompute.values())))
        assert_same(trained(solver), want)
    assert again[0] == 0 < again[1] <= again[2] <= again[3]
    assert caplog.messages[0].startswith("Recomputing no layer")
    assert "a smaller batch_size helps" in caplog.messages[-2]
    assert len(lifetimes(usage)) > recomputed_layers(usage) == 0


def test_solvers_of_the_host_share_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    free = OVERHEAD_OF_HOST + (64 << 20)
    monkeypatch.setattr("caffepy.device.device.free_memory", lambda: free)
    rooms = []
    for solvers in (1, 2):
        solver = solver_of(Device(seed=1))
        solver.save_memory("auto", solvers=solvers)
        rooms.append(solver.recompute[1])
        arrays = 2 + (solvers > 1)  # gradient and history, and a worker's own parameters
        want = free // solvers - OVERHEAD_OF_HOST - arrays * solver.params.data.nbytes
        assert rooms[-1] == max(0, want)
        assert bool(solver.net.recompute) == (solvers == 2)
        solver.close()
    assert rooms[0] > rooms[1] == 0


def test_workers_do_as_the_root_does() -> None:
    found = []
    for recompute in (1, 3):
        root = solver_of(Device(seed=1), fuse=True)
        root.save_memory(recompute)
        devices = [root.device, Device(seed=2)]
        with p2p_manager(root, devices, SyncOptions("tree")) as manager:
            if recompute > 1:
                (worker,) = manager.workers
                assert worker.net.recompute.keys() == root.net.recompute.keys()
            root.step(4)
        found.append(root.params.data.copy())
        root.close()
    np.testing.assert_array_equal(*found)
