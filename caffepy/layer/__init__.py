"""Layers: the contract and one module a family."""

from caffepy.layer import (
    convolution,
    data,
    eltwise,
    embed,
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
    "embed",
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
