"""`caffepy check`: the layers of a net, or of a solver's nets, without running them."""

import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Literal

from caffepy.commands.devices import check_solver_mode
from caffepy.commands.guesses import build_without_data
from caffepy.commands.largest_batch import LargestBatch, footprint, largest_batch, recomputing
from caffepy.core.errors import ConfigError, DeviceError, UsageError
from caffepy.device.blob import Blob, shape_string
from caffepy.device.device import Device
from caffepy.device.gpus import check_gpu, gpu_memory
from caffepy.device.math_mode import checked, default
from caffepy.net import Net
from caffepy.net.build import is_included, with_batch
from caffepy.net.memory import Usage, taken
from caffepy.net.node import Node
from caffepy.net.recompute import in_segments, recomputed_layers
from caffepy.ops.shapes_only import ShapesOnlyDevice
from caffepy.proto.caffe_pb2 import TEST, TRAIN, NetParameter, NetState, SolverParameter
from caffepy.proto.nvcaffe import choose_precision
from caffepy.proto.text import read_net, read_solver, read_text
from caffepy.report.glog import quiet
from caffepy.report.text import columns
from caffepy.solver.capture import GraphRunner
from caffepy.solver.check import check_max_iter, check_param, check_prefix
from caffepy.solver.nets import net_sources
from caffepy.solver.update import rules as update_rules

log = logging.getLogger(__name__)

TOKEN = re.compile(r"""#.*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|[{<]|[}>]|\w+""")

Definition = tuple[str, NetParameter, str | None, SolverParameter | None]
"""Role, definition in its state, file, and solver (if any) of a net."""

SEGMENTS, WORTH_IT = (2, 3, 4, 6, 8, 12, 16), 0.95
"""Numbers of segments that are shown if they save so much more than those before."""


@dataclass(frozen=True)
class LayerOnGpu:
    """A layer on a GPU or the host, its fused group, formats of its tops and of converted blobs."""

    on_host: bool
    run: Sequence[str]
    formats: dict[str, str]
    converts: dict[str, str]


@dataclass(frozen=True)
class Recomputed:
    """Bytes of data and gradients where data are computed again in `segments` segments, and the
    number of layers that then run forward again.
    """

    segments: int
    memory: int
    layers: int


@dataclass(frozen=True)
class NetOnGpu:
    """A net on a GPU: precision, bytes of data and gradients, why no graph can be captured of a
    step, the number of its graphs, and why steps that are displayed run without them; what
    recomputation would save; the largest batch that fits into a memory, if that was asked for, and
    with recomputation.
    """

    precision: str
    memory: int
    obstacle: str | None
    graphs: int = 1
    when_displayed: str | None = None
    recompute: Sequence[Recomputed] = ()
    largest: LargestBatch | None = None
    largest_recomputing: LargestBatch | None = None


