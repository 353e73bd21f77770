"""Net: layers wired by blob names, and the two loops over them.

A net reads no files, updates no weights, knows no rank and prints nothing. Wiring follows Caffe's
Net::Init: layers in order, each takes its bottoms from the blobs still available, and what is never
taken is an output.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from caffepy import ops
from caffepy.core.errors import CaffeError, ConfigError
from caffepy.device.blob import PLAIN, Blob, Layout, behind, on_host, shape_string
from caffepy.device.device import Device
from caffepy.layer import Layer, check_counts, create_layer
from caffepy.layer.fused.base import FusedGroup, Member
from caffepy.layer.fused.patterns import make_group
from caffepy.net import debug
from caffepy.net.backprop import prune_backward
from caffepy.net.build import divide_batches, filter_state, insert_splits, where
from caffepy.net.fusion import Step, Wiring, find_groups
from caffepy.net.layouts import LayoutCasts, plan
from caffepy.proto.binary import blob_to_array
from caffepy.proto.caffe_pb2 import LayerParameter, NetParameter, ParamSpec
from caffepy.proto.text import format as format_text

log = logging.getLogger(__name__)

Callback = Callable[[int], object]
ForwardMutex = Callable[[Layer], AbstractContextManager[object]]
AUTOMATIC = "(automatic)"


def _own_lock(layer: Layer) -> AbstractContextManager[object]:
    return layer.forward_lock


def _call(callbacks: Sequence[Callback], index: int) -> None:
    for callback in callbacks:
        callback(index)


def _as_seen(layer: Layer, bottom: list[Blob], top: list[Blob]) -> tuple[list[Blob], list[Blob]]:
    """Bottoms and tops as the layer takes them: their host views if it computes on the host."""
    return (on_host(bottom), on_host(top)) if layer.on_host else (bottom, top)


class Net:
    """The net that an upgraded NetParameter describes for its own `state` (phase, level, stages).

    `path` is the file that defines it, for messages and for data lying beside it. `root_net`:
    layers that are shared in parallel are the root's own objects, see `set_forward_mutex`. `layout`
    is the layout in which activations lie if not the best one for the device. Batches are a
    `batch_parts`-th of the definition's. ConfigError and DataError name file, line and layer.
    """

    def __init__(
        self,
        param: NetParameter,
        *,
        device: Device | None = None,
        dtype: DTypeLike = np.float32,
        path: str | None = None,
        root_net: "Net | None" = None,
        layout: Layout | None = None,
        batch_parts: int = 1,
    ) -> None:
        self.device = device or Device()
        self.dtype = np.dtype(dtype)
        self.path = path
        self.ops = ops.backend(self.device)
        kept = filter_state(param, path)
        if batch_parts > 1:
            kept = divide_batches(kept, batch_parts, path)
        param = insert_splits(kept, path, param)
        if log.isEnabledFor(logging.INFO):
            log.info("Initializing net from parameters: \n%s", format_text(param).rstrip("\n"))
        self.param = param
        self.name: str = param.name
        self.phase: int = param.state.phase
        self.debug_info: bool = param.debug_info
        self._forward_mutex: ForwardMutex = _own_lock
        self.shares_memory = False  # blobs that are needed at different times lie in the same place

        self.layers: list[Layer] = []
        self._lent: set[int] = set()  # which of the layers are the root net's
        self.layer_names: list[str] = [layer.name for layer in param.layer]
        self.bottoms: list[list[Blob]] = []
        self.tops: list[list[Blob]] = []
        self._arguments: list[
            tuple[list[Blob], list[Blob]]
        ] = []  # bottoms and tops as each layer sees them
        self.casts: dict[
            int, LayoutCasts
        ] = {}  # of layers that take bottoms in another layout than they lie in
        self.bottom_names: list[list[str]] = []
        self.top_names: list[list[str]] = []
        self.blobs: dict[str, Blob] = {}
        self.inputs: list[str] = []
        self.layer_need_backward: list[bool] = []
        self.bottom_need_backward: list[list[bool]] = []

        self.params: list[Blob] = []  # every parameter blob, in layer order
        self.param_display_names: list[str] = []
        self.learnable_params: list[Blob] = []  # owners only
        self.learnable_owner: list[
            tuple[int, int]
        ] = []  # (layer, parameter index) of each learnable parameter
        self._specs: list[ParamSpec] = []  # of the learnable parameters
        self._owner_of: dict[str, int] = {}  # shared name -> index into learnable_params

        self.before_forward: list[Callback] = []
        self.after_forward: list[Callback] = []
        self.before_backward: list[Callback] = []
        self.after_backward: list[Callback] = []
        self._seen_shapes: list[list[tuple[int, ...]]] = []

        with self.device.scope():
            self._wire(root_net)
            layout = layout or ops.preferred_layout(self.device)
            if layout != PLAIN and self.dtype == np.float32:
                self._set_layouts(layout)
        self._weighted = [
            (i, top)
            for i, layer in enumerate(self.layers)
            for top, weight in zip(self.tops[i], layer.loss_weights, strict=True)
            if weight
        ]

    # construction

    def _wire(self, root_net: "Net | None") -> None:
        available: dict[str, bool] = {}  # blob name -> needs backward
        memory = 0
        for index, layer_param in enumerate(self.param.layer):
            with self._located(layer_param):
                if not layer_param.HasField("phase"):
                    layer_param.phase = self.param.state.phase
                lent = root_net.lend(index) if root_net else None
                layer = lent[0] if lent else self._make_layer(layer_param)
                need = self._take_bottoms(layer_param, available)
                self._make_tops(layer, layer_param)
                self._add_layer(layer)
                if lent:
                    self._lent.add(index)
                    with layer.forward_lock:
                        self._take_up(layer_param, lent[1])
                else:
                    self._set_up(layer)
                self._weigh_tops(layer)
                memory += sum(top.count for top in self.tops[index]) * self.dtype.itemsize
                log.info("Memory required for data: %d", memory)
                need |= self._append_params(index, layer, layer_param)
            self.layer_need_backward.append(need)
            available.update((name, need) for name in self.top_names[index])
        self.outputs: list[str] = sorted((n for n in available if n != AUTOMATIC), key=str.encode)
        prune_backward(self)
        for name in self.outputs:
            log.info("This network produces output %s", name)
        log.info("Network initialization done.")

    def _make_layer(self, layer_param: LayerParameter) -> Layer:
        own = LayerParameter()
        own.CopyFrom(layer_param)
        layer = create_layer(own, own.phase, self.device, self.dtype, self.path)
        log.info("Creating Layer %s", layer_param.name)
        return layer

    def lend(self, index: int) -> tuple[Layer, list[Blob]] | None:
        """The layer at this place and its tops, if it may be shared with worker nets, which have
        the same layers.
        """
        layer = self.layers[index]
        return (layer, self.tops[index]) if layer.share_in_parallel else None

    @property
    def own_layers(self) -> list[tuple[int, Layer]]:
        """The layers that are not a root net's, with their places."""
        return [(i, layer) for i, layer in enumerate(self.layers) if i not in self._lent]

    @property
    def shared_layers(self) -> list[Layer]:
        """The layers that worker nets have in common with their root."""
        return [layer for layer in self.layers if layer.share_in_parallel]

    def _take_bottoms(self, layer_param: LayerParameter, available: dict[str, bool]) -> bool:
        names = list(layer_param.bottom)
        given = list(layer_param.propagate_down)
        if given and len(given) != len(names):
            raise ConfigError(
                f"propagate_down must be given once per bottom: {len(given)} for {len(names)} bottom(s)"
            )
        need = [available.pop(name) for name in names]
        self.bottom_names.append(names)
        self.bottoms.append([self.blobs[name] for name in names])
        self.bottom_need_backward.append([bool(b) for b in given] or need)
        for name in names:
            log.info("%s <- %s", layer_param.name, name)
        return any(need)

    def _make_tops(self, layer: Layer, layer_param: LayerParameter) -> None:
        bottom_names = self.bottom_names[-1]
        names, tops = list(layer_param.top), []
        for i, name in enumerate(names):
            if i < len(bottom_names) and name == bottom_names[i]:
                if not layer.in_place:
                    raise ConfigError(
                        f"{layer.type} cannot work in place; give its top another name than {name!r}"
                    )
                log.info("%s -> %s (in-place)", layer_param.name, name)
            elif name in self.blobs:
                raise ConfigError(f"Top blob '{name}' produced by multiple sources.")
            else:
                log.info("%s -> %s", layer_param.name, name)
                self.blobs[name] = Blob(dtype=self.dtype, device=self.device)
            tops.append(self.blobs[name])
            if layer.is_input:
                self.inputs.append(name)
        if layer.auto_top_blobs:
            least = layer.tops if isinstance(layer.tops, int) else layer.tops[0]
            while len(tops) < least:
                log.info("%s -> %s", layer_param.name, AUTOMATIC)
                names.append(AUTOMATIC)
                tops.append(Blob(dtype=self.dtype, device=self.device))
                self.blobs.setdefault(AUTOMATIC, tops[-1])
        self.top_names.append(names)
        self.tops.append(tops)

    def _add_layer(self, layer: Layer) -> None:
        self.layers.append(layer)
        bottom, top = self.bottoms[-1], self.tops[-1]
        self._arguments.append(_as_seen(layer, bottom, top))
        if layer.on_host and not layer.is_data:
            log.info("%s (%s) computes on the host", layer.param.name, layer.type)
        check_counts(layer, len(bottom), len(top))

    def _take_up(self, layer_param: LayerParameter, lent: list[Blob]) -> None:
        """Give the tops of a layer that the root net has set up the root's shapes and first values."""
        log.info("Sharing layer %s from root net", layer_param.name)
        for own, root in zip(self.tops[-1], lent, strict=True):
            own.reshape_like(root)
            if root.data_memory.touched:
                own.host_data[...] = root.host_data

    def _set_up(self, layer: Layer) -> None:
        log.info("Setting up %s", layer.param.name)
        if layer.param.blobs and not layer.blobs:
            for proto in layer.param.blobs:
                array = blob_to_array(proto)
                layer.add_blob(array.shape).host_data[...] = array
            log.info("Skipping parameter initialization")
        layer.setup(*self._arguments[-1])
        layer.reshape(*self._arguments[-1])

    def _weigh_tops(self, layer: Layer) -> None:
        """Put the loss weights into the diffs of the tops, once and for all."""
        top = self.tops[-1]
        self._seen_shapes.append([b.shape for b in self.bottoms[-1] + top])
        weights = list(layer.param.loss_weight)
        if weights and len(weights) != len(top):
            raise ConfigError(
                f"loss_weight must be given once per top: {len(weights)} for {len(top)} top(s)"
            )
        layer.loss_weights = weights or [0.0] * len(top)
        for blob, weight in zip(top, layer.loss_weights, strict=True):
            log.info("Top shape: %s", shape_string(blob.shape))
            if weight:
                blob.host_diff[...] = weight
                log.info("    with loss weight %g", weight)

    def _append_params(self, index: int, layer: Layer, layer_param: LayerParameter) -> bool:
        given = list(layer_param.param)
        if len(given) > len(layer.blobs):
            raise ConfigError(
                f"Too many params specified for layer {layer_param.name}: {len(given)} for {len(layer.blobs)} blob(s)"
            )
        wants = [i >= len(given) or given[i].lr_mult != 0 for i in range(len(layer.blobs))]
        layer.param_propagate_down = wants
        for i in range(len(layer.blobs)):
            self._append_param(index, i)
        return any(wants)

    def _append_param(self, layer_index: int, param_index: int) -> None:
        layer = self.layers[layer_index]
        specs = layer.param.param
        spec = specs[param_index] if param_index < len(specs) else ParamSpec()
        blob = behind(layer.blobs[param_index])
        self.params.append(blob)
        self.param_display_names.append(spec.name or str(param_index))
        if spec.name in self._owner_of and spec.name:
            self._share_param(self._owner_of[spec.name], layer_index, param_index, spec)
            return
        if spec.name:
            self._owner_of[spec.name] = len(self.learnable_params)
        self.learnable_params.append(blob)
        self.learnable_owner.append((layer_index, param_index))
        own = ParamSpec()
        own.CopyFrom(spec)
        self._specs.append(own)

    def _share_param(self, owner: int, layer_index: int, param_index: int, spec: ParamSpec) -> None:
        owner_layer, owner_index = self.learnable_owner[owner]
        names = self.layer_names
        log.info(
            "Sharing parameters '%s' owned by layer '%s', param index %d",
            spec.name,
            names[owner_layer],
            owner_index,
        )
        mine, theirs = (
            behind(self.layers[layer_index].blobs[param_index]),
            self.learnable_params[owner],
        )
        permissive = spec.share_mode == ParamSpec.PERMISSIVE
        if mine.count != theirs.count if permissive else mine.shape != theirs.shape:
            raise ConfigError(
                f"Cannot share param '{spec.name}' owned by layer '{names[owner_layer]}' with layer "
                f"'{names[layer_index]}'; {'count' if permissive else 'shape'} mismatch.  "
                f"Owner layer param shape is {shape_string(theirs.shape)}; "
                f"sharing layer expects shape {shape_string(mine.shape)}"
            )
        mine.share_data(theirs)
        mine.share_diff(theirs)
        known = self._specs[owner]
        for field in ("lr_mult", "decay_mult"):
            if not spec.HasField(field):
                continue
            if known.HasField(field) and getattr(known, field) != getattr(spec, field):
                raise ConfigError(
                    f"Shared param '{spec.name}' has mismatched {field}: {getattr(known, field):g} in layer "
                    f"'{names[owner_layer]}', {getattr(spec, field):g} here"
                )
            setattr(known, field, getattr(spec, field))

    def _set_layouts(self, layout: Layout) -> None:
        """Let activations lie in the GPU's own layout, and layers that do not take it have copies
        of their bottoms.
        """
        layouts = plan(self.layers, self.bottoms, self.tops, layout)
        for bottoms, tops, top_layouts in zip(self.bottoms, self.tops, layouts.tops, strict=True):
            for blob, layout in zip(tops, top_layouts, strict=True):
                sharing = any(
                    b.data_memory is blob.data_memory and b.layout != layout for b in bottoms
                )
                if (
                    layout != PLAIN and not sharing
                ):  # it shares the memory of the bottom's copy from reshape on
                    blob.set_layout(layout)
        for i, layer in enumerate(self.layers):
            casts = LayoutCasts(self.bottoms[i], self.tops[i], layouts.bottoms[i])
            if casts:
                self.casts[i] = casts
                self._arguments[i] = _as_seen(layer, casts.bottoms, casts.tops)
            with layer.forward_lock:
                self._reshape_now(i)
            for blob, weight in zip(self.tops[i], layer.loss_weights, strict=True):
                if weight:
                    blob.host_diff[...] = weight

    # what a solver needs to know of the parameters

    @property
    def params_lr(self) -> list[float]:
        """lr_mult of each learnable parameter."""
        return [spec.lr_mult for spec in self._specs]

    @property
    def params_weight_decay(self) -> list[float]:
        """decay_mult of each learnable parameter."""
        return [spec.decay_mult for spec in self._specs]

    @property
    def blob_loss_weights(self) -> dict[str, float]:
        """Loss weight of each blob by name, 0 for most."""
        weights = dict.fromkeys(self.blobs, 0.0)
        for layer, names in zip(self.layers, self.top_names, strict=True):
            weights.update((n, w) for n, w in zip(names, layer.loss_weights, strict=True) if w)
        return weights

    # the two loops

    def forward(
        self, start: int = 0, end: int | None = None, *, steps: Iterable[Step] | None = None
    ) -> None:
        """Run layers `start` to `end` (inclusive; default: all), or these of the net's `steps`."""
        if steps is None:
            steps = map(Step, range(start, len(self.layers) if end is None else end + 1))
        self._run(steps, self._forward_step)

    def _run(self, steps: Iterable[Step], run: Callable[[Step], None]) -> None:
        step = Step(0)
        try:
            with self.device.scope(), self.ops.blas_scope(), np.errstate(all="ignore"):
                for step in steps:
                    run(step)
        except CaffeError as error:
            raise error.at(where(self.path, self.param.layer[step.last])) from error.__cause__

    def _forward_step(self, step: Step) -> None:
        if step.group is None:
            self._forward_layer(step.last)
            return
        casts = self.casts.get(step.layers[0])
        if casts:
            casts.reshape()
            casts.before_forward(self.ops.convert)
        for index in step.layers:
            self._reshape_layer(index)
            _call(self.before_forward, index)
        step.group.forward()
        for index in step.layers:
            _call(self.after_forward, index)

    def _backward_step(self, step: Step) -> None:
        if step.group is None:
            self._backward_layer(step.last)
        else:
            self._backward_group(step.layers, step.group)
        if self.shares_memory or len(self.learnable_params) < len(self.params):
            # what runs aside reads gradients whose place the next step may take, and adds to shared
            # parameters
            self.device.wait_stream()

    def _backward_group(self, layers: Sequence[int], group: FusedGroup) -> None:
        for index in reversed(layers):
            _call(self.before_backward, index)
        if self.layer_need_backward[layers[-1]]:
            group.backward()
            first = layers[0]
            if first in self.casts:
                need = self.bottom_need_backward[first]
                self.casts[first].after_backward(self.ops.convert, self.bottoms[first], need)
        for index in reversed(layers):
            _call(self.after_backward, index)

    @cached_property
    def steps(self) -> list[Step]:
        """The layers in the order of the net, those that can be computed together in one step, at
        the last of them.
        """
        wiring = Wiring(self.layers, self.bottoms, self.tops, self.layer_need_backward)
        alone = set(range(len(self.layers)))
        steps = []
        for group in find_groups(wiring):
            if not any(index in self.casts for index in group[1:]):
                members = [
                    Member(self.layers[i], *self._arguments[i], self.bottom_need_backward[i])
                    for i in group
                ]
                has_gradient = [self._has_gradient(top) for top in self.tops[group[-1]]]
                made = make_group(members, self.layer_need_backward[group[-1]], has_gradient)
                steps.append(Step(group[-1], tuple(group), made))
                alone -= set(group)
        return sorted([*steps, *map(Step, alone)], key=lambda step: step.last)

    def _has_gradient(self, top: Blob) -> bool:
        """True if a layer that reads the blob writes its diff."""
        return any(
            need and b is top
            for bottoms, needs in zip(self.bottoms, self.bottom_need_backward, strict=True)
            for b, need in zip(bottoms, needs, strict=True)
        )

    def set_forward_mutex(self, mutex: ForwardMutex | None) -> None:
        """Run the forward pass of each layer that is shared in parallel inside `mutex(layer)`; None:
        inside the layer's own lock.
        """
        self._forward_mutex = mutex or _own_lock

    def _forward_layer(self, index: int) -> None:
        layer, (bottom, top) = self.layers[index], self._arguments[index]
        _call(self.before_forward, index)
        casts = self.casts.get(index)
        if casts:
            casts.reshape()
            casts.before_forward(self.ops.convert)
        if layer.share_in_parallel:
            with self._forward_mutex(layer):
                self._reshape_layer(index)
                layer.forward(bottom, top)
        else:
            self._reshape_layer(index)
            layer.forward(bottom, top)
        if casts:
            casts.after_forward(self.ops.convert)
        if self.debug_info:
            debug.forward(self, index)
        _call(self.after_forward, index)

    def _reshape_layer(self, index: int) -> None:
        layer, (bottom, top) = self.layers[index], self._arguments[index]
        shapes = [b.shape for b in bottom]
        shapes += [b.shape for b in top]
        if layer.always_reshape or shapes != self._seen_shapes[index]:
            self._reshape_now(index)

    def _reshape_now(self, index: int) -> None:
        bottom, top = self._arguments[index]
        self.layers[index].reshape(bottom, top)
        self._seen_shapes[index] = [b.shape for b in bottom + top]

    def backward(
        self, start: int | None = None, end: int = 0, *, steps: Sequence[Step] | None = None
    ) -> None:
        """Run the backward passes of layers `start` (default: the last) down to `end`, of those
        that need one.

        Or of these of the net's `steps`, the last first; they must be those that ran forward.
        """
        if steps is None:
            steps = [
                Step(index)
                for index in range(end, len(self.layers) if start is None else start + 1)
            ]
        self._run(reversed(steps), self._backward_step)
        with self.device.scope():
            self.device.wait_stream()
        if self.debug_info:
            debug.norms(self)

    def _backward_layer(self, index: int) -> None:
        _call(self.before_backward, index)
        if self.layer_need_backward[index]:
            bottom, top = self._arguments[index]
            casts, need = self.casts.get(index), self.bottom_need_backward[index]
            if casts:
                casts.before_backward(self.ops.convert)
            self.layers[index].backward(top, need, bottom)
            if casts:
                casts.after_backward(self.ops.convert, self.bottoms[index], need)
            if self.debug_info:
                debug.backward(self, index)
        _call(self.after_backward, index)

    def loss(self, start: int = 0, end: int | None = None) -> float:
        """The loss of the last forward: the sum of data times diff over the tops with a loss
        weight.
        """
        last = len(self.layers) - 1 if end is None else end
        return float(
            sum(
                np.dot(top.host_data.reshape(-1), top.host_diff.reshape(-1))
                for i, top in self._weighted
                if start <= i <= last
            )
        )

    def reshape(self) -> None:
        """Propagate the shapes of the inputs through all layers without computing anything."""
        for index in range(len(self.layers)):
            with self._located(self.param.layer[index]):
                if index in self.casts:
                    self.casts[index].reshape()
                self._reshape_now(index)

    def clear_param_diffs(self) -> None:
        """Set the diffs of all learnable parameters to zero."""
        with self.device.scope():
            for blob in self.learnable_params:
                blob.diff.fill(0)

    def share_trained_layers_with(self, other: "Net") -> None:
        """Use the parameter data (not the diffs) of the other net's layers of the same names;
        shapes must be equal.
        """
        targets = {name: i for i, name in reversed(list(enumerate(self.layer_names)))}
        for name, source in zip(other.layer_names, other.layers, strict=True):
            if name not in targets:
                log.debug("Ignoring source layer %s", name)
                continue
            target = self.layers[targets[name]]
            if len(target.blobs) != len(source.blobs):
                raise ConfigError(
                    f"Incompatible number of blobs for layer {name}: {len(source.blobs)} in the source, "
                    f"{len(target.blobs)} here"
                )
            for j, (mine, theirs) in enumerate(zip(target.blobs, source.blobs, strict=True)):
                if mine.shape != theirs.shape:
                    raise ConfigError(
                        f"Cannot share param {j} weights from layer '{name}'; shape mismatch.  Source param shape is "
                        f"{shape_string(theirs.shape)}; target param shape is {shape_string(mine.shape)}"
                    )
                behind(mine).share_data(behind(theirs))

    def state(self) -> dict[str, dict[str, Any]]:
        """The states of all layers that have one, by `index/name`; those of a root net's layers are
        the root's.
        """
        states = {f"{i}/{layer.param.name}": layer.state() for i, layer in self.own_layers}
        return {key: state for key, state in states.items() if state}

    def set_state(self, states: dict[str, dict[str, Any]]) -> None:
        """Take up what `state` of a net of the same definition gave."""
        for i, layer in self.own_layers:
            key = f"{i}/{layer.param.name}"
            if key in states:
                layer.set_state(states[key])

    def close(self) -> None:
        """Stop the threads of data layers and release files."""
        for _, layer in self.own_layers:
            layer.close()

    @contextmanager
    def _located(self, layer_param: LayerParameter) -> Iterator[None]:
        try:
            yield
        except CaffeError as error:
            raise error.at(where(self.path, layer_param)) from error.__cause__
