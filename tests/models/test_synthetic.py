"""Data layers replaced by random images and labels."""

from pathlib import Path

import numpy as np
import pytest

from caffepy import models
from caffepy.core.errors import ConfigError
from caffepy.models import synthetic as synthetic_module
from caffepy.models.synthetic import Guess, image_shape, synthetic
from caffepy.net import Net
from caffepy.proto.caffe_pb2 import TEST, TRAIN, NetParameter
from caffepy.proto.text import parse, read_net
from tests.nets import library

NET = (
    library.layer(
        "Data",
        "d",
        "",
        'include { phase: TRAIN } transform_param { %s } data_param { source: "nowhere" batch_size: 4 }',
        top="x y",
    )
    + library.convolution("c", "x", 7, 1, filler="")
    + library.relu("r", "c")
    + library.pooling("p", "c", "pool: AVE global_pooling: true")
    + library.softmax_loss("p", "y")
)
SHAPES = {
    "alexnet": (3, 227, 227),
    "caffenet": (3, 227, 227),
    "cifar10_quick": (3, 32, 32),
    "densenet121": (3, 224, 224),
    "digits": (1, 8, 8),
    "digits_seg": (1, 64, 64),
    "digits_ssd": (1, 64, 64),
    "faster_rcnn_vgg16": (3, 600, 800),
    "googlenet": (3, 224, 224),
    "lenet": (1, 28, 28),
    "mobilenet_ssd": (3, 300, 300),
    "mobilenet_v2": (3, 224, 224),
    "resnet50": (3, 224, 224),
    "se_resnet50": (3, 224, 224),
    "segnet": (3, 360, 480),
    "shufflenet_v2": (3, 224, 224),
    "ssd300_vgg16": (3, 300, 300),
    "vgg16": (3, 224, 224),
}


def net(transform: str) -> NetParameter:
    return parse(NET % transform, NetParameter(), "net.prototxt")


def data_shapes(param: NetParameter) -> list[list[int]]:
    return [list(shape.dim) for shape in param.layer[0].dummy_data_param.shape]


def test_image_shapes() -> None:
    assert {name: image_shape(name) for name in models.names()} == SHAPES


def test_unknown_net_has_no_image_shape() -> None:
    with pytest.raises(ConfigError, match="no bundled net 'lent'"):
        image_shape("lent")


def test_shape_from_the_layer() -> None:
    assert data_shapes(synthetic(net("crop_size: 6"))) == [[4, 3, 6, 6], [4]]
    assert data_shapes(synthetic(net("crop_size: 6 force_gray: true"), batch=2)) == [
        [2, 1, 6, 6],
        [2],
    ]


def test_shape_as_given() -> None:
    assert data_shapes(synthetic(net("crop_size: 6"), 5, (2, 3, 4))) == [[5, 2, 3, 4], [5]]


def test_shape_of_resized_images() -> None:
    param = net("")
    layer = param.layer[0]
    layer.type = "ImageData"
    (
        layer.image_data_param.batch_size,
        layer.image_data_param.new_height,
        layer.image_data_param.new_width,
    ) = 3, 5, 6
    assert data_shapes(synthetic(param)) == [[3, 3, 5, 6], [3]]


