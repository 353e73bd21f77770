"""Log lines of `debug_info`: mean absolute values of data and gradients, layer by layer."""

import logging
from collections.abc import Sequence

import numpy as np

from caffepy.device.blob import Array, Blob
from caffepy.net.node import Node

log = logging.getLogger(__name__)


def forward(node: Node) -> None:
    """Log the tops and parameters of a layer that just ran forward."""
    for name, top in zip(node.top_names, node.tops, strict=True):
        log.info(
            "    [Forward] Layer %s, top blob %s data: %.6g", node.name, name, _mean(top.host_data)
        )
    for param in node.params:
        log.info(
            "    [Forward] Layer %s, param blob %s data: %.6g",
            node.name,
            param.name,
            _mean(param.blob.host_data),
        )


def backward(node: Node) -> None:
    """Log the propagated bottoms and the parameters of a layer that just ran backward."""
    layer = node.layer
    for name, bottom, down in zip(
        node.bottom_names, node.bottoms, node.propagate_down, strict=True
    ):
        if down:
            log.info(
                "    [Backward] Layer %s, bottom blob %s diff: %.6g",
                node.name,
                name,
                _mean(bottom.host_diff),
            )
    for i, (blob, wanted) in enumerate(zip(layer.blobs, layer.param_propagate_down, strict=True)):
        if wanted:
            log.info(
                "    [Backward] Layer %s, param blob %d diff: %.6g",
                node.name,
                i,
                _mean(blob.host_diff),
            )


def norms(params: Sequence[Blob]) -> None:
    """Log the norms of all learnable parameters after a whole backward pass."""
    data = [p.host_data for p in params]
    diff = [p.host_diff for p in params]
    log.error(
        "    [Backward] All net params (data, diff): L1 norm = (%.6g, %.6g); L2 norm = (%.6g, "
        "%.6g)",
        sum(float(np.abs(a).sum()) for a in data),
        sum(float(np.abs(a).sum()) for a in diff),
        sum(float(np.square(a).sum()) for a in data) ** 0.5,
        sum(float(np.square(a).sum()) for a in diff) ** 0.5,
    )


def _mean(array: Array) -> float:
    return float(np.abs(array).mean()) if array.size else 0.0
