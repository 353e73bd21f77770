"""Wiring: from a definition to nodes, as Caffe's Net::Init does it.

Layers come in order. Each takes its bottoms from the blobs still available; what no layer takes is
an output of the net.
"""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from caffepy.core.errors import ConfigError
from caffepy.device.blob import Blob, behind, shape_string
from caffepy.device.device import Device
from caffepy.layer import Layer, check_counts, create_layer
from caffepy.net.build import located
from caffepy.net.in_place import separate_tops
from caffepy.net.node import Node, Param
from caffepy.proto.binary import blob_to_array
from caffepy.proto.caffe_pb2 import LayerParameter, NetParameter, ParamSpec

log = logging.getLogger(__name__)

AUTOMATIC = "(automatic)"


def wire(
    param: NetParameter,
    device: Device,
    dtype: np.dtype[Any],
    path: str | None,
    root: Sequence[Node] | None,
) -> "Wired":
    """Create, connect and set up the layers of a definition that has its splits.

    `root` has the nodes of a net of the same definition, whose layers are used where they are
    shared in parallel. ConfigError and DataError name file, line and layer.
    """
    wired = Wired(device, dtype)
    memory = 0
    for index, layer_param in enumerate(param.layer):
        with located(path, layer_param):
            if not layer_param.HasField("phase"):
                layer_param.phase = param.state.phase
            of_root = root[index] if root and root[index].layer.share_in_parallel else None
            if of_root:
                node = wired.add(layer_param, of_root.layer, True)
                _take_tops(node, of_root)
            else:
                own = LayerParameter()
                own.CopyFrom(layer_param)
                log.info("Creating layer %s", layer_param.name)
                layer = create_layer(own, own.phase, device, dtype, path)
                log.info("Creating Layer %s", layer_param.name)
                node = wired.add(layer_param, layer, False)
                if own.blobs and not layer.blobs:
                    for array in map(blob_to_array, own.blobs):
                        layer.add_blob(array.shape).host_data[...] = array
                    log.info("Skipping parameter initialization")
                random = device.random.state if device.follows else {}
                layer.setup(node.layer_bottoms, node.layer_tops)
                if device.follows and layer.share_in_parallel:
                    device.random.state = random  # as in a worker, whose root has this layer
                node.reshape()
                log.info("Setting up %s", node.name)
            if node.layer.stops_gradient:
                node.need_backward = False
                node.propagate_down = [False] * len(node.bottoms)
            _set_loss_weights(node)
            memory += sum(top.count for top in node.tops) * dtype.itemsize
            log.info("Memory required for data: %d", memory)
            wired.add_params(node)
            wired.available.update((name, node.need_backward) for name in node.top_names)
    wired.outputs = sorted((n for n in wired.available if n != AUTOMATIC), key=str.encode)
    prune_backward(wired.nodes)
    if param.force_backward:
        force_backward(wired.nodes)
    for node in wired.nodes:
        if node.bottoms and node.need_backward and node.layer.may_modify_gradients:
            # What a user's layer keeps from forward for backward is of one solver's batch.
            node.layer.share_in_parallel = False
    separate_tops(wired.nodes, wired.blobs)
    for name in wired.outputs:
        log.info("This network produces output %s", name)
    log.info("Network initialization done.")
    return wired


def _take_tops(node: Node, root: Node) -> None:
    """Copy the shapes and first values of the tops that a layer of the root net made."""
    with node.layer.forward_lock:
        log.info("Sharing layer %s from root net", node.name)
        for i, (own, theirs) in enumerate(zip(node.tops, root.tops, strict=True)):
            own.reshape_like(theirs)
            created = "Created top blob %d (shape: %s) for shared layer %s"
            log.info(created, i, shape_string(own.shape), node.name)
            if theirs.data_memory.touched:
                own.host_data[...] = theirs.host_data
        node.keep_shapes()


def _set_loss_weights(node: Node) -> None:
    weights = list(node.layer.param.loss_weight)
    if weights and len(weights) != len(node.tops):
        raise ConfigError(
            f"loss_weight must be given once per top: {len(weights)} for {len(node.tops)} top(s)"
        )
    node.layer.loss_weights = weights or [0.0] * len(node.tops)
    node.write_loss_weights()
    for blob, weight in zip(node.tops, node.layer.loss_weights, strict=True):
        log.info("Top shape: %s", shape_string(blob.shape))
        if weight:
            log.info("    with loss weight %g", weight)


