"""Every registered layer type is held to a numerical gradient and to an independent reference, or a
reason stands here.
"""

import dis
import inspect
import re
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from pkgutil import iter_modules
from types import CodeType

import numpy as np
import pytest
from google.protobuf import text_format

import caffepy.layer
from caffepy.layer import Layer, registry
from caffepy.ops import cpu
from caffepy.proto.caffe_pb2 import NetParameter

from .cases import NEURONS
from .harness import GOLDEN

HERE = Path(__file__).parent
TESTS = {
    str(path.relative_to(HERE)): path.read_text()
    for path in HERE.rglob("test_*.py")
    if path != Path(__file__)
}
# The cases of test_neuron.py stand in a table that it shares with other tests.
TESTS["test_neuron.py"] += " ".join(f'"{case}"' for case in NEURONS)
DATA = GOLDEN.parent / "data"
FAMILIES = [module.name for module in iter_modules(caffepy.layer.__path__)]

NO_GRADIENT = {
    "Accuracy": "counts",
    "ArgMax": "gives places",
    "BboxAccuracy": "measures, without a gradient",
    "BoxAnnotatorOHEM": "chooses, without a gradient",
    "CenterLoss": "its centres step towards the mean of a class, as its own test says",
    "DetectNetTransformation": "changes images and boxes, without a gradient",
    "DetectionAccuracy": "measures, without a gradient",
    "DetectionEvaluate": "measures, without a gradient",
    "DetectionGroupAccuracy": "measures, without a gradient",
    "DetectionGroupLoss": "its gradient is its fork's beyond its bounds, as its own test says",
    "DetectionLoss": "its gradient is its fork's beyond its bounds, as its own test says",
    "EvalDetection": "measures, without a gradient",
    "EuclideanLossHeatmap": "its gradient is its fork's, as its own test says",
    "FrcnnOutput": "chooses, without a gradient",
    "HardMining": "chooses, without a gradient",
    "DenseCRF": "is for nets that find, without a gradient, as there",
    "GradientScaler": "its gradient is reversed, as its own test says",
    "ImResize": "is for nets that find, without a gradient, as there",
    "MMDLoss": "its gradient is that of a mean, as its own test says",
    "MatWrite": "has no top",
    "Nms": "finds, without a gradient, as there",
    "DetectionOutput": "chooses, without a gradient",
    "CTCGreedyDecoder": "chooses, without a gradient",
    "ContinuationIndicator": "has no bottom",
    "LabelsequenceAccuracy": "counts",
    "Downsample": "cannot be differentiated, as in the fork",
    "Resample": "cannot be differentiated, as in the fork",
    "HDF5Output": "has no top; its backward leaves diffs alone, as its own test says",
    "Input": "has no bottom",
    "Parameter": "has no bottom; its gradient is the top's, as its own test says",
    "PSROIAlign": "its gradient is its fork's, as its own test says",
    "ROIWarping": "its gradient is its fork's, as its own test says",
    "PriorBox": "depends on sizes alone",
    "PriorBoxClustered": "depends on sizes alone",
    "Proposal": "chooses, without a gradient",
    "FrcnnProposal": "chooses, without a gradient",
    "ProposalTarget": "chooses, without a gradient",
    "RegionLoss": "its gradient is darknet's, as its own test says",
    "SegAccuracy": "counts",
    "SignedSqrt": "its gradient is its fork's, as its own test says",
    "Silence": "has no top; its gradient is 0, as its own test says",
    "Threshold": "is constant but for a step",
    "YoloDetectionOutput": "chooses, without a gradient",
    "SegmentationEvaluate": "measures, without a gradient",
    "YoloSeg": "its gradient is its fork's, as its own test says",
    "Yolov3": "its gradient is darknet's, as its own test says",
    "Yolov3DetectionOutput": "chooses, without a gradient",
}
# Types -> the test that holds them to a loop, to numpy or to the formula.
LOOPS = {
    **{name.split()[0]: "test_neuron.py::test_against_the_formula" for name in NEURONS},
    "Accuracy": "test_accuracy.py::test_accuracy_against_a_loop",
    "AngularMargin": "test_inner_product.py::test_a_resumed_run_goes_on_with_its_lambda",
    "ArgMax": "test_selection.py::test_argmax_against_sorting",
    "Add": "test_eltwise.py::test_repeated_operands",
    "Mul": "test_eltwise.py::test_repeated_operands",
    "BatchToSpaceND": "test_blocks.py::test_blocks_over_the_batch",
    "SpaceToBatchND": "test_blocks.py::test_blocks_over_the_batch",
    "DenseBlock": "test_dense_block.py::test_dense_block_against_a_loop",
    "DepthToSpace": "test_blocks.py::test_blocks_over_the_channels",
    "SpaceToDepth": "test_blocks.py::test_blocks_over_the_channels",
    "Pad": "test_shape.py::test_against_numpy",
    "Squeeze": "test_shape.py::test_against_numpy",
    "ResizeBilinear": "test_resize.py::test_resizing_of_tensorflow_against_a_loop",
    "ResizeNearestNeighbor": "test_resize.py::test_resizing_of_tensorflow_against_a_loop",
    "UpsampleDarknet": "test_resize.py::test_upsample_darknet",
    "Accum": "test_flow.py::test_accum_against_a_loop",
    "Axpy": "test_eltwise.py::test_axpy",
    "ChannelNorm": "test_flow.py::test_channel_norm",
    "Correlation": "test_flow.py::test_correlation_against_a_loop",
    "Correlation1D": "test_flow.py::test_correlation_along_rows",
    "Downsample": "test_flow.py::test_downsample_against_a_loop",
    "FlowWarp": "test_flow.py::test_flow_warp_against_a_loop",
    "LpqLoss": "test_flow.py::test_losses_against_numpy",
    "Mean": "test_flow.py::test_mean_of_values_and_of_a_file",
    "Resample": "test_flow.py::test_resample_against_a_loop",
    "BN": "test_batch_norm.py::test_bn_against_numpy",
    "BatchNorm": "test_batch_norm.py::test_batch_norm_normalizes_and_collects_statistics",
    "BatchReindex": "test_selection.py::test_against_numpy",
    "Bias": "test_normalization.py::test_scale_and_bias_against_numpy",
    "BoxAnnotatorOHEM": "test_detection_loss.py::test_the_hardest_boxes_are_kept",
    "CTCGreedyDecoder": "test_ctc.py::test_greedy_decoder_against_a_loop",
    "CTCLoss": "test_ctc.py::test_against_all_paths",
    "CtcLoss": "test_ctc.py::test_against_all_paths",
    "WarpCTCLoss": "test_ctc.py::test_against_all_paths",
    "ContinuationIndicator": "test_recurrent.py::test_indicators_of_whole_sequences",
    "CenterLoss": "test_metric_loss.py::test_center_loss_against_a_loop",
    "CReLU": "test_neuron.py::test_crelu",
    "Concat": "test_shape.py::test_against_numpy",
    "ContrastiveLoss": "test_loss.py::test_contrastive_loss_against_a_loop",
    "Convolution3D": "test_volumes.py::test_convolution_against_a_loop",
    "ConvolutionDepthwise": "test_convolution.py::test_depthwise_types_are_convolutions_in_groups",
    "Crop": "test_selection.py::test_against_numpy",
    "CuDNNBatchNorm": "test_batch_norm.py::test_batch_norm_under_its_other_name",
    "Deconvolution": "test_deconvolution.py::test_every_input_element_spreads_its_kernel",
    "Deconvolution3D": "test_volumes.py::test_deconvolution_is_the_transpose",
    "DepthwiseConv": "test_convolution.py::test_depthwise_types_are_convolutions_in_groups",
    "DepthwiseConvolution": "test_convolution.py::test_depthwise_types_are_convolutions_in_groups",
    "DetectionEvaluate": "test_detection.py::test_what_is_found_is_judged",
    "DetectionOutput": "test_detection.py::test_detections_against_a_loop",
    "Dropout": "test_dropout.py::test_dropout_keeps_the_share_and_the_mean",
    "Eltwise": "test_eltwise.py::test_against_a_loop",
    "Embed": "test_embed.py::test_looks_up_rows",
    "EuclideanLoss": "test_loss.py::test_euclidean_loss_against_a_loop",
    "Filter": "test_selection.py::test_against_numpy",
    "Flatten": "test_shape.py::test_against_numpy",
    "FocalLoss": "test_metric_loss.py::test_focal_loss_against_a_loop",
    "Gather": "test_selection.py::test_against_numpy",
    "HDF5Output": "test_hdf5_output.py::test_one_forward_gives_the_file_of_caffe",
    "HingeLoss": "test_loss.py::test_hinge_loss_against_a_loop",
    "Im2col": "test_deconvolution.py::test_im2col_times_the_weights_is_convolution",
    "InnerProduct": "test_inner_product.py::test_formula",
    "EltwiseAffine": "test_normalization.py::test_eltwise_affine_against_a_loop",
    "Insanity": "test_dropout.py::test_randomized_relu",
    "Interp": "test_resize.py::test_interp_against_a_loop",
    "Input": "test_shape.py::test_input_takes_its_shapes_and_keeps_what_a_user_makes_of_them",
    "L1Loss": "test_metric_loss.py::test_l1_loss_against_a_loop",
    "LRN": "test_normalization.py::test_lrn_across_against_a_loop",
    "LSTM": "test_recurrent.py::test_against_a_loop_over_two_batches",
    "LSTMUnit": "test_recurrent.py::test_unit_against_the_formula",
    "Local": "test_convolution.py::test_local_against_a_loop",
    "MVN": "test_normalization.py::test_mvn_against_numpy",
    "MultiBoxLoss": "test_multibox_loss.py::test_against_a_loop",
    "MultiBoxFocalLoss": "test_multibox_loss.py::test_against_a_loop",
    "BinaryConvolution": "test_quantized.py::test_binary_weights_against_a_loop",
    "BinaryInnerProduct": "test_quantized.py::test_binary_weights_against_a_loop",
    "ChannelScale": "test_eltwise.py::test_channel_scale",
    "LabelSpecificAdd": "test_margin.py::test_fixed_margin_against_a_loop",
    "LabelsequenceAccuracy": "test_ctc.py::test_whole_labels_against_a_loop",
    "Quant": "test_quantized.py::test_quant_against_a_loop",
    "DeformableConvolution": "test_deformable.py::test_against_a_loop",
    "ImResize": "test_pose.py::test_resized_against_a_loop",
    "DenseCRF": "test_meanfield.py::test_dense_crf_against_a_loop",
    "GradientScaler": "test_neuron.py::test_gradients_are_reversed_more_with_each_pass",
    "MatWrite": "test_mat_write.py::test_files_as_matlab_reads_them",
    "InnerDistance": "test_inner_product.py::test_inner_distance_against_numpy",
    "Nms": "test_pose.py::test_peaks_against_a_loop",
    "LargeMarginInnerProduct": (
        "test_inner_product.py::test_large_margin_inner_product_against_the_paper"
    ),
    "MarginInnerProduct": "test_inner_product.py::test_margin_inner_product_against_the_paper",
    "BboxAccuracy": "test_field_loss.py::test_bbox_accuracy",
    "BoxOutput": "test_cascade.py::test_box_output",
    "BoxGroupOutput": "test_cascade.py::test_box_group_output",
    "DetectNetTransformation": "test_detectnet.py::test_detectnet_maps",
    "DetectionAccuracy": "test_field_loss.py::test_detection_accuracy",
    "DetectionLoss": "test_field_loss.py::test_detection_loss",
    "DetectionGroupAccuracy": "test_group_loss.py::test_detection_group_accuracy",
    "DetectionGroupLoss": "test_group_loss.py::test_detection_group_loss",
    "FrcnnOutput": "test_cascade.py::test_frcnn_output",
    "HardMining": "test_cascade.py::test_hard_mining",
    "ProposalTarget": "test_field_loss.py::test_proposal_target_takes_all",
    "DecodeBBox": "test_cascade.py::test_decode_bbox",
    "ScaleRoute": "test_cascade.py::test_scale_route",
    "Lstm": "test_recurrent.py::test_lstm_of_ctpn_against_a_loop",
    "EuclideanLossHeatmap": "test_pose.py::test_heatmap_loss_against_numpy",
    "APL": "test_neuron.py::test_piecewise_linear_units_against_a_loop",
    "BatchReduction": "test_shape.py::test_batch_reduction_against_a_loop",
    "OuterProduct": "test_inner_product.py::test_outer_products_against_numpy",
    "SoftmaxWithCrossEntropyLoss": "test_loss.py::test_softmax_with_cross_entropy_against_numpy",
    "CompactBilinear": "test_bilinear.py::test_against_a_loop",
    "L2Normalize": "test_normalization.py::test_l2_normalize_against_numpy",
    "SignedSqrt": "test_neuron.py::test_signed_square_roots",
    "GRN": "test_normalization.py::test_norms_of_forks_against_numpy",
    "NormalizationL2": "test_normalization.py::test_norms_of_forks_against_numpy",
    "MultiChannelReweightedSigmoidCrossEntropyLoss": "test_edge_loss.py::test_against_a_loop",
    "MultiChannelSigmoidCrossEntropyLoss": "test_edge_loss.py::test_against_a_loop",
    "ReweightedSigmoidCrossEntropyLoss": "test_edge_loss.py::test_against_a_loop",
    "PoolingND": "test_volumes.py::test_pooling_against_a_loop",
    "GuidedDropout": "test_dropout.py::test_guided_dropout_keeps_what_is_above_the_threshold",
    "LiftedStructSimilaritySoftmaxLoss": (
        "test_metric_loss.py::test_lifted_structure_against_a_loop"
    ),
    "ModulatedDeformableConvolution": "test_deformable.py::test_modulated_against_a_loop",
    "PointwiseSpatialAttention": "test_attention.py::test_against_a_loop",
    "MMDLoss": "test_metric_loss.py::test_mmd_loss_against_a_loop",
    "MatMul": "test_inner_product.py::test_matmul_against_numpy",
    "MultiStageMeanfield": "test_meanfield.py::test_against_a_loop",
    "Normalize": "test_normalization.py::test_normalize_against_numpy",
    "MaskPooling": "test_roi_warping.py::test_mask_pooling",
    "MaskResize": "test_roi_warping.py::test_mask_resize",
    "ROIWarping": "test_roi_warping.py::test_against_a_loop",
    "PSROIAlign": "test_roi.py::test_psroi_align_against_a_loop",
    "PSROIPooling": "test_roi.py::test_psroi_pooling_against_a_loop",
    "Parameter": "test_shape.py::test_parameter_is_its_top_and_adds_its_gradient",
    "PassThrough": "test_yolo.py::test_pass_through_against_a_loop",
    "Flip": "test_shape.py::test_flipped_axes",
    "Permute": "test_shape.py::test_permuted_axes",
    "Reverse": "test_shape.py::test_reversed_axis",
    "Transpose": "test_shape.py::test_transposed_axes",
    "PriorBox": "test_prior_box.py::test_against_a_loop",
    "PriorBoxClustered": "test_prior_box.py::test_clustered_boxes_under_their_own_name",
    "Pooling3D": "test_volumes.py::test_pooling_against_a_loop",
    "Proposal": "test_proposal.py::test_proposals_against_a_loop",
    "FrcnnProposal": "test_proposal.py::test_proposals_against_a_loop",
    "Python": "test_python.py::test_a_net_with_python_layers_learns",
    "RNN": "test_recurrent.py::test_against_a_loop_over_two_batches",
    "ROIAlign": "test_roi.py::test_roi_align_against_a_loop",
    "ROIPooling": "test_roi.py::test_roi_pooling_against_a_loop",
    "RReLU": "test_dropout.py::test_randomized_relu",
    "Reduction": "test_shape.py::test_against_numpy",
    "RegionLoss": "test_yolo.py::test_region_loss_against_a_loop",
    "Reorg": "test_yolo.py::test_reorg_against_darknets_loop",
    "Reshape": "test_shape.py::test_against_numpy",
    "SPP": "test_pooling.py::test_spp_levels",
    "Scale": "test_normalization.py::test_scale_and_bias_against_numpy",
    "SigmoidCrossEntropyBalanceLoss": "test_loss.py::test_balanced_sigmoid_loss_against_a_loop",
    "SigmoidCrossEntropyLoss": "test_loss.py::test_sigmoid_loss_against_a_loop",
    "SegAccuracy": "test_accuracy.py::test_seg_accuracy_against_a_loop",
    "ShuffleChannel": "test_shape.py::test_shuffled_channels",
    "Silence": "test_shape.py::test_silence_gives_zero",
    "Slice": "test_shape.py::test_against_numpy",
    "SmoothL1Loss": "test_detection_loss.py::test_smooth_l1_loss_against_a_loop",
    "SmoothL1LossOHEM": "test_detection_loss.py::test_losses_of_boxes_against_a_loop",
    "SeLuDropout": "test_dropout.py::test_selu_dropout_keeps_mean_and_variance",
    "SeLUDropout": "test_dropout.py::test_selu_dropout_keeps_mean_and_variance",
    "Softmax": "test_loss.py::test_softmax_against_a_loop",
    "SoftmaxWithLossOHEM": "test_detection_loss.py::test_losses_of_boxes_against_a_loop",
    "SoftmaxWithLoss": "test_loss.py::test_softmax_loss_against_a_loop",
    "SpatialDropout": "test_dropout.py::test_spatial_dropout_drops_whole_planes",
    "ChannelDropout": "test_dropout.py::test_spatial_dropout_drops_whole_planes",
    "SpatialTransformer": "test_sampling.py::test_spatial_transformer_against_a_loop",
    "Split": "test_shape.py::test_against_numpy",
    "Tile": "test_shape.py::test_against_numpy",
    "Unpooling": "test_resize.py::test_unpooling_against_a_loop",
    "Upsample": "test_resize.py::test_upsample_against_a_loop",
    "TripletLoss": "test_metric_loss.py::test_triplet_loss_against_a_loop",
    "EvalDetection": "test_yolo.py::test_what_is_found_is_judged",
    "YoloDetectionOutput": "test_yolo.py::test_detections_against_a_loop",
    "SegmentationEvaluate": "test_yolo_seg.py::test_overlaps_of_classes_against_a_loop",
    "YoloSeg": "test_yolo_seg.py::test_yolo_seg_against_a_loop",
    "Yolov3": "test_yolo.py::test_yolov3_against_a_loop",
    "Yolov3DetectionOutput": "test_yolo.py::test_detections_against_a_loop",
}
# Types -> the test that holds them on a GPU to the CPU.
ON_GPU = {
    **{name.split()[0]: "test_neuron.py::test_on_a_gpu" for name in NEURONS},
    "ArgMax": "test_selection.py::test_argmax_on_gpu",
    "Add": "test_eltwise.py::test_repeated_operands_on_gpu",
    "Mul": "test_eltwise.py::test_repeated_operands_on_gpu",
    "BatchToSpaceND": "test_blocks.py::test_blocks_over_the_batch_on_gpu",
    "SpaceToBatchND": "test_blocks.py::test_blocks_over_the_batch_on_gpu",
    "DepthToSpace": "test_blocks.py::test_blocks_over_the_channels_on_gpu",
    "SpaceToDepth": "test_blocks.py::test_blocks_over_the_channels_on_gpu",
    "Pad": "test_shape.py::test_pad_on_gpu",
    "ResizeBilinear": "test_resize.py::test_resizing_of_tensorflow_on_gpu",
    "ResizeNearestNeighbor": "test_resize.py::test_resizing_of_tensorflow_on_gpu",
    "UpsampleDarknet": "test_resize.py::test_upsample_darknet_on_gpu",
    "SegmentationEvaluate": "test_yolo_seg.py::test_overlaps_of_classes_on_gpu",
    "YoloSeg": "test_yolo_seg.py::test_yolo_seg_on_gpu",
    "SigmoidCrossEntropyBalanceLoss": "test_loss.py::test_balanced_sigmoid_loss_on_gpu",
    "DenseBlock": "test_dense_block.py::test_dense_block_on_gpu",
    "SeLuDropout": "test_dropout.py::test_selu_dropout_on_a_gpu",
    "SeLUDropout": "test_dropout.py::test_selu_dropout_on_a_gpu",
    "Accum": "test_flow.py::test_on_gpu",
    "AngularMargin": "test_inner_product.py::test_margin_inner_product_on_gpu",
    "Axpy": "test_eltwise.py::test_axpy_on_gpu",
    "ChannelNorm": "test_flow.py::test_on_gpu",
    "Correlation": "test_flow.py::test_on_gpu",
    "Correlation1D": "test_flow.py::test_on_gpu",
    "Downsample": "test_flow.py::test_resampling_on_gpu",
    "FlowWarp": "test_flow.py::test_on_gpu",
    "LpqLoss": "test_flow.py::test_on_gpu",
    "Mean": "test_flow.py::test_on_gpu",
    "Resample": "test_flow.py::test_resampling_on_gpu",
    "BN": "test_batch_norm.py::test_bn_on_gpu",
    "BatchNorm": "test_fused_normalization.py::test_layers_on_a_gpu",
    "BatchReindex": "test_selection.py::test_batch_reindex_on_gpu",
    "BoxAnnotatorOHEM": "test_detection_loss.py::test_the_hardest_boxes_on_gpu",
    "CTCLoss": "test_ctc.py::test_on_gpu",
    "CenterLoss": "test_metric_loss.py::test_on_gpu",
    "CtcLoss": "test_ctc.py::test_on_gpu",
    "WarpCTCLoss": "test_ctc.py::test_on_gpu",
    "ContinuationIndicator": "test_recurrent.py::test_indicators_on_gpu",
    "Concat": "test_shape.py::test_on_gpu_in_all_formats",
    "CReLU": "test_neuron.py::test_crelu_on_a_gpu",
    "ContrastiveLoss": "test_loss.py::test_on_gpu",
    "Convolution": "test_fused_convolution.py::test_on_a_gpu",
    "Crop": "test_selection.py::test_crop_on_gpu_in_all_formats",
    "DetectionOutput": "test_detection.py::test_detections_on_gpu",
    "Dropout": "test_dropout.py::test_dropout_on_a_gpu_has_one_seed_and_counts_passes",
    "Eltwise": "test_eltwise.py::test_on_gpu_in_all_formats",
    "Embed": "test_embed.py::test_on_gpu",
    "FocalLoss": "test_metric_loss.py::test_on_gpu",
    "Gather": "test_selection.py::test_gather_on_gpu",
    "HingeLoss": "test_loss.py::test_on_gpu",
    "InfogainLoss": "test_loss.py::test_on_gpu",
    "InnerProduct": "test_fused_inner_product.py::test_the_same_numbers_on_a_gpu",
    "Insanity": "test_dropout.py::test_random_layers_on_a_gpu",
    "Interp": "test_resize.py::test_interp_on_gpu",
    "L1Loss": "test_metric_loss.py::test_on_gpu",
    "Local": "test_convolution.py::test_local_on_gpu",
    "BinaryConvolution": "test_quantized.py::test_binary_weights_on_gpu",
    "BinaryInnerProduct": "test_quantized.py::test_binary_weights_on_gpu",
    "ChannelScale": "test_eltwise.py::test_channel_scale_on_gpu",
    "LabelSpecificAdd": "test_margin.py::test_on_gpu",
    "LabelsequenceAccuracy": "test_ctc.py::test_whole_labels_on_gpu",
    "Quant": "test_quantized.py::test_quant_on_gpu",
    "DeformableConvolution": "test_deformable.py::test_on_gpu",
    "ImResize": "test_pose.py::test_on_gpu",
    "DenseCRF": "test_meanfield.py::test_dense_crf_on_gpu",
    "GradientScaler": "test_neuron.py::test_reversed_gradients_on_gpu",
    "InnerDistance": "test_inner_product.py::test_inner_distance_on_gpu",
    "Nms": "test_pose.py::test_on_gpu",
    "LargeMarginInnerProduct": "test_inner_product.py::test_margin_inner_product_on_gpu",
    "MarginInnerProduct": "test_inner_product.py::test_margin_inner_product_on_gpu",
    "Lstm": "test_recurrent.py::test_lstm_of_ctpn_on_gpu",
    "EuclideanLossHeatmap": "test_pose.py::test_heatmap_loss_on_gpu",
    "APL": "test_neuron.py::test_piecewise_linear_units_on_gpu",
    "BatchReduction": "test_shape.py::test_batch_reduction_on_gpu",
    "OuterProduct": "test_inner_product.py::test_outer_products_on_gpu",
    "SoftmaxWithCrossEntropyLoss": "test_loss.py::test_softmax_with_cross_entropy_on_gpu",
    "CompactBilinear": "test_bilinear.py::test_on_gpu",
    "L2Normalize": "test_normalization.py::test_l2_normalize_on_gpu",
    "SignedSqrt": "test_neuron.py::test_signed_square_roots_on_gpu",
    "GRN": "test_normalization.py::test_norms_of_forks_on_gpu",
    "NormalizationL2": "test_normalization.py::test_norms_of_forks_on_gpu",
    "MultiChannelReweightedSigmoidCrossEntropyLoss": "test_edge_loss.py::test_on_gpu",
    "MultiChannelSigmoidCrossEntropyLoss": "test_edge_loss.py::test_on_gpu",
    "ReweightedSigmoidCrossEntropyLoss": "test_edge_loss.py::test_on_gpu",
    "PoolingND": "test_volumes.py::test_pooling_on_gpu",
    "GuidedDropout": "test_dropout.py::test_guided_dropout_on_a_gpu",
    "LiftedStructSimilaritySoftmaxLoss": "test_metric_loss.py::test_on_gpu",
    "ModulatedDeformableConvolution": "test_deformable.py::test_modulated_on_gpu",
    "PointwiseSpatialAttention": "test_attention.py::test_on_gpu",
    "MatMul": "test_inner_product.py::test_matmul_on_gpu",
    "MultiStageMeanfield": "test_meanfield.py::test_on_gpu",
    "MultinomialLogisticLoss": "test_loss.py::test_on_gpu",
    "MultiBoxLoss": "test_multibox_loss.py::test_on_gpu",
    "MultiBoxFocalLoss": "test_multibox_loss.py::test_on_gpu",
    "Normalize": "test_normalization.py::test_normalize_on_gpu",
    "MaskPooling": "test_roi_warping.py::test_masks_on_gpu",
    "MaskResize": "test_roi_warping.py::test_masks_on_gpu",
    "ROIWarping": "test_roi_warping.py::test_on_gpu",
    "PSROIAlign": "test_roi.py::test_on_gpu",
    "PSROIPooling": "test_roi.py::test_on_gpu",
    "PassThrough": "test_yolo.py::test_pass_through_on_gpu",
    "Flip": "test_shape.py::test_flip_on_gpu",
    "Permute": "test_shape.py::test_permute_on_gpu",
    "Reverse": "test_shape.py::test_reverse_on_gpu",
    "Transpose": "test_shape.py::test_transpose_on_gpu",
    "Pooling": "test_pooling.py::test_on_gpu_in_all_formats",
    "Pooling3D": "test_volumes.py::test_pooling_on_gpu",
    "PriorBox": "test_prior_box.py::test_on_gpu",
    "PriorBoxClustered": "test_prior_box.py::test_on_gpu",
    "Proposal": "test_proposal.py::test_proposals_on_gpu",
    "FrcnnProposal": "test_proposal.py::test_proposals_on_gpu",
    "ROIAlign": "test_roi.py::test_on_gpu",
    "ROIPooling": "test_roi.py::test_on_gpu",
    "RReLU": "test_dropout.py::test_random_layers_on_a_gpu",
    "RegionLoss": "test_yolo.py::test_losses_on_gpu",
    "Reorg": "test_yolo.py::test_reorg_on_gpu",
    "Scale": "test_fused_normalization.py::test_layers_on_a_gpu",
    "ShuffleChannel": "test_shape.py::test_on_gpu_in_all_formats",
    "Silence": "test_shape.py::test_on_gpu_in_all_formats",
    "Slice": "test_shape.py::test_on_gpu_in_all_formats",
    "SmoothL1Loss": "test_detection_loss.py::test_on_gpu",
    "SmoothL1LossOHEM": "test_detection_loss.py::test_on_gpu",
    "SoftmaxWithLossOHEM": "test_detection_loss.py::test_on_gpu",
    "SpatialDropout": "test_dropout.py::test_random_layers_on_a_gpu",
    "ChannelDropout": "test_dropout.py::test_random_layers_on_a_gpu",
    "SpatialTransformer": "test_sampling.py::test_on_gpu",
    "Split": "test_shape.py::test_on_gpu_in_all_formats",
    "TripletLoss": "test_metric_loss.py::test_on_gpu",
    "Unpooling": "test_resize.py::test_unpooling_on_gpu",
    "Upsample": "test_resize.py::test_upsample_on_gpu",
    "Yolov3": "test_yolo.py::test_losses_on_gpu",
}
OPERATIONS = "its operations are held to the CPU's in tests/ops/cuda"
NO_GPU_CASES = {
    "Accuracy": OPERATIONS,
    "Bias": OPERATIONS,
    "Convolution3D": "is Convolution",
    "CuDNNBatchNorm": "is BatchNorm",
    "ConvolutionDepthwise": "is Convolution",
    "Deconvolution": OPERATIONS,
    "Deconvolution3D": "is Deconvolution",
    "DepthwiseConv": "is Convolution",
    "DepthwiseConvolution": "is Convolution",
    "EltwiseAffine": "is Scale",
    "EuclideanLoss": OPERATIONS,
    "Flatten": "computes nothing",
    "Im2col": "copies slices of arrays",
    "Input": "computes nothing",
    "LRN": OPERATIONS,
    "LSTM": OPERATIONS,
    "LSTMUnit": OPERATIONS,
    "MVN": OPERATIONS,
    "Parameter": "adds its gradient, no more",
    "RNN": OPERATIONS,
    "Reduction": "array arithmetic",
    "Reshape": "computes nothing",
    "Squeeze": "computes nothing",
    "SPP": "is made of Pooling layers",
    "SigmoidCrossEntropyLoss": OPERATIONS,
    "Softmax": OPERATIONS,
    "SoftmaxWithLoss": OPERATIONS,
    "Tile": "array arithmetic",
}
# Types without such a test, held to Caffe's figures; operations that they use are held to loops in
# tests/ops.
FIGURES_ONLY = {"Convolution", "InfogainLoss", "MultinomialLogisticLoss", "Pooling"}
# Golden cases whose gradients are all 0, since Caffe had left out their backward pass -> the test
# that holds these gradients to a loop.
NO_GRADIENT_OF_CAFFE = {
    "batch_reindex": "test_selection.py::test_gradients_against_a_loop",
    "embed": "test_embed.py::test_gradients_against_a_loop",
    "filter": "test_selection.py::test_gradients_against_a_loop",
}
# Types that feed the net from outside -> the test that states their batches or holds them to
# Caffe's.
REPLAY = "test_data.py::test_what_caffe_put_on_the_tops"
FORKS = "test_annotated_data.py::test_what_the_forks_put_on_the_tops"
BATCHES = {
    "AnnotatedData": FORKS,
    "DataHeatmap": "test_heatmap_data.py::test_the_middle_is_cut",
    "CPMData": "test_pose_data.py::test_changed_people_against_a_loop",
    "Data": REPLAY,
    "DenseImageData": FORKS,
    "DummyData": "test_data.py::test_dummy_random_values_are_fresh_and_seeded",
    "DetectionData": "test_cascade_data.py::test_against_a_loop",
    "EvalData": "test_cascade_data.py::test_images_to_be_judged",
    "HDF5Data": REPLAY,
    "ImageData": REPLAY,
    "ImageGtData": "test_field_data.py::test_against_a_loop",
    "ImageLabelmapData": "test_annotated_data.py::test_edges_against_a_loop",
    "ImageSegData": FORKS,
    "MemoryData": "test_data.py::test_memory_goes_around",
    "VideoData": "test_annotated_data.py::test_frames_of_a_video",
    "WindowData": "test_window_data.py::test_background_comes_before_foreground",
}


