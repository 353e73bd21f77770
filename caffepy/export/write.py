"""From a built net to a graph, with the present sizes of its blobs or for any batch size."""

from collections.abc import Sequence

import numpy as np

from caffepy.core.errors import ConfigError
from caffepy.export.graph import Graph, InexpressibleError, Node, Shape, Site, writers
from caffepy.export.trace import Trace, sources
from caffepy.net import Net
from caffepy.proto.text import where

Dim = int | str


def write_graph(net: Net, trace: Trace, opset: int) -> Graph:
    """Write the trace's layers as operators; ConfigError names all that have none, and their lines
    in the file.
    """
    graph = Graph(
        opset,
        set(net.blobs) | {name for names in trace.tops.values() for name in names},
        trace.once,
    )
    owners = _parameter_names(net, graph)
    shapes = {tensor: net.blobs[blob].shape for tensor, blob in trace.inputs}
    failed = []
    for i in trace.layers:
        layer, tops = net.layers[i], trace.tops[i]
        top_shapes = [b.shape for b in net.nodes[i].tops]
        shapes |= dict(zip(tops, top_shapes, strict=True))
        params = [owners[id(b.data_memory)] for b in layer.blobs]
        bottom_shapes = [b.shape for b in net.nodes[i].bottoms]
        site = Site(
            graph,
            layer,
            net.nodes[i].name,
            trace.bottoms[i],
            bottom_shapes,
            tops,
            top_shapes,
            params,
        )
        try:
            if layer.type not in writers:
                raise InexpressibleError("caffepy has no ONNX operators for it")
            writers[layer.type](site)
        except InexpressibleError as reason:
            failed.append(f"{where(net.path, net.param.layer[i])}: {reason}")
    if failed:
        raise ConfigError(
            "\n  ".join(["what these layers do cannot be expressed in ONNX:", *failed])
        )
    graph.shapes = shapes
    _name_outputs(graph, trace)
    return graph


def _parameter_names(net: Net, graph: Graph) -> dict[int, str]:
    """Name each parameter, given by its memory, after its owner and index there: `conv1.0`."""
    return {
        id(param.blob.data_memory): graph.fresh(f"{net.nodes[param.layer].name}.{param.index}")
        for param in net.learnable
    }


def _name_outputs(graph: Graph, trace: Trace) -> None:
    """Add a tensor for each output whose tensor is not named after its blob, as after a Split."""
    for name, (tensor, blob) in zip(trace.output_names, trace.outputs, strict=True):
        if name != tensor:
            graph.nodes.append(Node("Identity", [tensor], [name], {}, blob))
            graph.shapes[name] = graph.shapes[tensor]


class Batch:
    """The inputs with a batch axis: those whose first axis has the size of the first input's."""

    def __init__(self, net: Net) -> None:
        inputs = [top for i in sources(net) for top in net.nodes[i].tops if top.shape]
        if not inputs:
            raise ConfigError("the net has no input with a batch size", net.path)
        self.net, self.size = net, inputs[0].shape[0]
        self._inputs = [blob for blob in inputs if blob.shape[0] == self.size]

    def resize(self, size: int) -> None:
        """Reshape the net for this batch size; ConfigError names the layer that cannot take it."""
        for blob in self._inputs:
            blob.reshape((size, *blob.shape[1:]))
        try:
            self.net.reshape()
        except ConfigError as error:
            raise ConfigError(
                f"a batch of {size}, not {self.size}, does not go: {error.message}", error.where
            ) from None
        self.size = size


def write_dynamic(net: Net, trace: Trace, opset: int) -> tuple[Graph, dict[str, list[Dim]]]:
    """Return a graph for any batch size N and the shapes of its blobs, expressions of N as text.

    The net is written with two batch sizes; sizes that differ depend on the batch.
    """
    batch = Batch(net)
    size = batch.size
    graph = write_graph(net, trace, opset)
    batch.resize(2 * size)
    double = write_graph(net, trace, opset)
    batch.resize(size)
    _merge(graph, double, net)
    shapes = {
        name: _symbolic(shape, double.shapes[name], size, name)
        for name, shape in graph.shapes.items()
    }
    return graph, shapes


def _symbolic(one: Shape, two: Shape, size: int, name: str) -> list[Dim]:
    dims: list[Dim] = []
    for axis, (a, b) in enumerate(zip(one, two, strict=True)):
        if a == b:
            dims.append(a)
        elif b == 2 * a and a % size == 0:
            dims.append("N" if a == size else f"{a // size}*N")
        else:
            dims.append(f"{name}_{axis}")
    return dims


def _merge(graph: Graph, double: Graph, net: Net) -> None:
    """Replace the one size of a Reshape that depends on the batch by -1; ConfigError for layers
    where more depends on it.
    """
    targets = {node.inputs[1] for node in graph.nodes if node.op == "Reshape"}
    failed: dict[str, None] = {}
    for node, other in zip(graph.nodes, double.nodes, strict=False):
        if node != other or not all(
            _merge_value(graph, double, name, name in targets) for name in node.inputs
        ):
            failed[node.layer] = None
    if failed:
        params = {layer.name: layer for layer in net.param.layer}
        places = (where(net.path, params[name]) for name in failed)
        raise ConfigError("\n  ".join(["these layers need a fixed batch size:", *places]))


def _merge_value(graph: Graph, double: Graph, name: str, is_target: bool) -> bool:
    """Make a constant independent of the batch size; False if that is not possible."""
    if name not in graph.values:
        return True
    one, two = graph.values[name], double.values[name]
    if one is two or np.array_equal(one, two):
        return True
    if not is_target or np.count_nonzero(one != two) != 1:
        return False
    graph.values[name] = np.where(one == two, one, -1)
    return True


def operators(nodes: Sequence[Node]) -> dict[str, int]:
    """Number of nodes of each operator."""
    counts: dict[str, int] = {}
    for node in nodes:
        counts[node.op] = counts.get(node.op, 0) + 1
    return dict(sorted(counts.items()))
