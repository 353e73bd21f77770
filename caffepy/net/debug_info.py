"""Log lines of `debug_info`: mean absolute values of data and gradients, layer by layer."""

import logging
from collections.abc import Sequence

import numpy as np

from caffepy.device.blob import Array, Blob
from caffepy.net.node import Node

log = logging.getLogger(__name__)


def log_forward(node: Node) -> None:
    """Log the tops and parameters of a layer that just ran forward."""
    for name, top in zip(node.top_names, node.tops, strict=True):
        _log_mean("Forward", node, f"top blob {name} data", top.host_data)
    for param in node.params:
        _log_mean("Forward", node, f"param blob {param.name} data", param.blob.host_data)


def log_backward(node: Node) -> None:
    """Log the propagated bottoms and the parameters of a layer that just ran backward."""
    layer, down = node.layer, node.propagate_down
    for name, bottom, wanted in zip(node.bottom_names, node.bottoms, down, strict=True):
        if wanted:
            _log_mean("Backward", node, f"bottom blob {name} diff", bottom.host_diff)
    for i, (blob, wanted) in enumerate(zip(layer.blobs, layer.param_propagate_down, strict=True)):
        if wanted:
            _log_mean("Backward", node, f"param blob {i} diff", blob.host_diff)


def _log_mean(direction: str, node: Node, what: str, array: Array) -> None:
    mean = float(np.abs(array).mean()) if array.size else 0.0
    log.info("    [%s] Layer %s, %s: %.6g", direction, node.name, what, mean)


def log_norms(params: Sequence[Blob]) -> None:
    """Log the norms of all learnable parameters after a whole backward pass."""
    both = [p.host_data for p in params], [p.host_diff for p in params]
    with np.errstate(all="ignore"):  # as in passes
        l1 = [sum(float(np.abs(a).sum()) for a in arrays) for arrays in both]
        l2 = [sum(float(np.square(a).sum()) for a in arrays) ** 0.5 for arrays in both]
    text = "L1 norm = (%.6g, %.6g); L2 norm = (%.6g, %.6g)"
    log.error("    [Backward] All net params (data, diff): " + text, *l1, *l2)
