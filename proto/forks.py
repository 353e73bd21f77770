"""Fields, enum values and layer types that well-known forks of Caffe have and this schema lacks, by
fork.
"""

_FIELDS = {
    "NVCaffe": {
        "SolverParameter": "rampup_interval rampup_lr",
    },
    "Intel Caffe": {
        "BatchNormParameter": "use_weight_bias bias_term filler stats_batch_size relu",
        "ConcatParameter": "per_fla_fuse engine",
        "ConvolutionParameter": "relu negative_slope conv_algorithm coeff fusion_type",
        "DataParameter": "side",
        "EltwiseParameter": "engine",
        "FillerParameter": "scale",
        "ImageDataParameter": "min_height min_width",
        "InnerProductParameter": "engine relu negative_slope",
        "LayerParameter": "engine multinode mn_activation_param mn_grad_compress_param "
        "quantization_param split_param spatial_dropout_param",
        "LossParameter": "pre_fixed_normalizer",
        "NetParameter": "compile_net_state engine bn_stats_batch_size multinode",
        "PoolingParameter": "pad_3d kernel_size_3d stride_3d avg_include_pad",
        "ReLUParameter": "fuse",
        "ReshapeParameter": "pixelshuffler",
        "SolverParameter": "stagelr stageiter disabled_update engine warmup_iter warmup_start_lr "
        "local_lr_auto local_gw_ratio test_offset",
        "TransformationParameter": "random_resize_param random_aspect_ratio_param flow bgr2rgb",
    },
    "Fast R-CNN": {"LayerParameter": "roi_pooling_param smooth_l1_loss_param"},
    "R-FCN": {"LayerParameter": "psroi_pooling_param box_annotator_ohem_param"},
    "PSPNet": {
        "BatchNormParameter": "update_global_stats",
        "ImageDataParameter": "ignore_label label_type",
        "LayerParameter": "bn_param interp_param seg_accuracy_param dense_crf_param "
        "bias_channel_param adaptive_bias_channel_param domain_transform_param mat_read_param "
        "mat_write_param unique_label_param",
        "TransformationParameter": "scale_factors crop_width crop_height",
    },
    "SegNet": {
        "DropoutParameter": "sample_weights_test",
        "LayerParameter": "bn_param upsample_param dense_image_data_param",
        "LossParameter": "weight_by_label_freqs class_weighting",
    },
    "FlowNet": {
        "LayerParameter": "augmentation_param black_augmentation_param correlation_param "
        "l1_loss_param lpq_loss_param resample_param downsample_param flow_warp_param accum_param "
        "writer_param reader_param mean_param coeff_schedule_param reshape_every_iter",
    },
    "YOLO for Caffe": {
        "LayerParameter": "region_param region_loss_param reorg_param eval_detection_param "
        "yolov3_param yolo_detection_output_param yolov3_detection_output_param relu6_param",
    },
    "ShuffleNet for Caffe": {"LayerParameter": "shuffle_channel_param"},
    "Temporal Segment Networks": {
        "LayerParameter": "bn_param seg_data_param batch_reduction_param",
        "NetParameter": "mem_param",
        "SolverParameter": "group_id richness",
        "TransformationParameter": "fix_crop more_fix_crop multi_scale scale_ratios max_distort "
        "is_flow",
    },
}

_ENUM_VALUES = {"MKL2017": "Intel Caffe", "MKLDNN": "Intel Caffe"}

_LAYERS = {
    "NVCaffe": "Axpy DetectNetTransformation L1Loss TRT",
    "SSD": "AnnotatedData DetectionEvaluate DetectionOutput MultiBoxLoss Normalize Permute "
    "PriorBox VideoData",
    "Intel Caffe": "BoxData MnActivation SoftmaxWithLossOHEM SpatialDropout",
    "Fast R-CNN": "ROIPooling SmoothL1Loss",
    "R-FCN": "PSROIPooling BoxAnnotatorOHEM SmoothL1LossOHEM",
    "PSPNet": "BN BiasChannel DenseCRF DomainTransform ImageSegData Interp MatRead MatWrite "
    "SegAccuracy UniqueLabel",
    "SegNet": "BN DenseImageData Upsample",
    "FlowNet": "Accum BlackAugmentation ChannelNorm Correlation Correlation1D CustomData "
    "DataAugmentation Downsample FlowAugmentation FlowWarp GenerateAugmentationParameters L1Loss "
    "LpqLoss Mean NegReLU Resample",
    "YOLO for Caffe": "EvalDetection ReLU6 RegionLoss Reorg YoloDetectionOutput Yolov3 "
    "Yolov3DetectionOutput",
    "ShuffleNet for Caffe": "ShuffleChannel ConvolutionDepthwise DepthwiseConvolution",
    "Temporal Segment Networks": "BN BatchReduction Gather Scatter SegData SyncBN",
}


def fork_of_field(message: str, field: str) -> str | None:
    """The forks whose message of this name has the field, such as "PSPNet or SegNet", or None."""
    known = {fork: messages.get(message, "").split() for fork, messages in _FIELDS.items()}
    return " or ".join(fork for fork, fields in known.items() if field in fields) or None


def fork_of_value(name: str) -> str | None:
    """The fork that has this enum value, or None."""
    return _ENUM_VALUES.get(name)


def fork_of_layer(layer_type: str) -> str | None:
    """The forks that have this layer type, or None."""
    return " or ".join(fork for fork in _LAYERS if layer_type in _LAYERS[fork].split()) or None
