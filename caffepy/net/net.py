"""Net: layers wired by blob names, and the two loops over them.

A net reads no files, updates no weights, knows no rank and prints nothing. `wiring` builds it from
a definition; `node` has the record of each layer.
"""

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from caffepy import ops
from caffepy.core.errors import CaffeError, ConfigError
from caffepy.device.blob import PLAIN, Blob, Layout, behind, shape_string
from caffepy.device.device import Device
from caffepy.device.recording import Temporaries
from caffepy.device.streams import BRANCH
from caffepy.layer import Layer
from caffepy.net.branches import with_branches
from caffepy.net.build import divide_batches, filter_state, insert_splits, located
from caffepy.net.debug_info import log_backward, log_forward, log_norms
from caffepy.net.forks import adapt_forks
from caffepy.net.fusion import Step, fused_steps
from caffepy.net.layouts import set_layouts
from caffepy.net.node import Node, Param
from caffepy.net.wiring import wire
from caffepy.proto.caffe_pb2 import NetParameter
from caffepy.proto.text import format as format_text
from caffepy.proto.text import where

log = logging.getLogger(__name__)

Callback = Callable[[int], object]
ForwardMutex = Callable[[Layer], AbstractContextManager[object]]


def _own_lock(layer: Layer) -> AbstractContextManager[object]:
    return layer.forward_lock


def _call(callbacks: Sequence[Callback], indices: Sequence[int]) -> None:
    for index in indices:
        for callback in callbacks:
            callback(index)


