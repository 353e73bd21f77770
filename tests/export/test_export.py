"""A whole net in the export: names, outputs, what is left out, messages, files."""

import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import caffepy
from caffepy.commands import export
from caffepy.commands.export import export_onnx
from caffepy.core.errors import ConfigError, DataError, UsageError
from caffepy.device.blob import Array
from caffepy.net import Net
from caffepy.net.weights import save_binary
from caffepy.proto.caffe_pb2 import TEST
from caffepy.proto.text import read_net

from .models import Model, compare, inputs, onnx, written

pytestmark = pytest.mark.usefixtures("folder")

PRODUCT = (
    'layer { name: "%s" type: "InnerProduct" bottom: "%s" top: '
    '"%s" inner_product_param { num_output: 3 } %s }\n'
)
LABEL = (
    'layer { name: "in" type: "Input" top: "x0" top: "label" '
    "input_param { shape { dim: 4 dim: 5 } shape { dim: 4 } } }"
)


def tensors(model: Model) -> tuple[list[str], list[str]]:
    """Names of inputs and outputs."""
    graph = model.proto.graph
    return [x.name for x in graph.input], [x.name for x in graph.output]


def operators(model: Model) -> list[str]:
    return [node.op_type for node in model.proto.graph.node]


def save(text: str) -> tuple[str, str]:
    """Files of a net and of weights for it."""
    Path("net.prototxt").write_text(text)
    param = read_net("net.prototxt")
    param.state.phase = TEST
    net = Net(param)
    save_binary(net, "w.caffemodel")
    net.close()
    return "net.prototxt", "w.caffemodel"


def exported(text: str, **how: Any) -> export.Exported:
    net, weights = save(text)
    return export_onnx(net, [weights], "net.onnx", **how)


def test_the_last_value_of_a_blob_has_its_name() -> None:
    in_place = 'layer { name: "%s" type: "%s" bottom: "y" top: "y" }'
    model = written(
        inputs((4, 5))
        + PRODUCT % ("ip", "x0", "y", "")
        + in_place % ("relu", "ReLU")
        + in_place % ("drop", "Dropout")
        + in_place % ("tanh", "TanH")
        + in_place % ("drop2", "Dropout")
    )
    assert [list(node.output) for node in model.proto.graph.node] == [["y:ip"], ["y:relu"], ["y"]]
    assert [node.name for node in model.proto.graph.node] == ["ip", "relu", "tanh"]
    compare(model)


def test_the_last_operator_of_a_layer_has_its_name() -> None:
    model = written(inputs((4, 5, 2)) + PRODUCT % ("ip", "x0", "y", ""))
    assert [(node.op_type, node.name) for node in model.proto.graph.node] == [
        ("Flatten", "ip_1"),
        ("Gemm", "ip"),
    ]


def test_an_input_keeps_its_name() -> None:
    model = written(inputs((4, 5)) + 'layer { name: "r" type: "ReLU" bottom: "x0" top: "x0" }')
    assert tensors(model) == (["x0"], ["x0:r"])
    compare(model, {"x0": np.ones((4, 5), np.float32)})


def test_names_that_would_clash_differ() -> None:
    model = written(inputs((4, 5)) + PRODUCT % ("ip", "x0", "ip.0", ""))
    names = {t.name for t in model.proto.graph.initializer}
    assert names == {"ip.0_2", "ip.1"}
    compare(model)


def test_shared_parameters_are_stored_once() -> None:
    share = 'param { name: "w" } param { name: "b" }'
    model = written(
        inputs((4, 5), (4, 5))
        + PRODUCT % ("one", "x0", "a", share)
        + PRODUCT % ("two", "x1", "b", share)
    )
    assert {t.name for t in model.proto.graph.initializer} == {"one.0", "one.1"}
    compare(model)


