"""Errors of a run that diverged: they name the first blob or parameter that is not finite."""

import numpy as np

from caffepy.core.errors import DivergenceError
from caffepy.device.blob import Blob
from caffepy.net import Net
from caffepy.net.node import Node

WHERE = "capture off (--no-capture) lets this message name the first blob that is not finite"
HINT = "lower base_lr, set clip_gradients, or look at the data that comes in"


def diverged(net: Net, iteration: int, loss: float) -> DivergenceError:
    """Return the error for a loss that is not finite; names the first such blob and parameter."""
    blob = _first_blob(net)
    param = _first_param(net)
    found = (
        "; ".join(part for part in (blob, param) if part)
        or "all blobs are finite, their weighted sum is not"
    )
    return DivergenceError(f"iteration {iteration}: the loss is {loss:g}; {found}; {HINT}")


def diverged_before(net: Net, iteration: int, loss: float) -> DivergenceError:
    """Return the same if the blobs of that iteration are lost; names a parameter."""
    if np.isfinite(loss):
        return DivergenceError(
            f"iteration {iteration}: gradients are not finite, with no loss scale at all; {HINT}"
        )
    found = "; ".join(part for part in (_first_param(net), WHERE) if part)
    return DivergenceError(f"iteration {iteration}: the loss is {loss:g}; {found}; {HINT}")


def check_params(net: Net, iteration: int) -> None:
    """Raise DivergenceError if a parameter is not finite, before a snapshot."""
    if param := _first_param(net):
        raise DivergenceError(f"iteration {iteration}: {param}, so no snapshot is written; {HINT}")


def _first_blob(net: Net) -> str | None:
    for node in net.nodes:
        for name, top in zip(node.top_names, node.tops, strict=True):
            if not _finite(top):
                return f'the first blob that is not finite is "{name}" of layer {_layer(node)}'
    return None


def _first_param(net: Net) -> str | None:
    for param in net.learnable:
        if not _finite(param.blob):
            return (
                f"parameter {param.index} of layer {_layer(net.nodes[param.layer])} is not finite"
            )
    return None


def _layer(node: Node) -> str:
    return f'"{node.name}" ({node.layer.type})'


def _finite(blob: Blob) -> bool:
    return bool(np.isfinite(blob.host_data).all())
