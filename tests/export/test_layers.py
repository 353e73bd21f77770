"""Every type of layer: what onnxruntime computes with it is what caffepy does, in float32."""

import numpy as np
import pytest

from caffepy.core.errors import ConfigError
from caffepy.export import write
from caffepy.export.trace import EVALUATORS
from caffepy.layer import registry
from caffepy.layer.base import LossLayer
from tests.layer.cases import CASES, IMAGE
from tests.net.nets import net_of

from .models import answers, compare, inputs, model_of, onnx, written

OTHERWISE = {
    "BboxAccuracy": "judges what was found",
    "BinaryConvolution": "rounds its weights when it runs",
    "BinaryInnerProduct": "rounds its weights when it runs",
    "BoxAnnotatorOHEM": "chooses boxes to learn from",
    "BoxGroupOutput": "gives as many boxes as its data say",
    "BoxOutput": "gives as many boxes as its data say",
    "DecodeBBox": "is for a net whose proposals have no operator",
    "DetectNetTransformation": "makes what a net learns of images and boxes",
    "DetectionAccuracy": "judges what was found",
    "DetectionEvaluate": "judges what was found",
    "DetectionGroupAccuracy": "judges what was found",
    "EvalDetection": "judges what was found",
    "FrcnnOutput": "gives as many boxes as its data say",
    "HardMining": "chooses boxes to learn from",
    "DetectionOutput": "has a test of its own, for its boxes",
    "CTCGreedyDecoder": "gives as many labels as its data say",
    "CompactBilinear": "has no operator",
    "Correlation": "has no operator",
    "Correlation1D": "has no operator",
    "DenseBlock": "is a block of layers that have operators: write these",
    "DeformableConvolution": "has no operator with its borders",
    "DenseCRF": "has no operator",
    "Downsample": "has no operator that skips NaNs",
    "ImResize": "has no operator with its borders",
    "InnerDistance": "makes what NormFace learns by",
    "LabelSpecificAdd": "adds a margin at the labels, for training",
    "LabelsequenceAccuracy": "judges what was found",
    "Quant": "has no operator",
    "LargeMarginInnerProduct": "adds a margin at the labels, for training",
    "Nms": "has no operator",
    "FlowWarp": "has no operator with its borders",
    "Filter": "gives as many items as its data say",
    "AngularMargin": "adds a margin at the labels, for training",
    "Local": "has no operator",
    "GuidedDropout": "chooses channels by what another bottom holds, to learn from several domains",
    "ModulatedDeformableConvolution": "has an operator from opset 19 on",
    "PointwiseSpatialAttention": "has no operator",
    "Lstm": "has a test of its own, for its bottoms",
    "MultiStageMeanfield": "has no operator",
    "MarginInnerProduct": "adds a margin at the labels, for training",
    "PSROIAlign": "has no operator",
    "PSROIPooling": "has no operator",
    "ProposalTarget": "chooses boxes to learn from",
    "FrcnnProposal": "gives as many boxes as its data say",
    "Proposal": "gives as many boxes as its data say",
    "Python": "has no operators",
    "ROIAlign": "has a test of its own, for its boxes",
    "Resample": "has no operator with its weights at borders",
    "ROIPooling": "has a test of its own, for its boxes",
    "ROIWarping": "has no operator",
    "ScaleRoute": "gives as many boxes as its data say",
    "SegmentationEvaluate": "judges what was found",
    "SpatialTransformer": "has a test of its own, for its places",
    "YoloDetectionOutput": "gives as many boxes as its data say",
    "Yolov3DetectionOutput": "gives as many boxes as its data say",
}
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


def test_roi_pooling() -> None:
    text = (
        inputs((2, 3, 8, 9), (4, 5))
        + 'layer { name: "it" type: "ROIPooling" bottom: "x0" bottom: "x1" top: "y" '
        + "roi_pooling_param { pooled_h: 2 pooled_w: 3 spatial_scale: 0.5 } }"
    )
    rois = [[0, 2, 3, 12.4, 13], [1, 0, 0, 17, 15], [1, 5, 5, 5, 5], [0, -6, -6, 4, 30]]
    compare(written(text), {"x1": np.array(rois, np.float32)})
    with pytest.raises(ConfigError, match="pad_ratio"):
        written(text.replace("pooled_h", "pad_ratio: 0.5 pooled_h"))


@pytest.mark.parametrize("dynamic", [False, True])
def test_upsampling_to_places(dynamic: bool) -> None:
    model = written(
        inputs((2, 3, 6, 4))
        + 'layer { name: "p" type: "Pooling" bottom: "x0" top: "x" top: "places" '
        + "pooling_param { kernel_size: 2 stride: 2 } }"
        + 'layer { name: "it" type: "Upsample" bottom: "x" bottom: "places" top: "y" }',
        dynamic=dynamic,
    )
    compare(model)


@pytest.mark.parametrize("opset", [16, 20])
@pytest.mark.parametrize(
    ("given", "numbers"), [("output_H: 4 output_W: 7", 6), ("theta_1_2: 0.2 theta_2_3: 0.3", 4)]
)
def test_spatial_transformer(given: str, numbers: int, opset: int) -> None:
    text = (
        inputs((2, 3, 6, 5), (2, numbers))
        + 'layer { name: "it" type: "SpatialTransformer" bottom: "x0" bottom: "x1" top: "y" '
        + f"st_param {{ {given} }} }}"
    )
    compare(written(text, opset=opset))
    compare(written(text, opset=opset, dynamic=True))
    with pytest.raises(ConfigError, match="needs opset 16"):
        written(text, opset=13)


