"""Several solvers as one: n with batch b follow one with batch n * b."""

import logging
from functools import cache
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest

from caffepy.collectives.topology import all_joined
from caffepy.core.errors import ConfigError, UsageError
from caffepy.device.blob import Array
from caffepy.device.device import Device
from caffepy.parallel.manager import P2PManager, p2p_manager
from caffepy.parallel.synchronization import SyncOptions
from caffepy.proto.binary import blob_to_array, read_net
from caffepy.solver import Solver
from caffepy.solver.capture import GraphRunner
from tests.nets import library
from tests.parallel.cases import ITERATIONS, NET, SETTINGS, Run, net
from tests.solver.cases import NET as SMALL
from tests.solver.cases import STAYING, Graphs, Recorder, Several, no_signal, solver_of


@cache
def alone(batch: int) -> tuple[list[float], Array, list[dict[str, Array]]]:
    """Losses, weights and test results of one solver."""
    recorder = Recorder()
    solver = solver_of(SETTINGS, net(batch), reporter=recorder)
    solver.step(ITERATIONS)
    solver.test_all()
    solver.close()
    return recorder.losses, solver.params.data, recorder.tests


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("sync", ["tree", "muji", "flat"])
def test_solvers_follow_one_with_their_batches_together(size: int, sync: str) -> None:
    if sync == "muji" and size not in (2, 4, 8):
        with pytest.raises(UsageError, match="it is for 2, 4 or 8 devices"):
            Run(size, net(3), sync)
        return
    run = Run(size, net(3), sync)
    losses, data, tests = alone(3 * size)
    np.testing.assert_allclose(run.losses, losses, rtol=2e-4)
    np.testing.assert_allclose(run.data[0], data, rtol=1e-3, atol=1e-4)
    assert len(run.tests) == len(tests) == 4
    for own, other in zip(run.tests, tests, strict=True):
        np.testing.assert_allclose(float(own["loss"]), float(other["loss"]), rtol=5e-4)
        assert own["accuracy"] == other["accuracy"]
    for data in run.data[1:]:
        if sync == "tree":
            assert not np.isnan(data).any()
        else:
            np.testing.assert_array_equal(data, run.data[0])