GUESSED = {
    "images": ('type: "Data" top: "x" top: "y" data_param { batch_size: 4 }', [[4, 3, 9, 9], [4]]),
    "boxes": (
        'type: "AnnotatedData" top: "x" top: "y" data_param { batch_size: 4 } '
        "transform_param { resize_param { height: 5 width: 6 } }",
        [[4, 3, 5, 6], [1, 1, 8, 8]],
    ),
    "boxes and label images": (
        'type: "AnnotatedData" top: "x" top: "y" top: "z" data_param { batch_size: 4 } '
        "annotated_data_param { seg_scales: 3 }",
        [[4, 3, 9, 9], [1, 1, 8, 8], [4, 1, 3, 3]],
    ),
    "boxes of YOLO": (
        'type: "AnnotatedData" top: "x" top: "y" data_param { batch_size: 4 } '
        "annotated_data_param { yolo_data_type: 1 }",
        [[4, 3, 9, 9], [4, 1, 300, 5]],
    ),
    "crops with two sides": (
        'type: "Data" top: "x" top: "y" data_param { batch_size: 4 } '
        "transform_param { crop_height: 7 crop_width: 3 }",
        [[4, 3, 7, 3], [4]],
    ),
    "label images": (
        'type: "ImageSegData" top: "x" top: "y" top: "z" image_data_param { batch_size: 2 }',
        [[2, 3, 9, 9], [2, 1, 9, 9], [2, 1, 1, 2]],
    ),
    "clips": (
        'type: "VideoData" top: "x" top: "y" '
        "video_data_param { batch_size: 2 new_length: 16 crop_size: 7 }",
        [[2, 3, 16, 7, 7], [2]],
    ),
    "volumes of flows": (
        'type: "VideoWithVoxelTruthData" top: "x" top: "y" '
        "image_data_param { batch_size: 2 num_truth_channels: 2 }",
        [[2, 3, 16, 9, 9], [2, 2, 16, 9, 9]],
    ),
    "flows of segments": (
        'type: "VideoData" top: "x" top: "y" '
        "video_data_param { batch_size: 2 new_length: 5 num_segments: 3 modality: FLOW }",
        [[2, 30, 9, 9], [2]],
    ),
    "memory filled by CaffeOnSpark": (
        'type: "MemoryData" top: "x" top: "y" memory_data_param '
        '{ source: "file:/x" batch_size: 2 channels: 1 height: 4 width: 5 }',
        [[2, 1, 4, 5], [2]],
    ),
    "regions": (
        'type: "Python" top: "data" top: "im_info" top: "gt_boxes" top: "bbox_targets" '
        "python_param { param_str: \"'num_classes': 3\" }",
        [[1, 3, 9, 9], [1, 3], [8, 5], [128, 12]],
    ),
}


@pytest.mark.parametrize("case", GUESSED)
def test_shapes_that_no_net_states(case: str) -> None:
    text, shapes = GUESSED[case]
    param = parse(f'layer {{ name: "d" {text} }}', NetParameter(), "net.prototxt")
    assert data_shapes(synthetic(param, guess=Guess((3, 9, 9)))) == shapes


READERS = {"MultiBoxLoss": [1, 1, 8, 8], "RegionLoss": [4, 1, 300, 5], "SoftmaxWithLoss": [4]}


@pytest.mark.parametrize("reader", READERS)
def test_boxes_by_what_reads_them(reader: str) -> None:
    param = net("crop_size: 6")
    scores = ["z"] * (3 if reader == "MultiBoxLoss" else 1)
    param.layer.add(name="r", type=reader, bottom=[*scores, param.layer[0].top[1]], top=["loss"])
    assert data_shapes(synthetic(param)) == [[4, 3, 6, 6], READERS[reader]]


def test_no_file_that_names_images_of_the_data() -> None:
    param = net("crop_size: 6")
    found = param.layer.add(name="o", type="DetectionOutput")
    found.detection_output_param.save_output_param.name_size_file = "nowhere"
    param.layer.add(name="e", type="DetectionEvaluate")
    param.layer[-1].detection_evaluate_param.name_size_file = "nowhere"
    assert "nowhere" not in str(synthetic(param))


def test_a_guess_of_labels_that_are_images() -> None:
    assert data_shapes(synthetic(net(""), guess=Guess((3, 9, 9), other_labels=True))) == [
        [4, 3, 9, 9],
        [4, 1, 9, 9],
    ]
    param = parse('layer { name: "d" type: "Input" top: "x" }', NetParameter(), "net.prototxt")
    assert list(synthetic(param, guess=Guess((3, 9, 9))).layer[0].input_param.shape[0].dim) == [
        1,
        3,
        9,
        9,
    ]


def test_windows() -> None:
    param = net("crop_size: 6")
    layer = param.layer[0]
    layer.type = "WindowData"
    layer.window_data_param.batch_size = 3
    assert data_shapes(synthetic(param)) == [[3, 3, 6, 6], [3]]


def test_arrays_with_two_kinds_of_labels() -> None:
    param = net("")
    layer = param.layer[0]
    layer.type = "HDF5Data"
    layer.top.append("z")
    layer.hdf5_data_param.batch_size = 3
    assert data_shapes(synthetic(param, image=(4, 1, 1))) == [[3, 4, 1, 1], [3], [3]]
    with pytest.raises(
        ConfigError,
        match=r'layer "d" \(HDF5Data\): no crop_size: give the shape of the images, --image',
    ):
        synthetic(param)


