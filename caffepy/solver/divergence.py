"""Errors of a run that diverged: they name the first blob or parameter that is not finite."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

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
        super().__init__(self._text((self._param, WHERE)))

    def name_blob(self, blob: str) -> None:
        """Put what `first_blob` found into the message."""
        self.message = self._text((blob, self._param))

    def _text(self, found: Sequence[str | None]) -> str:
        return "; ".join([self._begin, *filter(None, found), HINT])


def diverged(net: Net, steps: Sequence[Step], iteration: int, loss: float) -> DivergenceError:
    """Return the error for a loss that is not finite; names the first such blob and parameter.

    A pass of the net's `steps` has just run. It runs again from the data that are there, since
    layers in place overwrite what others made, groups do not write what lies within them, and blobs
    may share memory; but code of the user does not.
    """
    blob = None
    if any(layer.may_modify_gradients for layer in net.layers):
        blobs = (_blob_of(net, Step(i)) for i in range(len(net.nodes)))
        blob = next(filter(None, blobs), None)
    else:
        with suppress(Exception), _unchanged(net):  # the error that counts is the divergence
            blob = first_blob(net, steps, again=True)
    found = [part for part in (blob, _first_param(net)) if part]
    where = "; ".join(found) or "all blobs are finite, their weighted sum is not"
    return DivergenceError(f"iteration {iteration}: the loss is {loss:g}; {where}; {HINT}")


def diverged_before(net: Net, iteration: int, loss: float) -> DivergenceError:
    """Return the same if the blobs of that iteration are lost; names a parameter."""
    if np.isfinite(loss):
        return DivergenceError(
            f"iteration {iteration}: gradients are not finite, with no loss scale at all; {HINT}"
        )
    return LostBlobsError(net, iteration, loss)


def first_blob(net: Net, steps: Sequence[Step], again: bool = False) -> str | None:
    """Run a forward pass, one of the net's `steps` after the other, up to the first that writes
    what is not finite; return the name of that blob and of its layer. `again`: with the data that
    the last pass had.
    """
    for step in steps:
        if not again or net.nodes[step.last].bottoms:
            net.forward(steps=[step])
        if found := _blob_of(net, step):
            return _first_within(net, step) or found
    return None


def _first_within(net: Net, step: Step) -> str | None:
    """Run the layers of a group one by one, and return what `_blob_of` finds; None if the group has
    overwritten what it reads.
    """
    nodes = [net.nodes[i] for i in step.layers]
    written = {top.data_memory for node in nodes for top in node.tops}
    made = set[str]()
    for node in nodes:
        read = zip(node.bottom_names, node.bottoms, strict=True)
        if any(blob.data_memory in written and name not in made for name, blob in read):
            return None
        made.update(node.top_names)
    for i in step.layers:
        net.forward(steps=[Step(i)])
        if found := _blob_of(net, Step(i)):
            return found
    return None


@contextmanager
def _unchanged(net: Net) -> Iterator[None]:
    """Leave no trace of a block that runs layers again: in their states but for data layers, in
    statistics, random numbers and files. Callbacks are not called.
    """
    device, own = net.device, [node.layer for node in net.own_nodes.values() if node.bottoms]
    writes_files, random, debug_info = device.writes_files, device.random.state, net.debug_info
    statistics = [(blob, blob.host_data.copy()) for layer in own for blob in layer.statistics]
    states = [(layer, state) for layer in own if (state := layer.state())]
    callbacks = net.before_forward, net.after_forward
    device.writes_files = net.debug_info = False
    net.before_forward, net.after_forward = [], []
    try:
        yield
    finally:
        device.writes_files, device.random.state = writes_files, random
        net.debug_info = debug_info
        net.before_forward, net.after_forward = callbacks
        for blob, values in statistics:
            blob.host_data[...] = values
        for layer, state in states:
            layer.set_state(state)


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
            layer = f'"{node.name}" ({node.layer.type})'
            if first is not node:
                layer += f', which is computed with "{first.name}" ({first.layer.type})'
            return f'the first blob that is not finite is "{name}" of layer {layer}'
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