@cache
def figures():
    """Type -> names of the golden cases for it."""
    cases = {}
    for path in sorted(GOLDEN.glob("*.npz")):
        net = text_format.Parse(str(np.load(path)["prototxt"]), NetParameter())
        (it,) = (layer for layer in net.layer if layer.name == "it")
        cases.setdefault(it.type, []).append(path.stem)
    return cases


@cache
def batches_of_caffe():
    """The types of the golden cases that REPLAY replays: all that there are."""
    nets = (
        text_format.Parse(str(np.load(p)["prototxt"]), NetParameter()) for p in DATA.glob("*.npz")
    )
    return {layer.type for net in nets for layer in net.layer}


def names(text, type_):
    return re.search(rf'"{type_}[" ]', text)


def check_named(type_, where):
    """There is this test, in a file that names the type."""
    file, test = where.split("::")
    assert f"def {test}(" in TESTS.get(file, ""), f"{type_}: there is no {where}"
    assert names(TESTS[file], type_), f"{type_}: {file} does not name it"


def check_truth(type_, is_data):
    """AssertionError unless a type is held to something that is not its own code."""
    if is_data:
        assert type_ in BATCHES, f"{type_}: no test that states its batches in BATCHES"
        check_named(type_, BATCHES[type_])
        assert BATCHES[type_] != REPLAY or type_ in batches_of_caffe(), (
            f"{type_}: there are no batches of Caffe's"
        )
        return
    cases = figures().get(type_, [])
    text = "\n".join(TESTS.values())
    for case in cases:
        assert f'"{case}"' in text, f"{type_}: no test replays {case}.npz"
    assert type_ in LOOPS or (cases and type_ in FIGURES_ONLY), (
        f"{type_}: no test in LOOPS, and no figures of Caffe's"
    )
    if type_ in LOOPS:
        check_named(type_, LOOPS[type_])


