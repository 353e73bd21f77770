import csv
import importlib.util
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)

from caffepy.proto import caffe_pb2

ROOT = Path(__file__).parents[2]
TABLES = ROOT / "tests" / "golden" / "wire"
FILE = FileDescriptorProto()
caffe_pb2.DESCRIPTOR.CopyToProto(FILE)


def rows(name: str) -> list[dict[str, str]]:
    with open(TABLES / name, newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def messages(parent: str, protos: list[DescriptorProto]) -> Iterator[tuple[str, DescriptorProto]]:
    for proto in protos:
        yield parent + proto.name, proto
        yield from messages(f"{parent}{proto.name}.", list(proto.nested_type))


MESSAGES = dict(messages("", list(FILE.message_type)))
FIELDS = {(name, field.name): field for name, proto in MESSAGES.items() for field in proto.field}
ENUMS: dict[str, EnumDescriptorProto] = {enum.name: enum for enum in FILE.enum_type} | {
    f"{name}.{enum.name}": enum for name, proto in MESSAGES.items() for enum in proto.enum_type
}


def as_row(message: str, field: FieldDescriptorProto) -> dict[str, str]:
    """A field in the words of the tables."""
    label = FieldDescriptorProto.Label.Name(field.label).removeprefix("LABEL_").lower()
    kind = field.type_name.removeprefix(".caffe.") or (
        FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    )
    default = field.default_value
    if field.HasField("default_value") and kind == "string" and not default:
        default = '""'
    deprecated = field.options.deprecated or MESSAGES[message].options.deprecated
    return {
        "message": message,
        "field": field.name,
        "number": str(field.number),
        "label": label,
        "type": kind,
        "default": default,
        "packed": str(int(field.options.packed)),
        "deprecated": str(int(deprecated)),
    }


def same(ours: dict[str, str], theirs: dict[str, str]) -> bool:
    default, expected = ours["default"], theirs["default"]
    return {**theirs, **ours, "default": ""} == {**theirs, "default": ""} and (
        default == expected or same_number(default, expected)
    )


def same_number(a: str, b: str) -> bool:
    try:
        return bool(np.float32(a) == np.float32(b))
    except ValueError:
        return False


def expected_nvcaffe() -> list[dict[str, str]]:
    return [
        row
        for row in rows("nvcaffe_extra_wire.tsv")
        if row["change"] in ("added", "new_message") and row["clash"] in ("no", "n/a")
    ]


RENUMBERED = {
    "forward_type": 20145,
    "backward_type": 20146,
    "forward_math": 20147,
    "backward_math": 20148,
}
"""NVCaffe's fields of LayerParameter whose numbers clash with Caffe's, under our own numbers."""


def renumbered() -> list[dict[str, str]]:
    return [
        {**row, "number": str(RENUMBERED[row["field"]])}
        for row in rows("nvcaffe_extra_wire.tsv")
        if row["message"] == "LayerParameter" and row["field"] in RENUMBERED
    ]


def test_our_own_numbers_are_nobody_elses() -> None:
    theirs = {
        int(row["number"])
        for name in ("caffe_wire.tsv", "nvcaffe_extra_wire.tsv")
        for row in rows(name)
    }
    assert len(renumbered()) == len(RENUMBERED)
    assert min(RENUMBERED.values()) >= 20000 > max(theirs)


HEEDED = "PythonParameter", "share_in_parallel"
"""Deprecated in Caffe, but it has its meaning here."""


def test_fields_are_those_of_the_tables() -> None:
    expected = rows("caffe_wire.tsv") + expected_nvcaffe() + renumbered()
    assert len(expected) > 600
    (heeded,) = (row for row in expected if (row["message"], row["field"]) == HEEDED)
    heeded["deprecated"] = "0"
    wrong = [
        (row, ours)
        for row in expected
        for ours in [
            as_row(
                row["message"], FIELDS.get((row["message"], row["field"]), FieldDescriptorProto())
            )
        ]
        if not same(ours, row)
    ]
    assert wrong == []


def of_forks() -> dict[tuple[str, str], list[dict[str, str]]]:
    """The rows of each field, or value of an enum, of the forks that have it."""
    found: dict[tuple[str, str], list[dict[str, str]]] = {}
    for row in rows("fork_wire.tsv"):
        found.setdefault((row["message"], row["field"]), []).append(row)
    return found


UNNUMBERED = {
    "ConvolutionParameter": "kernel_depth temporal_stride filter_group temporal_pad",
    "DenseImageDataParameter": "label_divide_factor",
    "ImageDataParameter": "new_length show_data use_image sampling_rate use_label "
    "use_temporal_jitter mean_value num_truth_channels use_byte_input is_flow truth_scale clip_min "
    "clip_max shared_file_system new_dim label_dim has_label normalize",
    "DataParameter": "shuffle_pool_size shared_file_system",
    "GatherParameter": "indices shape axis",
    "LayerParameter": "source_class roi_align_param psroi_align_param rrelu_param matmul_param "
    "gather_param pass_through_param",
    "MatMulParameter": "transpose_a transpose_b blob_shape dim_1 dim_2 dim_3",
    "PSROIAlignParameter": "spatial_scale output_dim group_size sample_num",
    "PassThroughParameter": "num_output block_height block_width",
    "ROIAlignParameter": "pooled_h pooled_w spatial_scale sampling_ratio roi_end_mode",
    "RReLUParameter": "negative_slope_lower negative_slope_upper",
    "MemoryDataParameter": "source share_in_parallel dataframe_format dataframe_column_select "
    "image_encoded",
    "MemoryOptimizationParameter": "optimize_train optimize_test exclude_blob",
    "NetParameter": "mem_param richness",
    "PoolingParameter": "ceil_mode kernel_depth temporal_stride further_kernel_size "
    "further_stride further_pad",
    "SolverParameter": "further_device_id group_id richness",
    "TransformationParameter": "further_resize_param fix_crop more_fix_crop multi_scale "
    "scale_ratios max_distort is_flow",
    "VideoDataParameter": "num_segments modality name_pattern",
}
C3D = (
    "CONVOLUTION3D POOLING3D VOLUME_DATA VIDEO_DATA DECONVOLUTION3D VIDEO_SEGMENTATION_DATA "
    "VOXEL_SOFTMAX VOXEL_SOFTMAX_LOSS VIDEO_WITH_VOXEL_TRUTH_DATA VOXEL_CUSTOM_LOSS DOWN_SAMPLING"
)
"""C3D 1.0's types of V1 layers."""
OWN = {(message, name) for message, names in UNNUMBERED.items() for name in names.split()}
"""Fields of forks whose number is not known, those for what forks have several times, and those of
C3D 1.0, whose binary nets are read otherwise.
"""
OWN |= {
    (message, name)
    for message, names in {
        "LayerParameter": "ctc_loss_param ctc_decoder_param continuation_indicator_param "
        "unpooling_param",
        "CTCDecoderParameter": "blank_index ctc_merge_repeated",
        "CTCLossParameter": "output_delay blank_index preprocess_collapse_repeated "
        "ctc_merge_repeated loss_calculation_t alphabet_size time_step blank_label",
        "ContinuationIndicatorParameter": "time_step batch_size",
        "InterpParameter": "use_blob_size",
        "LabelMapItem": "label_id r g b",
        "UnpoolingParameter": "unpool kernel_size stride pad kernel_h kernel_w stride_h stride_w "
        "pad_h pad_w unpool_size unpool_h unpool_w",
        "V1LayerParameter": "unpooling_param",
    }.items()
    for name in names.split()
}
"""Those of CTC's forks, of DeconvNet, of soeaver's Interp and of MobileNet-YOLO's label maps."""
OWN |= {
    (message, name)
    for message, names in {
        "LayerParameter": "multi_stage_meanfield_param",
        "MultiStageMeanfieldParameter": "compatibility_mode threshold theta_alpha theta_beta "
        "theta_gamma num_iterations spatial_filter_weight bilateral_filter_weight "
        "forced_spatial_filter_weight forced_bilateral_filter_weight",
        "V1LayerParameter": "multi_stage_meanfield_param",
    }.items()
    for name in names.split()
}
"""Those of CRF-as-RNN."""
OWN |= {
    (message, name)
    for message, names in {
        "LayerParameter": "lifted_struct_sim_softmax_loss_param guided_dropout_param "
        "pointwise_spatial_attention_param modulated_deformable_convolution_param grn_param "
        "pooling_nd_param heatmap_data_param visualise visualise_channel mmd_param "
        "sum_pooling_param compact_bilinear_param batch_reduction_param apl_param "
        "softmaxloss_param",
        "V1LayerParameter": "softmaxloss_param seg_accuracy_param",
        "SoftmaxLossParameter": "weight_source ignore_label",
        "APLParameter": "sums slope_filler offset_filler save_mem",
        "AccuracyParameter": "use_log",
        "BatchReductionParameter": "level reduction_param pos",
        "PriorBoxParameter": "use_default",
        "ReductionParameter": "k",
        "CompactBilinearParameter": "num_output sum_pool",
        "DetectionLossParameter": "side num_class num_object object_scale noobject_scale class_scale "
        "coord_scale sqrt constriant",
        "MMDParameter": "kernel_num kernel_mul fix_gamma",
        "GRNParameter": "bias dummy_backward",
        "PoolingNDParameter": "pool pad kernel_size stride engine global_pooling axis",
        "HeatmapDataParameter": "segmentation multfact num_channels batchsize root_img_dir "
        "random_crop sample_per_cluster labelinds source meanfile crop_meanfile cropsize outsize "
        "scale label_width label_height dont_flip_first angle_max flip_joint_labels",
        "LiftedStructSimilaritySoftmaxLossParameter": "margin",
        "GuidedDropoutParameter": "type guidance_threshold sigmoid_scaler",
        "PointwiseSpatialAttentionParameter": "attention_mask_height attention_mask_width "
        "normalization_factor is_softmax psa_type",
    }.items()
    for name in names.split()
}
"""Those of deep metric learning, Domain guided dropout, PSANet, Deformable ConvNets 2, OpenVINO,
3D-Caffe, caffe-heatmap, Xlearn, bilinear pooling, learned activation functions, Temporal Segment
Networks, Tongcheng's, BDIG and YOLO for Caffe.
"""
OWN |= {
    (message, name)
    for message, names in {
        "LayerParameter": "transpose_param reverse_param lstm_param",
        "LSTMParameter": "num_output clipping_threshold weight_filler bias_filler batch_size",
        "ReverseParameter": "axis",
        "TransposeParameter": "dim",
    }.items()
    for name in names.split()
}
"""Those of CTPN."""
OWN |= {
    (message, name)
    for message, names in {
        "LayerParameter": "bbox_reg_param box_output_param box_group_output_param "
        "decode_bbox_param scale_route_param image_gt_data_param detection_loss_param "
        "detection_accuracy_param proposal_target_param detection_data_param eval_data_param "
        "detection_group_loss_param detection_group_accuracy_param frcnn_output_param "
        "hard_mining_param",
        "BBoxRegParameter": "bbox_mean bbox_std cls_aware",
        "BoxOutputParameter": "fg_thr iou_thr nms_type field_h field_w downsample_rate field_whr "
        "field_xyr max_nms_num max_post_nms_num min_size",
        "BoxGroupParameter": "field_h field_w stride",
        "BoxGroupOutputParameter": "fg_thr iou_thr nms_type box_group_param field_whr field_xyr "
        "max_nms_num max_post_nms_num min_size",
        "DecodeBBoxParameter": "gt_iou_thr",
        "ScaleRouteParameter": "low_scale high_scale",
        "ROIPoolingParameter": "pad_ratio",
        "ImageGtDataParameter": "source scale mean_file batch_size mirror downsample_rate coord_num "
        "field_h field_w fg_threshold resize_width resize_height crop_width crop_height "
        "do_multiple_scale min_scale max_scale min_whaspect max_whaspect min_gt_width "
        "min_gt_height shuffle output_gt_boxes fg_img_multiple cache_images root_folder",
        "DetectionLossParameter": "cls_num coord_num lambda field_h field_w downsample_rate "
        "bb_smooth field_whr field_xyr bg_threshold bg_multiple sample_mode objectness "
        "iou_weighted pos_neg_weighted",
        "DetectionAccuracyParameter": "cls_num coord_num field_h field_w downsample_rate top_k "
        "field_whr field_xyr bg_threshold objectness",
        "ProposalTargetParameter": "cls_num batch_size fg_fraction num_img_per_batch fg_thr "
        "bg_thr_hg bg_thr_lw img_width img_height iou_weighted bbox_thr_lw bbox_thr_hg "
        "pickup_discard append_gtbox",
        "DetectionDataParameter": "source scale batch_size coord_num stride field_h field_w "
        "fg_threshold ignore_fg_threshold resize_width resize_height crop_width crop_height "
        "min_scale max_scale multiscale_prob min_whaspect max_whaspect short_size long_size "
        "min_gt_width min_gt_height shuffle output_gt_boxes cache_images root_folder "
        "distort_param resize_param resize_ratio crop_short_size crop_long_size low_scale_ratio "
        "high_scale_ratio anchor_ignore_margin_ratio anchor_ignore_iou_thr pickup_iou_thr "
        "mix_group_size template_ratio",
        "EvalDataParameter": "source scale batch_size resize_width resize_height short_size "
        "long_size root_folder",
        "DetectionGroupLossParameter": "cls_num lambda field_h field_w stride field_whr field_xyr "
        "bg_threshold bg_multiple neg_mining_type neg_ranking_type min_num_neg objectness "
        "batch_size pos_neg_weighted bbox_loss_type",
        "DetectionGroupAccuracyParameter": "cls_num field_h field_w stride field_whr field_xyr "
        "bg_threshold objectness",
        "FrcnnOutputParameter": "conf_thr iou_thr nms_type max_det_num save_output_param",
        "HardMiningParameter": "num_roi_per_image num_image",
    }.items()
    for name in names.split()
}
"""Those of MS-CNN and Cascade R-CNN."""
OWN |= {
    (message, name)
    for message, names in {
        "LayerParameter": "cpm_transform_param imresize_param nms_param",
        "ImResizeParameter": "target_spatial_width target_spatial_height factor start_scale "
        "scale_gap",
        "NmsParameter": "threshold num_peak max_peaks num_parts",
        "CPMTransformationParameter": "scale mirror crop_size mean_file mean_value stride scale_cvg "
        "max_cvg_len min_cvg_len opaque_coverage coverage flip_prob max_rotate_degree visualize "
        "crop_size_x crop_size_y scale_prob scale_min scale_max bbox_norm_factor img_header "
        "force_color force_gray target_dist center_perterb_max sigma sigma_center clahe_tile_size "
        "clahe_clip_limit do_clahe num_parts num_total_augs aug_way gray np_in_lmdb "
        "transform_body_joint",
    }.items()
    for name in names.split()
}
"""Those of OpenPose."""
OWN |= {
    (message, name)
    for message, names in {
        "LayerParameter": "deformable_convolution_param",
        "DeformableConvolutionParameter": "num_output bias_term pad kernel_size group stride "
        "weight_filler bias_filler pad_h pad_w kernel_h kernel_w stride_h stride_w engine axis "
        "force_nd_im2col dilation deformable_group",
    }.items()
    for name in names.split()
}
"""Those of Deformable ConvNets."""
OWN |= {
    (message, name)
    for message, names in {
        "LayerParameter": "quant_param binary_convolution_param binary_inner_product_param "
        "labelsequence_accuracy_param connectivity_mode",
        "QuantParameter": "forward_func backward_func clip_thr negative_slope thrs centers",
        "BinaryConvolutionParameter": "use_alpha use_binarization",
        "BinaryInnerProductParameter": "use_alpha use_binarization",
        "LabelsequenceAccuracyParameter": "blank_label",
        "ContinuationIndicatorParameter": "axis",
        "NoiseParameter": "all_effects",
        "DistortionParameter": "prob brightness contrast hue saturation random_order all_effects",
        "NonMaximumSuppressionParameter": "soft_nms theta",
        "ConvolutionParameter": "conv_mode",
        "ParamSpec": "regularization_type breadth_decay_mult kernel_shape_decay_mult "
        "block_group_lasso force_mult force_regularize",
        "BlockGroupLassoSpec": "xdimen ydimen block_decay_mult",
        "ForceRegular": "xdim ydim multi",
        "SolverParameter": "breadth_decay kernel_shape_decay block_group_decay prune_threshold "
        "force_decay force_type force_decay_type force_iter measure_threshold "
        "max_threshold_factor winograd_sparsity_factor",
    }.items()
    for name in names.split()
}
"""Those of HWGQ, crnn.caffe, deepdetect, SSL and SkimCaffe."""
OWN |= {
    (message, name)
    for message, names in {
        "LayerParameter": "pad_param squeeze_param space_to_batch_nd_param "
        "batch_to_space_nd_param depth_to_space_param space_to_depth_param resize_bilinear_param "
        "resize_nearest_neighbor_param upsample_darknet_param mul_param",
        "BNParameter": "icnet",
        "BatchToSpaceNDParameter": "block_shape crops",
        "BlocksParameter": "block_size data_format",
        "ConvolutionParameter": "pad_type pad_l pad_r pad_t pad_b",
        "MulParameter": "mul_shape",
        "PadParameter": "paddings constant_values",
        "PoolingParameter": "pad_type pad_l pad_r pad_t pad_b",
        "ReLUParameter": "relu6",
        "ResizingParameter": "align_corners output_height output_width data_format scale_height "
        "scale_width half_pixel_centers pytorch_half_pixel half_pixel_onnx",
        "SpaceToBatchNDParameter": "block_shape paddings",
        "SqueezeParameter": "axis",
        "UpsampleDarknetParameter": "stride",
    }.items()
    for name in names.split()
}
"""Those of Synopsys."""
OWN |= {("ResizeParameter", name) for name in ("center_object", "max_angle", "multiscale")}
OWN |= {("RReLUParameter", "lb"), ("RReLUParameter", "ub")}
"""ducha-aiki's."""
OWN |= {("ConvolutionParameter", name) for name in ("hole", "hole_h", "hole_w")}
OWN |= {("SeLuDropoutParameter", name) for name in ("dropout_ratio", "alpha")}
OWN |= {("SeLuParameter", name) for name in ("lambda", "alpha")}
OWN |= {("LayerParameter", name) for name in ("selu_dropout_param", "selu_param")}
OWN |= {("V1LayerParameter", "interp_param"), ("LayerParameter", "denseblock_param")}
OWN |= {
    ("DenseBlockParameter", name)
    for name in (
        *("numTransition", "initChannel", "growthRate", "pad_h", "pad_w", "filter_H", "filter_W"),
        *("conv_verticalStride", "conv_horizentalStride", "Filter_Filler", "BN_Scaler_Filler"),
        *("BN_Bias_Filler", "gpuIdx", "use_dropout", "dropout_amount", "use_BC"),
        *("BC_ultra_space_efficient", "workspace_MB", "moving_average_fraction"),
    )
}
"""caffe_ocr's."""
OWN |= {(message, "strict_dim") for message in ("LayerParameter", "V1LayerParameter")}
OWN |= {
    (message, f"{name}_shape")
    for message in ("ConvolutionParameter", "PoolingParameter")
    for name in ("pad", "kernel", "stride")
}
"""DeepLab's and video-caffe's."""
OWN |= {
    ("Pooling3DParameter", name)
    for name in (
        *(f"{what}_{axis}" for what in ("pad", "kernel", "stride") for axis in "lhw"),
        "global_pooling",
    )
}
"""P3D's."""
OWN |= {
    ("PriorBoxParameter", name) for name in ("denser_prior_boxes", "faceboxes", "height", "width")
}
OWN |= {("ParameterParameter", "filler")}
"""TextBoxes++'s, Synopsys' and OpenVINO's."""
OWN |= {(f"{name}Parameter", "objectness_score") for name in ("DetectionOutput", "MultiBoxLoss")}
"""RefineDet's."""
OWN |= {
    (message, name)
    for message, names in {
        "LayerParameter": "roi_warping_param mask_resize_param",
        "ROIWarpingParameter": "pooled_h pooled_w spatial_scale",
        "MaskResizeParameter": "output_height output_width factor_height factor_width",
    }.items()
    for name in names.split()
}
"""Those of MNC."""
OWN |= {
    (message, name)
    for message, names in {
        "LayerParameter": "gradient_scaler_param",
        "GradientScalerParameter": "lower_bound upper_bound alpha max_iter threshold_iter",
        "V1LayerParameter": "dense_crf_param mat_write_param",
        "SolverParameter": "show_pr",
        "UpsampleParameter": "height_scale width_scale mode",
    }.items()
    for name in names.split()
}
"""Those of domain-adversarial forks, DeepLab and yolov5_caffe."""
OWN |= {("LayerParameter", "target_units"), ("TargetUnits", "mean"), ("TargetUnits", "std")}
"""Those that only caffepy writes."""
OTHER_TYPE = {("UpsampleParameter", "scale"): "int32"}
"""SegNet's is uint32."""
NOT_TAKEN = {
    "AnnotatedDatum.AnnotationType",
    "EltwiseParameter.EltwiseOp",
    "PoolingParameter.PoolMethod",
}
"""Enums whose values in forks no code heeds."""


def test_there_are_no_other_fields() -> None:
    expected = {
        (row["message"], row["field"])
        for row in rows("caffe_wire.tsv") + expected_nvcaffe() + renumbered()
    }
    assert set(FIELDS) - expected - set(of_forks()) == OWN


def test_fields_of_forks_have_their_number_or_one_of_ours() -> None:
    caffe = {
        (row["message"], row["field"])
        for row in rows("caffe_wire.tsv") + expected_nvcaffe() + renumbered()
    }
    for key, found in of_forks().items():
        if key in caffe or found[0]["type"] == "enum value":
            continue
        field = as_row(key[0], FIELDS[key])
        assert int(field["number"]) >= 30000 or field["number"] in {r["number"] for r in found}, key
        kind = field["type"].rpartition(".")[2]
        assert kind in {OTHER_TYPE.get(key, r["type"].rpartition(".")[2]) for r in found}, key


def test_enums_are_those_of_the_tables() -> None:
    removed = "removed_in_nv"
    expected = rows("caffe_enums.tsv") + [
        r for r in rows("nvcaffe_extra_enums.tsv") if r["change"] != removed
    ]
    ours = {
        (name, value.name, str(value.number))
        for name, enum in ENUMS.items()
        for value in enum.value
    }
    known = {(row["enum"], row["name"], row["number"]) for row in expected}
    assert known <= ours
    values = {key for key, found in of_forks().items() if found[0]["type"] == "enum value"}
    taken = {(enum, name) for enum, name in values if enum not in NOT_TAKEN}
    unnumbered = {("VideoDataParameter.Modality", name) for name in ("RGB", "FLOW")}
    unnumbered |= {("UnpoolingParameter.UnpoolMethod", name) for name in ("MAX", "AVE", "TILE")}
    unnumbered |= {
        ("PoolingParameter.PoolMethod", name) for name in ("AVE_EXC_PAD", "AVE_TF", "SUM")
    }
    unnumbered |= {("MultiStageMeanfieldParameter.Mode", "POTTS")}
    engine = "DeformableConvolutionParameter.Engine"
    unnumbered |= {(engine, name) for name in ("DEFAULT", "CAFFE", "CUDNN")}
    engine = "PoolingNDParameter.Engine"
    unnumbered |= {(engine, name) for name in ("DEFAULT", "CAFFE", "CUDNN")}
    attention = "PointwiseSpatialAttentionParameter.PSAType"
    unnumbered |= {(attention, name) for name in ("COLLECT", "DISTRIBUTE")}
    mode = "LayerParameter.ConnectivityMode"
    kinds = ("CONNECTED", "DISCONNECTED_ELTWISE", "DISCONNECTED_GRPWISE")
    unnumbered |= {(mode, name) for name in kinds}
    mode = "ConvolutionParameter.ConvMode"
    kinds = ("LOWERED_GEMM", "LOWERED_CCNMM", "DIRECT_SCONV", "DIRECT_DCONV")
    unnumbered |= {(mode, name) for name in kinds}
    unnumbered |= {("ReductionParameter.ReductionOp", "TOPK")}
    unnumbered |= {("UpsampleParameter.UpsampleOp", name) for name in ("NEAREST", "BILINEAR")}
    own_types = (
        "UNPOOLING",
        "MULTI_STAGE_MEANFIELD",
        "CROP",
        "IMAGE_SEG_DATA",
        "INTERP",
        "DENSE_CRF",
        "MAT_WRITE",
        "SEG_ACCURACY",
    )
    unnumbered |= {("V1LayerParameter.LayerType", name) for name in own_types}
    unnumbered |= {("V1LayerParameter.LayerType", name) for name in C3D.split()}
    assert {(enum, name) for enum, name, _ in ours - known} - unnumbered == taken - {
        (enum, name) for enum, name, _ in known
    }


def test_messages_can_be_pickled() -> None:
    net = caffe_pb2.NetParameter(name="net")
    assert pickle.loads(pickle.dumps(net)) == net


def test_import_is_light_and_warns_of_nothing() -> None:
    code = "import sys, caffepy.proto.text; sys.exit('numpy' in sys.modules)"
    subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT, check=True)


def test_generated_code_is_that_of_the_schema(tmp_path: Path) -> None:
    if importlib.util.find_spec("grpc_tools") is None:
        pytest.skip("grpcio-tools is not installed")
    command = [
        "-m",
        "grpc_tools.protoc",
        "-I.",
        f"--python_out={tmp_path}",
        f"--pyi_out={tmp_path}",
    ]
    subprocess.run([sys.executable, *command, "caffepy/proto/caffe.proto"], cwd=ROOT, check=True)
    for name in ("caffe_pb2.py", "caffe_pb2.pyi"):
        generated = (tmp_path / "caffepy" / "proto" / name).read_text()
        committed = (ROOT / "proto" / name).read_text()
        if version(generated) != version(committed):
            pytest.skip(
                f"grpcio-tools generates for protobuf {version(generated)}, committed is {version(committed)}"
            )
        assert generated == committed, f"run protoc again: {name} is not what caffe.proto gives"


def version(generated: str) -> str | None:
    found = re.search(r"^# Protobuf Python Version: (.*)$", generated, re.MULTILINE)
    return found and found[1]
