"""Cases of the types of layers, which the tests of the CPU, of a GPU and of the export share.

A new layer that works on each element by itself needs a line in NEURONS, any other one in CASES.
"""

from collections.abc import Callable
from math import exp, log, tanh

IMAGE = (2, 6, 7, 5)
# Layers that map each element of the bottom to the same element of the top, a line a case: the type
# and what is special, the parameters, the formula of one element.
NEURONS: dict[str, tuple[str, Callable[[float], float] | None]] = {
    "AbsVal": ("", abs),
    "BNLL": ("", lambda x: log(1 + exp(x))),
    "Clip": ("clip_param { min: -0.5 max: 0.8 }", lambda x: max(-0.5, min(x, 0.8))),
    "NegReLU": ("", lambda x: min(x, 0)),
    "NegReLU leaky": ("relu_param { negative_slope: 0.1 }", lambda x: min(x, 0.1 * x)),
    "ELU": ("elu_param { alpha: 0.7 }", lambda x: x if x > 0 else 0.7 * (exp(x) - 1)),
    "ELU negative": ("elu_param { alpha: -0.7 }", lambda x: x if x > 0 else -0.7 * (exp(x) - 1)),
    "Exp": ("", exp),
    "Exp base 2": ("exp_param { base: 2 scale: 0.5 shift: 0.3 }", lambda x: 2 ** (0.3 + 0.5 * x)),
    "Log": ("log_param { shift: 9 }", lambda x: log(9 + x)),
    "Log base 10": (
        "log_param { base: 10 scale: 0.5 shift: 4 }",
        lambda x: log(4 + 0.5 * x) / log(10),
    ),
    "Log scaled": ("log_param { scale: 0.1 shift: 5 }", lambda x: log(5 + 0.1 * x)),
    "Power": ("", lambda x: x),
    "Power scale": ("power_param { scale: 2 }", lambda x: 2 * x),
    "Power shift": ("power_param { shift: -1 }", lambda x: x - 1),
    "Power linear": ("power_param { scale: 2 shift: 3 }", lambda x: 3 + 2 * x),
    "Power square": ("power_param { power: 2 scale: 2 shift: 3 }", lambda x: (3 + 2 * x) ** 2),
    "Power cube": ("power_param { power: 3 }", lambda x: x**3),
    "Power cube shifted": ("power_param { power: 3 shift: 1 }", lambda x: (1 + x) ** 3),
    "Power root": ("power_param { power: 0.5 shift: 9 }", lambda x: (9 + x) ** 0.5),
    "Power fraction": (
        "power_param { power: 2.5 scale: 0.7 shift: 4 }",
        lambda x: (4 + 0.7 * x) ** 2.5,
    ),
    "Power inverse": ("power_param { power: -1 scale: 0.5 shift: 4 }", lambda x: 1 / (4 + 0.5 * x)),
    "Power 0": ("power_param { power: 0 }", lambda x: 1),
    "Power scale 0": ("power_param { power: 2 scale: 0 shift: 3 }", lambda x: 9),
    "ReLU": ("", lambda x: max(x, 0)),
    "ReLU leaky": ("relu_param { negative_slope: 0.1 }", lambda x: x if x > 0 else 0.1 * x),
    "ReLU falling": ("relu_param { negative_slope: -0.3 }", lambda x: x if x > 0 else -0.3 * x),
    "ReLU6": ("", lambda x: min(max(x, 0), 6)),
    "ReLU6 leaky": ("relu6_param { negative_slope: 0.1 }", lambda x: min(max(x, 0.1 * x), 6)),
    "ReLU6 falling": (
        "relu6_param { negative_slope: -0.3 }",
        lambda x: min(x if x > 0 else -0.3 * x, 6),
    ),
    "HardSigmoid": ("", lambda x: max(0, min(0.2 * x + 0.5, 1))),
    "HardSwish": ("", lambda x: x * max(0, min(x + 3, 6)) / 6),
    "SeLu": ("", lambda x: 1.050700987 * (x if x > 0 else 1.67326324 * (exp(x) - 1))),
    "SeLU": ("selu_param { lambda: 2 alpha: 0.5 }", lambda x: 2 * x if x > 0 else exp(x) - 1),
    "Mish": ("", lambda x: x * tanh(log(1 + exp(x)))),
    "HSwish": ("", lambda x: x * max(0, min(x + 3, 6)) / 6),
    "Sigmoid": ("", lambda x: 1 / (1 + exp(-x))),
    "Swish": ("swish_param { beta: 1.3 }", lambda x: x / (1 + exp(-1.3 * x))),
    "Swish plain": ("", lambda x: x / (1 + exp(-x))),
    "TanH": ("", tanh),
    "PReLU": ("", lambda x: x if x > 0 else 0.25 * x),
    "PReLU shared": ("prelu_param { channel_shared: true }", lambda x: x if x > 0 else 0.25 * x),
    "SpatialDropout TEST": ("", lambda x: x),
    "ChannelDropout TEST": ("", lambda x: x),
    "RReLU TEST": ("", lambda x: x if x > 0 else x / 5.5),
    "Insanity TEST": ("", lambda x: x if x > 0 else x * log(2) / 5),
    "Dropout": ("", None),
    "Dropout TEST": ("", lambda x: x),
    "SeLuDropout TEST": ("", lambda x: x),
    "SeLUDropout TEST": ("", lambda x: x),
    "Threshold": ("threshold_param { threshold: 0.2 }", lambda x: x > 0.2),
}
# Other layers: shapes of the bottoms, number of tops, parameters.
CASES: dict[str, list[tuple[list[tuple[int, ...]], int, str]]] = {
    "GradientScaler": [
        ([(2, 3)], 1, "gradient_scaler_param { lower_bound: 0.5 upper_bound: 0.5 }")
    ],
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
        ([IMAGE], 1, "convolution_param { num_output: 2 kernel_size: 3 pad_l: 1 pad_b: 2 }"),
        (
            [(2, 3, 6, 11)],
            1,
            "convolution_param { num_output: 2 kernel_size: 4 dilation: 2 stride: 2 }",
        ),
    ],
    "Add": [([IMAGE, (6, 1, 5)], 1, "")],
    "Mul": [([IMAGE, (2, 1, 1, 5)], 1, ""), ([IMAGE], 1, "mul_param { mul_shape: [6, 1, 1] }")],
    "Pad": [
        ([IMAGE], 1, "pad_param { paddings: [0, 0, 1, 0, 2, 1, 0, 1] constant_values: 0.5 }"),
    ],
    "Squeeze": [([(2, 1, 3, 1)], 1, ""), ([(2, 1, 3)], 1, "squeeze_param { axis: 1 }")],
    "SpaceToBatchND": [
        (
            [(2, 3, 4, 2)],
            1,
            "space_to_batch_nd_param { block_shape: [2, 3] paddings: [1, 0, 0, 2] }",
        ),
    ],
    "BatchToSpaceND": [
        ([(12, 2, 2, 2)], 1, "batch_to_space_nd_param { block_shape: [2, 3] crops: [1, 0, 0, 2] }"),
        ([(4, 3, 2)], 1, "batch_to_space_nd_param { block_shape: 2 }"),
    ],
    "SpaceToDepth": [
        ([(2, 4, 6, 3)], 1, "space_to_depth_param { block_size: 2 }"),
        ([(2, 3, 4, 6)], 1, 'space_to_depth_param { block_size: 2 data_format: "CRD" }'),
    ],
    "DepthToSpace": [
        ([(2, 2, 3, 8)], 1, "depth_to_space_param { block_size: 2 }"),
        ([(2, 8, 2, 3)], 1, 'depth_to_space_param { block_size: 2 data_format: "NCHW" }'),
    ],
    "ResizeBilinear": [
        (
            [IMAGE],
            1,
            'resize_bilinear_param { output_height: 9 output_width: 3 data_format: "NCHW" }',
        ),
        ([IMAGE], 1, "resize_bilinear_param { scale_height: 2 half_pixel_centers: true }"),
        ([IMAGE], 1, "resize_bilinear_param { output_width: 13 align_corners: true }"),
    ],
    "ResizeNearestNeighbor": [
        ([IMAGE], 1, "resize_nearest_neighbor_param { output_height: 9 output_width: 3 }"),
        (
            [IMAGE],
            1,
            'resize_nearest_neighbor_param { scale_height: 2 half_pixel_centers: true data_format: "NCHW" }',
        ),
        ([IMAGE], 1, "resize_nearest_neighbor_param { output_width: 13 align_corners: true }"),
        ([IMAGE], 1, "resize_nearest_neighbor_param { scale_width: 3 half_pixel_onnx: true }"),
    ],
    "UpsampleDarknet": [([IMAGE], 1, "upsample_darknet_param { stride: 2 }")],
    "MaskPooling": [([IMAGE, (2, 1, 7, 5)], 1, "")],
    "MaskResize": [
        ([IMAGE], 1, "mask_resize_param { output_height: 4 output_width: 3 }"),
        ([IMAGE], 1, "mask_resize_param { output_height: 9 factor_width: 0.5 }"),
    ],
    "Convolution3D": [
        (
            [(2, 3, 4, 5, 6)],
            1,
            "convolution3d_param { num_output: 2 kernel_depth: 2 kernel_size: 3 pad: 1 stride: 2 }",
        ),
    ],
    "Deconvolution3D": [
        (
            [(2, 3, 4, 5, 6)],
            1,
            "convolution3d_param { num_output: 2 kernel_depth: 2 kernel_size: 3 temporal_stride: 2 }",
        ),
    ],
    "DepthwiseConvolution": [
        ([IMAGE], 1, "convolution_param { num_output: 12 kernel_size: 3 pad: 1 group: 6 }"),
    ],
    "DepthwiseConv": [([IMAGE], 1, "convolution_param { num_output: 4 kernel_size: 2 group: 2 }")],
    "ConvolutionDepthwise": [
        ([IMAGE], 1, "convolution_param { kernel_size: 3 pad: 1 stride: 2 bias_term: false }"),
    ],
    "Deconvolution": [
        ([IMAGE], 1, "convolution_param { num_output: 4 kernel_size: 4 pad: 1 stride: 2 }"),
        (
            [IMAGE],
            1,
            (
                "convolution_param { num_output: 6 kernel_size: 3 group: 6 "
                "stride: 3 bias_term: false }"
            ),
        ),
        ([IMAGE], 1, "convolution_param { num_output: 4 kernel_size: 2 dilation: 2 group: 2 }"),
        ([(2, 3, 4, 5, 6)], 1, "convolution_param { num_output: 2 kernel_size: 3 axis: 2 }"),
    ],
    "Im2col": [
        ([IMAGE], 1, "convolution_param { kernel_h: 3 kernel_w: 2 pad: 1 stride: 2 }"),
        ([(2, 3, 4, 5, 6)], 1, "convolution_param { kernel_size: 2 axis: 2 }"),
        ([(2, 3, 6, 11)], 1, "convolution_param { kernel_size: 4 dilation: 2 stride: 2 }"),
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
        ([IMAGE], 1, "batch_norm_param { disable_mean: true eps: 0.1 }"),
        ([IMAGE], 1, "batch_norm_param { disable_variance: true eps: 0.1 }"),
    ],
    "BN": [
        ([IMAGE], 1, ""),
        ([(2, 6, 7)], 1, "bn_param { frozen: true }"),
        ([(2, 3, 2, 3, 2)], 1, "bn_param { eps: 0.1 }"),
        ([IMAGE], 3, "bn_param { scale_filler { value: 1 } }"),
        ([IMAGE], 3, "bn_param { bn_mode: INFERENCE }"),
    ],
    "CuDNNBatchNorm": [([IMAGE], 1, "batch_norm_param { eps: 0.1 }")],
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
    "EltwiseAffine": [
        ([IMAGE], 1, ""),
        ([(4, 3)], 1, "eltwise_affine_param { channel_shared: true }"),
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
    "CReLU": [([IMAGE], 1, ""), ([(3, 4)], 1, "")],
    "Gather": [
        ([IMAGE], 1, "gather_param { indices: [2, 0, 1, 1] shape: [2, 2] axis: 1 }"),
        ([IMAGE], 1, "gather_param { indices: 3 shape: 0 axis: -1 }"),
        ([IMAGE, (2, 3)], 2, ""),
    ],
    "MatMul": [
        ([(2, 3, 4), (2, 4, 5)], 1, ""),
        ([(2, 4, 3), (2, 5, 4)], 1, "matmul_param { transpose_a: true transpose_b: true }"),
        ([(2, 3, 4), (4, 5)], 1, ""),
        ([(2, 3, 4)], 1, "matmul_param { blob_shape: [5, 4] transpose_b: true }"),
    ],
    "Axpy": [
        ([(2, 3), (2, 3, 7, 5), (2, 3, 7, 5)], 1, ""),
        ([(2, 3, 1, 1), *[(2, 3, 4, 2)] * 2], 1, ""),
    ],
    "ChannelScale": [
        ([(2, 3, 4, 5), (2, 1, 4, 5)], 1, ""),
        ([(2, 3, 4), (2, 1, 4)], 1, "channel_scale_param { do_forward: false }"),
        ([(2, 3), (2, 1)], 1, "channel_scale_param { global_scale: true min_global_scale: 2 }"),
    ],
    "ShuffleChannel": [
        ([IMAGE], 1, "shuffle_channel_param { group: 2 }"),
        ([(2, 6)], 1, "shuffle_channel_param { group: 3 }"),
    ],
    "Flip": [
        ([IMAGE], 1, ""),
        ([IMAGE], 1, "flip_param { flip_height: true }"),
        ([IMAGE], 1, "flip_param { flip_width: false }"),
    ],
    "Permute": [
        ([IMAGE], 1, "permute_param { order: 0 order: 2 order: 3 order: 1 }"),
        ([IMAGE], 1, "permute_param { order: 2 }"),
        ([IMAGE], 1, ""),
    ],
    "Transpose": [([IMAGE], 1, "transpose_param { dim: 3 dim: 2 dim: 0 dim: 1 }")],
    "Reverse": [([IMAGE], 1, ""), ([IMAGE], 1, "reverse_param { axis: 2 }")],
    "PriorBoxClustered": [
        ([(2, 4, 3, 5), IMAGE], 1, "prior_box_param { height: 3 width: 5 height: 4 width: 2 }"),
    ],
    "PriorBox": [
        ([(2, 4, 3, 2), (2, 3, 30, 40)], 1, "prior_box_param { min_size: 9 aspect_ratio: 2 }"),
    ],
    "Normalize": [
        ([IMAGE], 1, "norm_param { across_spatial: false channel_shared: false }"),
        ([IMAGE], 1, "norm_param { scale_filler { value: 20 } eps: 0.5 }"),
        ([(3, 4)], 1, "norm_param { across_spatial: false }"),
        ([(3, 4)], 2, "normalize_param { }"),
        ([IMAGE], 2, 'normalize_param { normalize_type: "L1" }'),
    ],
    "GRN": [([IMAGE], 1, ""), ([(3, 4)], 1, "grn_param { bias: 0.5 }")],
    "NormalizationL2": [([IMAGE], 1, ""), ([(3, 4)], 1, "")],
    "L2Normalize": [([IMAGE], 1, ""), ([(3, 4)], 1, "")],
    "SignedSqrt": [([IMAGE], 1, "")],
    "APL": [([IMAGE], 1, "apl_param { sums: 3 }"), ([(3, 4)], 1, "")],
    "OuterProduct": [([(2, 3), (2, 4, 1, 1)], 1, "")],
    "BatchReduction": [
        (
            [(2, 5, 3)],
            1,
            "batch_reduction_param { reduction_param { operation: TOPK k: 2 axis: 1 } }",
        ),
        ([(2, 5, 3)], 1, "batch_reduction_param { reduction_param { operation: MEAN axis: 1 } }"),
        ([(2, 5, 3)], 1, "batch_reduction_param { level: 1 reduction_param { axis: 2 } }"),
    ],
    "PassThrough": [
        ([(2, 3, 4, 6)], 1, "pass_through_param { block_height: 2 block_width: 3 num_output: 18 }"),
    ],
    "Reorg": [
        ([(2, 8, 4, 6)], 1, "reorg_param { stride: 2 }"),
        ([(2, 8, 4, 6)], 1, "reorg_param { stride: 2 reverse: true }"),
    ],
    "ChannelNorm": [([IMAGE], 1, "")],
    "Mean": [([IMAGE, (2, 3, 2, 2)], 2, "mean_param { value: 1 value: 2 value: 3 mean_scale: 2 }")],
    "Accum": [
        ([IMAGE, (2, 3, 4, 2)], 1, "accum_param { size_divisible_by: 8 }"),
        ([IMAGE, (2, 1, 3, 3)], 1, "accum_param { have_reference: true }"),
    ],
    "Interp": [
        ([IMAGE], 1, "interp_param { height: 13 width: 4 }"),
        ([IMAGE], 1, "interp_param { zoom_factor: 2 pad_beg: -1 pad_end: -2 }"),
        ([IMAGE], 1, "interp_param { height: 7 width: 5 }"),
        ([IMAGE], 1, "interp_param { height: 1 width: 3 }"),
    ],
    "Unpooling": [
        ([IMAGE], 1, "unpooling_param { kernel_size: 2 stride: 2 }"),
        ([IMAGE], 1, "unpooling_param { unpool: AVE kernel_size: 3 stride: 2 unpool_size: 12 }"),
        ([IMAGE], 1, "unpooling_param { unpool: TILE kernel_size: 2 stride: 3 }"),
    ],
    "Upsample": [([IMAGE], 1, "upsample_param { scale_h: 2 scale_w: 3 }")],
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
        ([IMAGE], 1, "pooling_param { kernel_size: 3 stride: 2 pad_l: 1 pad_b: 2 }"),
        ([IMAGE], 1, "pooling_param { pool: AVE kernel_size: 3 stride: 2 pad_r: 1 pad_b: 2 }"),
        ([IMAGE], 1, "pooling_param { pool: AVE kernel_size: 3 stride: 2 pad_l: 2 pad_t: 1 }"),
        ([IMAGE], 1, "pooling_param { pool: AVE_EXC_PAD kernel_size: 3 stride: 2 pad_type: 1 }"),
        ([IMAGE], 1, "pooling_param { pool: SUM kernel_size: 3 stride: 2 pad_type: 1 }"),
        ([IMAGE], 1, "pooling_param { pool: SUM kernel_size: 3 stride: 2 pad: 1 }"),
        ([IMAGE], 1, "pooling_param { pool: SUM global_pooling: true }"),
        ([IMAGE], 1, "pooling_param { pool: STOCHASTIC kernel_size: 3 stride: 2 }"),
    ],
    "Pooling3D": [
        ([(2, 3, 4, 5, 6)], 1, "pooling3d_param { kernel_size: 3 kernel_l: 2 pad: 1 stride_l: 2 }"),
        (
            [(2, 3, 4, 5, 6)],
            1,
            "pooling3d_param { kernel_depth: 2 kernel_size: 3 stride: 2 temporal_stride: 2 }",
        ),
        (
            [(2, 3, 4, 5, 6)],
            1,
            "pooling3d_param { pool: AVE kernel_depth: 3 kernel_size: 3 stride: 2 pad: 1 }",
        ),
        (
            [(2, 3, 4, 6, 6)],
            1,
            "pooling3d_param { pool: AVE kernel_depth: 2 kernel_size: 3 stride: 2 "
            "temporal_stride: 3 }",
        ),
    ],
    "PoolingND": [
        ([(2, 3, 4, 5, 6)], 1, "pooling_nd_param { kernel_size: [2, 3, 2] stride: 2 pad: 1 }"),
        ([(2, 3, 4, 5, 6)], 1, "pooling_nd_param { pool: AVE kernel_size: 2 stride: 2 }"),
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
    "ContinuationIndicator": [
        ([], 1, "continuation_indicator_param { time_step: 2 batch_size: 3 }"),
    ],
    "LSTMUnit": [([(1, 2, 3), (1, 2, 12), (1, 2)], 2, "")],
    "Parameter": [([], 1, "parameter_param { shape { dim: 2 dim: 3 } }")],
}
for case, (params, _) in NEURONS.items():
    CASES.setdefault(case.split()[0], []).append(([IMAGE], 1, params))
