"""Every type of layer: what onnxruntime computes with it is what caffepy does, in float32."""

import numpy as np
import pytest

from caffepy.core.errors import ConfigError
from caffepy.export import write
from caffepy.export.trace import JUDGES
from caffepy.layer import registry
from caffepy.layer.base import LossLayer
from tests.net.nets import net_of

from .models import answers, compare, inputs, model_of, onnx, written

IMAGE = (2, 6, 7, 5)
NEURONS = {
    "ReLU": ["", "relu_param { negative_slope: 0.1 }"],
    "PReLU": ["", "prelu_param { channel_shared: true }"],
    "ELU": ["elu_param { alpha: 0.7 }"],
    "Sigmoid": [""],
    "TanH": [""],
    "AbsVal": [""],
    "BNLL": [""],
    "Swish": ["", "swish_param { beta: 1.5 }"],
    "Clip": ["clip_param { min: -0.5 max: 0.25 }"],
    "Threshold": ["threshold_param { threshold: 0.3 }"],
    "Power": [
        "power_param { power: 2 scale: 0.5 shift: 3 }",
        "power_param { power: 3 shift: 1 }",
        "power_param { scale: 2 }",
        "power_param { shift: -1 }",
        "power_param { power: 0 }",
        "power_param { scale: 0 shift: 4 power: 0.5 }",
        "",
    ],
    "Exp": ["", "exp_param { base: 2 scale: 0.5 shift: 1 }"],
    "Log": ["log_param { base: 10 scale: 0.1 shift: 3 }", "log_param { scale: 0.1 shift: 5 }"],
    "Dropout": [""],
}
# type -> cases of (bottom shapes, number of tops, parameters)
CASES = {
    "Convolution": [
        ([IMAGE], 1, "convolution_param { num_output: 4 kernel_size: 3 pad: 1 stride: 2 }"),
        (
            [IMAGE],
            1,
            "convolution_param { num_output: 4 kernel_h: 3 kernel_w: 2 group: 2 bias_term: false }",
        ),
        ([IMAGE], 1, "convolution_param { num_output: 4 kernel_size: 2 dilation: 2 pad: 2 }"),
        ([(2, 3, 9)], 1, "convolution_param { num_output: 4 kernel_size: 3 }"),
        ([(2, 3, 4, 5, 6)], 1, "convolution_param { num_output: 2 kernel_size: 3 pad: 1 }"),
        ([(2, 3, 4, 5, 6)], 1, "convolution_param { num_output: 2 kernel_size: 3 axis: 2 }"),
        ([(4, 3)], 1, "convolution_param { num_output: 2 kernel_size: 1 }"),
        ([IMAGE, IMAGE], 2, "convolution_param { num_output: 4 kernel_size: 3 }"),
    ],
    "Deconvolution": [
        ([IMAGE], 1, "convolution_param { num_output: 4 kernel_size: 4 pad: 1 stride: 2 }"),
        (
            [IMAGE],
            1,
            "convolution_param { num_output: 6 kernel_size: 3 group: 6 stride: 3 bias_term: false }",
        ),
        ([IMAGE], 1, "convolution_param { num_output: 4 kernel_size: 2 dilation: 2 group: 2 }"),
        ([(2, 3, 4, 5, 6)], 1, "convolution_param { num_output: 2 kernel_size: 3 axis: 2 }"),
    ],
    "Im2col": [
        ([IMAGE], 1, "convolution_param { kernel_h: 3 kernel_w: 2 pad: 1 stride: 2 }"),
        ([(2, 3, 4, 5, 6)], 1, "convolution_param { kernel_size: 2 axis: 2 }"),
    ],
    "InnerProduct": [
        ([IMAGE], 1, "inner_product_param { num_output: 4 }"),
        ([(3, 5)], 1, "inner_product_param { num_output: 4 bias_term: false }"),
        ([IMAGE], 1, "inner_product_param { num_output: 4 axis: 2 transpose: true }"),
        ([IMAGE], 1, "inner_product_param { num_output: 4 axis: -1 }"),
        ([IMAGE], 1, "inner_product_param { num_output: 4 axis: 0 }"),
    ],
    "Embed": [
        ([(3, 2)], 1, "embed_param { num_output: 4 input_dim: 7 }"),
        ([(3,)], 1, "embed_param { num_output: 4 input_dim: 7 bias_term: false }"),
    ],
    "LRN": [
        ([IMAGE], 1, "lrn_param { local_size: 3 alpha: 0.5 beta: 0.6 k: 2 }"),
        ([IMAGE], 1, "lrn_param { local_size: 3 alpha: 0.5 norm_region: WITHIN_CHANNEL }"),
    ],
    "BatchNorm": [
        ([IMAGE], 1, ""),
        ([(4, 3)], 1, "batch_norm_param { eps: 0.1 }"),
        ([IMAGE], 1, "batch_norm_param { use_global_stats: false }"),
        ([IMAGE], 1, "batch_norm_param { scale_bias: true }"),
        ([IMAGE], 1, "batch_norm_param { scale_bias: true use_global_stats: false }"),
    ],
    "MVN": [
        ([IMAGE], 1, ""),
        ([IMAGE], 1, "mvn_param { across_channels: true eps: 0.1 }"),
        ([IMAGE], 1, "mvn_param { normalize_variance: false }"),
        ([(4, 3)], 1, ""),
        ([(4, 3, 5)], 1, "mvn_param { across_channels: true }"),
    ],
    "Scale": [
        ([IMAGE], 1, ""),
        ([IMAGE], 1, "scale_param { bias_term: true }"),
        ([IMAGE], 1, "scale_param { axis: -2 num_axes: 1 bias_term: true }"),
        ([IMAGE], 1, "scale_param { axis: 0 num_axes: -1 }"),
        ([IMAGE], 1, "scale_param { num_axes: 0 bias_term: true }"),
        ([IMAGE, (2, 6)], 1, "scale_param { axis: 0 bias_term: true }"),
        ([IMAGE, (7, 5)], 1, "scale_param { axis: 2 }"),
    ],
    "Bias": [
        ([IMAGE], 1, ""),
        ([IMAGE], 1, "bias_param { axis: 2 num_axes: 2 }"),
        ([IMAGE, (2,)], 1, "bias_param { axis: 0 }"),
    ],
    "Eltwise": [
        ([IMAGE] * 2, 1, ""),
        ([IMAGE] * 3, 1, "eltwise_param { coeff: 1 coeff: -2 coeff: 0.5 }"),
        ([IMAGE] * 3, 1, "eltwise_param { operation: PROD }"),
        ([IMAGE] * 3, 1, "eltwise_param { operation: MAX }"),
    ],
    "Concat": [
        ([IMAGE, (2, 3, 7, 5)], 1, ""),
        ([IMAGE] * 2, 1, "concat_param { axis: 0 }"),
        ([IMAGE], 1, ""),
    ],
    "Slice": [
        ([IMAGE], 3, ""),
        ([IMAGE], 2, "slice_param { axis: -1 slice_point: 1 }"),
        ([IMAGE], 1, ""),
    ],
    "Split": [([IMAGE], 2, "")],
    "Flatten": [([IMAGE], 1, ""), ([IMAGE], 1, "flatten_param { axis: 1 end_axis: 2 }")],
    "Reshape": [
        ([IMAGE], 1, "reshape_param { shape { dim: 0 dim: -1 } }"),
        ([IMAGE], 1, "reshape_param { shape { dim: 2 dim: 3 } axis: 1 num_axes: 1 }"),
        ([IMAGE], 1, "reshape_param { shape { dim: 1 } axis: -1 num_axes: 0 }"),
    ],
    "Softmax": [([IMAGE], 1, ""), ([IMAGE], 1, "softmax_param { axis: -1 }")],
    "Crop": [
        ([IMAGE, (2, 6, 4, 3)], 1, "crop_param { offset: 2 offset: 1 }"),
        ([IMAGE, (2, 2, 4, 5)], 1, "crop_param { axis: 1 offset: 0 }"),
        ([IMAGE, IMAGE], 1, ""),
    ],
    "Reduction": [
        ([IMAGE], 1, ""),
        ([IMAGE], 1, "reduction_param { operation: ASUM axis: 1 coeff: 0.5 }"),
        ([IMAGE], 1, "reduction_param { operation: SUMSQ axis: -2 }"),
        ([IMAGE], 1, "reduction_param { operation: MEAN axis: 2 coeff: 3 }"),
    ],
    "Tile": [
        ([IMAGE], 1, "tile_param { tiles: 3 }"),
        ([IMAGE], 1, "tile_param { axis: -1 tiles: 2 }"),
    ],
    "BatchReindex": [([IMAGE, (4,)], 1, "")],
    "Pooling": [  # further geometries: test_pooling.py
        ([IMAGE], 2, "pooling_param { kernel_size: 3 stride: 2 pad: 1 }"),
        ([IMAGE], 1, "pooling_param { global_pooling: true }"),
        ([IMAGE], 1, "pooling_param { pool: AVE global_pooling: true }"),
        ([IMAGE], 2, "pooling_param { global_pooling: true }"),
        ([IMAGE], 1, "pooling_param { pool: STOCHASTIC kernel_size: 3 stride: 2 }"),
    ],
    "SPP": [
        ([(2, 3, 9, 11)], 1, "spp_param { pyramid_height: 3 }"),
        ([(2, 3, 9, 11)], 1, "spp_param { pyramid_height: 2 pool: AVE }"),
        ([(2, 3, 9, 11)], 1, "spp_param { pyramid_height: 1 }"),
    ],
    "ArgMax": [
        ([IMAGE], 1, ""),
        ([IMAGE], 1, "argmax_param { top_k: 3 }"),
        ([IMAGE], 1, "argmax_param { top_k: 3 out_max_val: true }"),
        ([IMAGE], 1, "argmax_param { out_max_val: true }"),
        ([IMAGE], 1, "argmax_param { axis: 1 }"),
        ([IMAGE], 1, "argmax_param { axis: -1 top_k: 2 }"),
        ([IMAGE], 1, "argmax_param { axis: 1 top_k: 2 out_max_val: true }"),
        ([IMAGE], 1, "argmax_param { axis: 1 out_max_val: true }"),
        ([(3, 8)], 1, "argmax_param { top_k: 2 }"),
    ],
    "LSTM": [
        ([(4, 2, 3), (4, 2)], 1, "recurrent_param { num_output: 5 }"),
        ([(4, 2, 3, 2), (4, 2), (2, 3)], 1, "recurrent_param { num_output: 5 }"),
        (
            [(4, 2, 3), (4, 2), (1, 2, 5), (1, 2, 5)],
            3,
            "recurrent_param { num_output: 5 expose_hidden: true }",
        ),
    ],
    "RNN": [
        ([(4, 2, 3), (4, 2)], 1, "recurrent_param { num_output: 5 }"),
        (
            [(4, 2, 3), (4, 2), (2, 3), (1, 2, 5)],
            2,
            "recurrent_param { num_output: 5 expose_hidden: true }",
        ),
    ],
    "LSTMUnit": [([(1, 2, 3), (1, 2, 12), (1, 2)], 2, "")],
    "Parameter": [([], 1, "parameter_param { shape { dim: 2 dim: 3 } }")],
}
CASES |= {type_: [([IMAGE], 1, text) for text in texts] for type_, texts in NEURONS.items()}
OTHERWISE = {"Python": "has no operators", "Filter": "gives as many items as its data say"}
ALL = [
    (type_, k) for type_ in sorted(set(CASES) - set(OTHERWISE)) for k in range(len(CASES[type_]))
]