@pytest.mark.parametrize(
    ("dims", "shape"),
    [
        ("dim: 0 dim: 0 dim: 77 dim: 1", [3, 3, 77, 1]),
        ("dim: 0 dim: -1 dim: 11 dim: 1", [3, 1, 11, 1]),
        ("dim: 0 dim: -1 dim: 9", [3, 3, 9, 9]),  # as it is
        ("dim: 0 dim: 0 dim: 0 dim: 0 dim: 0 dim: 7", [3, 3, 9, 9]),  # more axes than there are
    ],
)
def test_a_reshape_states_the_shape_of_data(dims: str, shape: list[int]) -> None:
    text = f"""
        layer {{ name: "d" type: "HDF5Data" top: "x" hdf5_data_param {{ batch_size: 3 }} }}
        layer {{ name: "r" type: "Reshape" bottom: "x" top: "y"
          reshape_param {{ shape {{ {dims} }} }} }}"""
    param = parse(text, NetParameter(), "net.prototxt")
    assert data_shapes(synthetic(param, guess=Guess((3, 9, 9)))) == [shape]


def test_losses_of_large_nets_are_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A label that is cut to 6,006 parts took over a minute."""
    calls = []
    search = synthetic_module._compared
    monkeypatch.setattr(
        synthetic_module, "_compared", lambda net: (calls.append(net), search(net))[1]
    )
    param = parse(
        'layer { name: "d" type: "HDF5Data" top: "x" top: "z" hdf5_data_param { batch_size: 3 } }',
        NetParameter(),
        "net.prototxt",
    )
    slice_ = param.layer.add(name="s", type="Slice", bottom=["z"])
    slice_.slice_param.axis = 1
    slice_.top.extend(f"z{k}" for k in range(50))
    assert data_shapes(synthetic(param, guess=Guess((3, 9, 9)))) == [[3, 3, 9, 9], [3, 50]]
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("force", "count", "each"),
    [("", 2, "3 channels; give 1 or 3"), ("force_gray: true", 3, "1 channel; give 1$")],
)
def test_means_that_are_not_one_for_each_channel(force: str, count: int, each: str) -> None:
    text = 'layer { name: "d" type: "Data" top: "x" top: "y" data_param { batch_size: 2 } '
    text += f"transform_param {{ crop_size: 8 {force} {'mean_value: 9 ' * count} }} }}"
    with pytest.raises(ConfigError, match=rf'layer "d" \(Data\): {count} mean_value for {each}'):
        synthetic(parse(text, NetParameter()))


def test_as_many_channels_as_means_with_a_guess() -> None:
    """Records may have any number of channels: 48 frames of video, say."""
    text = 'layer { name: "d" type: "Data" top: "x" top: "y" data_param { batch_size: 2 } '
    param = parse(text + f"transform_param {{ {'mean_value: 9 ' * 5} }} }}", NetParameter())
    for guess in (Guess((3, 7, 8)), Guess((1, 7, 8))):
        assert data_shapes(synthetic(param, guess=guess)) == [[2, 5, 7, 8], [2]]


def test_sizes_of_images_for_a_crf() -> None:
    text = 'layer { name: "d" type: "MemoryData" top: "x" top: "y" top: "dim" memory_data_param { '
    text += 'batch_size: 2 channels: 3 height: 7 width: 8 source: "s" } } layer { type: "DenseCRF" '
    text += 'bottom: "x" bottom: "dim" top: "z" }'
    made = synthetic(parse(text, NetParameter()), guess=Guess((3, 9, 9)))
    assert data_shapes(made) == [[2, 3, 7, 8], [2], [2, 1, 1, 2]]


def test_errors_say_where_the_layer_stands(tmp_path: Path) -> None:
    path = tmp_path / "net.prototxt"
    path.write_text('\nlayer { name: "d" type: "Data" top: "x" top: "y" }\n')
    with pytest.raises(ConfigError, match=r'net\.prototxt:2:1: layer "d" \(Data\): no crop_size'):
        synthetic(read_net(str(path)), origin=str(path))


def test_shape_that_nobody_tells() -> None:
    with pytest.raises(ConfigError, match=r'layer "d" .*: no crop_size'):
        synthetic(net("mirror: true"))


def test_the_rest_of_the_net_stays() -> None:
    before = net("crop_size: 6")
    after = synthetic(before)
    assert before == net("crop_size: 6")
    assert list(after.layer)[1:] == list(before.layer)[1:]
    data = after.layer[0]
    assert (data.name, list(data.top), data.include) == ("d", ["x", "y"], before.layer[0].include)
    assert not data.HasField("data_param")
    assert not data.HasField("transform_param")


def test_labels_are_of_all_classes() -> None:
    param = synthetic(net("crop_size: 1"), batch=500)
    param.state.phase = TRAIN
    built = Net(param)
    built.forward()
    labels = built.blobs["y"].data.astype(int)
    assert set(np.unique(labels)) == set(range(7))
    assert np.isfinite(built.blobs["loss"].data)


def test_labels_of_untraced_scores_are_zero() -> None:
    param = net("crop_size: 6")
    param.layer[1].type = "Slice"
    param.layer[1].ClearField("convolution_param")
    labels = synthetic(param).layer[0].dummy_data_param.data_filler[1]
    assert int(labels.max) == 0


@pytest.mark.parametrize(("parts", "channels"), [(56, 6), (14, 4)])
def test_people_have_maps_of_their_parts(parts: int, channels: int) -> None:
    text = (
        'layer { name: "d" type: "CPMData" top: "x" top: "y" data_param { batch_size: 3 } '
        f"cpm_transform_param {{ num_parts: {parts} stride: 8 crop_size_x: 48 crop_size_y: 32 }} }}"
    )
    param = synthetic(parse(text, NetParameter(), "net.prototxt"))
    assert data_shapes(param) == [[3, channels, 32, 48], [3, 2 * (parts + 1), 4, 6]]
    Net(param).forward()


MARKED = """
layer { name: "d" type: "ImageGtData" top: "x" top: "y" top: "boxes"
  image_gt_data_param { batch_size: 2 crop_width: 48 crop_height: 40 downsample_rate: 8 field_w: 20
    field_h: 20 output_gt_boxes: true } }