@dataclass(frozen=True)
class LayerInfo:
    """A layer: shapes of its tops, number of parameters, bytes of its tops, operations of a forward
    pass (two for a multiply-add, one for adding a bias), and its multiply-adds.
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
    """A net. Layers that share parameters list them each, its `parameters` count them once.

    `on_cpu`: bytes of data, and of gradients of a net that `learns`, while it runs on the CPU.
    """

    role: str
    name: str
    layers: Sequence[LayerInfo]
    parameters: int
    learns: bool = False
    on_cpu: int = 0
    gpu: NetOnGpu | None = None

    @property
    def memory(self) -> int:
        """Bytes of the data of all blobs between the layers, each for itself."""
        return sum(layer.memory for layer in self.layers)

    @property
    def flops(self) -> int:
        """Operations of a forward pass; a backward pass takes about twice as many."""
        return sum(layer.flops for layer in self.layers)

    def table(self) -> str:
        """Return a line a layer and the totals."""
        rows = [("layer", "type", "top shapes", "parameters", "memory", "FLOPs")]
        for layer in self.layers:
            shapes = ", ".join(map(shape_string, layer.tops.values()))
            costs = f"{layer.parameters:,}", mebibytes(layer.memory), si(layer.flops)
            rows.append((layer.name, layer.type, shapes, *costs))
        rows.append(("all", "", "", f"{self.parameters:,}", mebibytes(self.memory), si(self.flops)))
        head = f"{self.role}{f' of {self.name!r}' if self.name else ''}"
        return "\n".join([head, *columns(rows, left=3), *self._plan()])

    def _plan(self) -> Iterator[str]:
        what = "data and gradients take" if self.learns else "data take"
        if not self.gpu:
            yield f"on the CPU: {what} {mebibytes(self.on_cpu)}"
            return
        rows = [("layer", "type", "computed", "top formats", "converted")]
        for layer in self.layers:
            if gpu := layer.gpu:
                others = gpu.run[1:] if layer.name in gpu.run[:1] else gpu.run[:1]
                fused = f"with {', '.join(others)}" if others else ""
                formats = ", ".join(gpu.formats.values())
                converted = ", ".join(f"{name}: {how}" for name, how in gpu.converts.items())
                where = "on the host" if gpu.on_host else fused
                rows.append((layer.name, layer.type, where, formats, converted))
        yield from ("", *columns(rows, left=5))
        obstacle = self.gpu.obstacle
        yield f"on a GPU: {self.gpu.precision}; {what} {mebibytes(self.gpu.memory)}"
        for one in self.gpu.recompute:
            plan = f"{mebibytes(one.memory)}, {one.layers} of {len(self.layers)} layers run again"
            yield f"with --recompute {one.segments}: {plan}"
        several = "three graphs, since iter_size is above 1: begin, pass and close"
        captured = f"captured as {'one graph' if self.gpu.graphs == 1 else several}"
        yield f"a step is {f'not captured: {obstacle}' if obstacle else captured}"
        if self.gpu.when_displayed:
            yield f"a step that is displayed is not captured: {self.gpu.when_displayed}"
        for found, how in (
            (self.gpu.largest, ""),
            (self.gpu.largest_recomputing, " with --recompute auto"),
        ):
            yield from [_largest(found, how)] if found else []


def _largest(found: LargestBatch, how: str) -> str:
    """Say which batch is the largest."""
    room, need = gibibytes(found.room), gibibytes(found.memory)
    if not found.batch:
        return f"no batch fits into {room}{how}: one image takes {need}"
    limit = f"; the next one is refused: {found.limit}" if found.limit else ""
    return f"the largest batch that fits into {room}{how}: {found.batch:,}, with {need}{limit}"


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
    batch: int | Literal["auto"] | None = None,
    memory: int | None = None,
) -> list[NetInfo]:
    """Build the nets of a prototxt: all of a solver's, or a net in each phase that its layers name.

    `synthetic` replaces data by random images, of the shape `image` (C, H, W) if the net does not
    state it; without `image`, of a shape with which the net can be built. `gpu` adds the plan for
    a GPU, in this precision or the net's; the machine needs none. `batch` is that of the nets that
    learn, or of all if none does; "auto": find the largest with which a GPU of `memory` bytes, by
    default that of the first one here, can hold it with the other nets of the solver. ConfigError
    and DataError say what is wrong; anything that only prevents snapshots, and a GPU that is not
    here, is a warning.
    """
    defined = list(definitions(path, level, stages, to_train=True, made_up=synthetic))
    room = (memory or _memory_here()) if batch == "auto" else 0
    trains = any(param.state.phase == TRAIN for _, param, _, _ in defined)

    def build(one: Definition, batch: int | None = None) -> Net:
        _, param, origin, _ = one
        device = ImaginedGpu(seed=0) if gpu else ShapesOnlyDevice(seed=0)
        if gpu:
            wanted = choose_precision(param, precision)
            device.math_mode.precision = checked(wanted or default().precision)
        if batch is not None and (param.state.phase == TRAIN or not trains):
            param = with_batch(param, batch, origin)
        make = partial(Net, device=device, path=origin)
        return build_without_data(param, image, make, origin) if synthetic else make(param)

    infos = []
    for one in defined:
        with closing(build(one, None if batch == "auto" else batch)) as net:
            on_gpu = _plan_on_gpu(net, one[-1]) if gpu else None
            parameters = sum(blob.count for blob in net.learnable_params)
            usage, layers = _usage(net), list(layers_of(net, gpu))
            on_cpu = 0 if gpu else taken(usage)
            infos.append(
                NetInfo(one[0], net.name, layers, parameters, usage.learns, on_cpu, on_gpu)
            )
    if batch == "auto":
        _find_largest(infos, defined, build, room)
    return infos


def _plan_on_gpu(net: Net, solver: SolverParameter | None) -> NetOnGpu:
    usage = _usage(net)
    runner, training = GraphRunner(net, False, ""), solver and net.phase == TRAIN
    net.debug_info = bool(solver and solver.debug_info and not training)
    obstacle = "; ".join(runner.reasons_not_capturable()) or None
    precision, saved = net.device.math_mode.precision, list[Recomputed]()
    memory = least = taken(usage)
    for segments in SEGMENTS if usage.learns else ():
        other = in_segments(usage, segments)
        if (size := taken(other)) < WORTH_IT * least:
            saved.append(Recomputed(segments, size, recomputed_layers(other)))
            least = size
    on_gpu = NetOnGpu(precision, memory, obstacle, recompute=saved)
    if solver and training and not obstacle:
        net.debug_info = solver.debug_info and solver.display > 0
        displayed = "; ".join(runner.reasons_not_capturable()) or None
        graphs = 1 if solver.iter_size == 1 else 3
        on_gpu = replace(on_gpu, graphs=graphs, when_displayed=displayed)
    return on_gpu


def _usage(net: Net) -> Usage:
    return Usage(net, net.steps, net.phase == TRAIN)


def _memory_here() -> int:
    """Return the bytes of the first GPU's memory; UsageError if there is none."""
    try:
        check_gpu(0)
        return gpu_memory(0)[1]
    except DeviceError as error:
        raise UsageError(
            f"which batch fits? Give a GPU's memory, as --memory 80GB: {error}"
        ) from None


