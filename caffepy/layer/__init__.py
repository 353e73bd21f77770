"""Layers: the contract and the registry in `base`, and one module a family.

All that is to be known of a type stands in its class. Start reading with `base`, then `neuron`;
`fused` has the groups of layers that are computed together.
"""

from caffepy.layer import (  # noqa: F401 # so that every type is registered
    accuracy,
    attention,
    batch_norm,
    bilinear,
    blocks,
    cascade,
    convolution,
    ctc,
    data,
    deformable,
    dense_block,
    detection,
    detection_loss,
    detectnet,
    dropout,
    edge_loss,
    eltwise,
    field_loss,
    flow,
    group_loss,
    hdf5_data,
    inner_product,
    loss,
    margin,
    mat_write,
    meanfield,
    memory_data,
    metric_loss,
    multibox_loss,
    neuron,
    normalization,
    pooling,
    pose,
    prior_box,
    proposal,
    python,
    quantized,
    recurrent,
    resize,
    roi,
    roi_warping,
    sampling,
    scale,
    selection,
    shape,
    yolo,
    yolo_seg,
)
from caffepy.layer.base import Layer, LossLayer, check_counts, create_layer, layer, registry

__all__ = ["Layer", "LossLayer", "check_counts", "create_layer", "layer", "registry"]
