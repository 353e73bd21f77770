"""A step that a GPU replays as one CUDA graph does what one that runs layer by layer does, to the
last bit.

What is shown:

- weights, losses and tests are the same, also where the learning rate, masks, recurrent states or
  shapes change from step to step, and in a resumed run;
- a loss that is not finite, or a wrong label, ends the run with the weights and at the iteration at
  which it would end layer by layer;
- what may not be captured (callbacks, layers on the host, debug_info) is not, and the log says why;
- iterations are enqueued while others run, and none is pending when the solver returns.
"""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format

from caffepy.core.errors import DataError, DivergenceError
from caffepy.device import math_mode
from caffepy.device.cuda import CudaDevice
from caffepy.device.device import Device
from caffepy.net import gradients
from caffepy.net.gradients import large_products
from caffepy.proto.caffe_pb2 import SolverParameter
from caffepy.solver import Solver
from tests.nets import library
from tests.solver.cases import NET, Recorder, Several, ask, no_signal

pytestmark = pytest.mark.gpu

DATA = library.digits(7, 11)
LAYERS = library.perceptron("") + library.accuracy("ip2", more=library.IN_TESTS)
DIGITS_NET = DATA + LAYERS
FED = library.inputs("in", data=(4, 6), label=(4,))
CONVOLUTION = (
    library.convolution("conv", "data", 6, 3)
    + library.relu("conv_relu", "conv")
    + library.pooling("pool", "conv", "kernel_size: 2 stride: 2")
)
SETTINGS = (
    'base_lr: 0.05 lr_policy: "step" gamma: 0.5 stepsize: 6 random_seed: 3 '
    "snapshot_after_train: false "
)
RULES = {
    "SGD": "momentum: 0.9 weight_decay: 0.001 ",
    "Adam": 'type: "Adam" momentum: 0.9 momentum2: 0.99 delta: 1e-6 ',
}


def solver_of(
    settings: str = RULES["SGD"],
    net: str = DIGITS_NET,
    *,
    capture: bool = True,
    device: Device | None = None,
    **given: Any,
) -> Solver:
    given_net = f'net_param {{ name: "captured" {net} }}'
    param = text_format.Merge(settings + given_net, text_format.Parse(SETTINGS, SolverParameter()))
    solver = Solver(param, device=device or CudaDevice(0, seed=1), **given)
    solver.capture = capture
    return solver