def _find_largest(
    infos: list[NetInfo],
    defined: Sequence[Definition],
    build: Callable[[Definition, int | None], Net],
    room: int,
) -> None:
    """Put the largest batch of each net that `build` gives a batch into its info."""
    solver = defined[0][-1]
    histories = update_rules[solver.type].histories if solver else 1
    trains = [one[1].state.phase == TRAIN for one in defined]

    def largest(number: int, tests: Sequence[Usage], recompute: bool) -> LargestBatch:
        def need(batch: int) -> int:
            with closing(build(defined[number], batch)) as net:
                usage = recomputing(_usage(net)) if recompute else _usage(net)
                return footprint([usage, *tests], histories)

        shapes = (top for layer in infos[number].layers for top in layer.tops.values())
        return largest_batch(need, room, given=next(filter(None, shapes), (1,))[0])

    with ExitStack() as stack:
        stack.enter_context(quiet())  # nets are built that were built before
        # The test nets of a solver share the memory of its train net.
        others = [build(one, None) for one in defined[1:]] if solver else []
        tests = [_usage(stack.enter_context(closing(net))) for net in others]
        for i, info in enumerate(infos):
            if info.gpu and (trains[i] or not any(trains)):
                plain = largest(i, tests, recompute=False)
                saving = largest(i, tests, recompute=True) if trains[i] else None
                on_gpu = replace(info.gpu, largest=plain, largest_recomputing=saving)
                infos[i] = replace(info, gpu=on_gpu)