layer { name: "c" type: "Convolution" bottom: "x" top: "c"
  convolution_param { num_output: 7 kernel_size: 8 stride: 8 } }
layer { name: "l" type: "DetectionLoss" bottom: "c" bottom: "y" top: "l"
  detection_loss_param { cls_num: 3 field_w: 20 field_h: 20 downsample_rate: 8 } }
layer { name: "o" type: "BoxOutput" bottom: "c" top: "rois"
  box_output_param { field_w: 20 field_h: 20 downsample_rate: 8 min_size: 3 } }
layer { name: "t" type: "ProposalTarget" bottom: "rois" bottom: "boxes" top: "r" top: "labels"
  top: "targets" top: "in" top: "out" top: "true"
  proposal_target_param { cls_num: 3 batch_size: 8 img_width: 48 img_height: 40 } }
"""


def test_maps_of_true_boxes() -> None:
    param = synthetic(parse(MARKED, NetParameter(), "net.prototxt"))
    assert data_shapes(param) == [[2, 3, 40, 48], [2, 6, 5, 6], [8, 7]]
    net = Net(param)
    net.forward()
    assert net.blobs["labels"].host_data.shape == (8, 1, 1, 1)


@pytest.mark.parametrize("type_", ["ImageGtData", "DetectionData"])
def test_maps_without_a_rate(type_: str) -> None:
    settings = "image_gt_data_param { crop_width: 8 crop_height: 8 downsample_rate: [2, 0] }"
    settings += "detection_data_param { crop_width: 8 crop_height: 8 stride: 0 }"
    text = f'layer {{ name: "d" type: "{type_}" top: "x" top: "y" top: "z" {settings} }}'
    param = parse(text, NetParameter(), "net.prototxt")
    with pytest.raises(ConfigError, match=r'^net.prototxt: layer "d" .* must be 1 or more$'):
        synthetic(param, origin="net.prototxt")


def test_a_first_top_of_labels_without_rates() -> None:
    text = """layer { name: "d" type: "DetectionData" top: "label"
      detection_data_param { crop_width: 8 crop_height: 8 } }"""
    param = parse(text, NetParameter(), "net.prototxt")
    made = synthetic(param, guess=Guess((3, 9, 9), other_labels=True))
    assert data_shapes(made) == [[8, 8, 1, 1]]


@pytest.mark.parametrize(
    "settings",
    [
        "num_segments: 4294967295 new_length: 4294967295",
        "batch_size: 4294967295 new_length: 4",
    ],
)
def test_data_beyond_all_blobs(settings: str) -> None:
    settings += " crop_size: 8"
    text = f'layer {{ name: "d" type: "VideoData" top: "x" video_data_param {{ {settings} }} }}'
    with pytest.raises(ConfigError, match=r'^net.prototxt: layer "d" .* is not possible'):
        synthetic(parse(text, NetParameter(), "net.prototxt"), origin="net.prototxt")


CASCADE = """
layer { name: "d" type: "DetectionData" top: "x" top: "y" top: "boxes" include { phase: TRAIN }
  detection_data_param { batch_size: 2 short_size: 40 long_size: 48 stride: 8 field_w: 20
    field_h: 20 output_gt_boxes: true } }