@pytest.fixture(autouse=True)
def in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp32 unless a test asks for something else, and no convolution that adds up in any order."""
    monkeypatch.setattr(math_mode.default(), "precision", "fp32")
    monkeypatch.setattr(math_mode.default(), "deterministic", True)


def numbers(solver: Solver) -> np.ndarray:
    """Weights and history."""
    return np.concatenate([solver.device.on_host(a) for a in (solver.params.data, *solver.history)])


def replays(solver: Solver) -> int:
    return solver.iterations.step.graphs._replayed


def same(settings: str, net: str = DIGITS_NET, steps: int = 12) -> tuple[Recorder, Recorder]:
    """Train captured and not; weights, losses, rates and tests must agree to the bit. Returns what
    was reported.
    """
    heard = []
    ended = []
    for capture in (True, False):
        recorder = Recorder()
        solver = solver_of(settings, net, capture=capture, reporter=recorder)
        solver.step(steps)
        assert (replays(solver) > 0) == capture
        heard.append(recorder)
        ended.append(numbers(solver))
        assert (
            solver.device.step_count
            == int(solver.device.on_host(solver.device.step_counter))
            == steps * solver.param.iter_size
        )
        solver.close()
    captured, plain = heard
    np.testing.assert_array_equal(*ended)
    assert captured.events == plain.events
    assert captured.losses == plain.losses
    assert captured.rates == plain.rates
    for mine, theirs in zip(captured.tests, plain.tests, strict=True):
        for name in theirs:
            np.testing.assert_array_equal(mine[name], theirs[name])
    return captured, plain


NORMALIZED = (
    library.convolution("conv", "data", 8, 3, "bias_term: false")
    + library.normalization("norm", "conv", "norm")
    + library.relu("norm_relu", "norm")
    + library.convolution("conv2", "norm", 8, 3)
    + library.layer("LRN", "lrn", "conv2")
    + library.pooling("pool", "lrn", "kernel_size: 2 stride: 2")
    + library.layer("Concat", "both", "pool pool")
)


BRANCHED = (
    CONVOLUTION
    + library.convolution("a", "pool", 6, 1)
    + library.relu("a_relu", "a")
    + library.convolution("b1", "pool", 6, 3, "pad: 1")
    + library.convolution("b2", "b1", 6, 3, "pad: 1")
    + library.pooling("c", "pool", "kernel_size: 3 stride: 1 pad: 1")
    + library.layer("Concat", "both", "a b2 c")
)


def test_branches_run_beside_each_other() -> None:
    net = DATA + BRANCHED + LAYERS.replace('bottom: "data"', 'bottom: "both"')
    solver = solver_of(net=net)
    solver.step(4)
    assert {f"branch {i}" for i in (1, 2, 3)} <= set(solver.device._streams.side)
    solver.close()
    same(RULES["SGD"], net)


def test_compiling_ahead_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of both passes and of the update are asked for; parameters, gradients and what is
    trained afterwards are the same to the bit.
    """
    from caffepy.ops.cuda import compiler

    monkeypatch.setattr(math_mode.default(), "precision", "bf16")
    net = DATA + NORMALIZED + LAYERS.replace('bottom: "data"', 'bottom: "both"')
    asked, ask = set[str](), compiler._job

    def noted(key: compiler.Key) -> Any:
        asked.add(key[2].partition("<")[0])
        return ask(key)

    trained = []
    for ahead in (True, False):
        solver = solver_of(net=net)
        step = solver.iterations.step
        if ahead:
            before, gradient = numbers(solver), solver.device.on_host(solver.params.diff)
            with monkeypatch.context() as patch:
                patch.setattr(compiler, "_job", noted)
                step.compile_ahead()
            np.testing.assert_array_equal(numbers(solver), before)
            np.testing.assert_array_equal(solver.device.on_host(solver.params.diff), gradient)
            wanted = "max_pool_forward", "lrn_backward_warps", "softmax_loss_gradient", "sgd"
            assert asked >= set(wanted), asked
        else:
            step._looked_ahead = True
        solver.step(3)
        trained.append(numbers(solver))
        solver.close()
    np.testing.assert_array_equal(*trained)