class ImaginedGpu(ShapesOnlyDevice):
    """A GPU for nets that are not run: all is as on a real one, but the arrays are the host's."""

    is_cuda = True

    @property
    def host(self) -> Device:
        """The CPU with this device's random numbers."""
        host = ShapesOnlyDevice()
        host.random = self.random
        return host


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
    made_up: bool = False,
) -> Iterator[Definition]:
    """Yield role, definition in its state, file, and solver (if any) of each net of a prototxt.

    These are all nets of a solver, or a net in each phase that its layers name; with a `phase` only
    those of it. For a solver `to_train`, check also that it can write its snapshots.
    `made_up` data: see `parse` in proto/text.py.
    """
    text = read_text(path)
    if not is_solver(text):
        net = read_net(path, text, made_up)
        net.state.level = level
        net.state.stage.extend(stages)
        named = _phases(net)
        for one in named if phase is None else (phase,):
            in_phase = NetParameter()
            in_phase.CopyFrom(net)
            in_phase.state.phase = one  # type: ignore[assignment] # phases are numbers to those who ask
            yield f"{'TRAIN' if one == TRAIN else 'TEST'} net", in_phase, path, None
        return
    param = read_solver(path, text, made_up)
    check_param(param, path)
    if to_train:
        check_max_iter(param, path)
        for check in (check_prefix, check_solver_mode):
            try:
                check(param, path)
            except (ConfigError, DeviceError) as error:
                log.warning("%s", error)
    train, tests = net_sources(param, path, made_up)
    roles = ["train net", *(f"test net #{k}" for k in range(len(tests)))]
    for role, source in zip(roles, (train, *tests), strict=True):
        if phase in (None, source.param.state.phase):
            yield role, source.param, source.path, param


def _phases(net: NetParameter) -> list[int]:
    """Return both phases if the rules of a net speak of them, without one in which no layer gives
    data in the state of `net`; TEST if they do not, or if only TEST is named in a net of inputs.
    """
    included, excluded = (
        {rule.phase for layer in net.layer for rule in rules(layer) if rule.HasField("phase")}
        for rules in (attrgetter("include"), attrgetter("exclude"))
    )
    sources = [layer for layer in net.layer if not layer.bottom]
    deploys = all(layer.type == "Input" for layer in sources)
    if not excluded and (not included or (included == {TEST} and deploys)):
        return [TEST]
    fed = list[int]()
    for phase in (TRAIN, TEST):
        state = NetState(phase=phase, level=net.state.level, stage=net.state.stage)
        includes = [rule for layer in sources for rule in layer.include if rule.phase == phase]
        if any(is_included(layer, state) for layer in sources):
            fed.append(phase)
        elif stages := [stage for rule in includes for stage in rule.stage]:
            name = "TRAIN" if phase == TRAIN else "TEST"
            log.warning("no %s net: it has data only with --stage %s", name, stages[0])
    return fed or [TRAIN, TEST]


def layers_of(net: Net, gpu: bool = False) -> Iterator[LayerInfo]:
    """Yield the infos of a net's layers, Caffe's own splits included; with `gpu` also of a GPU."""
    seen: set[int] = set()
    runs = {i: step.layers for step in net.steps for i in step.layers} if gpu else {}
    for i, node in enumerate(net.nodes):
        layer, memory = node.layer, 0
        for top in node.tops:
            if id(top.data_memory) not in seen:
                seen.add(id(top.data_memory))
                memory += top.count * top.dtype.itemsize
        bottoms, tops = [b.count for b in node.bottoms], [t.count for t in node.tops]
        macs = layer.macs(bottoms, tops)
        yield LayerInfo(
            node.name,
            layer.type,
            dict(zip(node.top_names, (top.shape for top in node.tops), strict=True)),
            sum(blob.count for blob in layer.blobs),
            memory,
            2 * macs + (sum(tops) if macs and len(layer.blobs) > 1 else 0),
            _on_gpu(net, node, runs.get(i, ())) if gpu else None,
            macs,
        )


def _on_gpu(net: Net, node: Node, run: Sequence[int]) -> LayerOnGpu:
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


def mebibytes(count: int) -> str:
    """Return a number of bytes as text."""
    return f"{count / 2**20:.2f} MiB"


def gibibytes(count: int) -> str:
    """Return a large number of bytes as text."""
    return f"{count / 2**30:.2f} GiB"


def si(count: int) -> str:
    """Return a large number as text: 18.43 M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return str(count)
