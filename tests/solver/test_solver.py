import logging
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from caffepy.core.errors import ConfigError, DataError, DivergenceError
from caffepy.core.events import Displayed
from caffepy.solver import Action
from tests.solver.cases import NET, NOISE, AskAt, Recorder, solver_of

QUIET = "snapshot_after_train: false "


def events(
    settings: str, action: AskAt | None = None, net: str = NET, **kwargs: object
) -> list[str]:
    recorder = Recorder()
    solver = solver_of(settings, net, reporter=recorder, **kwargs)
    solver.action = action or solver.action
    solver.solve()
    return recorder.events


def test_events_come_in_caffes_order() -> None:
    tests = "test_iter: 2 test_interval: 2 "
    assert events(QUIET + "max_iter: 3 display: 2 " + tests) == [
        "solving noise fixed",
        "0 test 0",
        "0 tested 0",
        "0 displayed loss",
        "0 lr",
        "0 done 4",
        "1 done 4",
        "2 test 0",
        "2 tested 0",
        "2 displayed loss",
        "2 lr",
        "2 done 4",
        "3 finished",
        "done",
    ]


def test_outputs_are_displayed_as_they_were_before_the_update() -> None:
    net = """
        layer { name: "w" type: "Parameter" top: "w" parameter_param { shape { dim: 1 } } }
        layer { name: "x" type: "DummyData" top: "x" dummy_data_param { shape { dim: 1 } } }
        layer { name: "loss" type: "EuclideanLoss" bottom: "w" bottom: "x" top: "loss" }
        layer { name: "out" type: "Split" bottom: "w" top: "seen" }
    """
    shown = []

    class Outputs(Recorder):
        def displayed(self, it: Displayed) -> None:
            shown.append({name: float(v.reshape(-1)[0]) for name, v, _ in it.outputs}["seen"])

    solver = solver_of("display: 1 base_lr: 0.5 ", net, reporter=Outputs())
    solver.net.learnable_params[0].data[...] = 8
    solver.step(2)
    assert shown == [8, 4]


def test_end_of_solve_displays_and_tests_where_they_are_due() -> None:
    tests = "test_iter: 1 test_interval: 2 test_initialization: false test_compute_loss: true "
    assert events(QUIET + "max_iter: 2 display: 1 " + tests)[-5:] == [
        "1 done 4",
        "2 finished with loss",
        "2 test 0",
        "2 tested 0 with loss",
        "done",
    ]


def test_tests_of_intel_caffe_may_be_offset() -> None:
    tests = "test_iter: 1 test_interval: 3 test_offset: 1 "
    heard = events(QUIET + "max_iter: 4 " + tests)
    assert [event for event in heard if " test 0" in event] == ["1 test 0", "4 test 0"]


def test_iter_size_accumulates_and_counts_its_images() -> None:
    assert "0 done 12" in events(QUIET + "max_iter: 1 iter_size: 3 ")


SNAPSHOTS = {
    "period": ("max_iter: 4 snapshot: 2 ", [2, 4]),
    "after_train": ("max_iter: 3 snapshot: 2 ", [2, 3]),
    "not_after_train": ("max_iter: 3 snapshot: 2 snapshot_after_train: false ", [2]),
    "only_after_train": ("max_iter: 3 ", [3]),
}