def test_shared_parameters_of_several_shapes() -> None:
    scale = 'layer { name: "%s" type: "Scale" bottom: "%s" top: "%s" param { name: "s" } }'
    model = written(
        inputs((4, 5), (4, 5, 6)) + scale % ("one", "x0", "a") + scale % ("two", "x1", "b")
    )
    assert operators(model) == ["Mul", "Reshape", "Mul"]
    compare(model)


def test_what_is_read_twice_is_one_tensor() -> None:
    model = written(
        inputs((4, 5))
        + PRODUCT % ("ip", "x0", "y", "")
        + 'layer { name: "a" type: "TanH" bottom: "y" top: "a" }'
        + 'layer { name: "b" type: "AbsVal" bottom: "y" top: "b" }'
    )
    assert [list(node.input)[:1] for node in model.proto.graph.node] == [["x0"], ["y"], ["y"]]
    assert tensors(model) == (["x0"], ["a", "b"])


def test_losses_accuracy_and_labels_are_left_out() -> None:
    evaluation = """
        layer { name: "loss" type: "SoftmaxWithLoss" bottom: "y" bottom: "label" top: "loss" }
        layer { name: "acc" type: "Accuracy" bottom: "y" bottom: "label" top: "acc" }
        layer { name: "half" type: "Power" bottom: "loss" top: "half" power_param { scale: 0.5 } }
        layer { name: "quiet" type: "Silence" bottom: "half" }"""
    done = exported(LABEL + PRODUCT % ("ip", "x0", "y", "") + evaluation)
    assert (done.inputs, done.outputs) == ({"x0": [4, 5]}, {"y": [4, 3]})
    assert done.dropped == ["loss (SoftmaxWithLoss)", "acc (Accuracy)", "half (Power)"]
    assert done.unused == ["label"]
    assert (
        "left out, since they only evaluate: loss (SoftmaxWithLoss), acc (Accuracy)" in done.text()
    )


def test_probabilities_take_the_places_of_losses() -> None:
    soft = (
        'layer { name: "%s" type: "SoftmaxWithLoss" bottom: "%s" '
        'bottom: "label" top: "%s" loss_weight: 2 }'
    )
    one = LABEL + PRODUCT % ("ip", "x0", "y", "")
    assert exported(one + soft % ("l", "y", "l"), probabilities=True, check=True).outputs == {
        "prob": [4, 3]
    }
    both = one + soft % ("l", "y", "l") + PRODUCT % ("ip2", "y", "z", "") + soft % ("m", "z", "m")
    assert exported(both, probabilities=True, check=True).outputs == {
        "l_prob": [4, 3],
        "m_prob": [4, 3],
    }
    sigmoid = 'layer { name: "t" type: "Input" top: "t" input_param { shape { dim: 4 dim: 3 } } }'
    sigmoid += (
        'layer { name: "l" type: "SigmoidCrossEntropyLoss" bottom: "y" bottom: "t" top: "l" }'
    )
    done = exported(
        inputs((4, 5)) + PRODUCT % ("ip", "x0", "y", "") + sigmoid, probabilities=True, check=True
    )
    assert (done.outputs, "Sigmoid" in done.operators, done.unused) == (
        {"prob": [4, 3]},
        True,
        ["t"],
    )


def test_what_labels_go_through_is_left_out() -> None:
    done = exported(
        inputs((4, 5), (4, 2), (4, 3))
        + PRODUCT % ("ip", "x0", "y", "")
        + 'layer { name: "cut" type: "Slice" bottom: "x1" top: "a" top: "b" }'
        + 'layer { name: "l1" type: "SoftmaxWithLoss" bottom: "y" bottom: "a" top: "l1" }'
        + 'layer { name: "l2" type: "SoftmaxWithLoss" bottom: "y" bottom: "b" top: "l2" }'
        + 'layer { name: "target" type: "Power" bottom: "x2" top: "target" }'
        + 'layer { name: "l3" type: "EuclideanLoss" bottom: "target" bottom: "y" top: "l3" }'
    )
    assert (list(done.inputs), list(done.outputs), done.operators) == (["x0"], ["y"], {"Gemm": 1})


