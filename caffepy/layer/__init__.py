"""Layers: the contract and the registry in `base`, and one module a family.

All that is to be known of a type stands in its class. Start reading with `base`, then `neuron`;
`fused` has the groups of layers that are computed together.
"""

from caffepy.layer import (
    convolution,
    data,
    eltwise,
    inner_product,
    loss,
    neuron,
    normalization,
    pooling,
    python,
    recurrent,
    selection,
    shape,
)
from caffepy.layer.base import Layer, LossLayer, check_counts, create_layer, layer, registry

__all__ = [
    "Layer",
    "LossLayer",
    "check_counts",
    "convolution",
    "create_layer",
    "data",
    "eltwise",
    "inner_product",
    "layer",
    "loss",
    "neuron",
    "normalization",
    "pooling",
    "python",
    "recurrent",
    "registry",
    "selection",
    "shape",
]
