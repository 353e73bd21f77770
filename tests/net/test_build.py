import logging

import cv2
import numpy as np
import pytest

from caffepy.core.errors import ConfigError
from caffepy.net import Net, filter_state, insert_splits
from caffepy.proto.caffe_pb2 import TEST, TRAIN
from tests.net.nets import definition

RULES = {
    "no rule": ("", True),
    "empty include": ("include {}", True),
    "phase met": ("include { phase: TRAIN }", True),
    "phase not met": ("include { phase: TEST }", False),
    "one of two includes": ("include { phase: TEST } include { stage: 'a' }", True),
    "all parts of a rule": ("include { phase: TRAIN stage: 'missing' }", False),
    "min_level met": ("include { min_level: 2 }", True),
    "min_level not met": ("include { min_level: 3 }", False),
    "max_level not met": ("include { max_level: 1 }", False),
    "not_stage": ("include { not_stage: 'a' }", False),
    "every stage": ("include { stage: 'a' stage: 'b' }", True),
    "excluded": ("exclude { stage: 'b' }", False),
    "no exclude met": ("exclude { phase: TEST } exclude { min_level: 3 }", True),
}


@pytest.mark.parametrize(("rules", "kept"), RULES.values(), ids=RULES)
def test_filter(rules: str, kept: bool) -> None:
    param = definition(
        "state { phase: TRAIN level: 2 stage: 'a' stage: 'b' } layer { name: 'l' %s }" % rules
    )
    assert bool(filter_state(param).layer) is kept
    assert len(param.layer) == 1  # the definition itself stays


def test_filter_logs_the_part_that_failed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "caffepy"):
        filter_state(definition("layer { name: 'l' include { phase: TEST } }"))
    assert caplog.messages == [
        "The NetState phase (0) differed from the phase (1) specified by a rule in layer l"
    ]


def test_include_and_exclude() -> None:
    with pytest.raises(ConfigError, match=r'layer "l" .*not both'):
        filter_state(definition("layer { name: 'l' include {} exclude {} }"))


def split(text: str) -> list[tuple[str, list[str], list[str]]]:
    return [
        (layer.name, list(layer.bottom), list(layer.top))
        for layer in insert_splits(definition(text)).layer
    ]


def test_split_of_a_blob_with_two_readers() -> None:
    assert split(
        """layer { name: "in" top: "x" } layer { name: "a" bottom: "x" top: "a" }
        layer { name: "b" bottom: "x" top: "b" }"""
    ) == [
        ("in", [], ["x"]),
        ("x_in_0_split", ["x"], ["x_in_0_split_0", "x_in_0_split_1"]),
        ("a", ["x_in_0_split_0"], ["a"]),
        ("b", ["x_in_0_split_1"], ["b"]),
    ]


def test_split_after_an_in_place_layer_is_named_after_it() -> None:
    names = split(
        """layer { name: "conv1" top: "conv1" } layer { name: "relu1" bottom: "conv1" top: "conv1" }
        layer { name: "a" bottom: "conv1" top: "a" } layer { name: "b" bottom: "conv1" top: "b" }"""
    )
    assert names[1][1:] == (["conv1"], ["conv1"])
    assert names[2][0] == "conv1_relu1_0_split"


def test_one_layer_reading_a_blob_twice() -> None:
    names = split(
        'layer { name: "in" top: "x" } layer { name: "s" bottom: "x" bottom: "x" top: "s" }'
    )
    assert names[2] == ("s", ["x_in_0_split_0", "x_in_0_split_1"], ["s"])


def test_explicit_loss_weight_takes_the_first_split_top() -> None:
    param = insert_splits(
        definition(
            'layer { name: "l" top: "l" loss_weight: 2 } layer { name: "r" bottom: "l" top: "r" }'
        )
    )
    producer, split_layer, reader = param.layer
    assert list(producer.loss_weight) == []
    assert list(split_layer.loss_weight) == [2, 0]
    assert list(reader.bottom) == ["l_l_0_split_1"]


def test_one_reader_gets_no_split() -> None:
    text = 'layer { name: "in" top: "x" } layer { name: "a" bottom: "x" top: "a" }'
    assert len(split(text)) == 2


def test_unknown_bottom() -> None:
    with pytest.raises(
        ConfigError,
        match=r"Unknown bottom blob 'dta' \(layer 'a', bottom index 0\), did you mean \"data\"",
    ):
        split('layer { name: "in" top: "data" } layer { name: "a" bottom: "dta" top: "a" }')


def test_a_layer_cannot_read_what_a_later_one_writes() -> None:
    with pytest.raises(ConfigError, match=r"Unknown bottom blob 'b'"):
        split('layer { name: "a" bottom: "b" top: "a" } layer { name: "b" top: "b" }')