def test_a_blob_that_is_evaluated_on_the_way_to_an_output_is_none() -> None:
    done = exported(
        LABEL
        + PRODUCT % ("ip", "x0", "y", "")
        + 'layer { name: "prob" type: "Softmax" bottom: "y" top: "prob" }'
        + 'layer { name: "acc" type: "Accuracy" bottom: "prob" bottom: "label" top: "acc" }'
        + 'layer { name: "loss" type: "SoftmaxWithLoss" bottom: "y" bottom: "label" top: "loss" }'
    )
    assert list(done.outputs) == ["prob"]


LOSS_IN_PYTHON = """
import caffepy as caffe
class Loss(caffe.Layer):
    def setup(self, bottom, top): pass
    def reshape(self, bottom, top): top[0].reshape(1)
    def forward(self, bottom, top): top[0].data[0] = bottom[0].data.sum()
"""


def test_losses_in_python_evaluate_and_other_layers_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("loss_of_export.py").write_text(LOSS_IN_PYTHON)
    text = LABEL + PRODUCT % ("ip", "x0", "y", "")
    text += 'layer { name: "l" type: "Python" bottom: "y" bottom: "label" top: "l" %s '
    text += 'python_param { module: "loss_of_export" layer: "Loss" } }'
    done = exported(text % "loss_weight: 1")
    assert (list(done.outputs), done.dropped) == (["y"], ["l (Python)"])
    with pytest.raises(ConfigError, match=r'"l" \(Python\): what it computes is code in Python'):
        exported(text % "")


def test_both_sides_of_a_siamese_net_are_outputs() -> None:
    done = exported(
        inputs((4, 5), (4, 5), (4,))
        + PRODUCT % ("ip", "x0", "f", "")
        + PRODUCT % ("ip_p", "x1", "f_p", "")
        + (
            'layer { name: "l" type: "ContrastiveLoss" bottom: "f" '
            'bottom: "f_p" bottom: "x2" top: "l" }'
        )
    )
    assert (list(done.inputs), list(done.outputs)) == (["x0", "x1"], ["f", "f_p"])


def test_a_net_of_which_nothing_is_left() -> None:
    text = 'layer { name: "l" type: "EuclideanLoss" bottom: "x0" bottom: "x1" top: "l" }'
    with pytest.raises(ConfigError, match=r"^net.prototxt: nothing is left"):
        exported(inputs((4, 5), (4, 5)) + text)


def test_all_that_cannot_be_expressed_is_named_and_nothing_is_written() -> None:
    Path("net.onnx").write_text("before")
    text = inputs((4, 5), (4,)) + PRODUCT % ("ip", "x0", "y", "")
    text += 'layer { name: "f" type: "Filter" bottom: "y" bottom: "x1" top: "z" }\n'
    text += 'layer { name: "g" type: "Filter" bottom: "x0" bottom: "x1" top: "w" }\n'
    with pytest.raises(ConfigError) as failure:
        exported(text)
    reason = "how many items it passes on depends on their values"
    assert str(failure.value).splitlines() == [
        "what these layers do cannot be expressed in ONNX:",
        f'  net.prototxt:4:1: layer "f" (Filter): {reason}',
        f'  net.prototxt:5:1: layer "g" (Filter): {reason}',
    ]
    assert Path("net.onnx").read_text() == "before"
    assert len(list(Path().iterdir())) == 3


NOISE = (
    'layer { name: "d" type: "DummyData" top: "z" dummy_data_param { shape { dim: 4 dim: 5 } } }'
)


