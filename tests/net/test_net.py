import logging
from pathlib import Path

import numpy as np
import pytest

from caffepy.core.errors import ConfigError
from caffepy.device.device import Device
from caffepy.net import Net
from caffepy.net.fusion import Step
from tests.net.nets import INPUT, LOSS, definition, ip, net_of

TWO_LAYERS = INPUT + ip("ip1", "x", "ip1") + ip("ip2", "ip1", "ip2") + LOSS % "ip2"


def feed(net: Net, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    net.blobs["x"].data[...] = rng.standard_normal((4, 3))
    net.blobs["y"].data[...] = [0, 1, 2, 3]


def test_names_inputs_outputs() -> None:
    net = net_of('name: "n" ' + TWO_LAYERS)
    assert net.name == "n"
    assert net.layer_names == ["in", "ip1", "ip2", "loss"]
    assert net.inputs == ["x", "y"]
    assert net.outputs == ["loss"]
    assert net.nodes[3].bottom_names == ["ip2", "y"]
    assert list(net.blobs) == ["x", "y", "ip1", "ip2", "loss"]
    assert net.blob_loss_weights["loss"] == 1
    assert len(net.params) == len(net.learnable_params) == 4


def test_outputs_are_sorted_by_name() -> None:
    net = net_of(INPUT + ip("b", "x", "b") + ip("a", "x", "a") + ip("C", "x", "C"))
    assert net.outputs == ["C", "a", "b", "y"]


def test_gradient_of_a_net_is_the_slope_of_its_loss() -> None:
    net = net_of(TWO_LAYERS, dtype=np.float64)
    feed(net)
    net.forward()
    net.clear_param_diffs()
    net.backward()
    weight = net.learnable_params[0]
    gradient = weight.diff.copy()
    step = 1e-6
    for index in np.ndindex(weight.shape):
        losses = []
        for delta in (step, -step):
            weight.data[index] += delta
            net.forward()
            losses.append(net.loss())
            weight.data[index] -= delta
        assert gradient[index] == pytest.approx(
            (losses[0] - losses[1]) / (2 * step), rel=1e-4, abs=1e-8
        )


def test_blobs_that_a_script_reshaped_are_left_alone_until_they_are_fed() -> None:
    """To compile kernels ahead, a GPU looks at some layers only, such as the loss."""
    net = net_of(TWO_LAYERS)
    net.blobs["x"].reshape((2, 3))
    net.blobs["y"].reshape((2,))
    net.compile_ahead(map(Step, range(4)))
    assert net.blobs["ip2"].shape[0] == 4
    net.forward()
    assert net.blobs["ip2"].shape[0] == 2


def test_arrays_stay_where_they_are() -> None:
    net = net_of(TWO_LAYERS)
    feed(net)
    places = None
    for _ in range(3):
        net.forward()
        net.backward()
        now = [(b.data.ctypes.data, b.diff.ctypes.data) for b in [*net.blobs.values(), *net.params]]
        assert places in (None, now)
        places = now


def test_in_place_layers_share_the_blob() -> None:
    net = net_of(
        INPUT
        + ip("ip1", "x", "ip1")
        + 'layer { name: "r" type: "ReLU" bottom: "ip1" top: "ip1" } '
        + LOSS % "ip1"
    )
    feed(net)
    net.forward()
    assert (net.blobs["ip1"].data >= 0).all()
    assert net.nodes[1].tops[0] is net.nodes[2].tops[0]


def test_top_made_twice() -> None:
    with pytest.raises(
        ConfigError,
        match=r'layer "b" \(InnerProduct\): Top blob \'a\' produced by multiple sources',
    ):
        net_of(INPUT + ip("a", "x", "a") + ip("b", "x", "a"))


def test_unknown_layer_type_names_the_nearest() -> None:
    with pytest.raises(
        ConfigError,
        match=r'layer "c".*unknown layer type "Convolutoin", did you mean "Convolution"\?$',
    ):
        net_of(INPUT + 'layer { name: "c" type: "Convolutoin" bottom: "x" top: "c" }')


def test_an_unknown_layer_type_like_no_other_lists_a_few() -> None:
    told = r'unknown layer type "Q" \(known: Quant, LpqLoss, Squeeze, .{200,800} and \d+ more\)$'
    with pytest.raises(ConfigError, match=told):
        net_of(INPUT + 'layer { name: "c" type: "Q" bottom: "x" top: "c" }')


def test_an_unknown_bottom_like_no_other_lists_a_few() -> None:
    chain = "".join(
        f'layer {{ name: "{i}" type: "ReLU" bottom: "{b}" top: "{i}" }}'
        for i, b in zip(range(100, 150), ["x", *range(100, 149)], strict=True)
    )
    with pytest.raises(ConfigError, match=r"; blobs so far: x, y, 100, .*, 137 and 12 more$"):
        net_of(INPUT + chain + 'layer { name: "c" type: "ReLU" bottom: "qqqq" top: "c" }')


def test_the_param_of_another_type_is_told() -> None:
    wrong = 'layer { name: "i" type: "InnerProduct" bottom: "x" top: "i" '
    wrong += "convolution_param { num_output: 3 } }"
    told = "num_output must be 1 or more; InnerProduct reads inner_product_param, not convolution_param"
    with pytest.raises(ConfigError, match=told):
        net_of(INPUT + wrong)


def test_layer_type_of_a_fork() -> None:
    with pytest.raises(
        ConfigError, match=r'layer "p".*layer type "UniqueLabel" is one of .*PSPNet'
    ):
        net_of(INPUT + 'layer { name: "p" type: "UniqueLabel" bottom: "x" top: "p" }')


def test_values_that_overflow_give_no_warning() -> None:
    net = net_of(INPUT + ip("a", "x", "a"))
    net.params[0].data[...] = 3e38
    net.blobs["x"].data[...] = 3e38
    net.forward()
    assert np.isinf(net.blobs["a"].data).all()


def test_errors_name_file_line_and_column(tmp_path: Path) -> None:
    text = INPUT + "\n\n  " + ip("a", "x", "a", "param {} param {} param {}").strip()
    path = tmp_path / "net.prototxt"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        net_of(text, path=str(path))
    assert str(caught.value).startswith(
        f'{path}:3:3: layer "a" (InnerProduct): Too many params specified'
    )


def test_wrong_number_of_bottoms() -> None:
    with pytest.raises(ConfigError, match=r"InnerProduct takes 1 bottom blob\(s\), not 2"):
        net_of(INPUT + 'layer { name: "a" type: "InnerProduct" bottom: "x" bottom: "y" top: "a" }')


def test_reshaping_an_input_reshapes_what_follows() -> None:
    net = net_of(INPUT + ip("a", "x", "a"))
    net.blobs["x"].reshape((7, 3))
    net.forward()
    assert net.blobs["a"].shape == (7, 5)
    net.blobs["x"].reshape((2, 3))
    net.reshape()
    assert net.blobs["a"].shape == (2, 5)


# backward flags


def test_frozen_layers_below_run_no_backward() -> None:
    frozen = "param { lr_mult: 0 } param { lr_mult: 0 }"
    net = net_of(INPUT + ip("a", "x", "a", frozen) + ip("b", "a", "b") + LOSS % "b")
    assert [node.need_backward for node in net.nodes] == [False, False, True, True]
    assert net.nodes[2].propagate_down == [False]
    assert net.nodes[3].propagate_down == [True, False]


def test_layers_without_a_loss_run_no_backward() -> None:
    net = net_of(INPUT + ip("a", "x", "a") + ip("b", "x", "b") + LOSS % "b")
    need = dict(zip(net.layer_names, [node.need_backward for node in net.nodes], strict=True))
    assert need["b"]
    assert not need["a"]


def test_force_backward_reaches_inputs_but_not_labels() -> None:
    net = net_of("force_backward: true " + INPUT + ip("a", "x", "a") + LOSS % "a")
    assert all(node.need_backward for node in net.nodes)
    assert net.nodes[1].propagate_down == [True]
    assert net.nodes[2].propagate_down == [True, False]


def test_propagate_down_false_cuts_the_gradient() -> None:
    net = net_of(
        INPUT + ip("a", "x", "a") + ip("b", "a", "b", "propagate_down: false") + LOSS % "b"
    )
    assert [node.need_backward for node in net.nodes] == [False, False, True, True]


def test_propagate_down_must_be_given_per_bottom() -> None:
    with pytest.raises(ConfigError, match=r"once per bottom: 2 for 1"):
        net_of(INPUT + ip("a", "x", "a", "propagate_down: false propagate_down: true"))


def test_need_backward_lines(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "caffepy"):
        net_of(TWO_LAYERS)
    lines = [m for m in caplog.messages if "backward computation" in m]
    assert lines == [
        "loss needs backward computation.",
        "ip2 needs backward computation.",
        "ip1 needs backward computation.",
        "in does not need backward computation.",
    ]
    assert "This network produces output loss" in caplog.messages
    assert "ip1 <- x" in caplog.messages
    assert "Top shape: 4 5 (20)" in caplog.messages
    assert "    with loss weight 1" in caplog.messages


# loss weights


def test_loss_is_the_weighted_sum() -> None:
    net = net_of(INPUT + ip("a", "x", "a", "loss_weight: 0.5"))
    feed(net)
    net.forward()
    assert net.loss() == pytest.approx(0.5 * net.blobs["a"].data.sum(), rel=1e-5)


def test_loss_weight_must_be_given_per_top() -> None:
    with pytest.raises(ConfigError, match=r"once per top: 2 for 1"):
        net_of(INPUT + ip("a", "x", "a", "loss_weight: 1 loss_weight: 1"))


def test_loss_top_may_be_left_out() -> None:
    net = net_of(
        INPUT
        + ip("a", "x", "a")
        + 'layer { name: "l" type: "SoftmaxWithLoss" bottom: "a" bottom: "y" }'
    )
    assert net.outputs == []
    feed(net)
    net.forward()
    assert net.loss() > 0


# shared parameters

SHARE = 'param { name: "w" %s } param { name: "b" }'


def test_shared_parameters() -> None:
    net = net_of(INPUT + ip("a", "x", "a", SHARE % "") + ip("b", "x", "b", SHARE % "") + LOSS % "b")
    assert len(net.params) == 4
    assert len(net.learnable_params) == 2
    net.layers[2].blobs[0].data[0, 0] = 7
    assert net.layers[3].blobs[0].data[0, 0] == 7
    net.layers[2].blobs[0].diff[0, 0] = 3
    assert net.layers[3].blobs[0].diff[0, 0] == 3
    assert [param.name for node in net.nodes for param in node.params] == ["w", "b", "w", "b"]


def test_the_sharer_may_set_the_multiplier() -> None:
    net = net_of(
        INPUT + ip("a", "x", "a", SHARE % "") + ip("b", "x", "b", SHARE % "lr_mult: 3") + LOSS % "b"
    )
    assert [param.spec.lr_mult for param in net.learnable] == [3, 1]


def test_multipliers_that_differ() -> None:
    with pytest.raises(ConfigError, match=r"Shared param 'w' has mismatched lr_mult"):
        net_of(
            INPUT
            + ip("a", "x", "a", SHARE % "lr_mult: 2")
            + ip("b", "x", "b", SHARE % "lr_mult: 3")
        )


def test_shapes_that_differ() -> None:
    wide = INPUT + ip("a", "x", "a", SHARE % "") + ip("b", "a", "b", SHARE % "")
    with pytest.raises(
        ConfigError,
        match=r"Cannot share param 'w' owned by layer 'a' with layer 'b'; shape mismatch.*5 3 "
        r"\(15\)",
    ):
        net_of(wide)


def test_permissive_sharing_wants_equal_counts() -> None:
    text = """
    layer { name: "in" type: "Input" top: "x" top: "z" input_param { shape { dim: 4 dim: 6 } shape { dim: 4 dim: 3 } } }
    layer { name: "a" type: "InnerProduct" bottom: "x" top: "a" param { name: "w" }
            inner_product_param { num_output: 2 } }
    layer { name: "b" type: "InnerProduct" bottom: "z" top: "b" param { name: "w" share_mode: PERMISSIVE }
            inner_product_param { num_output: %d } }
    """
    net = net_of(text % 4)
    assert net.layers[1].blobs[0].data.base is net.layers[2].blobs[0].data.base
    with pytest.raises(ConfigError, match=r"count mismatch"):
        net_of(text % 5)


# worker nets

DUMMY = """
layer { name: "d" type: "DummyData" top: "x"
        dummy_data_param { shape { dim: 2 dim: 3 } data_filler { type: "gaussian" } } }
"""


def test_a_shared_layer_is_set_up_once() -> None:
    text = DUMMY.replace("gaussian", "constant").replace('"constant"', '"constant" value: 3')
    root = net_of(text)
    root.blobs["x"].data[0, 0] = 7  # constant data is made once, so a user's own stays
    worker = Net(definition(text), root_net=root)
    assert worker.blobs["x"].data[0, 0] == 7
    assert worker.blobs["x"].data[1, 1] == 3
    assert root.blobs["x"].data[0, 0] == 7


def test_a_worker_takes_shared_layers_from_the_root(caplog: pytest.LogCaptureFixture) -> None:
    text = DUMMY + ip("a", "x", "a")
    root = net_of(text)
    with caplog.at_level(logging.INFO, "caffepy"):
        worker = Net(definition(text), device=Device(seed=2), root_net=root)
    assert worker.layers[0] is root.layers[0]
    assert worker.layers[1] is not root.layers[1]
    assert worker.blobs["x"] is not root.blobs["x"]
    assert worker.blobs["x"].shape == (2, 3)
    place = caplog.messages.index("Sharing layer d from root net")
    created = "Created top blob 0 (shape: 2 3 (6)) for shared layer d"
    assert caplog.messages[place + 1] == created
    root.forward()
    before = root.blobs["x"].data.copy()
    worker.forward()
    assert (root.blobs["x"].data == before).all()
    assert (worker.blobs["x"].data != before).any()


def test_layers_of_one_name_are_told_apart_by_their_places() -> None:
    text = (
        DUMMY
        + DUMMY.replace('"x"', '"y"')
        + ip("d", "x", "a")
        + 'layer { name: "s" type: "Silence" bottom: "y" }'
    )
    root = net_of(text)
    worker = Net(definition(text), root_net=root)
    assert [a is b for a, b in zip(worker.layers, root.layers, strict=True)] == [
        True,
        True,
        False,
        False,
    ]


# debug_info, callbacks, state


def test_debug_info_lines(caplog: pytest.LogCaptureFixture) -> None:
    net = net_of("debug_info: true " + TWO_LAYERS)
    feed(net)
    with caplog.at_level(logging.INFO, "caffepy"):
        net.forward()
        net.backward()
    mean = float(np.abs(net.blobs["ip1"].data).mean())
    assert f"    [Forward] Layer ip1, top blob ip1 data: {mean:.6g}" in caplog.messages
    assert any(
        m.startswith("    [Forward] Layer ip1, param blob 1 data: ") for m in caplog.messages
    )
    assert any(
        m.startswith("    [Backward] Layer ip2, bottom blob ip1 diff: ") for m in caplog.messages
    )
    assert any(
        m.startswith("    [Backward] Layer ip1, param blob 0 diff: ") for m in caplog.messages
    )
    assert caplog.messages[-1].startswith("    [Backward] All net params (data, diff): L1 norm = (")


def test_debug_info_of_infinite_norms(caplog: pytest.LogCaptureFixture) -> None:
    net = net_of("debug_info: true " + TWO_LAYERS)
    feed(net)
    net.forward()
    net.learnable_params[0].host_data[...] = 1e30
    with caplog.at_level(logging.INFO, "caffepy"), np.errstate(all="raise"):
        net.backward()
    assert "L2 norm = (inf, " in caplog.messages[-1]


def test_callbacks_run_for_every_layer() -> None:
    net = net_of(TWO_LAYERS)
    feed(net)
    seen: list[tuple[str, int]] = []
    for name in ("before_forward", "after_forward", "before_backward", "after_backward"):
        getattr(net, name).append(lambda i, name=name: seen.append((name, i)))
    net.forward()
    net.backward()
    assert seen[:2] == [("before_forward", 0), ("after_forward", 0)]
    assert [i for name, i in seen if name == "after_backward"] == [3, 2, 1, 0]


def test_weights_in_the_definition_replace_the_filler() -> None:
    text = INPUT + ip(
        "a", "x", "a", "blobs { shape { dim: 5 dim: 3 } %s } blobs { shape { dim: 5 } %s }"
    )
    net = net_of(text % ("data: 2 " * 15, "data: 1 " * 5))
    assert (net.params[0].data == 2).all()
    assert (net.params[1].data == 1).all()


def test_force_backward_does_not_reach_a_selector() -> None:
    text = 'force_backward: true layer { name: "in" type: "Input" top: "x" top: "s" '
    text += "input_param { shape { dim: 4 dim: 3 } shape { dim: 4 } } } "
    net = net_of(text + 'layer { name: "f" type: "Filter" bottom: "x" bottom: "s" top: "t" }')
    assert net.nodes[1].propagate_down == [True, False]
    net.forward()
    net.backward()