@pytest.mark.parametrize("sync", ["tree", "flat"])
def test_solvers_enqueue_iterations_as_one_graph(
    sync: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = "display: 20 average_loss: 3 snapshot_after_train: false "
    graphs, ended = Graphs(), list[tuple[list[float], list[Array]]]()
    for several in (False, True):
        if several:
            graphs.use(monkeypatch)
        root = solver_of(settings, STAYING, reporter=(recorder := Several()))
        root.action = no_signal
        devices = [root.device, Device(seed=1)]
        with P2PManager(root, devices, all_joined(2), SyncOptions(sync)) as manager:
            root.step(50)
            manager.raise_worker_error()
            solvers = [root, *manager.workers]
            assert [solver.iter for solver in solvers] == [50, 50]
            data = [solver.params.data.copy() for solver in solvers]
        ended.append((recorder.losses, data))
    assert graphs.count("8 iterations") == 2 * 5
    assert graphs.count("iteration") == 2 * (50 - 5 * 8)
    assert ended[0][0] == ended[1][0]
    np.testing.assert_array_equal(ended[0][1], ended[1][1])


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("sync", ["tree", "flat"])
def test_a_solver_may_run_layer_by_layer_while_others_replay_graphs(
    sync: str, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All meet at the data layers and where parameters are brought in the same order."""
    settings = SETTINGS.replace("iter_size: 2", "iter_size: 1")
    expected, graphs = Run(3, net(3), sync, settings=settings, until=6), Graphs()
    graphs.use(monkeypatch)
    root = solver_of(settings, net(3), reporter=(recorder := Recorder()))
    devices = [root.device, Device(seed=1), Device(seed=2)]
    options = SyncOptions(sync, deadlines={"step": 20.0})
    with P2PManager(root, devices, all_joined(3), options) as manager:
        eager = [root, *manager.workers][rank].iterations.step.graphs
        monkeypatch.setattr(GraphRunner, "can_capture", lambda runner: runner is not eager)
        root.step(6)
        root.test_all()
        data = [solver.params.data.copy() for solver in (root, *manager.workers)]
    assert graphs.count("iteration") == 2 * 6
    assert recorder.losses == expected.losses
    np.testing.assert_array_equal(data, expected.data)


def test_all_solvers_test_with_the_layers_that_only_the_roots_test_net_has() -> None:
    text = library.regression(
        library.dummies("in", 'type: "constant" value: 1', x=(4, 3), y=(4, 2))
    )
    text += library.inner_product("only", "x", 2, more=library.IN_TESTS)
    root = solver_of("base_lr: 0.1 test_iter: 5 test_interval: 100 ", text)
    net = root.test_nets[0]
    weight, bias = net.layers[net.layer_names.index("only")].blobs

    def tested() -> Array:
        root.test_all()
        (outputs,) = root.last_outputs
        return {name: values for name, values, _ in outputs}["only"]

    with P2PManager(root, [Device() for _ in range(3)], all_joined(3), SyncOptions()):
        own = np.broadcast_to(weight.host_data.sum(1), (4, 2))
        np.testing.assert_allclose(tested(), own, rtol=1e-6)
        bias.host_data[...] = 5  # by a script
        np.testing.assert_allclose(tested(), own + 5, rtol=1e-6)


class LastLoss(Recorder):
    """Keeps the loss that is displayed after the last update."""

    def finished(self, iteration: int, loss: float | None) -> None:
        self.last = loss


@pytest.mark.parametrize("sync", ["tree", "muji", "flat"])
def test_the_last_loss_is_that_of_the_last_weights(sync: str) -> None:
    settings = "base_lr: 0.1 display: 1 max_iter: 3 snapshot_after_train: false "
    one, both = LastLoss(), LastLoss()
    solver_of(settings, net(6), reporter=one).solve()
    root = solver_of(settings, net(3), reporter=both)
    with P2PManager(root, [Device(), Device()], all_joined(2), SyncOptions(sync)):
        root.solve()
    assert both.last == pytest.approx(one.last, rel=1e-5)


@pytest.mark.parametrize("sync", ["tree", "flat"])
def test_runs_repeat_bit_for_bit(sync: str) -> None:
    first, again = Run(3, net(3), sync, until=15), Run(3, net(3), sync, until=15)
    assert first.losses == again.losses
    for a, b in zip([*first.data, first.history], [*again.data, again.history], strict=True):
        np.testing.assert_array_equal(a, b)


NORMALIZED = NET.replace(
    'layer { name: "pool"',
    'layer { name: "bn" type: "BatchNorm" bottom: "conv" top: "conv" } layer { name: "pool"',
)


def statistics(solver: Solver) -> list[Array]:
    """Return the statistics of the only layer that has some."""
    (layer,) = (layer for layer in solver.net.layers if layer.type == "BatchNorm")
    return [blob.data.copy() for blob in layer.blobs]


@pytest.mark.parametrize("sync", ["tree", "flat"])
@pytest.mark.parametrize("kind", ["average", "root"])
def test_statistics_of_batches(kind: str, sync: str, tmp_path: Path) -> None:
    root = solver_of(
        f'base_lr: 0.01 iter_size: 2 snapshot_prefix: "{tmp_path}/s" ', net(3, NORMALIZED)
    )
    with P2PManager(
        root, [Device() for _ in range(3)], all_joined(3), SyncOptions(sync, kind)
    ) as manager:
        root.step(4)
        before = [statistics(solver) for solver in (root, *manager.workers)]
        root.snapshot()
        after = [statistics(solver) for solver in (root, *manager.workers)]
    assert not (before[0][0] == before[1][0]).any()
    saved = {layer.name: layer for layer in read_net(f"{tmp_path}/s_iter_4.caffemodel").layer}["bn"]
    for i, blob in enumerate(saved.blobs):
        found = blob_to_array(blob)
        if kind == "root":
            np.testing.assert_array_equal(found, before[0][i])
        else:
            np.testing.assert_allclose(
                found, np.mean([own[i] for own in before], axis=0), rtol=1e-6
            )
        assert all((own[i] == other[i]).all() for own, other in zip(before, after, strict=True))
    root.close()


SCALED = NET.replace(
    'layer { name: "pool"',
    'layer { name: "bn" type: "BatchNorm" bottom: "conv" top: "normal" batch_norm_param { scale_bias: true } } '
    'layer { name: "pool"',
).replace('bottom: "conv" top: "pool"', 'bottom: "normal" top: "pool"')


@pytest.mark.parametrize("text", [NORMALIZED, SCALED], ids=["in place", "scaled"])
@pytest.mark.parametrize("sync", ["tree", "flat"])
@pytest.mark.parametrize("size", [2, 3])
def test_solvers_normalize_their_batches_as_one(size: int, sync: str, text: str) -> None:
    run = Run(size, net(4, text), sync, bn_stats="sync", until=30)
    single = Run(1, net(4 * size, text), until=30)
    np.testing.assert_allclose(run.losses, single.losses, rtol=2e-4)
    np.testing.assert_allclose(run.data[0], single.data[0], rtol=1e-3, atol=1e-4)
    first, *others = (statistics(solver) for solver in run.solvers)
    for own, other in zip(first, statistics(single.root), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-3, atol=1e-5)
    for theirs in others:
        for own, other in zip(first, theirs, strict=True):
            np.testing.assert_array_equal(own, other)
    own, other = run.tests[-1], single.tests[-1]
    np.testing.assert_allclose(float(own["loss"]), float(other["loss"]), rtol=5e-4)
    apart = Run(size, net(4, text), sync, until=30)
    assert (
        np.abs(apart.data[0] - single.data[0]).max()
        > 10 * np.abs(run.data[0] - single.data[0]).max()
    )


@pytest.mark.parametrize("sync", ["tree", "flat"])
def test_all_solvers_test_with_the_statistics_of_the_root(sync: str) -> None:
    root = solver_of("base_lr: 0.01 test_iter: 3 test_interval: 100 ", net(3, NORMALIZED))
    options = SyncOptions(sync, "root")
    with P2PManager(root, [Device() for _ in range(3)], all_joined(3), options) as manager:
        root.step(4)
        root.test_all()
        first, *others = (statistics(solver) for solver in (root, *manager.workers))
    for other in others:
        for own, same in zip(first, other, strict=True):
            np.testing.assert_array_equal(same, own)


def test_statistics_stay_each_solvers_own_where_only_the_root_updates() -> None:
    settings = "base_lr: 0.01 display: 1 max_iter: 4 snapshot_after_train: false "
    found = []
    for sync in ("tree", "flat"):
        root = solver_of(settings, net(3, NORMALIZED))
        manager = P2PManager(root, [Device() for _ in range(3)], all_joined(3), SyncOptions(sync))
        with manager:
            root.solve()
            found.append([statistics(solver) for solver in (root, *manager.workers)])
    for own, other in zip(*found, strict=True):
        for a, b in zip(own, other, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5)


def test_statistics_in_tests_are_those_of_all(tmp_path: Path) -> None:
    settings = "base_lr: 0.01 test_iter: 4 test_interval: 100 test_initialization: false "
    recorders = Recorder(), Recorder()
    for recorder, size in zip(recorders, (3, 1), strict=True):
        root = solver_of(settings, net(3, NORMALIZED), reporter=recorder)
        with P2PManager(
            root, [Device() for _ in range(3)], all_joined(3), SyncOptions("flat")
        ) as manager:
            root.step(4)
            manager.statistics.average()
            if size == 3:
                root.test_all()
        if size == 1:
            root.test_all()
        root.close()
    assert recorders[0].tests[0]["accuracy"] == recorders[1].tests[0]["accuracy"]
    np.testing.assert_allclose(
        recorders[0].tests[0]["loss"], recorders[1].tests[0]["loss"], rtol=1e-6
    )


def test_a_shared_layer_has_no_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        dedent(
            """
            class Mine:
                def setup(self, bottom, top): self.blobs.add_blob(1)
                def reshape(self, bottom, top): top[0].reshape(*bottom[0].data.shape)
                def forward(self, bottom, top): top[0].data[...] = bottom[0].data
                def backward(self, top, propagate_down, bottom): bottom[0].diff[...] = top[0].diff
            """
        )
    )
    mine = 'layer { name: "mine" type: "Python" bottom: "x" top: "z" param { lr_mult: 0 } python_param { module: "mine" layer: "Mine" '
    text = SMALL.replace('bottom: "x" top: "o"', 'bottom: "z" top: "o"').replace(
        'layer { name: "ip"', mine + 'share_in_parallel: true } } layer { name: "ip"'
    )
    root = solver_of("", text)
    with pytest.raises(
        ConfigError, match=r'rank 1.*layer "mine" \(Python\) has parameters, so that solvers cannot'
    ):
        P2PManager(root, [Device(), Device()], all_joined(2), SyncOptions()).__enter__()


PYLOSS = """
class Loss:
    def reshape(self, bottom, top):
        top[0].reshape(1)
    def forward(self, bottom, top):
        self.diff = bottom[0].data - bottom[1].data
        top[0].data[...] = (self.diff ** 2).sum() / bottom[0].num / 2
    def backward(self, top, propagate_down, bottom):
        time.sleep(0.01)  # for another solver's forward
        bottom[0].diff[...] = self.diff / bottom[0].num
"""


def test_a_layer_with_a_backward_pass_is_each_solvers_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_loss.py").write_text("import time\n" + PYLOSS)
    found = []
    for shared in ("false", "true"):
        text = SMALL.replace(
            'type: "EuclideanLoss"',
            'type: "Python" loss_weight: 1 python_param { module: "own_loss" layer: "Loss" '
            f"share_in_parallel: {shared} }}",
        )
        root = solver_of("", text)
        with P2PManager(root, [Device(), Device()], all_joined(2), SyncOptions()) as manager:
            (worker,) = manager.workers
            assert worker.net.layers[-1] is not root.net.layers[-1]
            root.step(5)
        found.append(root.params.data.copy())
    np.testing.assert_array_equal(*found)
    told = [message for message in caplog.messages if "layers with a backward pass" in message]
    assert len(told) == 1


def test_workers_save_restore_and_solve_nothing() -> None:
    root = solver_of("")
    with P2PManager(root, [Device(), Device()], all_joined(2), SyncOptions()) as manager:
        (worker,) = manager.workers
        for wrong in (worker.snapshot, lambda: worker.restore("x"), worker.solve):
            with pytest.raises(ConfigError, match="Should not be called on worker solver"):
                wrong()
        assert worker.param.display == worker.param.snapshot == 0
        assert worker.net.layers[0] is root.net.layers[0]


def test_the_log_of_a_set_up_is_that_of_the_root(caplog: pytest.LogCaptureFixture) -> None:
    root = solver_of("test_iter: 1 test_interval: 1 ")
    with (
        caplog.at_level(logging.INFO, "caffepy"),
        P2PManager(root, [Device() for _ in range(3)], all_joined(3), SyncOptions()),
    ):
        pass
    sharing = ["Sharing layer in from root net"] * 4
    assert [message for message in caplog.messages if message.startswith("Sharing")] == sharing
    assert not any("Creating Layer" in message for message in caplog.messages)
    assert "Solvers pairs 0:1, 0:2" in caplog.messages
    ready = [message for message in caplog.messages if "is ready" in message]
    assert ready == [f"Solver {i} (of 0 to 2) is ready on the CPU" for i in (1, 2)]


def test_what_a_batch_is_and_where_time_goes(caplog: pytest.LogCaptureFixture) -> None:
    root = solver_of(SETTINGS + "max_iter: 3 snapshot_after_train: false ", net(3))
    manager = P2PManager(root, [Device() for _ in range(2)], all_joined(2), SyncOptions())
    with caplog.at_level(logging.INFO, "caffepy"), manager:
        root.solve()
        assert all(
            seconds > 0
            for solver in (root, *manager.workers)
            for seconds in solver.phase_timer.read().values()
        )
    assert (
        "An iteration takes 2 solvers x 3 images x iter_size 2 = 12; an epoch of 1500 is 125 iterations"
        in (caplog.messages)
    )
    rule = "base_lr is 0.05; if it is right for one solver, the linear rule gives 0.1 for 2 (it is not changed)"
    assert rule in caplog.messages
    assert any(message.startswith("Performance of 2 solvers: ") for message in caplog.messages)
    root.close()


def test_a_global_batch_is_divided(caplog: pytest.LogCaptureFixture) -> None:
    root = solver_of(SETTINGS, net(6), batch_parts=2)
    with (
        caplog.at_level(logging.INFO, "caffepy"),
        P2PManager(root, [Device(), Device()], all_joined(2), SyncOptions()),
    ):
        pass
    assert root.net.blobs["data"].shape[0] == 3
    assert "does not divide" not in caplog.text
    assert root.test_nets[0].blobs["data"].shape[0] == 7
    assert not any("linear rule" in message for message in caplog.messages)
    root.close()
    with pytest.raises(
        ConfigError,
        match=r'layer "data" \(Data\): a batch of 6 cannot be divided among 4.*a batch_size that 4',
    ):
        solver_of(SETTINGS, net(6), batch_parts=4)


@pytest.mark.parametrize(
    "shapes", ["shape { dim: 6 dim: 3 } shape { dim: 1 }", "num: 6 channels: 3 height: 1 width: 1"]
)
def test_a_global_batch_of_dummy_data_is_divided(shapes: str) -> None:
    text = f'layer {{ name: "in" type: "DummyData" top: "x" top: "y" dummy_data_param {{ {shapes} }} }}'
    root = solver_of("", text, batch_parts=2)
    assert root.net.blobs["x"].shape[:2] == (3, 3)
    assert root.net.blobs["y"].shape[0] == (1 if "dim" in shapes else 3)
    with pytest.raises(
        ConfigError, match=r"a batch of 6 cannot be divided among 4 solvers; give a"
    ):
        solver_of("", text, batch_parts=4)


def test_what_has_no_effect_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("caffepy.parallel.workers.num_threads", lambda: 2)
    monkeypatch.setattr("caffepy.parallel.manager.num_threads", lambda: 2)
    (tmp_path / "own_data.py").write_text(
        "class Own:\n"
        "    def reshape(self, bottom, top): top[0].reshape(2)\n"
        "    def forward(self, bottom, top): pass\n"
    )
    python = 'layer { name: "in" type: "Python" top: "x" python_param { module: "own_data" layer: "Own" } }'
    solver_of("", python, batch_parts=2)
    root = solver_of("display: 1 max_iter: 2 snapshot_after_train: false ")
    with p2p_manager(root, [root.device], SyncOptions("muji")):
        pass
    devices = [root.device, Device(), Device()]
    with caplog.at_level(logging.INFO, "caffepy"), p2p_manager(root, devices, SyncOptions()):
        root.solve()
    for told in (
        '--batch-mode global does not divide the batch of layer "in" (Python), which shapes its tops',
        "One solver has nothing to synchronize by muji",
        "3 solvers share 2 threads of the CPU: more solvers than threads are slower",
        "The CPU is the bottleneck: 3 solvers share 2 threads.",
    ):
        assert told in caplog.text
    assert "longer than the mean" not in caplog.text