def test_a_layer_that_cannot_take_another_batch_is_named() -> None:
    text = inputs((4, 5)) + 'layer { name: "r" type: "Reshape" bottom: "x0" top: "y" '
    text += "reshape_param { shape { dim: 4 dim: 5 } } }"
    with pytest.raises(
        ConfigError,
        match=r'^net.prototxt:2:1: layer "r" \(Reshape\): a batch of 8, not 4, does not work',
    ):
        exported(text, batch="dynamic")


@pytest.mark.parametrize(
    "layer",
    [
        '"Slice" bottom: "x0" top: "a" top: "b" slice_param { axis: 0 slice_point: 1 }',
        '"Crop" bottom: "x0" bottom: "z" top: "y" crop_param { axis: 0 }',
        '"Crop" bottom: "big" bottom: "x0" top: "y" crop_param { axis: 0 }',
    ],
)
def test_layers_that_fix_the_batch_are_named(layer: str) -> None:
    big = NOISE.replace("z", "big").replace('"d"', '"e"').replace("dim: 4", "dim: 9")
    text = inputs((4, 5)) + NOISE + big + f'\nlayer {{ name: "it" type: {layer} }}'
    with pytest.raises(
        ConfigError, match=r'^these layers need a fixed batch size:\n  net.prototxt:3:1: layer "it"'
    ):
        exported(text, batch="dynamic")


def test_batch_sizes() -> None:
    text = inputs((4, 5), (4, 7), (1, 3)) + "".join(
        PRODUCT % (f"ip{i}", f"x{i}", f"y{i}", "") for i in range(3)
    )
    assert list(exported(text).inputs.values()) == [[4, 5], [4, 7], [1, 3]]
    assert list(exported(text, batch=9, check=True).inputs.values()) == [[9, 5], [9, 7], [1, 3]]
    done = exported(text, batch="dynamic", check=True)
    assert list(done.inputs.values()) == [["N", 5], ["N", 7], [1, 3]]
    assert "input x0: N x 5\n" in done.text()


def test_dummy_data() -> None:
    dummy = (
        'layer { name: "d" type: "DummyData" top: "d" '
        "dummy_data_param { shape { dim: 4 dim: 5 } %s } }"
    )
    add = 'layer { name: "sum" type: "Eltwise" bottom: "x0" bottom: "d" top: "y" }'
    constant = dummy % "data_filler { value: 2 }"
    assert list(exported(inputs((4, 5)) + constant + add, check=True).inputs) == ["x0"]
    random = dummy % 'data_filler { type: "gaussian" }'
    assert list(exported(inputs((4, 5)) + random + add, check=True).inputs) == ["x0", "d"]
    alone = constant + 'layer { name: "abs" type: "AbsVal" bottom: "d" top: "y" }'
    assert list(exported(alone, check=True).inputs) == ["d"]


DATA = (
    """layer { name: "data" type: "Data" top: "data" top: "label"
    data_param { source: "none" batch_size: 4 } %s }
"""
    + PRODUCT % ("ip", "data", "y", "")
)


def test_data_need_not_be_there() -> None:
    _, weights = save(
        inputs((4, 3, 6, 6)).replace("x0", "data") + PRODUCT % ("ip", "data", "y", "")
    )
    Path("net.prototxt").write_text(DATA % "transform_param { crop_size: 6 }")
    done = export_onnx("net.prototxt", [weights], "net.onnx")
    assert (done.inputs, done.unused) == ({"data": [4, 3, 6, 6]}, ["label"])
    Path("net.prototxt").write_text(DATA % "")
    with pytest.raises(DataError, match=r'^net.prototxt:1:1: layer "data" \(Data\): .*none'):
        export_onnx("net.prototxt", [weights], "other.onnx")
    assert not Path("other.onnx").exists()
    assert export_onnx("net.prototxt", [weights], "net.onnx", image=(3, 6, 6)).inputs == {
        "data": [4, 3, 6, 6]
    }