layer { name: "e" type: "EvalData" top: "x" top: "boxes" top: "size" include { phase: TEST }
  eval_data_param { batch_size: 1 short_size: 40 long_size: 48 } }
layer { name: "c" type: "Convolution" bottom: "x" top: "c"
  convolution_param { num_output: 2 kernel_size: 8 stride: 8 } }
layer { name: "b" type: "Convolution" bottom: "x" top: "b"
  convolution_param { num_output: 4 kernel_size: 8 stride: 8 } }
layer { name: "l" type: "DetectionGroupLoss" bottom: "c" bottom: "b" bottom: "y" top: "l"
  include { phase: TRAIN } propagate_down: true propagate_down: true propagate_down: false
  detection_group_loss_param { cls_num: 2 field_w: 20 field_h: 20 stride: 8 objectness: true } }
layer { name: "p" type: "Softmax" bottom: "c" top: "p" }
layer { name: "o" type: "BoxGroupOutput" bottom: "p" bottom: "b" top: "rois"
  box_group_output_param { min_size: 3 box_group_param { field_w: 20 field_h: 20 stride: 8 } } }
layer { name: "t" type: "ProposalTarget" bottom: "rois" bottom: "boxes" top: "r" top: "labels"
  top: "targets" top: "in" top: "out" top: "true" include { phase: TRAIN }
  proposal_target_param { cls_num: 3 batch_size: 8 img_width: 48 img_height: 40 } }
layer { name: "pool" type: "ROIPooling" bottom: "x" bottom: "rois" top: "pool"
  include { phase: TEST } roi_pooling_param { pooled_w: 2 pooled_h: 2 } }
layer { name: "s" type: "InnerProduct" bottom: "pool" top: "s" include { phase: TEST }
  inner_product_param { num_output: 3 } }
layer { name: "m" type: "InnerProduct" bottom: "pool" top: "m" include { phase: TEST }
  inner_product_param { num_output: 12 } }
layer { name: "f" type: "FrcnnOutput" bottom: "s" bottom: "m" bottom: "rois" bottom: "size"
  top: "found" include { phase: TEST } frcnn_output_param { conf_thr: -9
    save_output_param { output_directory: "none" label_map_file: "x" name_size_file: "x" } } }
layer { name: "judge" type: "DetectionEvaluate" bottom: "found" bottom: "boxes" bottom: "size"
  top: "judge" include { phase: TEST } detection_evaluate_param { num_classes: 3
    name_size_file: "none" } }
"""


def test_nets_of_cascade() -> None:
    param = synthetic(parse(CASCADE, NetParameter(), "net.prototxt"))
    assert data_shapes(param) == [[2, 3, 40, 48], [2, 6, 5, 6], [8, 8, 1, 1]]
    param.state.phase = TRAIN
    net = Net(param)
    net.forward()
    net.backward()
    assert np.isfinite(net.blobs["l"].host_data).all()
    param.state.phase = TEST
    tested = Net(param)
    tested.forward()
    assert tested.blobs["judge"].host_data.shape[1:] == (5, 1, 1)


FURTHER_NET = """
layer { name: "d" type: "%s" top: "x" top: "%s" %s }
layer { name: "c" type: "Convolution" bottom: "x" top: "c"
  convolution_param { num_output: 2 kernel_size: 1 } }