COMPUTING = [name for name in registry if not registry[name].is_data]


@pytest.mark.parametrize("type_", COMPUTING)
def test_gradient_is_tested(type_):
    tested = [
        name for name, text in TESTS.items() if "check_gradient(" in text and names(text, type_)
    ]
    assert tested or type_ in NO_GRADIENT, (
        f"{type_}: no gradient test, and no reason in NO_GRADIENT"
    )


def test_gradients_of_caffe_say_something_or_a_loop_does():
    silent = set()
    for path in GOLDEN.glob("*.npz"):
        golden = np.load(path)
        diffs = [golden[key] for key in golden.files if key.startswith(("indiff", "paramdiff"))]
        if diffs and not any(diff.any() for diff in diffs):
            silent.add(path.stem)
    assert silent == set(NO_GRADIENT_OF_CAFFE)
    for case, test in NO_GRADIENT_OF_CAFFE.items():
        (type_,) = (type_ for type_, cases in figures().items() if case in cases)
        check_named(type_, test)


@pytest.mark.parametrize("type_", [name for name in COMPUTING if registry[name].on_gpu])
def test_a_gpu_is_held_to_the_cpu(type_):
    assert type_ in ON_GPU or type_ in NO_GPU_CASES, (
        f"{type_}: no test in ON_GPU, and no reason in NO_GPU_CASES"
    )
    if type_ in ON_GPU:
        check_named(type_, ON_GPU[type_])


