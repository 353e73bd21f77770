"""Fields, enum values and layer types that well-known forks of Caffe have and caffepy lacks, by
fork; and fields of forks that are ignored.
"""

from caffepy.proto.caffe_pb2 import LayerParameter

_FIELDS = {
    "Intel Caffe": {
        "BatchNormParameter": "stats_batch_size relu",
        "ConvolutionParameter": "relu negative_slope coeff fusion_type",
        "DataParameter": "side",
        "FillerParameter": "scale",
        "ImageDataParameter": "min_height min_width",
        "InnerProductParameter": "relu negative_slope",
        "LayerParameter": "split_param",
        "PoolingParameter": "pad_3d kernel_size_3d stride_3d avg_include_pad axis",
        "SolverParameter": "disabled_update",
        "TransformationParameter": "random_resize_param random_aspect_ratio_param flow bgr2rgb pad",
    },
    "MobileNet-YOLO": {
        "TransformationParameter": "enable_classf_aug min_scaling_factor max_scaling_factor "
        "max_rotation_angle contrast_brightness_adjustment smooth_filtering min_contrast "
        "max_contrast max_brightness_shift max_smooth max_color_shift min_side_min min_side_max "
        "min_side apply_probability cvt_bgr2rgb",
    },
    "YOLO for Caffe": {
        "LayerParameter": "region_param",
        "DetectionOutputParameter": "classes",
    },
    "happynear": {
        "ConvolutionParameter": "shape_offset",
        "ImageDataParameter": "face_transform max_shear_ratio max_aspect_ratio max_rotate_angle "
        "min_random_scale max_random_scale max_random_shift face_mirror face_point_num "
        "balance_class balance_by label_cut_start label_cut_end",
        "MemoryDataParameter": "transpose",
        "PoolingParameter": "blobs_lr blobs_a_min",
        "SoftmaxParameter": "hard_ratio class_weight hard_mining_label cutting_point "
        "label_smooth_factor",
        "SolverParameter": "clamp_weights_lower clamp_weights_upper clip_weights",
        "TransformationParameter": "center_crop erase_ratio scale_min scale_max aspect_min "
        "aspect_max",
    },
    "deepdetect": {"TransformationParameter": "geometry_param"},
    "Domain guided dropout": {"DataParameter": "shuffle_pool_size"},
    "JULE": {"LayerParameter": "graphlinkage_loss_param"},
    "RRD": {"LayerParameter": "orn_param"},
    "R-C3D": {"ROIPoolingParameter": "pooled_l"},
    "Up-Down-Captioner": {"LayerParameter": "beam_search_param", "LSTMParameter": "num_cells"},
    "MaskYolo": {"LayerParameter": "roi_gen_param", "TransformationParameter": "resize_w resize_h"},
    "autocolorize": {"LayerParameter": "extended_image_data_param"},
    "FPGA Caffe": {"LayerParameter": "xcl_param xcl_name"},
    "OpenPose's training": {"LayerParameter": "op_transform_param"},
    "SPP_net": {"SolverParameter": "vstep_lr"},
    "pose_action_caffe": {
        "LayerParameter": "random_image_data2_param is_disp_info extract_primary_param "
        "coord_to_bbox_masks_param copy_postfix_name crop_patch_from_max_feature_position_param",
        "ResizeParameter": "height_fac",
    },
    "channel-pruning": {"ImageDataParameter": "new_dim bicubic"},
    "SegAware": {"LayerParameter": "deletebottom deletetop"},
    "Stochastic quantization": {"ConvolutionParameter": "sq"},
    "What's the Point": {"LossParameter": "is_siftflow ignore_constraint normalize_objectness"},
    "DeepSkeleton": {"LayerParameter": "rescale_param"},
    "Force regularization": {"LayerParameter": "sparsify_param"},
    "HashNet": {"ImageDataParameter": "label_dim"},
    "naibaf7's": {
        "ConvolutionParameter": "fuse_type",
        "MemoryDataParameter": "dim",
        "PoolingParameter": "dilation",
    },
    "video_triplet": {"ImageDataParameter": "pair_size"},
    "PSPNet": {
        "BatchNormParameter": "update_global_stats",
        "ImageDataParameter": "ignore_label label_type",
        "TransformationParameter": "scale_factors crop_width crop_height",
    },
    "FlowNet2": {
        "DataParameter": "limit_samples preselection_file preselection_label range_start "
        "range_end rand_permute rand_permute_order rand_permute_seed slice_point encoding "
        "subtract permute_every_iter block_size",
        "FillerParameter": "diag_val",
        "LayerParameter": "coeff_schedule_param reshape_every_iter",
    },
    "Spatial Transformer": {"FillerParameter": "file"},
    "Temporal Segment Networks": {
        "LayerParameter": "seg_data_param",
        "TransformationParameter": "fix_crop more_fix_crop multi_scale scale_ratios max_distort "
        "is_flow",
        "VideoDataParameter": "num_segments modality name_pattern",
    },
    "CaffeOnSpark": {
        "LayerParameter": "cos_data_param",
        "MemoryDataParameter": "source dataframe_format dataframe_column_select image_encoded",
    },
    "Frcnn": {"WindowDataParameter": "config"},
    "OpenVINO": {
        "LayerParameter": "scale_filter_param",
        "DetectionOutputParameter": "input_height input_width",
    },
    "TextBoxes++": {
        "DetectionOutputParameter": "use_polygon",
        "MultiBoxLossParameter": "use_polygon",
    },
    "caffe-yolov2": {"DetectionOutputParameter": "coords"},
    "Sophgo": {"TransposeParameter": "order"},
    "an early Caffe (pull request 190)": {"SolverParameter": "stepearly"},
    "Deformable ConvNets": {"LayerParameter": "deformable_psroi_pooling_param"},
    "VPGNet": {"LayerParameter": "tiling_param drive_data_param"},
    "ducha-aiki's": {
        "NoiseParameter": "convert_to_ycrcb",
        "ResizeParameter": "min_sz",
    },
    "caffe-tvg": {
        "LayerParameter": "image_label_data_param box_term_param shape_term_param "
        "instance_id_param transfer_param iou_accuracy_param",
        "MultiStageMeanfieldParameter": "detection_potentials_enabled detection_dat_input_dir "
        "train_dataset_size detection_dat_check_enabled detection_potentials_max_score "
        "detection_potentials_epsilon detection_x_weights_str detection_y_weights_str "
        "spatial_filter_weights_str bilateral_filter_weights_str ho_potentials_enabled "
        "ho_dat_input_dir ho_w_param_str ho_num_layers ho_w2_param_str ho_w2_enabled force_cpu "
        "is_no_class_weights",
        "TransformationParameter": "invalid_detection_mode",
    },
    "LocNet": {"LayerParameter": "region_pooling_param"},
    "RoomNet for Caffe": {"LayerParameter": "is_test", "HeatmapDataParameter": "scale_h scale_w"},
    "caffe-pose": {"HeatmapDataParameter": "sigma"},
    "MyCaffe": {
        "GRNParameter": "input_dim hidden_dim output_dim context_dim dropout_ratio batch_first "
        "axis activation weight_filler bias_filler",
        "TransformationParameter": "color_order use_image_mean use_imagedb_mean",
        "InnerProductParameter": "enable_noise",
        "RecurrentParameter": "engine",
        "LayerParameter": "freeze_learning",
    },
    "Deep supervised hashing": {"LayerParameter": "hashing_loss_param"},
    "Person search": {"LayerParameter": "labeled_matching_param"},
    "Arcface for Caffe": {
        "LayerParameter": "combined_margin_param cosin_add_m_param adacos_add_m_scale_param",
    },
    "Xlearn": {"LayerParameter": "jmmd_param"},
    "caffe-spn": {"LayerParameter": "gaterecurrent_param gaterecurrent2dnoind_param roi_param"},
    "CCNN": {"LayerParameter": "densecrf_param"},
    "Textspotter": {"LayerParameter": "point_bilinear_param"},
    "3D-Caffe": {"LayerParameter": "mhd_data_param"},
    "HeartSeg": {"TransformationParameter": "crop_size_l"},
    "R*CNN": {"MILParameter": "context_per_roi"},
    "DSS": {"ImageDataParameter": "normalize"},
    "DeepLab": {
        "ImageDataParameter": "has_label",
        "SoftmaxLossParameter": "weight_source",
    },
    "S2VT": {"EltwiseParameter": "coeff_blob"},
    "ddtm's": {"DataParameter": "cursor"},
    "Synopsys": {
        "PriorBoxParameter": "tf keras yx_order",
        "BatchNormParameter": "add_eps_before_sqrt",
        "DetectionOutputParameter": "no_permute ratio_permute tflite_detection",
        "ReLUParameter": "maximum minimum",
        "TransformationParameter": "caffe_yolo",
    },
    "ENet": {"DenseImageDataParameter": "label_divide_factor"},
    "steganalysis for Caffe": {
        "LayerParameter": "image_data_steganalysis_jpeg_dct_param",
        "SolverParameter": "use_polyak",
    },
    "Label85": {"TransformationParameter": "rand_shift"},
    "Caffe_action": {"VideoDataParameter": "stride_tmp num_views seq_length rep_label"},
    "IncReg": {"SolverParameter": "prune_method", "LayerParameter": "prune_param"},
    "cell_counting": {"SoftmaxParameter": "pos_cid"},
    "SSD_windows_caffe": {"AnnotatedDataParameter": "config"},
    "DRML": {"ImageDataParameter": "multilabel_num"},
    "98-point face alignment": {
        "TransformationParameter": "pad_ratio",
        "LayerParameter": "weight_euclidean_loss_param",
    },
    "caffe_colorizer": {"ParamSpec": "param_propagate_down"},
    "e2e_face": {"HDF5DataParameter": "scale"},
    "Person re-identification by P2S": {"TransformationParameter": "crop_size_h"},
    "CWIC": {"ConvolutionParameter": "constrain"},
    "convLSTM_WTA": {"LayerParameter": "spatial_wta_param lstm_debug_param"},
    "FRD": {"LayerParameter": "output_decay_param"},
    "another FaceBoxes": {"PriorBoxParameter": "fixed_size"},
    "binarization_2017": {
        "SolverParameter": "monitor_test",
        "LayerParameter": "image_transform_param",
    },
    "DOOBNet": {"ImageDataParameter": "data_type"},
    "JigsawPuzzleSolver": {"TransformationParameter": "hash_file siamese_size"},
    "L-GM loss": {"HDF5DataParameter": "mirror", "LayerParameter": "bof_param"},
    "caffe_train of yuqj1991": {
        "DetectionOutputParameter": "bias_scale nms_thresh",
        "AnnotatedDataParameter": "crop_type yoloformat up_prob data_anchor_sampler",
        "ImageDataParameter": "sample_num",
        "TransformationParameter": "resize_param_yolo",
        "LayerParameter": "use_ctc_loss",
    },
    "human parsing of AIROBOTAI": {
        "ImageDataParameter": "future_scale",
        "SolverParameter": "layer_l1",
        "NetParameter": "RSlayer rslayer",
        "ConvolutionParameter": "filter_stride",
    },
    "Hanyang_SSD": {"BatchSampler": "merged_data"},
    "Learned activation functions": {"SolverParameter": "momentum_change_steps max_momentum"},
    "caffecode of Charleen777": {"TransposeParameter": "transposetype"},
    "3dnormal_joint_pose": {"SolverParameter": "model_1 model_2"},
    "AdvKin": {"LayerParameter": "kernel_loss_param"},
    "Active Convolution": {"LayerParameter": "aconv_param"},
    "face_alignment of CamlinZ": {"ImageDataParameter": "rate_height"},
    "Pedestrian-Attribute-Recognition": {"SPPParameter": "fineness_h"},
    "DRT": {"ConvolutionParameter": "mylayerone mylayertwo mylayerthird mylayerfourth"},
    "LSTM Pose Machines": {"TransformationParameter": "stride"},
    "TransferNet": {
        "SolverParameter": "encoder_net",
        "ImageDataParameter": "target",
        "ScaleParameter": "scale_factor",
    },
}
"""Fields that no code heeds, though the schema may have them: a net that has one is refused, where
it is read, or in the settings of data when its layer is made.
"""

