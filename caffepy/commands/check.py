"""`caffepy check`: the layers of a net, or of a solver's nets, without running them."""

import json
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from caffepy.core.errors import ConfigError
from caffepy.device.blob import Blob, shape_string
from caffepy.device.device import Device
from caffepy.device.math_mode import checked, default
from caffepy.layer import Layer
from caffepy.models.synthetic import synthetic as without_data
from caffepy.net import Net
from caffepy.net.memory import Usage, lifetimes, plan
from caffepy.ops.shapes_only import ShapesOnlyDevice
from caffepy.proto.caffe_pb2 import TEST, TRAIN, NetParameter, SolverParameter
from caffepy.proto.nvcaffe import choose_precision
from caffepy.proto.text import read_net, read_solver, read_text
from caffepy.report.text import columns
from caffepy.solver.capture import reasons_not_capturable
from caffepy.solver.check import check_param
from caffepy.solver.nets import net_sources
from caffepy.solver.preflight import check_prefix

log = logging.getLogger(__name__)

TOKEN = re.compile(r"""#.*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|[{<]|[}>]|\w+""")


@dataclass(frozen=True)
class LayerOnGpu:
    """A layer on a GPU: `on_host` if the host computes it, the layers that are fused with it, the
    formats of its tops, and of blobs that are converted for it.
    """

    on_host: bool
    run: Sequence[str]
    formats: dict[str, str]
    converts: dict[str, str]


@dataclass(frozen=True)
class NetOnGpu:
    """A net on a GPU: its precision, the bytes that its blobs share, and, if a step cannot be
    captured as a graph, the reason.
    """

    precision: str
    memory: int
    obstacle: str | None

    def text(self) -> str:
        """Return two lines."""
        captured = (
            f"not captured as one graph: {self.obstacle}"
            if self.obstacle
            else "captured as one graph"
        )
        return (
            f"on a GPU: {self.precision}; data and gradients share "
            f"{mebibytes(self.memory)}\na step is {captured}"
        )


@dataclass(frozen=True)
class LayerInfo:
    """A layer: shapes of its tops, number of parameters, bytes of its tops, operations of a forward
    pass, and its multiply-adds.
    """

    name: str
    type: str
    tops: dict[str, tuple[int, ...]]
    parameters: int
    memory: int
    flops: int
    gpu: LayerOnGpu | None = None
    macs: int = 0


@dataclass(frozen=True)
class NetInfo:
    """A net. Layers that share parameters list them each; `parameters` of the net counts them
    once."""

    role: str
    name: str
    layers: Sequence[LayerInfo]
    parameters: int
    gpu: NetOnGpu | None = None

    @property
    def memory(self) -> int:
        """Bytes of the data of all blobs between the layers; training takes as many again for their
        diffs.
        """
        return sum(layer.memory for layer in self.layers)

    @property
    def flops(self) -> int:
        """Return the operations of a forward pass for these element counts of bottoms and tops.

        A multiply-add counts two, a bias one for each output. A backward pass takes about twice as
        many.
        """
        return sum(layer.flops for layer in self.layers)

    def table(self) -> str:
        """Return a line a layer and the totals."""
        rows = [("layer", "type", "top shapes", "parameters", "memory", "FLOPs")]
        for layer in self.layers:
            shapes = ", ".join(shape_string(shape) for shape in layer.tops.values())
            rows.append(
                (
                    layer.name,
                    layer.type,
                    shapes,
                    f"{layer.parameters:,}",
                    mebibytes(layer.memory),
                    si(layer.flops),
                )
            )
        rows.append(("all", "", "", f"{self.parameters:,}", mebibytes(self.memory), si(self.flops)))
        head = f"{self.role}{f' of {self.name!r}' if self.name else ''}"
        lines = [head, *columns(rows, left=3)]
        if self.gpu:
            lines += ["", *columns(list(self._gpu_rows()), left=5), self.gpu.text()]
        return "\n".join(lines)

    def _gpu_rows(self) -> Iterator[Sequence[str]]:
        yield "layer", "type", "computed", "top formats", "converted"
        for layer in self.layers:
            if layer.gpu:
                where = (
                    "on the host"
                    if layer.gpu.on_host
                    else f"with {layer.gpu.run[0]}"
                    if layer.gpu.run
                    else ""
                )
                formats = ", ".join(layer.gpu.formats.values())
                converted = ", ".join(
                    f"{name}: {change}" for name, change in layer.gpu.converts.items()
                )
                yield layer.name, layer.type, where, formats, converted


