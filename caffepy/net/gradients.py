"""Parameter gradients: the layers that add to each, and the large ones of matrix products."""

from caffepy.device.blob import behind
from caffepy.layer.inner_product import InnerProduct
from caffepy.net.net import Net

LARGE = 8 << 20
"""Bytes from which on a gradient is handled separately."""


def adders(net: Net) -> list[frozenset[int]]:
    """Return the layers that add to each parameter gradient, including layers that share it."""
    return [
        frozenset(
            index
            for index, layer in enumerate(net.layers)
            if any(behind(blob).diff_memory is param.diff_memory for blob in layer.blobs)
        )
        for param in net.learnable_params
    ]


def large_products(net: Net) -> dict[int, InnerProduct]:
    """Return InnerProduct layers with a large weight of their own, by number of the parameter."""
    numbers = {param.diff_memory: number for number, param in enumerate(net.learnable_params)}
    memories = [behind(blob).diff_memory for layer in net.layers for blob in layer.blobs]
    found = {}
    for node in net.nodes:
        layer = node.layer
        if isinstance(layer, InnerProduct) and node.need_backward and layer.param_propagate_down[0]:
            memory = behind(layer.blobs[0]).diff_memory
            if (
                memory in numbers
                and memories.count(memory) == 1
                and 4 * layer.blobs[0].count >= LARGE
            ):
                found[numbers[memory]] = layer
    return found