_DATA = frozenset(
    f"{name}Parameter"
    for name in ("Transformation", "Data", "DenseImageData", "ImageData", "MemoryData", "VideoData")
)
"""Messages of data: nets with other data in their place need not heed them."""

_HEEDED = {
    "DenseImageData": "label_divide_factor",
    "ImageLabelmapData": "normalize",
    "ImageSegData": "ignore_label label_type has_label scale_factors crop_width crop_height",
}
"""Those of these fields that a layer type of forks heeds."""

_IGNORED = {
    "AccuracyParameter": "use_log",
    "APLParameter": "save_mem",
    "BNParameter": "icnet",
    "BatchNormParameter": "use_weight_bias bias_term filler",
    "ConcatParameter": "engine per_fla_fuse",
    "ConvolutionParameter": "conv_algorithm conv_mode",
    "DataParameter": "disk_reader_threads verbose huge_video_dataset shared_file_system",
    "ImageDataParameter": "shared_file_system",
    "DenseBlockParameter": "gpuIdx workspace_MB BC_ultra_space_efficient",
    "EltwiseParameter": "engine",
    "InnerProductParameter": "engine",
    "LayerParameter": "strict_dim engine multinode mn_activation_param mn_grad_compress_param "
    "quantization_param visualise visualise_channel",
    "HeatmapDataParameter": "num_channels crop_meanfile",
    "NetParameter": "engine compile_net_state multinode bn_stats_batch_size mem_param richness",
    "LabelMapItem": "label_id r g b",
    "MemoryDataParameter": "share_in_parallel",
    "ParamSpec": "breadth_decay_mult kernel_shape_decay_mult block_group_lasso "
    "force_mult force_regularize",
    "ReLUParameter": "fuse",
    "ResizeParameter": "center_object max_angle multiscale",
    "SolverParameter": "engine group_id richness measure_threshold force_type force_decay_type "
    "force_iter max_threshold_factor show_pr",
    "TransformationParameter": "debug_params",
    "V1LayerParameter": "strict_dim",
}
"""Fields of forks that say nothing here: engines, quantization for deployment, tuning."""