class Net:
    """A net, made from an upgraded NetParameter for the state (phase, level, stages) in it.

    `path` is the file that defines it, for messages and for data beside it. With `root_net`, layers
    that are shared in parallel are the root's objects, see `set_forward_mutex`. `layout` is that of
    activations, by default the preferred one of the device. Batch sizes are divided by
    `batch_parts`. ConfigError and DataError name file, line and layer.
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
        self.path = path
        self.ops = ops.backend(self.device)
        kept = filter_state(param, path)
        adapt_forks(kept, path)
        if batch_parts > 1:
            kept = divide_batches(kept, batch_parts, path)
        if log.isEnabledFor(logging.INFO):
            log.info("Initializing net from parameters: \n%s", format_text(kept).rstrip("\n"))
        self.param = param = insert_splits(kept, path, param)
        self.name: str = param.name
        self.debug_info: bool = param.debug_info
        self._thread = threading.local()  # `.runs` is true in a block of `running`
        self._forward_mutex: ForwardMutex = _own_lock
        self._script_mutex: ForwardMutex = _own_lock

        with self.device.scope():
            root = root_net.nodes if root_net else None
            with self.device.random.drawing_beside():
                wired = wire(param, self.device, np.dtype(dtype), path, root)
            self.nodes: list[Node] = wired.nodes
            self.blobs, self.inputs, self.outputs = wired.blobs, wired.inputs, wired.outputs
            layout = layout or ops.preferred_layout(self.device)
            if layout != PLAIN and np.dtype(dtype) == np.float32:
                set_layouts(self.nodes, layout)
        self.layers = [node.layer for node in self.nodes]
        self.layer_names = [node.name for node in self.nodes]
        self.learnable_params = [param.blob for param in self.learnable]
        # The device waits for weight gradients on the side stream after each layer: they add to
        # parameters that several layers share, or read diffs whose memory the next may reuse.
        self.waits_each_layer = len(self.learnable_params) < len(self.params)
        # Steps that run forward again before backward of the step that ends with this layer.
        self.recompute: Mapping[int, Sequence[Step]] = {}

        self.temporaries = Temporaries()  # of what is recorded on the CPU

        self.before_forward: list[Callback] = []
        self.after_forward: list[Callback] = []
        self.before_backward: list[Callback] = []
        self.after_backward: list[Callback] = []

    @property
    def phase(self) -> int:
        """TRAIN or TEST."""
        return self.param.state.phase

    @property
    def own_nodes(self) -> dict[str, Node]:
        """Nodes of layers that do not belong to the root net, by the names of their states:
        `index/name`.
        """
        places = enumerate(self.nodes)
        return {f"{i}/{node.name}": node for i, node in places if not node.of_root}

    @property
    def shared_layers(self) -> list[Layer]:
        """Layers that worker nets and their root net share."""
        return [layer for layer in self.layers if layer.share_in_parallel]

    @property
    def params(self) -> list[Blob]:
        """Blobs of all parameters, in layer order."""
        return [param.blob for node in self.nodes for param in node.params]

    @property
    def learnable(self) -> list[Param]:
        """Records of `learnable_params`: all parameters but those that share an owner's blob."""
        return [p for node in self.nodes for p in node.params if p.owner is None]

    @property
    def blob_loss_weights(self) -> dict[str, float]:
        """Loss weight of each blob by name, 0 for most."""
        weights = dict.fromkeys(self.blobs, 0.0)
        for node in self.nodes:
            pairs = zip(node.top_names, node.layer.loss_weights, strict=True)
            weights.update((name, weight) for name, weight in pairs if weight)
        return weights

    @cached_property
    def steps(self) -> list[Step]:
        """Fused steps, in the order of the net: a group runs at the place of its last layer. On a
        GPU a step knows its region and branch.
        """
        steps = fused_steps(self.nodes)
        return with_branches(self.nodes, steps) if self.device.is_cuda else steps

    def set_forward_mutex(
        self, mutex: ForwardMutex | None, of_script: ForwardMutex | None = None
    ) -> None:
        """Run forward of shared layers inside `mutex(layer)`; None: inside the layer's own lock.

        Passes that give no `steps`, which are not the solver's, run inside `of_script(layer)`.
        """
        self._forward_mutex = mutex or _own_lock
        self._script_mutex = of_script or self._forward_mutex

    def forward(
        self, start: int = 0, end: int | None = None, *, steps: Iterable[Step] | None = None
    ) -> None:
        """Run layers `start` to `end` (inclusive; default: all), or these of the net's `steps`."""
        mutex = self._forward_mutex
        if steps is None:
            mutex = self._script_mutex
            steps = map(Step, range(start, len(self.layers) if end is None else end + 1))
        self._run(steps, partial(self._forward_step, mutex=mutex), self._after_forward)

    def _run(
        self,
        steps: Iterable[Step],
        run: Callable[[Step], None],
        after: Callable[[Step], None] = lambda step: None,
    ) -> None:
        """Run each step, and call `after` behind it.

        Branches of a region run concurrently on side streams of the device, unless data are
        recomputed. `after` is then called once the main stream waits for all of them.
        """
        step = Step(0)
        try:
            with nullcontext() if getattr(self._thread, "runs", False) else self.running():
                for region, found in groupby(steps, lambda step: step.region):
                    if not region or self.recompute:
                        for step in found:
                            run(step)
                            after(step)
                        continue
                    branches = list(found)
                    for step in branches:
                        with self.device.side_stream(f"{BRANCH} {step.branch}"):
                            run(step)
                    for number in {step.branch for step in branches}:
                        self.device.wait_stream(f"{BRANCH} {number}")
                    for step in branches:
                        after(step)
        except CaffeError as error:
            raise error.at(where(self.path, self.param.layer[step.last])) from error.__cause__

    @contextmanager
    def running(self) -> Iterator[None]:
        """Enter, once for several passes of this thread, the contexts that each pass needs."""
        before = getattr(self._thread, "runs", False)
        with self.device.scope(), self.ops.blas_scope(), np.errstate(all="ignore"):
            self._thread.runs = True
            try:
                yield
            finally:
                self._thread.runs = before

    def _forward_step(self, step: Step, mutex: ForwardMutex) -> None:
        indices = step.indices
        node = self.nodes[indices[0]]
        if self.before_forward:
            _call(self.before_forward, indices)
        if node.layer.share_in_parallel:
            with mutex(node.layer):
                self._compute(step)
        else:
            self._compute(step)
        if self.debug_info and not step.group:
            log_forward(node)

    def _after_forward(self, step: Step) -> None:
        if self.after_forward:
            _call(self.after_forward, step.indices)

    def run_data_layer(self, index: int) -> None:
        """Run a layer that reads files forward, calling the callbacks before it only."""
        node = self.nodes[index]
        try:
            _call(self.before_forward, (index,))
            with self._forward_mutex(node.layer):
                node.reshape_if_changed()
                node.layer.forward(node.layer_bottoms, node.layer_tops)
        except CaffeError as error:
            raise error.at(where(self.path, self.param.layer[index])) from error.__cause__

    def _compute(self, step: Step) -> None:
        """Reshape the layers of a step whose blobs changed, and run them forward."""
        casts = self.nodes[step.indices[0]].casts  # only the first of a group
        if casts:
            casts.reshape()
            casts.before_forward(self.ops.convert)
        if step.group:
            for index in step.layers:
                self.nodes[index].reshape_if_changed()
            step.group.forward()
        else:
            node = self.nodes[step.last]
            node.reshape_if_changed()
            node.layer.forward(node.layer_bottoms, node.layer_tops)
            if casts:
                casts.after_forward(self.ops.convert)

    def compile_ahead(self, steps: Iterable[Step]) -> None:
        """On a GPU, start to compile the kernels of steps that only launch kernels, all at once
        rather than each at its first launch. No callback is called.

        It does nothing if a script has reshaped blobs: the kernels would be for the old shapes.
        """
        if any(node.shapes_changed() for node in self.nodes):
            return

        def look_ahead(step: Step) -> None:
            if all(self.layers[index].only_launches for index in step.indices):
                self._compute(step)
                if self.nodes[step.last].need_backward:
                    self._differentiate(step)

        with self.ops.compile_ahead():
            self._run(steps, look_ahead)

    def backward(
        self, start: int | None = None, end: int = 0, *, steps: Sequence[Step] | None = None
    ) -> None:
        """Run layers `start` (default: the last) down to `end` backward, those that need it; or
        these of the net's `steps`, which must have run forward.
        """
        if steps is None:
            stop = len(self.layers) if start is None else start + 1
            steps = [Step(index) for index in range(end, stop)]
        run = self._recomputing if self.recompute else self._backward_step
        self._run(reversed(steps), run, self._after_backward)
        with self.device.scope():
            self.device.wait_stream()
        if self.debug_info:
            log_norms(self.learnable_params)

    def _recomputing(self, step: Step) -> None:
        """Run a step backward, after the steps that its backward needs forward again."""
        for again in self.recompute.get(step.last, ()):
            self._forward_again(again)
        self._backward_step(step)

    def _forward_again(self, step: Step) -> None:
        """Write the data that a step wrote before, without calling callbacks."""
        nodes = [self.nodes[i] for i in step.indices]
        try:
            for node in nodes:
                node.layer.recomputes = True
            self._compute(step)
        finally:
            for node in nodes:
                node.layer.recomputes = False

    def _backward_step(self, step: Step) -> None:
        indices = step.indices
        node = self.nodes[indices[0]]
        if self.before_backward:
            _call(self.before_backward, indices[::-1])
        if self.nodes[step.last].need_backward:
            self._differentiate(step)
            if self.debug_info and not step.group:
                log_backward(node)

    def _after_backward(self, step: Step) -> None:
        if self.after_backward:
            _call(self.after_backward, step.indices[::-1])
        if self.waits_each_layer:
            self.device.wait_stream()

    def _differentiate(self, step: Step) -> None:
        """Run the layers of a step backward."""
        node = self.nodes[step.indices[0]]
        casts, down = node.casts, node.propagate_down
        if step.group:
            step.group.backward()
        else:
            if casts:
                casts.before_backward(self.ops.convert)
            node.layer.backward(node.layer_tops, down, node.layer_bottoms)
        if casts:
            casts.after_backward(self.ops.convert, node.bottoms, down)

    def loss(self, start: int = 0, end: int | None = None) -> float:
        """Return the loss of the last forward pass: the sum of data * diff over weighted tops."""
        if not self._weighted:
            return 0.0
        last = len(self.layers) - 1 if end is None else end
        tops = [top for i, node in self._weighted if start <= i <= last for top in node.losses]
        return float(sum(np.dot(t.host_data.reshape(-1), t.host_diff.reshape(-1)) for t in tops))

    @cached_property
    def _weighted(self) -> list[tuple[int, Node]]:
        """The layers that have a loss weight, by their places."""
        return [(i, node) for i, node in enumerate(self.nodes) if any(node.layer.loss_weights)]

    def reshape(self) -> None:
        """Propagate the shapes of the inputs through all layers without computing anything."""
        for node in self.nodes:
            with located(self.path, node.param):
                if node.casts:
                    node.casts.reshape()
                node.reshape()

    def clear_param_diffs(self) -> None:
        """Set the diffs of all learnable parameters to zero."""
        with self.device.scope():
            for blob in self.learnable_params:
                blob.diff.fill(0)

    def params_beyond(self, other: "Net") -> list[Blob]:
        """Return the parameters of layers whose names the other net does not have, which
        `share_trained_layers_with` therefore does not share.
        """
        known, pairs = set(other.layer_names), zip(self.layer_names, self.layers, strict=True)
        return [blob for name, layer in pairs if name not in known for blob in layer.blobs]

    def share_trained_layers_with(self, other: "Net", but: Collection[str] = ()) -> None:
        """Use the parameter data of the other net's layers of the same names and shapes, `but` for
        layers of these names. ConfigError if blobs of a name differ in number or shape.
        """
        targets = {name: i for i, name in reversed(list(enumerate(self.layer_names)))}
        for name, source in zip(other.layer_names, other.layers, strict=True):
            if name in but:
                continue
            if name not in targets:
                log.info("Ignoring source layer %s", name)
                continue
            node = self.nodes[targets[name]]
            target = node.layer
            if len(target.blobs) != len(source.blobs):
                raise ConfigError(
                    f"Incompatible number of blobs for layer {name}: {len(source.blobs)} in the "
                    f"source, {len(target.blobs)} here",
                    where(self.path, node.param),
                )
            for j, (mine, theirs) in enumerate(zip(target.blobs, source.blobs, strict=True)):
                if mine.shape != theirs.shape:
                    raise ConfigError(
                        f"Cannot share param {j} weights from layer '{name}'; shape mismatch.  "
                        f"Source param shape is {shape_string(theirs.shape)}; "
                        f"target param shape is {shape_string(mine.shape)}; the layer needs the "
                        "same settings and shapes of inputs in both nets",
                        where(self.path, node.param),
                    )
                behind(mine).share_data(behind(theirs))

    def state(self) -> dict[str, dict[str, Any]]:
        """Return the states of all layers but the root net's, by the names in `own_nodes`."""
        return {key: state for key, layer in self._stateful if (state := layer.state())}

    @cached_property
    def _stateful(self) -> list[tuple[str, Layer]]:
        """The layers that may have a state, by its name."""
        layers = ((name, node.layer) for name, node in self.own_nodes.items())
        return [(name, layer) for name, layer in layers if type(layer).state is not Layer.state]

    def set_state(self, states: dict[str, dict[str, Any]]) -> None:
        """Restore what `state` of a net of the same definition returned."""
        for name, node in self.own_nodes.items():
            if state := states.get(name):
                node.layer.set_state(state)

    def close(self) -> None:
        """Stop the threads of data layers and release files."""
        for node in self.own_nodes.values():
            node.layer.close()
