"""Errors of a run that diverged: they name the first blob or parameter that is not finite."""

from collections.abc import Sequence

import numpy as np

from caffepy.core.errors import DivergenceError
from caffepy.device.blob import Array
from caffepy.net import Net
from caffepy.net.node import Param

WHERE = "with --no-capture, and without --recompute, this names the first blob that is not finite"
HINT = "lower base_lr, set clip_gradients, or look at the data that comes in"


def diverged(net: Net, iteration: int, loss: float) -> DivergenceError:
    """Return the error for a loss that is not finite; names the first such blob and parameter."""
    found = [part for part in (_first_blob(net), _first_param(net)) if part]
    where = "; ".join(found) or "all blobs are finite, their weighted sum is not"
    return DivergenceError(f"iteration {iteration}: the loss is {loss:g}; {where}; {HINT}")


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


def check_history(net: Net, iteration: int, history: Sequence[Array]) -> None:
    """Raise DivergenceError if the history of a parameter is not finite: with some solver types it
    would never learn again.
    """
    for i, array in enumerate(history):
        if not np.isfinite(array).all():
            what = f"the history of {_name(net, net.learnable[i % len(net.learnable)])}"
            raise DivergenceError(
                f"iteration {iteration}: {what} is not finite, so no snapshot is written; {HINT}"
            )


def _first_blob(net: Net) -> str | None:
    for node in net.nodes:
        for name, top in zip(node.top_names, node.tops, strict=True):
            if not np.isfinite(top.host_data).all():
                layer = f'"{node.name}" ({node.layer.type})'
                return f'the first blob that is not finite is "{name}" of layer {layer}'
    return None


def _first_param(net: Net) -> str | None:
    for param in net.learnable:
        if not np.isfinite(param.blob.host_data).all():
            return f"{_name(net, param)} is not finite"
    return None


def _name(net: Net, param: Param) -> str:
    node = net.nodes[param.layer]
    return f'parameter {param.index} of layer "{node.name}" ({node.layer.type})'