SHOWN = "display: 2 average_loss: 3 "
TESTS = "test_iter: 3 test_interval: 5 test_compute_loss: true "
CASES = {
    "plain": SHOWN,
    "clipped": SHOWN + "clip_gradients: 0.5 ",
    "passes": SHOWN + "iter_size: 2 clip_gradients: 0.5 ",
    "unclipped passes": SHOWN + "iter_size: 3 ",
    "tested": SHOWN + TESTS,
    "silent": "",
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", CASES)
def test_as_layer_by_layer(case: str, rule: str) -> None:
    heard, _ = same(RULES[rule] + CASES[case])
    assert bool(heard.losses) == ("display" in CASES[case])


STAYING = (
    library.dummies("in", 'type: "gaussianstatic"', "value: 3", data=(7, 1, 8, 8), label=(7,))
    + NORMALIZED
    + LAYERS.replace('bottom: "data"', 'bottom: "both"')
)
"""A net whose data stay, with masks and running statistics."""


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take each iteration for one that is short enough for several to be one graph."""
    monkeypatch.setattr("caffepy.solver.iteration.TIMED", 3)
    monkeypatch.setattr("caffepy.solver.iteration.LONGEST", float("inf"))


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", ["", "clip_gradients: 0.5 "])
def test_iterations_of_one_graph_are_those_that_are_enqueued_singly(case: str, rule: str) -> None:
    ended, heard = [], []
    for several in (True, False):
        recorder = Several()
        settings = RULES[rule] + "display: 30 average_loss: 3 " + case
        solver = solver_of(settings, STAYING, reporter=recorder)
        solver.action = no_signal if several else ask
        solver.step(64)
        parts = solver.iterations.step.graphs._parts
        assert ("8 iterations" in parts and parts["8 iterations"].graph is not None) == several
        ended.append(numbers(solver))
        heard.append((recorder.events, recorder.losses, recorder.rates))
        assert solver.device.step_count == 64
        assert int(solver.device.on_host(solver.device.step_counter)) == 64
        solver.close()
    np.testing.assert_array_equal(*ended)
    assert heard[0] == heard[1]


@pytest.mark.usefixtures("short")
def test_divergence_in_a_graph_of_several_iterations_leaves_the_weights_of_before() -> None:
    """The rate of iteration 35, in the middle of a graph, makes the next loss infinite."""
    settings = 'base_lr: 0.01 lr_policy: "multistep" gamma: 1e30 stepvalue: 35 '
    ended = []
    for several in (True, False):
        solver = solver_of(settings, STAYING, reporter=Several())
        solver.action = no_signal if several else ask
        with pytest.raises(DivergenceError) as met:
            solver.step(64)
        ended.append((solver.iter, str(met.value).split(":")[0], solver.iterations.current_step))
        ended.append(numbers(solver).tobytes())
        solver.close()
    assert ended[:2] == ended[2:]
    assert 35 < ended[0][0] < 40


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_convolutions_in_each_precision(precision: str) -> None:
    math_mode.default().precision = precision
    net = DATA + CONVOLUTION + LAYERS.replace('bottom: "data"', 'bottom: "pool"')
    same(RULES["SGD"] + SHOWN + TESTS + "clip_gradients: 1 ", net)


WIDE = (
    library.inputs("in", data=(8, 64), label=(8,))
    + library.inner_product("wide", "data", 40, filler=library.NARROW)
    + library.relu("wide_relu", "wide")
    + library.inner_product("wider", "wide", 48, "transpose: true", filler=library.NARROW)
    + library.inner_product("last", "wider", 16, filler=library.NARROW)
    + library.softmax_loss("last")
)


@pytest.mark.parametrize("rule", RULES)
def test_large_weights_are_updated_with_their_gradients(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from caffepy.ops.cuda import outer_products

    monkeypatch.setattr(math_mode.default(), "precision", "bf16")
    monkeypatch.setattr(gradients, "LARGE", 0)
    monkeypatch.setattr(outer_products, "LEAST", 1)
    ended = []
    for capture in (True, False):
        solver = solver_of(RULES[rule], WIDE, capture=capture)
        rng = np.random.default_rng(0)
        if capture:
            solver.save_memory()
        for _ in range(6):
            solver.net.blobs["data"].host_data[...] = rng.standard_normal((8, 64))
            solver.net.blobs["label"].host_data[...] = rng.integers(0, 16, 8)
            solver.step(1)
        assert (replays(solver) > 0) == capture
        weights = [layer.blobs[0] for layer in large_products(solver.net).values()]
        assert len(weights) == 3
        assert [bool(w.host_diff.any()) for w in weights] == [not capture] * 3
        ended.append(numbers(solver))
        solver.close()
    np.testing.assert_array_equal(*ended)


def test_as_on_the_cpu() -> None:
    """But for dropout, whose masks are others."""
    net = DIGITS_NET.replace("Dropout", "AbsVal")
    cpu, gpu = Recorder(), Recorder()
    one = solver_of(RULES["SGD"] + CASES["tested"], net, device=Device(1), reporter=cpu)
    other = solver_of(RULES["SGD"] + CASES["tested"], net, reporter=gpu)
    for solver in (one, other):
        solver.step(12)
        solver.close()
    assert cpu.events == gpu.events
    np.testing.assert_allclose(gpu.losses, cpu.losses, rtol=1e-4)
    np.testing.assert_allclose(numbers(other), numbers(one), rtol=1e-3, atol=1e-5)


def test_masks_change_with_the_pass_and_not_with_the_seed_alone() -> None:
    solver = solver_of("base_lr: 0 ", DIGITS_NET.replace("transform_param { scale: 0.004 }", ""))
    masks = []
    drop = solver.net.layers[solver.net.layer_names.index("drop")]
    for _ in range(6):
        solver.step(1)
        masks.append(drop.mask.host_data.copy())  # type: ignore[attr-defined]
    assert replays(solver) >= 3
    assert all((a != b).any() for i, a in enumerate(masks) for b in masks[:i])


def test_a_resumed_run_goes_on_exactly(tmp_path: Path) -> None:
    settings = RULES["Adam"] + CASES["tested"] + f'snapshot_prefix: "{tmp_path}/s" snapshot: 4 '
    whole, parts = Recorder(), Recorder()
    straight = solver_of(settings, reporter=whole)
    straight.step(13)
    for first, end in ((0, 8), (8, 13)):
        solver = solver_of(settings, reporter=parts)
        if first:
            solver.restore(f"{tmp_path}/s_iter_{first}.solverstate")
        solver.step(end - first)
        solver.close()
    np.testing.assert_array_equal(numbers(solver), numbers(straight))
    assert whole.losses == parts.losses
    assert [float(t["loss"]) for t in whole.tests] == [float(t["loss"]) for t in parts.tests]


SEQUENCE = ('type: "gaussian"', 'type: "constant" value: 1', 'type: "uniform"')
RECURRENT = (
    library.dummies("in", *SEQUENCE, data=(3, 2, 4), cont=(3, 2), label=(3, 2, 5))
    + library.recurrent("LSTM", "lstm", "data cont", 5, filler=library.NARROW)
    + library.euclidean_loss("lstm", "label")
)


def test_masks_go_on_in_a_solver_that_recorded_others(tmp_path: Path) -> None:
    settings = RULES["SGD"] + f'snapshot_prefix: "{tmp_path}/masks" '
    first, second = solver_of(settings), solver_of(settings, device=CudaDevice(0, seed=2))
    second.device.seed(99)
    for solver in (first, second):
        solver.step(4)
    first.snapshot()
    first.step(3)
    second.restore(f"{tmp_path}/masks_iter_4.solverstate")
    second.step(3)
    assert np.array_equal(numbers(first), numbers(second))


def test_recurrent_states_go_on(tmp_path: Path) -> None:
    same(RULES["SGD"] + SHOWN, RECURRENT, 8)
    settings = RULES["SGD"] + f'snapshot_prefix: "{tmp_path}/s" snapshot: 5 '
    straight, resumed = (solver_of(settings, RECURRENT) for _ in range(2))
    straight.step(8)
    resumed.restore(f"{tmp_path}/s_iter_5.solverstate")
    resumed.step(3)
    np.testing.assert_array_equal(numbers(resumed), numbers(straight))


def feed(solver: Solver, value: float = 1.0, label: float = 0.0) -> None:
    """Write what an Input layer has."""
    solver.net.blobs["data"].host_data[...] = value
    solver.net.blobs["label"].host_data[...] = label


FED_NET = FED + LAYERS.replace("Dropout", "AbsVal")


def test_what_python_writes_between_steps_counts() -> None:
    ended = []
    for capture in (True, False):
        solver = solver_of(RULES["SGD"] + "iter_size: 2 ", FED_NET, capture=capture)
        for i in range(8):
            feed(solver, i / 8, i % 3)
            solver.step(1)
            assert solver.net.learnable_params[0].host_diff.any()
            if i % 2:
                solver.net.learnable_params[2].host_data[...] *= 0.9
        assert (replays(solver) > 0) == capture
        ended.append(numbers(solver))
    np.testing.assert_array_equal(*ended)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("passes", [1, 2])
def test_numbers_of_the_rule_that_python_changes_count(passes: int, rule: str) -> None:
    ended = []
    for capture in (True, False):
        settings = f"iter_size: {passes} clip_gradients: 1 {RULES[rule]}"
        solver = solver_of(settings, FED_NET, capture=capture)
        for i in range(12):
            feed(solver, i / 8, i % 3)
            if i == 6:
                solver.param.momentum /= 2
                solver.param.momentum2 /= 2
                solver.param.delta *= 1000
                solver.param.weight_decay = 0.1
            solver.step(1)
        assert (replays(solver) > 0) == capture
        ended.append(numbers(solver))
    np.testing.assert_array_equal(*ended)


def test_new_shapes_are_recorded_anew() -> None:
    ended = []
    for capture in (True, False):
        solver = solver_of(RULES["SGD"], FED_NET, capture=capture)
        for i, n in enumerate([4, 4, 4, 4, 9, 9, 9, 9, 2, 2, 2, 2]):
            for name, shape in (("data", (n, 6)), ("label", (n,))):
                solver.net.blobs[name].reshape(shape)
            feed(solver, i / 8, i % 3)
            solver.step(1)
        assert (solver.iterations.step.graphs._captured == 3) == capture
        ended.append(numbers(solver))
    np.testing.assert_array_equal(*ended)


def test_shapes_that_change_all_the_time_are_not_recorded(caplog: pytest.LogCaptureFixture) -> None:
    solver = solver_of(RULES["SGD"], FED_NET)
    for i in range(100):
        for name, shape in (("data", (1 + i // 3 % 2, 6)), ("label", (1 + i // 3 % 2,))):
            solver.net.blobs[name].reshape(shape)
        feed(solver)
        with caplog.at_level(logging.INFO, "caffepy.solver"):
            solver.step(1)
    told = [m for m in caplog.messages if "layer by layer" in m]
    assert told == ["The training step runs layer by layer: shapes or memory change too often"]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("at", [0, 6])
@pytest.mark.parametrize("capture", [True, False])
def test_divergence_leaves_the_weights_of_before(
    capture: bool, at: int, bad: float, tmp_path: Path
) -> None:
    settings = RULES["SGD"] + f'snapshot_prefix: "{tmp_path}/s" snapshot: 1000 '
    solver = solver_of(settings, FED_NET, capture=capture)
    feed(solver)
    if at:
        solver.step(at)
    before = numbers(solver)
    solver.net.blobs["data"].host_data[1, 2] = bad
    with pytest.raises(DivergenceError, match=f"^iteration {at}: the loss is nan; "):
        solver.step(40)
    assert solver.iter == at
    np.testing.assert_array_equal(numbers(solver), before)
    assert not list(tmp_path.iterdir())
    feed(solver)
    solver.step(4)
    assert solver.iter == at + 4
    assert (numbers(solver) != before).any()


@pytest.mark.parametrize("at", [0, 6])
@pytest.mark.parametrize("capture", [True, False])
def test_a_wrong_label_ends_the_run_where_it_stands(capture: bool, at: int, tmp_path: Path) -> None:
    settings = RULES["SGD"] + f'snapshot_prefix: "{tmp_path}/s" snapshot: 1000 max_iter: 60 '
    solver = solver_of(settings, FED_NET, capture=capture)
    feed(solver)
    if at:
        solver.step(at)
    before = numbers(solver)
    solver.net.blobs["label"].host_data[2:] = 12, 99
    with pytest.raises(DataError) as error:
        solver.solve()
    assert (
        str(error.value)
        == 'layer "loss" (SoftmaxWithLoss): label 12 is not one of the 10 classes 0 to 9'
    )
    assert solver.iter == at
    np.testing.assert_array_equal(numbers(solver), before)
    saved = [f"s_iter_{at}.{end}" for end in ("caffemodel", "caffepystate", "solverstate")]
    assert sorted(p.name for p in tmp_path.iterdir()) == (saved if at else [])
    feed(solver)
    solver.step(3)
    assert solver.iter == at + 3


def test_a_wrong_label_in_a_test(tmp_path: Path) -> None:
    net = DIGITS_NET.replace("num_output: 10", "num_output: 5")
    solver = solver_of(RULES["SGD"] + TESTS + "test_initialization: false ", net)
    with pytest.raises(DataError, match="is not one of the 5 classes 0 to 4"):
        solver.test_all()


def test_loss_scale_of_fp16(caplog: pytest.LogCaptureFixture) -> None:
    math_mode.default().precision = "fp16"
    solver = solver_of(
        RULES["SGD"] + SHOWN,
        DATA + CONVOLUTION + LAYERS.replace('bottom: "data"', 'bottom: "pool"'),
    )
    loss = solver.net.blobs["loss"]
    assert float(loss.host_diff) == 65536
    solver.update_state.set_state({"loss_scale": 2.0**24})
    before = numbers(solver)
    with caplog.at_level(logging.INFO, "caffepy.solver"):
        solver.step(1)
    np.testing.assert_array_equal(numbers(solver), before)
    assert "Iteration 0: gradients overflow, no update; loss scale = 8.38861e+06" in caplog.messages
    solver.step(20)
    state = solver.update_state.state()
    assert state["loss_scale"] < 2.0**23
    assert state["good"] > 5
    assert float(loss.host_diff) == state["loss_scale"]
    assert (numbers(solver) != before).any()
    solver.update_state.set_state({"loss_scale": state["loss_scale"], "good": 1999})
    solver.step(1)
    assert solver.update_state.state() == {"loss_scale": 2 * state["loss_scale"], "good": 0}


def test_loss_scale_is_kept_and_starts_where_a_net_says(tmp_path: Path) -> None:
    math_mode.default().precision = "fp16"
    net = (
        DATA
        + CONVOLUTION
        + LAYERS.replace('bottom: "data"', 'bottom: "pool"')
        + "global_grad_scale: 128 "
    )
    solver = solver_of(RULES["SGD"] + f'snapshot_prefix: "{tmp_path}/s" ', net)
    solver.step(5)
    assert solver.update_state.state() == {"loss_scale": 128, "good": 5}
    solver.snapshot()
    other = solver_of(RULES["SGD"], net)
    other.restore(f"{tmp_path}/s_iter_5.solverstate")
    assert other.update_state.state() == {"loss_scale": 128, "good": 5}


class Halve:
    """Halves the gradients."""

    def __init__(self, solver: Solver, capturable: bool) -> None:
        self.solver, self.capturable, self.calls = solver, capturable, 0

    def on_start(self) -> None:
        self.calls += 1

    def on_gradients_ready(self) -> None:
        self.solver.net.ops.scaled(0.5, self.solver.params.diff, self.solver.params.diff)


def test_callbacks_that_say_so_are_recorded() -> None:
    ended = []
    for capturable in (True, False):
        solver = solver_of(RULES["SGD"] + "clip_gradients: 0.5 ", FED_NET)
        callback = Halve(solver, capturable)
        solver.add_callback(callback)
        feed(solver)
        solver.step(10)
        assert (callback.calls < 5) == capturable
        ended.append(numbers(solver))
    np.testing.assert_array_equal(*ended)


def test_the_log_says_once_why_not(caplog: pytest.LogCaptureFixture) -> None:
    net = FED_NET + 'layer { name: "h" type: "Filter" bottom: "ip2" bottom: "label" top: "h" }'
    solver = solver_of(RULES["SGD"], net)
    feed(solver)
    with caplog.at_level(logging.INFO, "caffepy.solver"):
        solver.step(3)
        solver.step(3)
    told = [m for m in caplog.messages if "layer by layer" in m]
    assert told == [
        'The training step runs layer by layer: layer "h" (Filter) computes on the host'
    ]


def test_callbacks_of_python_are_called(caplog: pytest.LogCaptureFixture) -> None:
    solver = solver_of(RULES["SGD"], FED_NET)
    feed(solver)
    solver.step(4)
    seen: list[int] = []
    solver.net.after_forward.append(seen.append)
    with caplog.at_level(logging.INFO, "caffepy.solver"):
        solver.step(2)
    assert len(seen) == 2 * len(solver.net.layers)
    assert (
        "The training step runs layer by layer: a callback does not say that it can be captured"
        in caplog.messages
    )


def test_debug_info_shows_an_iteration_layer_by_layer(caplog: pytest.LogCaptureFixture) -> None:
    settings = RULES["SGD"] + "display: 5 debug_info: true "
    with caplog.at_level(logging.INFO, "caffepy.net"):
        same(settings)
    assert sum("[Backward] All net params" in m for m in caplog.messages) == 2 * 3


def test_what_cannot_be_recorded_runs_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    solver = solver_of(RULES["SGD"], FED_NET)
    drop = solver.net.layers[solver.net.layer_names.index("drop")]
    forward = drop.forward

    def reads(bottom: Any, top: Any) -> None:
        forward(bottom, top)
        float(top[0].data.sum())

    monkeypatch.setattr(drop, "forward", reads)
    feed(solver)
    plain = solver_of(RULES["SGD"], FED_NET, capture=False)
    feed(plain)
    with caplog.at_level(logging.INFO, "caffepy.solver"):
        solver.step(8)
    plain.step(8)
    assert replays(solver) == 0
    assert sum("layer by layer: it cannot be captured: " in m for m in caplog.messages) == 1
    np.testing.assert_array_equal(numbers(solver), numbers(plain))


def test_iterations_go_on_while_others_run() -> None:
    """The host is never more than so many iterations ahead, and hears of each."""
    recorder = Recorder()
    solver = solver_of(RULES["SGD"], FED_NET, reporter=recorder)
    feed(solver)
    solver.step(100)
    assert len(recorder.events) == 100
    assert not solver.iterations._pending
    assert solver.iterations.display.window.losses


def test_an_interrupted_run_goes_on() -> None:
    solver = solver_of(RULES["SGD"], FED_NET)
    feed(solver)
    solver.step(5)

    def interrupt() -> Any:
        raise KeyboardInterrupt

    going_on = solver.action
    solver.action = interrupt
    with pytest.raises(KeyboardInterrupt):
        solver.step(5)
    solver.action = going_on
    solver.step(5)
    assert solver.iter == 11
    assert not solver.iterations._pending


def test_memory_is_shared_without_a_change(tmp_path: Path) -> None:
    ended = []
    for saving in (True, False):
        solver = solver_of(RULES["SGD"] + TESTS)
        if saving:
            solver.save_memory()
        solver.step(12)
        ended.append(numbers(solver))
    np.testing.assert_array_equal(*ended)


def test_noise_net_with_a_data_layer_on_the_host() -> None:
    same(RULES["SGD"] + SHOWN, NET)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("rule", RULES)
def test_large_gradients_are_written(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if all were large: after more passes than one recording, and where something else stood
    before.
    """
    without = solver_of(RULES[rule])
    monkeypatch.setattr(gradients, "LARGE", 0)
    solver = solver_of(RULES[rule])
    assert [layer.param.name for layer in large_products(solver.net).values()] == ["ip1", "ip2"]
    for one in (without, solver):
        one.step(4)
        with one.device.scope():
            one.params.diff.fill(np.nan)
        one.step(4)
        one.device.flush()
    np.testing.assert_allclose(
        solver.device.on_host(solver.params.data),
        without.device.on_host(without.params.data),
        rtol=1e-5,
        atol=1e-6,
    )
    for one in (without, solver):
        one.close()
