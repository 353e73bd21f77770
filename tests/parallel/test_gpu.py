"""On GPUs n solvers with batch b train like one with batch n * b: captured or not, with every
synchronizer, in fp32.
"""

import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from google.protobuf import text_format

from caffepy import models, ops
from caffepy.collectives import one_shot, peer_copies, peers
from caffepy.collectives.topology import Topology
from caffepy.core.errors import DataError
from caffepy.data.write import array_to_datum, write_database
from caffepy.device import math_mode
from caffepy.device.blob import Array
from caffepy.device.cuda import CudaDevice
from caffepy.device.device import Device
from caffepy.models.synthetic import image_shape
from caffepy.net import gradients
from caffepy.parallel.manager import P2PManager
from caffepy.parallel.synchronization import SyncOptions
from caffepy.proto.caffe_pb2 import TEST, NetParameter, SolverParameter
from caffepy.solver import Action, Solver
from tests.nets import library
from tests.nets.library import DIGITS
from tests.parallel.cases import LOSSY, NET, SETTINGS, net
from tests.solver.cases import AskAt, Recorder, Several, ask, no_signal

pytestmark = pytest.mark.gpus(2)

SIZES = [2, pytest.param(4, marks=pytest.mark.gpus(4))]
SYNCS = ["nccl", "tree", "muji", "flat"]
ONCE = SETTINGS.replace("iter_size: 2", "iter_size: 1")
ITERATIONS = 12
DEADLINES = {"step": 60.0, "set-up": 300.0, "test": 60.0}


def train(
    settings: str, text: str, device: Device | None = None, precision: str = "fp32"
) -> tuple[Solver, Recorder]:
    recorder = Recorder()
    param = text_format.Parse(
        f"random_seed: 3 {settings} net_param {{ {text} }}", SolverParameter()
    )
    return Solver(param, device=device, reporter=recorder, precision=precision), recorder


class Ran(NamedTuple):
    """Return what was displayed, the root's parameters before, and at the end those of all solvers that
    update theirs.
    """

    losses: list[float]
    tests: list[dict[str, Array]]
    before: Array
    data: list[Array]

    @property
    def moved(self) -> Array:
        """The change of the root's parameters."""
        return self.data[0] - self.before


def params(solver: Solver) -> Array:
    """A copy on the host of all parameters."""
    solver.device.flush()
    return np.array(solver.device.on_host(solver.params.data))


def all_params(manager: P2PManager) -> list[Array]:
    """Copies of all solvers' parameters, after what the workers' threads were given."""
    manager.raise_worker_error()
    return [params(solver) for solver in (manager.root, *manager.workers)]


def on_gpus(
    size: int,
    sync: str,
    settings: str = ONCE,
    text: str | None = None,
    iterations: int = ITERATIONS,
    bn_stats: str = "average",
    precision: str = "fp32",
    wire: str = "float32",
    **how: bool,
) -> Ran:
    """Train on the first GPUs; `how` sets attributes of the root."""
    devices = [CudaDevice(i) for i in range(size)]
    topology = peers.prepare(peers.query(range(size)))
    options = SyncOptions(sync, bn_stats, DEADLINES, wire)
    return on(devices, topology, options, settings, text, iterations, precision, **how)


def on(
    devices: Sequence[CudaDevice],
    topology: Topology,
    options: SyncOptions,
    settings: str = ONCE,
    text: str | None = None,
    iterations: int = ITERATIONS,
    precision: str = "fp32",
    **how: bool,
) -> Ran:
    """Train on these devices, joined like this."""
    root, recorder = train(settings, net(3) if text is None else text, devices[0], precision)
    for name, value in how.items():
        setattr(root, name, value)
    before = params(root)
    with P2PManager(root, devices, topology, options) as manager:
        root.step(iterations)
        root.test_all()
        manager.statistics.average()
        data = all_params(manager)
    root.close()
    if options.sync == "tree":
        del data[1:]
    return Ran(recorder.losses, recorder.tests, before, data)