_ENUM_VALUES = dict.fromkeys(
    ["DEF", "DEF_ALL", "DEF_ALL2", "DEF_ALL3", "DEF_ALL4", "LOWRES", "SORT"], "happynear"
)
_ENUM_VALUES |= dict.fromkeys(["MAT_READ", "UNIQUE_LABEL"], "DeepLab")
_ENUM_VALUES |= {"PIXELML": "CASENet", "IMAGEDB": "MyCaffe"}
_ENUM_VALUES |= {"FocalLoss": "SSD_windows_caffe", "FOCALLOSS": "XiongweiWu's SSD"}
_ENUM_VALUES |= dict.fromkeys(["COMPACT_DATA", "L2_LOSS"], "caffe-multilabel")
_ENUM_VALUES |= dict.fromkeys(["MULTILOGISTIC", "MULTILOGISTIC_LOSS"], "road_affordances")
_ENUM_VALUES |= dict.fromkeys(
    ["POSE_IMAGE_DATA", "RESIZE", "SIGMOID_LOSS", "NORM", "MULTI_SOFTMAX", "MULTI_SOFTMAX_LOSS"],
    "3dnormal_joint_pose",
)
_ENUM_VALUES |= dict.fromkeys(["IMAGE_LABEL_DATA", "CONVOLUTION_SK"], "Caffe_3D_FF")
_ENUM_VALUES |= dict.fromkeys(["ELTWISE_ACCURACY", "WINDOW_SEG_DATA"], "DeconvNet")
_ENUM_VALUES |= {"SELECT_SEG_BINARY": "DecoupledNet", "BIAS_CHANNEL": "DeepLab"}
_ENUM_VALUES |= dict.fromkeys(
    ["RESHAPE", "JOINT_IMAGE_DATA", "IMAGE_LOC_DATA"], "3dnormal_joint_pose"
)

