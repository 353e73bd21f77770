"""Weight gradients that overwrite, and who may modify gradients during a step."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import caffepy as caffe
from caffepy.collectives.factors import Factors
from caffepy.collectives.rank_group import RankGroup
from caffepy.collectives.synchronizer import Synchronizer
from caffepy.device.blob import Array
from caffepy.layer.inner_product import InnerProduct
from caffepy.net import gradients
from caffepy.net.gradients import large_products
from caffepy.solver import Signals, Solver
from caffepy.solver.gradient_probe import Watch
from caffepy.solver.monitor import Heartbeat, Monitor
from tests.nets import library
from tests.solver.cases import NET, solver_of

IP = 'layer { name: "ip" type: "InnerProduct" bottom: '
DEEPER = NET.replace(
    IP + '"x"',
    library.inner_product("first", "x", 5, "transpose: true", filler=library.NARROW, top="h")
    + library.relu("relu", "h")
    + IP
    + '"h"',
)


@pytest.mark.parametrize("how", ["layer by layer", "in runs", "two passes"])
@pytest.mark.parametrize("least", [0, 41, 10**6], ids=["all", "the first", "none"])
def test_large_gradients_are_written_rather_than_added_to(
    least: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = f"weight_decay: 0.01 iter_size: {1 + (how == 'two passes')} "
    straight = solver_of(settings, DEEPER)
    straight.step(4)
    monkeypatch.setattr(gradients, "LARGE", least)
    solver = solver_of(settings, DEEPER)
    step, net = solver.iterations.step, solver.net
    assert [layer.param.name for layer in large_products(net).values()] == {
        0: ["first", "ip"],
        41: ["first"],
        10**6: [],
    }[least]
    for iteration in range(4):
        step.params.diff.fill(
            np.nan
        )  # of weights that are written it does not matter what is there
        if how != "in runs":
            solver.step(1)
        else:
            step.set_hyperparams(0.1, iteration)
            with step.overwrite_gradients():
                step.begin()
                net.forward(steps=net.steps)
                step.accumulate_loss()
                net.backward(steps=net.steps)
                step.update()
        assert not any(isinstance(layer, InnerProduct) and layer.overwrites for layer in net.layers)
    np.testing.assert_allclose(solver.params.data, straight.params.data, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(solver.params.diff, straight.params.diff, rtol=1e-5, atol=1e-7)


def test_large_weights_are_updated_with_their_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others by the rule as ever; the gradient of those is not written."""
    straight = solver_of("weight_decay: 0.01 ", DEEPER)
    straight.step(4)
    monkeypatch.setattr(gradients, "LARGE", 41)
    monkeypatch.setattr(InnerProduct, "fuses_update", lambda layer, rows: True)
    solver = solver_of("weight_decay: 0.01 ", DEEPER)
    step, net = solver.iterations.step, solver.net
    step.scripts_look = False
    (first,) = large_products(net).values()
    first.blobs[0].diff.fill(np.nan)
    for iteration in range(4):
        step.set_hyperparams(0.1, iteration)
        with step.overwrite_gradients(update=True):
            step.begin()
            net.forward(steps=net.steps)
            step.accumulate_loss()
            step.update_state.check_and_scale(step.params.diff)
            assert not step.whole
            net.backward(steps=net.steps)
            step.optimizer.apply()
        assert step.whole
        assert first.update is None
    assert np.isnan(first.blobs[0].diff).all()
    for mine, other in zip(
        (solver.params.data, *solver.history),
        (straight.params.data, *straight.history),
        strict=True,
    ):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-7)


class TwoAlike(Synchronizer):
    """The synchronizer of one of two solvers that see the same batch."""

    has_factors = True

    def __init__(self, layer: InnerProduct) -> None:
        super().__init__(RankGroup(2), 0)
        self.factors = Factors([layer], 0, 2, self.gather, lambda: None)

    def gather(self, wholes: Sequence[Array]) -> None:
        for whole in wholes:
            whole[1] = whole[0]

    def on_gradients_ready(self) -> None:
        self.factors.exchange()

    def update_by_factors(self) -> None:
        self.factors.update()