def test_bottom_of_a_layer_that_the_state_leaves_out() -> None:
    whole = definition(
        'layer { name: "d" top: "x" include { stage: "s" } } layer { name: "a" bottom: "x" '
        'top: "a" }'
    )
    with pytest.raises(
        ConfigError, match=r'Unknown bottom blob \'x\'.*layer "d" makes it, but .*stage'
    ):
        insert_splits(filter_state(whole), whole=whole)


SSD = """
layer { name: "in" type: "Input" top: "image" top: "map"
  input_param { shape { dim: [1, 3, 64, 64] } shape { dim: [1, 4, 2, 2] } } }
layer { name: "loc" type: "Convolution" bottom: "map" top: "loc"
  convolution_param { num_output: %d kernel_size: 1 } }
layer { name: "perm" type: "Permute" bottom: "loc" top: "perm" permute_param { order: [0, 2, 3, 1] } }
layer { name: "flat" type: "Flatten" bottom: "perm" top: "flat" }
layer { name: "locs" type: "Concat" bottom: "flat" top: "locs" concat_param { axis: 1 } }
layer { name: "conf" type: "Convolution" bottom: "map" top: "conf"
  convolution_param { num_output: %d kernel_size: 1 } }
layer { name: "confs" type: "Flatten" bottom: "conf" top: "confs" }
layer { name: "priors" type: "PriorBox" bottom: "map" bottom: "image" top: "priors"
  prior_box_param { %s } }
layer { name: "found" type: "DetectionOutput" bottom: "locs" bottom: "confs" bottom: "priors"
  top: "found" detection_output_param { num_classes: 2 nms_param { top_k: 10 } keep_top_k: 5 } }
"""
FACES = "min_size: 32 min_size: 64 min_size: 128"


@pytest.mark.parametrize(
    ("settings", "boxes", "told"),
    [
        (FACES, 3, ""),
        (FACES, 21, "faceboxes"),
        ("min_size: 30 aspect_ratio: 2 flip: false", 2, ""),
        ("min_size: 30 aspect_ratio: 2 flip: false", 4, "denser_prior_boxes"),
        ("min_size: 128", 1, ""),
    ],
)
def test_priors_are_those_of_which_the_net_predicts_locations(settings, boxes, told):
    net = Net(definition(SSD % (4 * boxes, 2 * boxes, settings)))
    (layer,) = (layer for layer in net.param.layer if layer.type == "PriorBox")
    fields = {field.name for field, _ in layer.prior_box_param.ListFields()}
    assert fields & {"faceboxes", "denser_prior_boxes"} == ({told} if told else set())
    assert net.blobs["priors"].shape == (1, 2, 2 * 2 * boxes * 4)


def test_whose_priors_are_taken_for_is_a_warning_once(caplog):
    net = definition(SSD % (16, 8, "min_size: 30 max_size: 40"))
    for _ in range(2):  # the train net and the test net
        Net(net, path="whose.prototxt")
    (record,) = (r for r in caplog.records if r.levelname == "WARNING")
    told = record.getMessage()
    assert told.startswith('whose.prototxt: layer "priors" (PriorBox): states 2 boxes')
    for word in ("locations of 4", "TextBoxes", "denser_prior_boxes: true", "aspect_ratio"):
        assert word in told


EVALUATED = """
layer { name: "true" type: "Input" top: "true" input_param { shape { dim: [1, 1, 3, 8] } } }
layer { name: "judge" type: "DetectionEvaluate" bottom: "found" bottom: "true" top: "judged"
  detection_evaluate_param { %s } }
"""


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ("num_classes: 2 background_label_id: 0", None),
        ("num_classes: 21 background_label_id: 0", "num_classes: 2"),
        ("num_classes: 2 background_label_id: 1", "background_label_id: 0"),
    ],
)
def test_other_classes_than_are_found_are_a_warning(settings, told, caplog):
    text = SSD % (8, 4, "min_size: 30 max_size: 40") + EVALUATED % settings
    for _ in range(2):
        Net(definition(text), path=f"{told}.prototxt")
    messages = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(messages) == (told is not None)
    for message in messages:
        assert 'layer "judge" (DetectionEvaluate)' in message
        assert message.endswith(f"write {told}")


HED = """
layer { name: "in" type: "%s" top: "image" top: "edges" %s }
layer { name: "score" type: "Convolution" bottom: "image" top: "score"
  convolution_param { num_output: 1 kernel_size: 1 } }
layer { name: "fine" type: "%s" bottom: "score" bottom: "edges" top: "fine" }
layer { name: "fused" type: "%s" bottom: "score" bottom: "edges" top: "fused" }
"""
FILES = 'image_data_param { source: "pairs.txt" batch_size: 1 }'
SHAPES = "input_param { shape { dim: [1, 3, 4, 4] } shape { dim: [1, 1, 4, 4] } }"
PLAIN, BALANCED = "SigmoidCrossEntropyLoss", "SigmoidCrossEntropyBalanceLoss"