class Wired:
    """Parts of a net: layers in order, all blobs by name, names of the blobs that come from outside
    and of those that no layer takes; while it is made, the blobs available to further layers.
    """

    def __init__(self, device: Device, dtype: np.dtype[Any]) -> None:
        self._device = device
        self._dtype = dtype
        self.nodes: list[Node] = []
        self.blobs: dict[str, Blob] = {}
        self.inputs: list[str] = []
        self.outputs: list[str] = []
        self.available: dict[str, bool] = {}  # blob name -> needs backward
        self._owners: dict[str, Param] = {}  # of parameters that have a name

    def add(self, param: LayerParameter, layer: Layer, of_root: bool) -> Node:
        """Connect a layer: its bottoms must be available, its tops become so.

        ConfigError for a top that another layer has, or that is in place where the type cannot be.
        """
        names, given = list(param.bottom), list(param.propagate_down)
        if given and len(given) != len(names):
            raise ConfigError(
                f"propagate_down must be given once per bottom: {len(given)} for {len(names)} "
                "bottom(s)"
            )
        need = [self.available.pop(name) for name in names]
        bottoms = [self.blobs[name] for name in names]
        for name in names:
            log.info("%s <- %s", param.name, name)
        top_names, tops = list(param.top), []
        for i, name in enumerate(top_names):
            if i < len(names) and name == names[i]:
                if not layer.in_place:
                    raise ConfigError(
                        f"{layer.type} cannot work in place; give its top another name than "
                        f"{name!r}"
                    )
                log.info("%s -> %s (in-place)", param.name, name)
            elif name in self.blobs:
                raise ConfigError(f"Top blob '{name}' produced by multiple sources.")
            else:
                log.info("%s -> %s", param.name, name)
                self.blobs[name] = Blob(dtype=self._dtype, device=self._device)
            tops.append(self.blobs[name])
            if layer.is_input:
                self.inputs.append(name)
        least = layer.tops if isinstance(layer.tops, int) else layer.tops[0]
        while layer.auto_top_blobs and len(tops) < least:
            log.info("%s -> %s", param.name, AUTOMATIC)
            top_names.append(AUTOMATIC)
            tops.append(Blob(dtype=self._dtype, device=self._device))
            self.blobs.setdefault(AUTOMATIC, tops[-1])
        down = [bool(b) for b in given] or need
        node = Node(param, layer, names, top_names, bottoms, tops, down, of_root, any(need))
        self.nodes.append(node)
        if layer.on_host and not layer.is_data:
            log.info("%s (%s) computes on the host", layer.param.name, layer.type)
        check_counts(layer, len(bottoms), len(tops))
        return node

    def add_params(self, node: Node) -> None:
        """Append the parameters of a layer; those of a name that is known share the first one's.

        ConfigError for more `param` than blobs, or sharers of other shapes or rates.
        """
        layer, given = node.layer, list(node.param.param)
        if len(given) > len(layer.blobs):
            raise ConfigError(
                f"Too many params specified for layer {node.name}: {len(given)} for "
                f"{len(layer.blobs)} blob(s)"
            )
        wants = [i >= len(given) or given[i].lr_mult != 0 for i in range(len(layer.blobs))]
        layer.param_propagate_down = wants
        for i, blob in enumerate(layer.blobs):
            spec = ParamSpec()
            if i < len(layer.param.param):
                spec.CopyFrom(layer.param.param[i])
            made = Param(behind(blob), len(self.nodes) - 1, i, spec)
            if spec.name in self._owners:
                self._share(made, self._owners[spec.name])
            elif spec.name:
                self._owners[spec.name] = made
            node.params.append(made)
        node.need_backward |= any(wants)

    def _share(self, param: Param, owner: Param) -> None:
        name, there, here = param.name, self.nodes[owner.layer].name, self.nodes[param.layer].name
        log.info(
            "Sharing parameters '%s' owned by layer '%s', param index %d", name, there, owner.index
        )
        mine, theirs = param.blob, owner.blob
        permissive = param.spec.share_mode == ParamSpec.PERMISSIVE
        if mine.count != theirs.count if permissive else mine.shape != theirs.shape:
            raise ConfigError(
                f"Cannot share param '{name}' owned by layer '{there}' with layer "
                f"'{here}'; {'count' if permissive else 'shape'} mismatch.  "
                f"Owner layer param shape is {shape_string(theirs.shape)}; "
                f"sharing layer expects shape {shape_string(mine.shape)}"
            )
        mine.share_data(theirs)
        mine.share_diff(theirs)
        param.owner = owner
        for field in ("lr_mult", "decay_mult"):
            if not param.spec.HasField(field):
                continue
            known, given = getattr(owner.spec, field), getattr(param.spec, field)
            if owner.spec.HasField(field) and known != given:
                raise ConfigError(
                    f"Shared param '{name}' has mismatched {field}: {known:g} in layer "
                    f"'{there}', {given:g} here"
                )
            setattr(owner.spec, field, given)


def prune_backward(nodes: Sequence[Node]) -> None:
    """Clear the backward flags of layers that no loss depends on, and of bottoms whose diff is not
    needed.
    """
    under_loss: set[str] = set()
    skipped: set[str] = set()
    for node in reversed(nodes):
        contributes = any(
            weight or name in under_loss
            for name, weight in zip(node.top_names, node.layer.loss_weights, strict=True)
        )
        if not contributes or skipped.issuperset(node.top_names):
            node.need_backward = False
            node.propagate_down = [False] * len(node.bottoms)
        for name, down in zip(node.bottom_names, node.propagate_down, strict=True):
            if contributes:
                under_loss.add(name)
            if not down:
                skipped.add(name)
        needs = "needs" if node.need_backward else "does not need"
        log.info("%s %s backward computation.", node.name, needs)


def force_backward(nodes: Sequence[Node]) -> None:
    """Run every layer backward, to every bottom that allows it and to every parameter."""
    for node in nodes:
        node.need_backward = True
        node.propagate_down = [
            down or node.layer.allow_force_backward(j) for j, down in enumerate(node.propagate_down)
        ]
        node.layer.param_propagate_down = [True] * len(node.layer.blobs)
