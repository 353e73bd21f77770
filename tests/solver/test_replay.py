"""A step that the CPU replays does what one that runs layer by layer does, to the last bit: with each
rule, with any number of threads, where the learning rate changes, where other nets are tested in
between, in a resumed run, with several solvers, and when it fails.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from caffepy.core.errors import DataError, DivergenceError
from caffepy.device.threads import num_threads, set_num_threads
from caffepy.net.replay import Replay
from caffepy.solver import Monitor, Signals, Solver
from caffepy.solver.monitor import Heartbeat
from caffepy.solver.update import rules
from tests.nets import library
from tests.parallel.cases import Run
from tests.solver.cases import Recorder, change_numbers, solver_of

CONVOLUTIONS = (
    library.digits(6, 11)
    + library.convolution("conv1", "data", 4, 3, "pad: 1")
    + library.in_place("ReLU", "relu1", "conv1")
    + library.pooling("pool1", "conv1", "pool: MAX kernel_size: 2 stride: 2")
    + library.convolution("conv2", "pool1", 6, 3, "pad: 1")
    + library.relu("relu2", "conv2")
    + library.pooling("pool2", "conv2", "pool: AVE kernel_size: 2 stride: 2")
    + library.inner_product("ip1", "pool2", 9)
    + library.relu("relu3", "ip1")
    + library.inner_product("ip2", "ip1", 10)
    + library.softmax_loss("ip2")
    + library.accuracy("ip2", more=library.IN_TESTS)
)
FED = library.linear_classifier(library.inputs("in", data=(4, 6), label=(4,)), 3)
DROPPING = library.perceptron(library.digits(7, 11))
DRAWING = DROPPING.replace("Dropout", "RReLU")
SETTINGS = (
    'lr_policy: "step" gamma: 0.5 stepsize: 6 base_lr: 0.02 snapshot_after_train: false '
    "display: 2 average_loss: 3 test_iter: 3 test_interval: 5 test_compute_loss: true "
)
RULES = {
    "SGD": "momentum: 0.9 weight_decay: 0.001 ",
    "Nesterov": 'momentum: 0.9 weight_decay: 0.001 regularization_type: "L1" ',
    "AdaGrad": "momentum: 0 ",
    "RMSProp": "momentum: 0 rms_decay: 0.9 ",
    "AdaDelta": "momentum: 0.9 delta: 1e-6 ",
    "Adam": "momentum: 0.9 momentum2: 0.99 delta: 1e-6 ",
}


@pytest.fixture(autouse=True)
def given_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = num_threads()
    set_num_threads(getattr(request, "param", 2))
    yield
    set_num_threads(before)


def replays(solver: Solver) -> int:
    graphs = solver.iterations.step.graphs
    one_by_one = graphs._pass._replayed if graphs._pass else 0
    return one_by_one + solver.iterations.loop._replayed


def numbers(solver: Solver) -> Any:
    """Weights, gradients, history."""
    return np.concatenate([solver.params.data, solver.params.diff, *solver.history])


def same(settings: str, net: str = CONVOLUTIONS, steps: int = 12, fuse: bool = True) -> None:
    ended, heard = [], []
    for capture in (False, True):
        recorder = Recorder()
        solver = solver_of(SETTINGS + settings, net, reporter=recorder)
        solver.capture, solver.fuse = capture, fuse
        solver.step(steps)
        assert (replays(solver) > 0) == capture
        solver.close()
        ended.append(numbers(solver))
        heard.append(recorder)
    np.testing.assert_array_equal(*ended)
    plain, replayed = heard
    assert plain.events == replayed.events
    assert plain.losses == replayed.losses
    assert plain.rates == replayed.rates
    for mine, theirs in zip(plain.tests, replayed.tests, strict=True):
        for name in theirs:
            np.testing.assert_array_equal(mine[name], theirs[name])


@pytest.mark.parametrize("rule", rules)
def test_each_rule(rule: str) -> None:
    same(f'type: "{rule}" {RULES[rule]}')


@pytest.mark.parametrize("given_threads", [1, 2, 3], indirect=True)
@pytest.mark.parametrize("fuse", [True, False])
def test_any_number_of_threads(fuse: bool) -> None:
    same(RULES["SGD"] + "clip_gradients: 0.5 ", fuse=fuse)


def test_several_passes() -> None:
    same(RULES["Adam"] + 'type: "Adam" iter_size: 3 ')


@pytest.mark.parametrize("net", [DROPPING, DRAWING], ids=["replayed", "in between"])
def test_layers_draw_the_same_numbers(net: str) -> None:
    same(RULES["SGD"], net)


def test_a_resumed_run_goes_on_exactly(tmp_path: Path) -> None:
    settings = SETTINGS + RULES["SGD"] + f'snapshot: 4 snapshot_prefix: "{tmp_path}/s" '
    whole, parts = Recorder(), Recorder()
    straight = solver_of(settings, CONVOLUTIONS, reporter=whole)
    straight.capture = False
    straight.step(13)
    straight.close()
    for first, end in ((0, 8), (8, 13)):
        solver = solver_of(settings, CONVOLUTIONS, reporter=parts)
        if first:
            solver.restore(f"{tmp_path}/s_iter_{first}.solverstate")
        solver.step(end - first)
        assert replays(solver)
        solver.close()
    np.testing.assert_array_equal(numbers(solver), numbers(straight))
    assert whole.losses == parts.losses


def feed(solver: Solver, value: float) -> None:
    """Write what an Input layer has."""
    data, label = solver.net.blobs["data"].host_data, solver.net.blobs["label"].host_data
    data[...] = np.sin(np.arange(data.size) * (1 + value)).reshape(data.shape)
    label[...] = np.arange(label.size) % 3


def fed(capture: bool, **given: Any) -> Solver:
    solver = solver_of('lr_policy: "fixed" momentum: 0.9 ' + "snapshot: 100 ", FED, **given)
    solver.capture = capture
    return solver


def test_what_python_writes_between_steps_counts() -> None:
    ended = []
    for capture in (False, True):
        solver = fed(capture)
        for i in range(8):
            feed(solver, i / 8)
            solver.step(1)
            if i % 2:
                solver.net.learnable_params[0].host_data[...] *= 0.9
        ended.append(numbers(solver))
    np.testing.assert_array_equal(*ended)


@pytest.mark.parametrize("rule", rules)
def test_numbers_of_the_rule_that_python_changes_count(rule: str) -> None:
    """All that the settings of a rule name but weight_decay."""
    ended = []
    for capture in (False, True):
        solver = solver_of(f'type: "{rule}" lr_policy: "fixed" snapshot: 100 {RULES[rule]}', FED)
        solver.capture = capture
        for i in range(12):
            feed(solver, i / 8)
            if i == 6:
                change_numbers(solver.param)
            solver.step(1)
        assert solver.iterations.step._update_replay.replays == capture
        ended.append(numbers(solver))
    np.testing.assert_array_equal(*ended)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_divergence_leaves_the_weights_of_before(bad: float) -> None:
    ended, said = [], []
    for capture in (False, True):
        solver = fed(capture)
        feed(solver, 0)
        solver.step(6)
        before = numbers(solver)
        solver.net.blobs["data"].host_data[1, 2] = bad
        with pytest.raises(DivergenceError, match=r"^iteration 6: the loss is nan; ") as error:
            solver.step(40)
        said.append(str(error.value))
        assert solver.iter == 6
        size = solver.params.data.size
        np.testing.assert_array_equal(numbers(solver)[:size], before[:size])
        feed(solver, 1)
        solver.step(4)
        assert (replays(solver) > 3) == capture
        ended.append(numbers(solver))
    np.testing.assert_array_equal(*ended)
    assert said[0] == said[1]


def test_a_wrong_label_ends_the_run_where_it_stands() -> None:
    ended, said = [], []
    for capture in (False, True):
        solver = fed(capture)
        feed(solver, 0)
        solver.step(6)
        solver.net.blobs["label"].host_data[2:] = 12, 99
        with pytest.raises(DataError, match="label 12 is not one of the 3 classes 0 to 2") as error:
            solver.step(40)
        said.append(str(error.value))
        assert solver.iter == 6
        feed(solver, 1)
        solver.step(4)
        ended.append(numbers(solver))
    np.testing.assert_array_equal(*ended)
    assert said[0] == said[1]


def reading(folder: Path, files: str) -> str:
    """A layer that reads these files of a folder, of which good.h5 is made."""
    rng = np.random.default_rng(6)
    with h5py.File(folder / "good.h5", "w") as file:
        file["data"], file["label"] = rng.standard_normal((24, 6)), rng.integers(0, 3, 24)
    (folder / "files.txt").write_text(files)
    param = f'hdf5_data_param {{ source: "{folder}/files.txt" batch_size: 4 }}'
    return library.layer("HDF5Data", "in", "", param, top="data label")


def test_a_layer_that_waits_for_data_is_the_last_that_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And signals are checked before it waits; RReLU runs between what is replayed."""
    signals = Signals()
    monitor = Monitor(signals)
    data = reading(tmp_path, f"{tmp_path}/good.h5")
    solver = solver_of('lr_policy: "fixed" ', library.perceptron(data).replace("Dropout", "RReLU"))
    net, seen = solver.net, list[tuple[object, int]]()
    heartbeat = Heartbeat(monitor, net)
    net.before_forward.append(heartbeat)
    net.before_backward.append(heartbeat)
    read = net.layers[0].forward

    def look(*blobs: Any) -> None:
        seen.append((monitor.last_layer, signals.calls))
        read(*blobs)

    monkeypatch.setattr(net.layers[0], "forward", look)
    solver.step(8)
    assert replays(solver)
    assert [last for last, _ in seen] == [(net, 0)] * 8
    calls = [number for _, number in seen]
    assert calls == sorted(set(calls)), "one more at least for each batch"
    solver.close()


