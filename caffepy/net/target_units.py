"""Units in which a net predicts: those of normalized targets while it learns them, else its own.

Where targets t of boxes are (t - mean) / std, as in py-faster-rcnn, so are the predictions. A
snapshot keeps such weights as they are, so that a run goes on with the same bits, and says so
(`target_units`); a net that makes no such targets, such as a deploy net, gets weights and bias that
predict t, as in the files that py-faster-rcnn writes.

    rpn.proposal_target_layer --targets--> SmoothL1Loss <-- (layers without weights) <-- bbox_pred
"""

import logging
from collections.abc import Iterator, Mapping

import numpy as np

from caffepy.core.errors import ConfigError
from caffepy.device.blob import Array, Blob, Memory, behind
from caffepy.layer.python import Python
from caffepy.layer.rpn import Normalized, RcnnLayer
from caffepy.net.net import Net
from caffepy.net.node import Node
from caffepy.proto import binary
from caffepy.proto.caffe_pb2 import LayerParameter, TargetUnits

log = logging.getLogger(__name__)

PLAIN = TargetUnits()
"""Predictions of the targets themselves."""


def units_of(net: Net) -> dict[str, TargetUnits]:
    """Return the units of layers that learn normalized targets, by name: of each output."""
    found = {}
    for node in net.nodes:
        layer = node.layer
        if not (isinstance(layer, Python) and isinstance(layer.instance, RcnnLayer)):
            continue
        normalized = layer.instance.normalized()
        if normalized is None or normalized.top >= len(node.tops):
            continue
        channels = node.tops[normalized.top].shape[1]
        for predictor in _predictors(net, node.top_names[normalized.top]):
            outputs = predictor.params[0].blob.shape[_axis(predictor.param)]
            if outputs % channels == 0 and channels % 4 == 0:
                found[predictor.name] = _units(normalized, channels, outputs)
    return found


def _predictors(net: Net, targets: str) -> Iterator[Node]:
    """Yield the layer with weights behind the first bottom of each loss of these targets."""
    for i, node in enumerate(net.nodes):
        if node.layer.type == "Split" and node.bottom_names == [targets]:
            for name in node.top_names:
                yield from _predictors(net, name)
        elif targets in node.bottom_names[1:]:
            name = node.bottom_names[0]
            for maker in reversed(net.nodes[:i]):
                if name not in maker.top_names:
                    continue
                if maker.params:
                    yield maker
                if maker.params or not maker.bottom_names:
                    break
                name = maker.bottom_names[0]


def _units(normalized: Normalized, channels: int, outputs: int) -> TargetUnits:
    """Return the units of outputs in the order of `channels`, maybe several for each (R-FCN)."""
    means, stds = (
        np.repeat(np.tile(np.asarray(four, np.float64), channels // 4), outputs // channels)
        for four in normalized[1:]
    )
    return TargetUnits(mean=means, std=stds)


def change_units(
    net: Net,
    stored: Mapping[str, TargetUnits],
    own: Mapping[str, TargetUnits],
    level: int = logging.INFO,
) -> None:
    """Turn the weights of layers, by name, from the units of a file to those of the net; the log
    says so at this level.

    ConfigError if they are of other numbers of outputs.
    """
    changed = set[Memory]()  # layers may share their weights, as those of a pyramid's levels
    for name, units in stored.items():
        if units == own.get(name, PLAIN) or name not in net.layer_names:
            continue
        log.log(level, "%s: from the units of normalized targets to those of the net", name)
        layer = net.layers[net.layer_names.index(name)]
        arrays = _plain([blob.host_data for blob in layer.blobs], units, layer.param)
        if name in own:
            mean, std = np.asarray(own[name].mean), np.asarray(own[name].std)
            arrays = _plain(arrays, TargetUnits(mean=-mean / std, std=1 / std), layer.param)
        for blob, array in zip(layer.blobs, arrays, strict=True):
            if blob.data_memory not in changed:
                blob.host_data[...] = array
                changed.add(blob.data_memory)


def share_trained_layers(net: Net, train_net: Net, copies: dict[str, list[Blob]]) -> None:
    """Share the parameters of a train net with a test net, but for layers that learn normalized
    targets there and make none here: those get `copies`, by name, that predict the targets.
    """
    own, known = units_of(net), net.layer_names
    changed = {
        name: units
        for name, units in units_of(train_net).items()
        if name in known and units != own.get(name, PLAIN)
    }
    net.share_trained_layers_with(train_net, but=changed)
    for name in changed:
        mine, theirs = (n.layers[n.layer_names.index(name)].blobs for n in (net, train_net))
        if name not in copies:
            copies[name] = [Blob(blob.shape, blob.dtype, net.device) for blob in theirs]
            for blob, copy in zip(mine, copies[name], strict=True):
                behind(blob).share_data(copy)
        for copy, source in zip(copies[name], theirs, strict=True):
            copy.host_data[...] = source.host_data
    change_units(net, changed, own, logging.DEBUG)
    with net.device.scope():
        for copy in (blob for name in changed for blob in copies[name]):
            _ = copy.data  # a captured pass does not upload what the host wrote


def make_plain(layer: LayerParameter) -> None:
    """Make the weights of a stored layer predict the targets themselves, if they do not."""
    if not layer.HasField("target_units"):
        return
    arrays = [binary.blob_to_array(blob) for blob in layer.blobs]
    plain = _plain(arrays, layer.target_units, layer)
    del layer.blobs[:]
    layer.blobs.extend(map(binary.array_to_blob, plain))
    layer.ClearField("target_units")


def _axis(param: LayerParameter) -> int:
    """Axis of the outputs in a layer's weights."""
    return int(param.type == "InnerProduct" and param.inner_product_param.transpose)


def _plain(arrays: list[Array], units: TargetUnits, param: LayerParameter) -> list[Array]:
    """Return weights, and a bias if there is one, times std, plus mean."""
    mean, std = np.asarray(units.mean), np.asarray(units.std)
    axis = _axis(param)
    if not arrays or not len(mean) == len(std) == arrays[0].shape[axis]:
        raise ConfigError(
            f"layer {param.name}: its target_units, of {len(std)} outputs, do not fit its weights"
        )
    if len(arrays) == 1 and mean.any():
        raise ConfigError(
            f"layer {param.name} learned targets less a mean; give it a bias, to which that is "
            "added, or set the means to 0"
        )
    weights, *bias = arrays
    others = tuple(i for i in range(weights.ndim) if i != axis)
    return [weights * np.expand_dims(std, others), *(b * std + mean for b in bias)]