def alone(
    settings: str, text: str, device: Device | None = None, iterations: int = ITERATIONS
) -> Ran:
    """One solver."""
    solver, recorder = train(settings, text, device)
    before = params(solver)
    solver.step(iterations)
    solver.test_all()
    data = params(solver)
    solver.close()
    return Ran(recorder.losses, recorder.tests, before, [data])


@pytest.mark.parametrize("size", [*SIZES, pytest.param(3, marks=pytest.mark.gpus(3))])
@pytest.mark.parametrize("sync", [*SYNCS, "nccl, copied", "nccl alone"])
@pytest.mark.parametrize("how", ["replayed", "two passes", "layer by layer"])
def test_solvers_follow_one_on_the_cpu(
    how: str, sync: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sync == "muji" and size == 3:
        pytest.skip("muji has no schedule for 3")
    if sync not in SYNCS:
        monkeypatch.setattr(one_shot, "MOST", 0)
        if sync == "nccl alone":
            monkeypatch.setattr(peer_copies, "MOST", 0)
        sync = "nccl"
    settings = SETTINGS if how == "two passes" else ONCE
    ran = on_gpus(size, sync, settings, capture=how != "layer by layer")
    follow_the_cpu(ran, settings, size)


def follow_the_cpu(ran: Ran, settings: str, size: int) -> None:
    """The run went where one solver on the CPU with the batch of so many goes."""
    expected = alone(settings, net(3 * size))
    np.testing.assert_allclose(ran.losses, expected.losses, rtol=2e-4)
    np.testing.assert_allclose(ran.data[0], expected.data[0], rtol=1e-3, atol=1e-4)
    for own, other in zip(ran.tests, expected.tests, strict=True):
        np.testing.assert_allclose(float(own["loss"]), float(other["loss"]), rtol=5e-4)
    agree(ran)


def agree(ran: Ran) -> None:
    """All solvers that update their parameters have the same, to the last bit."""
    for other in ran.data[1:]:
        np.testing.assert_array_equal(other, ran.data[0])


class Case(NamedTuple):
    """A bundled net: images for each solver and pass, iterations, the rate, and the bounds.

    `moved` bounds ||together - alone|| / ||alone|| of the way that all parameters went in training, not
    of the parameters, which hardly move. float32 sums of batches that are cut in another way, by
    kernels chosen for another batch, differ by some 1e-6 each; a wrong scale or a batch that is
    left out or used twice gives 1e-1 and more. ReLU and max pooling make steps of rounding, so that
    it grows with depth and iterations. Where there is a `side`, images are no larger than that and
    inner products no wider than WIDEST, so that a run takes seconds.
    """

    batch: int
    iterations: int
    settings: str
    loss: float
    moved: float
    side: int = 0


WIDEST = 512
USUAL = (
    'lr_policy: "step" gamma: 0.5 stepsize: 4 momentum: 0.9 weight_decay: 0.0005 clip_gradients: 3 display: 1 '
    "test_interval: 1000 test_initialization: false "
)
CASES = {
    "digits": Case(5, 20, f"{USUAL} base_lr: 0.05 test_iter: 3", 1e-3, 5e-3),
    "lenet": Case(4, 12, f"{USUAL} base_lr: 0.01 test_iter: 3", 1e-3, 5e-3),
    "caffenet": Case(4, 5, f"{USUAL} base_lr: 0.01 test_iter: 2", 1e-3, 1e-2, side=115),
}
IMAGES = 64


@pytest.fixture(autouse=True)
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time goes into the choice of plans."""
    from caffepy.ops.cuda import autotune

    monkeypatch.setattr(autotune, "_autotune", False)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The LMDB of a net's images: those of the digits, else ten patterns, each with noise."""

    @cache
    def made(name: str) -> str:
        if name == "digits":
            return f"{DIGITS}/digits_train_lmdb"
        folder = str(tmp_path_factory.mktemp(name) / "lmdb")
        draw = np.random.default_rng(5)
        channels, *sides = image_shape(name)
        shape = channels, *(CASES[name].side or side for side in sides)
        patterns = draw.integers(0, 192, (10, *shape), np.uint8)
        with write_database(folder) as writer:
            for i in range(IMAGES):
                image = patterns[i % 10] + draw.integers(0, 64, shape, np.uint8)
                writer.put(f"{i:08d}", array_to_datum(image, i % 10))
        return folder

    return made


def bundled(name: str, batch: int, source: str) -> str:
    """The net on these images, so many at a time, without dropout; mirrors and crops go with the
    images.
    """
    with open(os.fspath(models.path(name, "train_val") or "")) as file:
        param = text_format.Parse(file.read(), NetParameter())
    for layer in param.layer:
        if layer.type == "Data":
            layer.data_param.source = source
            layer.data_param.batch_size = 7 if layer.include[0].phase == TEST else batch
        if side := CASES[name].side:
            if layer.transform_param.crop_size:
                layer.transform_param.crop_size = side
            if layer.type == "InnerProduct":
                layer.inner_product_param.num_output = min(
                    layer.inner_product_param.num_output, WIDEST
                )
        if layer.type == "Dropout":  # each solver draws numbers of its own
            layer.dropout_param.dropout_ratio = 0
    return text_format.MessageToString(param, as_one_line=True)


@cache
def one(name: str, source: str, passes: int, size: int) -> Ran:
    """One solver on GPU 0 with the batch of so many, layer by layer."""
    case = CASES[name]
    settings = f"{case.settings} iter_size: {passes}"
    return alone(settings, bundled(name, case.batch * size, source), CudaDevice(0), case.iterations)


def follow(name: str, size: int, ran: Ran, source: str, passes: int = 1) -> None:
    """The run went where one solver with the batch of all goes."""
    case, expected = CASES[name], one(name, source, passes, size)
    np.testing.assert_allclose(ran.losses, expected.losses, rtol=case.loss)
    error = np.linalg.norm(ran.moved - expected.moved) / np.linalg.norm(expected.moved)
    assert error <= case.moved
    for own, other in zip(ran.tests, expected.tests, strict=True):
        np.testing.assert_allclose(float(own["loss"]), float(other["loss"]), rtol=case.loss)
    agree(ran)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("name", CASES)
def test_solvers_follow_one(name: str, sync: str, size: int, images: Callable[[str], str]) -> None:
    case, source = CASES[name], images(name)
    ran = on_gpus(size, sync, case.settings, bundled(name, case.batch, source), case.iterations)
    follow(name, size, ran, source)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("name", ["digits", "lenet"])
def test_solvers_follow_one_in_passes(
    name: str, sync: str, size: int, images: Callable[[str], str]
) -> None:
    case, source = CASES[name], images(name)
    settings = f"{case.settings} iter_size: 2"
    ran = on_gpus(size, sync, settings, bundled(name, case.batch, source), case.iterations)
    follow(name, size, ran, source, passes=2)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("how", ["replayed", "layer by layer"])
@pytest.mark.parametrize("name", ["lenet", "caffenet"])
@pytest.mark.usefixtures("always_factors")
def test_solvers_that_exchange_factors_follow_one(
    name: str, how: str, size: int, images: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    case, source = CASES[name], images(name)
    text = bundled(name, case.batch, source)
    with caplog.at_level("INFO", "caffepy.parallel"):
        ran = on_gpus(size, "nccl", case.settings, text, case.iterations, capture=how == "replayed")
    assert re.search(r"the factors of the weight gradients of (ip1|fc6, fc7)", caplog.text)
    follow(name, size, ran, source)


@pytest.mark.usefixtures("always_factors", "deterministic")
def test_large_weights_are_updated_by_the_factors_of_all_solvers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without their gradients, where no script may look at these; and as with them, to the bit."""
    text = (
        library.dummies(
            "in", 'type: "gaussian"', 'type: "uniform" max: 9.9', data=(32, 2048), label=(32,)
        )
        + library.inner_product("first", "data", 1024)
        + library.relu("relu", "first")
        + library.inner_product("second", "first", 10)
        + library.softmax_loss("second")
    )
    updated, ended = list[tuple[int, ...]](), list[list[bytes]]()
    devices = [CudaDevice(0), CudaDevice(1)]
    backend: Any = ops.backend(devices[0])
    of_factors, calls = backend.product_update, list[int]()

    def noted(rule: str, a: Array, b: Array, *more: Any) -> None:
        updated.append(a.shape)
        of_factors(rule, a, b, *more)

    monkeypatch.setattr(backend, "product_update", noted)
    for looks in (False, True):
        settings = 'base_lr: 0.01 lr_policy: "fixed" momentum: 0.9 weight_decay: 0.001 display: 1 '
        root, recorder = train(settings, text, devices[0], "bf16")
        root.iterations.step.scripts_look = looks
        topology = peers.prepare(peers.query(range(2)))
        with P2PManager(
            root, devices, topology, SyncOptions("nccl", deadlines=DEADLINES)
        ) as manager:
            root.step(ITERATIONS)
            data = [each.tobytes() for each in all_params(manager)]
        root.close()
        assert len(set(data)) == 1
        ended.append([*data, np.array(recorder.losses).tobytes()])
        calls.append(len(updated))
    assert set(updated) == {(64, 1024)}
    assert calls[0] == calls[1]
    assert ended[0] == ended[1]


STAYING = library.small_convolution(
    library.dummies("in", 'type: "gaussianstatic"', "value: 3", data=(6, 1, 8, 8), label=(6,))
)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("sync", SYNCS)
def test_iterations_of_one_graph_are_those_that_are_enqueued_singly(
    sync: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("caffepy.solver.iteration.TIMED", 3)
    monkeypatch.setattr("caffepy.solver.iteration.LONGEST", float("inf"))
    devices, topology = [CudaDevice(0), CudaDevice(1)], peers.prepare(peers.query(range(2)))
    ended = list[tuple[list[float], list[bytes]]]()
    for several in (True, False):
        param = text_format.Parse(
            "random_seed: 3 base_lr: 0.01 momentum: 0.9 display: 30 average_loss: 3 "
            f'lr_policy: "step" gamma: 0.5 stepsize: 13 net_param {{ {STAYING} }}',
            SolverParameter(),
        )
        root = Solver(param, device=devices[0], reporter=(recorder := Several()))
        root.action = no_signal if several else ask
        options = SyncOptions(sync, deadlines=DEADLINES)
        with P2PManager(root, devices, topology, options) as manager:
            root.step(70)
            manager.raise_worker_error()
            for solver in (root, *manager.workers):
                part = solver.iterations.step.graphs._parts.get("8 iterations")
                assert (part is not None and part.graph is not None) == several
            data = [each.tobytes() for each in all_params(manager)]
        root.close()
        ended.append((recorder.losses, data))
    assert ended[0] == ended[1]


IP = 'layer { name: "ip" type: "InnerProduct" bottom: '
BRANCHES = NET.replace(
    IP + '"pool"',
    library.inner_product("first", "pool", 24)
    + library.inner_product("second", "pool", 24)
    + library.relu("second relu", "second")
    + library.relu("first relu", "first")
    + library.layer("Eltwise", "sum", "first second")
    + IP
    + '"sum"',
)


class Heard:
    """A callback that cannot be captured, so that its solver runs layer by layer."""

    def on_start(self) -> None:
        """Nothing."""

    def on_gradients_ready(self) -> None:
        """Nothing."""


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("heard", [False, True], ids=["all alike", "the root layer by layer"])
@pytest.mark.usefixtures("always_factors", "deterministic")
def test_layers_run_in_another_order_in_runs(
    heard: bool, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    text = net(3, BRANCHES)
    root, recorder = train(ONCE, text, CudaDevice(0))
    devices = [root.device, *(CudaDevice(i) for i in range(1, size))]
    with (
        caplog.at_level("INFO", "caffepy.parallel"),
        P2PManager(
            root,
            devices,
            peers.prepare(peers.query(range(size))),
            SyncOptions("nccl", deadlines=DEADLINES),
        ) as manager,
    ):
        if heard:
            root.add_callback(Heard())
        root.step(ITERATIONS)
        data = all_params(manager)
    root.close()
    assert "the factors of the weight gradients of first, second" in caplog.text
    for other in data[1:]:
        np.testing.assert_array_equal(other, data[0])
    expected = alone(ONCE, net(3 * size, BRANCHES))
    np.testing.assert_allclose(recorder.losses, expected.losses, rtol=2e-4)
    np.testing.assert_allclose(data[0], expected.data[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("of_root", [True, False], ids=["root", "worker"])
@pytest.mark.parametrize("sync", SYNCS)
def test_a_solver_may_run_layer_by_layer_while_others_replay_graphs(
    sync: str, of_root: bool, size: int
) -> None:
    """All meet at the data layers and where parameters are brought in the same order."""
    root, recorder = train(ONCE, net(3), CudaDevice(0))
    devices = [root.device, *(CudaDevice(i) for i in range(1, size))]
    topology = peers.prepare(peers.query(range(size)))
    options = SyncOptions(sync, deadlines=DEADLINES)
    with P2PManager(root, devices, topology, options) as manager:
        [root, *manager.workers][0 if of_root else size // 2].add_callback(Heard())
        root.step(ITERATIONS)
        data = params(root)
    root.close()
    expected = alone(ONCE, net(3 * size))
    np.testing.assert_allclose(recorder.losses, expected.losses, rtol=2e-4)
    np.testing.assert_allclose(data, expected.data[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
@pytest.mark.usefixtures("deterministic")
def test_factors_give_what_gradients_give(
    precision: str, size: int, images: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the rounding of the precision; the solvers agree to the last bit."""
    case, text = CASES["caffenet"], bundled("caffenet", CASES["caffenet"].batch, images("caffenet"))
    reduced = on_gpus(size, "nccl", case.settings, text, case.iterations, precision=precision)
    monkeypatch.setattr(gradients, "LARGE", 0)
    made, again = (
        on_gpus(size, "nccl", case.settings, text, case.iterations, precision=precision)
        for _ in range(2)
    )
    agree(made)
    np.testing.assert_array_equal(made.data[0], again.data[0])
    np.testing.assert_allclose(made.losses, reduced.losses, rtol=1e-2)
    assert np.linalg.norm(made.moved - reduced.moved) <= 5e-2 * np.linalg.norm(reduced.moved)
    assert not np.array_equal(made.data[0], reduced.data[0])  # they went another way


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("how", ["replayed", "two passes", "layer by layer"])
def test_gradients_in_16_bits_give_about_the_same(how: str, size: int) -> None:
    """NCCL rounds them on one node, too, if it is asked to: the solvers agree to the last bit."""
    settings, capture = SETTINGS if how == "two passes" else ONCE, how != "layer by layer"
    exact, rounded = (
        on_gpus(size, "nccl", settings, wire=wire, capture=capture) for wire in ("float32", "bf16")
    )
    agree(rounded)
    np.testing.assert_allclose(rounded.losses, exact.losses, rtol=2e-2)
    apart = np.linalg.norm(rounded.moved - exact.moved)
    assert 0 < apart < 5e-2 * np.linalg.norm(exact.moved)


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs keep to fixed orders of sums."""
    monkeypatch.setattr(math_mode.default(), "deterministic", True)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.usefixtures("deterministic")
def test_deterministic_runs_repeat_bit_for_bit(
    sync: str, size: int, images: Callable[[str], str]
) -> None:
    case, text = CASES["lenet"], bundled("lenet", CASES["lenet"].batch, images("lenet"))
    first, again = (on_gpus(size, sync, case.settings, text, case.iterations) for _ in range(2))
    assert first.losses == again.losses
    np.testing.assert_array_equal(first.data[0], again.data[0])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.usefixtures("deterministic")
def test_replays_give_what_layers_one_by_one_give(
    sync: str, size: int, images: Callable[[str], str]
) -> None:
    """To rounding: layers that are computed together round once where they round twice by
    themselves.
    """
    case, text = CASES["lenet"], bundled("lenet", CASES["lenet"].batch, images("lenet"))
    replayed = on_gpus(size, sync, case.settings, text, case.iterations)
    one_by_one = on_gpus(
        size, sync, case.settings, text, case.iterations, capture=False, fuse=False
    )
    np.testing.assert_allclose(replayed.losses, one_by_one.losses, rtol=1e-4)
    error = np.linalg.norm(replayed.moved - one_by_one.moved) / np.linalg.norm(one_by_one.moved)
    assert error <= 1e-3


NORMALIZED = NET.replace(
    'layer { name: "pool"',
    'layer { name: "bn" type: "BatchNorm" bottom: "conv" top: "conv" } layer { name: "pool"',
)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("sync", ["nccl", "tree"])
def test_solvers_normalize_their_batches_as_one(sync: str, size: int) -> None:
    ran = on_gpus(size, sync, text=net(4, NORMALIZED), bn_stats="sync")
    expected = alone(ONCE, net(4 * size, NORMALIZED))
    np.testing.assert_allclose(ran.losses, expected.losses, rtol=2e-4)
    np.testing.assert_allclose(ran.data[0], expected.data[0], rtol=1e-3, atol=1e-4)
    agree(ran)


def test_a_label_that_is_none_is_told_by_the_solver_that_met_it() -> None:
    few = NET.replace("num_output: 10", "num_output: 9")
    with pytest.raises(DataError, match="label"):
        on_gpus(2, "nccl", text=net(3, few))


@pytest.mark.parametrize("sync", ["nccl", "flat"])
@pytest.mark.usefixtures("deterministic")
def test_a_stop_in_the_second_test_changes_nothing(sync: str, tmp_path: Path) -> None:
    """Random numbers of the nets and of the tests go on as in a run that was not stopped, to the
    last bit.
    """
    both = 'test_iter: 2 test_interval: 4 test_iter: 2 test_state { stage: "a" } test_state { stage: "b" } '
    settings = f'{re.sub(r"test_i[^ ]*: [^ ]* ", "", ONCE)} {both} snapshot_prefix: "{tmp_path}/s" '

    def run(state: str | None = None, stop_at: int = 0) -> tuple[Solver, Array]:
        devices = [CudaDevice(i) for i in range(2)]
        root, _ = train(settings, LOSSY, devices[0])
        if state:
            root.restore(state)
        if stop_at:
            root.action = AskAt(stop_at, Action.STOP)
        with P2PManager(
            root,
            devices,
            peers.prepare(peers.query([0, 1])),
            SyncOptions(sync, deadlines=DEADLINES),
        ) as manager:
            root.step(9 - root.iter)
            manager.statistics.average()
            data = params(root)
            if stop_at:
                root.snapshot()
        root.close()
        return root, data

    _, whole = run()
    stopped, _ = run(
        stop_at=8
    )  # polls: a round of both tests at 0, 4 iterations, a round of each test at 4
    assert stopped.iter == 4
    _, resumed = run(stopped.resume_state.saved_now)
    np.testing.assert_array_equal(resumed, whole)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.usefixtures("deterministic")
def test_stop_and_resume_changes_nothing(sync: str, size: int, tmp_path: Path) -> None:
    """A run in parts, each in new solvers, has the parameters, losses and tests of one in a piece,
    to the last bit.
    """
    every = ONCE.replace("test_interval: 20", "test_interval: 4")
    settings = f'{every} snapshot_prefix: "{tmp_path}/s" '

    def run(ends: list[int]) -> Ran:
        losses, tests, data, state = list[float](), list[dict[str, Array]](), list[Array](), None
        for until in ends:
            devices = [CudaDevice(i) for i in range(size)]
            root, recorder = train(settings, LOSSY, devices[0])
            if state:
                root.restore(state)
            before = params(root)
            joined = peers.prepare(peers.query(range(size)))
            with P2PManager(
                root, devices, joined, SyncOptions(sync, deadlines=DEADLINES)
            ) as manager:
                root.step(until - root.iter)
                root.snapshot()
                data = all_params(manager)
            state = root.resume_state.saved_now
            root.close()
            losses, tests = losses + recorder.losses, tests + recorder.tests
        return Ran(losses, tests, before, data)

    whole, parts = run([13]), run([3, 8, 13])
    np.testing.assert_array_equal(parts.data[0], whole.data[0])
    assert parts.losses == whole.losses
    assert [float(test["loss"]) for test in parts.tests] == [
        float(test["loss"]) for test in whole.tests
    ]


ENDING = 30.0
"""Seconds that NCCL has to end where other processes use the GPUs, too; as long as a captured graph
uses it, it never does.
"""


class KilledError(Exception):
    """Ends a worker."""


@pytest.mark.parametrize("sync", ["nccl", "tree", "flat"])
def test_a_worker_that_fails_ends_all_with_a_snapshot(sync: str, tmp_path: Path) -> None:
    settings = f'{ONCE} snapshot_prefix: "{tmp_path}/s" snapshot: 100 max_iter: 12 '
    devices = [CudaDevice(i) for i in range(2)]
    root, _ = train(settings, net(3), devices[0])

    def run() -> None:
        with P2PManager(
            root,
            devices,
            peers.prepare(peers.query([0, 1])),
            SyncOptions(sync, deadlines=DEADLINES),
        ) as manager:
            (worker,) = manager.workers
            runner = worker.iterations.captured
            enqueue = runner.enqueue

            def fail(iteration: int) -> None:
                if iteration == 7:
                    raise KilledError
                enqueue(iteration)

            runner.enqueue = fail  # type: ignore[method-assign]
            root.solve()

    threads = set(threading.enumerate())
    with pytest.raises(KilledError) as told:
        run()
    assert told.tb  # which still refers to all that there was
    begun = set(threading.enumerate()) - threads
    ends = [thread for thread in begun if thread.name.startswith("nccl end")]
    until = time.monotonic() + ENDING
    for thread in ends:
        thread.join(max(0.0, until - time.monotonic()))
    assert not [thread.name for thread in ends if thread.is_alive()]
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


@pytest.mark.parametrize("capture", [True, False])
def test_the_tree_brings_the_loss_scale(capture: bool) -> None:
    expected = on_gpus(2, "flat", text=net(3), precision="fp16")
    root, recorder = train(ONCE, net(3), CudaDevice(0), "fp16")
    root.capture = capture
    before = params(root)
    joined = peers.prepare(peers.query([0, 1]))
    with P2PManager(
        root, [root.device, CudaDevice(1)], joined, SyncOptions("tree", deadlines=DEADLINES)
    ):
        root.update_state.set_state({"loss_scale": 1024.0})  # not what the other solver began with
        root.step(ITERATIONS)
    moved = params(root) - before
    root.close()
    np.testing.assert_allclose(recorder.losses, expected.losses, rtol=2e-2)
    assert np.linalg.norm(moved - expected.moved) <= 5e-2 * np.linalg.norm(expected.moved)