def test_a_damaged_file_is_told_where_it_is_told_layer_by_layer(tmp_path: Path) -> None:
    data = reading(tmp_path, f"{tmp_path}/good.h5 {tmp_path}/bad.h5")
    net = library.linear_classifier(data, 3)
    (tmp_path / "bad.h5").write_text("no HDF5")
    ended, said = [], []
    for capture in (False, True):
        solver = solver_of('lr_policy: "fixed" ', net)
        solver.capture = capture
        with pytest.raises(DataError, match="an HDF5 file") as error:
            solver.step(40)
        said.append(str(error.value))
        assert solver.iter == 5
        assert (replays(solver) > 0) == capture
        ended.append(numbers(solver))
    np.testing.assert_array_equal(*ended)
    assert said[0] == said[1]
    assert 'layer "in" (HDF5Data)' in said[0]


def test_several_solvers(monkeypatch: pytest.MonkeyPatch) -> None:
    text = library.small_convolution(library.digits(3, 7))
    ended, replayed, replay = list[Run](), list[Replay](), Replay._replay
    monkeypatch.setattr(Replay, "_replay", lambda self: (replayed.append(self), replay(self)))
    ended.append(Run(2, text, "flat", until=8))
    ways = set(map(id, replayed))
    assert len(ways) == 5  # a pass and an update of each, and a test
    several = [replay for replay in replayed if len(replay._parts) > 2]
    assert len(set(map(id, several))) == 2  # passes: Python comes in between
    assert {tuple(graph is None for graph, _ in way._parts) for way in several} == {
        (True, False, True, False)
    }
    replayed.clear()
    monkeypatch.setattr("caffepy.net.replay.LONGEST", -1)  # nothing is replayed
    ended.append(Run(2, text, "flat", until=8))
    assert not replayed
    assert ended[0].losses == ended[1].losses
    for mine, theirs in zip(ended[0].data, ended[1].data, strict=True):
        np.testing.assert_array_equal(mine, theirs)