@pytest.mark.parametrize("looks", [False, True])
def test_large_weights_are_updated_by_the_factors_of_all_solvers(
    looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the mean of their gradients, which is not written if no script may look."""
    straight = solver_of("weight_decay: 0.01 ", DEEPER)
    straight.step(4)
    monkeypatch.setattr(gradients, "LARGE", 41)
    rows_asked = []
    monkeypatch.setattr(
        InnerProduct, "fuses_update", lambda layer, rows: not rows_asked.append(rows)
    )
    solver = solver_of("weight_decay: 0.01 ", DEEPER)
    step, net = solver.iterations.step, solver.net
    step.scripts_look = looks
    (first,) = large_products(net).values()
    solver.synchronize(TwoAlike(first))
    assert step.updates_by_factors
    first.blobs[0].diff.fill(np.nan)
    for iteration in range(4):
        step.set_hyperparams(0.1, iteration)
        with step.overwrite_gradients(update=step.lets_layers_update):
            step.begin()
            net.forward(steps=net.steps)
            step.accumulate_loss()
            net.backward(steps=net.steps)
            step.gradients_ready()
            assert step.whole
            step.update()
        assert step.whole
        assert first.update is None
    assert np.isnan(first.blobs[0].diff).all() == (not looks)
    assert rows_asked == ([] if looks else [2 * first.rows] * 4)
    for mine, other in zip(
        (solver.params.data, *solver.history),
        (straight.params.data, *straight.history),
        strict=True,
    ):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("why", ["clip_gradients: 1 ", "iter_size: 2 ", "a callback"])
def test_weights_are_updated_with_their_gradients_where_these_are_needed(why: str) -> None:
    solver = solver_of("" if why == "a callback" else why, DEEPER)
    first = next(layer for layer in solver.net.layers if isinstance(layer, InnerProduct))
    solver.synchronize(TwoAlike(first))
    if why == "a callback":
        solver.add_callback(Synchronizer(RankGroup(1), 0))
    assert not solver.iterations.step.updates_by_factors
    assert not solver.iterations.step.lets_layers_update


class Looking:
    """A callback of a net that changes nothing."""

    adds_nothing = True

    def __call__(self, layer: int) -> None:
        pass


@pytest.mark.parametrize("why", ["a script may look", "snapshot_diff", "a callback of the net"])
def test_weights_are_updated_after_all_gradients_where_these_are_seen(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradients, "LARGE", 41)
    monkeypatch.setattr(InnerProduct, "fuses_update", lambda layer, rows: True)
    solver = solver_of("snapshot_diff: true " if why == "snapshot_diff" else "", DEEPER)
    step = solver.iterations.step
    step.scripts_look = why == "a script may look"
    if why == "a callback of the net":
        solver.net.after_backward.append(Looking())
    with step.overwrite_gradients(update=True):
        (first,) = step._large.values()
        assert first.update is None
        assert step.whole


def test_weights_are_updated_with_their_gradients_beside_the_heartbeat_of_a_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gradients, "LARGE", 41)
    monkeypatch.setattr(InnerProduct, "fuses_update", lambda layer, rows: True)
    solver = solver_of("", DEEPER)
    heartbeat = Heartbeat(Monitor(Signals()), solver.net)
    solver.net.before_forward.append(heartbeat)
    solver.net.before_backward.append(heartbeat)
    step = solver.iterations.step
    step.scripts_look = False
    with step.overwrite_gradients(update=True):
        (first,) = step._large.values()
        assert first.update is not None


NORMS = NET.replace(
    IP + '"x"',
    """layer { name: "conv" type: "Convolution" bottom: "x" top: "conv"
      convolution_param { num_output: 5 kernel_size: 1 weight_filler { type: "xavier" } } }
    layer { name: "norm" type: "BatchNorm" bottom: "conv" top: "norm" }
    layer { name: "scale" type: "Scale" bottom: "norm" top: "scale"
      scale_param { bias_term: true } }
    layer { name: "relu" type: "ReLU" bottom: "scale" top: "relu" }
    """
    + IP
    + '"relu"',
)


def test_on_the_cpu_a_solver_fuses_if_it_is_told_to() -> None:
    """A script may look at any blob, the commands need not."""
    alone, together = solver_of("", NORMS), solver_of("", NORMS)
    together.fuse = True
    for solver in (alone, together):
        solver.step(3)
    groups = [step.layers for step in together.iterations.step.graphs.steps if step.group]
    assert [[together.net.layer_names[i] for i in layers] for layers in groups] == [
        ["conv", "norm", "scale", "relu"]
    ]
    np.testing.assert_allclose(together.params.data, alone.params.data, rtol=1e-4, atol=1e-6)
    blobs = alone.net.blobs
    assert abs(blobs["norm"].data.mean()) < 1e-5
    assert not together.net.blobs["norm"].data.any()
    np.testing.assert_array_equal(blobs["relu"].data, np.maximum(blobs["scale"].data, 0))


class Adds:
    """A callback that adds to gradients before those of the layers."""

    def __init__(self, solver: Solver) -> None:
        self.solver = solver

    def on_start(self) -> None:
        assert not self.solver.params.diff.any()
        self.solver.params.diff += 0.1

    def on_gradients_ready(self) -> None:
        """Nothing."""


@pytest.mark.parametrize("where", ["the solver", "the net"])
def test_what_callbacks_add_to_large_gradients_stays(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for least in (10**6, 0):
        monkeypatch.setattr(gradients, "LARGE", least)
        solver = solver_of("", DEEPER)
        adds = Adds(solver)
        if where == "the solver":
            solver.add_callback(adds)
        else:
            solver.net.before_forward.append(
                lambda index, adds=adds: None if index else adds.on_start()
            )
        solver.step(3)
        found.append(solver.params.data.copy())
    np.testing.assert_array_equal(*found)


PYTHON = library.layer(
    "Python",
    "python",
    "o",
    'python_param { module: "tests.solver.test_step" layer: "Same" }',
    top="p",
) + library.layer("Silence", "silence", "p", top="")


class Same(caffe.Layer):
    """A layer of a user's, which may reach gradients."""

    def reshape(self, bottom: Sequence[Any], top: Sequence[Any]) -> None:
        top[0].reshape(*bottom[0].shape)

    def forward(self, bottom: Sequence[Any], top: Sequence[Any]) -> None:
        top[0].data[...] = bottom[0].data


def test_who_may_add_to_gradients_is_known() -> None:
    signals = Signals()
    solver = solver_of("", DEEPER)
    Watch(solver, 1)
    solver.net.before_forward.append(signals.check)
    assert solver.iterations.step.gradients_untouched
    solver.net.before_backward.append(lambda index: None)
    assert not solver.iterations.step.gradients_untouched
    other = solver_of("", DEEPER)
    other.add_callback(Adds(other))
    assert not other.iterations.step.gradients_untouched
    assert not solver_of("", DEEPER + PYTHON).iterations.step.gradients_untouched


def test_after_an_error_no_update_passes_for_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "LARGE", 0)
    solver = solver_of("", DEEPER)
    solver.step(2)
    assert solver.params.diff.any()

    def fail(layer: int) -> None:
        raise KeyboardInterrupt

    fail.adds_nothing = True  # type: ignore[attr-defined]
    solver.net.before_backward.append(fail)
    with pytest.raises(KeyboardInterrupt):
        solver.step(1)
    assert not solver.params.diff.any()
    assert not any(layer.overwrites for layer in large_products(solver.net).values())


def test_every_reason_why_a_step_is_not_captured_is_told() -> None:
    solver = solver_of("", DEEPER)
    assert solver._step.graphs.reasons_not_capturable(capture=True) == []
    solver.add_callback(Adds(solver))
    solver.net.debug_info = True
    layer = solver.net.layers[solver.net.layer_names.index("ip")]
    layer.on_host = True  # as layers are that compute in Python
    solver.fuse = True  # with new graphs, which look at the layers
    assert solver._step.graphs.reasons_not_capturable(capture=False) == [
        "capture is off",
        "debug_info shows each layer",
        'layer "ip" (InnerProduct) computes on the host',
        "a callback does not say that it can be captured",
    ]


def test_a_synchronizer_hears_of_layers_within_iterations_only() -> None:
    solver = solver_of("")
    synchronizer = Synchronizer(RankGroup(1), 0)
    heard: list[int] = []
    synchronizer.after_backward = heard.append  # type: ignore[method-assign]
    synchronizer.reduces_early = True
    solver.synchronize(synchronizer)
    for _ in range(2):
        solver.net.forward()
        solver.net.backward()
    assert not heard
    solver.step(1)
    assert heard == list(reversed(range(len(solver.net.layers))))