def as_json(nets: Sequence[NetInfo]) -> str:
    """Return a list with an object for each net, and in it one for each layer; memory in bytes."""
    return json.dumps([asdict(net) | {"memory": net.memory, "flops": net.flops} for net in nets])


def inspect(
    path: str,
    *,
    level: int = 0,
    stages: Sequence[str] = (),
    synthetic: bool = False,
    image: Sequence[int] | None = None,
    gpu: bool = False,
    precision: str | None = None,
) -> list[NetInfo]:
    """Build the nets of a prototxt: all of a solver's, or a net in each phase that its layers name.

    `synthetic` replaces data by random images, of the shape `image` (C, H, W) if the net does not
    state it. `gpu` adds the plan for a GPU, in this precision or the net's; the machine needs none.
    ConfigError and DataError say what is wrong; anything that only prevents snapshots is a warning.
    """
    infos = []
    for role, param, origin in definitions(path, level, stages, to_train=True):
        param = without_data(param, image=image) if synthetic else param
        device = ImaginedGpu(seed=0) if gpu else ShapesOnlyDevice(seed=0)
        if gpu:
            wanted = choose_precision(param, precision)
            device.math_mode.precision = checked(wanted or default().precision)
        net = Net(param, device=device, path=origin)
        try:
            on_gpu = (
                NetOnGpu(
                    device.math_mode.precision,
                    _shared(net),
                    "; ".join(reasons_not_capturable(net)) or None,
                )
                if gpu
                else None
            )
            parameters = sum(blob.count for blob in net.learnable_params)
            infos.append(NetInfo(role, net.name, list(layers_of(net, gpu)), parameters, on_gpu))
        finally:
            net.close()
    return infos


class ImaginedGpu(ShapesOnlyDevice):
    """A GPU for nets that are not run: layers and blobs are as on a real one, their arrays are the
    host's.
    """

    is_cuda = True

    @property
    def host(self) -> Device:
        """The CPU with this device's random numbers."""
        host = ShapesOnlyDevice()
        host.random = self.random
        return host


def _shared(net: Net) -> int:
    """Return the bytes of the net's blobs while it runs, without those of its inputs and
    outputs."""
    _, total = plan(list(lifetimes(Usage(net, net.steps, net.phase == TRAIN)).values()))
    return total


def is_solver(text: str) -> bool:
    """True if the outermost fields of a text are those of a solver rather than those of a net."""
    names = set(outer_fields(text))
    solver, net = SolverParameter.DESCRIPTOR.fields_by_name, NetParameter.DESCRIPTOR.fields_by_name
    return sum(name in solver for name in names) > sum(name in net for name in names)


def outer_fields(text: str) -> Iterator[str]:
    """Return the names of the outermost fields, and unquoted values, in protobuf's text format."""
    depth = 0
    for token in TOKEN.findall(text):
        if token in "{<":
            depth += 1
        elif token in "}>":
            depth -= 1
        elif depth == 0 and token[0] not in "#\"'":
            yield token


def definitions(
    path: str,
    level: int = 0,
    stages: Sequence[str] = (),
    phase: int | None = None,
    to_train: bool = False,
) -> Iterator[tuple[str, NetParameter, str | None]]:
    """Yield role, definition in its state, and file of each net of a prototxt.

    These are all nets of a solver, or a net in each phase that its layers name; with a `phase` only
    those of it. For a solver `to_train`, check also that it can write its snapshots.
    """
    text = read_text(path)
    if is_solver(text):
        yield from (
            net for net in _solver_nets(path, text, to_train) if phase in (None, net[1].state.phase)
        )
    else:
        yield from _phases(path, text, level, stages, phase)


