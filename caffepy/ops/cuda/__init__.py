"""Arithmetic on one NVIDIA GPU: cuDNN, cuBLAS and kernels of our own, on CuPy arrays.

All work is enqueued on CuPy's current stream; nothing waits for it, nothing is read back, so that a
step can be captured as a CUDA graph once every shape has been seen.

Start with launch.py and elementwise.py; `convolution` chooses between graphs.py (cuDNN), kernels of
our own, such as small_convolution.py, and columns.py.
"""

try:
    import cupy as _cupy
except ImportError as error:
    from caffepy.core.errors import DeviceError, install

    raise DeviceError(f"no GPU arithmetic without CuPy ({error}): {install('cuda13')}") from error

from caffepy.ops.cuda.bias_relu import (
    add_bias,
    bias_gradient,
    cut_relu_backward,
    relu_bias_backward,
)
from caffepy.ops.cuda.blas import blas_scope, inner_product, matmul, set_num_threads
from caffepy.ops.cuda.boxes import (
    box_gradients,
    box_losses,
    check_truths,
    choose_largest,
    class_gradients,
    class_losses,
    decode_boxes,
    detect,
    label_matches,
    location_gradients,
    location_losses,
    match_boxes,
    match_with_losses,
    mine_negatives,
    multibox_loss,
)
from caffepy.ops.cuda.compiler import compile_ahead
from caffepy.ops.cuda.convolution.convolution import Convolution
from caffepy.ops.cuda.copies import convert, copy, cut, deal_channels, join
from caffepy.ops.cuda.ctc import ctc_backward, ctc_forward
from caffepy.ops.cuda.deformable import deformable_backward, deformable_columns
from caffepy.ops.cuda.distances import distance_gradients, distances
from caffepy.ops.cuda.elementwise import (
    add,
    axpy,
    dot,
    eltwise_max,
    eltwise_select,
    eltwise_sum,
    multiply,
    scaled,
)
from caffepy.ops.cuda.flow import (
    correlation_backward,
    correlation_forward,
    flow_warp_backward,
    flow_warp_forward,
    resample,
)
from caffepy.ops.cuda.interleave import interleave, separate
from caffepy.ops.cuda.local import (
    local_backward_data,
    local_backward_weight,
    local_forward,
)
from caffepy.ops.cuda.loss import (
    accuracy,
    contrastive_loss_backward,
    contrastive_loss_forward,
    euclidean_loss_backward,
    euclidean_loss_forward,
    hinge_loss_backward,
    hinge_loss_forward,
    infogain_loss_backward,
    infogain_loss_forward,
    multinomial_loss_backward,
    multinomial_loss_forward,
    sigmoid_loss_backward,
    sigmoid_loss_forward,
    softmax_backward,
    softmax_forward,
    softmax_loss_backward,
    softmax_loss_forward,
)
from caffepy.ops.cuda.lrn import lrn_backward, lrn_forward
from caffepy.ops.cuda.lrn_pooling import lrn_max_pool_backward, lrn_max_pool_forward
from caffepy.ops.cuda.neuron import (
    bias_act_backward,
    bias_act_forward,
    dropout_backward,
    dropout_forward,
    elu_backward,
    elu_forward,
    power_backward,
    power_forward,
    prelu_backward,
    prelu_forward,
    relu6_backward,
    relu6_forward,
    relu_backward,
    relu_forward,
    rrelu_forward,
    sigmoid_backward,
    sigmoid_forward,
    swish_backward,
    swish_forward,
    tanh_backward,
    tanh_forward,
)
from caffepy.ops.cuda.normalization import (
    batch_norm_backward,
    batch_norm_forward,
    batch_norm_prepare,
    batch_norm_statistics,
    batch_norm_stored,
    norm_backward,
    norm_forward,
    norm_gradient,
    norm_mask,
    norm_sums,
    scale_backward,
    scale_forward,
)
from caffepy.ops.cuda.outer_products import fuses_update, product_update
from caffepy.ops.cuda.permutohedral import Lattice
from caffepy.ops.cuda.pooling import (
    ave_pool_backward,
    ave_pool_forward,
    max_pool_backward,
    max_pool_forward,
    norm_max_pool_backward,
    norm_max_pool_forward,
    pool_index_type,
    stochastic_pool_forward,
    stochastic_pool_mean,
)
from caffepy.ops.cuda.proposals import decode_proposals, suppress_overlaps
from caffepy.ops.cuda.recurrent import LSTM, RNN, lstm_unit_backward, lstm_unit_forward
from caffepy.ops.cuda.resize import interp_backward, interp_forward
from caffepy.ops.cuda.roi import (
    psroi_pool_backward,
    psroi_pool_forward,
    roi_align_backward,
    roi_align_forward,
    roi_pool_backward,
    roi_pool_forward,
    take_rois,
)
from caffepy.ops.cuda.roi_warping import roi_warp_backward, roi_warp_forward
from caffepy.ops.cuda.sampling import (
    affine_sample_backward,
    affine_sample_forward,
    affine_theta_gradient,
)
from caffepy.ops.cuda.selection import add_rows, take_rows, top_values
from caffepy.ops.cuda.staging import Staging
from caffepy.ops.cuda.timers import PhaseTimer, Stopwatch
from caffepy.ops.cuda.transform import transform_batch
from caffepy.ops.cuda.update import update_params
from caffepy.ops.cuda.update_state import Sums, UpdateState
from caffepy.ops.cuda.vector_norm import (
    normalize_backward,
    normalize_forward,
    scaled_norm_backward,
    scaled_norm_forward,
)
from caffepy.ops.cuda.volumes import (
    ave_pool_volumes_backward,
    ave_pool_volumes_forward,
    max_pool_volumes_backward,
    max_pool_volumes_forward,
)
from caffepy.ops.cuda.yolo import region_truths, sort_truths, yolo_scores, yolo_truths
from caffepy.ops.masks import mask_size