def net_text(type_: str, k: int) -> str:
    """Inputs, the layer, and for a layer without bottoms something to go with it."""
    shapes, tops, text = CASES[type_][k]
    shapes = shapes or [(2, 3)]
    bottoms = " ".join(f'bottom: "x{i}"' for i in range(len(CASES[type_][k][0])))
    names = " ".join(f'top: "y{i}"' for i in range(tops))
    layer = f'layer {{ name: "it" type: "{type_}" {bottoms} {names} {text} }}'
    if type_ == "Split":  # of what a layer gives: inputs are no outputs
        return (
            inputs(*shapes)
            + 'layer { name: "before" type: "AbsVal" bottom: "x0" top: "x" }'
            + layer.replace("x0", "x")
        )
    if not bottoms:
        layer += 'layer { name: "sum" type: "Eltwise" bottom: "x0" bottom: "y0" top: "z" }'
    return inputs(*shapes) + layer


@pytest.mark.parametrize(("type_", "k"), ALL)
def test_against_forward(type_: str, k: int) -> None:
    model = written(net_text(type_, k))
    given = {}
    if type_ in ("LSTM", "RNN"):
        given["x1"] = np.array([[0, 1], [1, 1], [1, 0], [1, 1]], np.float32)
    elif type_ == "ArgMax":
        given["x0"] = (
            np.random.default_rng(0).integers(0, 4, model.net.blobs["x0"].shape).astype(np.float32)
        )
    compare(model, given)