@pytest.mark.parametrize(
    ("kind", "settings", "loss", "count"),
    [
        ("ImageLabelmapData", FILES, PLAIN, 1),
        ("ImageLabelmapData", FILES, BALANCED, 0),
        ("Input", SHAPES, PLAIN, 0),
    ],
)
def test_the_loss_of_hed_is_a_warning_once(kind, settings, loss, count, tmp_path, caplog):
    for name in ("image", "edges"):
        cv2.imwrite(f"{tmp_path}/{name}.png", np.zeros((4, 4, 3), np.uint8))
    (tmp_path / "pairs.txt").write_text("image.png edges.png")
    for _ in range(2):  # the train net and the test net
        Net(definition(HED % (kind, settings, loss, loss)), path=f"{tmp_path}/hed.prototxt")
    messages = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(messages) == count
    for message in messages:
        assert 'layer "fine" (SigmoidCrossEntropyLoss): computed as in BVLC Caffe' in message
        assert message.endswith(f"write {BALANCED} in all its losses")


def test_one_layer_without_its_aspect_ratio_is_not_taken_for_one_of_textboxes():
    other = """
layer { name: "loc2" type: "Convolution" bottom: "image" top: "loc2"
  convolution_param { num_output: 8 kernel_size: 1 } }
layer { name: "flat2" type: "Flatten" bottom: "loc2" top: "flat2" }
layer { name: "priors2" type: "PriorBox" bottom: "image" bottom: "image" top: "priors2"
  prior_box_param { min_size: 30 max_size: 40 } }
layer { name: "locs" type: "Concat" bottom: "flat" bottom: "flat2" top: "locs"
"""
    text = (SSD % (16, 8, "min_size: 30 max_size: 40")).replace(
        'layer { name: "locs" type: "Concat" bottom: "flat" top: "locs"', other.strip()
    )
    with pytest.raises(ConfigError, match="a PriorBox lacks an aspect_ratio, min_size or max_"):
        Net(definition(text))


def test_other_numbers_of_boxes_are_told_to_the_user():
    with pytest.raises(
        ConfigError, match="FaceBoxes, which makes more priors: then write faceboxes"
    ):
        Net(definition(SSD % (20, 10, FACES)))


PYTHON = """
layer { name: "in" type: "Input" top: "x" top: "t"
  input_param { shape { dim: [2, 3, 2, 2] } shape { dim: [2, 3, 2, 2] } } }
layer { name: "it" type: "Python" bottom: "x" %s top: "y"
  python_param { module: "%s" layer: "%s" param_str: "%s" } }
"""


def test_python_layers_of_known_modules_become_layers_of_ours():
    modules = ("spatial_dropout", "SpatialDropoutLayer")
    for phase, type_ in (("TRAIN", "SpatialDropout"), ("TEST", "Power")):
        settings = f"{{\\'phase\\': \\'{phase}\\', \\'p\\': \\'0.2\\'}}"
        param = definition(PYTHON % ("", *modules, settings))
        param.state.phase = TEST if phase == "TEST" else TRAIN
        net = Net(param)
        assert net.layers[1].type == type_
        net.blobs["x"].data[...] = 1
        net.forward()
        y = net.blobs["y"].data.reshape(6, 4)
        assert (y.max(axis=1) == y.min(axis=1)).all()
        np.testing.assert_allclose(y[y > 0], 1.25)
        assert phase == "TRAIN" or (y > 0).all()
    net = Net(definition(PYTHON % ('bottom: "t"', "pyloss", "EuclideanLossLayer", "")))
    assert net.layers[1].type == "EuclideanLoss"


def test_a_module_that_is_there_is_taken(tmp_path):
    code = "import caffe\nclass EuclideanLossLayer(caffe.Layer):\n"
    code += "  def reshape(self, bottom, top): top[0].reshape(7)\n  def forward(self, *_): pass\n"
    (tmp_path / "pyloss.py").write_text(code)
    path = str(tmp_path / "net.prototxt")
    text = PYTHON % ('bottom: "t"', "pyloss", "EuclideanLossLayer", "")
    assert Net(definition(text), path=path).blobs["y"].shape == (7,)


@pytest.mark.parametrize("settings", ["", "'phase': 'TEST'", "'phase': 'TEST', 'p': '1'"])
def test_settings_of_dropped_planes(settings):
    with pytest.raises(ConfigError, match=r'layer "it" .*: param_str needs a .phase., TRAIN or'):
        Net(definition(PYTHON % ("", "spatial_dropout", "SpatialDropoutLayer", settings)))