@pytest.mark.parametrize("type_", list(registry))
def test_every_type_is_held_to_an_independent_reference(type_):
    check_truth(type_, registry[type_].is_data)


@pytest.mark.parametrize("is_data", [False, True])
def test_a_new_type_without_a_test_is_noticed(is_data, monkeypatch):
    with pytest.raises(AssertionError, match="New: no test"):
        check_truth("New", is_data)
    table = BATCHES if is_data else LOOPS
    monkeypatch.setitem(table, "New", "test_data.py::test_of_nothing")
    with pytest.raises(AssertionError, match=r"New: there is no test_data.py::test_of_nothing"):
        check_truth("New", is_data)
    monkeypatch.setitem(table, "New", REPLAY)
    with pytest.raises(AssertionError, match=r"New: test_data.py does not name it"):
        check_truth("New", is_data)


def test_reasons_are_for_types_that_exist():
    assert set(NO_GRADIENT) | set(LOOPS) | FIGURES_ONLY | set(BATCHES) <= set(registry)
    assert set(ON_GPU) | set(NO_GPU_CASES) <= set(registry)
    assert not set(LOOPS) & FIGURES_ONLY
    assert not set(ON_GPU) & set(NO_GPU_CASES)


def operations(code):
    """Return the names that code, with the functions in it, takes from `self.ops`."""
    steps = list(dis.get_instructions(code))
    used = {
        after.argval
        for before, after in pairwise(steps)
        if (before.opname, before.argval) == ("LOAD_ATTR", "ops")
        and after.opname in ("LOAD_ATTR", "LOAD_METHOD")
    }
    return used.union(*(operations(c) for c in code.co_consts if isinstance(c, CodeType)))


@pytest.mark.parametrize("name", FAMILIES)
def test_operations_of_the_layers_exist(name):
    code = find_spec(f"caffepy.layer.{name}").loader.get_code(f"caffepy.layer.{name}")
    assert not {f for f in operations(code) if not hasattr(cpu, f)}


def test_every_family_is_imported_with_the_package():
    program = (
        "import importlib, sys; from caffepy.layer import registry; known = {*registry}\n"
        "for name in sys.argv[1:]: importlib.import_module(f'caffepy.layer.{name}')\n"
        "assert {*registry} == known, {*registry} - known"
    )
    subprocess.run([sys.executable, "-c", program, *FAMILIES], check=True)


@pytest.mark.parametrize("type_", sorted(registry))
def test_a_layer_s_own_methods_are_not_those_that_a_net_calls(type_):
    """A recurrent layer once had a method of the name by which a step has data read ahead."""
    for name, method in inspect.getmembers(Layer, inspect.isfunction):
        if not name.startswith("_"):
            here = inspect.signature(getattr(registry[type_], name)).parameters
            assert list(here) == list(inspect.signature(method).parameters), name


@pytest.mark.parametrize("type_", list(registry))
def test_layers_are_documented(type_):
    assert registry[type_].__doc__