@pytest.mark.parametrize("opset", [13, 18, 21])
def test_other_opsets(opset: int) -> None:
    for type_, k in ALL:
        model = written(net_text(type_, k), opset=opset)
        assert model.proto.opset_import[0].version == opset
        if type_ in (
            "BatchNorm",
            "MVN",
            "Reduction",
            "Slice",
            "ArgMax",
            "LSTM",
            "Pooling",
            "Convolution",
        ):
            compare(model)


FIXED = {  # where a size that was given, or that parameters have, is the batch's
    *(("LSTM", k) for k in range(3)),
    *(("RNN", k) for k in range(2)),
    ("LSTMUnit", 0),
    ("InnerProduct", 4),
    ("Parameter", 0),
    ("Scale", 3),
    ("Scale", 5),
}


@pytest.mark.parametrize(("type_", "k"), ALL)
def test_any_batch(type_: str, k: int) -> None:
    if (type_, k) in FIXED:
        with pytest.raises(
            ConfigError, match=r'layer "\w+" \(\w+\): a batch of 2?\d, not \d, does not go: '
        ):
            written(net_text(type_, k), dynamic=True)
        return
    model = written(net_text(type_, k), dynamic=True)
    write.Batch(model.net).resize(6)
    compare(model)


def test_every_type_is_written_or_has_a_reason() -> None:
    losses = {name for name in registry if issubclass(registry[name], LossLayer)}
    fed = {name for name in registry if registry[name].is_data or registry[name].is_input}
    lacking = set(registry) - set(CASES) - set(OTHERWISE) - losses - set(JUDGES) - fed
    assert not lacking, "no cases in tests/layer/cases.py, and no reason in OTHERWISE"


