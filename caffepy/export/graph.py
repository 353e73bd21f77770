"""The graph: nodes, constants and parameters by name; and the place of a layer in it.

Tensors are named after blobs. Tensors between a layer's bottoms and tops have the top's name, a
colon and the operator.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from caffepy.core.registry import Registry
from caffepy.device.blob import Array

Shape = tuple[int, ...]
Dim = int | str
"""A size, or the name of one that data or the batch decide."""


class InexpressibleError(Exception):
    """Reason why a layer has no counterpart in ONNX."""


@dataclass
class Node:
    """One operator; attributes are numbers, strings, lists of them, arrays, or a loop's Body."""

    op: str
    inputs: list[str]
    outputs: list[str]
    attributes: dict[str, Any]
    layer: str


@dataclass
class Body:
    """The body of a loop; inputs and outputs with their shapes."""

    nodes: list[Node]
    inputs: list[tuple[str, Shape]]
    outputs: list[tuple[str, Shape]]


@dataclass
class Graph:
    """Nodes in the order in which they can run.

    `values` are constants and parameters, `shapes` those of the tensors that are blobs. `reserved`
    are the names in use: of blobs, parameters and other tensors. `once` are the tensors that a
    single layer reads and that are no blob's last value. `notes` are remarks for the user, with the
    layer's name.
    """

    opset: int
    reserved: set[str]
    once: frozenset[str] = frozenset()
    nodes: list[Node] = field(default_factory=list)
    values: dict[str, Array] = field(default_factory=dict)
    shapes: dict[str, Sequence[Dim]] = field(default_factory=dict)
    notes: list[tuple[str, str]] = field(default_factory=list)

    def fresh(self, name: str) -> str:
        """Reserve the name, with a number added if it is in use, and return it."""
        unique, number = name, 1
        while unique in self.reserved:
            number += 1
            unique = f"{name}_{number}"
        self.reserved.add(unique)
        return unique


@dataclass
class Site:
    """One layer's place in the graph: its bottoms and tops as tensors, its parameters by name."""

    graph: Graph
    layer: Any
    name: str
    bottoms: Sequence[str]
    bottom_shapes: Sequence[Shape]
    tops: Sequence[str]
    top_shapes: Sequence[Shape]
    params: Sequence[str]

    def node(
        self, op: str, *inputs: str, out: str | Sequence[str] | None = None, **attributes: Any
    ) -> str:
        """Add an operator and return its first output: `out`, or a tensor in between."""
        if out is None:
            out = self.between(op)
        outputs = [out] if isinstance(out, str) else list(out)
        self.graph.nodes.append(Node(op, list(inputs), outputs, attributes, self.name))
        return outputs[0]

    def between(self, what: str) -> str:
        """A name for a tensor between bottoms and tops."""
        return self.graph.fresh(f"{self.tops[0]}:{what.lower()}")

    def finish(self, op: str, *inputs: str, **attributes: Any) -> None:
        """Add the operator that computes the first top."""
        self.node(op, *inputs, out=self.tops[0], **attributes)

    def constant(self, value: object, dtype: type = np.float32, what: str = "constant") -> str:
        """A constant tensor; `value` is a number or an array."""
        name = self.between(what)
        self.graph.values[name] = np.asarray(value, dtype)
        return name

    def integers(self, values: Sequence[int], what: str) -> str:
        """A constant vector of int64, as operators take axes, sizes and shapes."""
        return self.constant(list(values), np.int64, what)

    def param(self, index: int, shape: Shape | None = None, value: Array | None = None) -> str:
        """Return the layer's parameter in this shape; `value` is stored in place of its data.

        It is stored once, in the shape of the first call.
        """
        name = self.params[index]
        stored = self.graph.values.get(name)
        if stored is None:
            data = self.layer.blobs[index].host_data if value is None else value
            stored = self.graph.values[name] = data if shape is None else data.reshape(shape)
        if shape is None:
            shape = self.layer.blobs[index].shape
        return name if stored.shape == shape else self.reshape(name, shape)

    def reshape(self, x: str, shape: Sequence[int], out: str | None = None) -> str:
        """The tensor in another shape."""
        return self.node("Reshape", x, self.integers(shape, "shape"), out=out)

    def reduce(
        self, op: str, x: str, axes: Sequence[int], keep: bool = True, out: str | None = None
    ) -> str:
        """Reduce over the axes: an attribute or an input, by operator and opset."""
        if op == "ReduceSum" or self.graph.opset >= 18:
            return self.node(op, x, self.integers(axes, "axes"), out=out, keepdims=int(keep))
        return self.node(op, x, out=out, axes=list(axes), keepdims=int(keep))

    def affine(self, x: str, scale: float, shift: float) -> str:
        """x * scale + shift, without a factor of 1 or a shift of 0."""
        if scale != 1:
            x = self.node("Mul", x, self.constant(scale))
        return self.node("Add", x, self.constant(shift)) if shift else x

    def name_last(self) -> None:
        """Make the output of the last operator the first top."""
        self.graph.nodes[-1].outputs[0] = self.tops[0]

    def note(self, text: str) -> None:
        """Add a remark for users of the model."""
        self.graph.notes.append((self.name, text))


Writer = Callable[[Site], None]
writers: Registry[Writer] = Registry("layer type of ONNX")
"""Functions that write layers of a type into a graph."""
