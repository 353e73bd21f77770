"""Arithmetic on the CPU: numba loops and BLAS calls, divided over a pool of threads."""

from caffepy.device.threads import blas_scope, set_num_threads
from caffepy.ops.cpu.blas import add_bias, bias_gradient, matmul
from caffepy.ops.cpu.boxes import (
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
from caffepy.ops.cpu.compiler import compile_ahead
from caffepy.ops.cpu.convolution import Convolution
from caffepy.ops.cpu.copies import (
    convert,
    copy,
    cut,
    deal_channels,
    interleave,
    join,
    separate,
)
from caffepy.ops.cpu.ctc import ctc_backward, ctc_forward
from caffepy.ops.cpu.deformable import deformable_backward, deformable_columns
from caffepy.ops.cpu.distances import distance_gradients, distances
from caffepy.ops.cpu.elementwise import (
    add,
    axpy,
    dot,
    eltwise_max,
    eltwise_select,
    eltwise_sum,
    multiply,
    scale_backward,
    scale_forward,
    scaled,
)
from caffepy.ops.cpu.flow import (
    correlation_backward,
    correlation_forward,
    flow_warp_backward,
    flow_warp_forward,
    resample,
)
from caffepy.ops.cpu.local import (
    local_backward_data,
    local_backward_weight,
    local_forward,
)
from caffepy.ops.cpu.loss import (
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
from caffepy.ops.cpu.lrn import (
    lrn_backward,
    lrn_forward,
    lrn_max_pool_backward,
    lrn_max_pool_forward,
)
from caffepy.ops.cpu.neuron import (
    bias_act_backward,
    bias_act_forward,
    cut_relu_backward,
    dropout_backward,
    dropout_forward,
    elu_backward,
    elu_forward,
    inner_product,
    power_backward,
    power_forward,
    prelu_backward,
    prelu_forward,
    relu6_backward,
    relu6_forward,
    relu_backward,
    relu_bias_backward,
    relu_forward,
    rrelu_forward,
    sigmoid_backward,
    sigmoid_forward,
    swish_backward,
    swish_forward,
    tanh_backward,
    tanh_forward,
)
from caffepy.ops.cpu.normalization import (
    batch_norm_backward,
    batch_norm_forward,
    batch_norm_prepare,
    batch_norm_statistics,
    batch_norm_stored,
    mask_size,
    norm_backward,
    norm_forward,
    norm_gradient,
    norm_mask,
    norm_sums,
)
from caffepy.ops.cpu.permutohedral import Lattice
from caffepy.ops.cpu.pooling import (
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
from caffepy.ops.cpu.proposals import decode_proposals, suppress_overlaps
from caffepy.ops.cpu.recurrent import LSTM, RNN, lstm_unit_backward, lstm_unit_forward
from caffepy.ops.cpu.resize import interp_backward, interp_forward
from caffepy.ops.cpu.roi import (
    psroi_pool_backward,
    psroi_pool_forward,
    roi_align_backward,
    roi_align_forward,
    roi_pool_backward,
    roi_pool_forward,
    take_rois,
)
from caffepy.ops.cpu.roi_warping import roi_warp_backward, roi_warp_forward
from caffepy.ops.cpu.sampling import (
    affine_sample_backward,
    affine_sample_forward,
    affine_theta_gradient,
)
from caffepy.ops.cpu.selection import add_rows, take_rows, top_values
from caffepy.ops.cpu.staging import Staging
from caffepy.ops.cpu.timers import PhaseTimer, Stopwatch
from caffepy.ops.cpu.transform import transform_batch
from caffepy.ops.cpu.update import fuses_update, product_update, update_params
from caffepy.ops.cpu.update_state import Sums, UpdateState
from caffepy.ops.cpu.vector_norm import (
    normalize_backward,
    normalize_forward,
    scaled_norm_backward,
    scaled_norm_forward,
)
from caffepy.ops.cpu.volumes import (
    ave_pool_volumes_backward,
    ave_pool_volumes_forward,
    max_pool_volumes_backward,
    max_pool_volumes_forward,
)
from caffepy.ops.cpu.yolo import region_truths, sort_truths, yolo_scores, yolo_truths