LSTMS = {
    "(T, N, ...)": ([(4, 2, 3, 2)], ""),
    "with indicators": ([(4, 2, 3), (4, 2)], ""),
    "of two axes": ([(6, 4)], ""),
    "of a batch": ([(6, 4, 1, 1), (3, 2)], "batch_size: 2"),
}


@pytest.mark.parametrize("case", LSTMS)
def test_lstm_of_ctpn(case: str) -> None:
    shapes, settings = LSTMS[case]
    bottoms = " ".join(f'bottom: "x{i}"' for i in range(len(shapes)))
    text = (
        inputs(*shapes)
        + f'layer {{ name: "it" type: "Lstm" {bottoms} top: "y" lstm_param {{ num_output: 5 '
        + f"{settings} }} }}"
    )
    given = {}
    if len(shapes) > 1:
        cont = np.ones(shapes[1], np.float32)
        cont[0], cont[2, 1] = 0, 0
        given["x1"] = cont
    compare(written(text), given)


def detector(settings: str, images: int = 1, classes: int = 4) -> str:
    """Six priors of a map and what is predicted of them."""
    return (
        inputs((images, 3 * 4 * 4), (images, 3 * 4 * classes), (1, 6, 3, 4), (1, 3, 48, 64))
        + 'layer { name: "p" type: "PriorBox" bottom: "x2" bottom: "x3" top: "p" '
        + "prior_box_param { min_size: 12 variance: 0.1 variance: 0.1 variance: 0.2 "
        + 'variance: 0.2 } } layer { name: "it" type: "DetectionOutput" bottom: "x0" bottom: "x1" '
        + f'bottom: "p" top: "y" detection_output_param {{ num_classes: {classes} {settings} }} }}'
    )


DETECTORS = {
    "SSD": "nms_param { nms_threshold: 0.3 top_k: 8 } keep_top_k: 9 confidence_threshold: 0.1 "
    "code_type: CENTER_SIZE",
    "all": "nms_param { nms_threshold: 0.5 }",
    "corners": "code_type: CORNER keep_top_k: 5 variance_encoded_in_target: true "
    "background_label_id: 2",
    "sizes": "code_type: CORNER_SIZE keep_top_k: 50 nms_param { nms_threshold: 0.2 top_k: 3 }",
    "no background": "keep_top_k: 20 background_label_id: -1 confidence_threshold: 0.6",
    "nothing": "keep_top_k: 20 confidence_threshold: 2 code_type: CENTER_SIZE",
    "nothing of two": "confidence_threshold: 2 code_type: CENTER_SIZE",
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("case", DETECTORS)
def test_detections(case: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    images = 1 if "keep_top_k" in DETECTORS[case] else 2
    model = written(detector(DETECTORS[case], images))
    given = {
        "x0": rng.standard_normal((images, 48)).astype(np.float32),
        "x1": rng.uniform(0, 1, (images, 48)).astype(np.float32),
    }
    compare(model, given)
    (output,) = model.proto.graph.output
    assert output.type.tensor_type.shape.dim[2].dim_param == "y_found"
    if images > 1:
        again = written(detector(DETECTORS[case], images), dynamic=True)
        compare(again, given)


NO_DETECTIONS = {
    "share_location": "share_location: false",
    "eta must be 1": "nms_param { eta: 0.9 }",
    "keep_top_k is of one image, and the net has 2": "keep_top_k: 5",
}


@pytest.mark.parametrize("message", NO_DETECTIONS)
def test_detections_that_have_no_operators(message: str) -> None:
    text = detector(NO_DETECTIONS[message], images=2)
    with pytest.raises(ConfigError) as error:
        written(text.replace("48 }", "192 }", 1) if "share" in message else text)
    assert message in str(error.value)


@pytest.mark.parametrize("ratio", [-1, 2])
def test_roi_align(ratio: int) -> None:
    text = (
        inputs((2, 3, 8, 9), (4, 5))
        + 'layer { name: "it" type: "ROIAlign" bottom: "x0" bottom: "x1" top: "y" roi_align_param '
        + f"{{ pooled_h: 2 pooled_w: 3 spatial_scale: 0.5 sampling_ratio: {ratio} }} }}"
    )
    rois = [[0, 2, 3, 12.4, 13], [1, 0, 0, 17, 15], [1, 5, 5, 5, 5], [0, -6, -6, 4, 30]]
    compare(written(text), {"x1": np.array(rois, np.float32)})
    with pytest.raises(ConfigError, match="roi_end_mode"):
        written(text.replace("pooled_h", "roi_end_mode: 1 pooled_h"))
    of_corners = text.replace("roi_align", "roi_pooling").split("sampling_ratio")[0] + "} }"
    with pytest.raises(ConfigError, match="corners of parts"):
        written(of_corners)


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
    ("ContinuationIndicator", 0),
    ("Parameter", 0),
    ("Scale", 3),
    ("Scale", 5),
}


@pytest.mark.parametrize(("type_", "k"), ALL)
def test_any_batch(type_: str, k: int) -> None:
    if (type_, k) in FIXED:
        with pytest.raises(
            ConfigError, match=r'layer "\w+" \(\w+\): a batch of 2?\d, not \d, does not work: '
        ):
            written(net_text(type_, k), dynamic=True)
        return
    model = written(net_text(type_, k), dynamic=True)
    write.Batch(model.net).resize(6)
    compare(model)


def test_every_type_is_written_or_has_a_reason() -> None:
    losses = {name for name in registry if issubclass(registry[name], LossLayer)}
    fed = {name for name in registry if registry[name].is_data or registry[name].is_input}
    lacking = set(registry) - set(CASES) - set(OTHERWISE) - losses - set(EVALUATORS) - fed
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
            (
                'layer { name: "it" type: "Pooling" bottom: "x0" top: "y" '
                "pooling_param { kernel_size: 1 stride: 4 } }"
            ),
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