@pytest.mark.parametrize("case", SNAPSHOTS)
def test_snapshots_are_written_when_caffe_writes_them(case: str, tmp_path: Path) -> None:
    settings, iterations = SNAPSHOTS[case]
    heard = events(f'{settings} snapshot_prefix: "{tmp_path}/s" ')
    assert [e for e in heard if e.startswith("snapshotting to")] == [
        f"snapshotting to binary proto s_iter_{i}.caffemodel" for i in iterations
    ]
    names = [
        f"s_iter_{i}.{e}" for i in iterations for e in ("caffemodel", "caffepystate", "solverstate")
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(names)


def test_stop_leaves_with_a_snapshot(tmp_path: Path) -> None:
    heard = events(f'max_iter: 9 snapshot_prefix: "{tmp_path}/s" ', AskAt(2, Action.STOP))
    assert heard[-3:] == [
        "snapshotting to binary proto s_iter_2.caffemodel",
        "snapshotting solver state to binary proto s_iter_2.solverstate",
        "stopped",
    ]


def test_stop_and_snapshot_at_once_write_one_snapshot(tmp_path: Path) -> None:
    both = AskAt(2, Action.STOP | Action.SNAPSHOT)
    heard = events(f'max_iter: 9 snapshot_prefix: "{tmp_path}/s" ', both)
    assert len([e for e in heard if e.startswith("snapshotting")]) == 2
    heard = events(
        f'{QUIET} max_iter: 9 snapshot_prefix: "{tmp_path}/t" ',
        AskAt(2, Action.STOP | Action.SNAPSHOT),
    )
    assert len([e for e in heard if e.startswith("snapshotting")]) == 2


def test_stop_during_a_test_does_no_update(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "caffepy.solver"):
        heard = events(QUIET + "max_iter: 9 test_iter: 3 test_interval: 1 ", AskAt(6, Action.STOP))
    assert heard[-4:] == ["0 tested 0", "0 done 4", "1 test 0", "stopped"]
    assert "Test interrupted." in caplog.messages


def test_step_counts_on_and_negative_counts_do_nothing() -> None:
    solver = solver_of("max_iter: 100 ")
    solver.step(3)
    solver.step(-2)
    solver.step(2)
    assert solver.iter == 5


def test_callbacks_surround_the_gradients() -> None:
    solver = solver_of("max_iter: 1 iter_size: 2 ")
    calls: list[str] = []

    class Callback:
        def on_start(self) -> None:
            assert not solver.params.diff.any()
            calls.append("start")

        def on_gradients_ready(self) -> None:
            assert solver.params.diff.any()
            calls.append("ready")
            self.before = solver.params.data.copy()
            solver.params.diff.fill(0)

    callback = Callback()
    solver.add_callback(callback)
    solver.step(1)
    assert calls == ["start", "ready"]
    np.testing.assert_array_equal(solver.params.data, callback.before)


def test_average_loss_smooths_what_is_displayed() -> None:
    plain, smooth = Recorder(), Recorder()
    solver_of("display: 1 ", reporter=plain).step(5)
    solver_of("display: 1 average_loss: 2 ", reporter=smooth).step(5)
    means = [plain.losses[0]] + [(a + b) / 2 for a, b in pairwise(plain.losses)]
    np.testing.assert_allclose(smooth.losses, means, rtol=1e-6)


def test_clipping_scales_the_gradient_and_logs_it(caplog: pytest.LogCaptureFixture) -> None:
    solver = solver_of("clip_gradients: 0.25 momentum: 0 ")
    before = solver.params.data.copy()
    with caplog.at_level(logging.INFO, "caffepy.solver"):
        solver.step(1)
    assert abs(np.linalg.norm(solver.params.data - before) - 0.1 * 0.25) < 1e-6
    assert caplog.messages[-1].startswith("Gradient clipping: scaling down gradients (L2 norm ")
    assert "> 0.25) by scale factor 0." in caplog.messages[-1]


def test_multipliers_are_per_parameter() -> None:
    frozen = NET.replace('top: "o"', 'top: "o" param { lr_mult: 0 } param { lr_mult: 2 }')
    solver = solver_of("momentum: 0 ", frozen)
    weight, bias = (blob.data.copy() for blob in solver.params.blobs)
    solver.step(1)
    np.testing.assert_array_equal(solver.params.blobs[0].data, weight)
    assert (solver.params.blobs[1].data != bias).all()


def test_seed_fixes_the_weights_and_rank_changes_them() -> None:
    first, again = solver_of(""), solver_of("")
    other = solver_of("", rank=1, root=first)
    np.testing.assert_array_equal(first.params.data, again.params.data)
    assert (first.params.data != other.params.data).any()


def test_only_the_root_has_data_layers_of_its_own() -> None:
    with pytest.raises(
        ConfigError,
        match=r'root_net needs to be set for all non-root solvers: layer "in" \(DummyData',
    ):
        solver_of("", rank=1)


def test_test_nets_use_the_weights_of_training() -> None:
    solver = solver_of("test_iter: 1 test_interval: 1 ")
    solver.test_all()
    assert solver.test_nets[0].params[0].data is not None
    assert np.shares_memory(solver.test_nets[0].params[0].data, solver.params.data)


def test_test_outputs_are_means_over_the_batches() -> None:
    constant = NOISE.replace('type: "gaussian"', 'type: "constant" value: 2').replace(
        'type: "uniform"', 'type: "constant" value: 1'
    )
    net = (
        constant + 'layer { name: "e" type: "EuclideanLoss" bottom: "x" bottom: "x2" top: "loss" '
        "loss_weight: 3 }"
    )
    net = net.replace('top: "x" top: "y"', 'top: "x" top: "x2"').replace("dim: 2 }", "dim: 3 }")
    recorder = Recorder()
    solver = solver_of(
        "test_iter: 2 test_iter: 3 test_interval: 1 test_compute_loss: true ",
        net,
        reporter=recorder,
    )
    solver.test_all()
    assert [float(test["loss"]) for test in recorder.tests] == [1.5, 1.5]
    assert solver.last_outputs[1][0][2] == 3
    assert recorder.events == [
        "0 test 0",
        "0 tested 0 with loss",
        "0 test 1",
        "0 tested 1 with loss",
    ]


def test_states_reach_their_nets() -> None:
    tagged = (
        NET + 'layer { name: "s" type: "Power" bottom: "o" top: "p" include { stage: "extra" } }'
    )
    tests = (
        'test_iter: 1 test_iter: 1 test_interval: 1 test_state { } test_state { stage: "extra" } '
    )
    solver = solver_of(tests + 'train_state { level: 2 stage: "a" } ', tagged)
    assert solver.net.param.state.level == 2
    assert [("p" in net.blobs) for net in (solver.net, *solver.test_nets)] == [False, False, True]


BAD = {
    "no_net": ("train_state { } test_net_x", None, None),
    "two_nets": (
        'net_param { } net: "x"',
        "exactly one of net, net_param, train_net, train_net_param",
        None,
    ),
    "none": ('snapshot_prefix: "net"', "but none is given", None),
    "test_iter": (
        "test_interval: 5 ",
        "test_iter (how many batches a test takes) is missing",
        None,
    ),
    "too_few": (
        "test_interval: 1 test_iter: 1 test_net_param { } test_net_param { } net_param { }",
        "1 given for 2",
        None,
    ),
    "too_many": (
        "test_interval: 1 test_iter: 1 test_iter: 1 test_net_param { } train_net_param { }",
        "2 given for 1",
        None,
    ),
    "zero": ("test_interval: 1 test_iter: 0 ", "test_iter must be 1 or more, not 0", None),
    "interval": (
        "test_iter: 1 ",
        "test_interval must be above 0 where there are test nets, not 0",
        None,
    ),
    "states": (
        "test_iter: 1 test_interval: 1 test_state { } test_state { } ",
        "2 given for 1 test net(s)",
        None,
    ),
}
del BAD["no_net"]


@pytest.mark.parametrize("case", BAD)
def test_fields_that_disagree_are_refused(case: str) -> None:
    with pytest.raises(ConfigError) as error:
        solver_of(BAD[case][0])
    assert BAD[case][1] in str(error.value)


def test_missing_net_file_names_the_field(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.prototxt"):
        solver_of(f'net: "{tmp_path}/gone.prototxt" ')


def test_output_that_changes_shape_is_refused() -> None:
    solver = solver_of("test_iter: 2 test_interval: 1 ")
    net = solver.test_nets[0]
    batches = iter([(), (2,)])
    net.after_forward.append(
        lambda i: net.blobs["loss"].reshape(next(batches)) if i == len(net.layers) - 1 else None
    )
    with pytest.raises(DataError, match='output "loss" of a test net changed its shape'):
        solver.test_all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_divergence_names_iteration_layer_and_blob(bad: float, tmp_path: Path) -> None:
    solver = solver_of(f'max_iter: 9 snapshot: 4 snapshot_prefix: "{tmp_path}/s" ')
    solver.step(3)
    solver.params.blobs[1].data[0] = bad
    with pytest.raises(DivergenceError) as error:
        solver.step(5)
    message = str(error.value)
    assert message.startswith("iteration 3: the loss is ")
    assert 'the first blob that is not finite is "o" of layer "ip" (InnerProduct)' in message
    assert 'parameter 1 of layer "ip" (InnerProduct) is not finite' in message
    assert not list(tmp_path.iterdir())


def test_broken_weights_are_not_snapshotted(tmp_path: Path) -> None:
    solver = solver_of(f'max_iter: 9 snapshot_prefix: "{tmp_path}/s" ')
    solver.params.data[0] = np.nan
    with pytest.raises(DivergenceError, match="no snapshot is written"):
        solver.snapshot()
    assert not list(tmp_path.iterdir())


def test_images_are_unknown_without_a_batch() -> None:
    scalar = 'layer { name: "in" type: "DummyData" top: "x" dummy_data_param { shape { } } } '
    scalar += 'layer { name: "r" type: "Power" bottom: "x" top: "loss" loss_weight: 1 } '
    assert events(QUIET + "max_iter: 1 ", net=scalar)[1] == "0 done 0"


def test_debug_info_is_on_in_displayed_iterations_only() -> None:
    solver = solver_of("debug_info: true display: 2 test_iter: 1 test_interval: 10 ")
    seen = []
    solver.net.after_forward.append(lambda i: seen.append(solver.net.debug_info))
    solver.step(3)
    assert seen[:: len(solver.net.layers)] == [True, False, True]
    assert solver.test_nets[0].debug_info


def test_saturated_loss_is_explained_once(caplog: pytest.LogCaptureFixture) -> None:
    constant = 'dummy_data_param { shape { } data_filler { type: "constant" value: 87.3365 } } }'
    net = f'layer {{ name: "in" type: "DummyData" top: "x" {constant}'
    net += 'layer { name: "r" type: "Power" bottom: "x" top: "loss" loss_weight: 1 } '
    solver_of("display: 1 ", net).step(3)
    assert [m for m in caplog.messages if "87.3365" in m] == [caplog.messages[0]]


def test_loss_after_the_last_iteration_must_be_finite_too() -> None:
    solver = solver_of(QUIET + "max_iter: 1 display: 1 ")
    solver.net.before_forward.append(
        lambda i: solver.params.data.fill(np.nan) if solver.iter else None
    )
    with pytest.raises(DivergenceError, match="iteration 1: the loss is nan"):
        solver.solve()


def test_a_net_without_parameters_updates_nothing() -> None:
    solver = solver_of(
        "weight_decay: 1 ", NOISE + 'layer { name: "s" type: "Silence" bottom: "x" bottom: "y" }'
    )
    solver.step(2)
    segments = solver.iterations.step.optimizer._segments
    assert len(segments.rates) == len(segments.decays) == len(solver.params.ends), (
        "or updates read foreign memory"
    )
    assert not solver.params.data.any()
