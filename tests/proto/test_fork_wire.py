"""Binary nets of forks. Their messages are made of the tables, in a pool of their own."""

import csv
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import json_format
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.unknown_fields import UnknownFieldSet

from caffepy.commands.weights import convert
from caffepy.core.errors import ConfigError
from caffepy.net.weights import layers_in
from caffepy.proto import binary
from caffepy.proto.caffe_pb2 import LayerParameter, NetParameter
from caffepy.proto.fork_wire import C3D1, CAFFE, FORKS, OWN, fork_named, fork_of

TABLES = Path(__file__).parents[1] / "golden" / "wire"
NAMES = {
    "refinedet": "ssd",
    "nvcaffe": "nvidia-0.17",
    "happynear": "happynear-ms",
    "c3d": "c3d-1.1",
    "shufflenet": "shufflenet-readme",
}
_SCORE = "optional float objectness_score 24"
UNTABLED = {
    "refinedet": {"DetectionOutputParameter": _SCORE, "MultiBoxLossParameter": _SCORE},
    "openpose": {
        "LayerParameter": "optional CPMTransformationParameter cpm_transform_param 147, "
        "optional ImResizeParameter imresize_param 148, optional NmsParameter nms_param 149",
        "ImResizeParameter": "optional uint32 target_spatial_width 1, "
        "optional uint32 target_spatial_height 2, optional float factor 3, "
        "optional float start_scale 4, optional float scale_gap 5",
        "NmsParameter": "optional float threshold 1, optional uint32 num_peak 2, "
        "optional uint32 max_peaks 3, optional uint32 num_parts 4",
        "CPMTransformationParameter": "optional float scale 1, optional bool mirror 2, "
        "optional uint32 crop_size 3, optional string mean_file 4, repeated float mean_value 5, "
        "optional uint32 stride 6, optional float scale_cvg 7, optional uint32 max_cvg_len 8, "
        "optional uint32 min_cvg_len 9, optional bool opaque_coverage 10, "
        "optional string coverage 11, optional float flip_prob 12, "
        "optional float max_rotate_degree 13, optional bool visualize 14, "
        "optional uint32 crop_size_x 15, optional uint32 crop_size_y 16, "
        "optional float scale_prob 17, optional float scale_min 18, optional float scale_max 19, "
        "optional float bbox_norm_factor 20, optional string img_header 21, "
        "optional bool force_color 22, optional bool force_gray 23, "
        "optional float target_dist 24, optional float center_perterb_max 25, "
        "optional float sigma 26, optional float sigma_center 27, "
        "optional float clahe_tile_size 28, optional float clahe_clip_limit 29, "
        "optional bool do_clahe 30, optional uint32 num_parts 31, "
        "optional uint32 num_total_augs 32, optional string aug_way 33, optional uint32 gray 34, "
        "optional uint32 np_in_lmdb 35, optional bool transform_body_joint 38",
    },
    "cascade-rcnn": {
        "LayerParameter": "optional ROIPoolingParameter roi_pooling_param 147, optional "
        "PSROIPoolingParameter "
        "psroi_pooling_param 148, optional SmoothL1LossParameter smooth_l1_loss_param 149, "
        "optional BBoxRegParameter bbox_reg_param 150, optional DetectionDataParameter "
        "detection_data_param 151, optional EvalDataParameter eval_data_param 152, optional "
        "HardMiningParameter hard_mining_param 153, optional ScaleRouteParameter "
        "scale_route_param 154, optional DecodeBBoxParameter decode_bbox_param 155, "
        "optional DetectionGroupLossParameter detection_group_loss_param 156, optional "
        "DetectionGroupAccuracyParameter detection_group_accuracy_param 157, optional "
        "BoxGroupOutputParameter box_group_output_param 158, optional "
        "ProposalTargetParameter proposal_target_param 159, optional FrcnnOutputParameter "
        "frcnn_output_param 160, optional DetectionEvaluateParameter "
        "detection_evaluate_param 161",
        "ROIPoolingParameter": "optional uint32 pooled_h 1, optional uint32 pooled_w 2, optional "
        "float "
        "spatial_scale 3, optional float pad_ratio 4",
        "PSROIPoolingParameter": "optional float spatial_scale 1, optional int32 output_dim 2, "
        "optional int32 "
        "group_size 3",
        "SmoothL1LossParameter": "optional float sigma 1",
        "BBoxRegParameter": "repeated float bbox_mean 1, repeated float bbox_std 2, optional bool "
        "cls_aware 3",
        "DetectionDataParameter": "optional string source 1, optional float scale 2, optional "
        "uint32 batch_size 3, "
        "optional uint32 coord_num 4, repeated uint32 stride 5, repeated uint32 field_h 6, "
        "repeated uint32 field_w 7, optional float fg_threshold 8, optional float "
        "ignore_fg_threshold 9, optional uint32 resize_width 10, optional uint32 "
        "resize_height 11, optional float resize_ratio 29, optional uint32 crop_width 12, "
        "optional uint32 crop_height 13, optional float min_scale 14, optional float "
        "max_scale 15, optional float low_scale_ratio 32, optional float high_scale_ratio "
        "33, optional float multiscale_prob 16, optional float min_whaspect 17, optional "
        "float max_whaspect 18, optional uint32 short_size 19, optional uint32 long_size "
        "20, optional uint32 crop_short_size 30, optional uint32 crop_long_size 31, "
        "repeated float template_ratio 38, optional float min_gt_width 21, optional float "
        "min_gt_height 22, optional float anchor_ignore_margin_ratio 34, optional float "
        "anchor_ignore_iou_thr 35, optional float pickup_iou_thr 36, optional string "
        "shuffle 23, optional uint32 mix_group_size 37, optional bool output_gt_boxes 24, "
        "optional bool cache_images 25, optional string root_folder 26, optional "
        "DistortionParameter distort_param 27, optional ResizeParameter resize_param 28",
        "EvalDataParameter": "optional string source 1, optional float scale 2, optional uint32 "
        "batch_size 3, "
        "optional uint32 resize_width 4, optional uint32 resize_height 5, optional uint32 "
        "short_size 6, optional uint32 long_size 7, optional string root_folder 8",
        "HardMiningParameter": "optional uint32 num_roi_per_image 1, optional uint32 num_image 2",
        "ScaleRouteParameter": "optional float low_scale 1, optional float high_scale 2",
        "DecodeBBoxParameter": "optional float gt_iou_thr 1",
        "DetectionGroupLossParameter": "optional uint32 cls_num 1, optional float lambda 2, "
        "repeated uint32 field_h 3, "
        "repeated uint32 field_w 4, optional uint32 stride 5, optional float field_whr 6, "
        "optional float field_xyr 7, optional float bg_threshold 8, optional uint32 "
        "bg_multiple 9, optional string neg_mining_type 10, optional string "
        "neg_ranking_type 11, optional uint32 min_num_neg 12, optional bool objectness 13, "
        "optional int32 batch_size 14, optional bool pos_neg_weighted 15, optional string "
        "bbox_loss_type 16",
        "DetectionGroupAccuracyParameter": "optional uint32 cls_num 1, repeated uint32 field_h 2, "
        "repeated uint32 field_w 3, "
        "optional uint32 stride 4, optional float field_whr 5, optional float field_xyr 6, "
        "optional float bg_threshold 7, optional bool objectness 8",
        "BoxGroupOutputParameter": "optional float fg_thr 1, optional float iou_thr 2, optional "
        "string nms_type 3, "
        "repeated BoxGroupParameter box_group_param 4, optional float field_whr 5, optional "
        "float field_xyr 6, optional uint32 max_nms_num 7, optional uint32 max_post_nms_num "
        "8, optional float min_size 9",
        "ProposalTargetParameter": "optional uint32 cls_num 1, optional int32 batch_size 2, "
        "optional float fg_fraction "
        "3, optional uint32 num_img_per_batch 4, optional float fg_thr 5, optional float "
        "bg_thr_hg 6, optional float bg_thr_lw 7, optional uint32 img_width 8, optional "
        "uint32 img_height 9, optional bool iou_weighted 10, optional float bbox_thr_lw 11, "
        "optional float bbox_thr_hg 12, optional bool pickup_discard 13, optional bool "
        "append_gtbox 14",
        "FrcnnOutputParameter": "optional float conf_thr 1, optional float iou_thr 2, optional "
        "string nms_type 3, "
        "optional uint32 max_det_num 4, optional SaveOutputParameter save_output_param 5",
        "DetectionEvaluateParameter": "optional uint32 num_classes 1, optional float "
        "overlap_threshold 2, optional bool "
        "evaluate_difficult_gt 3, optional string name_size_file 4",
        "DistortionParameter": "optional float brightness_prob 1, optional float brightness_delta "
        "2, optional "
        "float contrast_prob 3, optional float contrast_lower 4, optional float "
        "contrast_upper 5, optional float hue_prob 6, optional float hue_delta 7, optional "
        "float saturation_prob 8, optional float saturation_lower 9, optional float "
        "saturation_upper 10, optional float random_order_prob 11",
        "ResizeParameter": "optional float prob 1, optional uint32 height 3, optional uint32 "
        "width 4, optional "
        "uint32 height_scale 8, optional uint32 width_scale 9, repeated float pad_value 6",
        "BoxGroupParameter": "repeated uint32 field_h 1, repeated uint32 field_w 2, optional "
        "uint32 stride 3",
        "SaveOutputParameter": "optional string output_directory 1, optional string "
        "output_name_prefix 2, optional "
        "string output_format 3, optional string label_map_file 4, optional string "
        "name_size_file 5, optional uint32 num_test_image 6",
    },
    "deformable": {
        "LayerParameter": "optional DeformableConvolutionParameter deformable_convolution_param "
        "999, optional "
        "ROIPoolingParameter roi_pooling_param 8266711, optional SmoothL1LossParameter "
        "smooth_l1_loss_param 8266712",
        "DeformableConvolutionParameter": "optional uint32 num_output 1, optional bool bias_term "
        "2, repeated uint32 pad 3, "
        "repeated uint32 kernel_size 4, repeated uint32 stride 6, repeated uint32 dilation "
        "18, optional uint32 pad_h 9, optional uint32 pad_w 10, optional uint32 kernel_h "
        "11, optional uint32 kernel_w 12, optional uint32 stride_h 13, optional uint32 "
        "stride_w 14, optional uint32 group 5, optional uint32 deformable_group 19, "
        "optional FillerParameter weight_filler 7, optional FillerParameter bias_filler 8, "
        "optional int32 axis 16, optional bool force_nd_im2col 17",
        "ROIPoolingParameter": "optional uint32 pooled_h 1, optional uint32 pooled_w 2, optional "
        "float "
        "spatial_scale 3",
        "SmoothL1LossParameter": "optional float sigma 1",
        "DropoutParameter": "optional bool scale_train 2",
    },
    "l-softmax": {
        "LayerParameter": "optional BNParameter bn_param 201, optional "
        "LargeMarginInnerProductParameter "
        "largemargin_inner_product_param 202",
        "BNParameter": "optional FillerParameter slope_filler 1, optional FillerParameter "
        "bias_filler 2, "
        "optional float momentum 3, optional float eps 4, optional bool frozen 5",
        "LargeMarginInnerProductParameter": "optional uint32 num_output 1, optional "
        "FillerParameter weight_filler 3, optional "
        "int32 axis 4, optional float base 5, optional float gamma 6, optional float power "
        "7, optional int32 iteration 8, optional float lambda_min 9",
    },
    "hwgq": {
        "LayerParameter": "optional BinaryConvolutionParameter binary_convolution_param 147, optional "
        "BinaryInnerProductParameter binary_inner_product_param 148, optional "
        "QuantParameter quant_param 149",
        "BinaryConvolutionParameter": "optional bool use_alpha 1, optional bool use_binarization 2",
        "BinaryInnerProductParameter": "optional bool use_alpha 1, optional bool use_binarization 2",
        "QuantParameter": "optional string forward_func 1, optional string backward_func 2, optional float "
        "clip_thr 3, optional float negative_slope 4, repeated float thrs 5, repeated float "
        "centers 6",
    },
    "mnc": {
        "LayerParameter": "optional ROIPoolingParameter roi_pooling_param 8266711, optional "
        "ROIWarpingParameter roi_warping_param 11870, optional MaskResizeParameter "
        "mask_resize_param 11890, optional SmoothL1LossParameter smooth_l1_loss_param "
        "8266712",
        "ROIPoolingParameter": "optional uint32 pooled_h 1, optional uint32 pooled_w 2, optional float "
        "spatial_scale 3",
        "ROIWarpingParameter": "optional uint32 pooled_h 1, optional uint32 pooled_w 2, optional float "
        "spatial_scale 3",
        "MaskResizeParameter": "optional uint32 output_height 1, optional uint32 output_width 2",
        "SmoothL1LossParameter": "optional float sigma 1",
        "DropoutParameter": "optional bool scale_train 2",
    },
}
"""What forks have that the tables lack, beside Caffe's or those of their NAMES."""
TABLED = [fork for fork in FORKS if fork not in (CAFFE, OWN, C3D1)]
VALUES = np.arange(6, dtype=np.float32).reshape(2, 3) / 7