layer { name: "ip" type: "InnerProduct" bottom: "x" top: "ip" inner_product_param { num_output: 5 } }
"""
DATA = "data_param { batch_size: 4 } transform_param { crop_size: 8 }"
SLICED = 'layer { type: "Slice" bottom: "t" top: "a" top: "b" slice_param { slice_point: 3 } }'
FURTHER = {
    "images": ("Data", DATA, 'layer { type: "Convolution" bottom: "t" top: "e" }', [4, 3, 8, 8]),
    "regions": ("Data", DATA, 'layer { type: "ROIPooling" bottom: "x" bottom: "t" }', [128, 5]),
    "parts": ("Data", DATA, SLICED, [4, 4]),
    "known parts": (
        "Data",
        DATA,
        SLICED + 'layer { type: "EuclideanLoss" bottom: "b" bottom: "ip" }',
        [4, 8],
    ),
    "as many": ("Data", DATA, 'layer { type: "EuclideanLoss" bottom: "t" bottom: "ip" }', [4, 5]),
    "nothing": ("Data", DATA, "", [4]),
    "smaller labels": (
        "DenseImageData",
        "dense_image_data_param { batch_size: 2 new_height: 8 new_width: 16 label_divide_factor: 4 }",
        "",
        [2, 1, 2, 4],
    ),
    "of regions": (
        "Python",
        'top: "r"',
        'layer { type: "ROIPooling" bottom: "x" bottom: "r" }'
        'layer { type: "SigmoidCrossEntropyLoss" bottom: "ip" bottom: "t" }',
        [128, 5],
    ),
}


def test_records_of_labels_have_the_parts_of_a_slice() -> None:
    text = (
        'layer { name: "d" type: "Data" top: "t" top: "y" data_param { batch_size: 5 } }'
        'layer { name: "s" type: "Slice" bottom: "t" top: "a" top: "b" top: "c" '
        "slice_param { slice_point: 2 slice_point: 4 } }"
    )
    param = parse(text, NetParameter(), "net.prototxt")
    assert data_shapes(synthetic(param, guess=Guess((3, 8, 8))))[0] == [5, 6, 1, 1]
    guessed = synthetic(param, guess=Guess((6, 8, 8)))  # images of which a net cuts the channels
    assert data_shapes(guessed)[0] == [5, 6, 8, 8]


def test_a_guidance_has_the_channels_that_it_guides() -> None:
    text = (
        'layer { name: "g" type: "Data" top: "g" data_param { batch_size: 5 } }'
        'layer { name: "f" type: "InnerProduct" bottom: "x" top: "f" '
        "inner_product_param { num_output: 7 } }"
        'layer { name: "r" type: "ReLU" bottom: "f" top: "r" }'
        'layer { name: "d" type: "GuidedDropout" bottom: "r" bottom: "g" top: "r" }'
    )
    param = parse(text, NetParameter(), "net.prototxt")
    assert data_shapes(synthetic(param, guess=Guess((3, 8, 8))))[0] == [5, 7]


@pytest.mark.parametrize("case", FURTHER)
def test_further_tops_by_the_layers_that_read_them(case: str) -> None:
    type_, data, readers, shape = FURTHER[case]
    param = parse(FURTHER_NET % (type_, "t", data) + readers, NetParameter(), "net.prototxt")
    guessed = synthetic(param, guess=Guess((3, 8, 8)))
    assert data_shapes(guessed)[1] == shape


def test_labels_of_pixels_beside_boxes() -> None:
    data = DATA + "annotated_data_param { yolo_data_type: 1 seg_scales: 4 }"
    text = FURTHER_NET % ("AnnotatedData", 'boxes" top: "t', data)
    text += 'layer { type: "YoloSeg" bottom: "c" bottom: "t" }'
    param = parse(text, NetParameter(), "net.prototxt")
    assert data_shapes(synthetic(param)) == [[4, 3, 8, 8], [4, 1, 300, 5], [4, 2, 2, 2]]


@pytest.mark.parametrize(
    ("type_", "settings"),
    [
        (
            "RegionLoss",
            "region_loss_param { num_class: 3 num: 5 biases: [%s] }" % ", ".join("1" * 10),
        ),
        (
            "Yolov3",
            "yolov3_param { num_class: 3 num: 3 anchors_scale: 8 mask: [0, 1, 2] "
            "biases: [8, 8, 9, 9, 10, 10] }",
        ),
    ],
)
def test_yolo_learns_from_made_up_boxes(type_: str, settings: str) -> None:
    data = DATA + "annotated_data_param { yolo_data_type: 1 }"
    boxes = 5 if type_ == "RegionLoss" else 3
    text = (
        f'layer {{ name: "d" type: "AnnotatedData" top: "x" top: "t" {data} }}'
        f'layer {{ name: "c" type: "Convolution" bottom: "x" top: "c" '
        f"convolution_param {{ num_output: {8 * boxes} kernel_size: 1 }} }}"
        f'layer {{ name: "l" type: "{type_}" bottom: "c" bottom: "t" top: "l" {settings} }}'
    )
    made = Net(synthetic(parse(text, NetParameter(), "net.prototxt")))
    made.forward()
    made.backward()
    rows = made.blobs["t"].data
    assert set(np.unique(rows[..., 0])) <= {0, 1, 2}
    assert (rows[:, 0, :2, 3:] > 0).all()
    assert not rows[:, 0, 2:].any()
    assert made.blobs["l"].data > 0


def test_cells_of_the_first_yolo_have_boxes_of_a_known_class() -> None:
    text = """layer { name: "d" type: "Data" top: "x" top: "t" transform_param { crop_size: 8 }
        data_param { batch_size: 2 } }
      layer { name: "p" type: "InnerProduct" bottom: "x" top: "p"
        inner_product_param { num_output: 28 } }
      layer { name: "l" type: "DetectionLoss" bottom: "p" bottom: "t" top: "l"
        detection_loss_param { side: 2 num_class: 2 num_object: 1 } }"""
    made = Net(synthetic(parse(text, NetParameter(), "net.prototxt")))
    made.forward()
    assert made.blobs["t"].shape == (2, 28)
    assert made.blobs["l"].data > 0


def test_memory_that_a_user_fills_is_made_up() -> None:
    text = """layer { name: "d" type: "MemoryData" top: "x" top: "y"
      memory_data_param { batch_size: 2 channels: 1 height: 3 width: 4 } }"""
    made = Net(synthetic(parse(text, NetParameter(), "net.prototxt")))
    made.forward()
    assert [blob.shape for blob in made.blobs.values()] == [(2, 1, 3, 4), (2,)]
    assert made.blobs["x"].data.any()


def test_made_up_regions_are_of_the_image() -> None:
    data = 'top: "t" python_param { module: "roi_data_layer.layer" layer: "RoIDataLayer" }'
    text = f'layer {{ name: "d" type: "Python" top: "x" top: "rois" {data} }}'
    text += """layer { name: "p" type: "ROIPooling" bottom: "x" bottom: "rois" top: "p"
      roi_pooling_param { pooled_h: 2 pooled_w: 2 spatial_scale: 1 } }"""
    param = parse(text, NetParameter(), "net.prototxt")
    made = Net(synthetic(param, image=(3, 20, 30)))
    made.forward()
    rois = made.blobs["rois"].data
    assert rois.shape == (128, 5)
    assert not rois[:, 0].any()
    assert (rois[:, 3:] > rois[:, 1:3]).all()
    assert rois.min() >= 0
    assert 0 < rois.max() <= 19


def test_data_of_any_type_are_made_up_where_shapes_are_guessed() -> None:
    text = """layer { name: "d" type: "ShotData" top: "x" top: "y" data_param { batch_size: 3 } }
      layer { name: "f" type: "DataFilter" bottom: "x" top: "f" }"""
    param = parse(text, NetParameter(), "net.prototxt")
    data, other = synthetic(param, guess=Guess((1, 4, 5))).layer
    assert (data.type, other.type) == ("DummyData", "DataFilter")
    assert [list(shape.dim) for shape in data.dummy_data_param.shape] == [[3, 1, 4, 5], [3]]
    assert synthetic(param).layer[0].type == "ShotData"
