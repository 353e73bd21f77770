"""`caffepy export`: a net and its weights as an ONNX model."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from caffepy.commands.inference import checked, load_all
from caffepy.core.errors import ConfigError, DataError
from caffepy.core.files import written
from caffepy.device.blob import Array
from caffepy.device.device import Device
from caffepy.export.graph import Dim
from caffepy.export.trace import Trace, sources, trace
from caffepy.export.write import Batch, operators, write_dynamic, write_graph
from caffepy.layer.selection import BatchReindex, Embed
from caffepy.models.synthetic import synthetic
from caffepy.net import Net
from caffepy.net.build import filter_state
from caffepy.net.fusion import Step
from caffepy.proto.caffe_pb2 import TEST, TRAIN, NetParameter
from caffepy.proto.text import read_net
from caffepy.report.text import AsJson

OPSETS = range(13, 22)
DEFAULT_OPSET = 17
DYNAMIC = "dynamic"
TOLERANCE = 1e-3
PROBABILITIES = {"SoftmaxWithLoss": "Softmax", "SigmoidCrossEntropyLoss": "Sigmoid"}


@dataclass(frozen=True)
class Exported(AsJson):
    """The written model: shapes of inputs and outputs, numbers of nodes by operator and so on.

    `dropped` are losses and other layers that only evaluate, `unused` the inputs that only they
    need, `notes` remarks for users of the model, `differences` (if checked) the largest difference
    of each output from caffepy's, relative to its largest value.
    """

    file: str
    opset: int
    inputs: dict[str, list[Dim]]
    outputs: dict[str, list[Dim]]
    operators: dict[str, int]
    parameters: int
    bytes: int
    dropped: Sequence[str]
    unused: Sequence[str]
    notes: Sequence[str]
    differences: dict[str, float] | None = None

    def text(self) -> str:
        """Return a line for the file, one for each input and output, and the remarks."""
        nodes = sum(self.operators.values())
        lines = [
            f"{self.file}: opset {self.opset}, {nodes} nodes, {self.parameters:,} parameters, "
            f"{self.bytes:,} bytes"
        ]
        for what, tensors in (("input", self.inputs), ("output", self.outputs)):
            for name, dims in tensors.items():
                lines.append(f"{what} {name}: {' x '.join(map(str, dims)) or 'a number'}")
        if self.dropped:
            lines.append(f"left out, since they only evaluate: {', '.join(self.dropped)}")
        if self.unused:
            lines.append(f"inputs that are no longer needed: {', '.join(self.unused)}")
        lines += self.notes
        for name, difference in (self.differences or {}).items():
            lines.append(f"onnxruntime's {name} differs from caffepy's by {difference:.1e}")
        return "\n".join(lines)


def export_onnx(
    model: str,
    weights: Iterable[str],
    out: str,
    *,
    opset: int = DEFAULT_OPSET,
    batch: int | str | None = None,
    phase: str = "TEST",
    level: int = 0,
    stages: Sequence[str] = (),
    image: Sequence[int] | None = None,
    probabilities: bool = False,
    check: bool = False,
) -> Exported:
    """Write the net of the prototxt `model` with trained weights to the file `out`.

    `batch` is the batch size, "dynamic" for any, None for that of the net. `image` (C, H, W)
    replaces data layers by images of this shape. ConfigError names all layers that cannot be
    expressed, or says what else is wrong.
    """
    from caffepy.export.model import to_model

    if opset not in OPSETS:
        raise ConfigError(f"opsets {OPSETS.start} to {OPSETS.stop - 1} are written, not {opset}")
    weights = checked(weights)
    param = read_net(model)
    param.state.phase, param.state.level = TEST if phase == "TEST" else TRAIN, level
    param.state.stage.extend(stages)
    if probabilities:
        param = with_probabilities(filter_state(param, model))
    if image is not None:
        param = synthetic(param, image=image, origin=model)
    with closing(_built(param, model)) as net:
        if not load_all(net, weights):
            raise ConfigError(
                "no weights are given, and a model of random weights is not exported; give those "
                "that belong to the net"
            )
        if isinstance(batch, int):
            Batch(net).resize(batch)
        found = _traced(net, model)
        shapes: Mapping[str, Sequence[Dim]]
        if batch == DYNAMIC:
            graph, shapes = write_dynamic(net, found, opset)
        else:
            graph = write_graph(net, found, opset)
            shapes = graph.shapes
        inputs, outputs = [name for name, _ in found.inputs], found.output_names
        content = to_model(graph, net.name, inputs, outputs, shapes)
        differences = _compare(net, found, content, dynamic=batch == DYNAMIC) if check else None
        with written(out) as temporary, open(temporary, "wb") as file:
            file.write(content)
        used = {b.data_memory: b.count for i in found.layers for b in net.layers[i].blobs}
        return Exported(
            out,
            opset,
            {name: list(shapes[name]) for name in inputs},
            {name: list(shapes[name]) for name in outputs},
            operators(graph.nodes),
            sum(used.values()),
            len(content),
            [f"{net.nodes[i].name} ({net.layers[i].type})" for i in found.dropped],
            found.unused,
            [f"{layer} {text}" for layer, text in graph.notes],
            differences,
        )


def _traced(net: Net, path: str) -> Trace:
    """Return what of the net is exported; ConfigError if that is nothing, or an input is empty."""
    found = trace(net)
    if not found.outputs:
        nothing = "nothing is left to be written: the net has only losses and evaluation"
        raise ConfigError(nothing, path)
    for _, blob in found.inputs:
        if not net.blobs[blob].count:
            missing = f'input "{blob}" has no shape, or an empty one; give it in input_param'
            raise ConfigError(missing, path)
    return found


def _built(param: NetParameter, path: str) -> Net:
    """Return the net; if its data are missing, with inputs of the shapes that it names."""
    try:
        return Net(param, device=_device(), path=path)
    except DataError as error:
        try:
            return Net(synthetic(param, origin=path), device=_device(), path=path)
        except (ConfigError, DataError):
            raise error from None


def _device() -> Device:
    device = Device(seed=0)
    device.writes_files = False
    return device


def with_probabilities(net: NetParameter) -> NetParameter:
    """Return a copy with Softmax or Sigmoid layers in place of the losses that contain them.

    The top is `prob`, or LAYER_prob if there are several.
    """
    copy = NetParameter()
    copy.CopyFrom(net)
    losses = [layer for layer in copy.layer if layer.type in PROBABILITIES]
    for layer in losses:
        name = "prob" if len(losses) == 1 else f"{layer.name}_prob"
        layer.type = PROBABILITIES[layer.type]
        del layer.bottom[1:], layer.propagate_down[1:], layer.loss_weight[:], layer.top[:]
        layer.top.append(name)
    return copy


def _compare(net: Net, found: Trace, content: bytes, dynamic: bool) -> dict[str, float]:
    """Return outputs' largest differences, of their largest values, or raise ConfigError."""
    from caffepy.export.model import Runtime

    runtime = Runtime(content)
    skipped = {*sources(net), *found.dropped}
    steps = [Step(i) for i in range(len(net.layers)) if i not in skipped]
    differences = dict.fromkeys(found.output_names, 0.0)
    for batch in (None, 3) if dynamic else (None,):
        if batch:
            Batch(net).resize(batch)
        inputs = random_inputs(net, found)
        for tensor, blob in found.inputs:
            net.blobs[blob].host_data[...] = inputs[tensor]
        net.forward(steps=steps)
        answers = runtime.run(found.output_names, inputs)
        for name, (_, blob), answer in zip(found.output_names, found.outputs, answers, strict=True):
            expected, difference = net.blobs[blob].host_data, float("inf")
            if expected.shape == answer.shape:
                size = float(np.abs(expected).max(initial=0)) or 1.0
                difference = (
                    float(np.abs(answer.astype(np.float64) - expected).max(initial=0)) / size
                )
            differences[name] = float(np.maximum(differences[name], difference))  # keeps NaNs
    for name, difference in differences.items():
        if not difference < TOLERANCE:
            raise ConfigError(
                f"onnxruntime computes another {name}: it differs by {difference:.1e} of its "
                f"largest value, where {TOLERANCE:g} is allowed"
            )
    return differences


def random_inputs(net: Net, found: Trace) -> dict[str, Array]:
    """Return normally distributed values for the inputs, and valid indices for indices."""
    rng = np.random.default_rng(0)
    inputs = {
        tensor: rng.standard_normal(net.blobs[blob].shape).astype(np.float32)
        for tensor, blob in found.inputs
    }
    for i in found.layers:
        layer, bottoms = net.layers[i], found.bottoms[i]
        if isinstance(layer, Embed):
            place, number = 0, layer.inputs
        elif isinstance(layer, BatchReindex):
            place, number = 1, net.nodes[i].bottoms[0].shape[0]
        else:
            continue
        if bottoms[place] in inputs:
            shape = inputs[bottoms[place]].shape
            inputs[bottoms[place]] = rng.integers(0, number, shape).astype(np.float32)
    return inputs