_LAYERS = {
    "NVCaffe": "TRT",
    "Intel Caffe": "BoxData MnActivation",
    "PSPNet": "BiasChannel DomainTransform MatRead UniqueLabel",
    "C3D": "DownSampling VideoSegmentationData VideoWithVoxelTruthData VolumeData VoxelCustomLoss",
    "FlowNet": "BlackAugmentation CustomData DataAugmentation FlowAugmentation "
    "GenerateAugmentationParameters",
    "MobileNet-YOLO": "AssistedExcitation",
    "caffe-tvg": "BoxFeatures ChannelSelect ImageLabelData ImageLabelDataClass "
    "ImageLabelDataIndex ImageLabelDataIndexDet",
    "Deformable ConvNets": "DeformablePSROIPooling",
    "VPGNet": "DriveData Tiling",
    "OpenPose": "Maximum Switch",
    "ducha-aiki's": "GatedMaxAve TreepoolKernel1L TreepoolMaxAve",
    "PWC-Net": "Warp",
    "Person search": "LabeledMatching UnlabeledMatching",
    "LocNet": "RegionPooling SigmoidCrossEntropyLossWeighted",
    "R*CNN": "MIL SigmoidCrossEntropyWeightedLoss Sum",
    "Spatial Transformer": "LocLoss PowerFile STLoss",
    "Bi-Real-net": "BinaryConvolutionTrain",
    "FaceMagnet": "Normalization",
    "OICR": "GlobalSumPooling OICRLayer",
    "OpenVINO": "DetectionOutputExtended ScaleFilter AnchorEmbeddingExtractor",
    "deepdetect": "SparseData",
    "Textspotter": "LSTMNew PointBilinear",
    "Synopsys": "ICNetSubgraph YoloV2Loss YoloV3Loss",
    "Frcnn": "FrcnnAnchorTarget FrcnnProposalTarget FrcnnRoiData",
    "CaffeOnSpark": "CoSData",
    "happynear": "GeneralContrastiveLoss GlobalLSEMargin MultiLabelImageData GeneralTripletLoss "
    "LabelSpecificRescale",
    "DeepSkeleton": "Rescale",
    "Force regularization": "Sparsify",
    "SkimCaffe": "ConvolutionReLU ConvolutionReLUPool ConvolutionReLUPoolLRN ReLUPooling "
    "InnerProductReLUDropout",
    "appearance-flow": "Transformation",
    "LiteFlowNet": "Grid",
    "Visual concepts": "MILData",
    "CaffeMex": "Mask",
    "pose_action_caffe": "CropPatchFromMaxFeaturePosition Resize ResizeWithMap ArgMaxC "
    "CoordsFromHeatMaps CoordsToBboxesMasks CrossBlobsSum ExtractPrimary "
    "HeatMapsFromCoordsOrigin LoadDataFromFile LoadImageData MultiSourcesImagesData "
    "PoseEuDistAccuracy PoseHeatMapLoss PosePDJAccuracy RandomImageData2 RescaledPoseCoords "
    "ScenePooling SecondaryRegionsOpScores SimilaryEuclideanLoss TorsoMaskFromCoords "
    "VisualizedHeatMaps2 VisualizedPoseCoords WriteDataIntoFile",
    "UntrimmedNet": "SequenceData",
    "AttentionMask": "SlidingWindowIndex ArgMaxAll ArgMaxMy CheckAtt ConvertIndices "
    "FlagsToIndices NormalizedSigmoidCrossEntropyLoss SplitIndices TileProduct",
    "caffe-spn": "CropHed SoftProposal SigmoidCrossEntropyLossHed",
    "CED": "PeriodicShuffle",
    "DDS": "MultiLabelLoss MultiLabelUnweightedLoss SigmoidCrossEntropyEdgeLoss "
    "SigmoidCrossEntropyEdgeUnweightedLoss",
    "SSDH": "K1_EuclideanLoss K2_EuclideanLoss",
    "HashNet": "PairwiseLoss ScaleTanH",
    "DRFN": "PwAttend",
    "DAVSOD": "ConvLSTM",
    "Hypercolumns": "HyperColumns ImageNormalData",
    "L-GM loss": "ClassDistance",
    "MyCaffe": "DataTemporal LstmAttention LstmSimple MemoryLoss TokenizedData AccuracyDecode "
    "AccuracyEncoding ChannelEmbedding DataSequence GateAddNorm Knn LayerNorm "
    "MultiheadAttentionInterp NLLLoss Normalization2 QuantileAccuracy QuantileLoss "
    "ReshapeTemporal SoftmaxCrossEntropy2Loss TransformerBlock VarSelNet",
    "RAM": "CarcontImageData",
    "SegAware": "Im2dist NormConv NormConvMeanfield TwoImageData ChannelReduce DistLoss "
    "Im2parity AttentionConvolution DynamicSampleConvolution",
    "SeqFace": "SmoothMarginInnerProduct DSALoss LSROLoss NormL2",
    "Stochastic quantization": "TernaryConvolution TernaryInnerProduct",
    "What's the Point": "SoftmaxWithLossExpectation SoftmaxWithLossObjectness",
    "INQ and DNS for Caffe": "DNSConvolution INQConvolution DNSInnerProduct INQInnerProduct",
    "YOLO for Caffe": "Region",
    "Temporal Segment Networks": "Scatter SegData SyncBN",
    "RoomNet for Caffe": "HeatmapVisualize",
    "steganalysis for Caffe": "BNConv BdctToSpatial ImageDataSteganalysisJpegDct QuantTruncAbs "
    "ReLURecover",
    "DOOBNet": "ClassBalancedSigmoidCrossEntropyAttentionLoss OrientationSmoothL1Loss",
    "road_affordances": "MultiLabelAccuracy Multilogistic MultilogisticWithLoss",
    "caffe-face-attributes": "GRIDPooling",
    "Label85": "FaceImage",
    "Caffe Light Field": "AbsLoss EdgeX Warping",
    "HDSR": "SequenceAccuracy",
    "Caffe_action": "BNData ConvolutionData FileData InnerProductAll PoolingNum SLLSTM "
    "VideoDataRNN VideoDataSeg VideoDataTest",
    "JigsawPuzzleSolver": "MergeData",
    "IncReg": "Reg_Col",
    "cell_counting": "WeightedSoftmaxWithLoss",
    "QaDWH": "ClassWiseProduct MultiLabelSoftmaxWithLoss",
    "LearnableDilationNetwork": "Duplicate Truncation",
    "EAST for Caffe": "DiceCoefLoss",
    "SemanticLabelingDemo": "LabelData Segmentation",
    "Ask, Attend and Answer": "MatrixProd WordSum",
    "Bag of tricks for Caffe": "Mixup SoftmaxCrossEntropyLoss",
    "DeepLogCORAL": "COVARIANCE MOVINGAVERAGE",
    "Quartet loss": "QuartetLoss",
    "FPCNet": "BReLU",
    "DRML": "MultiSigmoidCrossEntropyLoss MultilabelImageData Splice",
    "DRT": "Wtf Wtffourth Wtfsecond Wtfthird",
    "binarization_2017": "BilinearInterpolation DocData PR WeightedFmeasureLoss",
    "98-point face alignment": "ImageFloatData Noise WeightEuclideanLoss",
    "caffe-facialkp": "WeightedEuclideanLoss",
    "weightedGANpartialDA": "EntropyLoss WeightedGanLoss",
    "car_keypoint_caffe": "HeatmapData KeypointAcc KeypointL2Loss",
    "SVS": "L1LossKitti",
    "MaskYolo": "DecodeRois KpsBoxData MaskBoxData ROIAlignment RoiGen YoloLoss",
    "BBTXT": "BB3TXTBB BB3TXTData BB3TXTLoss BBTXTBB BBTXTData BBTXTLoss",
    "GGL": "SetLoss2 VarLoss",
    "Deep supervised hashing": "HashingLoss",
    "caffe_colorizer": "GANLoss",
    "OrdinalRegression": "MAE OrdinalRegressionLoss",
    "TransferNet": "EltwiseAccuracy FilterSum LinearSum SelectSegBinary SelectSrcTgkSegBinary",
    "e2e_face": "MarginSoftmaxLoss",
    "naibaf7's": "Affinity ConnectedComponent DataRandTransform MalisLoss MergeCrop",
    "RCC-loss": "RelevantLoss",
    "joint-regressor": "ConsistencyLoss ManhattanLoss",
    "caffe-rcnn-action-recognition": "MaskConvolution",
    "Person re-identification by P2S": "P2SLoss PS",
    "CWIC": "Dtow EntropyPack ImpMap KLDivLoss MTranspose Round",
    "3-D Faster R-CNN": "AnchorTarget BBoxOutput MHDRoiData RPNOutput",
    "convLSTM_WTA": "ConvLSTM ConvLSTMReLU SpatialConvWta SpatialWta",
    "SphereFace+": "InterClass",
    "SINet": "CAROIPooling Detection LabelSplit2 LabelSplit3 ROIFeatureSplit ROISplit "
    "SmoothL1Loss2 SoftmaxWithLoss2",
    "caffe_train of yuqj1991": "BatchNormScale CenterGridLoss CenterGridOutput CenterObjectLoss "
    "CenternetDetectionOutput CosinL2Normalize DetectionCcpdOutput FaceAttriEvaluate "
    "Identity2Verify LpEvaluate MultiBoxSSDLoss Rec_ccpd SampleTriplet SimpleNormalize "
    "YoloAnnotatedData Yolov3Detection Yolov3Loss",
    "CJS-CNN": "JSDLoss",
    "AlexNet with VReLU": "MinReLU",
    "AdvKin": "KernelLoss",
    "Active Convolution": "AConv AConvFast",
    "autocolorize": "BgrToMunsell SoftmaxKLDLoss SparseHistogramExtractor StripDecimals "
    "SparseHypercolumnExtractor UniformToHistogram",
    "video_triplet": "Norm RankHardLoss",
    "caffe_video_segmentation": "FlowWarping",
    "caffecode of Charleen777": "LstmUnit SuperpixelPooling ZerosData",
    "CharlesShang's": "Clustering",
    "SpatialTransformer of BraveApple": "Box SplitMerge",
}