@pytest.mark.parametrize("in_place", [False, True])
def test_batch_norm_takes_the_scale_that_follows_it_in_place(in_place: bool) -> None:
    normalized, scaled = ("x1", "x1") if in_place else ("normalized", "y")
    model = written(
        inputs(IMAGE)
        + 'layer { name: "c" type: "Convolution" bottom: "x0" top: "x1" '
        + "convolution_param { num_output: 4 kernel_size: 1 } }"
        + f'layer {{ name: "bn" type: "BatchNorm" bottom: "x1" top: "{normalized}" }}'
        + f'layer {{ name: "s" type: "Scale" bottom: "{normalized}" top: "{scaled}" '
        + "scale_param { bias_term: true } }"
    )
    operators = [node.op_type for node in model.proto.graph.node]
    assert operators == ["Conv", "BatchNormalization", *([] if in_place else ["Mul", "Add"])]
    compare(model)


def test_the_mean_and_variance_of_batch_norm_are_stored() -> None:
    model = written(inputs(IMAGE) + 'layer { name: "bn" type: "BatchNorm" bottom: "x0" top: "y" }')
    values = {t.name: onnx.numpy_helper.to_array(t) for t in model.proto.graph.initializer}
    mean, variance, weight = (blob.data for blob in model.net.layers[1].blobs)
    np.testing.assert_allclose(values["bn.0"], mean / weight)
    np.testing.assert_allclose(values["bn.1"], variance / weight)


def test_dropout_in_training_draws() -> None:
    model = model_of(
        net_of(inputs((4, 1000)) + 'layer { name: "d" type: "Dropout" bottom: "x0" top: "y" }')
    )
    y = answers(model, {"x0": np.ones((4, 1000), np.float32)})["y"]
    assert set(np.unique(y)) == {0, 2}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            'layer { name: "it" type: "Filter" bottom: "x0" bottom: "x1" top: "y" }',
            "how many items it passes on depends on their values",
        ),
        (
            'layer { name: "it" type: "Pooling" bottom: "x0" top: "y" pooling_param { kernel_size: 1 stride: 4 } }',
            "its last windows lie outside the image",
        ),
        (
            'layer { name: "it" type: "Pooling" phase: TRAIN bottom: "x0" top: "y" '
            "pooling_param { pool: STOCHASTIC kernel_size: 2 } }",
            "draws random numbers",
        ),
    ],
)
def test_what_cannot_be_expressed(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf'layer "it" \(\w+\): .*{reason}'):
        written(inputs((2, 3, 6, 6), (2,)) + text)
