"""From a built net to a graph, with the present sizes of its blobs or for any batch size."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from caffepy.core.errors import ConfigError
from caffepy.export.graph import Dim, Graph, InexpressibleError, Node, Site, writers
from caffepy.export.trace import Trace, sources
from caffepy.net import Net
from caffepy.proto.text import where


def write_graph(net: Net, trace: Trace, opset: int) -> Graph:
    """Write the trace's layers as operators; ConfigError names all that have none, with lines."""
    tops = {name for names in trace.tops.values() for name in names}
    graph = Graph(opset, tops | set(net.blobs), trace.once)
    owners = {  # the name of each parameter, after its owner and index there: `conv1.0`
        id(param.blob.data_memory): graph.fresh(f"{net.nodes[param.layer].name}.{param.index}")
        for param in net.learnable
    }
    graph.shapes = {tensor: net.blobs[blob].shape for tensor, blob in trace.inputs}
    failed = []
    for i in trace.layers:
        layer, node = net.layers[i], net.nodes[i]
        site = Site(
            graph,
            layer,
            node.name,
            bottoms=trace.bottoms[i],
            bottom_shapes=[blob.shape for blob in node.bottoms],
            tops=trace.tops[i],
            top_shapes=[blob.shape for blob in node.tops],
            params=[owners[id(blob.data_memory)] for blob in layer.blobs],
        )
        graph.shapes |= dict(zip(site.tops, site.top_shapes, strict=True))
        try:
            if layer.type not in writers:
                raise InexpressibleError("caffepy has no ONNX operators for it")
            writers[layer.type](site)
        except InexpressibleError as reason:
            failed.append(f"{where(net.path, net.param.layer[i])}: {reason}")
    if failed:
        what = "what these layers do cannot be expressed in ONNX:"
        raise ConfigError("\n  ".join([what, *failed]))
    for name, (tensor, blob) in zip(trace.output_names, trace.outputs, strict=True):
        if name != tensor:  # an output that is not named after its blob, as after a Split
            graph.nodes.append(Node("Identity", [tensor], [name], {}, blob))
            graph.shapes[name] = graph.shapes[tensor]
    return graph


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
                f"a batch of {size}, not {self.size}, does not work: {error.message}", error.where
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
    shapes: dict[str, list[Dim]] = {name: [] for name in graph.shapes}
    for name, dims in shapes.items():
        for axis, (a, b) in enumerate(zip(graph.shapes[name], double.shapes[name], strict=True)):
            if a == b:
                dims.append(a)
            elif isinstance(a, int) and b == 2 * a and a % size == 0:
                dims.append("N" if a == size else f"{a // size}*N")
            else:
                dims.append(f"{name}_{axis}")
    return graph, shapes


def _merge(graph: Graph, double: Graph, net: Net) -> None:
    """Replace the one size of a Reshape that depends on the batch by -1.

    ConfigError names the layers where more depends on it.
    """
    targets = {node.inputs[1] for node in graph.nodes if node.op == "Reshape"}
    values = graph.values
    failed: set[str] = set()
    for node, other in zip(graph.nodes, double.nodes, strict=False):
        if node != other:
            failed.add(node.layer)
            continue
        for name in values.keys() & set(node.inputs):
            one, two = values[name], double.values[name]
            if one is two or np.array_equal(one, two):
                continue
            if name in targets and np.count_nonzero(one != two) == 1:
                values[name] = np.where(one == two, one, -1)
            else:
                failed.add(node.layer)
    if failed:
        places = [where(net.path, layer) for layer in net.param.layer if layer.name in failed]
        raise ConfigError("\n  ".join(["these layers need a fixed batch size:", *places]))


def operators(nodes: Sequence[Node]) -> dict[str, int]:
    """Return the number of nodes of each operator."""
    return dict(sorted(Counter(node.op for node in nodes).items()))