_FILLERS = {
    "Intel Caffe": "gabor",
    "FlowNet2 or Synopsys": "diagonal",
    "happynear": "identity",
    "Spatial Transformer": "file",
    "caffe-tvg": "multicubic multilinear",
}


_SEVERAL = {
    ("SolverParameter", "device_id"): "further_device_id",
    ("PoolingParameter", "kernel_size"): "further_kernel_size",
    ("PoolingParameter", "stride"): "further_stride",
    ("PoolingParameter", "pad"): "further_pad",
    ("TransformationParameter", "resize_param"): "further_resize_param",
}
"""Fields that Caffe has once and a fork several times, and where the second and later ones go."""


def further(message: str, field: str) -> str | None:
    """The field for the second and later values of one that Caffe has once, or None."""
    return _SEVERAL.get((message, field))


def first_of(message: str, field: str) -> str | None:
    """The field of which this one has the second and later values, or None."""
    firsts = {(m, more): first for (m, first), more in _SEVERAL.items()}
    return firsts.get((message, field))


def fork_of_field(message: str, field: str) -> str | None:
    """The forks whose message of this name has the field, such as "PSPNet or SegNet", or None."""
    known = {fork: messages.get(message, "").split() for fork, messages in _FIELDS.items()}
    return " or ".join(fork for fork, fields in known.items() if field in fields) or None


