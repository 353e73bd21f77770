"""The lines of `debug_info`: mean absolute values of data and gradients, layer by layer."""

import logging
from typing import TYPE_CHECKING

import numpy as np

from caffepy.device.blob import Array

if TYPE_CHECKING:
    from caffepy.net.net import Net

log = logging.getLogger(__name__)


def forward(net: "Net", index: int) -> None:
    """Log the tops and parameters of a layer that just ran forward."""
    name = net.layer_names[index]
    for top_name, top in zip(net.top_names[index], net.tops[index], strict=True):
        log.info(
            "    [Forward] Layer %s, top blob %s data: %.6g", name, top_name, _mean(top.host_data)
        )
    first = sum(len(layer.blobs) for layer in net.layers[:index])
    for i, blob in enumerate(net.layers[index].blobs):
        display = net.param_display_names[first + i]
        log.info(
            "    [Forward] Layer %s, param blob %s data: %.6g", name, display, _mean(blob.host_data)
        )


def backward(net: "Net", index: int) -> None:
    """Log the propagated bottoms and the parameters of a layer that just ran backward."""
    name, layer = net.layer_names[index], net.layers[index]
    for bottom_name, bottom, need in zip(
        net.bottom_names[index], net.bottoms[index], net.bottom_need_backward[index], strict=True
    ):
        if need:
            log.info(
                "    [Backward] Layer %s, bottom blob %s diff: %.6g",
                name,
                bottom_name,
                _mean(bottom.host_diff),
            )
    for i, (blob, wanted) in enumerate(zip(layer.blobs, layer.param_propagate_down, strict=True)):
        if wanted:
            log.info(
                "    [Backward] Layer %s, param blob %d diff: %.6g", name, i, _mean(blob.host_diff)
            )


def norms(net: "Net") -> None:
    """Log the norms of all learnable parameters after a whole backward pass."""
    data = [p.host_data for p in net.learnable_params]
    diff = [p.host_diff for p in net.learnable_params]
    log.error(
        "    [Backward] All net params (data, diff): L1 norm = (%.6g, %.6g); L2 norm = (%.6g, %.6g)",
        sum(float(np.abs(a).sum()) for a in data),
        sum(float(np.abs(a).sum()) for a in diff),
        sum(float(np.square(a).sum()) for a in data) ** 0.5,
        sum(float(np.square(a).sum()) for a in diff) ** 0.5,
    )


def _mean(array: Array) -> float:
    return float(np.abs(array).mean()) if array.size else 0.0
