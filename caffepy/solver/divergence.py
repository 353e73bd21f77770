"""Errors of a run that diverged: they name the first blob or parameter that is not finite."""

from collections.abc import Sequence

import numpy as np

from caffepy.core.errors import DivergenceError
from caffepy.device.blob import Array, Blob, from_bfloat16
from caffepy.net import Net
from caffepy.net.fusion import Step
from caffepy.net.node import Param

WHERE = "with --no-capture, and without --recompute, this names the first blob that is not finite"
HINT = "lower base_lr, set clip_gradients, or look at the data that comes in"


class LostBlobsError(DivergenceError):
    """A loss that is not finite, of an iteration whose blobs are lost: of several that were
    enqueued, or where blobs share memory. The message names a parameter, and after `name_blob` the
    first blob.
    """

    def __init__(self, net: Net, iteration: int, loss: float) -> None:
        self._begin, self._param = f"iteration {iteration}: the loss is {loss:g}", _first_param(net)
        super().__init__(self._told((self._param, WHERE)))

    def name_blob(self, blob: str) -> None:
        """Put what `first_blob` found into the message."""
        self.message = self._told((blob, self._param))

    def _told(self, found: Sequence[str | None]) -> str:
        return "; ".join([self._begin, *filter(None, found), HINT])


def diverged(net: Net, iteration: int, loss: float) -> DivergenceError:
    """Return the error for a loss that is not finite; names the first such blob and parameter."""
    blobs = (_blob_of(net, Step(i)) for i in range(len(net.nodes)))
    found = [part for part in (next(filter(None, blobs), None), _first_param(net)) if part]
    where = "; ".join(found) or "all blobs are finite, their weighted sum is not"
    return DivergenceError(f"iteration {iteration}: the loss is {loss:g}; {where}; {HINT}")


def diverged_before(net: Net, iteration: int, loss: float) -> DivergenceError:
    """Return the same if the blobs of that iteration are lost; names a parameter."""
    if np.isfinite(loss):
        return DivergenceError(
            f"iteration {iteration}: gradients are not finite, with no loss scale at all; {HINT}"
        )
    return LostBlobsError(net, iteration, loss)


def first_blob(net: Net, steps: Sequence[Step]) -> str | None:
    """Run a forward pass, one of the net's `steps` after the other, up to the first that writes
    what is not finite; return the name of that blob and of its layers.
    """
    for step in steps:
        net.forward(steps=[step])
        if found := _blob_of(net, step):
            return found
    return None


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


def _blob_of(net: Net, step: Step) -> str | None:
    """Name the first top of a step that is not finite."""
    node = net.nodes[step.last]
    first = net.nodes[step.layers[0]] if step.group else node
    for name, top in zip(node.top_names, node.tops, strict=True):
        if not _is_finite(top):
            told = f'"{node.name}" ({node.layer.type})'
            if first is not node:
                told += f', which is computed with "{first.name}" ({first.layer.type})'
            return f'the first blob that is not finite is "{name}" of layer {told}'
    return None


def _is_finite(blob: Blob) -> bool:
    values = blob.data if blob.gpu is None else blob.gpu.on_host(blob.data)
    values = from_bfloat16(values) if values.dtype == np.uint16 else values
    return bool(np.isfinite(values).all())


def _first_param(net: Net) -> str | None:
    for param in net.learnable:
        if not np.isfinite(param.blob.host_data).all():
            return f"{_name(net, param)} is not finite"
    return None


def _name(net: Net, param: Param) -> str:
    node = net.nodes[param.layer]
    return f'parameter {param.index} of layer "{node.name}" ({node.layer.type})'