def is_refused(message: str, field: str) -> bool:
    """True for a field of a fork with which no net is read."""
    return message not in _DATA and fork_of_field(message, field) is not None


def refused_setting(layer: LayerParameter) -> tuple[str, str] | None:
    """A field in a layer's settings of data that no code heeds, and its forks; None without one."""
    heeded = _HEEDED.get(layer.type, "").split()
    for setting, inner in layer.ListFields():
        if setting.message_type is not None and setting.message_type.name in _DATA:
            for field, _ in inner.ListFields():
                if field.name in heeded:
                    continue
                if fork := fork_of_field(setting.message_type.name, field.name):
                    return f"{setting.name} {field.name}", fork
    return None


def is_ignored(message: str, field: str) -> bool:
    """True for a field of a fork that says nothing here."""
    return field in _IGNORED.get(message, "").split()


def fork_of_value(name: str) -> str | None:
    """The fork that has this enum value, or None."""
    return _ENUM_VALUES.get(name)


def fork_of_layer(layer_type: str) -> str | None:
    """The forks that have this layer type, or None."""
    return " or ".join(fork for fork in _LAYERS if layer_type in _LAYERS[fork].split()) or None


def fork_of_filler(name: str) -> str | None:
    """The fork that has this filler, or None."""
    return next((fork for fork, names in _FILLERS.items() if name in names.split()), None)