def rows(name: str) -> list[dict[str, str]]:
    with open(TABLES / name, newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


@cache
def net_of(fork: str) -> Any:
    """The class NetParameter of a fork: Caffe's messages, and what the fork has in its place."""
    fields = {(r["message"], r["field"]): r for r in rows("caffe_wire.tsv")}
    enums = {(r["enum"], r["name"]): int(r["number"]) for r in rows("caffe_enums.tsv")}
    own = [r for r in rows("fork_wire.tsv") if r["fork"] == NAMES.get(fork, fork)]
    own += [
        {"message": message, "label": label, "type": kind, "field": name, "number": number}
        for message, listed in UNTABLED.get(fork, {}).items()
        for label, kind, name, number in map(str.split, listed.split(", "))
    ]
    assert own or fork == CAFFE
    for row in own:
        key = row["message"], row["field"]
        if row["type"] == "enum value":
            enums[key] = int(row["number"])
        else:
            taken = [
                k for k, r in fields.items() if k[0] == key[0] and r["number"] == row["number"]
            ]
            for other in taken:
                del fields[other]
            fields[key] = row
    file = FileDescriptorProto(name=f"{fork}.proto", package="caffe", syntax="proto2")
    messages: dict[str, DescriptorProto] = {}
    for message in sorted({message for message, _ in fields}, key=lambda name: name.count(".")):
        home, _, name = message.rpartition(".")
        inside = messages[home].nested_type if home else file.message_type
        messages[message] = inside.add(name=name)
    kinds: dict[str, EnumDescriptorProto] = {}
    for (enum, name), number in enums.items():
        home, _, inner = enum.rpartition(".")
        if home and home not in messages:
            continue
        if enum not in kinds:
            kinds[enum] = messages[home].enum_type.add() if home else file.enum_type.add()
            kinds[enum].name = inner
            kinds[enum].options.allow_alias = True
        kinds[enum].value.add(name=name, number=number)
    for (message, name), row in fields.items():
        field = messages[message].field.add(name=name, number=int(row["number"]))
        label = "REPEATED" if "repeated" in row["label"] else "OPTIONAL"
        field.label = FieldDescriptorProto.Label.Value(f"LABEL_{label}")
        kind = f"TYPE_{row['type'].upper()}"
        if kind in dict(FieldDescriptorProto.Type.items()):
            field.type = FieldDescriptorProto.Type.Value(kind)
        else:
            known = {**messages, **kinds}
            full = next(k for k in (f"{message}.{row['type']}", row["type"]) if k in known)
            field.type_name = f".caffe.{full}"
            is_enum = full in kinds
            field.type = (
                FieldDescriptorProto.TYPE_ENUM if is_enum else FieldDescriptorProto.TYPE_MESSAGE
            )
    for enum in kinds.values():
        if len({value.number for value in enum.value}) == len(enum.value):
            enum.options.ClearField("allow_alias")
    pool = DescriptorPool()
    pool.Add(file)
    return GetMessageClass(pool.FindMessageTypeByName("caffe.NetParameter"))


def fill(message: Message, depth: int = 0) -> None:
    """Set every field, of messages inside down to some depth."""
    for number, field in enumerate(message.DESCRIPTOR.fields):
        repeated = field.default_value == []
        if field.message_type is not None:
            if depth < 3:
                inner = getattr(message, field.name)
                fill(inner.add() if repeated else inner, depth + 1)
            continue
        value: Any = number % 7 + 1
        if field.enum_type is not None:
            value = field.enum_type.values[-1].number
        elif field.cpp_type == field.CPPTYPE_STRING:
            value = b"x" if field.type == field.TYPE_BYTES else f"text {number}"
        elif field.cpp_type == field.CPPTYPE_BOOL:
            value = True
        elif field.cpp_type in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
            value = number + 0.5
        if repeated:
            getattr(message, field.name).extend([value, value])
        else:
            setattr(message, field.name, value)


def layer_fields(net: Any) -> Iterator[str]:
    """The settings of layers that a fork has."""
    for field in net.DESCRIPTOR.fields_by_name["layer"].message_type.fields:
        if field.number not in range(1, 12):
            yield field.name


def whole_net(fork: str) -> Any:
    """A net with one layer for each setting that a layer of the fork may have, all fields set."""
    net = net_of(fork)(name="n")
    for name in layer_fields(net):
        layer = net.layer.add(name=name, type="Strange")
        field = layer.DESCRIPTOR.fields_by_name[name]
        if field.message_type is not None:
            fill(getattr(layer, name))
            getattr(layer, name).SetInParent()
        else:
            values = {field.CPPTYPE_STRING: "MKLDNN", field.CPPTYPE_BOOL: True}
            setattr(layer, name, values.get(field.cpp_type, 1))
        blob = layer.blobs.add()
        blob.shape.dim.extend(VALUES.shape)
        blob.data.extend(VALUES.ravel())
    return net


def told(message: Message) -> Any:
    """A message by the names of its fields and values."""
    return json_format.MessageToDict(message, preserving_proto_field_name=True)


NOT_TAKEN = ("LANE", "LOWRES", "SORT")
"""Values of enums that we do not have; they stay in the file."""


def by_name(value: Any) -> Any:
    """What is told of a message, whether its fields are repeated or not."""
    if isinstance(value, dict):
        return {key: by_name(inner) for key, inner in value.items() if inner not in NOT_TAKEN}
    if isinstance(value, list):
        return by_name(value[0]) if len(value) == 1 else [by_name(inner) for inner in value]
    return value


def unknown_fields(message: Message) -> list[str]:
    found = [message.DESCRIPTOR.name] * len(UnknownFieldSet(message))
    for field, value in message.ListFields():
        if field.message_type is not None:
            for inner in value if field.default_value == [] else [value]:
                found += unknown_fields(inner)
    return found


def write(folder: Path, net: Any) -> str:
    path = folder / "net.caffemodel"
    path.write_bytes(net.SerializeToString())
    return str(path)


@pytest.mark.parametrize("fork", [CAFFE, *TABLED])
def test_every_setting_of_a_fork_is_read_and_written(fork: str, tmp_path: Path) -> None:
    theirs = whole_net(fork)
    path = write(tmp_path, theirs)
    ours, shown = binary.read_stored_net(path, fork)
    assert shown == fork
    assert by_name(told(ours)) == by_name(told(theirs))
    for layer in binary.read_net(path).layer:
        assert np.array_equal(binary.blob_to_array(layer.blobs[0]), VALUES)
    convert(path, str(tmp_path / "out.caffemodel"), fork)
    again = net_of(fork).FromString((tmp_path / "out.caffemodel").read_bytes())
    assert unknown_fields(again) == []
    assert told(again) == told(theirs)


TYPICAL = {
    "caffe": ("Pooling", "pooling_param", {"kernel_size": 2, "round_mode": 1}),
    "ssd": ("PriorBox", "prior_box_param", {"min_size": [3], "flip": True}),
    "refinedet": (
        "DetectionOutput",
        "detection_output_param",
        {"num_classes": 2, "objectness_score": 0.5},
    ),
    "nvcaffe": ("LSTM", "recurrent_param", {"num_output": 3}),
    "intel": ("ReLU", "engine", "MKLDNN"),
    "faster-rcnn": ("ROIPooling", "roi_pooling_param", {"pooled_w": 7}),
    "r-fcn": ("PSROIPooling", "psroi_pooling_param", {"output_dim": 7}),
    "segnet": ("Upsample", "upsample_param", {"scale": 2, "pad_out_h": True}),
    "pspnet": ("Interp", "interp_param", {"zoom_factor": 2}),
    "mobilenet-yolo": ("Reorg", "reorg_param", {"stride": 2}),
    "happynear": ("TripletLoss", "triplet_loss_param", {"margin": 2.5}),
    "happynear-master": ("Scale", "scale_param", {"axis": 2}),
    "caffe-face": ("CenterLoss", "center_loss_param", {"num_output": 9}),
    "sphereface": ("MarginInnerProduct", "margin_inner_product_param", {"num_output": 9}),
    "flownet2": ("Correlation", "correlation_param", {"pad": 3}),
    "spatial-transformer": ("SpatialTransformer", "st_param", {"output_H": 3}),
    "pva": ("Proposal", "proposal_param", {"feat_stride": 8}),
    "c3d": ("Convolution3D", "convolution3d_param", {"kernel_depth": 3}),
    "shufflenet": ("ShuffleChannel", "shuffle_channel_param", {"group": 3}),
    "openpose": ("CPMData", "cpm_transform_param", {"num_parts": 56, "do_clahe": True}),
    "cascade-rcnn": ("DetectionGroupLoss", "detection_group_loss_param", {"field_w": [9, 18]}),
    "deformable": (
        "DeformableConvolution",
        "deformable_convolution_param",
        {"deformable_group": 2},
    ),
    "hwgq": ("Quant", "quant_param", {"centers": [0.5, 1.5]}),
    "mnc": ("ROIWarping", "roi_warping_param", {"pooled_h": 7}),
    "l-softmax": ("LargeMarginInnerProduct", "largemargin_inner_product_param", {"num_output": 9}),
}


@pytest.mark.parametrize("fork", TYPICAL)
def test_a_net_shows_of_which_fork_it_is(fork: str, tmp_path: Path) -> None:
    layer_type, name, settings = TYPICAL[fork]
    net = net_of(fork)(name="n")
    layer = {"name": "a", "type": layer_type, name: settings}
    json_format.ParseDict({"layer": [layer, {"name": "b", "type": "Convolution"}]}, net)
    path = write(tmp_path, net)
    ours, shown = binary.read_stored_net(path)
    assert by_name(told(ours)) == by_name(told(net)), shown
    convert(path, str(tmp_path / "out.caffemodel"))
    again = net_of(fork).FromString((tmp_path / "out.caffemodel").read_bytes())
    assert told(again) == told(net)
    assert unknown_fields(again) == []


def test_an_unclear_file_names_the_forks(tmp_path: Path) -> None:
    net = net_of("pspnet")(name="n")
    net.layer.add(name="a", type="Strange").unique_label_param.SetInParent()
    path = write(tmp_path, net)
    with pytest.raises(ConfigError, match=r"several forks .*pspnet.*--fork"):
        convert(path, str(tmp_path / "out.caffemodel"))
    assert not (tmp_path / "out.caffemodel").exists()
    ours, shown = binary.read_stored_net(path, "pspnet")
    assert (shown, ours.layer[0].HasField("unique_label_param")) == ("pspnet", True)
    assert [layer.name for layer in binary.read_net(path).layer] == ["a"]


def test_a_fork_may_lack_a_setting(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    net = net_of("segnet")(name="n")
    net.layer.add(name="a", type="BN").bn_param.bn_mode = 1
    convert(write(tmp_path, net), str(tmp_path / "out.caffemodel"), "nvidia")
    again = net_of("nvcaffe").FromString((tmp_path / "out.caffemodel").read_bytes())
    assert told(again) == {"name": "n", "layer": [{"name": "a", "type": "BN"}]}
    assert unknown_fields(again) == []
    assert "nvcaffe does not have, so that it is left out: LayerParameter.bn_param" in caplog.text


def test_our_own_numbers_are_read_and_turned_into_those_of_a_fork(tmp_path: Path) -> None:
    layer = LayerParameter(name="a", type="Interp")
    layer.interp_param.zoom_factor = 2
    path = write(tmp_path, NetParameter(name="n", layer=[layer]))
    assert fork_of(Path(path).read_bytes()) == OWN
    convert(path, str(tmp_path / "out.caffemodel"), "pspnet")
    again = net_of("pspnet").FromString((tmp_path / "out.caffemodel").read_bytes())
    assert again.layer[0].interp_param.zoom_factor == 2


@pytest.mark.parametrize(
    ("source", "setting", "target"),
    [
        (OWN, {"type": "BatchNorm", "batch_norm_param": {"eps": 0.5}}, "happynear-master"),
        (OWN, {"type": "ELU", "elu_param": {"alpha": 2}}, "happynear-master"),
        (
            "intel",
            {"type": "BoxAnnotatorOHEM", "box_annotator_ohem_param": {"roi_per_img": 3}},
            OWN,
        ),
    ],
)
def test_a_fork_that_is_named_does_not_read_what_another_means(
    source: str, setting: dict[str, Any], target: str, tmp_path: Path
) -> None:
    """The numbers of these settings have others in the fork to write for, without a rest; but those
    are not settings of the layers' types, or lack fields that they must have.
    """
    net = NetParameter(name="n", layer=[LayerParameter(name="a", **setting)])
    first, last = str(tmp_path / "first.caffemodel"), str(tmp_path / "last.caffemodel")
    Path(first).write_bytes(b"".join(binary.serialized([net], source)))
    convert(first, last, target)
    assert binary.read_stored_net(last, target) == (net, target)


def test_a_fork_may_have_several_where_caffe_has_one(tmp_path: Path) -> None:
    net = net_of("mobilenet-yolo")(name="n")
    sizes = net.layer.add(name="a", type="AnnotatedData").transform_param.resize_param
    for width in (3, 4, 5):
        sizes.add(width=width)
    path = write(tmp_path, net)
    ours, _ = binary.read_stored_net(path, "mobilenet-yolo")
    transform = ours.layer[0].transform_param
    assert transform.resize_param.width == 3
    assert [resize.width for resize in transform.further_resize_param] == [4, 5]
    convert(path, str(tmp_path / "out.caffemodel"), "mobilenet-yolo")
    assert net_of("mobilenet-yolo").FromString((tmp_path / "out.caffemodel").read_bytes()) == net


def test_names_of_forks() -> None:
    assert fork_named("NVIDIA") == "nvcaffe"
    with pytest.raises(
        ConfigError,
        match=r'unknown fork "sdd", did you mean "ssd"\? \(known: caffe, ssd, refinedet, nvcaffe',
    ):
        fork_named("sdd")


def of_volumes() -> Any:
    """NetParameter of C3D 1.0, as far as weights need it."""
    file = FileDescriptorProto(name="c3d1.proto", package="caffe", syntax="proto2")
    messages = {
        "BlobProto": "num:1 channels:2 length:3 height:4 width:5 data:6f diff:7f",
        "LayerParameter": "bottom:2s top:3s name:4 type:5 blobs:6BlobProto",
        "NetParameter": "name:1 layers:2LayerParameter",
    }
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        for entry in fields.split():
            label, _, kind = entry.partition(":")
            field = message.field.add(name=label, number=int(kind[0]), label=1, type=5)
            if label == "name":
                field.type = FieldDescriptorProto.TYPE_STRING
            elif kind[1:]:
                field.label = FieldDescriptorProto.LABEL_REPEATED
                field.type = {"f": 2, "s": 9}.get(kind[1:], 11)  # type: ignore[assignment]
                if field.type == FieldDescriptorProto.TYPE_MESSAGE:
                    field.type_name = f".caffe.{kind[1:]}"
                field.options.packed = field.type == FieldDescriptorProto.TYPE_FLOAT
    pool = DescriptorPool()
    pool.Add(file)
    return GetMessageClass(pool.FindMessageTypeByName("caffe.NetParameter"))


def test_weights_of_c3d_1_0(tmp_path: Path) -> None:
    values = np.arange(24, dtype=np.float32) / 7
    net = of_volumes()(name="n")
    layer = net.layers.add(name="conv", type=30, bottom=["x"], top=["y"])
    layer.blobs.add(num=1, channels=2, length=3, height=2, width=2, data=values, diff=-values)
    path = write(tmp_path, net)
    assert layers_in(path) == ["conv"]
    (read,) = binary.read_net(path).layer
    assert (read.type, list(read.bottom), list(read.top)) == ("Convolution3D", ["x"], ["y"])
    assert np.array_equal(binary.blob_to_array(read.blobs[0]), values.reshape(1, 2, 3, 2, 2))
    convert(path, str(tmp_path / "out.caffemodel"))
    again = of_volumes().FromString((tmp_path / "out.caffemodel").read_bytes())
    assert told(again) == told(net)
    assert unknown_fields(again) == []


@pytest.mark.parametrize(
    "damage", [b"\xa2\x06\x05\x3a\x04abc", b"\xa2\x06\x01\xff", b"\x0b\x0c", b"\x00\x01"]
)
def test_damaged_files_are_told_by_the_parser(damage: bytes, tmp_path: Path) -> None:
    (tmp_path / "net.caffemodel").write_bytes(damage)
    with pytest.raises(ConfigError, match=r"net\.caffemodel"):
        binary.read_net(str(tmp_path / "net.caffemodel"))