def test_an_input_without_a_shape() -> None:
    Path("net.prototxt").write_text(
        'layer { name: "in" type: "Input" top: "x" }'
        'layer { name: "r" type: "ReLU" bottom: "x" top: "y" }'
    )
    with pytest.raises(ConfigError, match=r'^net.prototxt: input "x" has no shape'):
        export_onnx("net.prototxt", [], "net.onnx")


def test_layers_without_weights_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    save(inputs((4, 5)) + PRODUCT % ("ip", "x0", "y", ""))
    Path("net.prototxt").write_text(
        inputs((4, 5)) + PRODUCT % ("ip", "x0", "y", "") + PRODUCT % ("new", "y", "z", "")
    )
    with caplog.at_level(logging.WARNING):
        export_onnx("net.prototxt", ["w.caffemodel"], "net.onnx")
    assert [r.message for r in caplog.records] == [
        'w.caffemodel: no weights for "new": the fillers set them'
    ]


def test_who_made_it() -> None:
    done = exported('name: "small"' + inputs((4, 5)) + PRODUCT % ("ip", "x0", "y", ""), opset=15)
    model = onnx.load("net.onnx")
    assert (model.producer_name, model.producer_version, model.ir_version) == (
        "caffepy",
        caffepy.__version__,
        8,
    )
    assert (model.graph.name, model.opset_import[0].version) == ("small", 15)
    assert (done.parameters, done.bytes) == (18, Path("net.onnx").stat().st_size)


def test_a_stateless_model_says_so() -> None:
    lstm = (
        'layer { name: "l" type: "LSTM" bottom: "x0" bottom: "x1" '
        'top: "y" recurrent_param { num_output: 2 } }'
    )
    done = exported(inputs((3, 2, 4), (3, 2)) + lstm)
    assert done.notes == [
        "l begins each run with a state of 0; with expose_hidden the state goes in and out"
    ]


def test_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    from caffepy.export import model

    monkeypatch.setattr(model, "LIMIT", 1 << 20)
    with pytest.raises(
        ConfigError, match=r"the parameters take 0.0 GB, and an ONNX file must stay below 2 GB"
    ):
        exported(inputs((4, 5)) + PRODUCT % ("ip", "x0", "y", ""))
    assert not Path("net.onnx").exists()


def test_an_opset_that_there_is_not() -> None:
    with pytest.raises(ConfigError, match="opsets 13 to 21 are written, not 12"):
        export_onnx("net.prototxt", [], "net.onnx", opset=12)


def test_without_onnx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "caffepy.export.model", raising=False)
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(UsageError, match=r"pip install 'caffepy\[onnx\]'"):
        exported(inputs((4, 5)) + PRODUCT % ("ip", "x0", "y", ""))


def test_a_model_that_computes_something_else_is_not_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("onnxruntime")
    from caffepy.export.model import Runtime

    right = Runtime.run

    def wrong(self: Runtime, *given: Any) -> list[Array]:
        return [answer + 1 for answer in right(self, *given)]

    monkeypatch.setattr(Runtime, "run", wrong)
    with pytest.raises(ConfigError, match="onnxruntime computes another y: it differs by"):
        exported(
            inputs((4, 5)) + 'layer { name: "r" type: "TanH" bottom: "x0" top: "y" }', check=True
        )
    assert not Path("net.onnx").exists()


def test_a_model_that_cannot_be_computed() -> None:
    pytest.importorskip("onnxruntime")
    from caffepy.export.model import Runtime

    exported(inputs((4, 5)) + 'layer { name: "r" type: "TanH" bottom: "x0" top: "y" }')
    with pytest.raises(ConfigError, match="onnxruntime cannot compute the model"):
        Runtime(Path("net.onnx").read_bytes()).run(["y"], {"x0": np.zeros((4, 6), np.float32)})


def test_without_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(UsageError, match="pip install onnxruntime"):
        exported(inputs((4, 5)) + PRODUCT % ("ip", "x0", "y", ""), check=True)