def _solver_nets(
    path: str, text: str, to_train: bool
) -> Iterator[tuple[str, NetParameter, str | None]]:
    param = read_solver(path, text)
    check_param(param, path)
    if to_train:
        try:
            check_prefix(param, path)
        except ConfigError as error:
            log.warning("%s", error)
    train, tests = net_sources(param, path)
    yield "train net", train.param, train.path
    for k, test in enumerate(tests):
        yield f"test net #{k}", test.param, test.path


def _phases(
    path: str, text: str, level: int, stages: Sequence[str], wanted: int | None
) -> Iterator[tuple[str, NetParameter, str | None]]:
    param = read_net(path, text)
    rules = [rule for layer in param.layer for rule in (*layer.include, *layer.exclude)]
    param.state.level = level
    param.state.stage.extend(stages)
    spoken_of = (TRAIN, TEST) if any(rule.HasField("phase") for rule in rules) else (TEST,)
    for phase in spoken_of if wanted is None else (wanted,):
        in_phase = NetParameter()
        in_phase.CopyFrom(param)
        in_phase.state.phase = phase  # type: ignore[assignment] # phases are numbers to those who ask
        yield f"{'TRAIN' if phase == TRAIN else 'TEST'} net", in_phase, path


def layers_of(net: Net, gpu: bool = False) -> Iterator[LayerInfo]:
    """Return the infos of all layers of a net, Caffe's own split layers included; with `gpu` also
    of a GPU.
    """
    seen: set[int] = set()
    runs = {i: step.layers for step in net.steps for i in step.layers} if gpu else {}
    for i, node in enumerate(net.nodes):
        layer = node.layer
        memory = 0
        counts = [b.count for b in node.bottoms], [t.count for t in node.tops]
        for top in node.tops:
            if id(top.data_memory) not in seen:
                seen.add(id(top.data_memory))
                memory += top.count * top.dtype.itemsize
        yield LayerInfo(
            node.name,
            layer.type,
            dict(zip(node.top_names, (top.shape for top in node.tops), strict=True)),
            sum(blob.count for blob in layer.blobs),
            memory,
            flops(layer, *counts),
            _on_gpu(net, i, runs.get(i, ())) if gpu else None,
            layer.macs(*counts),
        )


def _on_gpu(net: Net, index: int, run: Sequence[int]) -> LayerOnGpu:
    node = net.nodes[index]
    formats = {name: _layout(top) for name, top in zip(node.top_names, node.tops, strict=True)}
    converts = {}
    if node.casts:
        names, blobs = node.bottom_names + node.top_names, node.bottoms + node.tops
        copies = node.casts.bottoms + node.casts.tops
        for name, blob, copy in zip(names, blobs, copies, strict=True):
            if copy is not blob:
                converts[name] = f"{_layout(blob)} to {_layout(copy)}"
    return LayerOnGpu(node.layer.on_host, [net.nodes[i].name for i in run], formats, converts)


def _layout(blob: Blob) -> str:
    """Return the type of a blob's elements, and the order of its axes if it matters."""
    kind = blob.layout.dtype.name.replace("uint16", "bfloat16")
    axes = len(blob.shape)
    if axes < 3:
        return kind
    spatial = "DHW"[-(axes - 2) :] if axes <= 5 else "..."
    return f"{kind} {f'N{spatial}C' if blob.layout.channels_last else f'NC{spatial}'}"


def flops(layer: Layer, bottoms: Sequence[int], tops: Sequence[int]) -> int:
    """Number of operations of a forward pass for these element counts of bottoms and tops: two for
    each multiply-add, one for adding the bias to each output of a product.

    A backward pass takes about twice as many.
    """
    macs = layer.macs(bottoms, tops)
    return 2 * macs + (sum(tops) if macs and len(layer.blobs) > 1 else 0)


def mebibytes(count: int) -> str:
    """Return a number of bytes as text."""
    return f"{count / 2**20:.2f} MiB"


def si(count: int) -> str:
    """Return a large number as text: 18.43 M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return str(count)
