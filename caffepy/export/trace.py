"""The part of a built net that becomes the model: inputs and outputs, layers, names of tensors.

Losses, Accuracy, SegAccuracy and the layers that only they need are left out; the blobs that they
evaluate become outputs. A tensor has its blob's name. If a blob is written several times, in place,
the last value has its name, earlier ones have the layer's name added.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from caffepy.layer import Layer
from caffepy.layer.base import LossLayer
from caffepy.layer.dropout import Dropout
from caffepy.net import Net
from caffepy.proto.caffe_pb2 import LayerParameter

EVALUATORS = ("Accuracy", "HDF5Output", "MatWrite", "SegAccuracy", "Silence")


@dataclass
class Value:
    """A tensor: its name, the layer that computes it (None for an input), and if it is learned."""

    name: str
    layer: int | None
    learned: bool = False


@dataclass
class Trace:
    """The model's inputs and outputs as (tensor, blob), the indices of its layers, the tensors of
    each layer.

    `dropped` are the layers that are left out, `unused` the inputs that no layer reads.
    """

    inputs: list[tuple[str, str]] = field(default_factory=list)
    outputs: list[tuple[str, str]] = field(default_factory=list)
    layers: list[int] = field(default_factory=list)
    bottoms: dict[int, list[str]] = field(default_factory=dict)
    tops: dict[int, list[str]] = field(default_factory=dict)
    dropped: list[int] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    once: frozenset[str] = frozenset()

    @property
    def output_names(self) -> list[str]:
        """The outputs' tensors: named after the blob, unless another tensor has that name."""
        taken = {name for names in self.tops.values() for name in names}
        taken |= {name for name, _ in self.inputs}
        return [tensor if blob in taken else blob for tensor, blob in self.outputs]


def sources(net: Net) -> list[int]:
    """Return the layers whose tops are the model's inputs: Input and data layers.

    Constant DummyData is an input only if there are no others.
    """
    without_bottoms = [
        (i, layer)
        for i, layer in enumerate(net.layers)
        if not layer.param.bottom and layer.type not in ("Parameter", "ContinuationIndicator")
    ]
    varying = [i for i, layer in without_bottoms if not _is_constant(layer.param)]
    return varying or [i for i, _ in without_bottoms]


def _is_constant(param: LayerParameter) -> bool:
    fillers = param.dummy_data_param.data_filler
    return param.type == "DummyData" and all(filler.type == "constant" for filler in fillers)


def evaluates(layer: Layer) -> bool:
    """True if the layer only evaluates results: a loss, also in Python, or one of EVALUATORS."""
    is_python = layer.type == "Python" and any(layer.loss_weights)
    return isinstance(layer, LossLayer) or layer.type in EVALUATORS or is_python


def passes(layer: Layer) -> bool:
    """True if the tops are the bottom, under the same or other names."""
    in_place = list(layer.param.bottom) == list(layer.param.top)
    still = isinstance(layer, Dropout) and layer.is_identity
    return layer.type == "Split" or (still and in_place)


def trace(net: Net) -> Trace:
    """Follow the blobs through the net."""
    walk = _Walk(net)
    found = walk.found
    for i in range(len(net.layers)):
        walk.take(i)
    outputs = {
        name: v for name in net.outputs if (v := walk.values.get(name)) and v.layer is not None
    }
    evaluated = walk.evaluated.values()
    read = {name for i in walk.needed([*outputs.values(), *evaluated]) for name in found.bottoms[i]}
    outputs |= {walk.blobs[v.name]: v for v in evaluated if v.name not in read}
    found.layers = sorted(walk.needed(outputs.values()))
    readers = Counter(name for i in found.layers for name in found.bottoms[i])
    found.inputs = [(v.name, blob) for blob, v in walk.inputs if readers[v.name]]
    found.unused = [blob for blob, v in walk.inputs if not readers[v.name]]
    ordered = sorted((v.layer or 0, v.name, blob) for blob, v in outputs.items())
    found.outputs = [(name, blob) for _, name, blob in ordered]
    named = {v.name for v in outputs.values()} | set(net.blobs)
    found.once = frozenset(name for name, n in readers.items() if n == 1 and name not in named)
    return found


class _Walk:
    """The values of the blobs, updated layer by layer."""

    def __init__(self, net: Net) -> None:
        self.net = net
        self.found = Trace()
        self.values: dict[str, Value] = {}
        self.inputs: list[tuple[str, Value]] = []
        self.evaluated: dict[str, Value] = {}
        self.blobs: dict[str, str] = {}  # tensor -> blob
        self.sources = set(sources(net))
        self.last = {
            name: i
            for i, layer in enumerate(net.layers)
            if not passes(layer)
            for name in net.nodes[i].top_names
        }
        for i in self.sources:  # an input keeps its name, whatever is done to it in place
            self.last |= dict.fromkeys(net.nodes[i].top_names, i)

    def take(self, i: int) -> None:
        """Update the values of the blobs that a layer writes."""
        layer, found, tops = self.net.layers[i], self.found, self.net.nodes[i].top_names
        bottoms = [self.values.get(name) for name in self.net.nodes[i].bottom_names]
        known = [value for value in bottoms if value]
        if i in self.sources:
            for name in tops:
                self.values[name] = self._value(name, i, None)
                self.inputs.append((name, self.values[name]))
        elif passes(layer) and known:
            self.values |= dict.fromkeys(tops, known[0])
        elif passes(layer) or len(known) < len(bottoms) or evaluates(layer):
            for name in tops:
                self.values.pop(name, None)
            if passes(layer) or layer.type == "Silence":
                return
            found.dropped.append(i)
            if evaluates(layer):
                given = [value for value in known if value.layer is not None]
                learned = [value for value in given if value.learned]
                self.evaluated |= {value.name: value for value in learned or given[:1]}
        else:
            learns = bool(layer.blobs) or any(value.learned for value in known)
            found.bottoms[i] = [value.name for value in known]
            values = {name: self._value(name, i, i, learns) for name in tops}
            found.tops[i] = [values[name].name for name in tops]
            self.values |= values

    def _value(self, blob: str, writer: int, layer: int | None, learned: bool = False) -> Value:
        name = blob
        if self.last.get(blob, writer) != writer:
            name = f"{blob}:{self.net.nodes[writer].name}"
            while name in self.blobs or name in self.net.blobs:
                name += "'"
        self.blobs[name] = blob
        return Value(name, layer, learned)

    def needed(self, outputs: Iterable[Value]) -> set[int]:
        maker = {name: i for i, names in self.found.tops.items() for name in names}
        needed: set[int] = set()
        waiting = [v.name for v in outputs]
        while waiting:
            i = maker.get(waiting.pop())
            if i is not None and i not in needed:
                needed.add(i)
                waiting += self.found.bottoms[i]
        return needed
